"""The command line: ``sluice serve``, ``sluice policies``, ``sluice config``, ``sluice bench``,
``sluice simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.cli import bench, simulate
from deploy.config import SluiceConfig, load_config
from deploy.local import StartError, StoppedError, base_url, curl_line, running, stop_signals
from deploy.policies import policies as all_policies

_err = Console(stderr=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice")
def main() -> None:
    """Sluice: an SLO-aware serving control plane for large language models on Ray."""


main.add_command(bench)
main.add_command(simulate)


@main.command()
@click.option("--model", help="Path or hub id of the model; default: a small local one.")
@click.option("--replicas", type=int, help="Replicas of the engine.")
@click.option("--engine", type=click.Choice(["vllm", "simulated"]), help="The engine.")
@click.option("--policy", help="Local batch policy, see `sluice policies`.")
@click.option("--host", help="Address that HTTP listens on.")
@click.option("--port", type=int, help="Port that HTTP listens on.")
@click.option(
    "--config",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML configuration; the other flags override it.",
)
def serve(path: Path | None, **flags: Any) -> None:
    """Serve a model on this machine until Ctrl-C."""
    config = _load(path, _overrides(flags))

    def report(line: str) -> None:
        _err.print(f"[dim]sluice:[/dim] {line}", highlight=False)

    with stop_signals() as stop:
        try:
            with running(config, stop, report):
                report(f"ready at {base_url(config)}/v1, try:")
                click.echo(curl_line(config))
                report("Ctrl-C stops")
                stop.wait()
        except StoppedError:
            pass
        except StartError as error:
            raise click.ClickException(str(error)) from error


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def policies(as_json: bool) -> None:
    """List every policy with its source and its options."""
    listed = [policy._asdict() for policy in all_policies()]
    if as_json:
        click.echo(json.dumps(listed, indent=2, default=str))
        return
    table = Table("kind", "name", "source", "options")
    for entry in listed:
        options = "\n".join(f"{name} = {o['default']}" for name, o in entry["options"].items())
        table.add_row(entry["kind"], entry["name"], entry["source"], options)
    Console().print(table)


@main.command()
@click.option(
    "--config",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML configuration to check; default: none, so the defaults are shown.",
)
@click.option("--schema", is_flag=True, help="Print the JSON schema of the configuration.")
def config(path: Path | None, schema: bool) -> None:
    """Check a configuration and print it with every default filled in."""
    import yaml

    if schema:
        click.echo(json.dumps(SluiceConfig.model_json_schema(), indent=2))
        return
    click.echo(yaml.safe_dump(_load(path, {}).model_dump(mode="json"), sort_keys=False).rstrip())


def _overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, nested as in the configuration file."""
    places = {
        "model": ("engine", "model"),
        "engine": ("engine", "kind"),
        "policy": ("engine", "policy"),
        "replicas": ("replica", "count"),
        "host": ("router", "host"),
        "port": ("router", "port"),
    }
    nested: dict[str, Any] = {}
    for flag, value in flags.items():
        if value is not None:
            section, field = places[flag]
            nested.setdefault(section, {})[field] = value
    return nested


def _load(path: Path | None, overrides: dict[str, Any]) -> SluiceConfig:
    try:
        return load_config(path, overrides)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
