"""What a request is promised, how its tokens are judged (FairBatching §3.1), and what a kept
promise is worth (TDG, ProServe Eq. 3). Times are seconds on one monotonic clock of the caller's
choice."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from typing import Annotated, Final, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import force_setattr, replace
from numpy.typing import NDArray

from sluice.scheduling.request.deadline import ENVELOPE, FIRST, LAST, next_due_s, resumed_ttft_s
from sluice.scheduling.request.stages import (
    MAX_STAGES,
    Stage,
    StagePosition,
    check_stages,
    strictest,
)

WINDOW_TOKENS: Final = 10
"""SLOs-Serve §6: "we measure the TPOT every 10 tokens"."""


MIN_TPOT_TOKENS: Final = 8
"""Tokens from which a stream's TPOT is judged: with fewer, one slow step makes it look late."""


class TPOTAnchor(enum.StrEnum):
    """How TPOT is measured, where token ``i`` (1-based) left at ``t_i``.

    - ``MEAN``: ``(t_n - t_1) / (n - 1)``; ProServe.
    - ``RUNNING_MAX``: the largest ``(t_i - t_1) / (i - 1)``; FairBatching §5.1.
    - ``WINDOW``: the largest mean over 10 tokens, ``(t_(i+10) - t_i) / 10``; SLOs-Serve §6. Fewer
      than 11 tokens are one window.

    Tokens that leave at one time are a *group*: its first token sets the running maximum, and a
    window goes from the end of one group to that of the nearest at least 10 tokens later."""

    MEAN = "mean"
    RUNNING_MAX = "running_max"
    WINDOW = "window"


class TPOTMeter:
    """The TPOT of one stream by one anchor, as its tokens leave. ``O(1)`` amortised per group."""

    __slots__ = ("_ends", "_tpot_anchor", "_worst_s", "first_token_s", "last_token_s", "tokens")

    def __init__(self, anchor: TPOTAnchor) -> None:
        self._tpot_anchor = anchor
        self.tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._worst_s: float | None = None
        # Tokens until the end of a group, and its time; the last group may still grow.
        self._ends: deque[tuple[int, float]] = deque()

    def emit(self, tokens: int, now_s: float) -> None:
        """A ``now_s`` before the last time counts as the last time."""
        if tokens <= 0:
            return
        if self.first_token_s is None or self.last_token_s is None:
            self.first_token_s = self.last_token_s = now_s
        now_s = max(now_s, self.last_token_s)
        if self._tpot_anchor is TPOTAnchor.RUNNING_MAX and self.tokens:
            self._note((now_s - self.first_token_s) / self.tokens)
        self.tokens += tokens
        if self._tpot_anchor is TPOTAnchor.WINDOW:
            self._group(now_s)
        self.last_token_s = now_s

    @property
    def mean_tpot_s(self) -> float | None:
        """Mean time per token after the first; ``None`` with fewer than two tokens."""
        if self.tokens < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)

    @property
    def tpot_s(self) -> float | None:
        """TPOT by the anchor so far; ``None`` with fewer than two tokens."""
        if self.tokens < 2 or self._tpot_anchor is TPOTAnchor.MEAN:
            return self.mean_tpot_s
        found = [worst for worst in (self._worst_s, self._window_s()) if worst is not None]
        if found:
            return max(found)
        # No window yet, or all tokens were in the first group.
        return self.mean_tpot_s

    def _note(self, tpot_s: float) -> None:
        if self._worst_s is None or tpot_s > self._worst_s:
            self._worst_s = tpot_s

    def _group(self, now_s: float) -> None:
        """The stream has ``tokens`` tokens at ``now_s``."""
        ends = self._ends
        if ends and ends[-1][1] == now_s:
            ends.pop()
        else:
            window_s = self._window_s()
            if window_s is not None:
                self._note(window_s)
        ends.append((self.tokens, now_s))
        while len(ends) > 1 and ends[1][0] <= self.tokens - WINDOW_TOKENS:
            ends.popleft()

    def _window_s(self) -> float | None:
        """Mean of the window that ends with the last group, if there are 10 tokens before it."""
        if not self._ends:
            return None
        (begin, begin_s), (end, end_s) = self._ends[0], self._ends[-1]
        return (end_s - begin_s) / (end - begin) if end - begin >= WINDOW_TOKENS else None


