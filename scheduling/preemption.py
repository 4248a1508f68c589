"""Which prefill runs and which is suspended: S-EDF (FlowPrefill §5.2, Algorithms 1 and 2), decided
when a prefill arrives or a task or chunk ends. Our changes, for engines with a bounded stack:

- A prefill without a promise comes after every promised one, preempts none, and is preempted by
  each.
- A promised prefill that can no longer meet its objective preempts no other promised one, and equal
  deadlines do not preempt.
- Late prefills run together, up to a chunk: none has slack to lose.
- What would find the stack full runs in small chunks and can be passed at the end of each.
- Short prefills with an objective as tight as the head's join it beyond Algorithm 1's sum ``G``,
  while the head has slack: an arrival with that objective waits for these in any case.
- One without a deadline joins no batch of one that has a deadline; so with promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.batching.base import EarnedTime
from sluice.scheduling.latency.model import UNBOUNDED_TOKENS, LatencyModel
from sluice.scheduling.request.kernels import Floats


class AgedShare:
    """Gives prefills older than ``patience_s`` the share ``share`` of the time, a chunk at a time,
    by arrival. With ``W`` seconds of work in it and the aged ones before it, a prefill is computed
    at most ``patience_s + W / share`` after its arrival, plus a task per chunk and times without
    memory."""

    def __init__(self, patience_s: float, share: float) -> None:
        self._patience_s = patience_s
        self._earned = EarnedTime(share)

    def has_turn(self, arrival_s: float, chunk_s: float, now_s: float) -> bool:
        """Whether the first prefill has earned its next chunk. Call it between tasks."""
        owed = now_s - arrival_s > self._patience_s
        self._earned.earn(now_s, owed)
        if not owed or self._earned.seconds < chunk_s:
            return False
        # Time saved up must not be spent on many chunks in a row.
        self._earned.seconds = 0.0
        return True


MAX_FIXED_SHARE = 0.1
"""A task is not cut so short that more than this part of it is the fixed time of a step."""

USABLE = 0.9
"""Share of the time until its next token after which a decode is to have it, as steps vary."""

MIN_GAP_SHARE = 0.25
"""Prefills have at least this share of a step's time between two steps."""

REMEMBERED_S = 60.0
"""How long the tightest TPOT of decodes bounds the tasks of prefills after it was seen, seconds."""


def decode_step_due_s(
    first_token_s: Floats,
    emitted: Floats,
    last_token_s: Floats,
    tpot_s: Floats,
    step_s: float,
    gap_s: float,
    stop_s: float = 0.0,
) -> float | None:
    """When a step of all decodes has to begin so that each keeps its TPOT; None without decodes.
    Earlier steps make up for a late one but leave prefills ``MIN_GAP_SHARE`` of the step's time.
    FlowPrefill §6.5 runs both phases at once; here they take turns.

    ``first_token_s`` is nan for a decode that makes nothing up; ``gap_s`` stands for a TPOT that is
    missing or not longer than the step; ``stop_s``: time until the running prefill has stopped."""
    if not len(last_token_s):
        return None
    ahead_s = first_token_s + emitted * tpot_s - last_token_s
    usable_s = USABLE * np.fmin(ahead_s, tpot_s)
    gaps_s = np.maximum(usable_s - step_s - stop_s, MIN_GAP_SHARE * step_s)
    gaps_s[~((tpot_s > step_s) & (tpot_s < inf))] = gap_s
    return float((last_token_s + gaps_s).min())


class DecodeTurns:
    """How long prefills take to stop, as a share of the stopped tasks, so that a task stops within
    half of the time that a step leaves of the tightest TPOT. ``checks``: points per prefill where
    it can stop; 0: none stops."""

    def __init__(self, checks: int) -> None:
        self._first = 1.0 / checks if checks else 0.0
        self._took_s = self._tasks_s = 0.0
        self._tightest_s = inf
        self._seen_s = -inf

    def stopped(self, took_s: float, task_s: float) -> None:
        """A task of ``task_s`` predicted seconds stopped ``took_s`` after the signal."""
        if not self._tasks_s:
            self._took_s, self._tasks_s = self._first * task_s, task_s
        self._took_s += min(took_s, task_s)
        self._tasks_s += task_s

    def stop_s(self, task_s: float) -> float:
        """Seconds to plan for the stop of a task of ``task_s``: twice the mean."""
        share = self._took_s / self._tasks_s if self._tasks_s else self._first
        return 2.0 * share * task_s

    def max_tokens(
        self,
        tpot_s: Floats,
        step_s: float,
        model: LatencyModel,
        computed: int,
        least: int,
        now_s: float,
        gap_s: float = inf,
    ) -> int:
        """Most tokens of a task of prefills. ``tpot_s``: of each promised request that decodes, now
        or behind its prefill; ``step_s``: predicted time of their step; ``least``: fewest tokens of
        a task that can be stopped; ``gap_s``: between two steps of decodes, infinite where none
        decodes."""
        held = tpot_s[tpot_s > step_s]
        tightest_s = float(held.min()) if len(held) else inf
        if tightest_s <= self._tightest_s or now_s - self._seen_s > REMEMBERED_S:
            self._tightest_s, self._seen_s = tightest_s, now_s
        stop_s, tightest_s = self.stop_s(1.0), min(self._tightest_s, max(gap_s, 2.0 * step_s))
        if tightest_s == inf or stop_s == 0.0:
            return UNBOUNDED_TOKENS
        task_s = max(0.0, tightest_s - step_s) / 2.0 / stop_s
        work_s = max(task_s, model.fixed_s / MAX_FIXED_SHARE) - model.fixed_s
        return max(least, model.tokens_within(work_s, computed))


