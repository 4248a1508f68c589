"""Clients by token: signed JWTs of the configured issuers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import jwt
from jwt import PyJWK
from jwt.exceptions import (
    InvalidAudienceError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)
from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic import BaseModel, Field, field_validator, model_validator

from sluice.router.errors import ApiError, Reason, shown
from sluice.router.tenancy.auth import KeyRing, bearer_of, unknown_key
from sluice.router.tenancy.limits import ANYONE, UNNAMED, Client, TenantLimits, check_classes
from sluice.router.wire import LABEL, is_loopback

if TYPE_CHECKING:
    import aiohttp


# The clients of the API: those with an API key, and tenants with a token of an issuer.

# Tokens (JWT, RFC 7519) in place of API keys: their signature, their claims, and their tenant.
#
# A token is data of the client until its signature is verified. Before that only its size, its
# issuer, its algorithm and its key's id are used, to find the key.

# Configuration of the issuers whose tokens (JWTs) are accepted beside API keys.

MAX_ISSUERS: Final = 8  # maximum number of issuers: their names label metrics

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
"""Public-key signatures only: whoever can verify HMACs can also make them."""

_Claim = Annotated[str, Field(min_length=1, max_length=200)]


def check_url(url: str) -> str:
    """Check that keys may be read from ``url``: https, or http on this machine, as whoever could
    change the answer could sign tokens. Raises ValueError."""
    parts = urlsplit(url)
    is_safe = parts.scheme == "https" or (
        parts.scheme == "http" and is_loopback(parts.hostname or "")
    )
    if not is_safe or not parts.hostname or parts.username or parts.fragment:
        raise ValueError(
            "must be an https URL without user and fragment (http on a loopback address)"
        )
    return url


class TokenIssuer(BaseModel, extra="forbid", frozen=True):
    """An issuer of tokens: an OpenID Connect provider, or any other that signs JWTs and publishes
    its keys. A valid token names its tenant, and gets only limits that are configured here."""

    issuer: str = Field(
        min_length=1,
        max_length=500,
        description="The claim `iss` of its tokens, compared exactly. Without `jwks_url` also the "
        "URL that `/.well-known/openid-configuration` is read below.",
    )
    audience: tuple[_Claim, ...] = Field(
        min_length=1,
        max_length=16,
        description="Audiences of this service: the claim `aud` must have one of them. Not one "
        "that other services also use: their tokens would be accepted here.",
    )
    jwks_url: str | None = Field(
        default=None,
        max_length=1_000,
        description="URL of the issuer's signing keys (JWKS): https, or http on a loopback "
        "address. Null: found by discovery.",
    )
    algorithms: tuple[Algorithm, ...] = Field(
        default=("RS256", "ES256"), min_length=1, description="Accepted signature algorithms."
    )
    tenant_claim: _Claim = Field(
        default="sub",
        description="Claim with the tenant's name, a text of 1 to 256 characters. Tokens without "
        "it get 401.",
    )
    limits_claim: _Claim | None = Field(
        default=None,
        description="Claim that selects one of `limits`: a text or a list of texts, such as roles; "
        "`scope` and `scp` are split at spaces. Null: the tenant's name selects it.",
    )
    limits: dict[str, TenantLimits] = Field(
        default_factory=dict,
        max_length=1_000,
        description="Limits of tenants, by the value that selects them. The first entry that the "
        "claim has applies.",
    )
    default_limits: TenantLimits | None = Field(
        default=None,
        description="Limits of each tenant whose token selects no entry of `limits`; `{}`: those "
        "of the API. Null: such tokens get 403.",
    )

    @field_validator("jwks_url")
    @classmethod
    def _check_jwks_url(cls, url: str | None) -> str | None:
        return None if url is None else check_url(url)

    @model_validator(mode="after")
    def _check(self) -> TokenIssuer:
        if self.jwks_url is None:
            try:
                check_url(self.issuer)
            except ValueError as error:
                raise ValueError(f"issuer {error}, or jwks_url must be set") from None
        if not self.limits and self.default_limits is None:
            raise ValueError("limits or default_limits must be set, else no token is accepted")
        return self


def check_issuers(issuers: Mapping[str, TokenIssuer], classes: Collection[str]) -> None:
    """Check conditions over all issuers. Raises :class:`ValueError`."""
    bad = [name for name in issuers if not LABEL.fullmatch(name)]
    if bad:
        raise ValueError(f"names of issuers must match {LABEL.pattern}, got {bad}")
    if len({entry.issuer for entry in issuers.values()}) < len(issuers):
        raise ValueError("two entries of issuers have the same issuer")
    for name, entry in issuers.items():
        limits = [*entry.limits.values(), *filter(None, [entry.default_limits])]
        check_classes(limits, classes, f"issuers.{name} names")


# The signing keys of an issuer (RFC 7517): read in the background, used until they are too old.
#
# No request waits for the issuer. A token with an unknown key makes the router read the keys, at
# most once in :data:`MIN_PAUSE_S`, however many such tokens arrive.

LEEWAY_S: Final = 30.0  # tolerance for differences between clocks, for `exp`, `nbf` and `iat`
REFRESH_S: Final = 300.0  # between reads of the keys; a withdrawn key is accepted for as long
STALE_S: Final = 21_600.0  # how long keys that cannot be read again are used, seconds; then 503
TIMEOUT_S: Final = 5.0  # timeout of each read of the keys, seconds
MIN_PAUSE_S: Final = 10.0  # after a failed read, or between reads for unknown keys
MAX_BYTES: Final = 256 << 10  # maximum size of an answer of an issuer
MAX_KEYS: Final = 64  # maximum number of keys that an issuer may publish
MAX_KEY_ID: Final = 256  # maximum length of a key's id (`kid`), characters
MIN_RSA_BITS: Final = 2048  # shortest RSA key that is accepted (RFC 7518, section 3.3)

KeyName = tuple[str, str]  # a key's id, and an algorithm that it may be used with
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
    """The signing keys of one issuer. :meth:`find` is ``O(1)``; at most :data:`MAX_KEYS`."""

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
        self._failure: str | None = None
        self._wanted = asyncio.Event()
        self._pending = False  # a read is wanted or in progress

    def find(self, key_id: str, algorithm: str) -> PyJWK | None:
        """The key; ``None``: not published. Raises ApiError: 503, unknown, old or being read."""
        now_s = self._clock()
        is_fresh = now_s - self._read_s <= STALE_S
        key = self._keys.get((key_id, algorithm))
        if key is not None and is_fresh:
            return key
        if not self._pending and now_s - self._tried_s >= MIN_PAUSE_S:
            self._pending = True
            self._wanted.set()
        if self._pending or not is_fresh or self._failure is not None:
            raise ApiError(
                Reason.ISSUER_UNAVAILABLE,
                "The token cannot be checked now: the signing keys of its issuer are being read, "
                "or cannot be read.",
            )
        return None

    async def watch(self) -> None:
        """Read the keys at their interval and when a token needs them, indefinitely."""
        while True:
            pause_s = REFRESH_S if self._failure is None else MIN_PAUSE_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            await self.read()

    async def read(self) -> None:
        """Read the keys once in ``timeout_s``; a logged failure keeps the earlier ones."""
        self._pending = True
        self._tried_s = self._clock()
        try:
            # Here, as each command of the CLI would take 0.2 s longer, and not in the timeout.
            from aiohttp import ClientSession

            async with asyncio.timeout(TIMEOUT_S):
                # Proxies of the environment are used.
                async with ClientSession(trust_env=True) as session:
                    keys = _usable(await _read_jwks(session, self._config), self._config)
        except Exception as error:
            self._failed(error)
        else:
            self._keys, self._read_s, self._failure = keys, self._tried_s, None
            self._metrics.broken.labels(self._name).set(0)
            self._metrics.reads.labels(self._name, "ok").inc()
        finally:
            self._pending = False
            self._wanted.clear()

    def _failed(self, error: Exception) -> None:
        failure = str(error) or type(error).__name__
        if failure != self._failure:
            self._failure = failure
            _log.error("cannot read the signing keys of issuer %s: %s", self._name, failure)
        self._metrics.broken.labels(self._name).set(1)
        self._metrics.reads.labels(self._name, "failed").inc()


async def _read_jwks(session: aiohttp.ClientSession, config: TokenIssuer) -> list[Any]:
    """The published keys. Raises ValueError, OSError, aiohttp.ClientError."""
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
    """The keys for accepted algorithms. Raises ValueError: there are none."""
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


MAX_TOKEN_BYTES: Final = 8 << 10  # maximum size of a token
MAX_TENANT: Final = 256  # maximum length of a tenant's name, characters
MAX_CACHED: Final = 8_192  # accepted tokens whose check is not repeated; the oldest go first
MAX_TENANTS: Final = 10_000  # tenants that are remembered; the one with the oldest token goes first
REMEMBERED_S: Final = 86_400.0  # a tenant's batches run for so long after its last token
_SHAPE: Final = re.compile(rb"[\w-]+={0,2}\.[\w-]*={0,2}\.[\w-]*={0,2}", re.ASCII)

_NO_TIMES: Final[Mapping[str, Any]] = {
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "require": ["exp", "iss", "aud"],
}
"""Times are checked with the router's clock, so cached and new tokens expire alike."""


