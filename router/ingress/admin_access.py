"""Access control of the admin API: admin keys, or if it is open, only clients on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sluice.router.config import AdminConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.ingress.sites import SiteCheck
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
        self._sites = SiteCheck("The admin API", "localhost") if config.access == "open" else None
        self._keys = KeyRing(config.keys, config.keys_file, ring="admin", metrics=metrics)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """The client that sent these raw request headers (lower-case names), if it has access.

        Raises:
            ApiError: 401, or 403 if no key could give access.
        """
        if self._sites is not None:
            self._sites.check(headers)
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
