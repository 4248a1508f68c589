"""The keys of a router, and which of them open which path."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from router.config import RouterConfig
from router.errors import ApiError, Reason
from router.ingress.admin_access import ADMIN_PREFIX, AdminAccess, is_page
from router.tenancy.auth import KeyMetrics, KeyRing
from router.tenancy.limits import ANYONE, Client
from router.wire import BROKEN_PATH

OPEN_PATH: Final = "/health"
"""It needs no key: load balancers probe it."""

ROOT_PATH: Final = "/"
"""It needs no key: it only says where what is."""

METRICS_PATH: Final = "/metrics"


def is_for_operators(path: str) -> bool:
    """Whether ``path`` is the metrics, the live page, or of the admin API."""
    return path == METRICS_PATH or path.startswith(ADMIN_PREFIX) or is_page(path)


class Access:
    """Who may use what. One per router process.

    - API keys open the API, and without any everybody may use it;
    - ``/metrics`` shows the names and counts of all clients, so where there are API keys it needs
      one of its own, unless it is open by configuration;
    - the admin API needs a key of its own, see :mod:`router.ingress.admin_access`. The live page
      holds no data and needs none.

    Args:
        metrics: where the fate of key files is counted.

    Raises:
        ValueError, OSError: a key file cannot be used.
    """

    def __init__(self, config: RouterConfig, metrics: KeyMetrics | None = None) -> None:
        self.api = KeyRing(config.api_keys, config.api_keys_file, config.classes, "api", metrics)
        page = config.metrics
        self._page = KeyRing(page.keys, page.keys_file, ring="metrics", metrics=metrics)
        self._page_is_open = page.access == "open"
        self.admin = AdminAccess(config.admin, metrics)

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """Who asks for ``path``, after Serve's route prefix, with these raw request headers.

        Raises:
            ApiError: 401, or 403 where no key could open it.
        """
        if path in (OPEN_PATH, ROOT_PATH, BROKEN_PATH):  # the ticket opens the last one
            return ANYONE
        if path == METRICS_PATH:
            return self._check_page(headers)
        if self.admin.on and path.startswith(ADMIN_PREFIX):
            return self.admin.check(headers)
        if self.admin.on and is_page(path):
            return ANYONE
        return self.api.check(headers)

    async def watch(self) -> None:
        """Take in what changes in key files, for ever."""
        await asyncio.gather(self.api.watch(), self._page.watch(), self.admin.watch())

    def _check_page(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        if self._page_is_open or self.api.accepts_anyone:
            return ANYONE
        if self._page.accepts_anyone:
            raise ApiError(
                Reason.NOT_PERMITTED,
                "No key opens the metrics: set router.metrics.keys, or router.metrics.access to "
                "open where only the monitoring reaches this port.",
            )
        self._page.check(headers)
        return ANYONE
