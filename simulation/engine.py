"""One simulated engine in virtual time. Truth and belief differ on purpose: the truth has noise,
the belief is another model with a head-room, corrected online, as in production.

The prefix cache is vLLM's block pool at the size of the workload's hashed blocks: idle blocks count
as free and are evicted by time of release, a request's last ones first, and after them those of
sessions by worth. Three simplifications, each of which finds less: outputs are not cached; a block
can be shared from the step after the one that computes it; the last block of a prompt cached whole
keeps its place for eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple
from zlib import crc32

import numpy as np

from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy, make_policy
from sluice.scheduling.fleet.transfer import prompt_ttft_s
from sluice.scheduling.kept_kv import KeptBlocks
from sluice.scheduling.latency.model import LatencyModel, StepCorrection, caution
from sluice.scheduling.latency.speculation import AcceptanceRates
from sluice.scheduling.request.kernels import (
    ACCEPTANCE,
    COMPUTED,
    DRAFTED,
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
from sluice.simulation.config import EngineConfig, Speculation
from sluice.simulation.requests import Requests
from sluice.simulation.rows import (
    ACCEPTED,
    BELIEVED_FIXED_S,
    BELIEVED_WORK_S,
    DROPPED,
    FINISHED,
    FREE_BLOCKS,
    NEW,
    OFFSET,
    SHARED,
    SOLE,
    STAGED,
    STAGES_LEFT,
    TARGET,
    TIMES,
    TRUE_S,
    Rows,
    times_s,
)
from sluice.simulation.workload import Arrival

_DRAWS = 4096


class Launches(NamedTuple):
    """Seconds of the loop to launch a batch: of decodes alone, with prefills, and of more than
    ``graph_tokens`` tokens, which no CUDA graph has."""

    decodes_s: float
    prefills_s: float
    eager_s: float
    graph_tokens: int = 512

    def launch_s(self, tokens: float, prefill_tokens: float) -> float:
        """For a batch of ``tokens``, of which ``prefill_tokens`` are of prefills."""
        if not prefill_tokens:
            return self.decodes_s
        return self.eager_s if tokens > self.graph_tokens else self.prefills_s


class Truth:
    """Step times with log-normal noise of mean 1. ``launches``: of a loop that plans each step
    while the one before runs; ``None``: one at a time, planned in no time. Raises ValueError for an
    impossible noise."""

    def __init__(
        self, model: LatencyModel, noise: float = 0.03, launches: Launches | None = None
    ) -> None:
        if not 0 <= noise < inf:
            raise ValueError(f"noise must be finite and >= 0, got {noise}")
        self.model = model
        self.noise = noise
        self.launches = launches


class Noise:
    """The factors of one engine's steps, in order: a pure function of the generator's seed."""

    def __init__(self, sigma: float, rng: np.random.Generator) -> None:
        self._sigma = sigma
        self._rng = rng
        self._factors: list[float] = []

    def next(self) -> float:
        """The factor of the next step."""
        if not self._sigma:
            return 1.0
        if not self._factors:
            # Many at once: a draw of one costs as much as a hundred.
            normal = self._rng.standard_normal(_DRAWS)
            factors = np.exp(self._sigma * normal - self._sigma**2 / 2)
            self._factors = factors[::-1].tolist()
        return self._factors.pop()


@dataclass(frozen=True, slots=True)
class Belief:
    """The planners' model, head-room included; ``online``: real times correct it."""

    model: LatencyModel
    online: bool = True


class Planner:
    """One engine's belief as it learns, as a replica's local scheduler does it."""

    def __init__(self, belief: Belief) -> None:
        self.latency = belief.model
        """The model to plan with now."""
        self.pieces: Floats = belief.model.corrected(1.0).with_headroom(1.0).pieces
        """Its pieces without correction and head-room."""
        self._correction = StepCorrection() if belief.online else None

    @property
    def reported(self) -> LatencyModel:
        """The model used for promises: without head-room, as production reports it."""
        model = self.latency.with_headroom(1.0)
        if self._correction is None:
            return model
        careful = caution(self._correction.spread)
        return model.corrected(model.correction * careful, model.fixed_correction * careful)

    def observe(self, fixed_s: float, work_s: float, real_s: float) -> None:
        """Learn from one step; its predicted parts come from :attr:`pieces`."""
        if self._correction is None:
            return
        learned = self._correction
        learned.observe(fixed_s, work_s, real_s)
        self.latency = self.latency.corrected(learned.work, learned.fixed, learned.spread)


