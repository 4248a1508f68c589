"""Follows a request of several stages: each is judged by a clock of its own."""

from __future__ import annotations

from sluice.scheduling.request.objective import OBJECTIVES, SLO, Times, TokenClock


def clock_of(slo: SLO, arrival_s: float) -> TokenClock:
    """What follows a request with this objective."""
    return StageClock(slo, arrival_s) if slo.stages else TokenClock(slo, arrival_s)


class StageClock(TokenClock):
    """Follows a request whose objective has stages.

    TTFT, TPOT and end-to-end time are those of the whole request. What is missed and gained is that
    of its stages; its end-to-end time is missed as a whole, too. A stage that has no token when the
    request ends is not judged, but for the first one. ``O(1)`` per token and in memory: one stage
    is open at a time.

    Attributes:
        stage: number of the stage that the next token is of.
    """

    __slots__ = ("_missed", "_open", "_reasoned", "_worst", "stage")

    def __init__(self, slo: SLO, arrival_s: float) -> None:
        super().__init__(slo, arrival_s)
        self.stage = 0
        self._open = TokenClock(slo.of_stage(0), arrival_s, earned=self.earned)
        self._reasoned = False
        # Of the stages that are over: what was missed, and by objective the largest part of its
        # time that a stage took.
        self._missed: set[str] = set()
        self._worst = [0.0] * len(OBJECTIVES)

    def emit(self, tokens: int, now_s: float, reasoned: int = 0) -> None:
        """Count ``tokens`` (>= 0) that were emitted at ``now_s``. ``reasoned``: how many of them
        there were when the reasoning ended; 0 if it did not end."""
        if 0 < reasoned <= tokens:
            self._count(reasoned, now_s)
            self._reasoned = True
            if self._left == 0:
                self._next()
            tokens -= reasoned
        self._count(tokens, now_s)

    def _count(self, tokens: int, now_s: float) -> None:
        self._meter.emit(tokens, now_s)
        now_s = max(now_s, self.arrival_s if self.last_token_s is None else self.last_token_s)
        while tokens > 0:
            left = self._left
            part = tokens if left is None else min(tokens, left)
            self._open.emit(part, now_s)
            tokens -= part
            if part == left:
                self._next()

    def missed(self, finished_s: float) -> tuple[str, ...]:
        """The objectives that were not met in some stage."""
        missed = self._missed | ({"e2e"} & set(super().missed(finished_s)))
        if self._open.tokens or self.stage == 0:
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

    @property
    def _left(self) -> int | None:
        """Tokens until the open stage ends; ``None``: it is not known."""
        stages = self.slo.stages
        if self.stage == len(stages) - 1:
            return None
        tokens = stages[self.stage].tokens
        if tokens:
            return tokens - self._open.tokens
        return max(0, 1 - self._open.tokens) if self._reasoned else None

    def _next(self) -> None:
        ended = self._open
        assert ended.last_token_s is not None
        self._missed.update(ended.missed(ended.last_token_s))
        self._worst = _worse(self._worst, ended, ended.last_token_s)
        self.stage += 1
        stage = self.slo.of_stage(self.stage)
        self._open = TokenClock(stage, ended.last_token_s, earned=self.earned)


def _worse(worst: list[float], clock: TokenClock, finished_s: float) -> list[float]:
    """The larger of ``worst`` and of what a stage took, by objective."""
    seen = (clock.ttft_s or 0.0, clock.tpot_s or 0.0, clock.e2e_s(finished_s))
    dues = clock.slo.columns
    return [max(w, real_s / due_s) for w, real_s, due_s in zip(worst, seen, dues, strict=False)]
