"""One simulated engine: continuous batching, chunked prefill and paged KV, in virtual time."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from scheduling.batching import BatchBudget, BatchPlan, BatchPolicy, make_policy
from scheduling.kernels import FIELDS, KV_BLOCKS, Floats, Ints
from scheduling.request import QueueView
from simulation import steps
from simulation.config import EngineConfig
from simulation.requests import Requests
from simulation.truth import Belief, Noise, Planner, Truth

_ROWS = 256

Array = TypeVar("Array", bound=NDArray[Any])


class StuckError(RuntimeError):
    """An engine has live requests and could run none of them."""


class Engine:
    """Runs a batch policy over its live requests, one step at a time.

    The caller owns the clock: :meth:`begin` says how long the step takes, :meth:`complete` ends it.
    Between the two, requests may be submitted. The engine does what stock vLLM does around a plan
    (:class:`~scheduling.batching.base.BatchBuilder`): a running request that lacks blocks preempts
    others by recompute. A policy that plans nothing while requests are live does not stop it: that
    step is planned first come, first served, as in production, and counted in ``fallbacks``.

    Live requests are rows of one array in order of arrival; a step costs the policy's plan and
    ``O(live)`` compiled.

    Args:
        config: its limits.
        policy: of its own; policies keep state.
        belief: what it plans with.
        truth: how long its steps take.
        requests: the requests of the run; their emission times are written there.
        rng: source of its noise and of accepted drafts.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: BatchPolicy,
        belief: Belief,
        truth: Truth,
        requests: Requests,
        rng: np.random.Generator,
    ) -> None:
        self.config = config
        self.planner = Planner(belief)
        self.steps = 0
        self.fallbacks = 0
        self.dropped = 0
        self.busy_s = 0.0
        self._policy = policy
        self._truth_pieces = truth.model.pieces
        self._requests = requests
        self._noise = Noise(truth.noise, rng)
        self._rng = rng
        self._fallback = make_policy("fcfs")
        self._counters: Ints = np.zeros(steps.COUNTERS, np.int64)
        self._counters[steps.FREE_BLOCKS] = config.kv_blocks
        self._seconds: Floats = np.zeros(2)
        self._ran_count = 0

        self._table: Floats = np.zeros((_ROWS, FIELDS))
        self._private: Ints = np.zeros((_ROWS, steps.PRIVATE), np.int64)
        self._keys: Ints = np.zeros(_ROWS, np.int64)
        self._shown_keys = self._keys[:0]
        # Rows of a step: what runs with how many tokens, what was preempted, what ended.
        self._ran: Ints = np.zeros((_ROWS, 2), np.int64)
        self._accepted: Ints = np.zeros(_ROWS, np.int64)
        self._victims: Ints = np.zeros(_ROWS, np.int64)
        self._finished: Ints = np.zeros(_ROWS, np.int64)
        self._staged: Ints = np.zeros(_ROWS, np.int64)

    def _make_room(self) -> None:
        """Double the arrays, also while a step runs."""
        self._table = _doubled(self._table)
        self._private = _doubled(self._private)
        self._keys = _doubled(self._keys)
        self._ran = _doubled(self._ran)
        self._accepted = _doubled(self._accepted)
        self._victims = _doubled(self._victims)
        self._finished = _doubled(self._finished)
        self._staged = _doubled(self._staged)

    @property
    def live(self) -> int:
        """Requests that it has."""
        return int(self._counters[steps.LIVE])

    @property
    def running(self) -> int:
        """Requests that hold a place and KV."""
        return int(self._counters[steps.SEQUENCES])

    @property
    def free_blocks(self) -> int:
        """KV blocks that a plan may use."""
        return int(self._counters[steps.FREE_BLOCKS])

    @property
    def preemptions(self) -> int:
        """Requests that lost their KV, since the start."""
        return int(self._counters[steps.PREEMPTIONS])

    @property
    def lost_tokens(self) -> int:
        """Computed tokens that preemptions threw away."""
        return int(self._counters[steps.LOST_TOKENS])

    @property
    def done_tokens(self) -> int:
        """Tokens computed, since the start."""
        return int(self._counters[steps.DONE_TOKENS])

    @property
    def queue(self) -> QueueView:
        """Its live requests, as a policy sees them; valid until the next change."""
        live = self.live
        return QueueView.of_table(self._shown_keys, self._table[:live], self._requests.slos)

    def submit(self, key: int) -> bool:
        """Queue a request of the run. ``False``: it is longer than the KV and can never run."""
        requests = self._requests
        if requests.whole_tokens(key) > self.config.kv_tokens:
            return False
        live = self.live
        if live == len(self._keys):
            self._make_room()
        self._table[live] = requests.rows[key]
        self._private[live] = requests.private[key]
        self._keys[live] = key
        self._counters[steps.LIVE] = live + 1
        self._shown_keys = self._keys[: live + 1].copy()
        return True

    def begin(self, now_s: float) -> float:
        """Plan and start a step; return its real seconds. It needs a live request.

        Raises:
            StuckError: no plan, and not the fallback's either, runs anything.
        """
        if not self._start(self._plan(self._policy, now_s)):
            self.fallbacks += 1
            if not self._start(self._plan(self._fallback, now_s)):
                raise StuckError(
                    f"{self.live} requests are live at {now_s:.3f} s, {self.free_blocks} KV blocks "
                    f"are free, and policy {self._policy.name} and the fallback run none of them"
                )
        real_s = float(self._seconds[0]) * self._noise.next()
        self.planner.observe(float(self._seconds[1]), real_s)
        self.steps += 1
        self.busy_s += real_s
        return real_s

    def _plan(self, policy: BatchPolicy, now_s: float) -> BatchPlan:
        config = self.config
        budget = BatchBudget(
            config.max_batch_tokens,
            config.max_sequences,
            int(self._counters[steps.FREE_BLOCKS]),
            config.block_tokens,
            config.reserve_prompt,
        )
        return policy.plan(self.queue, now_s, self.planner.latency, budget)

    def _start(self, plan: BatchPlan) -> int:
        """Carry a plan out; return how many of its entries run."""
        config, counters = self.config, self._counters
        speculation = config.speculation
        self._ran_count = steps.begin(
            self._table,
            self._private,
            counters,
            plan.rows,
            plan.tokens,
            config.block_tokens,
            config.max_sequences,
            speculation.length if speculation is not None else 0,
            self._truth_pieces,
            self.planner.pieces,
            self._ran,
            self._victims,
            self._seconds,
        )
        self.dropped += int(counters[steps.DROPPED])
        if speculation is not None:
            tries = self._rng.geometric(1 - speculation.alpha, self._ran_count)
            self._accepted[: self._ran_count] = np.minimum(tries - 1, speculation.length)
        return self._ran_count

    def complete(self, now_s: float) -> list[int]:
        """End the step; return the keys of the requests that have all their output."""
        counters = self._counters
        steps.complete(
            self._table,
            self._private,
            self._keys,
            counters,
            self._ran,
            self._ran_count,
            self._accepted,
            self.config.block_tokens,
            now_s,
            self._requests.emitted_s,
            self._finished,
            self._staged,
        )
        self._ran_count = 0
        if counters[steps.STAGED]:
            self._begin_stages(self._staged[: counters[steps.STAGED]], now_s)
        if not counters[steps.FINISHED]:
            return []
        finished: list[int] = self._finished[: counters[steps.FINISHED]].tolist()
        self._shown_keys = self._keys[: counters[steps.LIVE]].copy()
        for key in finished:
            self._requests.finished(key)
        return finished

    def _begin_stages(self, keys: Ints, now_s: float) -> None:
        places = np.flatnonzero(np.isin(self._keys[: self.live], keys))
        for row in places.tolist():
            key = int(self._keys[row])
            self._requests.next_stage(key, self._table[row], self._private[row], now_s)

    def held_blocks(self) -> int:
        """KV blocks that requests hold."""
        return int(self._table[: self.live, KV_BLOCKS].sum())


def _doubled(array: Array) -> Array:
    """``array`` with as many empty places behind it."""
    larger = np.concatenate((array, np.zeros_like(array)))
    return cast(Array, larger)
