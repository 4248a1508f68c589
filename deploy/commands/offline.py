"""The commands that need no running application: ``config``, ``env``, ``keys``, ``policies``."""

from __future__ import annotations

import getpass
import json
import secrets
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from sluice.deploy.commands.options import CONFIG_FILE, Exit, Failure, load
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.config import (
    SluiceConfig,
    engine_faults,
    load_config,
    parse_config,
    read_mapping,
)
from sluice.deploy.migration import Migrated, command_words, from_ray, from_vllm
from sluice.deploy.ray_start import TUNED
from sluice.deploy.tables import print_list
from sluice.router.config import RouterConfig
from sluice.router.tenancy.auth import ApiKey, KeyRing, check_entries, digest_of, is_weak
from sluice.scheduling import admission, autoscaling, batching, routing
from sluice.scheduling.policy import Policy

# ``sluice config``: check a configuration, show it whole, print its schema.


@click.group()
def config() -> None:
    """Check a configuration, or print one."""


@config.command()
@click.argument("path", metavar="FILE", type=CONFIG_FILE)
@json_option
def check(path: Path, as_json: bool) -> None:
    """Check the configuration in FILE without starting anything.

    Every problem is one line: where it is, what was wrong, what is allowed. With --json the answer
    is an object with `valid` and `problems`. The exit code is 0 for a valid file and 1 otherwise.
    Where vLLM is installed, it is asked whether an engine takes its settings, which takes some
    seconds.

    \b
    Examples:
      sluice config check sluice.yaml
      sluice config check sluice.yaml --json
    """
    try:
        problems = engine_faults(load_config(path))
    except (ValueError, OSError) as error:
        lines = str(error).splitlines()
        # The first of several lines only announces the others.
        problems = lines[1:] or lines
    if as_json:
        click.echo(json.dumps({"valid": not problems, "problems": problems}, indent=2))
    elif not problems:
        click.echo(f"{path}: valid")
    else:
        for problem in problems:
            click.echo(f"{path}: {problem}", err=True)
    if problems:
        raise SystemExit(Exit.FAILED)


@config.command()
@click.argument("path", metavar="[FILE]", type=CONFIG_FILE, required=False)
def show(path: Path | None) -> None:
    """Print the configuration in FILE with every default.

    Without FILE it prints the defaults. Keys are masked, so such a print cannot be served where the
    file had some.

    \b
    Examples:
      sluice config show
      sluice config show sluice.yaml
    """
    data = load(path).model_dump(mode="json")
    click.echo(yaml.safe_dump(data, sort_keys=False).rstrip())


@config.command()
def schema() -> None:
    """Print the JSON schema: each field's bounds and default.

    \b
    Example:
      sluice config schema > sluice.schema.json
    """
    click.echo(json.dumps(SluiceConfig.model_json_schema(), indent=2))


