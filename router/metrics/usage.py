"""Tokens and times of requests: by service class, by client, and under OpenTelemetry's names.

The metrics whose names begin with ``gen_ai`` are those of OpenTelemetry's conventions for
generative AI, in the form that Prometheus gives to their names and attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sluice.protocol.requests import POOLING, Endpoint, ResponseTail
from sluice.router.metrics.client_names import ClientNames
from sluice.router.metrics.families import Families
from sluice.scheduling.request.objective import TokenClock

if TYPE_CHECKING:
    from sluice.router.request.call import Call

E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600)
QUEUE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300)
GAP_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)

# The bounds that the conventions ask for.
_TOKEN_BUCKETS = tuple(4**power for power in range(14))
_DURATION_BUCKETS_S = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
)
_OUTPUT_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

PROVIDER = "sluice"
"""The conventions' name of what serves."""

OPERATIONS: dict[Endpoint, str] = {
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
    "classify": "classify",
    "pooling": "pooling",
    "score": "score",
    "rerank": "rerank",
    "transcriptions": "transcription",
    "translations": "translation",
}
"""The conventions' names of what the scheduled endpoints do; they have none for scores and for
speech."""

_OPERATION = "gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"


class UsageMetrics:
    """What requests used and how long they took. ``clients`` label those that
    count clients. A request costs a constant number of observations, a stream one more for each
    piece with tokens."""

    def __init__(self, make: Families, clients: ClientNames) -> None:
        self._clients = clients
        self._models = ClientNames()
        self._tokens = make.counters(
            "sluice_tokens",
            "Tokens of requests that ended: prompt, cached (a part of prompt), generated.",
            "class",
            "type",
        )
        self._client_tokens = make.counters(
            "sluice_client_tokens", "The same by the name of the API key.", "client", "type"
        )
        self._e2e_s = make.histograms(
            "sluice_e2e_seconds",
            "Time from a request's arrival to the end of its response, where it was served.",
            E2E_BUCKETS_S,
            "class",
        )
        self._queue_s = make.histograms(
            "sluice_queue_seconds",
            "Time from a request's arrival to the first batch that it was in.",
            QUEUE_BUCKETS_S,
            "class",
        )
        self._gap_s = make.histograms(
            "sluice_inter_token_seconds",
            "Time between two pieces of a stream that carry tokens.",
            GAP_BUCKETS_S,
            "class",
        )
        self._token_usage = make.histograms(
            "gen_ai_client_token_usage",
            "Input and output tokens of a request (gen_ai.client.token.usage).",
            _TOKEN_BUCKETS,
            *_OPERATION,
            "gen_ai_token_type",
        )
        self._duration_s = make.histograms(
            "gen_ai_server_request_duration_seconds",
            "Time from a request's arrival to its end (gen_ai.server.request.duration).",
            _DURATION_BUCKETS_S,
            *_OPERATION,
            "error_type",
        )
        self._first_token_s = make.histograms(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to first token of served requests (gen_ai.server.time_to_first_token).",
            _FIRST_TOKEN_BUCKETS_S,
            *_OPERATION,
        )
        self._output_token_s = make.histograms(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per token after the first, of served requests "
            "(gen_ai.server.time_per_output_token).",
            _OUTPUT_TOKEN_BUCKETS_S,
            *_OPERATION,
        )

    def gap(self, service_class: str) -> Callable[[float], None]:
        """Observes the seconds between two pieces with tokens of one stream."""
        observe: Callable[[float], None] = self._gap_s(service_class).observe
        return observe

    def ended(
        self,
        call: Call,
        clock: TokenClock,
        error: str,
        now_s: float,
        tail: ResponseTail | None = None,
        cached_tokens: int = 0,
        queued_s: float | None = None,
    ) -> None:
        """Count a request that ended.

        The tokens of a response that broke off or was not read to its end are those that were
        sent.

        Args:
            clock: what was seen of its tokens.
            error: name of its outcome, from a bounded set; empty where it was served.
            tail: of its response, if that ended by itself.
            cached_tokens: of its prompt.
            queued_s: from its arrival to its first batch, if the engine reports it.
        """
        if not call.scheduled:
            return
        service_class = call.slo.service_class
        generated = clock.tokens if tail is None else tail.output_tokens
        if call.endpoint in POOLING:
            generated = 0  # the engine counts a vector or a score as a token
        counts = {"generated": generated}
        if tail is not None:
            counts |= {"prompt": tail.prompt_tokens, "cached": cached_tokens}
            if queued_s is not None:
                self._queue_s(service_class).observe(queued_s)
        client = self._clients.label(call.client.name)
        for name, count in counts.items():
            if count:
                self._tokens(service_class, name).inc(count)
                self._client_tokens(client, name).inc(count)
        operation = (OPERATIONS[call.endpoint], PROVIDER, self._models.label(call.model or ""))
        took_s = now_s - call.received_s
        self._duration_s(*operation, error).observe(took_s)
        if error:
            return
        self._e2e_s(service_class).observe(took_s)
        for name, count in (("input", counts.get("prompt", 0)), ("output", generated)):
            if count:
                self._token_usage(*operation, name).observe(count)
        if clock.ttft_s is not None:
            self._first_token_s(*operation).observe(clock.ttft_s)
        if clock.mean_tpot_s is not None:
            self._output_token_s(*operation).observe(clock.mean_tpot_s)
