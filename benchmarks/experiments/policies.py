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
from sluice.scheduling.fleet.local_orders import ARRIVAL, BY_PRIORITY, DEADLINE, SHORTEST
from sluice.scheduling.fleet.rows import RESERVED, TOKENS, WAITING, requests_at
from sluice.scheduling.fleet.rows import RUNNING as RUNNING_THERE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions, Registry
from sluice.scheduling.request.kernels import (
    COMPUTED,
    DECODE_CONTEXT,
    DECODE_SEQUENCE,
    EMITTED,
    EXPECTED,
    PENDING,
    PRIORITY,
    PROMPT,
    RUNNING,
    Floats,
    Ints,
    is_prefill,
    pending_work_s,
)
from sluice.scheduling.request.objective import MAX_PRIORITY
from sluice.scheduling.request.queue import QueueView
from sluice.scheduling.routing.base import Job, RoutingPolicy

Mask = NDArray[np.bool_]


class WeightedVTCOptions(PolicyOptions):
    """Options of :class:`WeightedVTC`."""

    prompt_cost: float = Field(
        default=1.0, gt=0, le=1_000, description="Cost of a prompt token (VTC's `w_p`)."
    )
    output_cost: float = Field(
        default=2.0, gt=0, le=1_000, description="Cost of an output token (VTC's `w_q`)."
    )


class WeightedVTC(BatchPolicy):
    """Running requests first, then those of the client with the least service per weight
    (ProServe's baseline). ``O(n log n)``.

    Our readings: a client is a priority, its weight the priority. Service counts the prompt at
    admission (once, also after a preemption) and each output token; a client that returns is lifted
    to the least counter of the waiting ones, or to that of the last client that left."""

    name = "weighted_vtc"
    source = "VTC (Sheng et al., OSDI 2024), Algorithm 2, weighted as in ProServe §5.1"
    local_order = ARRIVAL
    Options = WeightedVTCOptions

    def __init__(self, options: WeightedVTCOptions | None = None) -> None:
        options = options or WeightedVTCOptions()
        super().__init__(options)
        self._prompt_cost = options.prompt_cost
        self._output_cost = options.output_cost
        self._counters = np.zeros(MAX_PRIORITY + 1)
        self._left_last = 0
        # The requests of the last call, by key ascending.
        self._keys = np.empty(0, np.int64)
        self._clients = np.empty(0, np.int64)
        self._emitted = np.empty(0)
        self._counted = np.empty(0, np.bool_)
        self._planned = np.empty(0)

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Count the service since the last call, then admit by counter."""
        table = queue.table
        clients = table[:, PRIORITY].astype(np.int64)
        running = table[:, RUNNING] > 0
        known, counted = self._count(queue, clients, running)
        waiting = np.flatnonzero(~running)
        self._lift(clients[waiting], known[waiting])

        prompt_cost = np.where(counted, 0.0, self._prompt_cost * table[:, PROMPT]) / clients
        batch.take(np.flatnonzero(running))
        tags = self._tags(clients[waiting], prompt_cost[waiting])
        waiting = waiting[np.argsort(tags, kind="stable")]
        batch.take(waiting, in_order=True)
        granted = batch.granted[: len(table)]
        admitted = waiting[granted[waiting] > 0]
        if len(admitted):
            self._left_last = int(clients[admitted[-1]])
        self._remember(granted, queue, clients, counted, prompt_cost)

    def _count(self, queue: QueueView, clients: Ints, running: Mask) -> tuple[Mask, Mask]:
        """Add the service since the last call; which rows were in it, and whose prompts are
        counted."""
        table = queue.table
        known = np.zeros(len(table), np.bool_)
        counted = known.copy()
        emitted = np.zeros(len(table))
        gone = np.ones(len(self._keys), np.bool_)
        if len(self._keys):
            place = np.searchsorted(self._keys, queue.keys).clip(max=len(self._keys) - 1)
            # A row with fewer tokens than before is a new request with a reused key.
            known = self._keys[place] == queue.keys
            known &= table[:, EMITTED] >= self._emitted[place]
            gone[place[known]] = False
            counted = known & self._counted[place]
            emitted = np.where(known, self._emitted[place], 0.0)
        admitted = running & ~counted
        service = self._output_cost * (table[:, EMITTED] - emitted)
        service[admitted] += self._prompt_cost * table[admitted, PROMPT]
        self._add(clients, service / clients)
        self._add(self._clients[gone], self._planned[gone])
        return known, counted | admitted

    def _add(self, clients: Ints, service: Floats) -> None:
        self._counters += np.bincount(clients, service, minlength=len(self._counters))

    def _lift(self, clients: Ints, known: Mask) -> None:
        """Lift clients whose first waiting request is new (not ``known``)."""
        backlogged = set(clients[known].tolist())
        for client in dict.fromkeys(clients[~known].tolist()):
            if client in backlogged:
                continue
            if backlogged:
                floor = min(self._counters[other] for other in backlogged)
            else:
                floor = self._counters[self._left_last]
            self._counters[client] = max(self._counters[client], floor)
            backlogged.add(client)

    def _tags(self, clients: Ints, prompt_cost: Floats) -> Floats:
        """Per waiting request, its client's counter when its turn comes: the order of admission."""
        tags = np.empty(len(clients))
        for client in np.unique(clients):
            mine = clients == client
            # cumsum never lets a client's tags descend; rounding in a difference could.
            before = np.cumsum(np.concatenate(([0.0], prompt_cost[mine][:-1])))
            tags[mine] = self._counters[client] + before
        return tags

    def _remember(
        self, granted: Ints, queue: QueueView, clients: Ints, counted: Mask, cost: Floats
    ) -> None:
        table = queue.table
        rows = np.flatnonzero(granted)
        emits = granted[rows] >= table[rows, PENDING]
        planned = np.zeros(len(table))
        planned[rows] = cost[rows] + emits * self._output_cost / clients[rows]
        order = np.argsort(queue.keys)
        self._keys = queue.keys[order]
        self._clients = clients[order]
        self._emitted = table[order, EMITTED]
        self._counted = counted[order]
        self._planned = planned[order]


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
        order = np.lexsort((-table[:, PRIORITY], is_prefill(table)))
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
        left_s = pending_work_s(queue.table, latency.pieces)
        left_s += later_work_s(queue.table, latency.pieces)
        batch.take(np.argsort(left_s, kind="stable"), tokens=self.options.token_budget)


def later_work_s(table: Floats, pieces: Floats) -> Floats:
    """Per row, the marginal time of the output after its next token; 0 without a prediction."""
    tokens = np.nan_to_num(np.maximum(table[:, EXPECTED] - table[:, EMITTED] - 1, 0.0))
    # The steps' contexts grow by one each, so the mean one stands for all.
    context = table[:, COMPUTED] + table[:, PENDING] + (tokens - 1) / 2
    per_token_s = pieces[:, DECODE_SEQUENCE, None] + pieces[:, DECODE_CONTEXT, None] * context
    work: Floats = tokens * per_token_s.max(axis=0)
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

    def _first(self, due_s: Floats, now_s: float, ttft_s: Floats) -> NDArray[np.bool_]:
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
    **{each.name: each for each in (WeightedVTC, SarathiPriority, SJF, DEDF)},
}
_ORDER = (
    *("fcfs", "weighted_vtc", "sarathi", "sarathi_priority", "edf", "sjf", "d_edf", "s_edf"),
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
