"""``sluice status``: whether an application serves as it should."""

from __future__ import annotations

import json

import click
from rich.console import Console

from deploy.commands.admin import AdminApi, admin_options
from deploy.commands.exits import Exit, Failure
from deploy.commands.options import as_json as json_option
from deploy.fleet_tables import class_table, headline, notes, problems, replica_table


@click.command()
@admin_options
@json_option
def status(address: str, key: str | None, as_json: bool) -> None:
    """Say whether a running application serves as it should.

    The exit code is 0 where every model's controller answers and at least one of its replicas takes
    requests and has reported lately, and 1 otherwise. --json prints what the admin API says of the
    fleet.

    \b
    Examples:
      sluice status
      SLUICE_ADMIN_KEY=... sluice status --address https://llm.example.com
      sluice status --json
    """
    fleet = AdminApi(address, key).fleet()
    wrong = problems(fleet)
    if as_json:
        click.echo(json.dumps(fleet, indent=2))
    else:
        console = Console(soft_wrap=True)
        console.print(headline(fleet))
        for note in notes(fleet):
            click.echo(note)
        console.print(replica_table(fleet))
        if fleet["classes"]:
            console.print(class_table(fleet))
    if wrong:
        raise Failure(Exit.FAILED, "; ".join(wrong))
