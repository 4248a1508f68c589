"""Tokens (JWT, RFC 7519) in place of API keys: their signature, their claims, and their tenant.

A token is data of the client until its signature is verified. Before that only its size, its
issuer, its algorithm and its key's id are used, to find the key.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jwt
from jwt import PyJWK
from jwt.exceptions import (
    InvalidAudienceError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)
from prometheus_client import CollectorRegistry

from sluice.router.errors import ApiError, Reason, shown
from sluice.router.tenancy.issuers import TokenIssuer
from sluice.router.tenancy.jwks import MAX_KEY_ID, IssuerMetrics, SigningKeys
from sluice.router.tenancy.limits import UNNAMED, Client
from sluice.router.wire import LABEL

MAX_TOKEN_BYTES: Final = 8 << 10
"""Maximum size of a token."""

MAX_TENANT: Final = 256
"""Maximum length of a tenant's name, characters."""

MAX_CACHED: Final = 8_192
"""Maximum number of accepted tokens whose check is not repeated; the oldest are dropped first."""

MAX_TENANTS: Final = 10_000
"""Maximum number of tenants that are remembered; the one with the oldest token is dropped first."""

REMEMBERED_S: Final = 86_400.0
"""How long after its last token has expired a tenant's batches run, seconds."""

_SHAPE: Final = re.compile(rb"[\w-]+={0,2}\.[\w-]*={0,2}\.[\w-]*={0,2}", re.ASCII)

_NO_TIMES: Final[Mapping[str, Any]] = {
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "require": ["exp", "iss", "aud"],
}
"""The library checks all but the times: those are checked with the router's clock, so that a cached
token and a new one expire alike."""


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
    """Finds the clients of tokens. One per router process, used on its event loop.

    ``O(1)``. An accepted token is kept by its digest until it expires, its key is withdrawn, or
    :data:`MAX_CACHED` newer ones are accepted; a signature is verified once in that time.

    Args:
        issuers: by name.
        registry: of the metrics of reading keys.
        clock: monotonic seconds, for the age of keys.
        unix_clock: Unix seconds, for the times in tokens.
    """

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
        """The client of a token.

        Raises:
            ApiError: 401, what is wrong with it. 403, its tenant has no limits here. 503, the keys
                of its issuer are unknown.
        """
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
        """The tenant with this :attr:`~sluice.router.tenancy.limits.Client.owner`, with the limits
        of its latest token; ``None`` if this router has accepted none, or its last one expired
        more than :data:`REMEMBERED_S` ago."""
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
        """Verify a token.

        Raises:
            ApiError: as :meth:`check`.
        """
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
        until_s = _check_times(claims, now_s, config.leeway_s)
        return _Accepted(_client_of(claims, issuer), until_s, issuer, key_name, key)

    def _origin(self, token: bytes) -> tuple[_Issuer, tuple[str, str]]:
        """The issuer that a token names, and the name of its key there. Nothing is verified yet.

        Raises:
            ApiError: 401.
        """
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
    """Add an entry as the newest, and drop the oldest if there are more than ``most``."""
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)


def _check_times(claims: Mapping[str, Any], now_s: float, leeway_s: float) -> float:
    """Check ``exp``, ``nbf`` and ``iat``. Returns when the token ceases to be accepted.

    Raises:
        ApiError: 401.
    """
    for name in ("exp", "nbf", "iat"):
        value = claims.get(name, 0)
        if not isinstance(value, int | float) or not abs(value) < 1e12:
            raise refused(f"The token's claim {name} is no time.")
    until_s: float = claims["exp"] + leeway_s
    if now_s >= until_s:
        raise refused("The token has expired.")
    if now_s < max(claims.get("nbf", 0), claims.get("iat", 0)) - leeway_s:
        raise refused("The token is not valid yet.")
    return until_s


def _client_of(claims: Mapping[str, Any], issuer: _Issuer) -> Client:
    """The client of a verified token.

    Raises:
        ApiError: 401, it names no tenant. 403, no limits are configured for it.
    """
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
    """The tenant's name in metrics and logs: its own if that is a label, else one that resembles
    it."""
    if LABEL.fullmatch(tenant) and tenant != UNNAMED:
        return tenant
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"t-{tenant[:40]}-{digest[:8]}")
