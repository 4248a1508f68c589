"""The clients of the API: those with an API key, and tenants with a token of an issuer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from sluice.router.tenancy.auth import KeyRing, bearer_of, unknown_key
from sluice.router.tenancy.limits import ANYONE, Client
from sluice.router.tenancy.tokens import TokenVerifier, is_token


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
        """The client that sent these raw request headers (lower-case names).

        Raises:
            ApiError: 401; of a token also 403 and 503.
        """
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
        """The client with this :attr:`~sluice.router.tenancy.limits.Client.owner`; ``None`` if it
        no longer has access."""
        if self.accepts_anyone:
            return ANYONE if owner == ANYONE.owner else None
        return self._keys.holder(owner) or self._tokens.holder(owner)

    async def start(self) -> None:
        """Read the keys of issuers once, in at most their timeouts."""
        await self._tokens.read_keys()

    async def watch(self) -> None:
        """Apply changes of the key file and of issuers' keys, indefinitely."""
        await asyncio.gather(self._keys.watch(), self._tokens.watch())
