"""The controller's own metrics: decisions, reports, reservations, and the state of replicas."""

from __future__ import annotations

import contextlib
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sluice.controller.state.mirror import Mirror
from sluice.controller.state.quarantine import Quarantine
from sluice.scheduling import fleet_rows as figure
from sluice.scheduling.autoscaling import Demand
from sluice.scheduling.breaker import Trouble
from sluice.scheduling.calibration import Calibration
from sluice.scheduling.fleet import CONDITIONS, Fleet
from sluice.scheduling.job import INVALID_QUERY, NO_REPLICA, PLACED, STAYS, UNATTAINABLE
from sluice.scheduling.kernels import Floats
from sluice.scheduling.retry_after import RetryAfter
from sluice.scheduling.roles import ROLES

DECISION_BUCKETS_S = (
    0.00001,
    0.00003,
    0.0001,
    0.0003,
    0.001,
    0.002,
    0.005,
    0.01,
    0.05,
)

_OUTCOMES = (PLACED, UNATTAINABLE, STAYS, NO_REPLICA, INVALID_QUERY)
_REPORTS = ("hello", "applied", "resync", "refused")

_BUDGET = "sluice_replica_pab_tokens"

_REPLICA_GAUGES: dict[str, tuple[str, Callable[[Floats], float]]] = {
    "sluice_replica_waiting_requests": (
        "Waiting requests in the replica.",
        lambda figures: figures[figure.WAITING],
    ),
    "sluice_replica_running_requests": (
        "Running requests in the replica.",
        lambda figures: figures[figure.RUNNING],
    ),
    "sluice_replica_pending_prefill_tokens": (
        "Prompt tokens of guaranteed requests that the replica has yet to compute, requests in "
        "transit included.",
        lambda figures: figures[figure.TOKENS],
    ),
    "sluice_replica_pending_prefill_seconds": (
        "Predicted time to compute the replica's pending prefill tokens.",
        lambda figures: figures[figure.PREFILL_S],
    ),
    "sluice_replica_best_effort_prefill_seconds": (
        "Predicted time of the best-effort prompts that the replica has yet to compute.",
        lambda figures: figures[figure.BEST_EFFORT_S],
    ),
    "sluice_replica_kv_blocks_free": (
        "Free KV blocks of the replica.",
        lambda figures: figures[figure.FREE_BLOCKS],
    ),
    "sluice_replica_kv_blocks": (
        "KV blocks of the replica.",
        lambda figures: figures[figure.TOTAL_BLOCKS],
    ),
    "sluice_replica_kv_usage_ratio": (
        "Share of the replica's KV blocks in use, 0 to 1.",
        lambda figures: 1 - figures[figure.FREE_BLOCKS] / max(1, figures[figure.TOTAL_BLOCKS]),
    ),
    _BUDGET: (
        "Prefill admission budget of the replica, tokens; negative when it is overloaded. Not "
        "reported in quarantine.",
        lambda figures: figures[figure.PAB],
    ),
}


_LOAD_COUNTERS: dict[str, tuple[str, str]] = {
    "sluice_asked_requests": ("Requests that asked for a guarantee.", "asked"),
    "sluice_asked_prefill_seconds": (
        "Predicted prefill time of the requests that asked for a guarantee.",
        "asked_s",
    ),
    "sluice_unpromised_requests": (
        "Requests that an idle replica could have guaranteed, but no replica did.",
        "unpromised",
    ),
}
_LOAD_GAUGES: dict[str, tuple[str, str]] = {
    "sluice_decode_load": (
        "Replica time per second taken by guaranteed decodes, summed over the replicas of a role.",
        "decode_share",
    ),
    "sluice_head_room_ratio": (
        "Prefill admission budget over that of an idle replica, mean over the replicas of a role.",
        "head_room",
    ),
}


