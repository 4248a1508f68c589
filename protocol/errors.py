"""Errors as clients see them: one shape, one set of types and one of codes for each API, whether
the router or an engine refuses."""

from __future__ import annotations

import json
from typing import Any, Final

from sluice.protocol.requests import ANTHROPIC, Endpoint

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_OPENAI_TYPES: Final = {403: "permission_error", 429: "rate_limit_error"}

NO_THREADS: Final = "thread_unsupported_request"
"""Code of a refused ``thread``. Anthropic's clients know it, and send all messages instead."""

_CODES: Final = {
    404: "not_found",
    409: "request_id_in_use",
    500: "internal_error",
    501: "not_implemented",
    503: "replicas_full",
}
"""Codes of an engine's errors by their status; the others are values that it refuses."""


def error_document(
    endpoint: Endpoint | None,
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    retry_after_ms: float | None = None,
) -> dict[str, Any]:
    """The body of an error in the shape of ``endpoint``'s API; ``None``: OpenAI's. ``code``:
    why, for programs, added to Anthropic's too; ``param``: the field or header at fault."""
    predicted = {} if retry_after_ms is None else {"retry_after_ms": retry_after_ms}
    if endpoint in ANTHROPIC:
        other = "api_error" if status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(status, other)
        error = {"type": kind, "message": message, "code": code, **predicted}
        if code == NO_THREADS:
            error["details"] = {"error_code": code}
        return {"type": "error", "error": error}
    other = "server_error" if status >= 500 else "invalid_request_error"
    kind = _OPENAI_TYPES.get(status, other)
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **predicted}}


def error_event(endpoint: Endpoint, document: dict[str, Any]) -> bytes:
    """The server-sent event that ends a stream with the error in ``document``. Anthropic's clients
    go by its name, OpenAI's by the field ``error``, and those of responses by the type, too."""
    if endpoint == "responses":
        error = document["error"]
        document = {
            "type": "error",
            **{n: error[n] for n in ("code", "message", "param")},
            **document,
        }
    named = "event: error\n" if "type" in document else ""
    return f"{named}data: {json.dumps(document)}\n\n".encode()


class RequestError(ValueError):
    """A request that an engine refuses. ``code``: by default the one of ``status``."""

    def __init__(
        self, message: str, param: str | None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code or _CODES.get(status, "invalid_value")

    def document(self, endpoint: Endpoint) -> dict[str, Any]:
        """The error body of an answer of ``endpoint``."""
        return error_document(endpoint, self.status, str(self), self.code, self.param)

    def body(self, endpoint: Endpoint) -> bytes:
        """The same as JSON."""
        return json.dumps(self.document(endpoint)).encode()
