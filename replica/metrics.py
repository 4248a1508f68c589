"""Prometheus metrics of a replica, read from its engine's state when they are collected.

Gauges have the label ``replica`` and are removed with the replica. Counters and histograms are
summed over the fleet, as a label per replica that ever lived would grow without bound."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import nan
from typing import TYPE_CHECKING, Final

import numpy as np
from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from sluice.replica.gpus import GpuUse
from sluice.scheduling.fleet.state import (
    DRAFT_LENGTHS,
    PLAN_BUCKETS_S,
    STEP_RATIO_BUCKETS,
    STOP_BUCKETS_S,
)
from sluice.scheduling.roles import Role

if TYPE_CHECKING:
    from sluice.replica.server import Replica

logger = logging.getLogger(__name__)

_COUNTERS = {
    "sluice_engine_steps": ("steps", "Batches that engines ran."),
    "sluice_engine_busy_seconds": ("busy_s", "Time in which an engine ran a batch."),
    "sluice_preemptions": ("preemptions", "Requests that lost their KV and were recomputed."),
    "sluice_best_effort_evictions": (
        "evictions",
        "Best-effort requests that lost their KV to guaranteed ones.",
    ),
    "sluice_best_effort_evicted_tokens": (
        "evicted_tokens",
        "Computed tokens that evictions discarded.",
    ),
    "sluice_plan_mismatches": (
        "plan_mismatches",
        "Batches whose executed tokens differ from the plan.",
    ),
    "sluice_drafts_accepted": ("drafts_accepted", "Drafted tokens that were accepted."),
    "sluice_kv_transfers": ("transfers", "Prompts whose KV came from another replica."),
    "sluice_kv_transfer_seconds": ("transfer_seconds", "Time that KV transfers took."),
    "sluice_kv_transfer_tokens": ("transfer_tokens", "Tokens whose KV was transferred."),
    "sluice_kv_transfer_bytes": (
        "transfer_bytes",
        "Bytes of KV that were transferred to one worker.",
    ),
    "sluice_kv_transfer_failures": (
        "transfer_failures",
        "KV transfers that failed; the prompts were recomputed.",
    ),
    "sluice_prefill_rounds": ("rounds", "Rounds of loops that can suspend prefills."),
    "sluice_prefill_suspensions": (
        "suspensions",
        "Running prefills that were suspended for more urgent work.",
    ),
    "sluice_prefill_late_stops": (
        "late_stops",
        "Prefills that ended before they saw their stop signal.",
    ),
    "sluice_prefill_resumes": ("resumes", "Suspended prefills that were resumed."),
    "sluice_prefill_discards": (
        "discards",
        "Prefills discarded half-way, as their requests had ended.",
    ),
    "sluice_prefill_suspended_seconds": ("suspended_s", "Time that prefills were suspended."),
    "sluice_prefill_decide_seconds": ("decide_s", "Time to decide which prefill runs."),
}
_GAUGES = {
    "sluice_latency_correction": (
        "correction",
        "Online correction factor on the time per token in the latency model.",
    ),
    "sluice_latency_fixed_correction": (
        "fixed_correction",
        "Online correction factor on the fixed time of a batch in the latency model.",
    ),
    "sluice_latency_spread_ratio": (
        "step_spread",
        "Relative error of the corrected latency model, root mean square of about 20 batches.",
    ),
    "sluice_last_step_seconds": ("last_step_s", "Real time of the last batch."),
    "sluice_predicted_step_seconds": ("predicted_step_s", "Predicted time of the last batch."),
    "sluice_best_effort_wait_seconds": (
        "best_effort_wait_s",
        "Longest current wait for a token of a best-effort request that does not run.",
    ),
    "sluice_best_effort_patience_seconds": (
        "patience_s",
        "Starvation bound: wait after which best-effort requests get a share of the engine.",
    ),
    "sluice_draft_seconds": (
        "draft_s",
        "Learned time of a draft model to draft one token for every decode.",
    ),
    "sluice_suspended_prefills": ("suspended", "Prefills that are suspended now."),
    "sluice_suspended_prefills_reserved_bytes": (
        "reserved_bytes",
        "Memory kept free for suspended prefills, on one worker.",
    ),
}
_HISTOGRAMS = {
    "sluice_plan_seconds": (
        "plan_histogram",
        "plan_seconds_sum",
        PLAN_BUCKETS_S,
        "Time to plan a batch.",
    ),
    "sluice_step_time_ratio": (
        "step_ratio_histogram",
        "step_ratio_sum",
        STEP_RATIO_BUCKETS,
        "Real over predicted time of a batch.",
    ),
    "sluice_draft_length": (
        "draft_lengths",
        "drafts_checked",
        DRAFT_LENGTHS,
        "Drafted tokens checked per decode step, of the steps that had some.",
    ),
    "sluice_prefill_stop_seconds": (
        "stop_histogram",
        "stop_s",
        STOP_BUCKETS_S,
        "Time from the stop signal of a prefill until it has stopped.",
    ),
}


UNATTRIBUTED: Final = "unattributed"
"""Name of the client of what is no client's: profiling and warm-up."""


