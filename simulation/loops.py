"""Deadlines of tool loops in a simulated cluster: what routers and the controller do with them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan

from sluice.scheduling.placement.loops import (
    LoopEnding,
    LoopPart,
    LoopPromises,
    LoopTurn,
    LoopTurnEnd,
)
from sluice.simulation.config import LoopDeadline
from sluice.simulation.requests import Requests

MIN_PART_S = 1e-6
"""Objective of a turn that arrives after its loop's deadline, seconds."""


class VirtualLoops:
    """The loops of the classes with a deadline; a sub-agent's turns are its parent's.
    ``level``: share of the promised ones to be kept."""

    def __init__(
        self, requests: Requests, deadlines: Mapping[str, LoopDeadline], level: float | None
    ) -> None:
        self._requests = requests
        self._deadlines = deadlines
        self._promises = LoopPromises(level)
        # By request, its part, and when that was made.
        self._parts: dict[int, tuple[LoopPart, float]] = {}

    def begin(self, key: int, now_s: float) -> None:
        """A request has arrived: if it is a turn of a loop, its objective ends with its part."""
        arrival = self._requests.arrivals[key]
        name, turn = arrival.slo.service_class, arrival.turn
        terms = self._deadlines.get(name)
        if turn is None or terms is None:
            return
        asked = LoopTurn(turn.program, name, arrival.tenant, terms.deadline_s, terms.idle_s)
        part = self._promises.begin(asked, now_s)
        self._parts[key] = part, now_s
        self._requests.bound(key, max(part.part_s, MIN_PART_S))

    def of(self, key: int) -> LoopPart | None:
        """The part of a turn that has not ended."""
        found = self._parts.get(key)
        return None if found is None else found[0]

    def end(self, key: int, now_s: float) -> None:
        """A request has ended, with its output or without."""
        found = self._parts.pop(key, None)
        if found is None:
            return
        (part, began_s), requests = found, self._requests
        took_s = now_s - began_s
        answered = key not in requests.failures
        # Later turns of a promised loop count as promised, as at the router.
        goes_on = part.turns > 1 and bool(part.promised)
        promised = goes_on or not isnan(requests.promised_s[key])
        program = requests.arrivals[key].turn
        assert program is not None
        ended = LoopTurnEnd(program.program, part.age_s + took_s, took_s, answered, promised)
        self._promises.end(ended, now_s)

    def ended(self) -> Mapping[LoopEnding, int]:
        """How the loops ended, after the run."""
        self._promises.expire(inf)
        return dict(self._promises.ended)
