"""SlideBatching: density first for urgent requests, deadline first for the others."""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.batching.base import BatchPolicy, PrefillShareOptions, least_useful_s
from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import (
    COMPUTED,
    EMITTED,
    PENDING,
    PRIORITY,
    TPOT,
    Floats,
    Ints,
    by_deadline,
    deadlines_s,
    is_prefill,
    pending_work_s,
)
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView
from sluice.scheduling.roles import Role


class SlideBatchingOptions(PrefillShareOptions):
    """Options of :class:`SlideBatching`."""

    boundary: Literal["phi_a", "phi_c", "phi_p"] | None = Field(
        default=None,
        description="Estimate of a request's longest wait: `phi_a` the whole queue (Eq. 8), "
        "`phi_c` the requests due before it (Eq. 9), `phi_p` the whole queue with one batch per "
        "request. Default: `phi_p` on replicas of a prefill pool, `phi_a` on others.",
    )
    order: Literal["slide", "deadline", "density"] = Field(
        default="slide",
        description="`deadline` and `density` disable the partition (§5.4, `w/ only deadline` "
        "and `w/ only density`): all requests rank as normal or as urgent ones.",
    )
    latency_aware: bool = Field(
        default=True,
        description="Whether to use the latency estimator. Without it (§5.4, `w/o latency-aware`) "
        "only the engine's token limit bounds a batch, a request is urgent once it is late, and "
        "its density is its worth per pending token.",
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="Aggressiveness: a request is urgent if it is due within gamma times the wait "
        "by `boundary`. 0 is deadline first for all, a large value density first for all.",
    )
    eta_s: float = Field(
        default=0.05,
        gt=0,
        le=10,
        description="Minimum time budget of a batch, seconds. The minimum attainable TPOT "
        "objective in the queue caps it.",
    )
    anchor: Anchor = Field(
        default=Anchor.FIRST_TOKEN,
        description="Where the deadlines of later tokens start: `envelope` is Eq. 3 and fits TDG; "
        "`first_token` is its footnote for first tokens that cannot be buffered, and fits a TPOT "
        "measured since the first token.",
    )
    late: Literal["exclude", "include"] = Field(
        default="exclude",
        description="Whether requests that can no longer meet their deadline limit the time "
        "budget: `include` is the literal Algorithm 1.",
    )
    first_weight: float = Field(
        default=5.5,
        gt=0,
        le=10_000,
        description="Weight of a first token in units of a later one, w_p / w_d. The paper uses "
        "the workload's mean input length over its mean output length; the default is "
        "about that of the Azure 2023 conversation trace (1,237 over 222 tokens).",
    )

    def for_role(self, role: Role) -> Self:
        """With the ``boundary`` for the role, unless one is set."""
        if self.boundary is not None:
            return self
        return self.model_copy(update={"boundary": "phi_p" if role == "prefill" else "phi_a"})


class Partition(NamedTuple):
    """A queue split by ``SlideBatching``. ``due_s`` is infinite for no deadline; ``order``: rows by
    deadline; ``urgent``: of each of its first rows, which have a deadline."""

    due_s: Floats
    work_s: Floats
    budget_s: float
    order: Ints
    urgent: NDArray[np.bool_]