class _Accepted(NamedTuple):
    """A token that was accepted: its client, when it expires, and the key that verified it."""

    client: Client
    until_s: float
    issuer: _Issuer
    key_name: tuple[str, str]
    key: PyJWK


class _Issuer(NamedTuple):
    name: str
    config: TokenIssuer
    keys: SigningKeys


def is_token(bearer: bytes) -> bool:
    """Whether these credentials have the shape of a JWT, three parts of base64."""
    return _SHAPE.fullmatch(bearer) is not None


class TokenVerifier:
    """Finds the clients of tokens. One per router process, on its event loop.

    ``O(1)``. An accepted token is kept by its digest (at most :data:`MAX_CACHED`) until it expires
    or its key is withdrawn, and verified once in that time. ``unix_clock`` is for the times in
    tokens."""

    def __init__(
        self,
        issuers: Mapping[str, TokenIssuer],
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        metrics = IssuerMetrics(registry)
        self._issuers = {
            config.issuer: _Issuer(name, config, SigningKeys(name, config, metrics, clock))
            for name, config in issuers.items()
        }
        self.has_issuers = bool(issuers)
        """Whether any token can be accepted."""
        self._now = unix_clock
        self._accepted: OrderedDict[bytes, _Accepted] = OrderedDict()
        self._tenants: OrderedDict[str, tuple[Client, float]] = OrderedDict()

    def check(self, token: bytes) -> Client:
        """The client of a token. Raises ApiError: 401, invalid; 403, no limits; 503, no keys."""
        if len(token) > MAX_TOKEN_BYTES:
            raise refused(f"The token has {len(token)} bytes; allowed are {MAX_TOKEN_BYTES}.")
        digest = hashlib.sha256(token).digest()
        now_s = self._now()
        accepted = self._accepted.get(digest)
        if accepted is not None:
            if now_s < accepted.until_s and self._has_key(accepted):
                return accepted.client
            del self._accepted[digest]
        accepted = self._verify(token, now_s)
        _keep(self._accepted, digest, accepted, MAX_CACHED)
        # The tenant's limits may have changed since its last token.
        _, forget_s = self._tenants.pop(accepted.client.owner, (None, 0.0))
        forget_s = max(forget_s, accepted.until_s + REMEMBERED_S)
        _keep(self._tenants, accepted.client.owner, (accepted.client, forget_s), MAX_TENANTS)
        return accepted.client

    def holder(self, owner: str) -> Client | None:
        """The tenant that is this ``owner``, with its latest limits, :data:`REMEMBERED_S` long."""
        client, forget_s = self._tenants.get(owner, (None, 0.0))
        return client if self._now() < forget_s else None

    async def read_keys(self) -> None:
        """Read the keys of all issuers once. A failure is logged."""
        await asyncio.gather(*(issuer.keys.read() for issuer in self._issuers.values()))

    async def watch(self) -> None:
        """Read the keys of all issuers again and again, indefinitely."""
        await asyncio.gather(*(issuer.keys.watch() for issuer in self._issuers.values()))

    def _has_key(self, accepted: _Accepted) -> bool:
        return accepted.issuer.keys.find(*accepted.key_name) is accepted.key

    def _verify(self, token: bytes, now_s: float) -> _Accepted:
        issuer, key_name = self._origin(token)
        key = issuer.keys.find(*key_name)
        if key is None:
            raise refused("The token is signed with a key that its issuer does not publish.")
        config = issuer.config
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=config.algorithms,
                options=_NO_TIMES,  # type: ignore[arg-type]
                audience=config.audience,
                issuer=config.issuer,
            )
        except InvalidAudienceError:
            audience = ", ".join(config.audience)
            raise refused(f"The token's audience is another; it must be {audience}.") from None
        except MissingRequiredClaimError as error:
            raise refused(f"The token has no claim {error.claim}.") from None
        except InvalidSignatureError:
            raise refused("The token's signature is wrong.") from None
        except (PyJWTError, ValueError, TypeError):
            raise _malformed() from None
        until_s = _check_times(claims, now_s)
        return _Accepted(_client_of(claims, issuer), until_s, issuer, key_name, key)

    def _origin(self, token: bytes) -> tuple[_Issuer, tuple[str, str]]:
        """The unverified issuer and key name of a token. Raises ApiError: 401."""
        try:
            found = jwt.decode_complete(token, options={"verify_signature": False})
        except (PyJWTError, ValueError, TypeError):
            raise _malformed() from None
        header, name = found["header"], found["payload"].get("iss")
        issuer = self._issuers.get(name) if isinstance(name, str) else None
        if issuer is None:
            raise refused("The token's issuer is not accepted.")
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in issuer.config.algorithms:
            allowed = ", ".join(issuer.config.algorithms)
            raise refused(f"The token's algorithm is {shown(algorithm)}; allowed are {allowed}.")
        if not isinstance(key_id, str) or len(key_id) > MAX_KEY_ID:
            raise refused("The token does not say which key signed it (kid).")
        return issuer, (key_id, algorithm)


