"""What the local scheduler knows of a live request: its objective, its stages and its output."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Later, StagePosition, later_of


class RunningStages:
    """The stages of a live request.

    Attributes:
        slo: of the whole request. arrival_s: its arrival, monotonic seconds.
        ends: the tokens that end the reasoning.
    """

    __slots__ = ("_position", "_tokens", "arrival_s", "ends", "slo")

    def __init__(self, slo: SLO, arrival_s: float, ends: frozenset[int]) -> None:
        self.slo = slo
        self.arrival_s = arrival_s
        self.ends = ends
        self._position = StagePosition(slo.stages)
        self._tokens = 0

    def emit(self, tokens: int, reasoned: int) -> bool:
        """Count tokens, see :meth:`StagePosition.emit`; whether another stage begins after them or
        one of them. ``O(1)``."""
        self._tokens += tokens
        return len(self._position.emit(tokens, reasoned)) > 1

    @property
    def tokens(self) -> int:
        """Tokens of the current stage that have left."""
        return self._position.tokens

    @property
    def begun(self) -> int:
        """Tokens of the output before the current stage."""
        return self._tokens - self._position.tokens

    @property
    def later(self) -> Later:
        """What the stages to come will take."""
        return later_of(self.slo.stages, self._position.number)

    def slo_at(self, now_s: float) -> SLO:
        """The objective of the current stage, if it begins now."""
        return self.slo.at_stage(self._position.number, now_s - self.arrival_s)


@dataclass(slots=True)
class TrackedRequest:
    """The local scheduler's record of a live request, beyond what its engine knows.

    ``name`` is the request's id in the fleet; engines have their own ids, and one API call can be
    several engine requests. ``slot`` is its row of the state table, negative if it has none.
    ``expected_tokens`` is the predicted length of its output, nan if unknown, and ``most_tokens``
    its max. ``tenant`` is the hash of its tenant, ``weight`` the weight of the tenant's share;
    ``promised``: its SLO was guaranteed.

    To a policy each of its ``stages`` is a request of its own, whose prompt includes the output
    before it: ``begun`` tokens. ``slo`` and ``arrival_s`` are those of the current stage, which
    begins with the last token of the one before; ``expected_tokens`` is of the whole output.
    """

    name: str
    slo: SLO
    arrival_s: float
    slot: int
    most_tokens: int
    expected_tokens: float
    best_effort: bool = False
    tenant: int = 0
    weight: float = 1.0
    promised: bool = False
    stages: RunningStages | None = None
    begun: int = 0
