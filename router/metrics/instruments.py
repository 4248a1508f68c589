"""The router's metrics. Every label is bounded; client and model names by :class:`ClientNames`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from sluice.protocol.requests import POOLING, Endpoint, ResponseTail
from sluice.router.errors import Reason
from sluice.router.tenancy.limits import ANYONE, UNNAMED, Client
from sluice.router.wire import NO_CLASS
from sluice.scheduling.request.lateness import Cause, Parts
from sluice.scheduling.request.objective import SLO, EarnedGain, Times, TokenClock

if TYPE_CHECKING:
    from sluice.router.request.call import Call


class Families:
    """Metrics in ``registry``. The library finds a series under a lock, and each request has
    dozens: :meth:`counters` and :meth:`histograms` return a lookup that remembers each series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, labels: str = "") -> Counter:
        """A counter; ``labels``: their names, with spaces."""
        return Counter(name, text, labels.split(), registry=self._registry)

    def counters(self, name: str, text: str, labels: str) -> Callable[..., Counter]:
        """A counter's series, by the values of its labels."""
        return cache(self.counter(name, text, labels).labels)

    def gauge(self, name: str, text: str, labels: str = "") -> Gauge:
        """A gauge."""
        return Gauge(name, text, labels.split(), registry=self._registry)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: str = ""
    ) -> Histogram:
        """A histogram."""
        return Histogram(name, text, labels.split(), buckets=buckets, registry=self._registry)

    def histograms(
        self, name: str, text: str, buckets: Sequence[float], labels: str
    ) -> Callable[..., Histogram]:
        """A histogram's series, by the values of its labels."""
        return cache(self.histogram(name, text, buckets, labels).labels)