def refused(message: str) -> ApiError:
    """A 401 that says what is wrong with a token, also in the header of RFC 6750, section 3."""
    described = message.replace("\\", "").replace('"', "'")
    header = f'Bearer error="invalid_token", error_description="{described}"'
    return ApiError(Reason.INVALID_TOKEN, message, headers={"www-authenticate": header})


def _malformed() -> ApiError:
    return refused("The token is not a well-formed signed JWT.")


def _keep(kept: OrderedDict[Any, Any], key: object, value: object, most: int) -> None:
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)


def _check_times(claims: Mapping[str, Any], now_s: float) -> float:
    """Check ``exp``, ``nbf``, ``iat``; when it expires. Raises ApiError: 401."""
    for name in ("exp", "nbf", "iat"):
        value = claims.get(name, 0)
        if not isinstance(value, int | float) or not abs(value) < 1e12:
            raise refused(f"The token's claim {name} is no time.")
    until_s: float = claims["exp"] + LEEWAY_S
    if now_s >= until_s:
        raise refused("The token has expired.")
    if now_s < max(claims.get("nbf", 0), claims.get("iat", 0)) - LEEWAY_S:
        raise refused("The token is not valid yet.")
    return until_s


def _client_of(claims: Mapping[str, Any], issuer: _Issuer) -> Client:
    """The client of a verified token. Raises ApiError: 401, no tenant; 403, no limits."""
    config = issuer.config
    tenant = claims.get(config.tenant_claim)
    if not isinstance(tenant, str) or not 1 <= len(tenant) <= MAX_TENANT:
        raise refused(
            f"The token's claim {config.tenant_claim} must name the tenant with 1 to {MAX_TENANT} "
            "characters."
        )
    selected = _values(claims, config.limits_claim) if config.limits_claim else {tenant}
    listed = (caps for value, caps in config.limits.items() if value in selected)
    caps = next(listed, config.default_limits)
    if caps is None:
        claim = config.limits_claim or config.tenant_claim
        raise ApiError(
            Reason.NOT_PERMITTED,
            f"The token's claim {claim} gives no access: no limits are configured for it.",
        )
    # Tenants of two issuers, and a key of the same name, are different clients.
    name = f"{issuer.name}/{tenant}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(name, digest_size=16, person=b"sluice-owner").hexdigest()
    return Client(_label(tenant, digest), f"token-{digest}", caps)