DECODE_GAP_S = 0.05
"""Seconds to the next step of a decode without a TPOT that a step can hold, while prefills run.
Also the longest TPOT for which tasks are cut."""


@dataclass(frozen=True, slots=True)
class TaskBounds:
    """Bounds on tasks of prefills; ``depth``: most suspended ones, each with its activations."""

    depth: int = 4
    chunk_tokens: int = 8192
    """Most tokens of a task."""
    small_chunk_tokens: int = 512
    """The same for a task that starts while the stack is full, and for one of an aged prefill."""
    batch_tokens: int = 1024
    """Prefills share a task below this sum, as they are suspended together. Late ones, and shorter
    ones with one objective, share it up to a chunk."""
    min_tokens: int = 256
    """Tasks of fewer tokens are not suspended: they end soon anyway."""


class Prefill(NamedTuple):
    """A prefill that waits, or whose last chunk has ended; ``alone_s``: time of its remaining
    ``tokens`` alone. ``ttft_s`` and ``due_s`` are infinite without an objective."""

    request_id: str
    due_s: float
    tokens: int
    alone_s: float
    best_effort: bool = False
    ttft_s: float = inf


class InFlight(NamedTuple):
    """The task on top of the stack. ``due_s``: the earliest deadline that it can meet, else its
    head's; ``left_s``: predicted time until it ends."""

    due_s: float
    left_s: float
    best_effort: bool = False


class Batch(NamedTuple):
    """The next task: request and tokens of each prefill, head first, and the head's deadline."""

    members: tuple[tuple[str, int], ...]
    due_s: float
    best_effort: bool


class Rank(NamedTuple):
    """Eq. 3 as a key: promised ones first; of each, feasible ones by deadline, then the latest
    deadline."""

    best_effort: bool
    late: bool
    deadline: float


def rank(due_s: float, left_s: float, best_effort: bool, now_s: float) -> Rank:
    """Of a prefill or a task. A deadline met to the moment is feasible."""
    late = due_s - now_s - left_s < 0
    return Rank(best_effort, late, -due_s if late else due_s)


def decide(
    waiting: Iterable[Prefill],
    top: InFlight | None,
    now_s: float,
    together_s: Callable[[Sequence[Prefill]], float],
    bounds: TaskBounds,
    max_tokens: int = UNBOUNDED_TOKENS,
    full: bool = False,
) -> Batch | None:
    """The task to start now, inside ``top`` if there is one; None to change nothing.
    ``together_s``: predicted time of several prefills in one task; ``max_tokens``: of a task;
    ``full``: it could not be suspended. ``O(n log n)``."""
    ranked = sorted(
        waiting, key=lambda each: rank(each.due_s, each.alone_s, each.best_effort, now_s)
    )
    if not ranked:
        return None
    head = ranked[0]
    first = rank(head.due_s, head.alone_s, head.best_effort, now_s)
    if top is not None and not _preempts(first, rank(*top, now_s)):
        return None
    chunk = min(bounds.small_chunk_tokens if full else bounds.chunk_tokens, max_tokens)
    if head.tokens > chunk:
        return Batch(((head.request_id, chunk),), head.due_s, head.best_effort)
    if first.late:
        joined = _late_together(ranked, chunk)
    else:
        joined = _joined(ranked, now_s, together_s, min(bounds.batch_tokens, max_tokens), chunk)
    members = tuple([(each.request_id, each.tokens) for each in joined])
    return Batch(members, head.due_s, head.best_effort)


def _preempts(first: Rank, top: Rank) -> bool:
    """Whether the first of the waiting prefills runs before what is in flight."""
    if top.best_effort != first.best_effort:
        return top.best_effort
    return not first.late and first < top


def _late_together(ranked: Sequence[Prefill], chunk: int) -> list[Prefill]:
    """The late head, and others of its tier, which are all late, up to ``chunk`` tokens."""
    head = ranked[0]
    joined = [head]
    tokens = head.tokens
    for each in ranked[1:]:
        if each.best_effort == head.best_effort and tokens + each.tokens <= chunk:
            joined.append(each)
            tokens += each.tokens
    return joined


def _joined(
    ranked: Sequence[Prefill],
    now_s: float,
    together_s: Callable[[Sequence[Prefill]], float],
    together: int,
    chunk: int,
) -> list[Prefill]:
    """Algorithm 1: the head, and those that fit beside it; one that does not is passed over."""
    head = ranked[0]
    joined = [head]
    tokens = head.tokens
    left_s = head.due_s - now_s
    most = chunk + 1  # a sum that takes more than the head's slack, with all above it
    for each in ranked[1:]:
        total = tokens + each.tokens
        if total >= (most if _alike(head, each, now_s, together) else min(together, most)):
            continue
        if each.best_effort > head.best_effort or (each.due_s == inf and head.due_s < inf):
            continue
        if together_s([*joined, each]) < left_s:
            joined.append(each)
            tokens = total
        else:
            most = total
    return joined


def _alike(head: Prefill, each: Prefill, now_s: float, together: int) -> bool:
    """Whether both are short, and ``each`` can be on time and is as urgent as the head."""
    return (
        max(head.tokens, each.tokens) < together
        and each.ttft_s <= head.ttft_s
        and each.due_s - now_s >= each.alone_s
    )
