"""JSON over HTTP to a server that an operator names: Ray's dashboard, or a router's admin API."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 64 << 20
_MAX_SHOWN = 400


class UnreachableError(Exception):
    """Nothing answered there."""


class AnswerError(Exception):
    """The server refused or failed.

    Args:
        status: of the HTTP answer.
        message: what the server says, in short.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Following one would hand the key to whomever it names."""


class JsonServer:
    """One server. The key goes there and nowhere else: redirects are not followed, and
    proxies that the environment names are not used.

    Args:
        address: ``http://HOST:PORT`` or ``https://HOST:PORT``, perhaps with a path before all.
        key: sent as a bearer key, if given.
        timeout_s: longest silence of the server, seconds.

    Raises:
        ValueError: ``address`` has another form.
    """

    def __init__(self, address: str, key: str | None = None, timeout_s: float = 10.0) -> None:
        self.address = checked_address(address)
        self._key = key
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON; ``None`` for an empty answer.

        Raises:
            UnreachableError: nothing answers there, or not with HTTP, or not in time.
            AnswerError: the status is not a success, or the answer is not JSON.
        """
        request = urllib.request.Request(self.address + path, method=method)
        if self._key is not None:
            # Not kept where the library would copy it to another request.
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                raw = answer.read(MAX_ANSWER_BYTES + 1)
                status = answer.status
        except urllib.error.HTTPError as error:
            with error:
                raise AnswerError(error.code, _message_of(error.read(1 << 20))) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UnreachableError(str(reason) or type(reason).__name__) from None
        if len(raw) > MAX_ANSWER_BYTES:
            raise AnswerError(status, f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        if not raw:
            return None
        try:
            return json.loads(raw)
        except ValueError:
            raise AnswerError(status, f"the answer is not JSON: {_short(raw)}") from None


def checked_address(address: str) -> str:
    """``address`` without a slash at its end.

    Raises:
        ValueError: it is not ``http://HOST:PORT`` or ``https://HOST:PORT``.
    """
    try:
        parts = urlsplit(address)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        fine = False
    if not fine or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"an address looks like http://HOST:PORT, got {_short(address.encode())}")
    return address.rstrip("/")


def printable(text: str) -> str:
    """``text`` in one line and without characters that steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _message_of(raw: bytes) -> str:
    """The message in an error body: OpenAI's shape, or whatever text it is."""
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return _short(raw)
    return _short(str(message).encode())


def _short(raw: bytes) -> str:
    text = printable(raw.decode(errors="replace")).strip()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
