"""``sluice policies``: what can be chosen."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from deploy.commands.options import as_json as json_option
from deploy.policies import policies as all_policies


@click.command()
@json_option
def policies(as_json: bool) -> None:
    """List every policy with its source and its options.

    \b
    Examples:
      sluice policies
      sluice policies --json
    """
    listed = [policy._asdict() for policy in all_policies()]
    if as_json:
        click.echo(json.dumps(listed, indent=2, default=str))
        return
    table = Table("kind", "name", "source", "options")
    for entry in listed:
        options = "\n".join(f"{name} = {o['default']}" for name, o in entry["options"].items())
        table.add_row(entry["kind"], entry["name"], entry["source"], options)
    Console().print(table)
