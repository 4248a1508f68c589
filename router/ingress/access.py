"""The keys of a router, and the paths that each kind of key gives access to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry

from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.ingress.admin_access import ADMIN_PREFIX, AdminAccess, is_page
from sluice.router.ingress.sites import SiteCheck
from sluice.router.loopback import is_loopback
from sluice.router.tenancy.auth import KeyMetrics, KeyRing
from sluice.router.tenancy.clients import ApiClients
from sluice.router.tenancy.limits import ANYONE, Client
from sluice.router.tenancy.tokens import TokenVerifier

OPEN_PATH: Final = "/health"
"""Needs no key: load balancers probe it."""

LIVE_PATH: Final = "/-/healthz"
"""Needs no key: whether this router takes requests, whatever its replicas do. Serve's own proxies
have this path, and KubeRay asks for it."""

PING_PATH: Final = "/ping"
"""The same by the name that SageMaker probes."""

ROOT_PATH: Final = "/"
"""Needs no key: it only lists the other paths."""

METRICS_PATH: Final = "/metrics"


def is_for_operators(path: str) -> bool:
    """Whether ``path`` is the metrics, the live page, or part of the admin API."""
    return path == METRICS_PATH or path.startswith(ADMIN_PREFIX) or is_page(path)


class Access:
    """Access control by path. One per router process.

    - The API needs an API key or a token; if neither is configured, it is open, but for pages of
      other sites (:mod:`sluice.router.ingress.sites`).
    - ``/metrics`` shows the names and counts of all clients. If the API is not open, it needs a
      separate metrics key, unless it is open by configuration; never for pages of other sites.
    - The admin API needs an admin key, see :mod:`sluice.router.ingress.admin_access`. The live page
      holds no data and needs no key.

    Args:
        registry: of the metrics of key files and issuers.
        clock: monotonic seconds.
        unix_clock: Unix seconds.

    Raises:
        ValueError, OSError: a key file cannot be used.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        registry = registry or CollectorRegistry()
        metrics = KeyMetrics(registry)
        self.api = ApiClients(
            KeyRing(config.api_keys, config.api_keys_file, config.classes, "api", metrics),
            TokenVerifier(config.issuers, registry, clock, unix_clock),
        )
        place = (config.host, not is_loopback(config.host))
        self._sites = SiteCheck("The API", *place, origins=config.cors_origins)
        self._sites_of_page = SiteCheck("The page of metrics", *place)
        page = config.metrics
        self._page = KeyRing(page.keys, page.keys_file, ring="metrics", metrics=metrics)
        self._page_is_open = page.access == "open"
        self.admin = AdminAccess(config.admin, metrics)

    def check(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], by_gateway: bool = False
    ) -> Client:
        """The client that requests ``path`` with these raw request
        headers, itself or by an Envoy.

        Raises:
            ApiError: 401, 403 if no key could give access, or 503 if a token cannot be checked now.
        """
        if path in (OPEN_PATH, LIVE_PATH, PING_PATH, ROOT_PATH):
            return ANYONE
        if path == METRICS_PATH:
            return self._check_page(headers, by_gateway)
        if self.admin.on and path.startswith(ADMIN_PREFIX):
            return self.admin.check(headers)
        if self.admin.on and is_page(path):
            return ANYONE
        if self.api.accepts_anyone:
            self._sites.check(headers, by_gateway)
        return self.api.check(headers)

    async def start(self) -> None:
        """Read what the first requests need."""
        await self.api.start()

    async def watch(self) -> None:
        """Apply changes of key files and of issuers' keys, indefinitely."""
        await asyncio.gather(self.api.watch(), self._page.watch(), self.admin.watch())

    def _check_page(self, headers: Iterable[tuple[bytes, bytes]], by_gateway: bool) -> Client:
        if self._page_is_open or self.api.accepts_anyone:
            self._sites_of_page.check(headers, by_gateway)
            return ANYONE
        if self._page.accepts_anyone:
            raise ApiError(
                Reason.NOT_PERMITTED,
                "The metrics are closed, as no metrics key is configured: set router.metrics.keys, "
                "or router.metrics.access to open if only the monitoring can reach this port.",
            )
        self._page.check(headers)
        return ANYONE
