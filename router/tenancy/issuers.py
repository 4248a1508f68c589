"""Configuration of the issuers whose tokens (JWTs) are accepted beside API keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sluice.router.tenancy.limits import TenantLimits
from sluice.router.wire import LABEL

MAX_ISSUERS: Final = 8
"""Maximum number of issuers: their names label metrics."""

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
"""Signatures that are verified with a public key. `none` and the HMACs (`HS256`) cannot be
configured: whoever can verify those can also make them."""

_Claim = Annotated[str, Field(min_length=1, max_length=200)]


def check_url(url: str) -> str:
    """Check that the signing keys may be read from ``url``, and return it.

    Raises:
        ValueError: it is no https URL. On this machine, http is sufficient: over a network, whoever
            could change the answer could sign tokens.
    """
    parts = urlsplit(url)
    is_safe = parts.scheme == "https" or (
        parts.scheme == "http" and is_loopback(parts.hostname or "")
    )
    if not is_safe or not parts.hostname or parts.username or parts.fragment:
        raise ValueError(
            "must be an https URL without user and fragment (http on a loopback address)"
        )
    return url


class TokenIssuer(BaseModel):
    """An issuer of tokens: an OpenID Connect provider, or any other that signs JWTs and publishes
    its keys. A valid token names its tenant, and gets only limits that are configured here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    leeway_s: float = Field(
        default=30.0,
        ge=0,
        le=300,
        description="Tolerance for differences between the clocks, for `exp`, `nbf` and `iat`, "
        "seconds.",
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
    refresh_s: float = Field(
        default=300.0,
        ge=10,
        le=86_400,
        description="Interval at which the signing keys are read, seconds: a key that the issuer "
        "withdraws is accepted for that long.",
    )
    stale_s: float = Field(
        default=21_600.0,
        ge=60,
        le=604_800,
        description="How long the keys are used while they cannot be read again, seconds. After "
        "that, tokens get 503.",
    )
    timeout_s: float = Field(
        default=5.0, gt=0, le=60, description="Timeout of each read of the keys, seconds."
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
    """Check conditions over all issuers.

    Args:
        classes: names of the service classes.

    Raises:
        ValueError: a condition fails.
    """
    bad = [name for name in issuers if not LABEL.fullmatch(name)]
    if bad:
        raise ValueError(f"names of issuers must match {LABEL.pattern}, got {bad}")
    if len({entry.issuer for entry in issuers.values()}) < len(issuers):
        raise ValueError("two entries of issuers have the same issuer")
    for name, entry in issuers.items():
        limits = [*entry.limits.values(), *filter(None, [entry.default_limits])]
        unknown = {each for caps in limits for each in caps.classes or ()} - set(classes)
        if unknown:
            known = ", ".join(sorted(classes))
            raise ValueError(
                f"issuers.{name} names unknown classes {sorted(unknown)}; known are: {known}"
            )


def is_loopback(host: str) -> bool:
    """Whether a host name or address, without a port, is of this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
