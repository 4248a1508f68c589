"""Requests of other sites: a web page may make the browser of someone who reaches this server send
them. Where a key is needed they fail; what is open without a key refuses them here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, urlsplit

from sluice.router.errors import ApiError, Reason
from sluice.router.loopback import is_loopback

_OWN_SITES: Final = frozenset((b"none", b"same-origin"))
"""``Sec-Fetch-Site`` of what a user typed, and of the server's own pages."""

_READ: Final = frozenset((b"host", b"origin", b"sec-fetch-site"))


class SiteCheck:
    """Refuses requests of other sites.

    A page shows itself by ``Origin`` or ``Sec-Fetch-Site``. A page whose host name resolves to this
    server (DNS rebinding) is of the same site for the browser, and shows itself only by that name,
    in ``Host``.

    Args:
        what: that is open, for the message.
        host: address that the server is bound to, or its name.
        is_shared: others than this machine's programs may send, under a name of the server that is
            unknown here: any name is accepted from what is no browser.
        origins: whose pages may send; ``*``: any.
    """

    def __init__(
        self, what: str, host: str, is_shared: bool = False, origins: Sequence[str] = ()
    ) -> None:
        self._what = what
        self._is_shared = is_shared
        self._is_off = "*" in origins
        self._origins = frozenset(origins)
        self._names = {host, *(_split(origin).hostname or "" for origin in origins)}
        self._names -= {"", "0.0.0.0", "::"}

    def check(self, headers: Iterable[tuple[bytes, bytes]], by_gateway: bool = False) -> None:
        """Return if these raw request headers (lower-case names) are not of another site.

        Args:
            by_gateway: an Envoy sent it, which is shared.

        Raises:
            ApiError: 403.
        """
        if self._is_off:
            return
        found = {name: value for name, value in headers if name in _READ}
        host = found.get(b"host", b"").decode("latin-1").lower()
        origin = found.get(b"origin")
        is_own = found.get(b"sec-fetch-site", b"none") in _OWN_SITES
        is_shared = self._is_shared or by_gateway
        is_named = self._is_name_of_this(_split(f"//{host}").hostname or "", is_shared)
        if not is_named and not is_shared:
            raise self._refusal(f"Host must be {self._allowed_hosts()}")
        if origin is None:
            if is_own:
                return
        elif (text := origin.decode("latin-1").lower()) in self._origins or (
            is_named and is_own and _split(text).netloc == host
        ):
            return
        raise self._refusal("a page of another site may not send it, but for router.cors_origins")

    def _is_name_of_this(self, name: str, is_shared: bool) -> bool:
        """Whether only this server can have ``name``: no other site has it, or can get it."""
        if is_loopback(name) or name in self._names:
            return True
        if not is_shared:
            return False
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _allowed_hosts(self) -> str:
        names = (
            "a loopback address",
            *sorted(name for name in self._names if not is_loopback(name)),
        )
        return " or ".join(names)

    def _refusal(self, why: str) -> ApiError:
        return ApiError(Reason.NOT_PERMITTED, f"{self._what} is open without a key here: {why}.")


def _split(url: str) -> SplitResult:
    """The parts of a URL; empty parts if it is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