class Drafts:
    """Drafted tokens are right by chance, by class; the probability is learned as a replica does
    it."""

    def __init__(self, config: Speculation, requests: Requests, rng: np.random.Generator) -> None:
        self.config = config
        self.checked = 0
        self.accepted = 0
        self._rng = rng
        self._rates = AcceptanceRates()
        classes = [arrival.slo.service_class for arrival in requests.arrivals]
        self._names, self._class_of = np.unique(
            np.array(classes, dtype=np.str_), return_inverse=True
        )

    def show(self, table: Floats, keys: Ints) -> None:
        """Write the learned acceptance of the live requests into their rows."""
        rates = np.array([self._rates.rate(str(name)) for name in self._names])
        table[:, ACCEPTANCE] = rates[self._class_of[keys]]

    def check(self, table: Floats, keys: Ints, ran: Ints, accepted: Ints) -> float:
        """Write how many drafts of each of the rows in ``ran`` are right; return the drafting's
        seconds."""
        rows = ran[:, 0]
        offered = table[rows, DRAFTED] > 0
        checked = np.where(offered, ran[:, 1] - 1, 0)
        classes = self._class_of[keys[rows]]
        right = np.minimum(self._rng.geometric(1.0 - self.config.alpha, len(rows)) - 1, checked)
        accepted[:] = right
        self.checked += int(checked.sum())
        self.accepted += int(right.sum())
        for place in np.flatnonzero(offered).tolist():
            name = str(self._names[classes[place]])
            self._rates.observe(name, int(checked[place]), int(right[place]))
        return self.config.draft_s * float(checked.max(initial=0))


_REFRESHED = 32
"""Waiting requests at the head of the queue whose hits are kept fresh, as in the replica."""