def _values(claims: Mapping[str, Any], claim: str) -> set[str]:
    """The texts in a claim: one, a list, or for scopes the words of one."""
    value = claims.get(claim)
    if isinstance(value, str):
        return set(value.split(" ")) if claim in ("scope", "scp") else {value}
    return {each for each in value if isinstance(each, str)} if isinstance(value, list) else set()


def _label(tenant: str, digest: str) -> str:
    """The tenant's name in metrics: its own if that is a label, else like it."""
    if LABEL.fullmatch(tenant) and tenant != UNNAMED:
        return tenant
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"t-{tenant[:40]}-{digest[:8]}")


class ApiClients:
    """Finds the client of a request to the API. One per router process."""

    def __init__(self, keys: KeyRing, tokens: TokenVerifier) -> None:
        self._keys = keys
        self._tokens = tokens

    @property
    def accepts_anyone(self) -> bool:
        """Whether neither a key nor a token is needed because none is configured."""
        return self._keys.accepts_anyone and not self._tokens.has_issuers

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """The client of raw headers (lower-case). Raises ApiError: 401; tokens: 403, 503."""
        if self.accepts_anyone:
            return ANYONE
        bearer = bearer_of(headers)
        client = self._keys.find(bearer)
        if client is not None:
            return client
        if self._tokens.has_issuers and is_token(bearer):
            return self._tokens.check(bearer)
        raise unknown_key()

    def holder(self, owner: str) -> Client | None:
        """The client that is this ``owner``; ``None`` if it no longer has access."""
        if self.accepts_anyone:
            return ANYONE if owner == ANYONE.owner else None
        return self._keys.holder(owner) or self._tokens.holder(owner)

    async def start(self) -> None:
        """Read the keys of issuers once, in at most their timeouts."""
        await self._tokens.read_keys()

    async def watch(self) -> None:
        """Apply changes of the key file and of issuers' keys, indefinitely."""
        await asyncio.gather(self._keys.watch(), self._tokens.watch())
