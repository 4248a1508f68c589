"""``sluice config``: check a configuration, show it whole, print its schema."""

from __future__ import annotations

import json
from pathlib import Path

import click
import yaml

from sluice.deploy.commands.exits import Exit
from sluice.deploy.commands.options import CONFIG_FILE, CONTEXT, load
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.config import SluiceConfig, load_config
from sluice.deploy.model_check import engine_faults


@click.group(context_settings=CONTEXT)
def config() -> None:
    """Check a configuration, show it with every default, or print its schema."""


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
    """Print the configuration in FILE with every default filled in; without FILE, the defaults.

    Keys are masked, so such a print cannot be served where the file had some.

    \b
    Examples:
      sluice config show
      sluice config show sluice.yaml
    """
    data = load(path).model_dump(mode="json")
    click.echo(yaml.safe_dump(data, sort_keys=False).rstrip())


@config.command()
def schema() -> None:
    """Print the JSON schema of the configuration: each field's meaning, bounds and default.

    \b
    Example:
      sluice config schema > sluice.schema.json
    """
    click.echo(json.dumps(SluiceConfig.model_json_schema(), indent=2))
