"""Simulated-annealing priority mapping of 002, mapped onto continuous batching."""

from __future__ import annotations

from functools import partial
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sluice.scheduling.batching.base import BatchBuilder, BatchPolicy
from sluice.scheduling.batching.priority_mapping import (
    Jobs,
    Schedule,
    Times,
    anneal,
    levels,
    predict,
)
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.latency.request_model import Interaction, InteractionLatency
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request import kernels
from sluice.scheduling.request.kernels import Floats, Ints
from sluice.scheduling.request.queue import QueueView

MOST_STEPS = 50_000
"""Most steps of one search, about ten milliseconds at 40 requests."""


class AnnealingOptions(PolicyOptions):
    """Options of :class:`Annealing`."""

    batch_size: int = Field(
        default=32,
        ge=1,
        le=256,
        description="Maximum number of requests that run at once. Waiting requests are admitted up "
        "to it; running ones continue. The engine's own sequence limit also applies.",
    )
    annealed: int = Field(
        default=40,
        ge=1,
        le=64,
        description="Maximum number of waiting requests that are mapped, the earliest arrivals "
        "first. The others wait behind them in order of arrival.",
    )
    admits: Literal["first_batch", "in_order"] = Field(
        default="first_batch",
        description="Which waiting requests run. `first_batch`: those of the first batch, even if "
        "more would fit `batch_size`. `in_order`: the next ones in the whole order, whichever "
        "batch they are in, as an FCFS engine runs what it gets in that order.",
    )
    expected_tokens: float = Field(
        default=256.0,
        ge=1,
        le=1_000_000,
        description="Output length of a request without a prediction, tokens.",
    )
    output_tokens: tuple[float, float] = Field(
        default=(1.0, 1_000_000.0),
        description="Minimum and maximum output length, tokens: a prediction outside counts as the "
        "nearer of the two.",
    )
    prefill: Interaction | None = Field(
        default=None,
        description="Coefficients alpha, beta, gamma, delta of the prefill time (Eq. 14), seconds. "
        "Without them, both `prefill` and `decode` follow from the engine's latency model.",
    )
    decode: Interaction | None = Field(
        default=None,
        description="Coefficients alpha, beta, gamma, delta of the decode time per token (Eq. 15), "
        "seconds. Stated with `prefill` or not at all.",
    )
    initial_temperature: float = Field(
        default=500.0, gt=0, le=1_000_000, description="Temperature at the start of a search."
    )
    threshold: float = Field(
        default=20.0, gt=0, le=1_000_000, description="A search ends below this temperature."
    )
    iterations: int = Field(
        default=100, ge=1, le=MOST_STEPS, description="Steps of a search at each temperature."
    )
    decay: float = Field(
        default=0.95, gt=0, lt=1, description="Factor from one temperature to the next."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the random steps.")

    @property
    def schedule(self) -> Schedule:
        """The annealing schedule of a search."""
        first, last = self.initial_temperature, self.threshold
        return Schedule.of(first, last, self.iterations, self.decay, self.seed)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.threshold > self.initial_temperature:
            raise ValueError(
                f"threshold must be at most initial_temperature ({self.initial_temperature:g}), "
                f"got {self.threshold:g}"
            )
        steps = self.iterations * levels(self.initial_temperature, self.threshold, self.decay)
        if steps > MOST_STEPS:
            raise ValueError(
                f"initial_temperature, threshold, decay and iterations make {steps:,} steps a "
                f"search, at most {MOST_STEPS:,} are allowed"
            )
        shortest, longest = self.output_tokens
        if not 1 <= shortest <= longest <= 1_000_000:
            raise ValueError(
                "output_tokens must be a minimum and a maximum from 1 to 1,000,000, "
                f"got {shortest:g} and {longest:g}"
            )
        if (self.prefill is None) != (self.decode is None):
            raise ValueError("prefill and decode must be stated together, or neither")
        if self.prefill is not None and self.decode is not None:
            InteractionLatency(self.prefill, self.decode)
        return self


class Annealing(BatchPolicy):
    """Admits waiting requests by a priority mapping that maximises attainment over mean latency.

    The mapping (:mod:`sluice.scheduling.batching.priority_mapping`) puts the waiting requests into
    a sequence of batches. The paper runs these batches one after the other; an engine with
    continuous batching does not have to. Our readings:

    - Running requests continue, decodes before prefills. They belong to the mapping's first batch,
      with their remaining work and their lateness so far.
    - The other requests of the first batch are admitted, in its order. Requests of later batches
      wait: by the mapping, running them beside the first batch costs more than it gains. With
      ``admits: in_order`` they take the slots that are left, in the order of the mapping: that is
      what an engine with FCFS makes of the paper's dispatch, which sends one batch after the other
      0.1 ms apart (§5.1).
    - Whenever a request arrives, ends or is preempted, the mapping is computed again, as in the
      paper when its pool changes. So later batches rarely run as mapped: their requests compete for
      every slot that comes free.
    - Where nothing runs and no request of the first batch fits the memory, the first request that
      fits is taken.

    Like the paper, this policy has no ageing: a request that cannot meet its objective, or takes
    long, can be passed over indefinitely. It does not preempt either.

    Cost: ``O(n)`` in a call in which the last mapping is still valid, else ``O(batch_size *
    annealed + steps * annealed)``. State: the last mapping, ``O(n)``.
    """

    name = "annealing"
    source = "SLO-Aware Scheduling for LLM Inferences (arXiv 2504.14966) §4.2, §4.3, Algorithm 1"
    local_order = SLIDE
    Options = AnnealingOptions

    def __init__(self, options: AnnealingOptions | None = None) -> None:
        options = options or AnnealingOptions()
        super().__init__(options)
        self._batch_size = options.batch_size
        self._annealed = options.annealed
        self._in_order = options.admits == "in_order"
        self._output_tokens = options.output_tokens
        self._expected_tokens = options.expected_tokens
        self._stated: InteractionLatency | None = None
        if options.prefill is not None and options.decode is not None:
            self._stated = InteractionLatency(options.prefill, options.decode)
        self._schedule = options.schedule
        self._keys: Ints = np.empty(0, np.int64)
        self._waiting = np.empty(0, np.bool_)
        self._first: Ints = np.empty(0, np.int64)
        self._later: Ints = np.empty(0, np.int64)

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Take the running requests, then those of the mapping that are admitted."""
        table = queue.table
        waiting = table[:, kernels.RUNNING] == 0
        running = np.flatnonzero(~waiting)
        prefill = kernels.is_prefill(table)[running]
        decodes, prefills = running[~prefill], running[prefill]
        batch.take(decodes)
        batch.take(prefills)
        # Rows keep their indices while the keys are the same.
        same = np.array_equal(queue.keys, self._keys) and not (waiting & ~self._waiting).any()
        self._keys, self._waiting = queue.keys.copy(), waiting
        if len(running) == len(table):
            return
        if not same:
            rows = np.flatnonzero(waiting)
            free = self._batch_size - len(running)
            mapped = rows[: self._annealed] if free > 0 else rows[:0]
            order, admitted = self._map(table, decodes, prefills, mapped, now_s, latency)
            if self._in_order:
                admitted = max(free, 0)
            self._first = order[:admitted]
            self._later = np.concatenate((order[admitted:], rows[len(mapped) :]))
        batch.take(self._first)
        batch.ensure_progress(self._later)

    def _map(
        self,
        table: Floats,
        decodes: Ints,
        prefills: Ints,
        waiting: Ints,
        now_s: float,
        latency: LatencyModel,
    ) -> tuple[Ints, int]:
        """The rows of ``waiting`` in order, and how many of them the first batch has."""
        if not len(waiting):
            return waiting, 0
        model = self._stated or InteractionLatency.of_steps(latency)
        times = partial(
            predict,
            now_s=now_s,
            model=model,
            most=self._batch_size,
            expected_tokens=self._expected_tokens,
        )
        # Predictions are nan where nothing is known.
        table = table.copy()
        np.clip(table[:, kernels.EXPECTED], *self._output_tokens, out=table[:, kernels.EXPECTED])
        rows = np.concatenate((decodes, prefills, waiting))
        jobs = Jobs(
            times(table[waiting]), waited_s=float(np.sum(now_s - table[rows, kernels.ARRIVAL]))
        )
        running = len(rows) - len(waiting)
        if running:
            exec_s, latest_s = times(table[rows], decoding=len(decodes))
            jobs = jobs._replace(
                running=Times(exec_s[:running], latest_s[:running]),
                joining=Times(exec_s[running:], latest_s[running:]),
            )
        found = anneal(jobs, self._schedule)
        return waiting[found.order], int(found.sizes[0])
