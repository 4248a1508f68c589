"""``sluice top``: the replicas and classes, again and again."""

from __future__ import annotations

import json
import time
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sluice.deploy.commands.admin import AdminApi, admin_options
from sluice.deploy.commands.exits import Exit, Failure
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.fleet_tables import overview


@click.command()
@admin_options
@click.option("--once", is_flag=True, help="Print once and end; so it does without a terminal.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.5, max=3_600),
    default=2.0,
    show_default=True,
    help="Between two looks, seconds.",
)
@json_option
def top(address: str, key: str | None, once: bool, interval_s: float, as_json: bool) -> None:
    """Show every replica and service class of a running application, live, until Ctrl-C.

    Of each replica: its requests, the work of the promised prefills, the KV cache in use, the
    tokens of prefill that it could still promise (PAB), and its last step against the prediction.
    With --json it prints the admin API's answer, once.

    \b
    Examples:
      sluice top
      sluice top --once
      sluice top --once --json
    """
    api = AdminApi(address, key)
    fleet = api.fleet()
    console = Console()
    if as_json:
        click.echo(json.dumps(fleet, indent=2))
    elif once or not console.is_terminal:
        console.print(overview(fleet, console.width))
    else:
        _watch(api, fleet, interval_s, console)


def _watch(api: AdminApi, fleet: dict[str, Any], interval_s: float, console: Console) -> None:
    """Show the fleet until Ctrl-C. If a query fails, the last state stays with a note on that."""
    try:
        with Live(overview(fleet, console.width), console=console, screen=True) as live:
            while True:
                time.sleep(interval_s)
                try:
                    fleet = api.fleet()
                    live.update(overview(fleet, console.width))
                except Failure as failure:
                    if failure.exit_code == Exit.REFUSED:
                        raise
                    old = Text(f"this is old: {failure.message}", style="red")
                    live.update(Group(old, overview(fleet, console.width)))
    except KeyboardInterrupt:
        pass
