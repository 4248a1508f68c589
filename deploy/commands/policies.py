"""``sluice policies``: the policies that can be configured."""

from __future__ import annotations

import json
from itertools import groupby

import click
from rich.table import Table

from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.policies import policies as all_policies
from sluice.deploy.tables import print_table


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
    for kind, entries in groupby(listed, key=lambda entry: entry["kind"]):
        table = Table("name", "source", "options", title=kind, title_justify="left")
        for entry in entries:
            options = "\n".join(f"{name} = {o['default']}" for name, o in entry["options"].items())
            table.add_row(entry["name"], entry["source"], options)
        print_table(table)
