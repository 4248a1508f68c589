"""``sluice drain``: close a replica to new requests, and wait until it is empty."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import click
from rich.console import Console

from sluice.deploy.commands.admin import AdminApi, LastReplicaError, admin_options
from sluice.deploy.commands.exits import Exit, Failure
from sluice.deploy.commands.options import as_json as json_option

POLL_S = 0.5
GONE_AFTER_S = 5.0
"""A replica counts as ended if it is unknown for this long, seconds: a restarted controller knows
no replicas for a moment."""

_LAST = (
    "the last replica of its model that takes requests. Once it is drained, every request for the "
    "model gets a 503, until a replica is taken back with --undo or a new one starts."
)

_NOT_HEARD = (
    "{} has not confirmed it yet. If the controller restarts before it does, repeat the command."
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")


def _check_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise click.BadParameter("a replica's name has letters, digits, dots and dashes only")
    return name


@click.command()
@click.argument("replica_id", metavar="REPLICA", callback=_check_name)
@admin_options
@click.option("--undo", is_flag=True, help="Let it take requests again.")
@click.option("--yes", is_flag=True, help="Do not ask before the last replica is drained.")
@click.option("--wait/--no-wait", default=True, help="Wait until it is empty, or only close it.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Longest wait, seconds.",
)
@json_option
def drain(
    replica_id: str,
    address: str,
    key: str | None,
    undo: bool,
    yes: bool,
    wait: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Send REPLICA no new requests, and wait until it has finished those that it has.

    REPLICA is a name that `sluice top --once` shows. It stays closed, also over a restart of the
    controller, until --undo. Serve neither stops nor replaces it for that: look at the machine, or
    take it away. Before the last replica of a model is drained the command asks.

    \b
    Examples:
      sluice drain k3jx8w2p
      sluice drain k3jx8w2p --no-wait
      sluice drain k3jx8w2p --undo
    """
    api = AdminApi(address, key)
    told = api.take_back(replica_id) if undo else _close(api, replica_id, yes)
    if not told["remembered"]:
        click.echo(_NOT_HEARD.format(replica_id), err=True)
    if undo or not wait:
        _say(told, as_json)
        return
    told = _wait(api, told, timeout_s)
    _say(told, as_json)


def _close(api: AdminApi, replica_id: str, yes: bool) -> dict[str, Any]:
    """Drain a replica; the last one of its model only after confirmation.

    Raises:
        Failure: the user declined, or there is no terminal to ask on.
    """
    try:
        return api.drain(replica_id, yes)
    except LastReplicaError:
        click.echo(f"{replica_id} is {_LAST}", err=True)
    try:
        sure = click.confirm("Drain it?", err=True)
    except click.Abort:  # there is no terminal to ask on
        sure = False
    if not sure:
        raise Failure(Exit.FAILED, f"{replica_id} was not drained; --yes drains it without asking")
    return api.drain(replica_id, force=True)


def _wait(api: AdminApi, told: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Wait until no requests are left. ``told`` is the API's first answer; returns its last.

    Raises:
        Failure: it took too long, the drain was undone, or a query failed permanently.
    """
    replica_id = told["replica_id"]
    started_s, shown, missing_s, trouble = time.monotonic(), -1, 0.0, ""
    err = Console(stderr=True)
    while told["left"]:
        if told["left"] != shown:
            shown = told["left"]
            err.print(f"{shown} requests left", highlight=False)
        if time.monotonic() - started_s > timeout_s:
            raise Failure(
                Exit.TIMED_OUT,
                f"{replica_id} still has {told['left']} requests after {timeout_s:g} s{trouble}; "
                "it takes no new ones: wait again with the same command, or take it back with "
                "--undo",
            )
        time.sleep(POLL_S)
        try:
            found = _look(api, replica_id)
        except Failure as failure:
            if not failure.passing:
                raise
            if not trouble:
                err.print("no answer for now", highlight=False)
            trouble = f", and the last query failed: {failure.message}"
            continue
        trouble = ""
        missing_s = 0.0 if found is not None else missing_s + POLL_S
        if missing_s >= GONE_AFTER_S:
            err.print("the replica is unknown now: it ended or is unreachable", highlight=False)
            return {"replica_id": replica_id, "draining": True, "left": 0}
        told = found or told
    return told


def _look(api: AdminApi, replica_id: str) -> dict[str, Any] | None:
    """The requests left at the replica now; ``None`` if no controller knows it.

    Raises:
        Failure: its controller does not answer now, or the drain was undone.
    """
    fleet = api.fleet()
    row = next((row for row in fleet["replicas"] if row["replica_id"] == replica_id), None)
    if row is None and fleet["unavailable"]:
        silent = ", ".join(fleet["unavailable"])
        raise Failure(Exit.FAILED, f"the controller of {silent} does not answer", passing=True)
    if row is None:
        return None
    if row["drain"] is None:
        raise Failure(Exit.FAILED, f"{replica_id} takes requests again: the drain was undone")
    left = row["waiting"] + row["running"] + row["reserved"]
    return {"replica_id": replica_id, "draining": True, "left": left}


def _say(told: dict[str, Any], as_json: bool) -> None:
    plain = {name: told[name] for name in ("replica_id", "draining", "left")}
    if as_json:
        click.echo(json.dumps(plain))
    elif not plain["draining"]:
        click.echo(f"{plain['replica_id']} takes requests again")
    elif plain["left"]:
        click.echo(f"{plain['replica_id']} takes no new requests; {plain['left']} left")
    else:
        click.echo(f"{plain['replica_id']} is empty and takes no new requests")
