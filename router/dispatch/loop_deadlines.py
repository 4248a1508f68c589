"""The deadline of a tool loop, as the end-to-end objective of each of its turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from sluice.router.request.call import Call
from sluice.router.wire import MIN_OBJECTIVE_MS
from sluice.scheduling.request.loops import LoopStarts

LoopAge = Callable[[int, float], Awaitable[float | None]]
"""How long ago a loop began over all routers, if its first turn here came so long ago, seconds;
``None``: the controller does not answer."""


class LoopDeadlines:
    """Bounds the turns of loops. One per router process.

    It remembers the loops itself, too: a controller that has restarted learns from its routers when
    they began, and while it does not answer a loop begins with its first turn at this router.

    Args:
        ask: asks the controller; ``None``: there is none.
        clock: monotonic seconds; the one of :attr:`Call.received_s`.
    """

    def __init__(self, ask: LoopAge | None, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._starts = LoopStarts()

    async def bounded(self, call: Call) -> Call:
        """The call with an end-to-end objective that ends with its loop, at the latest; itself if
        it is no turn of one. After the loop's deadline the objective is the shortest there is."""
        loop = call.loop
        if loop is None:
            return call
        now_s = self._clock()
        start_s = self._starts.started_s(loop.key, call.received_s, now_s)
        age_s = None if self._ask is None else await self._ask(loop.key, now_s - start_s)
        if age_s is not None:
            now_s = self._clock()
            start_s = self._starts.started_s(loop.key, now_s - age_s, now_s)
        due_s = start_s + loop.deadline_s
        left_s = max(due_s - call.received_s, MIN_OBJECTIVE_MS / 1000)
        slo = replace(call.slo, e2e_s=min(left_s, call.slo.columns[2]))
        return replace(call, slo=slo, loop=loop._replace(due_s=due_s))