class ReplicaCollector(Collector):
    """The metrics of one replica; counters and histograms are summed over its ranks.
    ``configured``: min number of replicas of its pool; ``gpus``: of each rank, or none; ``size``:
    GPUs that a rank's engine occupies, or what stands for them."""

    def __init__(
        self,
        ranks: Sequence[Replica],
        configured: Callable[[], int | None],
        role: Role = "mixed",
        gpus: Callable[[], Sequence[GpuUse]] = tuple,
        size: float = 1.0,
    ) -> None:
        self._ranks = ranks
        self._size = size
        self._gpus = gpus
        self._configured = configured
        self._role = role

    def describe(self) -> list[Metric]:
        """Nothing: the state may not be readable yet at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric, as of the engine's last step."""
        yield self._gauge(
            "sluice_replica_live_requests",
            "API calls that a replica serves now.",
            [each.live_requests for each in self._ranks],
        )
        configured = self._configured()
        if configured is not None:
            gauge = GaugeMetricFamily(
                "sluice_configured_replicas",
                "Configured min number of replicas of its pool, as each replica receives it from "
                "Serve.",
                labels=["replica", "role"],
            )
            for each in self._ranks:
                gauge.add_metric([each.replica_id, self._role], configured)
            yield gauge
        yield from self._of_gpus(self._gpus())
        try:
            states = [each.engine.state() for each in self._ranks]
        except RuntimeError as error:
            logger.warning("no engine metrics: %s", error)
            return
        summary = np.array([each.summary for each in states])
        yield from self._usage(np.concatenate([each.accounts for each in states]))
        for name, (field, documentation) in _COUNTERS.items():
            yield CounterMetricFamily(name, documentation, value=float(summary[field].sum()))
        for name, (field, documentation) in _GAUGES.items():
            yield self._gauge(name, documentation, summary[field].tolist())
        for name, (counts, total, bounds, documentation) in _HISTOGRAMS.items():
            found, sum_value = summary[counts].sum(axis=0), float(summary[total].sum())
            yield _histogram(name, documentation, bounds, found, sum_value)

    def _usage(self, accounts: np.ndarray) -> Iterator[Metric]:
        for name, field, factor, documentation in (
            ("seconds", "seconds", 1.0, "Time of engines by who used it."),
            ("gpu_seconds", "seconds", self._size, "The same times the GPUs of an engine."),
            ("kv_block_seconds", "kv_block_seconds", 1.0, "KV blocks held times engine time."),
        ):
            family = CounterMetricFamily(
                f"sluice_engine_{name}", documentation, labels=["client", "class"]
            )
            sums: Counter[tuple[str, str]] = Counter()
            for account in accounts:
                key = account["client"].decode(), account["class"].decode()
                sums[key if key[0] else (UNATTRIBUTED, "none")] += factor * account[field]
            for key, value in sums.items():
                family.add_metric(key, value)
            yield family

    def _of_gpus(self, uses: Sequence[GpuUse]) -> Iterator[Metric]:
        if not uses:
            return
        busy = [nan if each.busy is None else each.busy for each in uses]  # nan is not pushed
        for name, documentation, values in (
            ("utilization_ratio", "Share of time in which its GPUs ran a kernel, mean.", busy),
            ("memory_used_bytes", "Memory in use on its GPUs.", [each.used_bytes for each in uses]),
            ("memory_bytes", "Memory of its GPUs.", [each.total_bytes for each in uses]),
        ):
            yield self._gauge(f"sluice_replica_gpu_{name}", documentation, values)

    def _gauge(self, name: str, documentation: str, values: Sequence[float]) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, documentation, labels=["replica"])
        for each, value in zip(self._ranks, values, strict=True):
            gauge.add_metric([each.replica_id], value)
        return gauge


def _histogram(
    name: str, documentation: str, bounds: tuple[float, ...], counts: np.ndarray, total: float
) -> HistogramMetricFamily:
    labels = [*(str(bound) for bound in bounds), "+Inf"]
    cumulative = accumulate(int(count) for count in counts)
    buckets = list(zip(labels, (float(count) for count in cumulative), strict=True))
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=total)
