"""Metrics of the router.

Every label is bounded: classes by configuration, priorities 1 to 10, clients by
:mod:`sluice.router.metrics.client_names`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.registry import Collector

from sluice.protocol.requests import Endpoint
from sluice.router.errors import RULES, Reason
from sluice.router.metrics.admission import AdmissionMetrics
from sluice.router.metrics.client_names import ClientNames
from sluice.router.metrics.families import Families
from sluice.router.metrics.usage import UsageMetrics
from sluice.router.tenancy.limits import ANYONE, Client
from sluice.router.wire import NO_CLASS
from sluice.scheduling.request.objective import TokenClock

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 30, 60, 300)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 5)
DECISION_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)


class Outcome(enum.StrEnum):
    """How a request ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """The client's mistake: a 4xx of the router or of the engine."""
    REFUSED = "refused"
    """No capacity, no guarantee or no replica: a 429 or 503 before anything was served."""
    FAILED = "failed"
    """A failure of a replica or the router: a 5xx, or an error event in a stream."""
    CANCELLED = "cancelled"
    """The client left."""

    @classmethod
    def of_status(cls, status: int) -> Outcome:
        """The outcome of a request that was answered with this status."""
        if status < 400:
            return cls.OK
        if status in (429, 503):
            return cls.REFUSED
        return cls.CLIENT_ERROR if status < 500 else cls.FAILED

    @property
    def error(self) -> str:
        """The kind of error: its name, or empty if the request was served."""
        return "" if self is Outcome.OK else self.value


class Fallback(enum.StrEnum):
    """Why a request followed Serve's own balancing and not the controller's decision."""

    NO_ANSWER = "no_answer"
    """The controller did not answer in time."""
    NO_DECISION = "no_decision"
    """The controller knows no replica, as just after its restart."""
    REPEATED = "repeated"
    """It chose a replica that had just failed this request."""
    MOVED = "moved"
    """Serve did not know the chosen replica, or that one was full."""


class Way(enum.StrEnum):
    """How a call is sent to a replica."""

    CONNECTION = "connection"
    """Over the router's own connection to it."""
    HANDLE = "handle"
    """Over Serve's handle."""


class StreamWay(enum.StrEnum):
    """How an event stream is sent from its replica to the client."""

    DIRECT = "direct"
    """The client's Envoy fetches it from the replica."""
    ROUTER = "router"
    """Through the router's process."""


class Phase(enum.StrEnum):
    """A phase of a request that a P/D pair serves."""

    PREFILL = "prefill"
    """Until the prompt is computed, transport and queueing included."""
    TRANSFER = "transfer"
    """From then to the first token."""


class MoveReason(enum.StrEnum):
    """Why a running stream moved to another replica."""

    LEAVING = "leaving"
    """Its replica is drained, or about to stop."""
    LATE = "late"
    """It was guaranteed, and predicted to miss the pace of its objective there."""