@config.command(name="from-vllm", context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def config_from_vllm(words: tuple[str, ...]) -> None:
    """Print as a configuration what a `vllm serve` starts.

    COMMAND is a `vllm serve` or `docker run`, in quotes or not. A comment names each part of it
    that has no counterpart.

    \b
    Examples:
      sluice config from-vllm 'vllm serve Qwen/Qwen3-8B --max-model-len 16384'
      sluice config from-vllm "$(cat start-vllm.sh)" > sluice.yaml
    """
    try:
        _print_migrated(from_vllm(command_words(words[0]) if len(words) == 1 else words))
    except (ValueError, OSError) as error:
        raise Failure(Exit.FAILED, str(error)) from None


@config.command(name="from-ray")
@click.argument("path", metavar="FILE", type=CONFIG_FILE)
def config_from_ray(path: Path) -> None:
    """Print as a configuration what Ray Serve LLM deploys.

    FILE is an LLMConfig, or a file of `serve deploy` with `build_openai_app` or
    `build_pd_openai_app`. A comment names each field that has no counterpart.

    \b
    Example:
      sluice config from-ray llm_config.yaml > sluice.yaml
    """
    try:
        _print_migrated(from_ray(read_mapping(path), path.parent))
    except (KeyError, TypeError, AttributeError) as error:
        raise Failure(Exit.FAILED, f"{path} is no file of Ray Serve LLM: {error}") from None
    except (ValueError, OSError) as error:
        raise Failure(Exit.FAILED, str(error)) from None


def _print_migrated(migrated: Migrated) -> None:
    for line in migrated.lacking:
        click.echo(f"# no counterpart: {line}")
    click.echo(yaml.safe_dump(migrated.config, sort_keys=False).rstrip())
    parse_config(migrated.config)  # says what is still to change


# ``sluice policies``: the policies that can be configured.

# Every policy that can be configured, with its source and options.


class Listed(NamedTuple):
    """A policy as users see it. ``source``: where it was published."""

    kind: str
    name: str
    source: str
    options: dict[str, dict[str, Any]]


def all_policies() -> list[Listed]:
    """All policies, by the configuration's fields that name them."""
    kinds: dict[str, Iterable[type[Policy]]] = {
        "batch": batching.POLICIES.values(),
        "admission": admission.POLICIES.values(),
        "routing": routing.POLICIES.values(),
        "autoscaling": autoscaling.POLICIES.values(),
    }
    return [
        Listed(kind, policy.name, policy.source, _options(policy.Options))
        for kind, registered in kinds.items()
        for policy in registered
    ]


def _options(model: type[BaseModel]) -> dict[str, Any]:
    return {
        field.alias or name: {"default": field.default, "description": field.description or ""}
        for name, field in model.model_fields.items()
    }


@click.command()
@json_option
def policies(as_json: bool) -> None:
    """List every policy with its source and its options.

    \b
    Examples:
      sluice policies
      sluice policies --json
    """
    if as_json:
        listed = [policy._asdict() for policy in all_policies()]
        click.echo(json.dumps(listed, indent=2, default=str))
        return
    rows = (
        (
            each.kind,
            each.name,
            " ".join(f"{n}={o['default']}" for n, o in each.options.items()),
            each.source,
        )
        for each in all_policies()
    )
    print_list(("kind", "name", "options", "source"), rows)


# ``sluice env``: the environment in which Ray starts on each node of a cluster.


@click.command()
@json_option
def env(as_json: bool) -> None:
    """Print the environment that Ray needs on each cluster node.

    It prints commands of a shell. `sluice serve` sets it by itself.

    \b
    Examples:
      eval "$(sluice env)"
      sluice env --json
    """
    if as_json:
        click.echo(json.dumps(dict(TUNED), indent=2))
        return
    for name, value in TUNED.items():
        click.echo(f"export {name}={shlex.quote(value)}")


# ``sluice keys``: make API keys and their digests, and check a file of them.

KEY_BYTES = 32
"""Random bytes of a new key."""


@click.group()
def keys() -> None:
    """Make API keys and their digests, and check a file of them."""


@keys.command()
@click.option("--name", help="What the client is called in metrics.")
def new(name: str | None) -> None:
    """Make a key.

    The key goes to standard output and is shown only once; the entry for
    `router.api_keys` or a key file, which does not contain the key, goes to standard error.

    \b
    Examples:
      sluice keys new --name acme
      sluice keys new --name acme > key.txt 2>> keys.yaml
    """
    key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
    click.echo(key)
    click.echo(_entry(key, name), err=True)


@keys.command(name="hash")
@click.option("--name", help="What the client is called in metrics.")
def hash_key(name: str | None) -> None:
    """Print the entry that accepts a key without containing it.

    It is one for `router.api_keys` or a key file. The key is read from standard input, so that it
    is in no shell history and no process list; on a terminal the command asks for it.

    \b
    Examples:
      sluice keys hash --name acme
      sluice keys hash < key.txt >> keys.yaml
    """
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline(1 << 16)
    click.echo(_entry(key.strip("\r\n"), name))


@keys.command(name="check")
@click.argument("path", metavar="FILE", type=CONFIG_FILE)
@click.option("--config", "config_path", type=CONFIG_FILE, help="Configuration with the classes.")
@click.option(
    "--opens",
    type=click.Choice(["api", "metrics", "admin"]),
    default="api",
    show_default=True,
    help="What the keys are for; only API keys have limits.",
)
@json_option
def check_keys(path: Path, config_path: Path | None, opens: str, as_json: bool) -> None:
    """Check FILE, a YAML list of keys, before routers read it.

    Routers keep their previous keys if
    the file is invalid, and report that only in their log.

    \b
    Examples:
      sluice keys check keys.yaml
      sluice keys check keys.yaml --config sluice.yaml
      sluice keys check admin-keys.yaml --opens admin
    """
    try:
        router = RouterConfig() if config_path is None else load_config(config_path).router
        entries = {
            "api": router.api_keys,
            "metrics": router.metrics.keys,
            "admin": router.admin.keys,
        }[opens]
        classes = router.classes if opens == "api" else None
        accepted = KeyRing(entries, path, classes, opens).count
        problem = None
    except (ValueError, OSError) as error:
        accepted, problem = 0, str(error)
    if as_json:
        result = {"valid": problem is None, "accepted": accepted, "problem": problem}
        click.echo(json.dumps(result, indent=2))
    elif problem is None:
        click.echo(f"{path}: valid, {accepted} keys are accepted")
    else:
        click.echo(problem, err=True)
    if problem is not None:
        raise SystemExit(Exit.FAILED)


def _entry(key: str, name: str | None) -> str:
    """A line of a key file."""
    entry = SecretStr(key)
    try:
        check_entries([entry], (), "the key")
        ApiKey(key=entry, name=name)
    except ValidationError as error:
        raise Failure(Exit.USAGE, f"--name: {error.errors()[0]['msg']}") from None
    except ValueError as error:
        raise Failure(Exit.FAILED, str(error)) from None
    if is_weak(entry):
        click.echo("this key is short: one of `sluice keys new` cannot be guessed", err=True)
    fields = f"sha256: {digest_of(entry).hex()}"
    return f"- {{name: {json.dumps(name)}, {fields}}}" if name else f"- {{{fields}}}"
