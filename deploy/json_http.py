"""JSON over HTTP to a server that an operator names: Ray's dashboard, or a router's admin API."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 64 << 20
_MAX_SHOWN = 400


_PASSING = (408, 425, 429)
"""Statuses below 500 that may be temporary."""


_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""What OpenSSL calls an answer that is not TLS."""


class UnreachableError(Exception):
    """Nothing answered there."""


class AnswerError(Exception):
    """The server refused or failed, with this HTTP ``status``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered in a moment: a server that starts or is busy."""
        return self.status >= 500 or self.status in _PASSING


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse redirects: following one would send the key to another server."""


class JsonServer:
    """One server. The bearer ``key`` goes nowhere else: no redirects, no proxies of the
    environment. ``timeout_s``: longest silence of the server, seconds. Raises ValueError:
    ``address`` is not ``http(s)://HOST:PORT``, perhaps with a path."""

    def __init__(self, address: str, key: str | None = None, timeout_s: float = 10.0) -> None:
        self.address = checked_address(address)
        self._key = key
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The answer's JSON; ``None`` for an empty answer. Raises UnreachableError; AnswerError: no
        success, or no JSON."""
        request = urllib.request.Request(self.address + path, method=method)
        if self._key is not None:
            # Not kept where the library would copy it to another request.
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            status, raw = self._answer(request, timeout_s or self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(_why_not(error, request.type)) from None
        if len(raw) > MAX_ANSWER_BYTES:
            raise AnswerError(status, f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        if not raw:
            return None
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise AnswerError(
                status, f"the answer is not JSON: {_short(raw)}; is the address right?"
            ) from None

    def _answer(self, request: urllib.request.Request, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a success. Raises OSError, HTTPException: no answer; AnswerError."""
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                raw = answer.read(MAX_ANSWER_BYTES + 1)
                if answer.length and len(raw) <= MAX_ANSWER_BYTES:
                    raise http.client.IncompleteRead(raw, answer.length)
                return answer.status, raw
        except urllib.error.HTTPError as error:
            with error:
                raise AnswerError(error.code, _refusal(error)) from None


def checked_address(address: str) -> str:
    """``address`` without a slash at its end. Raises ValueError: not ``http(s)://HOST:PORT``."""
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


def _why_not(error: BaseException, scheme: str) -> str:
    """Why there was no answer, and what to do where that is known."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    # What came in place of HTTP may stand in it.
    why = _short(str(error).encode(errors="replace")) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{why}; SSL_CERT_FILE names the file of an authority of your own"
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return f"{why}; it seems to speak plain HTTP: use http://"
    broken_off = isinstance(error, http.client.HTTPException | ConnectionResetError)
    if scheme == "http" and broken_off:
        return f"{why}; if it speaks TLS, use https://"
    return why


def _refusal(error: urllib.error.HTTPError) -> str:
    """The message in an error's body: OpenAI's shape, or whatever text it is, and what to do."""
    raw = error.read(1 << 20)
    try:
        return _short(str(json.loads(raw)["error"]["message"]).encode(errors="replace"))
    except (ValueError, KeyError, TypeError, RecursionError):
        message = _short(raw) or _short(str(error.reason).encode(errors="replace"))
    if moved := error.headers.get("location"):
        where = moved.removesuffix(urlsplit(error.url).path)
        return f"{message}; it says to ask at {_short(where.encode(errors='replace'))} instead"
    return f"{message}; is the address right?" if error.code == 404 else message


def _short(raw: bytes) -> str:
    text = printable(raw.decode(errors="replace")).strip()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
