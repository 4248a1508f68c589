"""Who may use the admin API: holders of admin keys, or where it is open this machine alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import SplitResult, urlsplit

from router.admin_config import AdminConfig, is_loopback
from router.errors import ApiError, Reason
from router.tenancy.auth import KeyMetrics, KeyRing
from router.tenancy.limits import ANYONE, Client

ADMIN_PREFIX: Final = "/admin/"
"""What the paths of the admin API begin with."""

PAGE_PATH: Final = "/ui"
"""The page. It holds no data, so everybody may have it; what it shows comes from the admin API."""


def is_page(path: str) -> bool:
    """Whether ``path`` is the page or a part of it."""
    return path == PAGE_PATH or path.startswith(f"{PAGE_PATH}/")


class AdminAccess:
    """Lets requests to the admin API pass, or refuses them. One per router process.

    Args:
        metrics: where the fate of the key file is counted.

    Raises:
        ValueError, OSError: the key file cannot be used.
    """

    def __init__(self, config: AdminConfig, metrics: KeyMetrics | None = None) -> None:
        self.on = config.access != "off"
        """Whether there is an admin API at all."""
        self._open = config.access == "open"
        self._keys = KeyRing(config.keys, config.keys_file, ring="admin", metrics=metrics)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """Who sent these raw request headers (lower-case names), and may pass.

        Raises:
            ApiError: 401, or 403 where no key could open it.
        """
        if self._open:
            _check_same_site(headers)
            return ANYONE
        if self._keys.accepts_anyone:
            raise ApiError(
                Reason.NOT_PERMITTED,
                "No admin key is configured, so nothing opens the admin API: set "
                "router.admin.keys or router.admin.keys_file.",
            )
        return self._keys.check(headers)

    async def watch(self) -> None:
        """Take in what changes in the key file, for ever."""
        await self._keys.watch()


def _check_same_site(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse what a page of another site may have made the operator's browser send. Such a page
    can also have a name that leads to this machine, which shows in the header ``host``.

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
            "The admin API is open to this machine only: ask for it at a loopback address, and not "
            "from the page of another site.",
        )


def _split(url: str) -> SplitResult:
    """An address in its parts; without any where it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
