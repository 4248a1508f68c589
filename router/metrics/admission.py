"""Metrics of admission: guarantees given, met, refused and waited for."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.router.errors import RULES, Reason
from sluice.router.metrics.client_names import ClientNames
from sluice.router.metrics.families import Families
from sluice.router.wire import NO_CLASS
from sluice.scheduling.request.objective import TokenClock
from sluice.scheduling.routing.base import Tier

RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 3, 5, 10)
WAIT_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 30, 60, 300)

_REFUSING = (403, 429, 503)


class AdmissionMetrics:
    """Metrics of admission. ``clients`` labels the metrics by client."""

    def __init__(self, make: Families, clients: ClientNames) -> None:
        self._clients = clients
        self._admissions = make.counters(
            "sluice_admissions",
            "Requests that a replica answered, by admission tier.",
            "class",
            "admission",
        )
        self._refusals = make.counters(
            "sluice_refusals",
            "Requests that were refused with 403, 429 or 503, by error code.",
            "class",
            "reason",
        )
        self._promises = make.counters(
            "sluice_promises",
            "Guaranteed requests by outcome: kept if every stated objective was met and the "
            "answer did not fail.",
            "class",
            "outcome",
        )
        self._moved = make.counters(
            "sluice_promises_moved",
            "Of these, requests that moved from a replica that was going to miss their TTFT to "
            "another one that guaranteed it.",
            "class",
            "outcome",
        )
        self._missed = make.counters(
            "sluice_promises_missed",
            "Guaranteed requests that missed their SLO, by missed objective, or failed.",
            "class",
            "objective",
        )
        self._ttft_ratio = make.histograms(
            "sluice_ttft_ratio",
            "Observed TTFT of guaranteed requests divided by its predicted median.",
            RATIO_BUCKETS,
            "class",
        )
        self.line_length = make.gauge(
            "sluice_admission_queue_requests", "Requests in the router's admission queue.", "class"
        )
        self.line_wait_s = make.histogram(
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
        self._clamped = make.counters(
            "sluice_clamped",
            "Requests in which an API key's limits changed a field of the SLO.",
            "client",
            "field",
        )

    def admitted(self, service_class: str, tier: Tier) -> None:
        """Count a request that a replica answers."""
        self._admissions(service_class, tier.value).inc()

    def refused(self, reason: Reason, service_class: str = NO_CLASS) -> None:
        """Count a request that the router did not serve. Client errors other than exceeding a limit
        do not count as refusals."""
        if RULES[reason].status in _REFUSING:
            self._refusals(service_class, reason.value).inc()

    def over_share(self, client: str) -> None:
        """Count a request without a guarantee because ``client`` has used its share."""
        self._over_share(self._clients.label(client)).inc()

    def clamped(self, client: str, fields: Iterable[str]) -> None:
        """Count the fields of a request that the limits of ``client`` changed."""
        for field in fields:
            self._clamped(self._clients.label(client), field).inc()

    def ended(
        self,
        clock: TokenClock,
        predicted_ttft_s: float | None,
        failed: bool,
        now_s: float,
        moved: bool = False,
    ) -> bool | None:
        """Count a guaranteed request that ended at ``now_s``. Returns whether its SLO was met;
        ``None`` if that is unknown.

        It was met if the answer did not fail and every stated objective was met: TTFT, TPOT and end
        to end. If the client left, the tokens until then count; if it left without a token and
        before its deadlines, the outcome is unknown. ``moved``: it
        has left a replica that was going to miss its TTFT.
        """
        slo, ttft_s = clock.slo, clock.ttft_s
        service_class = slo.service_class
        if ttft_s is not None and predicted_ttft_s is not None and predicted_ttft_s > 0:
            self._ttft_ratio(service_class).observe(ttft_s / predicted_ttft_s)
        if failed:
            missed: tuple[str, ...] = ("failed",)
        elif ttft_s is not None:
            missed = clock.missed(now_s)
        else:
            waited_s = now_s - clock.arrival_s
            due_s = {"ttft": slo.columns[0], "e2e": slo.columns[2]}
            missed = tuple([name for name in due_s if waited_s > due_s[name]])
            if not missed:
                return None
        outcome = "missed" if missed else "kept"
        self._promises(service_class, outcome).inc()
        if moved:
            self._moved(service_class, outcome).inc()
        for objective in missed:
            self._missed(service_class, objective).inc()
        return not missed
