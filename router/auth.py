"""Bearer keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from pydantic import SecretStr

from router.errors import ApiError, Reason

_SCHEME = b"bearer "


class KeyRing:
    """The accepted keys. An empty ring accepts every request.

    Only digests are kept. A key is compared with every accepted one, in constant time, so the
    time tells neither a length nor a prefix nor which key it was.
    """

    def __init__(self, keys: Iterable[SecretStr]) -> None:
        self._digests = tuple(_digest(key.get_secret_value().encode()) for key in keys)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Accept raw request headers (lower-case names) or refuse.

        Raises:
            ApiError: 401.
        """
        if not self._digests:
            return
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1 or values[0][: len(_SCHEME)].lower() != _SCHEME:
            raise _refusal("Send one header 'Authorization: Bearer <key>'.")
        digest = _digest(values[0][len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise _refusal("The API key is not accepted.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(message: str) -> ApiError:
    return ApiError(Reason.INVALID_API_KEY, message, headers={"www-authenticate": "Bearer"})
