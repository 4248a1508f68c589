"""Every name that Sluice adds to the OpenAI API: body fields, request and response headers.

The aliases are the names that the llm-d router reads for the same two objectives.
"""

from __future__ import annotations

from typing import Final

SLO_FIELD: Final = "slo"
"""Body object with the objective; its keys are those of :data:`SLO_HEADERS`."""

SERVICE_TIER_FIELD: Final = "service_tier"
"""OpenAI's body field; it selects a service class."""

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

SLO_HEADER_ALIASES: Final = {
    TTFT: "x-llm-d-slo-ttft-ms",
    TPOT: "x-llm-d-slo-tpot-ms",
}
"""Key of the body object -> second name of its header."""

REPLICA_HEADER: Final = "x-sluice-replica"
"""Response: the replica that served the request."""

REQUEST_ID_HEADER: Final = "x-sluice-request-id"
"""Response: our id of the request. It is never the client's."""

CLASS_HEADER: Final = "x-sluice-class"
"""Response: the service class that the request was served as."""

TARGET_KWARG: Final = "_target"
"""Keyword of the replica call that the request router reads its hint from."""
