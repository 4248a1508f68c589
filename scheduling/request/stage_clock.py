"""Follows a request of several stages: each is judged by a clock of its own."""

from __future__ import annotations

from copy import copy
from math import inf

from sluice.scheduling.request.deadline import resumed_ttft_s
from sluice.scheduling.request.objective import OBJECTIVES, SLO, Times, TokenClock
from sluice.scheduling.request.stages import Stage, StagePosition


def clock_of(slo: SLO, arrival_s: float) -> TokenClock:
    """What follows a request with this objective."""
    return StageClock(slo, arrival_s) if slo.stages else TokenClock(slo, arrival_s)


class StageClock(TokenClock):
    """Follows a request whose objective has stages.

    TTFT, TPOT and end-to-end time are those of the whole request. What is missed and gained is that
    of its stages; its end-to-end time is missed as a whole, too. A stage that has no token when the
    request ends is not judged, but for the first one. ``O(1)`` per token and in memory: one stage
    is open at a time.
    """

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
        """Count ``tokens`` (>= 0) that were emitted at ``now_s``. ``reasoned``: how many of them
        there were when the reasoning ended; 0 if it did not end."""
        last_s = self.last_token_s
        self._meter.emit(tokens, now_s)
        now_s = now_s if last_s is None else max(now_s, last_s)
        begun = self._position.number
        parts = self._position.emit(tokens, reasoned)
        for number, part in enumerate(parts, begun):
            if number > begun:
                self._next(number)
            self._open.emit(part, now_s)

    def rest(self, tokens: int, now_s: float) -> SLO:
        """As :meth:`TokenClock.rest`: its stages are what is left of the open one, and the later
        ones. Tokens that are not counted here were sent without a report. The first token of an
        engine that continues is not due before that of a new request would be: it computes the
        prompt again."""
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
        """Of each objective that the whole request states, the share of it that the worst stage
        took of its own, seconds."""
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
