"""Maps the reason of a failure to the client's response: one table."""

from __future__ import annotations

import enum
from math import ceil
from typing import Any, NamedTuple

from starlette.responses import JSONResponse

from sluice.protocol.errors import error_document, error_event
from sluice.protocol.requests import Endpoint
from sluice.router import wire

MAX_RETRY_AFTER_S = 3_600.0
"""Maximum of ``Retry-After``, seconds."""


LONGEST_REPEAT_S = 60.0
"""Longest ``Retry-After`` that OpenAI's clients obey, seconds; some retry at once after more."""


class Reason(enum.StrEnum):
    """Why a request was not served. The value is the error's ``code``."""

    INVALID_VALUE = "invalid_value"
    INVALID_HTTP = "invalid_http"
    REQUEST_TIMEOUT = "request_timeout"
    HEAD_TOO_LARGE = "headers_too_large"
    INVALID_JSON = "invalid_json"
    INVALID_API_KEY = "invalid_api_key"
    INVALID_TOKEN = "invalid_token"
    UNKNOWN_URL = "unknown_url"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_OFFERED = "endpoint_not_offered"
    BATCHES_OFF = "batches_off"
    STORAGE_LIMIT = "storage_limit"
    STORAGE_FULL = "storage_full"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    LAST_REPLICA = "last_replica"
    TOO_LARGE = "request_too_large"
    UNSUPPORTED_MEDIA = "unsupported_media_type"
    BODY_TOO_SLOW = "body_too_slow"
    NOT_PERMITTED = "not_permitted"
    CLIENT_FULL = "client_full"
    REQUEST_RATE = "request_rate_exceeded"
    TOKEN_RATE = "token_rate_exceeded"
    SLO_UNATTAINABLE = "slo_unattainable"
    OVER_SHARE = "over_share"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_PASSED = "deadline_passed"
    ROUTER_FULL = "router_full"
    ROUTER_OVERLOADED = "router_overloaded"
    ROUTER_STOPPING = "router_stopping"
    REPLICAS_FULL = "replicas_full"
    CONTROLLER_DOWN = "controller_down"
    ISSUER_UNAVAILABLE = "issuer_unavailable"
    NO_REPLICA = "no_replica"
    MODEL_STARTING = "model_starting"
    REPLICA_FAILED = "replica_failed"
    STREAM_BROKEN = "stream_broken"
    REQUEST_SUSPECTED = "request_suspected"
    REQUEST_QUARANTINED = "request_quarantined"
    INTERNAL = "internal_error"


class Rule(NamedTuple):
    """The response for a reason. Without any ``retry_after_s`` it says that a retry is useless."""

    status: int
    retry_after_s: float | None = None


RULES: dict[Reason, Rule] = {
    Reason.INVALID_VALUE: Rule(400),
    Reason.INVALID_JSON: Rule(400),
    Reason.INVALID_HTTP: Rule(400),
    Reason.BODY_TOO_SLOW: Rule(400),
    Reason.INVALID_API_KEY: Rule(401),
    Reason.INVALID_TOKEN: Rule(401),
    Reason.NOT_PERMITTED: Rule(403),
    # A limit that waiting does not lift.
    Reason.STORAGE_LIMIT: Rule(403),
    Reason.UNKNOWN_URL: Rule(404),
    Reason.NOT_FOUND: Rule(404),
    Reason.MODEL_NOT_FOUND: Rule(404),
    Reason.NOT_OFFERED: Rule(404),
    Reason.BATCHES_OFF: Rule(404),
    Reason.METHOD_NOT_ALLOWED: Rule(405),
    Reason.REQUEST_TIMEOUT: Rule(408),
    Reason.LAST_REPLICA: Rule(409),
    Reason.TOO_LARGE: Rule(413),
    Reason.UNSUPPORTED_MEDIA: Rule(415),
    Reason.CLIENT_FULL: Rule(429, retry_after_s=1),
    Reason.REQUEST_RATE: Rule(429),
    Reason.TOKEN_RATE: Rule(429),
    Reason.SLO_UNATTAINABLE: Rule(429),
    Reason.OVER_SHARE: Rule(429, retry_after_s=1),
    Reason.QUEUE_FULL: Rule(429, retry_after_s=1),
    Reason.QUEUE_TIMEOUT: Rule(429, retry_after_s=1),
    Reason.DEADLINE_PASSED: Rule(429, retry_after_s=1),
    Reason.REQUEST_QUARANTINED: Rule(422),
    Reason.HEAD_TOO_LARGE: Rule(431),
    Reason.INTERNAL: Rule(500),
    Reason.REQUEST_SUSPECTED: Rule(500),
    Reason.ROUTER_FULL: Rule(503, retry_after_s=1),
    Reason.ROUTER_OVERLOADED: Rule(503, retry_after_s=1),
    Reason.ROUTER_STOPPING: Rule(503, retry_after_s=1),
    Reason.REPLICAS_FULL: Rule(503, retry_after_s=1),
    Reason.CONTROLLER_DOWN: Rule(503, retry_after_s=1),
    Reason.ISSUER_UNAVAILABLE: Rule(503, retry_after_s=2),
    Reason.NO_REPLICA: Rule(503, retry_after_s=2),
    Reason.MODEL_STARTING: Rule(503, retry_after_s=2),
    Reason.REPLICA_FAILED: Rule(503, retry_after_s=1),
    Reason.STORAGE_FULL: Rule(507),
    # Sent inside a stream that already has its status.
    Reason.STREAM_BROKEN: Rule(503),
}


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
        if retry_after_s is not None:
            retry_after_s = max(0.0, min(MAX_RETRY_AFTER_S, retry_after_s))
        self.retry_after_s = retry_after_s

    @property
    def rule(self) -> Rule:
        """The row of the table."""
        return RULES[self.reason]

    def document(self, endpoint: Endpoint | None = None) -> dict[str, Any]:
        """The body in the shape of ``endpoint``'s API, with ``retry_after_ms`` if predicted."""
        predicted_ms = None if self.retry_after_s is None else round(self.retry_after_s * 1000, 3)
        status, code = self.rule.status, self.reason.value
        return error_document(endpoint, status, self.message, code, self.param, predicted_ms)

    def response(
        self, endpoint: Endpoint | None = None, headers: dict[str, str] | None = None
    ) -> JSONResponse:
        """The complete HTTP response of ``endpoint``, with ``headers`` added."""
        merged = {**self._headers, **(headers or {})}
        retry_after_s = self.retry_after_s
        if retry_after_s is None:
            retry_after_s = self.rule.retry_after_s
        if retry_after_s is not None:
            merged["retry-after"] = str(max(1, ceil(retry_after_s)))
        if retry_after_s is None or retry_after_s > LONGEST_REPEAT_S:
            merged[wire.SHOULD_RETRY_HEADER] = "false"
        body = self.document(endpoint)
        return JSONResponse(body, status_code=self.rule.status, headers=merged)

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
