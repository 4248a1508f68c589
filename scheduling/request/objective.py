"""What a request is guaranteed and what keeping the guarantee is worth.

Times are seconds on one monotonic clock of the caller's choice; nothing here reads a clock.

Sources: the per-token deadline is FairBatching §3.1 and ProServe Eq. 3; the second anchor is
ProServe's footnote 2; the token-level deadline gain (TDG) is ProServe Eq. 3.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Final, Literal, Self

from sluice.scheduling.request.deadline import ENVELOPE, FIRST, LAST, next_due_s, resumed_ttft_s
from sluice.scheduling.request.stages import Stage, check_stages, strictest
from sluice.scheduling.request.tpot import LEAST_PACE_TOKENS, TPOTAnchor, TPOTMeter

Objective = Literal["ttft", "tpot", "e2e"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("ttft", "tpot", "e2e")
"""The times that a request may state, in the order of :attr:`SLO.times_s`."""

Times = tuple[float | None, float | None, float | None]
"""TTFT, TPOT and end-to-end time, seconds; ``None`` where it is not stated."""

_LEAST_S: Final = 1e-9

MIN_PRIORITY = 1
MAX_PRIORITY = 10


class Anchor(enum.StrEnum):
    """Where the deadlines of the tokens after the first one start from.

    ``ENVELOPE``: ``arrival + TTFT + (i - 1) * TPOT``. It does not depend on progress, so an early
    first token buys slack for the later ones. Right for TDG.

    ``FIRST_TOKEN``: ``min(first token time, arrival + TTFT) + (i - 1) * TPOT``. An early first
    token starts the TPOT clock early. Right where TPOT is measured as the running mean or maximum
    since the first token.

    ``LAST_TOKEN``: one TPOT after the token before. Time won earlier is not slack. Right where the
    time between tokens, or TPOT over a short window of tokens, is the objective.
    """

    ENVELOPE = "envelope"
    FIRST_TOKEN = "first_token"
    LAST_TOKEN = "last_token"

    @property
    def code(self) -> int:
        """Its number in compiled loops, see :mod:`sluice.scheduling.request.deadline`."""
        return _ANCHOR_CODES[self]


_ANCHOR_CODES = {Anchor.ENVELOPE: ENVELOPE, Anchor.FIRST_TOKEN: FIRST, Anchor.LAST_TOKEN: LAST}


@dataclass(frozen=True, slots=True)
class SLO:
    """The latency objective of one request, and its worth.

    Args:
        ttft_s: time to first token, seconds from arrival; ``None`` means no objective.
        tpot_s: time per output token after the first, seconds; ``None`` means no objective.
        e2e_s: time to the last token, seconds from arrival; ``None`` means no objective.
        priority: weight of the request's tokens in the gain, an integer from 1 to 10: a token of
            priority 2 is worth two of priority 1 (ProServe's ``w_prio``).
        service_class: the name of the service class it is served as.
        tpot_anchor: how its TPOT is measured; a text is taken for its value.
        stages: objectives of its parts, in order, see :meth:`of_stages`; empty: it has one part.

    Attributes:
        columns: TTFT, TPOT, end-to-end and priority as numbers, infinite where not stated.

    Raises:
        ValueError: an objective that is not positive and finite, a priority out of range, an
            unknown anchor, or stages that are none.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    priority: int = 1
    service_class: str = "standard"
    tpot_anchor: TPOTAnchor = TPOTAnchor.MEAN
    stages: tuple[Stage, ...] = ()
    columns: tuple[float, float, float, float] = field(init=False, repr=False, compare=False)

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
            object.__setattr__(self, "tpot_anchor", _anchor_of(self.tpot_anchor))
        objectives = (self.ttft_s, self.tpot_s, self.e2e_s)
        ttft_s, tpot_s, e2e_s = (inf if value is None else value for value in objectives)
        object.__setattr__(self, "columns", (ttft_s, tpot_s, e2e_s, float(self.priority)))

    @classmethod
    def of_stages(
        cls,
        stages: Sequence[Stage],
        e2e_s: float | None = None,
        priority: int = 1,
        service_class: str = "standard",
        tpot_anchor: TPOTAnchor = TPOTAnchor.MEAN,
    ) -> Self:
        """The objective of a request of stages, at least one: its own times are what it counts with
        before it begins (:func:`~sluice.scheduling.request.stages.strictest`). ``e2e_s`` is stated
        for the whole request, if anything is.

        Raises:
            ValueError: see :class:`SLO`.
        """
        check_stages(stages)
        times_s = strictest(stages, e2e_s)
        return cls(*times_s, priority, service_class, tpot_anchor, tuple(stages))

    @property
    def stated(self) -> bool:
        """Whether it states any objective: without one there is nothing to guarantee."""
        if min(self.columns[:3]) < inf:
            return True
        return any(time_s is not None for stage in self.stages for time_s in stage.times_s)

    @property
    def times_s(self) -> Times:
        """TTFT, TPOT and end-to-end time as stated, seconds."""
        return self.ttft_s, self.tpot_s, self.e2e_s

    def late(
        self, ttft_s: float | None, tpot_s: float | None, tokens: int
    ) -> tuple[float | None, float | None]:
        """Of the TTFT and the TPOT of a running request, seconds, those that are late by now;
        ``None`` for the others. A TPOT is judged from ``LEAST_PACE_TOKENS`` tokens on."""
        ttft_due_s, tpot_due_s, _, _ = self.columns
        if tokens < LEAST_PACE_TOKENS:
            tpot_s = None
        return (
            ttft_s if ttft_s is not None and ttft_s > ttft_due_s else None,
            tpot_s if tpot_s is not None and tpot_s > tpot_due_s else None,
        )

    def with_times(self, times_s: Sequence[float | None]) -> SLO:
        """The same objective with other times, seconds; itself if they are equal. The times of its
        stages are scaled in proportion. A time that it did not state before is that of the first
        stage (TTFT) or of every stage (TPOT)."""
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
        # Each decision makes one, and `replace` takes twice as long.
        rest = self.priority, self.service_class, self.tpot_anchor, stages
        return SLO(ttft_s, tpot_s, e2e_s, *rest)

    def of_stage(self, number: int) -> SLO:
        """The objective of one of its stages, from 0 on, whose times count from its start; itself
        where it has none."""
        if not self.stages:
            return self
        ttft_s, tpot_s, e2e_s = self.stages[number].times_s
        return replace(self, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s, stages=())

    def at_stage(self, number: int, elapsed_s: float) -> SLO:
        """What an engine works by in one of its stages, from 0 on, that begins ``elapsed_s`` after
        the arrival: the stage's objective, and no later than the end of the whole; itself where it
        has no stages. The end of a stage of known length is a pace. A stage that continues decoding
        and states no TTFT has one TPOT for its first token, so that the pace does not break."""
        if not self.stages:
            return self
        stage = self.stages[number]
        ttft_s, tpot_s, e2e_s = stage.planned_s
        if self.e2e_s is not None:
            left_s = max(self.e2e_s - elapsed_s, _LEAST_S)
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
        """Deadline of output token ``token`` (1-based), on the clock of ``arrival_s``. See
        :func:`sluice.scheduling.request.deadline.next_due_s`.
        """
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
    """Weights of a first and of a later token in the TDG gain (ProServe's ``w_p`` and ``w_d``).

    The paper sets ``first : later`` to the data set's mean input : mean output length, so that a
    prompt's work counts in its first token.
    """

    first: float = 1.0
    later: float = 1.0


@dataclass(slots=True)
class EarnedGain:
    """Gain of the first and of the later tokens that have left (ProServe Eq. 3).

    Attributes:
        first, later: of those that were in time.
        first_ideal, later_ideal: had every one been in time.
    """

    first: float = 0.0
    later: float = 0.0
    first_ideal: float = 0.0
    later_ideal: float = 0.0


class TokenClock:
    """Follows one request's emissions against its objective: TTFT, TPOT, gain and attainment.

    ``O(1)`` per token and per request in memory. Feed it with :meth:`emit` as tokens leave.
    """

    __slots__ = (
        "_anchor",
        "_meter",
        "_weights",
        "arrival_s",
        "earned",
        "slo",
    )

    def __init__(
        self,
        slo: SLO,
        arrival_s: float,
        weights: GainWeights | None = None,
        anchor: Anchor = Anchor.ENVELOPE,
        earned: EarnedGain | None = None,
    ) -> None:
        self.slo = slo
        self.arrival_s = arrival_s
        self.earned = earned or EarnedGain()
        self._weights = weights or GainWeights()
        self._anchor = anchor
        self._meter = TPOTMeter(slo.tpot_anchor)

    def emit(self, tokens: int, now_s: float, reasoned: int = 0) -> None:
        """Count ``tokens`` (>= 0) that left at ``now_s``; after ``reasoned`` of them the reasoning
        ended, 0: it did not. Only a request of stages takes notice of that
        (:class:`~sluice.scheduling.request.stage_clock.StageClock`).

        Several tokens at once, as from speculation, each have the deadline of their position in the
        output; with :attr:`Anchor.LAST_TOKEN`, which has no positions, a group has one TPOT for
        each of its tokens.
        """
        last_s, before = self.last_token_s, self.tokens
        if last_s is not None and self.slo.tpot_s is not None:
            last_s += (tokens - 1) * self.slo.tpot_s
        self._meter.emit(tokens, now_s)
        for token in range(before + 1, self.tokens + 1):
            due_s = self.slo.deadline_s(
                token, self.arrival_s, self.first_token_s, self._anchor, last_s
            )
            self._earn(token == 1, now_s < due_s)
            last_s = now_s if last_s is None else last_s

    def _earn(self, first: bool, in_time: bool) -> None:
        earned, priority = self.earned, self.slo.priority
        if first:
            weight = self._weights.first * priority
            earned.first_ideal += weight
            earned.first += weight if in_time else 0.0
        else:
            weight = self._weights.later * priority
            earned.later_ideal += weight
            earned.later += weight if in_time else 0.0

    def rest(self, tokens: int, now_s: float) -> SLO:
        """The objective of what is left when another engine continues at ``now_s``, after
        ``tokens`` tokens that the client has: they are part of its prompt, and its times count from
        the same arrival. See :func:`sluice.scheduling.request.deadline.resumed_ttft_s`."""
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
    def ideal_gain(self) -> float:
        """The same had every token been in time."""
        return self.earned.first_ideal + self.earned.later_ideal

    @property
    def tokens(self) -> int:
        """How many have left."""
        return self._meter.tokens

    @property
    def first_token_s(self) -> float | None:
        """When the first one left, or ``None`` before."""
        return self._meter.first_s

    @property
    def last_token_s(self) -> float | None:
        """When the last one left, or ``None`` before the first."""
        return self._meter.last_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, or ``None`` before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def mean_tpot_s(self) -> float | None:
        """Mean time per token after the first, or ``None`` with fewer than two tokens."""
        return self._meter.mean_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token by the objective's :attr:`SLO.tpot_anchor`, or ``None`` with fewer than
        two tokens: what the TPOT objective is held against."""
        return self._meter.tpot_s

    def e2e_s(self, finished_s: float) -> float:
        """Arrival to end, where the request ended at ``finished_s``. The last token may have a
        later time than the end: token times that an engine reports are on the engine's clock."""
        last_s = self.last_token_s
        return (finished_s if last_s is None else max(finished_s, last_s)) - self.arrival_s

    def judged_s(self, finished_s: float) -> Times:
        """TTFT, TPOT and end-to-end time, seconds, as they are held against the objective; ``None``
        where there is none yet."""
        return self.ttft_s, self.tpot_s, self.e2e_s(finished_s)

    def attained(self, finished_s: float) -> bool:
        """Whether every stated objective was met: TTFT, TPOT by its anchor, and end to end.

        A request without any token attains only if it states no objective.
        """
        return not self.missed(finished_s)

    def missed(self, finished_s: float) -> tuple[str, ...]:
        """The stated objectives that were not met, of ``ttft``, ``tpot`` and ``e2e``: all of them
        where there was no token."""
        (ttft_due_s, tpot_due_s, e2e_due_s, _), none = self.slo.columns, self.tokens == 0
        found = (
            ("ttft", inf if self.ttft_s is None else self.ttft_s, ttft_due_s),
            ("tpot", inf if none else self.tpot_s or 0.0, tpot_due_s),
            ("e2e", inf if none else self.e2e_s(finished_s), e2e_due_s),
        )
        return tuple([name for name, real_s, due_s in found if real_s > due_s])
