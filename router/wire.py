"""Every name that Sluice adds to the OpenAI API, and their second names (llm-d, Gateway API,
Dynamo, SGLang's routers)."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import ip_address
from typing import Final


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether a host name or address, without a port, is a loopback one."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


MIN_OBJECTIVE_MS = 0.001  # shortest objective that may be asked for: a microsecond, in milliseconds
MAX_OBJECTIVE_MS = 86_400_000.0  # longest objective that may be asked for: a day, in milliseconds

LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Names of classes and clients: they are sent in headers and label metrics."""

SLO_FIELD: Final = "slo"  # body object with the objective
STAGES: Final = "stages"  # key of the body object with the objectives of the request's stages
LOOP: Final = "loop"  # key of the body object with the tool loop that the request is a turn of

LOOP_DEADLINE: Final = "deadline_ms"
"""Key of the loop: from its first turn to the end of its last one."""

SERVICE_TIER_FIELD: Final = "service_tier"  # OpenAI's body field; it selects a service class

TTFT: Final = "ttft_ms"
TPOT: Final = "tpot_ms"
E2E: Final = "e2e_ms"
PRIORITY: Final = "priority"
CLASS: Final = "class"

SLO_HEADER_PREFIX: Final = "x-slo-"
SLO_HEADERS: Final = {
    TTFT: "x-slo-ttft-ms",
    TPOT: "x-slo-tpot-ms",
    E2E: "x-slo-e2e-ms",
    PRIORITY: "x-slo-priority",
    CLASS: "x-slo-class",
}
"""Key of the body object -> request header that states the same."""

LLM_D_HEADERS: Final = {
    TTFT: "x-llm-d-slo-ttft-ms",
    TPOT: "x-llm-d-slo-tpot-ms",
    CLASS: "x-llm-d-inference-objective",
}
"""The llm-d router's names; its deprecated ``x-slo-*-ms`` are among :data:`SLO_HEADERS`."""

GATEWAY_HEADERS: Final = {CLASS: "x-gateway-inference-objective"}
"""Names in the Gateway API Inference Extension; deprecated ones of the llm-d router."""

DYNAMO_HEADERS: Final = {TTFT: "x-dynamo-meta-slo-ttft-ms"}
"""Dynamo's endpoint picker: whole milliseconds, above 0 (its ``admission.rs``)."""

SGL_HEADERS: Final = {TTFT: "x-sgl-ttft-slo-ms", TPOT: "x-sgl-tps-slo"}
"""sgl-router: the second one is tokens per second of one request, at least (its buckets meet a
target if their estimate is not below it)."""

SMG_HEADERS: Final = {CLASS: "x-smg-priority"}
"""The SGLang Model Gateway's classes, from ``system``, the most important one, to ``bulk``."""

SLO_HEADER_SETS: Final = (
    SLO_HEADERS,
    LLM_D_HEADERS,
    GATEWAY_HEADERS,
    DYNAMO_HEADERS,
    SGL_HEADERS,
    SMG_HEADERS,
)
"""The headers that state objectives, in order of precedence."""

NVEXT_FIELD: Final = "nvext"
"""Dynamo's body object; :data:`NVEXT` of it is read, and engines do not get it."""

EXPECTED: Final = "expected_tokens"
NVEXT: Final = {
    TTFT: "nvext.router.ttft_target",
    TPOT: "nvext.router.itl_target",
    PRIORITY: "nvext.agent_hints.priority",
    EXPECTED: "nvext.agent_hints.osl",
}
"""Fields of Dynamo's (``RouterParams``, ``AgentHints`` in its ``nvext.rs``): targets in
milliseconds; a higher priority is more important, as here (in vLLM a lower one), of any size; the
expected output tokens."""

QUEUE_TTL_HEADER: Final = "x-llm-d-inference-ttl"
"""Request: maximum wait in an admission queue, a duration as in Go."""

REPLICA_HEADER: Final = "x-sluice-replica"  # response: the replica that served the request

PREFILL_REPLICA_HEADER: Final = "x-sluice-prefill-replica"
"""Response: the prefill replica, if it is a separate one."""

REQUEST_ID_HEADER: Final = "x-sluice-request-id"
"""Response: Sluice's id of the request. It is never the client's."""

CLIENT_REQUEST_ID_HEADER: Final = "x-request-id"
"""Request: the client's own request id, for lookups only. Serve generates one if it is missing."""

CLASS_HEADER: Final = "x-sluice-class"  # response: the service class that the request was served as

ADMISSION_HEADER: Final = "x-sluice-admission"
"""Response: ``guaranteed`` if the SLO is promised, else ``best-effort``."""

PREDICTED_TTFT_HEADER: Final = "x-sluice-predicted-ttft-ms"
"""Response, if the SLO is promised: the predicted median TTFT, ms from the request's arrival."""

