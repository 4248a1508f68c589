"""The tool loop that a request is a turn of: the client's (``slo.loop``), or that of its session in
a class with a deadline for loops. The turns share a deadline, which counts from the arrival of the
first of them at any router."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import structs
from pydantic import BaseModel, Field

from sluice.router import wire
from sluice.router.config import LoopTerms
from sluice.router.errors import invalid
from sluice.router.request.session import MAX_SESSION_CHARACTERS, hash_of
from sluice.router.request.validation import validated
from sluice.router.tenancy.limits import Milliseconds
from sluice.router.wire import LOOP_DEADLINE, MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS
from sluice.scheduling.placement.loops import (
    IDLE_S,
    LoopPromises,
    LoopTurn,
    LoopTurnEnd,
)
from sluice.scheduling.request.objective import SLO

if TYPE_CHECKING:
    from sluice.controller.client import ControllerClient  # which imports Ray

FIELD = f"{wire.SLO_FIELD}.{wire.LOOP}"
DEADLINE_FIELD = f"{FIELD}.{LOOP_DEADLINE}"


class StatedLoop(BaseModel, strict=True, extra="forbid", frozen=True):
    """A loop as a client states it."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARACTERS)]
    deadline_ms: Milliseconds


ALLOWED_MS = f"a number of milliseconds from {MIN_OBJECTIVE_MS:g} to {MAX_OBJECTIVE_MS:.0f}"
_ALLOWED = {
    "id": f"a string of 1 to {MAX_SESSION_CHARACTERS} characters",
    LOOP_DEADLINE: ALLOWED_MS,
}


class Loop(NamedTuple):
    """A turn's loop. ``key``: a hash of 63 bits. ``deadline_s``: from the first turn to the last
    end. The rest is known once the turn has begun: ``due_s`` on the router's clock; ``turns``: with
    this one; ``promised``: whether the loop is, ``None``: too little is known of such loops;
    ``needs_s``: what they need. ``final``: the client says that it is the last turn."""

    key: int
    deadline_s: float
    idle_s: float = IDLE_S
    stated: bool = False
    final: bool = False
    due_s: float = inf
    turns: int = 0
    promised: bool | None = None
    needs_s: float | None = None
    deadlines: LoopDeadlines | None = None

    @property
    def goes_on(self) -> bool:
        """Whether this is a later turn of a promised loop."""
        return self.turns > 1 and bool(self.promised)

    def end(self, received_s: float, answered: bool | None, promised: bool) -> None:
        """The turn that came at ``received_s`` ends now; the rest as in ``LoopTurnEnd``."""
        if self.deadlines is not None:
            self.deadlines.end(self, received_s, answered, promised)


def read_loop(value: Any) -> StatedLoop | None:
    """The loop in ``value``, ``None`` if that is. Raises ApiError: 400."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.keys() != StatedLoop.model_fields.keys():
        raise invalid(f"{FIELD} must be an object with id and {LOOP_DEADLINE}", FIELD)
    return validated(StatedLoop, value, f"{FIELD}.{{}}".format, _ALLOWED.__getitem__, FIELD)


def loop_of(stated: StatedLoop, owner: str, terms: LoopTerms | None) -> Loop:
    """A client's loop, in a class with these terms. Loops of different owners are distinct, even
    with the same id."""
    key = hash_of(f"{owner}\n{stated.id}", b"sluice-loop")
    idle_s = IDLE_S if terms is None else terms.idle_ms / 1000
    return Loop(key, stated.deadline_ms / 1000, idle_s, stated=True)


def loop_in(service_class: str, terms: LoopTerms, session: int) -> Loop:
    """The loop of a session's turns in a class with these terms."""
    key = hash_of(f"{service_class}\n{session}", b"sluice-loop")
    return Loop(key, terms.deadline_ms / 1000, terms.idle_ms / 1000)


class LoopDeadlines:
    """The turns of loops at this router; one per router process. It remembers loops, too: a
    restarted controller learns them from its routers, and without a controller a loop begins with
    its first turn here, and nothing of it is promised."""

    def __init__(self, service: ControllerClient | None, clock: Callable[[], float]) -> None:
        self._service = service
        self._clock = clock
        self._here = LoopPromises()

    async def begin(self, loop: Loop, slo: SLO, tenant: int, received_s: float) -> tuple[SLO, Loop]:
        """A turn's objective within its loop, and the loop; after its deadline, the shortest."""
        now_s = self._clock()
        waited_s = now_s - received_s
        name, terms = slo.service_class, (loop.deadline_s, loop.idle_s)
        turn = LoopTurn(loop.key, name, tenant, *terms, waited_s, stated=loop.stated)
        part = self._here.begin(turn, now_s)
        if self._service is not None:
            turn = turn._replace(age_s=part.age_s, turns=part.turns - 1, promised=part.promised)
            found = await self._service.loop_turn(turn)
            if found is not None:
                part, now_s = found, self._clock()
                self._here.known(loop.key, part, now_s)
        part_s = max(part.part_s, MIN_OBJECTIVE_MS / 1000)
        found_loop = loop._replace(
            due_s=now_s - part.age_s + loop.deadline_s,
            turns=part.turns,
            promised=part.promised,
            needs_s=part.needs_s,
            deadlines=self,
        )
        return structs.replace(slo, e2e_s=min(part_s, slo.columns[2])), found_loop

    def end(self, loop: Loop, received_s: float, answered: bool | None, promised: bool) -> None:
        """See :meth:`Loop.end`."""
        now_s = self._clock()
        age_s = max(0.0, now_s - loop.due_s + loop.deadline_s)
        took_s, promised = max(0.0, now_s - received_s), promised or loop.goes_on
        ended = LoopTurnEnd(loop.key, age_s, took_s, answered, promised, loop.final)
        self._here.end(ended, now_s)
        if self._service is not None:
            self._service.loop_ended(ended)
