"""The commands' client of the admin API: its address, its key, and the shapes of its answers."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import quote

import click
from pydantic import BaseModel, Field, ValidationError

from sluice.deploy.commands.exits import Exit, Failure
from sluice.deploy.commands.options import address_option, talking
from sluice.deploy.json_http import AnswerError, JsonServer
from sluice.deploy.local_runs import local_runs


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


KEY_HINT = "give --key, or set SLUICE_ADMIN_KEY, to one of the configuration's router.admin.keys"

_ADDRESS = "http://127.0.0.1:8000"


def _local_address() -> str:
    """The address of the one application that `sluice serve` runs for this user; ``_ADDRESS`` if
    there is none."""
    addresses = {run.address for run in local_runs()}
    if len(addresses) <= 1 or _ADDRESS in addresses:
        return _ADDRESS if _ADDRESS in addresses else next(iter(addresses), _ADDRESS)
    raise Failure(
        Exit.USAGE, f"several applications run here; --address is one of {sorted(addresses)}"
    )


def _local_key(address: str) -> str | None:
    """The key that `sluice serve` has made for the application at ``address``, if this user runs
    it."""
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
    """The admin API of one application.

    Every method raises ``Failure`` if there is no answer, or if the key or the request is refused.

    Args:
        address: address of the application.
        key: an admin key, if one is needed; default: the one that `sluice serve` generated there.
    """

    def __init__(self, address: str, key: str | None) -> None:
        self._server = JsonServer(address, _local_key(address) if key is None else key)

    def fleet(self) -> dict[str, Any]:
        """Every model's controller, replicas and classes."""
        return self._ask("GET", "/fleet", _Fleet)

    def drain(self, replica_id: str, force: bool = False) -> dict[str, Any]:
        """Close a replica to new requests. Returns the number of requests left there.

        Args:
            force: close it even if it is the last one of its model.

        Raises:
            LastReplicaError: it is the last one, and ``force`` is not set.
        """
        query = "?force=true" if force else ""
        return self._ask("POST", f"{_drain_of(replica_id)}{query}", _Drained)

    def take_back(self, replica_id: str) -> dict[str, Any]:
        """Open a replica to new requests again."""
        return self._ask("DELETE", _drain_of(replica_id), _Drained)

    def _ask(self, method: str, path: str, shape: type[BaseModel]) -> dict[str, Any]:
        with talking("The application", self._server.address, KEY_HINT):
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
        told: dict[str, Any] = answer
        return told


def _drain_of(replica_id: str) -> str:
    return f"/replicas/{quote(replica_id, safe='')}/drain"
