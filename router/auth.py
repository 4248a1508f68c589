"""Bearer keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from pydantic import SecretStr

from router.errors import ApiError, Reason
from router.trust import ANYONE, ApiKey, Client

_SCHEME = b"bearer "


class KeyRing:
    """The accepted keys and who holds them. An empty ring accepts every request.

    Only digests are kept. A key is compared with every accepted one, in constant time, so the
    time tells neither a length nor a prefix nor which key it was.
    """

    def __init__(self, entries: Iterable[SecretStr | ApiKey]) -> None:
        self._holders: list[tuple[bytes, Client]] = []
        for entry in entries:
            key = entry.key if isinstance(entry, ApiKey) else entry
            digest = _digest(key.get_secret_value().encode())
            self._holders.append((digest, Client.of(entry)))

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """Who sent these raw request headers (lower-case names).

        Raises:
            ApiError: 401.
        """
        if not self._holders:
            return ANYONE
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1 or values[0][: len(_SCHEME)].lower() != _SCHEME:
            raise _refusal("Send one header 'Authorization: Bearer <key>'.")
        digest = _digest(values[0][len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(digest, known) for known, _ in self._holders]
        if not any(matches):
            raise _refusal("The API key is not accepted.")
        return self._holders[matches.index(True)][1]

    def holder(self, owner: str) -> Client | None:
        """The client whose :attr:`~router.trust.Client.owner` this is; ``None`` if no key is its
        any more."""
        if not self._holders:
            return ANYONE if owner == ANYONE.owner else None
        return next((client for _, client in self._holders if client.owner == owner), None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(message: str) -> ApiError:
    return ApiError(Reason.INVALID_API_KEY, message, headers={"www-authenticate": "Bearer"})
