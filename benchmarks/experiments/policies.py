"""Baselines of the papers that lost every comparison; only experiments find them by name."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling import batching, routing
from sluice.scheduling.batching.base import BatchPolicy
from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.batching.s_edf import SEDF, SEDFOptions
from sluice.scheduling.batching.token_budget import Sarathi
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.local_orders import BY_PRIORITY, DEADLINE, SHORTEST
from sluice.scheduling.fleet.rows import RESERVED, TOKENS, WAITING, requests_at
from sluice.scheduling.fleet.rows import RUNNING as RUNNING_THERE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import Registry
from sluice.scheduling.request import kernels
from sluice.scheduling.request.queue import QueueView
from sluice.scheduling.routing.base import Job, RoutingPolicy

Mask = NDArray[np.bool_]


class SarathiPriority(Sarathi):
    """Decodes, then prefill chunks, by priority, then arrival; low ones can starve. ``O(n log
    n)``."""

    name = "sarathi_priority"
    source = "ProServe §5.1, baseline Sarathi-Priority"
    local_order = BY_PRIORITY

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Decodes, then prefills, each by priority, up to the token budget."""
        table = queue.table
        # The rows are in order of arrival and the sort is stable.
        order = np.lexsort((-table[:, kernels.PRIORITY], kernels.is_prefill(table)))
        batch.take(order, tokens=self.options.token_budget)


class SJF(Sarathi):
    """Requests by predicted remaining work, prefill and decode (the sum of the two rankings of
    ProServe §6), up to a token budget. ``O(n log n)``."""

    name = "sjf"
    source = "shortest job first, as in ProServe §3.2"
    local_order = SHORTEST

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Fill up to the token budget, the shortest first."""
        left_s = kernels.pending_work_s(queue.table, latency.pieces)
        left_s += later_work_s(queue.table, latency.pieces)
        batch.take(np.argsort(left_s, kind="stable"), tokens=self.options.token_budget)


def later_work_s(table: kernels.Floats, pieces: kernels.Floats) -> kernels.Floats:
    """Per row, the marginal time of the output after its next token; 0 without a prediction."""
    tokens = np.nan_to_num(
        np.maximum(table[:, kernels.EXPECTED] - table[:, kernels.EMITTED] - 1, 0.0)
    )
    # The steps' contexts grow by one each, so the mean one stands for all.
    context = table[:, kernels.COMPUTED] + table[:, kernels.PENDING] + (tokens - 1) / 2
    per_token_s = (
        pieces[:, kernels.DECODE_SEQUENCE, None] + pieces[:, kernels.DECODE_CONTEXT, None] * context
    )
    work: kernels.Floats = tokens * per_token_s.max(axis=0)
    return work


class DEDFOptions(SEDFOptions):
    """Options of :class:`DEDF`."""

    late: Literal["last", "in_order"] = Field(
        default="last",
        description="Rank of prefills whose deadline has passed: behind all others (D-EDF), or by "
        "deadline like the others (the paper's naive EDF).",
    )


class DEDF(SEDF):
    """As ``SEDF``, but only passed deadlines rank last: Eq. 3 with ``sgn(deadline - now)``."""

    name = "d_edf"
    source = "FlowPrefill §6.3, D-EDF and naive EDF"
    local_order = DEADLINE
    Options = DEDFOptions

    def __init__(self, options: DEDFOptions | None = None) -> None:
        options = options or DEDFOptions()
        super().__init__(options)
        self._late_last = options.late == "last"

    def _first(
        self, due_s: kernels.Floats, now_s: float, ttft_s: kernels.Floats
    ) -> NDArray[np.bool_]:
        """Which prefills rank first, by deadline: the ones that are not late yet, or all."""
        first: NDArray[np.bool_] = (due_s >= now_s) | (not self._late_last)
        return first


class VLLM(RoutingPolicy):
    """Takes the replica with the least ``4 * waiting + running``; those on their way are
    waiting."""

    name = "vllm"
    source = "vLLM v1, the load balancer of its data-parallel client"
    passed_over = "it has more requests"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the least score."""
        figures = fleet.figures[job.rows]
        waiting = figures[:, WAITING] + figures[:, RESERVED]
        return int(np.argmin(4 * waiting + figures[:, RUNNING_THERE]))


class LMetric(RoutingPolicy):
    """Takes the replica with the least product of tokens to prefill, uncached ones of this prompt
    included, and requests, this one included. It has no parameter."""

    name = "lmetric"
    source = "LMetric, P-token times batch size"
    passed_over = "its product of prefill tokens and requests is larger"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the least product."""
        figures = fleet.figures[job.rows]
        tokens = figures[:, TOKENS] + job.query.prompt_tokens - job.cached_tokens
        return int(np.argmin(tokens * (requests_at(figures) + 1.0)))


_LOCAL = {
    **batching.POLICIES.own,
    **{each.name: each for each in (SarathiPriority, SJF, DEDF)},
}
_ORDER = (
    *("fcfs", "sarathi", "sarathi_priority", "edf", "sjf", "d_edf", "s_edf"),
    *("fairbatching", "slidebatching", "annealing", "slos_serve", "deadline_triage"),
)
LOCAL: Registry[BatchPolicy] = Registry(
    "batching", BatchPolicy, (_LOCAL[name] for name in dict.fromkeys((*_ORDER, *_LOCAL)))
)
"""Local policies by name, in the order of the tables; new ones come last."""

_PLAIN = ("round_robin", "power_of_two", "min_load")
ROUTERS: Registry[RoutingPolicy] = Registry(
    "routing",
    RoutingPolicy,
    (
        *(routing.POLICIES.own[name] for name in _PLAIN),
        VLLM,
        LMetric,
        *(each for name, each in routing.POLICIES.own.items() if name not in _PLAIN),
    ),
)
"""Routing policies by name, in the order of the tables."""
