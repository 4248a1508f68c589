"""``sluice serve``: a whole application on this machine."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click
from pydantic import SecretStr
from rich.console import Console

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
from sluice.deploy.supervisor import Supervised
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
    "model": ("engine", "model"),
    "engine": ("engine", "kind"),
    "policy": ("engine", "policy"),
    "replicas": ("replica", "count"),
    "host": ("router", "host"),
    "port": ("router", "port"),
}
"""Where the value of each flag stands in the configuration."""


@click.command()
@click.option("--model", help="Path or hub id of the model; default: a small local one.")
@click.option("--replicas", type=int, help="Replicas of the engine.")
@click.option("--engine", type=click.Choice(["vllm", "simulated"]), help="The engine.")
@click.option("--policy", help="Local batch policy, see `sluice policies`.")
@click.option("--host", help="Address that HTTP listens on.")
@click.option("--port", type=int, help="Port that HTTP listens on.")
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
def serve(path: Path | None, drain_s: float, **flags: Any) -> None:
    """Serve a model on this machine until Ctrl-C or SIGTERM.

    It starts a Ray instance of its own, and stops all of it again.

    \b
    Examples:
      sluice serve
      sluice serve --engine simulated --replicas 4
      sluice serve --config sluice.yaml --port 9000
    """
    config, admin_key = with_admin_key(with_batches_folder(load(path, _overrides(flags))))
    err = Console(stderr=True)

    def report(line: str) -> None:
        err.print(f"[dim]sluice:[/dim] {line}", highlight=False, soft_wrap=True)

    url = base_url(config)
    try:
        check(config)
    except StartError as error:
        raise Failure(Exit.FAILED, str(error)) from error
    with stop_signals() as stop:
        application = Supervised(config, report)
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
