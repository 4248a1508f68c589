"""The keys of a router, and the paths that each kind of key gives access to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, urlsplit

from prometheus_client import CollectorRegistry

from sluice.router.config import AdminConfig, RouterConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.tenancy.auth import KeyMetrics, KeyRing
from sluice.router.tenancy.limits import ANYONE, Client
from sluice.router.tenancy.tokens import ApiClients, TokenVerifier
from sluice.router.wire import is_loopback

# Requests of other sites: a web page may make the browser of someone who reaches this server send
# them. Where a key is needed they fail; what is open without a key refuses them here.

_OWN_SITES: Final = frozenset((b"none", b"same-origin"))
"""``Sec-Fetch-Site`` of what a user typed, and of the server's own pages."""


class SiteCheck:
    """Refuses requests of other sites, by ``Origin``, ``Sec-Fetch-Site`` and ``Host``; only
    ``Host`` shows a page whose name was made to resolve to this server (DNS rebinding).

    ``host``: the bound address or name. ``is_shared``: other machines may send under unknown names,
    so any name is accepted from what is no browser. ``origins``: whose pages may send; ``*``: any.
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
        """Raises ApiError: 403, these raw headers are of another site. ``by_gateway``: an Envoy
        sent them."""
        if self._is_off:
            return
        found = dict(headers)
        host = found.get(b"host", b"").decode("latin-1").lower()
        origin = found.get(b"origin")
        is_own = found.get(b"sec-fetch-site", b"none") in _OWN_SITES
        is_shared = self._is_shared or by_gateway
        is_named = self._is_name_of_this(_split(f"//{host}").hostname or "", is_shared)
        if not is_named and not is_shared:
            others = sorted(name for name in self._names if not is_loopback(name))
            raise self._refusal(f"Host must be {' or '.join(('a loopback address', *others))}")
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
        if name in self._names or is_loopback(name):
            return True
        if not is_shared:
            return False
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _refusal(self, why: str) -> ApiError:
        return ApiError(Reason.NOT_PERMITTED, f"{self._what} is open without a key here: {why}.")


@lru_cache(maxsize=256)
def _split(url: str) -> SplitResult:
    """The parts of a URL; empty parts if it is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


ADMIN_PREFIX: Final = "/admin/"  # path prefix of the admin API

PAGE_PATH: Final = "/ui"
"""The live page. It holds no data, so it needs no key; its data comes from the admin API."""


class AdminAccess:
    """Access to the admin API. Raises ValueError, OSError: the key file cannot be used."""

    def __init__(self, config: AdminConfig, metrics: KeyMetrics | None = None) -> None:
        self.on = config.access != "off"
        """Whether the admin API is enabled."""
        self._sites = SiteCheck("The admin API", "localhost") if config.access == "open" else None
        self._keys = KeyRing(config.keys, config.keys_file, ring="admin", metrics=metrics)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """The client by raw headers. Raises ApiError: 401, or 403 if no key could give access."""
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


OPEN_PATH: Final = "/health"  # needs no key: load balancers probe it

LIVE_PATH: Final = "/-/healthz"
"""Needs no key: whether this router takes requests, whatever its replicas do (KubeRay asks)."""

PING_PATH: Final = "/ping"  # the same by the name that SageMaker probes
ROOT_PATH: Final = "/"  # needs no key: it only lists the other paths

METRICS_PATH: Final = "/metrics"


def is_for_operators(path: str) -> bool:
    """Whether ``path`` is the metrics, the live page, or part of the admin API."""
    return path in (METRICS_PATH, PAGE_PATH) or path.startswith((ADMIN_PREFIX, f"{PAGE_PATH}/"))


class Access:
    """Access control by path; one per router process. The API is open, but for pages of other
    sites, if neither keys nor tokens are configured.

    ``/metrics`` shows all clients' names and counts: it needs a metrics key unless the API or
    itself is configured open. Raises ValueError, OSError: a key file cannot be used."""

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
        self._api_is_open = self.api.accepts_anyone
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
        """The client that requests ``path`` with these raw headers. Raises ApiError: 401; 403, no
        key could give access; 503, a token cannot be checked now."""
        if path in (OPEN_PATH, LIVE_PATH, PING_PATH, ROOT_PATH):
            return ANYONE
        if path == METRICS_PATH:
            return self._check_page(headers, by_gateway)
        if self.admin.on and path.startswith(ADMIN_PREFIX):
            return self.admin.check(headers)
        if self.admin.on and (path == PAGE_PATH or path.startswith(f"{PAGE_PATH}/")):
            return ANYONE
        if self._api_is_open:
            self._sites.check(headers, by_gateway)
            return ANYONE
        return self.api.check(headers)

    async def start(self) -> None:
        """Read what the first requests need."""
        await self.api.start()

    async def watch(self) -> None:
        """Apply changes of key files and of issuers' keys, indefinitely."""
        await asyncio.gather(self.api.watch(), self._page.watch(), self.admin.watch())

    def _check_page(self, headers: Iterable[tuple[bytes, bytes]], by_gateway: bool) -> Client:
        if self._page_is_open or self._api_is_open:
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
