"""``sluice status``: whether an application serves as it should."""

from __future__ import annotations

import json

import click
from rich.table import Table

from sluice.deploy.commands.admin import AdminApi, admin_options
from sluice.deploy.commands.exits import Exit, Failure
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.fleet_tables import (
    class_tables,
    headline,
    notes,
    problems,
    promise_tables,
    replica_tables,
)
from sluice.deploy.tables import print_table


@click.command()
@admin_options
@json_option
def status(address: str, key: str | None, as_json: bool) -> None:
    """Say whether a running application serves as it should.

    The exit code is 0 where every model's controller answers and at least one of its replicas takes
    requests and has reported lately, and 1 otherwise. --json prints the admin API's answer on the
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
        click.echo(headline(fleet).plain)
        for note in notes(fleet):
            click.echo(note)
        for part in (*replica_tables(fleet), *class_tables(fleet), *promise_tables(fleet)):
            if isinstance(part, Table):
                print_table(part)
            else:
                click.echo(part.plain)
    if wrong:
        raise Failure(Exit.FAILED, "; ".join(wrong))
