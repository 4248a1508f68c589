"""Access control of the admin API: admin keys, or if it is open, only clients on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import SplitResult, urlsplit

from sluice.router.admin_config import AdminConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.loopback import is_loopback
from sluice.router.tenancy.auth import KeyMetrics, KeyRing
from sluice.router.tenancy.limits import ANYONE, Client

ADMIN_PREFIX: Final = "/admin/"
"""Path prefix of the admin API."""

PAGE_PATH: Final = "/ui"
"""The live page. It holds no data, so it needs no key; its data comes from the admin API."""


def is_page(path: str) -> bool:
    """Whether ``path`` is the page or a part of it."""
    return path == PAGE_PATH or path.startswith(f"{PAGE_PATH}/")


class AdminAccess:
    """Admits or refuses requests to the admin API. One per router process.

    Args:
        metrics: counts the loads of the key file.

    Raises:
        ValueError, OSError: the key file cannot be used.
    """

    def __init__(self, config: AdminConfig, metrics: KeyMetrics | None = None) -> None:
        self.on = config.access != "off"
        """Whether the admin API is enabled."""
        self._open = config.access == "open"
        self._keys = KeyRing(config.keys, config.keys_file, ring="admin", metrics=metrics)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """The client that sent these raw request headers (lower-case names), if it has access.

        Raises:
            ApiError: 401, or 403 if no key could give access.
        """
        if self._open:
            _check_same_site(headers)
            return ANYONE
        if self._keys.accepts_anyone:
            raise ApiError(
                Reason.NOT_PERMITTED,
                "The admin API is closed, as no admin key is configured: set router.admin.keys or "
                "router.admin.keys_file.",
            )
        return self._keys.check(headers)

    async def watch(self) -> None:
        """Apply changes of the key file, indefinitely."""
        await self._keys.watch()


def _check_same_site(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse requests that a page of another site may have made the operator's browser send. Such a
    page can also have a host name that resolves to this machine, which shows in the header
    ``host``.

    Raises:
        ApiError: 403.
    """
    found = {name: value.decode("latin-1") for name, value in headers}
    host = _split(f"//{found.get(b'host', '')}")
    origin = found.get(b"origin")
    foreign = origin is not None and _split(origin).netloc != found.get(b"host")
    site = found.get(b"sec-fetch-site", "none")
    if not is_loopback(host.hostname or "") or foreign or site not in ("none", "same-origin"):
        raise ApiError(
            Reason.NOT_PERMITTED,
            "The admin API is open to this machine only: use a loopback address, and not a page of "
            "another site.",
        )


def _split(url: str) -> SplitResult:
    """The parts of a URL; empty parts if it is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