class Instruments(Collector):
    """Counts the controller's operations, and exports mirror and fleet as gauges when scraped.

    Args:
        policy: name of the routing policy, a label of the decisions.
        mirror, fleet, demand, quarantine, calibration, returns: sources of the gauges.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        policy: str,
        mirror: Mirror,
        fleet: Fleet,
        demand: Demand,
        quarantine: Quarantine,
        calibration: Calibration,
        returns: RetryAfter,
        clock: Callable[[], float],
    ) -> None:
        self._mirror = mirror
        self._fleet = fleet
        self._demand = demand
        self._quarantine = quarantine
        self._calibration = calibration
        self._returns = returns
        self._clock = clock
        self.registry = CollectorRegistry(auto_describe=False)
        decisions = Counter(
            "sluice_decisions",
            "Decisions of the controller by outcome.",
            ("policy", "outcome"),
            registry=self.registry,
        )
        reports = Counter(
            "sluice_reports",
            "Replica reports and metrics pushes, by whether they were applied, resent or refused.",
            ("outcome",),
            registry=self.registry,
        )
        # Label lookups cost as much as a decision, so they are done once.
        self._decisions = {outcome: decisions.labels(policy, outcome) for outcome in _OUTCOMES}
        self._reports = {outcome: reports.labels(outcome) for outcome in _REPORTS}
        self._seconds = Histogram(
            "sluice_decision_seconds",
            "Time of one decision inside the controller.",
            buckets=DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self._pairs = Counter(
            "sluice_split_decisions",
            "Requests that were placed on a P/D pair: a prefill replica and a decode replica.",
            registry=self.registry,
        )
        self.registry.register(self)

    def count_decision(self, outcome: str, seconds: float) -> None:
        """One decision was made in ``seconds``."""
        self._decisions[outcome].inc()
        self._seconds.observe(seconds)

    def count_pair(self) -> None:
        """A decision placed a request on two replicas."""
        self._pairs.inc()

    def count_report(self, outcome: str) -> None:
        """One message of a replica was ``hello``, ``applied`` or ``resync``."""
        self._reports[outcome].inc()

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Count the messages that the body refuses with ``ValueError``."""
        try:
            yield
        except ValueError:
            self._reports["refused"].inc()
            raise

    def collect(self) -> Iterator[Metric]:
        """The gauges, as of now."""
        now_s = self._clock()
        fleet = self._fleet
        found = Counts(
            (fleet.condition(row, now_s), fleet.roles[row]) for row in fleet.row_of.values()
        )
        states = GaugeMetricFamily(
            "sluice_replicas",
            "Replicas by condition and role.",
            labels=("state", "role"),
        )
        for state in product(CONDITIONS, ROLES):
            states.add_metric(state, found[state])
        yield states
        yield GaugeMetricFamily(
            "sluice_reservations",
            "Decisions that no replica has confirmed yet.",
            value=len(fleet.ledger),
        )
        margins = GaugeMetricFamily(
            "sluice_promise_margin_ratio",
            "Largest safety margin of guarantees, as a share of the objective.",
            labels=("objective",),
        )
        for objective, margin in self._calibration.largest(now_s).items():
            margins.add_metric((objective,), margin)
        yield margins
        returns = CounterMetricFamily(
            "sluice_retry_after",
            "Refused requests that retried when advised to, by whether they were guaranteed then.",
            labels=("outcome",),
        )
        returns.add_metric(("promised",), self._returns.held)
        returns.add_metric(("refused",), self._returns.missed)
        yield returns
        yield from self._loads(now_s)
        yield from self._quarantines()
        for name, (documentation, read) in _REPLICA_GAUGES.items():
            gauge = GaugeMetricFamily(name, documentation, labels=("replica", "role"))
            for replica_id, row in fleet.row_of.items():
                if name == _BUDGET and replica_id in self._quarantine.names:
                    continue  # no request may use its budget
                labels = (replica_id, fleet.roles[row])
                gauge.add_metric(labels, float(read(fleet.figures[row])))
            yield gauge
        ages = GaugeMetricFamily(
            "sluice_replica_report_age_seconds",
            "Time since the replica's last report.",
            labels=("replica",),
        )
        for replica_id, replica in self._mirror.replicas.items():
            ages.add_metric((replica_id,), now_s - replica.received_s)
        yield ages

    def _quarantines(self) -> Iterator[Metric]:
        """The replicas in quarantine by reason, breaker openings, and trouble notices."""
        quarantine = self._quarantine
        found = Counts(quarantine.cause_of(each) for each in quarantine.names)
        now = GaugeMetricFamily(
            "sluice_quarantined_replicas",
            "Replicas that get no requests because they failed or hung, by their last failure.",
            labels=("reason",),
        )
        opened = CounterMetricFamily(
            "sluice_breaker_opened",
            "Times that a replica was put into quarantine, or back after a failed trial.",
            labels=("reason",),
        )
        notices = CounterMetricFamily(
            "sluice_trouble_notices",
            "Failures that routers reported of replicas; ignored from a router that had accused "
            "more than half of a role's replicas.",
            labels=("reason", "outcome"),
        )
        for reason in Trouble:
            now.add_metric((reason.value,), found[reason])
            opened.add_metric((reason.value,), quarantine.opened[reason])
            notices.add_metric((reason.value, "counted"), quarantine.believed[reason])
            notices.add_metric((reason.value, "ignored"), quarantine.disbelieved[reason])
        yield from (now, opened, notices)

    def _loads(self, now_s: float) -> Iterator[Metric]:
        """The load on each role."""
        loads = {role: self._demand.load(self._fleet, now_s, role=role) for role in ROLES}
        for name, (documentation, field) in _LOAD_COUNTERS.items():
            counter = CounterMetricFamily(name, documentation, labels=("role",))
            for role, load in loads.items():
                counter.add_metric((role,), getattr(load, field))
            yield counter
        for name, (documentation, field) in _LOAD_GAUGES.items():
            gauge = GaugeMetricFamily(name, documentation, labels=("role",))
            for role, load in loads.items():
                if load.ready:
                    gauge.add_metric((role,), getattr(load, field))
            yield gauge
