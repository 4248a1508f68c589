"""The controller's own metrics: decisions, reports, reservations, and the state of replicas."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator
from itertools import accumulate, product

import numpy as np
from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from sluice.controller.observability.readings import Figures
from sluice.controller.observability.recent_decisions import DECISION_BUCKETS_S, Counters
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.fleet.fleet import CONDITIONS
from sluice.scheduling.request.job import Tier
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.roles import ROLES

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


def families(figures: Figures, policy: str) -> Iterator[Metric]:
    """The controller's metrics; ``policy`` labels the decisions. ``O(replicas)``."""
    yield from _counted(figures, policy)
    found = Counts(zip(figures.conditions, figures.roles, strict=True))
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
        value=figures.reservations,
    )
    margins = GaugeMetricFamily(
        "sluice_promise_margin_ratio",
        "Largest safety margin of guarantees, as a share of the objective.",
        labels=("objective",),
    )
    for objective, margin in figures.margins.items():
        margins.add_metric((objective,), margin)
    yield margins
    yield CounterMetricFamily(
        "sluice_cold_starts",
        "Starts of the first replica of a model that had none, from the first request until it "
        "registered.",
        value=figures.cold_starts,
    )
    yield GaugeMetricFamily(
        "sluice_startup_seconds",
        "Predicted time of such a start; only of a model that may have no replica.",
        value=figures.startup_s,
    )
    yield from _loads(figures)
    yield from _quarantines(figures)
    yield from _replicas(figures)


def refused_metrics(pushes: int, samples: int) -> Metric:
    """What the observer has refused since its start, of all that processes pushed."""
    refused = CounterMetricFamily(
        "sluice_metrics_refused",
        "Pushes of metrics that the observer refused, and samples of other pushes that it skipped.",
        labels=("part",),
    )
    refused.add_metric(("push",), pushes)
    refused.add_metric(("sample",), samples)
    return refused


def _counted(figures: Figures, policy: str) -> Iterator[Metric]:
    """What the deciding actor has done since its start."""
    counts = figures.counts
    decisions = CounterMetricFamily(
        "sluice_decisions",
        "Decisions of the controller by outcome.",
        labels=("policy", "outcome"),
    )
    for outcome, count in counts.decisions.items():
        decisions.add_metric((policy, outcome), count)
    yield decisions
    reports = CounterMetricFamily(
        "sluice_reports",
        "Replica reports, by whether they were applied, resent or refused.",
        labels=("outcome",),
    )
    for outcome, count in counts.reports.items():
        reports.add_metric((outcome,), count)
    yield reports
    bounds = [*map(str, DECISION_BUCKETS_S), "+Inf"]
    yield HistogramMetricFamily(
        "sluice_decision_seconds",
        "Time of one decision inside the controller.",
        buckets=list(zip(bounds, accumulate(counts.buckets), strict=True)),
        sum_value=counts.seconds,
    )
    yield CounterMetricFamily(
        "sluice_split_decisions",
        "Requests that were placed on a P/D pair: a prefill replica and a decode replica.",
        value=counts.pairs,
    )
    changes = CounterMetricFamily(
        "sluice_role_changes",
        "Replicas that changed their role while they ran, by the new role.",
        labels=("role",),
    )
    for role, count in counts.role_changes.items():
        changes.add_metric((role,), count)
    yield changes
    retried = CounterMetricFamily(
        "sluice_retry_after",
        "Refused requests that retried when advised to, by whether they were guaranteed then.",
        labels=("outcome",),
    )
    for outcome, count in zip(("promised", "refused"), figures.retried, strict=True):
        retried.add_metric((outcome,), count)
    yield retried
    loops = CounterMetricFamily(
        "sluice_loops",
        "Tool loops that ended, by whether they were promised and ended by their deadline.",
        labels=("class", "admission", "outcome"),
    )
    for ending, count in figures.loops.items():
        admission = Tier.GUARANTEED if ending.promised else Tier.BEST_EFFORT
        outcome = "kept" if ending.kept else "missed"
        loops.add_metric((ending.service_class, admission.value, outcome), count)
    yield loops


def _replicas(figures: Figures) -> Iterator[Metric]:
    """The state of each replica."""
    places = [
        (name, role, place)
        for place, (name, role) in enumerate(zip(figures.replicas, figures.roles, strict=True))
    ]
    for name, (documentation, read) in _REPLICA_GAUGES.items():
        gauge = GaugeMetricFamily(name, documentation, labels=("replica", "role"))
        for replica_id, role, place in places:
            gauge.add_metric((replica_id, role), float(read(figures.figures[place])))
        yield gauge
    budgets = GaugeMetricFamily(
        "sluice_replica_pab_tokens",
        "Prefill admission budget of the replica, tokens; negative when it is overloaded. Not "
        "reported in quarantine.",
        labels=("replica", "role"),
    )
    for replica_id, role, place in places:
        if replica_id not in figures.quarantined:  # no request may use its budget
            budgets.add_metric((replica_id, role), float(figures.pab_tokens[place]))
    yield budgets
    ages = GaugeMetricFamily(
        "sluice_replica_report_age_seconds",
        "Time since the replica's last report.",
        labels=("replica",),
    )
    for replica_id, age_s in zip(figures.replicas, figures.ages_s, strict=True):
        ages.add_metric((replica_id,), age_s)
    yield ages


def _quarantines(figures: Figures) -> Iterator[Metric]:
    """The replicas in quarantine by reason, breaker openings, and fault notices."""
    found = Counts(each.cause for each in figures.quarantined.values())
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
        "sluice_failure_notices",
        "Failures that routers reported of replicas; ignored from a router that had accused "
        "more than half of a role's replicas.",
        labels=("reason", "outcome"),
    )
    for reason in ReplicaFault:
        now.add_metric((reason.value,), found[reason])
        opened.add_metric((reason.value,), figures.opened.get(reason, 0))
        notices.add_metric((reason.value, "counted"), figures.believed.get(reason, 0))
        notices.add_metric((reason.value, "ignored"), figures.disbelieved.get(reason, 0))
    yield from (now, opened, notices)


def _loads(figures: Figures) -> Iterator[Metric]:
    """The load on each role."""
    for name, (documentation, field) in _LOAD_COUNTERS.items():
        counter = CounterMetricFamily(name, documentation, labels=("role",))
        for role, load in figures.loads.items():
            counter.add_metric((role,), getattr(load, field))
        yield counter
    for name, (documentation, field) in _LOAD_GAUGES.items():
        gauge = GaugeMetricFamily(name, documentation, labels=("role",))
        for role, load in figures.loads.items():
            if load.ready:
                gauge.add_metric((role,), getattr(load, field))
        yield gauge


def _names() -> frozenset[str]:
    counts = Counters().read()
    none = Figures(
        *(0.0, counts, 0, {}, (0, 0), {}, {}, {}, {}, {}, (), (), (), ()),
        pab_tokens=np.zeros(0),
        figures=np.zeros((0, figure.FIGURES)),
    )
    return frozenset([each.name for each in (*families(none, ""), refused_metrics(0, 0))])


NAMES = _names()
"""Names of the families of the controller's and the observer's own metrics."""