class SlideBatching(BatchPolicy):
    """Splits the queue at a load-dependent boundary and fills the time budget ``max(min remain,
    eta)``: urgent requests (``remain < gamma * phi``, Eq. 8 and 9) by density, then normal ones by
    time left. ``O(n log n)``.

    Our readings: requests late even alone do not count in the minimum, as one would pin every
    budget to eta. Eta is capped by the minimum TPOT that a useful batch can meet
    (``least_useful_s``), and one not above a step's fixed time becomes twice that. Urgent prefills
    keep a share beside decodes; a ``prefill_share`` of 0 is Algorithm 1 without this. Without the
    estimator (§5.4) ``phi`` is 0 and density uses tokens. Requests without a deadline come last.

    There is no ageing: under sustained overload a long prompt of low priority starves."""

    name = "slidebatching"
    source = "ProServe §4.2, Algorithm 1, Eq. 8 and 9; §5.4 for its ablation"
    local_order = SLIDE
    Options = SlideBatchingOptions
    options: SlideBatchingOptions

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Rank the queue, then fill the time budget."""
        table, options = queue.table, self.options
        due_s, work_s, budget_s, order, urgent = self.partition(table, now_s, latency)
        prefill = is_prefill(table)
        ranked, unbound = order[: len(urgent)], order[len(urgent) :]
        unbound = unbound[np.argsort(prefill[unbound], kind="stable")]
        weight = np.where(table[:, EMITTED] == 0, options.first_weight, 1.0) * table[:, PRIORITY]
        # By some models work takes no time.
        density = weight / np.maximum(work_s, 1e-12)
        dense = ranked[urgent]
        dense = dense[np.argsort(-density[dense], kind="stable")]

        if budget_s < inf and options.prefill_share:
            soon = dense[due_s[dense] - now_s < 2 * budget_s]
            taken_s = float(work_s[soon[~prefill[soon]]].sum())
            depths = table[dense[prefill[dense]], COMPUTED]
            if taken_s > 0 and len(depths):
                taken_s += latency.fixed_s
                least_s = least_useful_s(taken_s, latency, int(depths.max()), options.prefill_share)
                budget_s = max(budget_s, least_s)
        rows = np.concatenate((dense, ranked[~urgent], unbound))
        batch.take(rows, budget_s)
        batch.ensure_progress(rows)

    def partition(self, table: Floats, now_s: float, latency: LatencyModel) -> Partition:
        """Which requests of a queue, ``float64[n, FIELDS]``, are urgent."""
        due_s = deadlines_s(table, self.options.anchor.code)
        # Without the estimator a token counts as one second: only the density uses it.
        work_s = table[:, PENDING]
        if self.options.latency_aware:
            work_s = pending_work_s(table, latency.pieces)
        order = by_deadline(np.arange(len(table)), due_s)
        ranked = order[: np.searchsorted(due_s[order], inf)]
        remain_s = due_s[ranked] - now_s
        budget_s = inf
        if self.options.latency_aware:
            budget_s = self._budget_s(table, remain_s, work_s[ranked], latency)
        urgent = self._urgent(remain_s, work_s[ranked], budget_s, latency)
        return Partition(due_s, work_s, budget_s, order, urgent)

    def _budget_s(
        self, table: Floats, remain_s: Floats, work_s: Floats, latency: LatencyModel
    ) -> float:
        """The time budget, seconds; infinite if no request has a deadline. ``remain_s`` ascends."""
        if not len(remain_s):
            return inf
        fixed_s = latency.fixed_s
        options, eta_s = self.options, self.options.eta_s
        if eta_s <= fixed_s:
            eta_s = 2 * fixed_s
        tpot_s = table[:, TPOT]
        paced = tpot_s[tpot_s >= least_useful_s(fixed_s, latency, share=options.prefill_share)]
        # With a share of 0 and a model with free decodes, a paced TPOT can equal the fixed time.
        paced = paced[paced > fixed_s]
        if len(paced):
            eta_s = min(eta_s, float(paced.min()))
        include = options.late == "include"
        counts = remain_s if include else remain_s[remain_s >= fixed_s + work_s]
        # If every deadline is already missed, none of them sets the budget.
        return max(float(counts[0]), eta_s) if len(counts) else eta_s

    def _urgent(
        self, remain_s: Floats, work_s: Floats, budget_s: float, latency: LatencyModel
    ) -> NDArray[np.bool_]:
        if self.options.order != "slide":
            return np.full(len(remain_s), self.options.order == "density")
        queued_s = np.cumsum(work_s)
        if self.options.boundary != "phi_c" and len(queued_s):
            queued_s = queued_s[-1:]
        if not self.options.latency_aware:
            wait_s = np.zeros(1)
        elif self.options.boundary == "phi_p":
            wait_s = queued_s + len(remain_s) * latency.fixed_s
        elif budget_s < inf:
            wait_s = queued_s / (1.0 - latency.fixed_s / budget_s)
        else:
            wait_s = queued_s
        urgent: NDArray[np.bool_] = remain_s < self.options.gamma * wait_s
        return urgent
