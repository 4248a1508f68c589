"""One simulated engine: continuous batching, chunked prefill and paged KV, in virtual time."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy, make_policy
from sluice.scheduling.fleet.transfer import prompt_ttft_s
from sluice.scheduling.request.kernels import (
    COMPUTED,
    EMITTED,
    EXPECTED,
    KV_BLOCKS,
    PENDING,
    PROMPT,
    RUNNING,
    TTFT,
    Floats,
    Ints,
)
from sluice.scheduling.request.queue import QueueView
from sluice.simulation import steps
from sluice.simulation.config import EngineConfig
from sluice.simulation.drafts import Drafts
from sluice.simulation.prefix_cache import PrefixCache
from sluice.simulation.requests import Requests
from sluice.simulation.rows import Rows
from sluice.simulation.truth import Belief, Noise, Planner, Truth


class StuckError(RuntimeError):
    """An engine has live requests and could run none of them."""


class VirtualEngine:
    """Runs a batch policy over its live requests, one step at a time.

    The caller owns the clock: :meth:`begin` says how long the step takes, :meth:`complete` ends it.
    Between the two, requests may be submitted. :class:`~sluice.simulation.rows.Rows` carries plans
    out. If no entry of a plan can run, the step is planned first come, first served, as in
    production, and counted in ``fallbacks``.

    It differs from vLLM in this: a preempted request computes everything again that the workload
    has no hashes for, while vLLM's own hashes may still find some of it.

    A step costs the policy's plan and ``O(live)`` compiled, and with a prefix cache a little for
    each request that begins or ends.

    Args:
        config: its limits.
        policy: of its own; policies keep state.
        belief: what it plans with.
        truth: how long its steps take.
        requests: the requests of the run; their emission times are written there.
        rng: source of its noise and of accepted drafts.

    Raises:
        ValueError: the workload's hashed blocks do not fit the KV blocks.
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
        self.slowness = 1.0
        """Factor on the real time of steps that begin from now on; the belief learns it."""
        self.cache: PrefixCache | None = None
        self._policy = policy
        self._truth_pieces = truth.model.pieces
        self._requests = requests
        self._noise = Noise(truth.noise, rng)
        self._rng = rng
        # Requests of which only the context is computed here.
        self._prefills: set[int] = set()
        self._fallback = make_policy("fcfs")
        self._rows = Rows(config.kv_blocks, config.block_tokens, config.max_sequences)
        self._counters = self._rows.counters
        self._shown_keys: Ints = self._rows.keys[:0]
        self._seconds: Floats = np.zeros(steps.TIMES)
        self._begun_s = 0.0
        self.drafts: Drafts | None = None
        if config.speculation is not None:
            self.drafts = Drafts(config.speculation, requests, rng)
        if config.prefix_cache and requests.hashed:
            tokens = requests.workload.block_tokens
            self.cache = PrefixCache(requests.arrivals, tokens, config.block_tokens)

    def follow(self, policy: BatchPolicy) -> None:
        """Plan with another policy, if its options are others."""
        if policy.options != self._policy.options:
            self._policy = policy

    @property
    def local_order(self) -> int:
        """The order of its policy."""
        return self._policy.local_order

    @property
    def live(self) -> int:
        """Requests that it has."""
        return self._rows.live

    @property
    def running(self) -> int:
        """Requests that hold a slot and KV."""
        return self._rows.sequences

    @property
    def free_blocks(self) -> int:
        """KV blocks that a plan may use."""
        return self._rows.free_blocks

    @property
    def held_blocks(self) -> int:
        """KV blocks that live requests hold; one that several share counts for each."""
        return int(self._rows.table[: self.live, KV_BLOCKS].sum())

    @property
    def preemptions(self) -> int:
        """Requests that lost their KV, since the start."""
        return int(self._counters[steps.PREEMPTIONS])

    @property
    def lost_tokens(self) -> int:
        """Computed tokens that preemptions threw away."""
        return int(self._counters[steps.LOST_TOKENS])

    @property
    def evictions(self) -> int:
        """Best-effort requests that lost their KV to promised ones, since the start."""
        return int(self._counters[steps.EVICTIONS])

    @property
    def evicted_tokens(self) -> int:
        """Of :attr:`lost_tokens`, those of evictions."""
        return int(self._counters[steps.EVICTED_TOKENS])

    @property
    def done_tokens(self) -> int:
        """Tokens computed, since the start."""
        return int(self._counters[steps.DONE_TOKENS])

    @property
    def hit_tokens(self) -> int:
        """Tokens that the prefix cache had, since the start."""
        return self.cache.hit_tokens if self.cache is not None else 0

    @property
    def queue(self) -> QueueView:
        """Its live requests, as a policy sees them; valid until the next change."""
        table = self._rows.table[: self.live]
        return QueueView.of_table(self._shown_keys, table, self._requests.slos)

    @property
    def later(self) -> Floats | None:
        """What is to come of its live requests' stages, see :meth:`Requests.later`."""
        return self._requests.later(self._rows.keys[: self.live], self._rows.private)

    def submit(self, key: int) -> bool:
        """Queue a request of the run. ``False``: it is longer than the KV and can never run."""
        requests = self._requests
        if requests.whole_tokens(key) > self.config.kv_tokens:
            return False
        self._enter(key, requests.rows[key], requests.private[key])
        return True

    def prefill(self, key: int, kv_transfer_s: float) -> bool:
        """Queue a request of which only the context is computed here, for another engine. It ends
        with a token that is not sent to the client and is due ``kv_transfer_s`` before the first
        token of the request. ``False``: the context is longer than the KV."""
        requests = self._requests
        if requests.context_tokens(key) >= self.config.kv_tokens:
            return False
        row, private = requests.rows[key].copy(), requests.private[key].copy()
        private[steps.TARGET] = row[EXPECTED] = 1
        row[TTFT] = prompt_ttft_s(row[TTFT], kv_transfer_s)
        private[steps.STAGES_LEFT] = 0
        private[steps.OFFSET] = len(requests.emitted_s)
        self._prefills.add(key)
        self._enter(key, row, private)
        return True

    def take_over(self, key: int) -> bool:
        """Queue a request whose context another engine has computed and sent. Its last token is
        computed again, as that gives the next one. ``False``: it can never run."""
        requests = self._requests
        if requests.whole_tokens(key) > self.config.kv_tokens:
            return False
        row = requests.rows[key].copy()
        row[COMPUTED] = requests.context_tokens(key) - 1
        row[PENDING] = 1.0
        self._enter(key, row, requests.private[key], brought=True)
        return True

    def decoding(self) -> list[tuple[int, int]]:
        """The requests that decode here, and the tokens that each has emitted in all."""
        rows, offsets = self._rows, self._requests.offsets[self._requests.first_stage]
        table, keys = rows.table[: self.live], rows.keys[: self.live]
        running = (table[:, RUNNING] > 0) & (table[:, EMITTED] > 0) & (table[:, PENDING] == 1)
        return [
            (key, int(table[place, EMITTED] + rows.private[place, steps.OFFSET] - offsets[key]))
            for place, key in zip(np.flatnonzero(running), keys[running].tolist(), strict=True)
            if key not in self._prefills
        ]

    def context_tokens(self, key: int) -> int:
        """Prompt and output so far of a live request."""
        row = self._rows.table[self._place_of(key)]
        return int(row[PROMPT] + row[EMITTED])

    def withdraw(self, key: int) -> bool:
        """Take a live request out, between two steps: another engine continues it with its KV.
        ``False``: it is not here any more."""
        if key not in self._rows.keys[: self.live]:
            return False
        rows, place = self._rows, self._place_of(key)
        self._requests.interrupted(key, rows.table[place], rows.private[place])
        rows.drop(key)
        if self.cache is not None:
            self.cache.leave(rows, [key])
        self._shown_keys = rows.keys[: rows.live].copy()
        return True

    def _place_of(self, key: int) -> int:
        return int(np.flatnonzero(self._rows.keys[: self.live] == key)[0])

    def _enter(self, key: int, row: Floats, private: Ints, brought: bool = False) -> None:
        place = self._rows.append(key, row, private)
        self._shown_keys = self._rows.keys[: place + 1].copy()
        if self.cache is not None:
            self.cache.enter(self._rows, place, brought)

    def begin(self, now_s: float) -> float:
        """Plan and start a step; return its real seconds. It needs a live request.

        Raises:
            StuckError: no plan, and not the fallback's either, runs anything.
        """
        if self.cache is not None:
            self.cache.refresh(self._rows)
        if not self._start(self._plan(self._policy, now_s)):
            if not self._start(self._plan(self._fallback, now_s)):
                raise StuckError(
                    f"{self.live} requests are live at {now_s:.3f} s, {self.free_blocks} KV blocks "
                    f"are free, and policy {self._policy.name} and the fallback run none of them"
                )
            self.fallbacks += 1
        real_s = float(self._seconds[steps.TRUE_S]) * self._noise.next() * self.slowness
        self._begun_s = now_s
        self.steps += 1
        self.busy_s += real_s
        return real_s

    def _plan(self, policy: BatchPolicy, now_s: float) -> BatchPlan:
        config = self.config
        budget = BatchBudget(
            config.max_batch_tokens,
            config.max_sequences,
            self.free_blocks,
            config.block_tokens,
            config.reserve_prompt,
            draft_s=self.drafts.config.draft_s if self.drafts is not None else 0.0,
        )
        if self.drafts is not None:
            self.drafts.show(self._rows.table[: self.live], self._rows.keys[: self.live])
        return policy.plan(self.queue, now_s, self.planner.latency, budget)

    def _start(self, plan: BatchPlan) -> int:
        """Carry a plan out; return how many of its entries run."""
        rows = self._rows
        admitted: list[int] = []
        if self.cache is not None:
            admitted = self.cache.admit(rows, plan.rows, plan.tokens, len(plan.evicted) > 0)
        count = rows.begin(plan)
        steps.times_s(
            rows.table,
            rows.step[:count],
            self._truth_pieces,
            self.planner.pieces,
            self.planner.latency.fixed_correction,
            self.planner.latency.correction,
            self._seconds,
        )
        if self.cache is not None:
            self.cache.settle(rows, admitted)
        self.dropped += int(rows.counters[steps.DROPPED])
        if self.drafts is not None:
            accepted = rows.step[:count, steps.ACCEPTED]
            drafting_s = self.drafts.check(rows.table, rows.keys, rows.ran, accepted)
            self._seconds[steps.TRUE_S] += drafting_s
            self._seconds[steps.BELIEVED_WORK_S] += drafting_s
        return count

    def complete(self, now_s: float) -> list[int]:
        """End the step; return the keys of the requests that have all their output."""
        rows = self._rows
        fixed_s = float(self._seconds[steps.BELIEVED_FIXED_S])
        work_s = float(self._seconds[steps.BELIEVED_WORK_S])
        self.planner.observe(fixed_s, work_s, now_s - self._begun_s)
        if self.cache is not None:
            self.cache.fill(rows, rows.ran)
        drafts = self.drafts.config.length if self.drafts is not None else 0
        turns = rows.complete(now_s, drafts, self._requests.times)
        if not len(turns):
            return []
        finished = self._take_turns(turns.tolist(), now_s)
        if finished:
            if self.cache is not None:
                self.cache.leave(rows, finished)
            self._shown_keys = rows.keys[: rows.live].copy()
        return finished

    def _take_turns(self, turns: list[list[int]], now_s: float) -> list[int]:
        """Apply the turns of a step's end to their requests, in order; return those that ended."""
        rows, requests = self._rows, self._requests
        keys = rows.keys[: self.live]
        finished = []
        for key, turn in turns:
            if turn == steps.FINISHED:
                finished.append(key)
                if key in self._prefills:
                    self._prefills.remove(key)
                else:
                    requests.finished(key)
                continue
            row = int(np.flatnonzero(keys == key)[0])
            if turn == steps.STAGED:
                requests.next_stage(key, rows.table[row], rows.private[row], now_s)
            else:
                requests.prolong(key, rows.table[row], rows.private[row])
        return finished

    def hold(self, blocks: int) -> int:
        """Keep up to ``blocks`` free ones from plans, for KV that is being sent away; return how
        many."""
        held = min(blocks, self.free_blocks)
        self._counters[steps.FREE_BLOCKS] -= held
        if self.cache is not None:
            self.cache.trim(self._rows)
        return held

    def release(self, blocks: int) -> None:
        """The opposite of :meth:`hold`."""
        self._counters[steps.FREE_BLOCKS] += blocks

    def fail(self) -> list[int]:
        """End it; return the keys of the requests that it had. It must not be used any more."""
        rows = self._rows
        for place, key in enumerate(rows.keys[: self.live].tolist()):
            if key not in self._prefills:
                self._requests.interrupted(key, rows.table[place], rows.private[place])
        return rows.clear()