class RouterMetrics:
    """The router's metrics, in their own registry.

    The latency metrics are those of :class:`~sluice.scheduling.request.objective.TokenClock`:
    tokens of the first choice, when their bytes are written to the socket; for a plain response,
    when they left the engine. A cancelled request counts in none of the attainment metrics, and one
    without an SLO does not count in ``sluice_slo_requests``.

    The gain of first and of later tokens is counted apart, as their weights (ProServe's ``w_p`` and
    ``w_d``) are by default the mean input and output of what is shown.

    Args:
        first_weights: by class, the weight of a first token in that of a later one, where it is
            configured. Its first tokens count so with the later ones.
    """

    def __init__(self, first_weights: Mapping[str, float] = MappingProxyType({})) -> None:
        self._first_weights = first_weights
        self.registry = CollectorRegistry()
        make = Families(self.registry)
        self._requests = make.counters(
            "sluice_requests",
            "Requests that ended, by service class, outcome and endpoint.",
            "class",
            "outcome",
            "endpoint",
        )
        self._ttft = make.histograms(
            "sluice_ttft_seconds", "Time to first token at the edge.", TTFT_BUCKETS_S, "class"
        )
        self._tpot = make.histograms(
            "sluice_tpot_seconds",
            "Time per output token after the first, at the edge, by the class's anchor.",
            TPOT_BUCKETS_S,
            "class",
        )
        by_worth = "class", "priority"
        self._slo_requests = make.counters(
            "sluice_slo_requests", "Requests with an SLO.", *by_worth
        )
        self._attained = make.counters("sluice_attained", "Requests that met their SLO.", *by_worth)
        self._gain = make.counters(
            "sluice_tdg_gain",
            "Token deadline gain earned, of first and of later tokens.",
            *by_worth,
            "tokens",
        )
        self._ideal_gain = make.counters(
            "sluice_tdg_ideal",
            "Token deadline gain had every token been in time.",
            *by_worth,
            "tokens",
        )
        self.decision_s = make.histogram(
            "sluice_edge_decision_seconds",
            "Wait of the edge for the controller's decision.",
            DECISION_BUCKETS_S,
        )
        self._fallbacks = make.counters(
            "sluice_fallback", "Requests that Serve's own balancing placed, by reason.", "reason"
        )
        self._sent = make.counters(
            "sluice_replica_calls", "Calls sent to replicas, by transport.", "way"
        )
        self._streams = make.counters(
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
            "reason",
            "kv",
        )
        self.given_up = make.counter(
            "sluice_abandoned_attempts",
            "Attempts that were abandoned because their replica was unresponsive or had lost them.",
        )
        self.quarantined_requests = make.counter(
            "sluice_quarantined_requests",
            "Requests ended or refused because replicas were lost while they served them.",
        )
        self._phases = make.histograms(
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
            "client",
            "outcome",
        )
        self._clients = ClientNames()
        self.admission = AdmissionMetrics(make, self._clients)
        self.usage = UsageMetrics(make, self._clients)

    @property
    def of_the_edge(self) -> tuple[Collector, ...]:
        """The metrics of a whole router, independent of the model."""
        return (self.in_flight, self.held_bytes, self.held_refusals, self.loop_delay_s)

    def sent(self, way: Way) -> None:
        """A call was sent to a replica."""
        self._sent(way.value).inc()

    def stream(self, way: StreamWay) -> None:
        """Count an event stream by its path to the client."""
        self._streams(way.value).inc()

    def fallback(self, reason: Fallback) -> None:
        """Count a request that did not follow the controller's decision."""
        self._fallbacks(reason.value).inc()

    def migrated(self, reason: MoveReason, transferred: bool, pause_s: float) -> None:
        """Observe a running stream that another replica continues after ``pause_s`` seconds.
        ``transferred``: its replica gave the KV away."""
        kv = "transferred" if transferred else "recomputed"
        self._pauses(reason.value, kv).observe(pause_s)

    def phase(self, phase: Phase, seconds: float) -> None:
        """Observe a phase of a request."""
        self._phases(phase.value).observe(seconds)

    def first_token(self, service_class: str, ttft_s: float) -> None:
        """Observe a first token."""
        self._ttft(service_class).observe(ttft_s)

    def refused(self, endpoint: Endpoint, reason: Reason, client: Client = ANYONE) -> None:
        """Count a request that was refused before its class was known."""
        self._ended_early(endpoint, Outcome.of_status(RULES[reason].status), client)
        self.admission.refused(reason)

    def left_early(self, endpoint: Endpoint, client: Client) -> None:
        """Count a request whose client left before its class was known."""
        self._ended_early(endpoint, Outcome.CANCELLED, client)

    def _ended_early(self, endpoint: Endpoint, outcome: Outcome, client: Client) -> None:
        self._requests(NO_CLASS, outcome.value, endpoint).inc()
        self._by_client(self._clients.label(client.name), outcome.value).inc()

    def ended(
        self,
        endpoint: Endpoint,
        clock: TokenClock,
        outcome: Outcome,
        now_s: float,
        client: Client = ANYONE,
    ) -> None:
        """Count a request that ended, with the times in ``clock``."""
        slo = clock.slo
        self._requests(slo.service_class, outcome.value, endpoint).inc()
        self._by_client(self._clients.label(client.name), outcome.value).inc()
        if clock.tpot_s is not None:
            self._tpot(slo.service_class).observe(clock.tpot_s)
        if outcome in (Outcome.CANCELLED, Outcome.CLIENT_ERROR):
            return
        worth = (slo.service_class, str(slo.priority))
        earned = clock.earned
        self._count_gain(self._gain, worth, earned.first, earned.later)
        self._count_gain(self._ideal_gain, worth, earned.first_ideal, earned.later_ideal)
        if slo.stated:
            self._slo_requests(*worth).inc()
            if outcome is Outcome.OK and clock.attained(now_s):
                self._attained(*worth).inc()

    def _count_gain(
        self, counter: Callable[..., Counter], worth: tuple[str, str], first: float, later: float
    ) -> None:
        weight = self._first_weights.get(worth[0])
        if weight is not None:
            first, later = 0.0, later + weight * first
        counter(*worth, "first").inc(first)
        counter(*worth, "later").inc(later)
