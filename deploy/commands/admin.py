"""The commands' client of the admin API: its address, its key, and the shapes of its answers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import quote

import click
from pydantic import BaseModel, Field, ValidationError
from rich.console import Console
from rich.table import Table

from sluice.deploy.commands.options import Exit, Failure, address_option, talking
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.json_http import AnswerError, JsonServer
from sluice.deploy.local import local_runs
from sluice.deploy.tables import (
    class_tables,
    headline,
    notes,
    print_table,
    problems,
    promise_tables,
    replica_tables,
)


class _Decision(BaseModel):
    p99: float | None


class _Up(BaseModel):
    up: Literal[True]
    policy: str
    admission: str
    decision_ms: _Decision


class _Down(BaseModel):
    up: Literal[False]


class _Quarantine(BaseModel):
    reason: str
    state: str
    since_ms: float
    retry_in_ms: float | None


class _Row(BaseModel):
    replica_id: str
    model: str
    condition: str
    drain: str | None
    quarantine: _Quarantine | None
    report_age_ms: float
    waiting: int
    running: int
    reserved: int
    prefill_ms: float | None
    kv_usage: float | None
    pab_tokens: float | None
    last_step_ms: float | None
    predicted_step_ms: float | None
    preemptions: int


class _Ttft(BaseModel):
    p50: float | None
    p95: float | None


class _Admission(BaseModel):
    guaranteed: float
    best_effort: float
    refused: float


class _Class(BaseModel):
    name: str = Field(alias="class")
    model: str
    requests: float
    attainment: float | None
    tdg: float | None
    ttft_ms: _Ttft
    admission: _Admission


class _Fleet(BaseModel):
    """The fields of the fleet that commands show; the API returns more."""

    models: dict[str, _Up | _Down]
    unavailable: list[str]
    replicas: list[_Row]
    classes: list[_Class]


class _Drained(BaseModel):
    """The API's answer when it has closed a replica or opened it again."""

    replica_id: str
    draining: bool
    left: int
    remembered: bool


class UsageRow(BaseModel):
    """What a tenant has used in a class."""

    model: str
    client: str
    service_class: str = Field(alias="class")
    engine_seconds: float
    gpu_seconds: float
    kv_block_seconds: float
    promised: float
    kept: float


class UsageAnswer(BaseModel):
    """The API's answer on usage, and a file of `sluice usage --format json`."""

    since: str
    until: str
    gpu_hour_price: float | None
    currency: str
    rows: list[UsageRow]


_ADDRESS = "http://127.0.0.1:8000"


def _local_address() -> str:
    """The address of the one application that `sluice serve` runs for this user, else
    ``_ADDRESS``."""
    addresses = {run.address for run in local_runs()}
    if len(addresses) <= 1 or _ADDRESS in addresses:
        return _ADDRESS if _ADDRESS in addresses else next(iter(addresses), _ADDRESS)
    raise Failure(
        Exit.USAGE, f"several applications run here; --address is one of {sorted(addresses)}"
    )


def _local_key(address: str) -> str | None:
    """The key that `sluice serve` has made for this user's application at ``address``."""
    wanted = address.replace("//localhost:", "//127.0.0.1:")
    return next((run.key for run in local_runs() if run.address == wanted), None)


_address = address_option(
    f"{_ADDRESS}, or where `sluice serve` runs",
    "SLUICE_ADDRESS",
    "The application, as clients reach it.",
    _local_address,
)


def _check_key(_context: click.Context, _parameter: click.Parameter, key: str | None) -> str | None:
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise click.BadParameter("an admin key is printable ASCII without spaces, and not empty")
    return key


_key = click.option(
    "--key",
    envvar="SLUICE_ADMIN_KEY",
    show_envvar=True,
    callback=_check_key,
    help="An admin key. Other users of this machine can read the command line, so prefer the "
    "variable. The key that `sluice serve` generated for this user is found without either.",
)


def admin_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--address`` and ``--key``."""
    with_key: Callable[..., None] = _key(command)
    with_both: Callable[..., None] = _address(with_key)
    return with_both


class LastReplicaError(Exception):
    """The replica is the last one of its model that takes requests, and was not drained."""


class AdminApi:
    """The admin API of one application. Every method raises ``Failure`` without an answer, or if
    the key or the request is refused. ``key``: default is the one that `sluice serve` generated
    there."""

    def __init__(self, address: str, key: str | None) -> None:
        self._server = JsonServer(address, _local_key(address) if key is None else key)

    def fleet(self) -> dict[str, Any]:
        """Every model's controller, replicas and classes."""
        return self._ask("GET", "/fleet", _Fleet)

    def usage(self) -> dict[str, Any]:
        """Engine time by model, tenant and class."""
        return self._ask("GET", "/usage", UsageAnswer)

    def drain(self, replica_id: str, force: bool = False) -> dict[str, Any]:
        """Close a replica to new requests. Raises LastReplicaError: the last of its model, without
        ``force``."""
        query = "?force=true" if force else ""
        return self._ask("POST", f"{_drain_of(replica_id)}{query}", _Drained)

    def take_back(self, replica_id: str) -> dict[str, Any]:
        """Open a replica to new requests again."""
        return self._ask("DELETE", _drain_of(replica_id), _Drained)

    def _ask(self, method: str, path: str, shape: type[BaseModel]) -> dict[str, Any]:
        hint = (
            "give --key, or set SLUICE_ADMIN_KEY, to one of the configuration's router.admin.keys"
        )
        with talking("The application", self._server.address, hint):
            try:
                answer = self._server.ask(method, f"/admin/v1{path}")
            except AnswerError as error:
                if error.status == HTTPStatus.CONFLICT:
                    raise LastReplicaError from None
                raise
        try:
            shape.model_validate(answer)
        except ValidationError:
            raise Failure(
                Exit.FAILED,
                f"{self._server.address} answers, but not as Sluice does: is --address right, and "
                "is it the version of this command?",
            ) from None
        checked: dict[str, Any] = answer
        return checked


