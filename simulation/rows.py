"""Continuous batching, chunked prefill and paged KV over the live requests of one simulated engine,
for the simulator and for replicas.

A request has the policies' table and ``int64[capacity, PRIVATE]`` that no policy may see."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.batching import BatchPlan
from sluice.scheduling.request.kernels import (
    BEST_EFFORT,
    COMPUTED,
    DRAFTED,
    EMITTED,
    EXPECTED,
    FIELDS,
    FIRST_TOKEN,
    FIXED,
    KV_BLOCKS,
    LAST_TOKEN,
    PENDING,
    PROMPT,
    RUNNING,
    Floats,
    Ints,
    compiled,
    work_s,
)
from sluice.scheduling.request.queue import QueueView

# The private fields of a request.
TARGET = 0  # output tokens of the stage that it is in
OFFSET = 1  # where the stage's emission times begin
STAGES_LEFT = 2  # after this one
ADMISSION = 3  # number of its last admission
SHARED = 4  # of its blocks, how many belong to the prefix cache
SOLE = 5  # and how many of these no other request uses; known in a step that may preempt
PRIVATE = 6

# The engine's counters.
LIVE = 0
FREE_BLOCKS = 1  # blocks that the prefix cache could give up included
SEQUENCES = 2  # running
ADMISSIONS = 3
PREEMPTIONS = 4
LOST_TOKENS = 5  # computed tokens that preemptions threw away
DONE_TOKENS = 6  # computed tokens in all
DROPPED = 7  # planned entries of the last step that the engine could not run
VICTIMS = 8  # requests preempted in the last step
CHANGES = 9  # requests whose state changed at the end of the last step, see below
EVICTIONS = 10  # best-effort requests that plans preempted
EVICTED_TOKENS = 11  # computed tokens that these lost
COUNTERS = 12

# A step, ``int64[capacity, STEP]``: its entries, the requests that it preempts, and those to which
# its end is more than that of a step. Each kind is in the first rows of its columns.
RAN = 0  # row of an entry
NEW = 1  # its tokens
ACCEPTED = 2  # its drafted tokens that are right
VICTIM = 3  # row of a preempted request
CHANGED = 4  # key of a request
CHANGE = 5  # what its end was, see below
STEP = 6

# The times of a step: by the truth, and by the belief in its parts.
TRUE_S = 0
BELIEVED_FIXED_S = 1
BELIEVED_WORK_S = 2
TIMES = 3

# Changes of a request at the end of a step.
FINISHED = 1  # it has all its output
STAGED = 2  # it continues with another stage
OUTGROWN = 3  # it continues beyond its expected length


@compiled
def preempt(table: Floats, private: Ints, counters: Ints, row: int) -> None:
    """Send a running request back to waiting without KV; what it emitted is kept."""
    own = int(table[row, KV_BLOCKS]) - private[row, SHARED] + private[row, SOLE]
    counters[FREE_BLOCKS] += own
    counters[SEQUENCES] -= 1
    counters[PREEMPTIONS] += 1
    counters[LOST_TOKENS] += int(table[row, COMPUTED])
    table[row, COMPUTED] = 0.0
    table[row, PENDING] = table[row, PROMPT] + table[row, EMITTED]
    table[row, KV_BLOCKS] = 0.0
    table[row, RUNNING] = 0.0
    table[row, DRAFTED] = 0.0


@compiled
def victim(table: Floats, private: Ints, live: int, planned: Ints) -> int:
    """The running request outside the plan that was admitted last, or -1."""
    best, latest = -1, -1
    for row in range(live):
        if table[row, RUNNING] > 0.0 and planned[row] == 0 and private[row, ADMISSION] > latest:
            best, latest = row, private[row, ADMISSION]
    return best


@compiled
def begin_step(
    table: Floats,
    private: Ints,
    counters: Ints,
    step: Ints,
    plan: tuple[Ints, Ints, Ints, Ints],
    block_tokens: int,
    max_sequences: int,
) -> int:
    """Start a step that carries out ``plan`` (rows, tokens, ``evicted``, ``kept``); how many
    entries run.

    Running requests that lack blocks take them from those outside the plan, the last admitted first
    and ``kept`` never, then from those behind them in the plan. Waiting requests are admitted only
    without a preemption. ``O(live + planned)``, and ``O(live)`` more per preemption."""
    rows, tokens, evicted, kept = plan
    live = counters[LIVE]
    planned = np.zeros(live, np.int64)
    for place in range(len(rows)):
        planned[rows[place]] = tokens[place]
    for row in kept:
        planned[row] = -1
    for place in range(len(evicted)):
        if table[evicted[place], BEST_EFFORT] > 0.0:
            counters[EVICTIONS] += 1
            counters[EVICTED_TOKENS] += int(table[evicted[place], COMPUTED])
        preempt(table, private, counters, evicted[place])
        step[place, VICTIM] = evicted[place]
    preempted, count = 0, 0
    for admitting in range(2):
        for place in range(len(rows)):
            row, new = rows[place], planned[rows[place]]
            running = table[row, RUNNING] > 0.0
            if running == (admitting == 1) or new <= 0:
                continue
            if not running and (preempted > 0 or counters[SEQUENCES] >= max_sequences):
                continue
            held, computed = int(table[row, KV_BLOCKS]), int(table[row, COMPUTED])
            need = -(-(computed + new) // block_tokens) - held
            behind = len(rows) - 1
            while running and need > counters[FREE_BLOCKS]:
                loser = victim(table, private, live, planned)
                while loser < 0 and behind > place:
                    other = rows[behind]
                    if table[other, RUNNING] > 0.0:
                        loser = other
                    behind -= 1
                if loser < 0:
                    break
                preempt(table, private, counters, loser)
                planned[loser] = 0
                step[len(evicted) + preempted, VICTIM] = loser
                preempted += 1
            if need > counters[FREE_BLOCKS]:
                continue
            if need > 0:
                counters[FREE_BLOCKS] -= need
                table[row, KV_BLOCKS] = held + need
            if not running:
                table[row, RUNNING] = 1.0
                counters[SEQUENCES] += 1
                private[row, ADMISSION] = counters[ADMISSIONS]
                counters[ADMISSIONS] += 1
            step[count, RAN] = row
            step[count, NEW] = new
            count += 1
    counters[VICTIMS] = len(evicted) + preempted
    counters[DROPPED] = len(rows) - count
    return count


@compiled
def times_s(
    table: Floats,
    step: Ints,
    truth: Floats,
    belief: Floats,
    fixed_factor: float,
    work_factor: float,
    seconds: Floats,
) -> None:
    """Write the times of a step that has begun: ``float64[TIMES]``. ``O(ran * pieces)``."""
    fixed_s, work_s = parts_s(table, step, truth, 1.0, 1.0)
    seconds[TRUE_S] = fixed_s + work_s
    seconds[BELIEVED_FIXED_S], seconds[BELIEVED_WORK_S] = parts_s(
        table, step, belief, fixed_factor, work_factor
    )


@compiled
def parts_s(
    table: Floats, step: Ints, pieces: Floats, fixed_factor: float, work_factor: float
) -> tuple[float, float]:
    """Fixed part and work of a step, by its costliest piece, without the factors."""
    fixed_s = all_s = most = 0.0
    for piece in range(pieces.shape[0]):
        total = 0.0
        for place in range(step.shape[0]):
            total += work_s(
                pieces[piece], float(step[place, NEW]), table[step[place, RAN], COMPUTED]
            )
        cost_s = fixed_factor * pieces[piece, FIXED] + work_factor * total
        if most < cost_s:
            most, fixed_s, all_s = cost_s, pieces[piece, FIXED], total
    return fixed_s, all_s


@compiled
def complete_step(
    table: Floats,
    private: Ints,
    keys: Ints,
    counters: Ints,
    step: Ints,
    ending: tuple[int, int, float],
    emitted_s: Floats,
) -> None:
    """End a step, and write to ``step`` the keys that finished, continue with a stage or have
    outgrown their expected length, with the kind of change.

    ``ending``: entries, tokens to draft for each decode, time. An empty ``emitted_s``: no times are
    written. A row with target 0 was dropped while the step ran."""
    count, drafts, now_s = ending
    ended = False
    counters[CHANGES] = 0
    for place in range(count):
        row, new = step[place, RAN], step[place, NEW]
        emitted = int(table[row, EMITTED])
        target = private[row, TARGET]
        if target == 0:
            continue
        leave = 1
        if table[row, DRAFTED] > 0.0:
            leave += min(step[place, ACCEPTED], target - emitted - 1)
            new = leave
        counters[DONE_TOKENS] += new
        table[row, COMPUTED] += new
        table[row, PENDING] -= new
        if table[row, PENDING] > 0.0:
            continue
        if emitted_s.shape[0] > 0:
            first = private[row, OFFSET] + emitted
            for token in range(first, first + leave):
                emitted_s[token] = now_s
        if emitted == 0:
            table[row, FIRST_TOKEN] = now_s
        table[row, LAST_TOKEN] = now_s
        table[row, EMITTED] = emitted + leave
        table[row, PENDING] = 1.0
        table[row, DRAFTED] = drafts
        change = 0
        if emitted + leave == target and private[row, STAGES_LEFT] > 0:
            change = STAGED
        elif emitted + leave == target:
            change = FINISHED
            counters[FREE_BLOCKS] += int(table[row, KV_BLOCKS]) - private[row, SHARED]
            counters[SEQUENCES] -= 1
            private[row, TARGET] = 0
            ended = True
        elif table[row, EMITTED] >= table[row, EXPECTED]:
            change = OUTGROWN
        if change > 0:
            step[counters[CHANGES], CHANGED] = keys[row]
            step[counters[CHANGES], CHANGE] = change
            counters[CHANGES] += 1
    if ended:
        remove_ended(table, private, keys, counters)


@compiled
def remove_ended(table: Floats, private: Ints, keys: Ints, counters: Ints) -> None:
    """Close the gaps of the rows whose target is 0; the others keep their order. ``O(live)``."""
    kept = 0
    for row in range(counters[LIVE]):
        if private[row, TARGET] == 0:
            continue
        if kept < row:
            for field in range(FIELDS):
                table[kept, field] = table[row, field]
            for field in range(PRIVATE):
                private[kept, field] = private[row, field]
            keys[kept] = keys[row]
        kept += 1
    counters[LIVE] = kept


_CAPACITY = 256

_NOWHERE: Floats = np.empty(0)

Array = TypeVar("Array", bound=NDArray[Any])


class Rows:
    """Arrays whose first ``live`` rows are in use, in order of arrival: ``table`` for policies,
    ``private``, ``keys``, and ``step``, the one under way, with ``ran_count`` entries.

    As in stock vLLM, a running request that lacks blocks preempts others by recompute. One step at
    a time: :meth:`begin`, then :meth:`complete`."""

    def __init__(self, kv_blocks: int, block_tokens: int, max_sequences: int) -> None:
        self.table: Floats = np.zeros((_CAPACITY, FIELDS))
        self.private: Ints = np.zeros((_CAPACITY, PRIVATE), np.int64)
        self.keys: Ints = np.zeros(_CAPACITY, np.int64)
        self.counters: Ints = np.zeros(COUNTERS, np.int64)
        self.counters[FREE_BLOCKS] = kv_blocks
        self.step: Ints = np.zeros((_CAPACITY, STEP), np.int64)
        self.ran_count = 0
        self._block_tokens = block_tokens
        self._max_sequences = max_sequences
        self._dropped = False

    @property
    def live(self) -> int:
        """Rows in use."""
        return int(self.counters[LIVE])

    @property
    def sequences(self) -> int:
        """Running requests: those that hold a slot and KV."""
        return int(self.counters[SEQUENCES])

    @property
    def free_blocks(self) -> int:
        """KV blocks that a plan may use."""
        return int(self.counters[FREE_BLOCKS])

    @property
    def ran(self) -> Ints:
        """Rows and tokens of the entries of the step under way, ``int64[ran_count, 2]``."""
        return self.step[: self.ran_count, RAN : NEW + 1]

    @property
    def victims(self) -> Ints:
        """The rows that it preempted."""
        return self.step[: self.counters[VICTIMS], VICTIM]

    def append(self, key: int, row: Floats, private: Ints) -> int:
        """Add a request, also while a step runs; return its row. Amortised ``O(1)``."""
        live = self.live
        if live == len(self.keys):
            self._grow()
        self.table[live] = row
        self.private[live] = private
        self.keys[live] = key
        self.counters[LIVE] = live + 1
        return live

    def begin(self, plan: BatchPlan) -> int:
        """Carry a plan of the live rows out; return how many of its entries run."""
        self.ran_count = begin_step(
            self.table,
            self.private,
            self.counters,
            self.step,
            (plan.rows, plan.tokens, plan.evicted, plan.kept),
            self._block_tokens,
            self._max_sequences,
        )
        return self.ran_count

    def complete(self, now_s: float, drafts: int = 0, emitted_s: Floats = _NOWHERE) -> Ints:
        """End the step; keys that finished, began a stage or outgrew their length, with which."""
        complete_step(
            self.table,
            self.private,
            self.keys,
            self.counters,
            self.step,
            (self.ran_count, drafts, now_s),
            emitted_s,
        )
        self.ran_count = 0
        if self._dropped:
            self._remove_ended()
        return self.step[: self.counters[CHANGES], CHANGED : CHANGE + 1]

    def drop(self, key: int) -> None:
        """Take a live request out and free its blocks, also while a step runs. ``O(live)``."""
        row = int(np.flatnonzero(self.keys[: self.live] == key)[0])
        self.counters[FREE_BLOCKS] += int(self.table[row, KV_BLOCKS]) - self.private[row, SHARED]
        self.counters[SEQUENCES] -= int(self.table[row, RUNNING])
        self.table[row, KV_BLOCKS] = self.table[row, RUNNING] = 0.0
        self.private[row, TARGET] = 0
        self._dropped = True
        if not self.ran_count:
            self._remove_ended()

    def clear(self) -> list[int]:
        """Take all requests out; return their keys."""
        keys: list[int] = self.keys[: self.live].tolist()
        self.counters[LIVE] = 0
        return keys

    def _remove_ended(self) -> None:
        remove_ended(self.table, self.private, self.keys, self.counters)
        self._dropped = False

    def _grow(self) -> None:
        self.table = _doubled(self.table)
        self.private = _doubled(self.private)
        self.keys = _doubled(self.keys)
        self.step = _doubled(self.step)


def compile_now() -> None:
    """Run toy steps, so that no later one waits for the compiler."""
    rows = Rows(4, 16, 2)
    private = np.zeros(PRIVATE, np.int64)
    private[TARGET] = 2
    for key in range(2):
        place = rows.append(key, np.zeros(FIELDS), private)
        rows.table[place, PENDING] = 4.0
    both, all_of_it = np.arange(2), np.full(2, 4)
    rows.begin(BatchPlan(QueueView(()), both, all_of_it, 0.0))
    rows.complete(1.0)
    rows.drop(0)


def _doubled(array: Array) -> Array:
    return cast(Array, np.concatenate((array, np.zeros_like(array))))