PROMISED_TTFT_HEADER: Final = "x-sluice-promised-ttft-ms"
"""Response, if an SLO with a TTFT is promised: that TTFT, ms from the request's arrival."""

PROMISED_TPOT_HEADER: Final = "x-sluice-promised-tpot-ms"
"""Response, if an SLO with a TPOT is promised: that TPOT, ms."""

PROMISED_E2E_HEADER: Final = "x-sluice-promised-e2e-ms"
"""Response: the promised end-to-end time, ms from the request's arrival."""

PROMISE_LEVEL_HEADER: Final = "x-sluice-promise-level"
"""Response, if the SLO is promised: the share of such promises that is to be kept."""

QUOTE_PATH: Final = "/v1/slo/quote"

QUOTE_HEADER: Final = "x-sluice-quote"
"""Request: the quote or the offer that it takes up. Response: of the offer in a refusal."""

EXPIRES: Final = "expires_ms"
MAX_TOKENS_FIELD: Final = "max_tokens"
OFFER_HEADERS: Final = {
    TTFT: "x-sluice-offer-ttft-ms",
    TPOT: "x-sluice-offer-tpot-ms",
    E2E: "x-sluice-offer-e2e-ms",
    EXPIRES: "x-sluice-offer-expires-ms",
}
"""Key of the error's offer -> response header that says the same."""

LOOP_REMAINING_HEADER: Final = "x-sluice-loop-remaining-ms"
"""Response to a turn of a tool loop: ms to the loop's deadline when the response's head is sent."""

LOOP_ADMISSION_HEADER: Final = "x-sluice-loop-admission"
"""Response to a turn of a tool loop: ``guaranteed`` if the loop is promised, else
``best-effort``."""

CLAMPED_HEADER: Final = "x-sluice-clamped"
"""Response: the values that the limits of the API key changed: ``priority=4, ttft_ms=500``."""

DEGRADED_HEADER: Final = "x-sluice-degraded"
"""Response: what was applied of the alternatives that the class accepts: ``max_tokens=512``."""

LATE_HEADER: Final = "x-sluice-late"
"""Response: the promised objective that is going to be missed, if that is known by then."""

SHOULD_RETRY_HEADER: Final = "x-should-retry"
"""Response: ``false`` if a retry is useless; OpenAI's clients retry 409, 429, 5xx otherwise."""

SESSION_HEADER: Final = "x-sluice-session"
"""Request: the session that it belongs to, such as a conversation; its other names are
:data:`~sluice.router.request.session.SESSION_HEADERS`. Response: ``NAME=HASH`` of the names by
which it was recognised."""

KEY_HEADERS: Final = ("x-api-key", "api-key")
"""Request: the key, as Anthropic's and Azure's clients send it."""

TARGET_KWARG: Final = "_target"
"""Keyword of the replica call that the request router reads its hint from."""

STREAM_HEADER: Final = "x-sluice-stream"
"""Response, for the endpoint picker only: ``HOST:PORT TICKET`` of a stream to fetch."""

FETCHES: Final = "fetches"
"""ASGI state name, set by the endpoint picker: its Envoy can fetch a stream."""

FORWARD: Final = "forward"
"""ASGI state name: writes a part of a streamed body at once, and returns whether the client keeps
up. Without it, and after it has returned false, the ASGI server's ``send`` waits for the client."""

WATCH: Final = "watch"
"""ASGI state name: has a function called once, with the type of the message that the ASGI server's
``receive`` would return, when the client leaves or the router stops; ``None`` ends that."""

STOP_MESSAGE: Final = "sluice.stop"
"""Type of the ASGI message by which a router that stops ends the answers that still run."""

NO_CLASS: Final = "none"  # class label of a request that was refused before its class was known
MAX_TOKENS: Final = 2**31 - 1  # largest token count or token id

RESPONSE_HEADERS: Final = (
    REQUEST_ID_HEADER,
    CLASS_HEADER,
    ADMISSION_HEADER,
    PREDICTED_TTFT_HEADER,
    PROMISED_TTFT_HEADER,
    PROMISED_TPOT_HEADER,
    PROMISED_E2E_HEADER,
    PROMISE_LEVEL_HEADER,
    QUOTE_HEADER,
    *OFFER_HEADERS.values(),
    LOOP_REMAINING_HEADER,
    LOOP_ADMISSION_HEADER,
    CLAMPED_HEADER,
    DEGRADED_HEADER,
    LATE_HEADER,
    SESSION_HEADER,
    REPLICA_HEADER,
    PREFILL_REPLICA_HEADER,
    SHOULD_RETRY_HEADER,
    CLIENT_REQUEST_ID_HEADER,
    "retry-after",
    *(
        f"x-ratelimit-{what}-{kind}"
        for what in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
)
"""Response headers that pages of other origins may read, if CORS allows them requests at all."""