class PrefixCache:
    """The cache of one engine, which writes into its rows: what it holds of a waiting request
    counts as computed there. Raises ValueError unless hashes cover whole KV blocks."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        hashed_tokens: int,
        block_tokens: int,
        keep_sessions: bool = True,
    ) -> None:
        if hashed_tokens % block_tokens:
            raise ValueError(
                f"the workload hashes blocks of {hashed_tokens} tokens, which must be a multiple "
                f"of the engine's block_tokens ({block_tokens})"
            )
        self.hit_tokens = 0
        """Tokens that admitted requests did not have to compute."""
        self._arrivals = arrivals
        self._tokens = hashed_tokens
        self._block_tokens = block_tokens
        self._blocks = hashed_tokens // block_tokens
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept = KeptBlocks()
        self._keep_sessions = keep_sessions
        self.now_s = 0.0
        self._held: dict[int, list[int]] = {}
        # Number of blocks of a running request's prefix that have been looked up, held or not.
        self._seen: dict[int, int] = {}
        # Requests that came with the KV of their prompts and have not lost it.
        self._brought: set[int] = set()
        self._changed = False

    def enter(self, rows: Rows, row: int, brought: bool = False) -> None:
        """Write what is cached of a new request into its row, unless it has ``brought`` its KV."""
        key = int(rows.keys[row])
        if brought:
            self._brought.add(key)
        else:
            self._show(rows, row, self._hits(key))

    def refresh(self, rows: Rows) -> None:
        """Before a plan: write what is cached now into the first waiting rows."""
        if not self._changed:
            return
        self._changed = False
        waiting = np.flatnonzero(rows.table[: rows.live, RUNNING] == 0.0)
        for row in waiting[:_REFRESHED].tolist():
            key = int(rows.keys[row])
            if key not in self._brought:
                self._show(rows, row, self._hits(key))

    def admit(self, rows: Rows, planned: Ints, tokens: Ints, evicts: bool = False) -> list[int]:
        """Before a step: hold its waiting requests' cached prefixes, return their rows; ``evicts``:
        it first takes blocks."""
        admitted = []
        need = 0
        for row, new in zip(planned.tolist(), tokens.tolist(), strict=True):
            table = rows.table[row]
            if table[RUNNING] > 0.0:
                upto = int(table[COMPUTED]) + new
                need += -(-upto // self._block_tokens) - int(table[KV_BLOCKS])
                continue
            key = int(rows.keys[row])
            if not self._prefix(key) or key in self._brought:
                continue
            shown = int(table[COMPUTED]) // self._tokens
            self._hold(rows, row, key, min(shown, self._hits(key)))
            admitted.append(row)
        if evicts or need > rows.counters[FREE_BLOCKS]:
            self._count_sole(rows)
        return admitted

    def settle(self, rows: Rows, admitted: Sequence[int]) -> None:
        """After a step began: release blocks of requests that were not admitted, or were preempted;
        evict what it took."""
        for row in admitted:
            key = int(rows.keys[row])
            if rows.table[row, RUNNING] > 0.0:
                self.hit_tokens += self._tokens * len(self._held[key])
                turn = self._arrivals[key].turn
                if turn is not None:
                    self._kept.begin(turn.session, 0, self.now_s)
            else:
                self._release(rows, key)
                rows.private[row, SHARED] = 0
                self._show(rows, row, self._hits(key))
        for row in rows.victims.tolist():
            # The step has counted the blocks that were the victim's alone.
            rows.counters[FREE_BLOCKS] -= rows.private[row, SOLE]
            self._release(rows, int(rows.keys[row]))
            rows.private[row, SHARED] = rows.private[row, SOLE] = 0
        self.trim(rows)

    def trim(self, rows: Rows) -> None:
        """Evict what others have taken."""
        over = -(-(self.idle_blocks - int(rows.counters[FREE_BLOCKS])) // self._blocks)
        if over <= 0:
            return
        self._changed = True
        for _ in range(min(over, len(self._idle))):
            self._idle.popitem(last=False)
            over -= 1
        self._kept.take(over, self.now_s)

    def fill(self, rows: Rows, ran: Ints) -> None:
        """Before a step ends: its rows' prefixes are computed as far as the step goes."""
        for row, new in ran.tolist():
            key = int(rows.keys[row])
            prefix = self._prefix(key)
            seen = self._seen.get(key, 0)
            if seen >= len(prefix):
                continue
            upto = min(len(prefix), int(rows.table[row, COMPUTED] + new) // self._tokens)
            for block in prefix[seen:upto]:
                # Another request was first: this copy stays private.
                if block not in self._users and not self._is_idle(block):
                    self._users[block] = 1
                    self._held.setdefault(key, []).append(block)
                    rows.private[row, SHARED] += self._blocks
                    self._changed = True
            self._seen[key] = max(seen, upto)

    def leave(self, rows: Rows, keys: Sequence[int]) -> None:
        """Requests have ended; the step has freed the blocks that were never cached."""
        for key in keys:
            arrival = self._arrivals[key]
            turn = arrival.turn
            if turn is not None and turn.session and self._keep_sessions:
                self._kept.end(turn.session, arrival.tenant, self._held.get(key, ()), self.now_s)
                self._kept.called(turn.session, crc32(turn.tool.encode()))
            self._release(rows, key)
        self._idle.update(dict.fromkeys(self._kept.release(self.now_s)))

    def price(self, latency: LatencyModel) -> None:
        """What computing a block takes, by which sessions' blocks are kept."""
        self._kept.price(latency, self._tokens)

    def cached(self, key: int) -> int:
        """Tokens of a prompt that it has."""
        return self._hits(key) * self._tokens

    @property
    def held(self) -> frozenset[int]:
        """The hashes that it has, in use or not."""
        return frozenset(self._users) | self._idle.keys() | frozenset(self._kept)

    @property
    def idle_blocks(self) -> int:
        """KV blocks of prefixes that no request uses."""
        return (len(self._idle) + len(self._kept)) * self._blocks

    def _is_idle(self, block: int) -> bool:
        return block in self._idle or block in self._kept

    def _prefix(self, key: int) -> tuple[int, ...]:
        """The hashes of the whole blocks of a prompt."""
        arrival = self._arrivals[key]
        return arrival.block_hashes[: arrival.prompt_tokens // self._tokens]

    def _hits(self, key: int) -> int:
        """Cached blocks at a prompt's beginning; one token must be left to compute."""
        prefix = self._prefix(key)
        most = (self._arrivals[key].prompt_tokens - 1) // self._tokens
        hits = 0
        while hits < min(most, len(prefix)) and (
            prefix[hits] in self._users or self._is_idle(prefix[hits])
        ):
            hits += 1
        return hits

    def _show(self, rows: Rows, row: int, hits: int) -> None:
        table = rows.table[row]
        prefix = self._prefix(int(rows.keys[row]))
        table[COMPUTED] = hits * self._tokens
        table[PENDING] = table[PROMPT] + table[EMITTED] - table[COMPUTED]
        used = sum(block in self._users for block in prefix[:hits])
        table[KV_BLOCKS] = used * self._blocks

    def _hold(self, rows: Rows, row: int, key: int, hits: int) -> None:
        held = list(self._prefix(key)[:hits])
        for block in held:
            if block not in self._users:
                if not (self._kept.used and self._kept.find(block)):
                    del self._idle[block]
                rows.counters[FREE_BLOCKS] -= self._blocks
            self._users[block] = self._users.get(block, 0) + 1
        self._held[key] = held
        self._seen[key] = hits
        table = rows.table[row]
        table[COMPUTED] = hits * self._tokens
        table[PENDING] = table[PROMPT] + table[EMITTED] - table[COMPUTED]
        table[KV_BLOCKS] = rows.private[row, SHARED] = hits * self._blocks

    def _count_sole(self, rows: Rows) -> None:
        """Before a step that may preempt: which blocks would come free with their request."""
        for row in np.flatnonzero(rows.private[: rows.live, SHARED]).tolist():
            held = self._held.get(int(rows.keys[row]), [])
            sole = sum(self._users[block] == 1 for block in held)
            rows.private[row, SOLE] = sole * self._blocks

    def _release(self, rows: Rows, key: int) -> None:
        self._seen.pop(key, None)
        self._brought.discard(key)
        for block in reversed(self._held.pop(key, [])):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                if not self._kept.keep(block):
                    self._idle[block] = None
                rows.counters[FREE_BLOCKS] += self._blocks
            self._changed = True


class StuckError(RuntimeError):
    """An engine has live requests and could run none of them."""


class VirtualEngine:
    """Runs a batch policy, one step at a time, on the caller's clock; between ``begin`` and
    ``complete`` requests may be submitted. A plan that cannot run is replaced by first come, first
    served, and counted in ``fallbacks``. Unlike in vLLM, a preempted request computes again all
    that has no hashes. Raises ValueError if hashed blocks do not fit the KV blocks."""

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
        self._launches = truth.launches
        # Requests that came since the last step began, when the next one was planned.
        self._unplanned: set[int] = set()
        self._requests = requests
        self._noise = Noise(truth.noise, rng)
        self._rng = rng
        # Requests of which only the context is computed here.
        self._prefills: set[int] = set()
        self._fallback = make_policy("fcfs")
        self._rows = Rows(config.kv_blocks, config.block_tokens, config.max_sequences)
        self.counters = self._rows.counters
        self._shown_keys: Ints = self._rows.keys[:0]
        self._seconds: Floats = np.zeros(TIMES)
        self._begun_s = 0.0
        self.drafts: Drafts | None = None
        if config.speculation is not None:
            self.drafts = Drafts(config.speculation, requests, rng)
        if config.prefix_cache and requests.hashed:
            tokens = requests.workload.block_tokens
            self.cache = PrefixCache(
                requests.arrivals, tokens, config.block_tokens, config.keep_sessions
            )
            self.cache.price(belief.model)

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
    def hit_tokens(self) -> int:
        """Tokens that the prefix cache had, since the start."""
        return self.cache.hit_tokens if self.cache is not None else 0

    @property
    def queue(self) -> QueueView:
        """Its live requests, as a policy sees them; valid until the next change."""
        return self._queue_of(self.live)

    def _queue_of(self, count: int) -> QueueView:
        """The first ``count`` of them."""
        table = self._rows.table[:count]
        return QueueView.of_table(self._shown_keys[:count], table, self._requests.slos)

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
        """Queue a request whose context is computed here for another engine, due ``kv_transfer_s``
        early; its token is not sent. ``False``: the context is longer than the KV."""
        requests = self._requests
        if requests.context_tokens(key) >= self.config.kv_tokens:
            return False
        row, private = requests.rows[key].copy(), requests.private[key].copy()
        private[TARGET] = row[EXPECTED] = 1
        row[TTFT] = prompt_ttft_s(row[TTFT], kv_transfer_s)
        private[STAGES_LEFT] = 0
        private[OFFSET] = len(requests.emitted_s)
        self._prefills.add(key)
        self._enter(key, row, private)
        return True

    def take_over(self, key: int, tokens: float = inf) -> bool:
        """Queue a request with the KV of its first ``tokens``; the last of all is computed again.
        ``False``: cannot run."""
        requests = self._requests
        if requests.whole_tokens(key) > self.config.kv_tokens:
            return False
        row, context = requests.rows[key].copy(), requests.context_tokens(key)
        row[COMPUTED] = min(tokens, context - 1)
        row[PENDING] = context - row[COMPUTED]
        self._enter(key, row, requests.private[key], brought=True)
        return True

    def decoding(self) -> list[tuple[int, int]]:
        """The requests that decode here, and the tokens that each has emitted in all."""
        rows, offsets = self._rows, self._requests.offsets[self._requests.first_stage]
        table, keys = rows.table[: self.live], rows.keys[: self.live]
        running = (table[:, RUNNING] > 0) & (table[:, EMITTED] > 0) & (table[:, PENDING] == 1)
        return [
            (key, int(table[place, EMITTED] + rows.private[place, OFFSET] - offsets[key]))
            for place, key in zip(np.flatnonzero(running), keys[running].tolist(), strict=True)
            if key not in self._prefills
        ]

    def context_tokens(self, key: int) -> int:
        """Prompt and output so far of a live request."""
        row = self._rows.table[self._place_of(key)]
        return int(row[PROMPT] + row[EMITTED])

    def withdraw(self, key: int) -> bool:
        """Take a live request out, between two steps. ``False``: it is not here any more."""
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
        if self._launches is not None:
            self._unplanned.add(key)
        place = self._rows.append(key, row, private)
        self._shown_keys = self._rows.keys[: place + 1].copy()
        if self.cache is not None:
            self.cache.enter(self._rows, place, brought)

    def begin(self, now_s: float) -> float:
        """Start a step; return its real seconds. Needs a live request. Raises StuckError if none
        can run."""
        if self.cache is not None:
            self.cache.now_s = now_s
            self.cache.refresh(self._rows)
        known = self._known()
        if not self._start(self._plan(self._policy, now_s, known)):
            if not self._start(self._plan(self._fallback, now_s, self.live)):
                raise StuckError(
                    f"{self.live} requests are live at {now_s:.3f} s, {self.free_blocks} KV blocks "
                    f"are free, and policy {self._policy.name} and the fallback run none of them"
                )
            self.fallbacks += 1
        real_s = float(self._seconds[TRUE_S]) * self._noise.next() * self.slowness
        self._begun_s = now_s
        self.steps += 1
        self.busy_s += real_s
        return real_s

    def _known(self) -> int:
        """How many of the live requests the next plan sees: those that came before it was made, or
        all where these have ended, as it was not made then."""
        known, keys = self.live, self._rows.keys
        while known and int(keys[known - 1]) in self._unplanned:
            known -= 1
        self._unplanned.clear()
        return known or self.live

    def _plan(self, policy: BatchPolicy, now_s: float, known: int) -> BatchPlan:
        """The plan of the first ``known`` requests."""
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
        return policy.plan(self._queue_of(known), now_s, self.planner.latency, budget)

    def _start(self, plan: BatchPlan) -> int:
        """Carry a plan out; return how many of its entries run."""
        rows = self._rows
        admitted: list[int] = []
        if self.cache is not None:
            admitted = self.cache.admit(rows, plan.rows, plan.tokens, len(plan.evicted) > 0)
        count = rows.begin(plan)
        times_s(
            rows.table,
            rows.step[:count],
            self._truth_pieces,
            self.planner.pieces,
            self.planner.latency.fixed_correction,
            self.planner.latency.correction,
            self._seconds,
        )
        if self._launches is not None:
            new = rows.step[:count, NEW]
            launch_s = self._launches.launch_s(new.sum(), new[new > 1].sum())
            self._seconds[TRUE_S] = max(self._seconds[TRUE_S], launch_s)
        if self.cache is not None:
            self.cache.settle(rows, admitted)
        self.dropped += int(rows.counters[DROPPED])
        if self.drafts is not None:
            accepted = rows.step[:count, ACCEPTED]
            drafting_s = self.drafts.check(rows.table, rows.keys, rows.ran, accepted)
            self._seconds[TRUE_S] += drafting_s
            self._seconds[BELIEVED_WORK_S] += drafting_s
        return count

    def complete(self, now_s: float) -> list[int]:
        """End the step; return the keys of the requests that have all their output."""
        rows = self._rows
        fixed_s = float(self._seconds[BELIEVED_FIXED_S])
        work_s = float(self._seconds[BELIEVED_WORK_S])
        self.planner.observe(fixed_s, work_s, now_s - self._begun_s)
        if self.cache is not None:
            self.cache.now_s = now_s
            self.cache.fill(rows, rows.ran)
        drafts = self.drafts.config.length if self.drafts is not None else 0
        changes = rows.complete(now_s, drafts, self._requests.times)
        if not len(changes):
            return []
        finished = self._apply_endings(changes.tolist(), now_s)
        if finished:
            if self.cache is not None:
                self.cache.leave(rows, finished)
            self._shown_keys = rows.keys[: rows.live].copy()
        return finished

    def _apply_endings(self, changes: list[list[int]], now_s: float) -> list[int]:
        """Apply what a step's end changed of requests, in order; return those that ended."""
        rows, requests = self._rows, self._requests
        keys = rows.keys[: self.live]
        finished = []
        for key, change in changes:
            if change == FINISHED:
                finished.append(key)
                if key in self._prefills:
                    self._prefills.remove(key)
                else:
                    requests.finished(key)
                continue
            row = int(np.flatnonzero(keys == key)[0])
            if change == STAGED:
                requests.next_stage(key, rows.table[row], rows.private[row], now_s)
            else:
                requests.prolong(key, rows.table[row], rows.private[row])
        return finished

    def hold(self, blocks: int) -> int:
        """Keep up to ``blocks`` free ones for KV that is being sent away; return how many."""
        held = min(blocks, self.free_blocks)
        self.counters[FREE_BLOCKS] -= held
        if self.cache is not None:
            self.cache.trim(self._rows)
        return held

    def release(self, blocks: int) -> None:
        """The opposite of :meth:`hold`."""
        self.counters[FREE_BLOCKS] += blocks

    def fail(self) -> list[int]:
        """End it; return the keys of the requests that it had. It must not be used any more."""
        rows = self._rows
        for place, key in enumerate(rows.keys[: self.live].tolist()):
            if key not in self._prefills:
                self._requests.interrupted(key, rows.table[place], rows.private[place])
        return rows.clear()
