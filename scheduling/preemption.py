"""Which prefill runs, and which one gives way, where a running prefill can be suspended: S-EDF
(FlowPrefill §5.2, Algorithms 1 and 2), decided when a prefill arrives or a task or chunk ends.

Our changes, for engines whose stack of suspended prefills is bounded:

- A prefill without a guarantee comes after every guaranteed one, preempts none, and is preempted
  by each.
- A guaranteed prefill that can no longer meet its objective preempts no other guaranteed one. By
  Eq. 3 an overloaded engine would only pile late ones up.
- Late prefills run together, up to a chunk: together they take less time, and none has slack to
  lose. So at most one such task of each tier is suspended.
- What would find the stack full runs in small chunks: it can be passed at the end of each.
- Short prefills with an objective as tight as the head's join it beyond Algorithm 1's sum ``G``, up
  to a chunk, while the head has slack: an arrival with that objective waits for these in any case.
- One without a deadline joins no batch of one that has a deadline, and one without a guarantee no
  batch of a guaranteed one. Equal deadlines do not preempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from sluice.scheduling.batching.base import EarnedTime
from sluice.scheduling.latency.model import UNBOUNDED_TOKENS, LatencyModel
from sluice.scheduling.request.kernels import Floats


class AgedShare:
    """Gives prefills older than ``patience_s`` the share ``share`` of the time, a chunk at a time,
    by arrival; S-EDF alone would starve late ones and those without a deadline.

    Let ``W`` be the work, seconds, of a prefill and of the aged prefills before it. It is computed
    at most ``patience_s + W / share`` after its arrival, plus one task for each of its chunks, plus
    the time for which there is no memory."""

    def __init__(self, patience_s: float, share: float) -> None:
        self._patience_s = patience_s
        self._earned = EarnedTime(share)

    def has_turn(self, arrival_s: float, chunk_s: float, now_s: float) -> bool:
        """Whether the prefill that arrived first has earned its next chunk. Call it between
        tasks."""
        owed = now_s - arrival_s > self._patience_s
        self._earned.earn(now_s, owed)
        if not owed or self._earned.seconds < chunk_s:
            return False
        # Time saved up must not be spent on many chunks in a row.
        self._earned.seconds = 0.0
        return True


MOST_FIXED_SHARE = 0.1
"""A task is not cut so short that more than this part of it is the fixed time of a step."""

USABLE = 0.9
"""Share of the time until its next token after which a decode is to have it, as steps vary."""

LEAST_GAP_SHARE = 0.25
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
    """When a step of all decodes has to begin, so that each has its next token within most of a
    TPOT after its last one, and keeps its TPOT since the first one; None without decodes.

    A late step is made up for by earlier ones, which leave prefills ``LEAST_GAP_SHARE`` of the
    step's time at least. FlowPrefill §6.5 runs both phases at once on one device; here they take
    turns.

    Args:
        first_token_s: nan for a decode that makes nothing up.
        gap_s: time from the last token to the step for a decode without a TPOT, or with one that is
            not longer than the step.
        stop_s: how long it takes until the running prefill has stopped for the step."""
    if not len(last_token_s):
        return None
    ahead_s = first_token_s + emitted * tpot_s - last_token_s
    usable_s = USABLE * np.fmin(ahead_s, tpot_s)
    gaps_s = np.maximum(usable_s - step_s - stop_s, LEAST_GAP_SHARE * step_s)
    gaps_s[~((tpot_s > step_s) & (tpot_s < inf))] = gap_s
    return float((last_token_s + gaps_s).min())


class DecodeTurns:
    """What an engine knows of the stops of its prefills, and of the TPOT of its decodes.

    The longer a prefill, the longer it takes to stop: the time is known as a share of the stopped
    tasks'. A task is so short that it stops within half of the time that a step leaves of the
    tightest TPOT. ``checks``: how many points a prefill has where it can stop; 0: none stops."""

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
        """The time to plan for the stop of a task of ``task_s`` predicted seconds: twice the
        mean."""
        share = self._took_s / self._tasks_s if self._tasks_s else self._first
        return 2.0 * share * task_s

    def most_tokens(
        self,
        tpot_s: Floats,
        step_s: float,
        model: LatencyModel,
        computed: int,
        least: int,
        now_s: float,
        gap_s: float = inf,
    ) -> int:
        """Most tokens of a task of prefills.

        Args:
            tpot_s: the TPOT of each guaranteed request that decodes, or will behind its prefill.
            step_s: predicted time of their step, or of the fixed time of one without any.
            computed: tokens of its prompt that are computed.
            least: fewest tokens of a task that can be stopped.
            gap_s: time between two steps of the decodes that may come; infinite where none decodes.
        """
        held = tpot_s[tpot_s > step_s]
        tightest_s = float(held.min()) if len(held) else inf
        if tightest_s <= self._tightest_s or now_s - self._seen_s > REMEMBERED_S:
            self._tightest_s, self._seen_s = tightest_s, now_s
        stop_s, tightest_s = self.stop_s(1.0), min(self._tightest_s, max(gap_s, 2.0 * step_s))
        if tightest_s == inf or stop_s == 0.0:
            return UNBOUNDED_TOKENS
        task_s = max(0.0, tightest_s - step_s) / 2.0 / stop_s
        work_s = max(task_s, model.fixed_s / MOST_FIXED_SHARE) - model.fixed_s
        return max(least, model.tokens_within(work_s, computed))


DEPTH = 4
"""Most suspended prefills."""
CHUNK_TOKENS = 8192
"""Most tokens of a prefill in a task."""
SMALL_CHUNK_TOKENS = 512
"""The same of a task that starts while the stack is full, so that it is not suspended itself, and
of one of an aged prefill."""
BATCH_TOKENS = 1024
"""Prefills share a task while their sum is below this: they are suspended together, so more is not
better. Late prefills, and shorter ones than this with one objective, share it up to a chunk."""
LEAST_TOKENS = 256
"""Tasks of fewer tokens are not suspended: they end soon anyway."""
DECODE_GAP_S = 0.05
"""A fallback, seconds: while prefills run, a decode without a TPOT, or with one that no step can
hold, has its next step after this time. Also the longest TPOT for which tasks are cut."""


class Prefill(NamedTuple):
    """A prefill that waits, or whose last chunk has ended: its ``tokens`` still to compute take
    ``alone_s`` running alone; ``ttft_s`` is its objective, up to ``due_s``. Infinite without one.
    """

    request_id: str
    due_s: float
    tokens: int
    alone_s: float
    best_effort: bool = False
    ttft_s: float = inf


class InFlight(NamedTuple):
    """The task on top of the stack, running or suspended last. ``due_s`` is the earliest deadline
    in it that it can still meet, or else its head's; ``left_s`` the predicted time until it ends.
    """

    due_s: float
    left_s: float
    best_effort: bool = False


class PreemptionConfig(BaseModel):
    """When a more urgent prefill preempts a running one, and where the running one stops."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    granularity: Literal["off", "layer", "operator"] = Field(
        default="off",
        description="Where a running prefill can stop: nowhere, before the next layer, or before "
        "the next operator. Unless `off`, `policy` has no effect: prefills run by S-EDF.",
    )
    depth: int = Field(
        default=DEPTH,
        ge=1,
        le=64,
        description="Max suspended prefills. Each keeps its activations in memory.",
    )
    chunk_tokens: int = Field(
        default=CHUNK_TOKENS,
        ge=SMALL_CHUNK_TOKENS,
        le=1_048_576,
        description="Max tokens of a prefill that run as one task; also limited by vLLM's "
        "`max-num-batched-tokens`, and where the engine decodes by the time that stops take.",
    )
    least_tokens: int = Field(
        default=LEAST_TOKENS,
        ge=1,
        le=1_048_576,
        description="Min tokens of a task that can be suspended: shorter ones end soon anyway.",
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Bounds, in tokens: most of one prefill in a task, also where the stack is full
    (``small_chunk``), the sum below which prefills run together, and most in a task."""

    chunk: int
    small_chunk: int
    together: int
    most: int


class Batch(NamedTuple):
    """The next task: request and tokens of each prefill, the head first, and the head's
    deadline."""

    members: tuple[tuple[str, int], ...]
    due_s: float
    best_effort: bool


class Rank(NamedTuple):
    """Eq. 3 as a key: the guaranteed ones, then the others; of each the feasible ones by deadline,
    then late ones, the latest deadline first."""

    best_effort: bool
    late: bool
    deadline: float


def rank(due_s: float, left_s: float, best_effort: bool, now_s: float) -> Rank:
    """The key of a prefill, or of a task. A deadline that would be met to the moment is
    feasible."""
    late = due_s - now_s - left_s < 0
    return Rank(best_effort, late, -due_s if late else due_s)


def decide(
    waiting: Iterable[Prefill],
    top: InFlight | None,
    now_s: float,
    together_s: Callable[[Sequence[Prefill]], float],
    options: Options,
    full: bool = False,
) -> Batch | None:
    """The task to start now, inside ``top`` if there is one; None to change nothing. ``O(n log
    n)``.

    Args:
        waiting: prefills that are not in flight, in order of arrival.
        together_s: predicted time of several prefills in one task.
        full: the new task could not be suspended, as enough others are."""
    ranked = sorted(
        waiting, key=lambda each: rank(each.due_s, each.alone_s, each.best_effort, now_s)
    )
    if not ranked:
        return None
    head = ranked[0]
    first = rank(head.due_s, head.alone_s, head.best_effort, now_s)
    if top is not None and not _preempts(first, rank(*top, now_s)):
        return None
    chunk = min(options.small_chunk if full else options.chunk, options.most)
    if head.tokens > chunk:
        return Batch(((head.request_id, chunk),), head.due_s, head.best_effort)
    if first.late:
        joined = _late_together(ranked, chunk)
    else:
        joined = _joined(ranked, now_s, together_s, min(options.together, options.most), chunk)
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
