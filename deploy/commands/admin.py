"""The admin API as commands use it: where it is, with which key, and what it says of the fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click

from deploy.commands.exits import Exit, Failure
from deploy.commands.options import address_option, talking
from deploy.json_http import JsonServer

_PARTS = {"models", "unavailable", "replicas", "classes"}

KEY_HINT = "give --key, or set SLUICE_ADMIN_KEY, to one of the configuration's router.admin.keys"

_address = address_option(
    "http://127.0.0.1:8000", "SLUICE_ADDRESS", "The application, as clients reach it."
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
    help="An admin key. Other users of this machine see what stands on the command line, so rather "
    "set the variable.",
)


def admin_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--address`` and ``--key``."""
    with_key: Callable[..., None] = _key(command)
    with_both: Callable[..., None] = _address(with_key)
    return with_both


class AdminApi:
    """The admin API of one application.

    Every method raises ``Failure``: nothing answers, the key is refused, or the request is.

    Args:
        address: of the application.
        key: an admin key, if one is needed.
    """

    def __init__(self, address: str, key: str | None) -> None:
        self._server = JsonServer(address, key)

    def fleet(self) -> dict[str, Any]:
        """Every model's controller, replicas and classes."""
        fleet = self._ask("GET", "/fleet")
        if not isinstance(fleet, dict) or not fleet.keys() >= _PARTS:
            raise Failure(
                Exit.FAILED,
                f"{self._server.address} answers, but not as Sluice does: is --address right, and "
                "is it the version of this command?",
            )
        return fleet

    def drain(self, replica_id: str, drain: bool) -> dict[str, Any]:
        """Close a replica to new requests, or open it again; what is left there."""
        path = f"/replicas/{quote(replica_id, safe='')}/drain"
        left: dict[str, Any] = self._ask("POST" if drain else "DELETE", path)
        return left

    def _ask(self, method: str, path: str) -> Any:
        with talking("The application", self._server.address, KEY_HINT):
            return self._server.ask(method, f"/admin/v1{path}")