def tpot_s(times_s: NDArray[np.float64], anchor: TPOTAnchor) -> float | None:
    """TPOT of a stream whose tokens left at ``times_s``, ascending; ``None`` for fewer than two."""
    meter = TPOTMeter(anchor)
    if anchor is TPOTAnchor.MEAN and len(times_s):
        meter.emit(1, float(times_s[0]))
        meter.emit(len(times_s) - 1, float(times_s[-1]))
        return meter.tpot_s
    for time_s in times_s.tolist():
        meter.emit(1, time_s)
    return meter.tpot_s


Objective = Literal["ttft", "tpot", "e2e"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("ttft", "tpot", "e2e")
"""The times that a request may state, in the order of :attr:`SLO.times_s`."""

Times = tuple[float | None, float | None, float | None]
"""TTFT, TPOT and end-to-end time, seconds; ``None`` where it is not stated."""

_MIN_S: Final = 1e-9

MIN_PRIORITY = 1
MAX_PRIORITY = 10


class Anchor(enum.StrEnum):
    """Where the deadlines of the tokens after the first one start from.

    - ``ENVELOPE``: ``arrival + TTFT + (i - 1) * TPOT``: an early first token buys slack; for TDG.
    - ``FIRST_TOKEN``: ``min(first token time, arrival + TTFT) + (i - 1) * TPOT``: for the running
      mean or maximum (ProServe's footnote 2).
    - ``LAST_TOKEN``: one TPOT after the token before: for the time between tokens and short
      windows."""

    ENVELOPE = "envelope"
    FIRST_TOKEN = "first_token"
    LAST_TOKEN = "last_token"

    @property
    def code(self) -> int:
        """Its number in compiled loops, see :mod:`sluice.scheduling.request.deadline`."""
        return _ANCHOR_CODES[self]


_ANCHOR_CODES = {Anchor.ENVELOPE: ENVELOPE, Anchor.FIRST_TOKEN: FIRST, Anchor.LAST_TOKEN: LAST}


class SLO(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The latency objective of one request, and its worth, from the edge to the engine. Seconds
    from arrival, TPOT per output token after the first; None: no objective. ``priority``: 1 to 10,
    the weight in the gain (ProServe's ``w_prio``). Raises ValueError for a value out of range."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    priority: int = 1
    service_class: Annotated[str, Meta(min_length=1, max_length=256)] = "standard"
    tpot_anchor: TPOTAnchor = TPOTAnchor.MEAN
    stages: Annotated[tuple[Stage, ...], Meta(max_length=MAX_STAGES)] = ()

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not (type(self.priority) is int and MIN_PRIORITY <= self.priority <= MAX_PRIORITY):
            raise ValueError(
                f"priority must be an integer from {MIN_PRIORITY} to {MAX_PRIORITY}, "
                f"got {self.priority!r}"
            )
        if self.stages:
            check_stages(self.stages)
        if type(self.tpot_anchor) is not TPOTAnchor:
            force_setattr(self, "tpot_anchor", _anchor_of(self.tpot_anchor))

    @cached_property
    def columns(self) -> tuple[float, float, float, float]:
        """TTFT, TPOT, end-to-end time and priority as numbers, infinite where not stated."""
        return (
            inf if self.ttft_s is None else self.ttft_s,
            inf if self.tpot_s is None else self.tpot_s,
            inf if self.e2e_s is None else self.e2e_s,
            float(self.priority),
        )

    @cached_property
    def times_s(self) -> Times:
        """TTFT, TPOT and end-to-end time as stated, seconds."""
        return self.ttft_s, self.tpot_s, self.e2e_s

    @cached_property
    def stated(self) -> bool:
        """Whether it states any objective: without one there is nothing to promise."""
        if min(self.columns[:3]) < inf:
            return True
        return any(time_s is not None for stage in self.stages for time_s in stage.times_s)

    @classmethod
    def of_stages(
        cls,
        stages: Sequence[Stage],
        e2e_s: float | None = None,
        priority: int = 1,
        service_class: str = "standard",
        tpot_anchor: TPOTAnchor = TPOTAnchor.MEAN,
    ) -> Self:
        """Of at least one stage; before it begins it counts as ``stages.strictest`` says; ``e2e_s``
        is of the whole. Raises ValueError as ``SLO``."""
        check_stages(stages)
        times_s = strictest(stages, e2e_s)
        return cls(*times_s, priority, service_class, tpot_anchor, tuple(stages))

    def late(
        self, ttft_s: float | None, tpot_s: float | None, tokens: int
    ) -> tuple[float | None, float | None]:
        """TTFT and TPOT of a running request, seconds, each None unless it is late by now."""
        ttft_due_s, tpot_due_s, _, _ = self.columns
        if tokens < MIN_TPOT_TOKENS:
            tpot_s = None
        return (
            ttft_s if ttft_s is not None and ttft_s > ttft_due_s else None,
            tpot_s if tpot_s is not None and tpot_s > tpot_due_s else None,
        )

    def with_times(self, times_s: Sequence[float | None]) -> SLO:
        """The same with other times, seconds; those of stages scale in proportion. A time not
        stated before is that of the first stage (TTFT) or of every stage (TPOT)."""
        if tuple(times_s) == self.times_s:
            return self
        ttft_s, tpot_s, e2e_s = times_s
        stages = self.stages
        if stages:
            pairs = zip(times_s, self.times_s, strict=True)
            shares = [new / old if new and old else 1.0 for new, old in pairs]
            stages = tuple([stage.scaled(shares) for stage in stages])
            if self.ttft_s is None and ttft_s is not None:
                stages = (stages[0]._replace(ttft_s=ttft_s), *stages[1:])
            if self.tpot_s is None and tpot_s is not None:
                stages = tuple([stage._replace(tpot_s=tpot_s) for stage in stages])
        return replace(self, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s, stages=stages)

    def of_stage(self, number: int) -> SLO:
        """The objective of one of its stages, from 0 on, whose times count from its start."""
        if not self.stages:
            return self
        ttft_s, tpot_s, e2e_s = self.stages[number].times_s
        return replace(self, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s, stages=())

    def at_stage(self, number: int, elapsed_s: float) -> SLO:
        """The stage's objective when it begins ``elapsed_s`` after arrival, within the end of the
        whole. One that continues decoding without a TTFT has one TPOT for its first token."""
        if not self.stages:
            return self
        stage = self.stages[number]
        ttft_s, tpot_s, e2e_s = stage.planned_s
        if self.e2e_s is not None:
            left_s = max(self.e2e_s - elapsed_s, _MIN_S)
            e2e_s = left_s if e2e_s is None else min(e2e_s, left_s)
        if number and ttft_s is None and not stage.prompt_tokens:
            ttft_s = tpot_s
        return replace(self, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s, stages=())

    def deadline_s(
        self,
        token: int,
        arrival_s: float,
        first_token_s: float | None = None,
        anchor: Anchor = Anchor.ENVELOPE,
        last_token_s: float | None = None,
    ) -> float:
        """Deadline of output token ``token`` (1-based), see :func:`next_due_s`."""
        ttft_s, tpot_s, e2e_s, _ = self.columns
        first_s = nan if first_token_s is None else first_token_s
        last_s = nan if last_token_s is None else last_token_s
        return next_due_s(token - 1, arrival_s, ttft_s, tpot_s, e2e_s, first_s, last_s, anchor.code)


def _anchor_of(value: str) -> TPOTAnchor:
    try:
        return TPOTAnchor(value)
    except ValueError:
        allowed = ", ".join(TPOTAnchor)
        raise ValueError(f"tpot_anchor must be one of {allowed}, got {value!r}") from None


@dataclass(frozen=True, slots=True)
class GainWeights:
    """ProServe's ``w_p`` and ``w_d``: in the paper, the data set's mean input and output length."""

    first: float = 1.0
    later: float = 1.0


@dataclass(slots=True)
class EarnedGain:
    """Gain of first and later tokens in time, and had all been in time (ProServe Eq. 3)."""

    first: float = 0.0
    later: float = 0.0
    first_ideal: float = 0.0
    later_ideal: float = 0.0


_EVEN_WEIGHTS: Final = GainWeights()


class TokenClock(TPOTMeter):
    """Follows one request's tokens against its objective. ``O(1)`` per token and in memory."""

    __slots__ = ("_anchor", "_weights", "arrival_s", "earned", "slo")

    def __init__(
        self,
        slo: SLO,
        arrival_s: float,
        weights: GainWeights | None = None,
        anchor: Anchor = Anchor.ENVELOPE,
        earned: EarnedGain | None = None,
    ) -> None:
        super().__init__(slo.tpot_anchor)
        self.slo = slo
        self.arrival_s = arrival_s
        self.earned = earned or EarnedGain()
        self._weights = weights or _EVEN_WEIGHTS
        self._anchor = _ANCHOR_CODES[anchor]

    def emit(self, tokens: int, now_s: float, reasoned: int = 0) -> None:
        """Count ``tokens`` (>= 0) that left at ``now_s``; the reasoning ended after ``reasoned`` of
        them, 0: it did not. Each has its position's deadline; with ``Anchor.LAST_TOKEN`` a group
        has one TPOT for each of its tokens."""
        last_s, before, slo, earned = self.last_token_s, self.tokens, self.slo, self.earned
        if last_s is not None and slo.tpot_s is not None:
            last_s += (tokens - 1) * slo.tpot_s
        super().emit(tokens, now_s)
        ttft_s, tpot_s, e2e_s, priority = slo.columns
        first_s = nan if self.first_token_s is None else self.first_token_s
        for emitted in range(before, self.tokens):
            due_s = next_due_s(
                *(emitted, self.arrival_s, ttft_s, tpot_s, e2e_s, first_s),
                *(nan if last_s is None else last_s, self._anchor),
            )
            last_s = now_s if last_s is None else last_s
            if emitted == 0:
                weight = self._weights.first * priority
                earned.first_ideal += weight
                earned.first += weight if now_s < due_s else 0.0
            else:
                weight = self._weights.later * priority
                earned.later_ideal += weight
                earned.later += weight if now_s < due_s else 0.0

    def rest(self, tokens: int, now_s: float) -> SLO:
        """The objective for another engine from ``now_s``, after ``tokens`` that the client has;
        from the same arrival."""
        ttft_s, tpot_s, _, _ = self.slo.columns
        if ttft_s == inf:
            return self.slo
        age_s = now_s - self.arrival_s
        return replace(self.slo, ttft_s=resumed_ttft_s(ttft_s, tpot_s, tokens, age_s))

    @property
    def gain(self) -> float:
        """Of all tokens so far."""
        return self.earned.first + self.earned.later

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, or ``None`` before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    def e2e_s(self, finished_s: float) -> float:
        """To ``finished_s``, or to a last token that an engine's clock puts later."""
        last_s = self.last_token_s
        return (finished_s if last_s is None else max(finished_s, last_s)) - self.arrival_s

    def judged_s(self, finished_s: float) -> Times:
        """TTFT, TPOT and end-to-end time, seconds, as they are held against the objective."""
        return self.ttft_s, self.tpot_s, self.e2e_s(finished_s)

    def attained(self, finished_s: float) -> bool:
        """Whether every stated objective was met; without any token, whether none is stated."""
        return not self.missed(finished_s)

    def missed(self, finished_s: float) -> tuple[str, ...]:
        """The stated objectives that were not met, of ``ttft``, ``tpot`` and ``e2e``."""
        (ttft_due_s, tpot_due_s, e2e_due_s, _), missed = self.slo.columns, []
        ttft_s = self.ttft_s
        none = ttft_s is None
        if ttft_due_s < inf and (ttft_s is None or ttft_s > ttft_due_s):
            missed.append("ttft")
        if tpot_due_s < inf and (none or (self.tpot_s or 0.0) > tpot_due_s):
            missed.append("tpot")
        if e2e_due_s < inf and (none or self.e2e_s(finished_s) > e2e_due_s):
            missed.append("e2e")
        return tuple(missed)


def clock_of(slo: SLO, arrival_s: float) -> TokenClock:
    """What follows a request with this objective."""
    return StageClock(slo, arrival_s) if slo.stages else TokenClock(slo, arrival_s)


class StageClock(TokenClock):
    """Follows a request with stages: TTFT, TPOT and end-to-end time are of the whole, misses and
    gain of its stages. A later stage that ends without a token is not judged."""

    __slots__ = ("_missed", "_open", "_position", "_worst")

    def __init__(self, slo: SLO, arrival_s: float) -> None:
        super().__init__(slo, arrival_s)
        self._position = StagePosition(slo.stages)
        self._open = TokenClock(slo.of_stage(0), arrival_s, earned=self.earned)
        # Of the stages that are over: what was missed, and by objective the largest part of its
        # time that a stage took.
        self._missed: set[str] = set()
        self._worst = [0.0] * len(OBJECTIVES)

    @property
    def stage(self) -> int:
        """Number of the stage that the next token is of."""
        return self._position.number

    def emit(self, tokens: int, now_s: float, reasoned: int = 0) -> None:
        """As ``TokenClock.emit``."""
        last_s = self.last_token_s
        TPOTMeter.emit(self, tokens, now_s)
        now_s = now_s if last_s is None else max(now_s, last_s)
        begun = self._position.number
        parts = self._position.emit(tokens, reasoned)
        for number, part in enumerate(parts, begun):
            if number > begun:
                self._next(number)
            self._open.emit(part, now_s)

    def rest(self, tokens: int, now_s: float) -> SLO:
        """As ``TokenClock.rest``, of the open stage and the later ones. Tokens not counted here
        were sent without a report. The first token is not due before a new request's would be."""
        position = copy(self._position)
        unreported = position.emit(max(0, tokens - self.tokens))
        age_s = now_s - self.arrival_s
        begun_s = age_s if len(unreported) > 1 else self._open.arrival_s - self.arrival_s
        stage, *later = self.slo.stages[position.number :]
        ttft_s, tpot_s = stage.paced()
        if position.number and ttft_s == inf:
            ttft_s = tpot_s
        ttft_s = begun_s + resumed_ttft_s(ttft_s, tpot_s, position.tokens, age_s - begun_s)
        if self.slo.ttft_s is not None:
            ttft_s = max(ttft_s, age_s + self.slo.ttft_s)
        e2e_s = None if stage.tokens or stage.e2e_s is None else begun_s + stage.e2e_s
        rest = [
            Stage(
                None if ttft_s == inf else ttft_s,
                None if tpot_s == inf else tpot_s,
                e2e_s,
                position.left or 0,
            )
        ]
        # Where the reasoning has ended, a stage that ends with it has one token.
        ended = int(position.reasoned)
        rest += [each._replace(tokens=each.tokens or ended) for each in later[:-1]] + later[-1:]
        slo = self.slo
        return SLO.of_stages(rest, slo.e2e_s, slo.priority, slo.service_class, slo.tpot_anchor)

    def missed(self, finished_s: float) -> tuple[str, ...]:
        """The objectives that were not met in some stage."""
        missed = self._missed | ({"e2e"} & set(super().missed(finished_s)))
        if self._open.tokens or self._position.number == 0:
            missed.update(self._open.missed(finished_s))
        return tuple([name for name in OBJECTIVES if name in missed])

    def judged_s(self, finished_s: float) -> Times:
        """Of each objective of the whole request, the share that the worst stage took."""
        worst = self._worst
        if self._open.tokens:
            worst = _worse(worst, self._open, finished_s)
        ttft_s, tpot_s, e2e_s = [
            None if whole_s is None else share * whole_s
            for share, whole_s in zip(worst, self.slo.times_s, strict=True)
        ]
        if e2e_s is not None:
            e2e_s = max(e2e_s, self.e2e_s(finished_s))
        return None if self.ttft_s is None else ttft_s, tpot_s or None, e2e_s

    def _next(self, number: int) -> None:
        ended = self._open
        assert ended.last_token_s is not None
        self._missed.update(ended.missed(ended.last_token_s))
        self._worst = _worse(self._worst, ended, ended.last_token_s)
        self._open = TokenClock(self.slo.of_stage(number), ended.last_token_s, earned=self.earned)


def _worse(worst: list[float], clock: TokenClock, finished_s: float) -> list[float]:
    """The larger of ``worst`` and of what a stage took, by objective."""
    seen = (clock.ttft_s or 0.0, clock.tpot_s or 0.0, clock.e2e_s(finished_s))
    dues = clock.slo.columns
    return [max(w, real_s / due_s) for w, real_s, due_s in zip(worst, seen, dues, strict=False)]
