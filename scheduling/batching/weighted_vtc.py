"""Weighted VTC: admission in proportion to the clients' weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.batching.base import BatchBuilder, BatchPolicy
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import (
    EMITTED,
    PENDING,
    PRIORITY,
    PROMPT,
    RUNNING,
    Floats,
    Ints,
)
from sluice.scheduling.request.objective import MAX_PRIORITY
from sluice.scheduling.request.queue import QueueView

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
    """Running requests first, then waiting ones of the client with the least service per weight.
    ``O(n log n)``.

    Every client has a virtual counter of its service so far, over its weight: the whole prompt is
    counted when a request is admitted, an output token when it is emitted. Admission repeatedly
    takes the earliest request of the client with the least counter and counts its prompt; the first
    request that does not fit ends it. A client that returns to the queue is lifted to the minimum
    counter of the waiting clients, or, where none waits, to the counter of the client that left the
    queue last: time without demand earns no credit.

    Our readings:

    - A client is a priority, and the priority its weight, as ProServe's baseline gives weights to
      priority classes. So the state is a number per priority and one entry per live request.
    - Counters follow the progress that the queue shows, not the plan. Only a request that has left
      since the last call is counted by its last plan.
    - The engine's chunked prefill is unchanged, so running requests include prefills that have
      begun.
    - The prompt of a request that recomputes after a preemption is not counted again. The request
      keeps its position by arrival and is no new demand of its client.
    """

    name = "weighted_vtc"
    source = "VTC (Sheng et al., OSDI 2024), Algorithm 2, weighted as in ProServe §5.1"
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
        """Add the service since the last call to the counters. Return which rows were in that call,
        and whose prompts are counted."""
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
        """Lift clients whose first waiting request is new. ``clients`` has the client of each
        waiting request, by arrival; ``known`` whether the request was in the last call."""
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
        """Per waiting request, its client's counter when its turn comes. The client with the least
        counter is next, so the requests are admitted in the order of their tags."""
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
        """Keep the state from which the next call computes the service."""
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
