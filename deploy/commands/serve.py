"""``sluice serve``: a whole application on this machine."""

from __future__ import annotations

import difflib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from pydantic import SecretStr

from sluice.deploy.commands.options import CONFIG_FILE, Exit, Failure, load
from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import (
    KEY_VARIABLE,
    LocalRun,
    RayEndedError,
    StartError,
    StoppedError,
    base_url,
    check,
    curl_line,
    noted,
    state_folder,
    stop_signals,
)
from sluice.deploy.migration import VLLM_KEY_VARIABLE, add_flags
from sluice.deploy.progress import Progress
from sluice.deploy.supervisor import Supervised
from sluice.replica.vllm_args import long_flag, parse_flags
from sluice.router.batches.byte_store import make_folder
from sluice.router.config import AdminConfig

# The folder of files and batches of a `sluice serve` without a configured one.


def with_batches_folder(config: SluiceConfig) -> SluiceConfig:
    """The configuration with a private folder that the next run on this port finds again, unless
    one is configured or cannot be made, or no class is there for batches."""
    batches = config.router.batches
    if batches.directory is not None or batches.service_class not in config.router.classes:
        return config
    try:
        folder = state_folder().absolute() / "batches" / str(config.router.port)
        make_folder(folder)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return config
    batches = batches.model_copy(update={"directory": folder})
    router = config.router.model_copy(update={"batches": batches})
    return config.model_copy(update={"router": router})


# The generated admin key of a run without a configured one, and the address of the live page.


def with_admin_key(config: SluiceConfig) -> tuple[SluiceConfig, str | None]:
    """The configuration with a generated admin key, and the key, unless one is configured or not
    needed."""
    admin = config.router.admin
    if admin.access != "key" or admin.keys or admin.keys_file:
        return config, None
    key = secrets.token_urlsafe(32)
    made = AdminConfig(keys=(SecretStr(key),))
    router = config.router.model_copy(update={"admin": made})
    return config.model_copy(update={"router": router}), key


def page_address(config: SluiceConfig, url: str, key: str | None) -> str | None:
    """The address of the live page, if it is on. Browsers never send a URL's fragment, which has
    the key."""
    if config.router.admin.access == "off":
        return None
    return f"{url}/ui" if key is None else f"{url}/ui#key={key}"


_PLACES = {
    "engine": ("engine", "kind"),
    "policy": ("engine", "policy"),
    "replicas": ("replica", "count"),
    "host": ("router", "host"),
    "port": ("router", "port"),
}
"""Where the value of each flag stands in the configuration."""


class _Serve(click.Command):
    """A command whose unknown options are vLLM's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, [*map(long_flag, args)])
        own = [option for each in self.get_params(ctx) for option in each.opts]
        for word in ctx.params["words"]:
            name = word.partition("=")[0]
            if name.startswith("--") and (near := difflib.get_close_matches(name, own, 1, 0.8)):
                raise click.NoSuchOption(name, possibilities=near, ctx=ctx)
        return rest


@click.command(cls=_Serve, context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="[MODEL] [VLLM_FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--replicas", type=int, help="Replicas of the engine; default: 1 of MODEL, else 2.")
@click.option("--engine", type=click.Choice(["vllm", "simulated"]), help="The engine.")
@click.option("--policy", help="Local batch policy, see `sluice policies`.")
@click.option("--host", help="Address that HTTP listens on; default: 127.0.0.1.")
@click.option("--port", type=int, help="Port that HTTP listens on; default: 8000.")
@click.option(
    "--config", "path", type=CONFIG_FILE, help="YAML configuration; the other flags override it."
)
@click.option(
    "--drain-seconds",
    "drain_s",
    type=click.FloatRange(min=0, max=3600),
    default=30.0,
    show_default=True,
    help="Most seconds for running requests at the end; a second Ctrl-C ends them at once.",
)
def serve(words: tuple[str, ...], path: Path | None, drain_s: float, **flags: Any) -> None:
    """Serve a model on this machine until Ctrl-C or SIGTERM.

    MODEL is a path or an id of the hub; without it a small local model is served. Flags of `vllm
    serve` go to the engine as they are. In place of MODEL a configuration can stand, a .yaml file.

    It starts a Ray instance of its own, and stops all of it again.

    \b
    Examples:
      sluice serve
      sluice serve Qwen/Qwen3-8B --tensor-parallel-size 2 --max-model-len 16384
      sluice serve --engine simulated --replicas 4
      sluice serve sluice.yaml --port 9000
    """
    model = words[0] if words and not words[0].startswith("-") else None
    words = words[0 if model is None else 1 :]
    if model is not None and model.endswith((".yaml", ".yml")):
        if path is not None:
            raise click.UsageError(f"there are two configurations: {model} and --config {path}")
        path = Path(CONFIG_FILE.convert(model, None, click.get_current_context()))
        model = None
    overrides = _overrides(flags)
    _add_vllm(overrides, model, words, alone=path is None)
    config = load(path, overrides)
    if config.engine.kind != "vllm" and (given := overrides.get("engine", {}).get("vllm_args")):
        raise click.UsageError(f"--{next(iter(given))}: no such option of a simulated engine")
    config, admin_key = with_admin_key(with_batches_folder(config))
    progress = Progress(config)
    report = progress.line
    url = base_url(config)
    try:
        check(config)
    except StartError as error:
        raise Failure(Exit.FAILED, str(error)) from error
    with stop_signals() as stop:
        application = Supervised(config, progress)
        try:
            application.start(stop)
            with noted(LocalRun(address=url, key=admin_key)):
                key = f" with one of your API keys in {KEY_VARIABLE}"
                report(f"ready at {url}/v1, try{'' if config.router.is_open else key}:")
                click.echo(curl_line(config))
                page = page_address(config, url, admin_key)
                if page is not None:
                    report(f"live page: {page}")
                if config.router.batches.directory is not None:
                    report(f"files and batches: {config.router.batches.directory}")
                report("Ctrl-C stops")
                application.wait(stop)
                application.stop(drain_s, stop)
        except StoppedError:
            pass
        except (StartError, RayEndedError) as error:
            raise Failure(Exit.FAILED, str(error)) from error
        finally:
            application.end()


def _overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, nested as in the configuration file."""
    nested: dict[str, Any] = {}
    for flag, value in flags.items():
        if value is not None:
            section, field = _PLACES[flag]
            nested.setdefault(section, {})[field] = value
    return nested


def _add_vllm(
    overrides: dict[str, Any], model: str | None, words: Sequence[str], alone: bool
) -> None:
    """Lay ``model`` and vLLM's flags in ``words`` over ``overrides``. ``alone``: there is no
    configuration file."""
    try:
        flags = parse_flags(words)
    except ValueError as error:
        raise click.UsageError(f"{error}: MODEL comes first, before the flags of vLLM") from None
    if model is not None:
        flags["model"] = model
    if alone and "api-key" not in flags and (key := os.environ.get(VLLM_KEY_VARIABLE)):
        flags["api-key"] = key
    try:
        lacking = add_flags(overrides, flags)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if lacking:
        raise click.UsageError(f"not for vLLM: {'; '.join(lacking)}")
    if alone and "model" in flags:  # one engine, as `vllm serve` has it
        overrides.setdefault("replica", {}).setdefault("count", 1)
