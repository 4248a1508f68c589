"""The tool loop (``slo.loop``) that a request is a turn of. A loop's turns share a deadline, which
counts from the arrival of the first of them at any router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, NamedTuple

from msgspec import structs

from sluice.router import wire
from sluice.router.errors import invalid, shown
from sluice.router.request.session import MAX_SESSION_CHARACTERS, hash_of
from sluice.router.wire import LOOP_DEADLINE, MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import LoopStarts

FIELD = f"{wire.SLO_FIELD}.{wire.LOOP}"
DEADLINE_FIELD = f"{FIELD}.{LOOP_DEADLINE}"


class StatedLoop(NamedTuple):
    """A loop as a client states it."""

    id: str
    deadline_ms: float


class Loop(NamedTuple):
    """A turn's loop. ``key``: 63-bit hash of owner and id. ``deadline_s``: from first turn to last
    end. ``due_s``: on the router's clock; infinite until the start is known."""

    key: int
    deadline_s: float
    due_s: float = inf


def read_loop(value: Any) -> StatedLoop | None:
    """The loop in ``value``, ``None`` if that is. Raises ApiError: 400."""
    if value is None:
        return None
    keys = {"id", LOOP_DEADLINE}
    if not isinstance(value, dict) or value.keys() != keys:
        raise invalid(f"{FIELD} must be an object with id and {LOOP_DEADLINE}", FIELD)
    name, deadline_ms = value["id"], value[LOOP_DEADLINE]
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_SESSION_CHARACTERS:
        raise invalid(
            f"{FIELD}.id must be a string of 1 to {MAX_SESSION_CHARACTERS} characters, "
            f"got {shown(name)}",
            FIELD,
        )
    number = isinstance(deadline_ms, int | float) and not isinstance(deadline_ms, bool)
    if not number or not MIN_OBJECTIVE_MS <= deadline_ms <= MAX_OBJECTIVE_MS:
        raise invalid(
            f"{DEADLINE_FIELD} must be a number of milliseconds from {MIN_OBJECTIVE_MS:g} to "
            f"{MAX_OBJECTIVE_MS:.0f}, got {shown(deadline_ms)}",
            FIELD,
        )
    return StatedLoop(name, float(deadline_ms))


def loop_of(stated: StatedLoop, owner: str) -> Loop:
    """The loop of a request. Loops of different owners are distinct, even with the same id."""
    return Loop(hash_of(f"{owner}\n{stated.id}", b"sluice-loop"), stated.deadline_ms / 1000)


LoopAge = Callable[[int, float], Awaitable[float | None]]
"""How long ago a loop began at any router, seconds; ``None``: the controller is silent."""


class LoopDeadlines:
    """Bounds the turns of loops; one per router process. It remembers loops, too: a restarted
    controller learns them from its routers, and without a controller a loop begins with its first
    turn here."""

    def __init__(self, ask: LoopAge | None, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._starts = LoopStarts()

    async def bounded(self, loop: Loop, slo: SLO, received_s: float) -> tuple[SLO, Loop]:
        """A turn's objective within its loop, and the loop; after its deadline, the shortest."""
        now_s = self._clock()
        start_s = self._starts.started_s(loop.key, received_s, now_s)
        age_s = None if self._ask is None else await self._ask(loop.key, now_s - start_s)
        if age_s is not None:
            now_s = self._clock()
            start_s = self._starts.started_s(loop.key, now_s - age_s, now_s)
        due_s = start_s + loop.deadline_s
        left_s = max(due_s - received_s, MIN_OBJECTIVE_MS / 1000)
        return structs.replace(slo, e2e_s=min(left_s, slo.columns[2])), loop._replace(due_s=due_s)