def _drain_of(replica_id: str) -> str:
    return f"/replicas/{quote(replica_id, safe='')}/drain"


# ``sluice status``: whether an application serves as it should.


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


# ``sluice drain``: close a replica to new requests, and wait until it is empty.

POLL_S = 0.5
GONE_AFTER_S = 5.0
"""A replica counts as ended if it is unknown for this long, seconds: a restarted controller knows
no replicas for a moment."""

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
    """Send a replica no new requests, and wait until it is empty.

    REPLICA is a name that `sluice status` shows. It stays closed, also over a restart of the
    controller, until --undo. Serve neither stops nor replaces it for that: look at the machine, or
    take it away. Before the last replica of a model is drained the command asks.

    \b
    Examples:
      sluice drain k3jx8w2p
      sluice drain k3jx8w2p --no-wait
      sluice drain k3jx8w2p --undo
    """
    api = AdminApi(address, key)
    answer = api.take_back(replica_id) if undo else _close(api, replica_id, yes)
    if not answer["remembered"]:
        click.echo(
            f"{replica_id} has not confirmed it yet. If the controller restarts before it does, "
            "repeat the command.",
            err=True,
        )
    if wait and not undo:
        answer = _wait(api, answer, timeout_s)
    if as_json:
        click.echo(json.dumps({name: answer[name] for name in ("replica_id", "draining", "left")}))
    elif not answer["draining"]:
        click.echo(f"{replica_id} takes requests again")
    elif answer["left"]:
        click.echo(f"{replica_id} takes no new requests; {answer['left']} left")
    else:
        click.echo(f"{replica_id} is empty and takes no new requests")


def _close(api: AdminApi, replica_id: str, yes: bool) -> dict[str, Any]:
    """Drain a replica; the last one of its model only after confirmation. Raises Failure:
    declined."""
    try:
        return api.drain(replica_id, yes)
    except LastReplicaError:
        click.echo(
            f"{replica_id} is the last replica of its model that takes requests. Once it is "
            "drained, every request for the model gets a 503, until a replica is taken back with "
            "--undo or a new one starts.",
            err=True,
        )
    try:
        sure = click.confirm("Drain it?", err=True)
    except click.Abort:  # there is no terminal to ask on
        sure = False
    if not sure:
        raise Failure(Exit.FAILED, f"{replica_id} was not drained; --yes drains it without asking")
    return api.drain(replica_id, force=True)


def _wait(api: AdminApi, answer: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Wait until no requests are left; the API's last answer. Raises Failure: it took too long, the
    drain was undone, or a query failed permanently."""
    replica_id = answer["replica_id"]
    started_s, shown, missing_s, failed = time.monotonic(), -1, 0.0, ""
    err = Console(stderr=True)
    while answer["left"]:
        if answer["left"] != shown:
            shown = answer["left"]
            err.print(f"{shown} requests left", highlight=False)
        if time.monotonic() - started_s > timeout_s:
            raise Failure(
                Exit.TIMED_OUT,
                f"{replica_id} still has {answer['left']} requests after {timeout_s:g} s{failed}; "
                "it takes no new ones: wait again with the same command, or take it back with "
                "--undo",
            )
        time.sleep(POLL_S)
        try:
            found = _look(api, replica_id)
        except Failure as failure:
            if not failure.passing:
                raise
            if not failed:
                err.print("no answer for now", highlight=False)
            failed = f", and the last query failed: {failure.message}"
            continue
        failed = ""
        missing_s = 0.0 if found is not None else missing_s + POLL_S
        if missing_s >= GONE_AFTER_S:
            err.print("the replica is unknown now: it ended or is unreachable", highlight=False)
            return {"replica_id": replica_id, "draining": True, "left": 0}
        answer = found or answer
    return answer


def _look(api: AdminApi, replica_id: str) -> dict[str, Any] | None:
    """The requests left at the replica now; ``None`` if no controller knows it. Raises Failure."""
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
