"""``sluice keys``: make API keys and their digests, and check a file of them."""

from __future__ import annotations

import getpass
import json
import secrets
import sys
from pathlib import Path

import click
from pydantic import SecretStr, ValidationError

from sluice.deploy.commands.exits import Exit, Failure
from sluice.deploy.commands.options import CONFIG_FILE, CONTEXT
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.config import load_config
from sluice.router.config import RouterConfig
from sluice.router.tenancy.auth import KeyRing
from sluice.router.tenancy.keys import ApiKey, check_entries, digest_of, is_weak

KEY_BYTES = 32
"""Random bytes of a new key."""


@click.group(context_settings=CONTEXT)
def keys() -> None:
    """Make API keys and their digests, and check a file of them."""


@keys.command()
@click.option("--name", help="What the client is called in metrics.")
def new(name: str | None) -> None:
    """Make a key. The key goes to standard output and is shown only once; the entry for
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
    """Print the entry for `router.api_keys` or a key file that accepts a key without containing it.

    The key is read from standard input, so that it is in no shell history and no process list; on a
    terminal the command asks for it.

    \b
    Examples:
      sluice keys hash --name acme
      sluice keys hash < key.txt >> keys.yaml
    """
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline(1 << 16)
    click.echo(_entry(key.strip("\r\n"), name))


@keys.command()
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
def check(path: Path, config_path: Path | None, opens: str, as_json: bool) -> None:
    """Check FILE, a YAML list of keys, before routers read it. Routers keep their previous keys if
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
