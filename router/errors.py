"""The reasons why requests fail, and the client's response for each: one table."""

from __future__ import annotations

import enum
from math import ceil
from typing import Any, Self

from starlette.responses import JSONResponse

from sluice.protocol.errors import NO_THREADS, error_document, error_event
from sluice.protocol.requests import Endpoint
from sluice.router import wire

MAX_RETRY_AFTER_S = 3_600.0
"""Maximum of ``Retry-After``, seconds."""


LONGEST_REPEAT_S = 60.0
"""Longest ``Retry-After`` that OpenAI's clients obey, seconds; some retry at once after more."""


class Reason(enum.StrEnum):
    """Why a request was not served. The value is the error's ``code``; without any
    ``retry_after_s``, here or predicted, the response says that a retry is useless."""

    status: int
    retry_after_s: float | None

    def __new__(cls, code: str, status: int, retry_after_s: float | None = None) -> Self:
        """The code with the response's status."""
        reason = str.__new__(cls, code)
        reason._value_, reason.status, reason.retry_after_s = code, status, retry_after_s
        return reason

    INVALID_VALUE = "invalid_value", 400
    INVALID_HTTP = "invalid_http", 400
    INVALID_JSON = "invalid_json", 400
    BODY_TOO_SLOW = "body_too_slow", 400
    THREAD_UNSUPPORTED = NO_THREADS, 400
    INVALID_API_KEY = "invalid_api_key", 401
    INVALID_TOKEN = "invalid_token", 401
    STORAGE_LIMIT = "storage_limit", 403  # a limit that waiting does not lift
    NOT_PERMITTED = "not_permitted", 403
    UNKNOWN_URL = "unknown_url", 404
    NOT_FOUND = "not_found", 404
    MODEL_NOT_FOUND = "model_not_found", 404
    NOT_OFFERED = "endpoint_not_offered", 404
    BATCHES_OFF = "batches_off", 404
    METHOD_NOT_ALLOWED = "method_not_allowed", 405
    REQUEST_TIMEOUT = "request_timeout", 408
    LAST_REPLICA = "last_replica", 409
    TOO_LARGE = "request_too_large", 413
    UNSUPPORTED_MEDIA = "unsupported_media_type", 415
    REQUEST_QUARANTINED = "request_quarantined", 422
    CLIENT_FULL = "client_full", 429, 1
    REQUEST_RATE = "request_rate_exceeded", 429
    TOKEN_RATE = "token_rate_exceeded", 429
    SLO_UNATTAINABLE = "slo_unattainable", 429
    OVER_SHARE = "over_share", 429, 1
    QUEUE_FULL = "queue_full", 429, 1
    QUEUE_TIMEOUT = "queue_timeout", 429, 1
    DEADLINE_PASSED = "deadline_passed", 429, 1
    HEAD_TOO_LARGE = "headers_too_large", 431
    REQUEST_SUSPECTED = "request_suspected", 500
    INTERNAL = "internal_error", 500
    ROUTER_FULL = "router_full", 503, 1
    ROUTER_OVERLOADED = "router_overloaded", 503, 1
    ROUTER_STOPPING = "router_stopping", 503, 1
    REPLICAS_FULL = "replicas_full", 503, 1
    CONTROLLER_DOWN = "controller_down", 503, 1
    ISSUER_UNAVAILABLE = "issuer_unavailable", 503, 2
    NO_REPLICA = "no_replica", 503, 2
    MODEL_STARTING = "model_starting", 503, 2
    REPLICA_FAILED = "replica_failed", 503, 1
    STREAM_BROKEN = "stream_broken", 503  # sent inside a stream that already has its status
    STORAGE_FULL = "storage_full", 507


class ApiError(Exception):
    """A failure reported to the client. ``param``: the field or header at fault. ``retry_after_s``:
    predicted time until there may be capacity; ms in the body, whole seconds (up) in the header."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self._headers = headers or {}
        self.offer: dict[str, Any] | None = None
        """The nearest objective that could be promised, of a refused one."""
        if retry_after_s is not None:
            retry_after_s = max(0.0, min(MAX_RETRY_AFTER_S, retry_after_s))
        self.retry_after_s = retry_after_s

    def document(self, endpoint: Endpoint | None = None) -> dict[str, Any]:
        """The body in the shape of ``endpoint``'s API, with ``retry_after_ms`` if predicted."""
        predicted_ms = None if self.retry_after_s is None else round(self.retry_after_s * 1000, 3)
        status, code = self.reason.status, self.reason.value
        document = error_document(endpoint, status, self.message, code, self.param, predicted_ms)
        if self.offer is not None:
            document["error"]["offer"] = self.offer
        return document

    def response(
        self, endpoint: Endpoint | None = None, headers: dict[str, str] | None = None
    ) -> JSONResponse:
        """The complete HTTP response of ``endpoint``, with ``headers`` added."""
        merged = {**self._headers, **(headers or {})}
        if (offer := self.offer) is not None:
            merged[wire.QUOTE_HEADER] = offer["quote"]
            names = wire.OFFER_HEADERS.items()
            merged |= {header: f"{offer[name]:.15g}" for name, header in names if name in offer}
        retry_after_s = self.retry_after_s
        if retry_after_s is None:
            retry_after_s = self.reason.retry_after_s
        if retry_after_s is not None:
            merged["retry-after"] = str(max(1, ceil(retry_after_s)))
        if retry_after_s is None or retry_after_s > LONGEST_REPEAT_S:
            merged[wire.SHOULD_RETRY_HEADER] = "false"
        body = self.document(endpoint)
        return JSONResponse(body, status_code=self.reason.status, headers=merged)

    def event(self, endpoint: Endpoint) -> bytes:
        """The error as a server-sent event, for a stream that has begun."""
        return error_event(endpoint, self.document(endpoint))


def invalid(message: str, param: str | None = None) -> ApiError:
    """A 400: ``message`` names the field, what was wrong and what is allowed."""
    return ApiError(Reason.INVALID_VALUE, message, param)


def shown(value: object, limit: int = 64) -> str:
    """``value`` as an error message may repeat it: short, printable ASCII. ``O(limit)``."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge integer"
    text = ascii(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[:limit] + "..."