class Outcome(enum.StrEnum):
    """How a request ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # the client's mistake: a 4xx of the router or of the engine
    REFUSED = "refused"
    """No capacity, no promise or no replica: a 429 or 503 before anything was served."""
    FAILED = "failed"  # a failure of a replica or the router: a 5xx, or an error event in a stream
    CANCELLED = "cancelled"  # the client left

    @property
    def answered(self) -> bool | None:
        """``None`` if that was not up to the server."""
        if self in (Outcome.CANCELLED, Outcome.CLIENT_ERROR):
            return None
        return self is Outcome.OK

    @classmethod
    def of_status(cls, status: int) -> Outcome:
        """The outcome of a request that was answered with this status."""
        if status < 400:
            return cls.OK
        if status in (429, 503):
            return cls.REFUSED
        return cls.CLIENT_ERROR if status < 500 else cls.FAILED


class Fallback(enum.StrEnum):
    """Why a request followed Serve's own balancing and not the controller's decision."""

    NO_ANSWER = "no_answer"  # the controller did not answer in time
    NO_DECISION = "no_decision"  # the controller knows no replica, as just after its restart
    REPEATED = "repeated"  # it chose a replica that had just failed this request
    MOVED = "moved"  # Serve did not know the chosen replica, or that one was full


class Transport(enum.StrEnum):
    """How a call is sent to a replica."""

    CONNECTION = "connection"  # over the router's own connection to it
    HANDLE = "handle"  # over Serve's handle


class StreamPath(enum.StrEnum):
    """How an event stream is sent from its replica to the client."""

    DIRECT = "direct"  # the client's Envoy fetches it from the replica
    ROUTER = "router"  # through the router's process


class Phase(enum.StrEnum):
    """A phase of a request that a P/D pair serves."""

    PREFILL = "prefill"  # until the prompt is computed, transport and queueing included
    TRANSFER = "transfer"  # from then to the first token


class MoveReason(enum.StrEnum):
    """Why a running stream moved to another replica."""

    LEAVING = "leaving"  # its replica is drained, or about to stop
    LATE = "late"  # it was promised, and predicted to miss its TPOT there


class RequestFigures(NamedTuple):
    """A request's figures, made once at its end; seconds from its arrival, ``ended_s`` by the
    clock.

    ``judged_s``: TTFT, TPOT and end-to-end time of the worst stages. ``sent``: first choice's
    tokens that reached the client. ``generated``: by the engine, or those sent if the response
    broke off. ``prompt``, ``cached``: ``None`` then. ``queued_s``: until its first batch, if known.
    ``late``: of a promise, by missed objective, the lateness by cause, the largest part first.
    """

    slo: SLO
    outcome: Outcome
    ended_s: float
    age_s: float
    ttft_s: float | None
    tpot_s: float | None
    mean_tpot_s: float | None
    e2e_s: float
    missed: tuple[str, ...]
    judged_s: Times | None
    earned: EarnedGain
    sent: int
    generated: int
    prompt: int | None = None
    cached: int | None = None
    queued_s: float | None = None
    late: Mapping[str, Parts] = {}

    @classmethod
    def of(
        cls,
        clock: TokenClock,
        outcome: Outcome,
        ended_s: float,
        tail: ResponseTail | None = None,
        cached: int = 0,
        queued_s: float | None = None,
    ) -> RequestFigures:
        """The figures by ``clock``. ``tail``: of a response that ended by itself."""
        slo = clock.slo
        return cls(
            slo,
            outcome,
            ended_s,
            ended_s - clock.arrival_s,
            clock.ttft_s,
            clock.tpot_s,
            clock.mean_tpot_s,
            clock.e2e_s(ended_s),
            clock.missed(ended_s) if slo.stated else (),
            clock.judged_s(ended_s) if slo.stages else None,
            clock.earned,
            clock.tokens,
            clock.tokens if tail is None else tail.output_tokens,
            None if tail is None else tail.prompt_tokens,
            None if tail is None else cached,
            queued_s,
        )


MAX_NAMES: Final = 1_000  # most names that label the metrics of a router process
OTHERS: Final = "other"  # stands for the names after the first MAX_NAMES


class ClientNames:
    """The names that have a label of their own: the first that a router meets. ``O(1)``."""

    def __init__(self, most: int = MAX_NAMES) -> None:
        self._most = most
        self._known = {UNNAMED, OTHERS}

    def label(self, name: str) -> str:
        """What a client of this name is called in metrics."""
        if name in self._known:
            return name
        if len(self._known) >= self._most + 2:  # those that every router has
            return OTHERS
        self._known.add(name)
        return name


RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 3, 5, 10)
WAIT_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 30, 60, 300)

_REFUSING = (403, 429, 503)


class AdmissionMetrics:
    """Metrics of admission. ``clients`` labels the metrics by client."""

    def __init__(self, make: Families, clients: ClientNames) -> None:
        self._clients = clients
        self.admissions = make.counters(
            "sluice_admissions",
            "Requests that a replica answered and that ended, by admission tier.",
            "class admission",
        )
        self._refusals = make.counters(
            "sluice_refusals",
            "Requests that were refused with 403, 429 or 503, by error code.",
            "class reason",
        )
        self._promises = make.counters(
            "sluice_promises",
            "Guaranteed requests by outcome: kept if every stated objective was met and the "
            "answer did not fail.",
            "class outcome",
        )
        self._announced = make.counters(
            "sluice_promises_announced",
            "Of these, streams that had said that they were going to miss their SLO.",
            "class outcome",
        )
        self.degraded = make.counters(
            "sluice_degraded",
            "Requests that were promised with less than they asked for, which their class accepts, "
            "by changed field.",
            "class field",
        )
        self._moved = make.counters(
            "sluice_promises_moved",
            "Of these, requests that moved from a replica that was going to miss their TTFT to "
            "another one that guaranteed it.",
            "class outcome",
        )
        self._missed = make.counters(
            "sluice_promises_missed",
            "Guaranteed requests that missed their SLO, by missed objective, or failed, and by the "
            "cause of most of the lateness.",
            "class objective cause",
        )
        self._client_promises = make.counters(
            "sluice_client_promises",
            "Guaranteed requests by the name of their API key, and by outcome.",
            "client class outcome",
        )
        self._ttft_ratio = make.histograms(
            "sluice_ttft_ratio",
            "Observed TTFT of guaranteed requests divided by its predicted median.",
            RATIO_BUCKETS,
            "class",
        )
        self.queue_length = make.gauge(
            "sluice_admission_queue_requests", "Requests in the router's admission queue.", "class"
        )
        self.queue_wait_s = make.histogram(
            "sluice_admission_queue_wait_seconds",
            "Time that requests spent in the router's admission queue, whatever the outcome.",
            WAIT_BUCKETS_S,
            "class",
        )
        self.starting = make.gauge(
            "sluice_starting_requests",
            "Requests in the router that wait for the first replica of a model that had none.",
        )
        self.start_wait_s = make.histogram(
            "sluice_start_wait_seconds",
            "Time that requests waited for it, whatever the outcome.",
            WAIT_BUCKETS_S,
        )
        self._over_share = make.counters(
            "sluice_over_share",
            "Requests without a guarantee because their client exceeded its fair share of "
            "guaranteed capacity.",
            "client",
        )
        self.clamped = make.counters(
            "sluice_clamped",
            "Requests in which an API key's limits changed a field of the SLO.",
            "client field",
        )

    def refused(self, reason: Reason, service_class: str = NO_CLASS) -> None:
        """Count an unserved request; of client errors only exceeded limits are refusals."""
        if reason.status in _REFUSING:
            self._refusals(service_class, reason.value).inc()

    def over_share(self, client: str) -> None:
        """Count a request without a promise because ``client`` has used its share."""
        self._over_share(self._clients.label(client)).inc()

    def ended(
        self,
        figures: RequestFigures,
        predicted_ttft_s: float | None,
        failed: bool,
        moved: bool = False,
        client: str = UNNAMED,
        announced: bool = False,
    ) -> bool | None:
        """Count a promised request that ended, and return whether its SLO was met; ``None``: its
        client left without a token before the deadlines. ``moved``: it left a late replica;
        ``announced``: it had said that it would be late."""
        slo, ttft_s, missed = figures.slo, figures.ttft_s, figures.missed
        service_class = slo.service_class
        if ttft_s is not None and predicted_ttft_s is not None and predicted_ttft_s > 0:
            self._ttft_ratio(service_class).observe(ttft_s / predicted_ttft_s)
        if failed:
            missed = ("failed",)
        elif ttft_s is None:
            due_s = {"ttft": slo.columns[0], "e2e": slo.columns[2]}
            missed = tuple([name for name in due_s if figures.age_s > due_s[name]])
            if not missed:
                return None
        outcome = "missed" if missed else "kept"
        self._promises(service_class, outcome).inc()
        self._client_promises(self._clients.label(client), service_class, outcome).inc()
        if moved:
            self._moved(service_class, outcome).inc()
        if announced:
            self._announced(service_class, outcome).inc()
        unknown = {Cause.FAILURE if failed else Cause.UNKNOWN: 0.0}
        for objective in missed:
            cause = next(iter(figures.late.get(objective, unknown)))
            self._missed(service_class, objective, cause.value).inc()
        return not missed


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

PROVIDER = "sluice"  # the conventions' name of what serves
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
"""The conventions' names of the endpoints' operations; none exist for scores and speech."""

_OPERATION = "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model"


class UsageMetrics:
    """What requests used and how long they took."""

    def __init__(self, make: Families, clients: ClientNames) -> None:
        self._clients = clients
        self._models = ClientNames()
        self._tokens = make.counters(
            "sluice_tokens",
            "Tokens of requests that ended: prompt, cached (a part of prompt), generated.",
            "class type",
        )
        self._client_tokens = make.counters(
            "sluice_client_tokens", "The same by the name of the API key.", "client type"
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
            f"{_OPERATION} gen_ai_token_type",
        )
        self._duration_s = make.histograms(
            "gen_ai_server_request_duration_seconds",
            "Time from a request's arrival to its end (gen_ai.server.request.duration).",
            _DURATION_BUCKETS_S,
            f"{_OPERATION} error_type",
        )
        self._first_token_s = make.histograms(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to first token of served requests (gen_ai.server.time_to_first_token).",
            _FIRST_TOKEN_BUCKETS_S,
            _OPERATION,
        )
        self._output_token_s = make.histograms(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per token after the first, of served requests "
            "(gen_ai.server.time_per_output_token).",
            _OUTPUT_TOKEN_BUCKETS_S,
            _OPERATION,
        )

    def gap(self, service_class: str) -> Callable[[float], None]:
        """Observes the seconds between two pieces with tokens of one stream."""
        observe: Callable[[float], None] = self._gap_s(service_class).observe
        return observe

    def ended(self, call: Call, figures: RequestFigures, client: str) -> None:
        """Count a scheduled request that ended; ``client``: its label."""
        service_class = figures.slo.service_class
        # The engine counts a vector or a score as a token.
        generated = 0 if call.endpoint in POOLING else figures.generated
        if figures.queued_s is not None and figures.prompt is not None:
            self._queue_s(service_class).observe(figures.queued_s)
        counts = (
            ("generated", generated), ("prompt", figures.prompt), ("cached", figures.cached)
        )  # fmt: skip
        for name, count in counts:
            if count:
                self._tokens(service_class, name).inc(count)
                self._client_tokens(client, name).inc(count)
        operation = (OPERATIONS[call.endpoint], PROVIDER, self._models.label(call.model or ""))
        error = "" if figures.outcome is Outcome.OK else figures.outcome.value
        self._duration_s(*operation, error).observe(figures.age_s)
        if error:
            return
        self._e2e_s(service_class).observe(figures.age_s)
        for name, count in (("input", figures.prompt), ("output", generated)):
            if count:
                self._token_usage(*operation, name).observe(count)
        if figures.ttft_s is not None:
            self._first_token_s(*operation).observe(figures.ttft_s)
        if figures.mean_tpot_s is not None:
            self._output_token_s(*operation).observe(figures.mean_tpot_s)


TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 30, 60, 300)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 5)
DECISION_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)


class RouterMetrics:
    """The router's metrics. Latencies are the first choice's, when written to the socket; a plain
    response's, when it left the engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make = Families(self.registry)
        self._requests = make.counters(
            "sluice_requests",
            "Requests that ended, by service class, outcome and endpoint.",
            "class outcome endpoint",
        )
        self.ttft_s = make.histograms(
            "sluice_ttft_seconds", "Time to first token at the edge.", TTFT_BUCKETS_S, "class"
        )
        self._tpot = make.histograms(
            "sluice_tpot_seconds",
            "Time per output token after the first, at the edge, by the class's anchor.",
            TPOT_BUCKETS_S,
            "class",
        )
        by_worth = "class priority"
        self._slo_requests = make.counters("sluice_slo_requests", "Requests with an SLO.", by_worth)
        self._attained = make.counters("sluice_attained", "Requests that met their SLO.", by_worth)
        self._gain = make.counters(
            "sluice_tdg_gain",
            "Token deadline gain earned, of first and of later tokens.",
            f"{by_worth} tokens",
        )
        self._ideal_gain = make.counters(
            "sluice_tdg_ideal",
            "Token deadline gain had every token been in time.",
            f"{by_worth} tokens",
        )
        self.decision_s = make.histogram(
            "sluice_edge_decision_seconds",
            "Wait of the edge for the controller's decision.",
            DECISION_BUCKETS_S,
        )
        self.fallbacks = make.counters(
            "sluice_fallback", "Requests that Serve's own balancing placed, by reason.", "reason"
        )
        self._sent = make.counters(
            "sluice_replica_calls", "Calls sent to replicas, by transport.", "way"
        )
        self.streams = make.counters(
            "sluice_streams", "Event streams that began, by their path to the client.", "way"
        )
        self.retries = make.counter("sluice_retries", "Retries of requests after a failed attempt.")
        self.retries_refused = make.counter(
            "sluice_retries_refused",
            "Retries that were not made because the retry budget was exhausted.",
        )
        self.resumes = make.counter(
            "sluice_resumes", "Streams that another replica resumed after theirs had failed."
        )
        self._pauses = make.histograms(
            "sluice_migration_pause_seconds",
            "Pause of running streams that moved to another replica, by reason and by whether "
            "their KV was transferred or computed again.",
            TTFT_BUCKETS_S,
            "reason kv",
        )
        self.abandoned = make.counter(
            "sluice_abandoned_attempts",
            "Attempts that were abandoned because their replica was unresponsive or had lost them.",
        )
        self.quarantined_requests = make.counter(
            "sluice_quarantined_requests",
            "Requests ended or refused because replicas were lost while they served them.",
        )
        self.phases = make.histograms(
            "sluice_phase_seconds",
            "Time of requests that a P/D pair serves, by phase.",
            TTFT_BUCKETS_S,
            "phase",
        )
        self.in_flight = make.gauge(
            "sluice_in_flight_requests", "Requests in flight in the router."
        )
        self.held_bytes = make.gauge(
            "sluice_held_body_bytes", "Bytes of request bodies in the router."
        )
        self.held_refusals = make.gauge(
            "sluice_held_refusals", "Refusals that wait for their turn."
        )
        self.loop_delay_s = make.histogram(
            "sluice_loop_delay_seconds",
            "Delay of the router's event loop, sampled 20 times a second.",
            DECISION_BUCKETS_S,
        )
        self.stalled_readers = make.counter(
            "sluice_stalled_readers",
            "Streams that were ended because their client stopped reading.",
        )
        self._by_client = make.counters(
            "sluice_client_requests",
            "Requests that ended, by the name of their API key and outcome.",
            "client outcome",
        )
        self.clients = ClientNames()
        self.admission = AdmissionMetrics(make, self.clients)
        self.usage = UsageMetrics(make, self.clients)

    @property
    def of_the_edge(self) -> tuple[Collector, ...]:
        """The metrics of a whole router, independent of the model."""
        return (self.in_flight, self.held_bytes, self.held_refusals, self.loop_delay_s)

    def sent(self, way: Transport) -> None:
        """A call was sent to a replica."""
        self._sent(way.value).inc()

    def migrated(self, reason: MoveReason, transferred: bool, pause_s: float) -> None:
        """A stream continued elsewhere after ``pause_s``. ``transferred``: with its KV."""
        kv = "transferred" if transferred else "recomputed"
        self._pauses(reason.value, kv).observe(pause_s)

    def refused(self, endpoint: Endpoint, reason: Reason, client: Client = ANYONE) -> None:
        """Count a request that was refused before its class was known."""
        self._ended_early(endpoint, Outcome.of_status(reason.status), client)
        self.admission.refused(reason)

    def left_early(self, endpoint: Endpoint, client: Client) -> None:
        """Count a request whose client left before its class was known."""
        self._ended_early(endpoint, Outcome.CANCELLED, client)

    def _ended_early(self, endpoint: Endpoint, outcome: Outcome, client: Client) -> None:
        self._requests(NO_CLASS, outcome.value, endpoint).inc()
        self._by_client(self.clients.label(client.name), outcome.value).inc()

    def ended(self, call: Call, figures: RequestFigures) -> None:
        """Count a request that ended, and whose class is known."""
        slo, outcome, client = figures.slo, figures.outcome, self.clients.label(call.client.name)
        self._requests(slo.service_class, outcome.value, call.endpoint).inc()
        self._by_client(client, outcome.value).inc()
        for field in call.clamped:
            self.admission.clamped(client, field).inc()
        for field in call.degraded:
            self.admission.degraded(slo.service_class, field).inc()
        if call.scheduled:
            self.usage.ended(call, figures, client)
        if figures.tpot_s is not None:
            self._tpot(slo.service_class).observe(figures.tpot_s)
        if outcome in (Outcome.CANCELLED, Outcome.CLIENT_ERROR):
            return
        worth, earned = (slo.service_class, str(slo.priority)), figures.earned
        for counter, first, later in (
            (self._gain, earned.first, earned.later),
            (self._ideal_gain, earned.first_ideal, earned.later_ideal),
        ):
            counter(*worth, "first").inc(first)
            counter(*worth, "later").inc(later)
        if slo.stated:
            self._slo_requests(*worth).inc()
            if outcome is Outcome.OK and not figures.missed:
                self._attained(*worth).inc()
