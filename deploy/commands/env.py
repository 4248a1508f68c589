"""``sluice env``: the environment in which Ray starts on each node of a cluster."""

from __future__ import annotations

import json
import shlex

import click

from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.ray_settings import TUNED


@click.command()
@json_option
def env(as_json: bool) -> None:
    """Print the environment that Ray needs on each node of a cluster, as commands of a shell.

    `sluice serve` sets it by itself.

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
