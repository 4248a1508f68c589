"""The signing keys of an issuer (RFC 7517): read in the background, used until they are too old.

No request waits for the issuer. A token with an unknown key makes the router read the keys, at most
once in :data:`MIN_PAUSE_S`, however many such tokens arrive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final

from jwt import PyJWK
from jwt.exceptions import PyJWTError
from prometheus_client import CollectorRegistry, Counter, Gauge

from sluice.router.errors import ApiError, Reason
from sluice.router.tenancy.issuers import TokenIssuer, check_url

if TYPE_CHECKING:
    import aiohttp

MIN_PAUSE_S: Final = 10.0
"""Minimum time between two reads that tokens with unknown keys cause, and from a failed read to the
next one, seconds."""

MAX_BYTES: Final = 256 << 10
"""Maximum size of an answer of an issuer."""

MAX_KEYS: Final = 64
"""Maximum number of keys that an issuer may publish."""

MAX_KEY_ID: Final = 256
"""Maximum length of a key's id (`kid`), characters."""

MIN_RSA_BITS: Final = 2048
"""Shortest RSA key that is accepted (RFC 7518, section 3.3)."""

KeyName = tuple[str, str]
"""A key's id, and an algorithm that it may be used with."""

_FITTING: Final[Mapping[tuple[object, object], tuple[str, ...]]] = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Algorithms by a key's type and curve. A symmetric key (`oct`) has none."""

_PUBLIC: Final = ("kty", "crv", "n", "e", "x", "y")

_log = logging.getLogger(__name__)


class IssuerMetrics:
    """Metrics of reading issuers' keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.broken = Gauge(
            "sluice_issuer_broken",
            "Routers whose last read of the issuer's signing keys failed.",
            ["issuer"],
            registry=registry,
        )
        self.reads = Counter(
            "sluice_issuer_reads",
            "Reads of an issuer's signing keys, by outcome.",
            ["issuer", "outcome"],
            registry=registry,
        )


class SigningKeys:
    """The signing keys of one issuer. :meth:`find` is ``O(1)``; memory is bounded by
    :data:`MAX_KEYS`.

    Args:
        name: of the issuer, for logs and metrics.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        config: TokenIssuer,
        metrics: IssuerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._keys: Mapping[KeyName, PyJWK] = {}
        self._read_s = self._tried_s = -inf
        self._trouble: str | None = None
        self._wanted = asyncio.Event()
        self._pending = False  # a read is wanted or in progress

    def find(self, key_id: str, algorithm: str) -> PyJWK | None:
        """The key; ``None`` if the issuer does not publish it for this algorithm.

        Raises:
            ApiError: 503, the keys are unknown or too old, or are being read.
        """
        now_s = self._clock()
        is_fresh = now_s - self._read_s <= self._config.stale_s
        key = self._keys.get((key_id, algorithm))
        if key is not None and is_fresh:
            return key
        if not self._pending and now_s - self._tried_s >= MIN_PAUSE_S:
            self._pending = True
            self._wanted.set()
        if self._pending or not is_fresh or self._trouble is not None:
            raise ApiError(
                Reason.ISSUER_UNAVAILABLE,
                "The token cannot be checked now: the signing keys of its issuer are being read, "
                "or cannot be read.",
            )
        return None

    async def watch(self) -> None:
        """Read the keys at their interval and when a token needs them, indefinitely."""
        while True:
            pause_s = self._config.refresh_s if self._trouble is None else MIN_PAUSE_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            await self.read()

    async def read(self) -> None:
        """Read the keys once, in at most ``timeout_s``. After a failure, which is logged, the
        earlier keys stay."""
        self._pending = True
        self._tried_s = self._clock()
        try:
            # Here, as each command of the CLI would take 0.2 s longer, and not in the timeout.
            from aiohttp import ClientSession

            async with asyncio.timeout(self._config.timeout_s):
                # Proxies of the environment are used.
                async with ClientSession(trust_env=True) as session:
                    keys = _usable(await _read_jwks(session, self._config), self._config)
        except Exception as error:
            self._failed(error)
        else:
            self._keys, self._read_s, self._trouble = keys, self._tried_s, None
            self._metrics.broken.labels(self._name).set(0)
            self._metrics.reads.labels(self._name, "ok").inc()
        finally:
            self._pending = False
            self._wanted.clear()

    def _failed(self, error: Exception) -> None:
        """Log a failed read, once per reason."""
        trouble = str(error) or type(error).__name__
        if trouble != self._trouble:
            self._trouble = trouble
            _log.error("cannot read the signing keys of issuer %s: %s", self._name, trouble)
        self._metrics.broken.labels(self._name).set(1)
        self._metrics.reads.labels(self._name, "failed").inc()


async def _read_jwks(session: aiohttp.ClientSession, config: TokenIssuer) -> list[Any]:
    """The issuer's keys as published.

    Raises:
        ValueError: an answer is not what it should be. OSError, aiohttp.ClientError: there is none.
    """
    url = config.jwks_url
    if url is None:
        base = config.issuer.rstrip("/")
        found = await _get(session, f"{base}/.well-known/openid-configuration")
        if found.get("issuer") != config.issuer:
            raise ValueError("its discovery document is of another issuer")
        url = check_url(str(found.get("jwks_uri")))
    keys = (await _get(session, url)).get("keys")
    if not isinstance(keys, list) or not 1 <= len(keys) <= MAX_KEYS:
        raise ValueError(f"{url} has no list of 1 to {MAX_KEYS} keys")
    return keys


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The JSON object at ``url``. A redirect is not followed: it could lead to an unsafe URL."""
    raw = bytearray()
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with session.get(url, headers=headers, allow_redirects=False) as answer:
        if answer.status != 200:
            raise ValueError(f"{url} answers {answer.status}")
        async for piece in answer.content.iter_chunked(1 << 16):
            raw += piece
            if len(raw) > MAX_BYTES:
                raise ValueError(f"{url} answers with more than {MAX_BYTES} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{url} does not answer with a JSON object")
    return found


def _usable(published: list[Any], config: TokenIssuer) -> dict[KeyName, PyJWK]:
    """The keys that can verify signatures of the accepted algorithms; others are left out.

    Raises:
        ValueError: there are none.
    """
    usable: dict[KeyName, PyJWK] = {}
    for entry in published:
        key_id = entry.get("kid") if isinstance(entry, dict) else None
        if not isinstance(key_id, str) or len(key_id) > MAX_KEY_ID:
            continue
        if entry.get("use", "sig") != "sig":
            continue
        for algorithm in _algorithms_of(entry):
            if algorithm not in config.algorithms:
                continue
            try:
                public = {name: entry[name] for name in _PUBLIC if name in entry}
                key = PyJWK(public, algorithm)
            except (PyJWTError, ValueError, TypeError):
                continue
            if entry["kty"] != "RSA" or key.key.key_size >= MIN_RSA_BITS:
                usable[key_id, algorithm] = key
    if not usable:
        algorithms = ", ".join(config.algorithms)
        raise ValueError(f"none of its keys has a kid and can verify {algorithms}")
    return usable


def _algorithms_of(entry: dict[str, Any]) -> tuple[str, ...]:
    """The algorithms that a published key may be used with: the one it states, if it fits."""
    kind, curve = entry.get("kty"), entry.get("crv")
    if not isinstance(kind, str) or not isinstance(curve, str | None):
        return ()
    fitting = _FITTING.get((kind, curve), ())
    stated = entry.get("alg")
    return fitting if stated is None else tuple(each for each in fitting if each == stated)
