"""The real controller in this process, in the place of its client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sluice.controller.client import NoAnswerError
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.metrics import samples_of
from sluice.protocol.messages import FirstTokenWait, LateNotice, RequestEnding
from sluice.router.metrics.instruments import RouterMetrics
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.placement.quotes import Quote
from sluice.scheduling.placement.windows import Leftover
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from tests.controller.fleet import ObservedController, newer_push


class LocalController:
    """Answers as the client does, or not at all while it is not ``up``."""

    def __init__(self, clock: Callable[[], float], config: ControllerConfig | None = None) -> None:
        self.controller = ObservedController(config or ControllerConfig(), clock)
        self.up = True
        self.snapshots = 0
        self.listings = 0
        # How often it was asked what a replica remembers, and after how often that it does.
        self.asked = self.forgets = 0
        self.endings: list[RequestEnding] = []
        self.late_notices: list[LateNotice] = []
        # What an edge without a way of its own to replicas does not set.
        self.waits: Callable[[], Sequence[FirstTokenWait]] = tuple
        self.missing: Callable[[Sequence[int]], None] = lambda _: None

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        return (await self.controller.route([query])).decisions[0] if self.up else None

    async def quote(self, query: RouteQuery, hold_s: float) -> Quote | None:
        return await self.controller.quote(query, hold_s) if self.up else None

    async def leftover(self, query: RouteQuery, in_flight: int) -> Leftover | None:
        return await self.controller.leftover(query, in_flight) if self.up else None

    def release(self, key: int) -> None:
        coroutine = self.controller.release([key])
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("the controller waited in the middle of a call")

    def replica_gone(self, replica_ids: Sequence[str]) -> None:
        raise AssertionError("no replica dies here")

    def faulted(self, replica_id: str, fault: ReplicaFault) -> None:
        raise AssertionError(f"no replica fails here: {replica_id} {fault}")

    def ended(self, ending: RequestEnding) -> None:
        self.endings.append(ending)

    def late(self, notice: LateNotice) -> None:
        self.late_notices.append(notice)

    def on_leaving(self, leaving: Callable[[Sequence[str]], None]) -> None:
        self.leaving = leaving

    def on_sync(
        self,
        waits: Callable[[], Sequence[FirstTokenWait]],
        missing: Callable[[Sequence[int]], None],
    ) -> None:
        self.waits, self.missing = waits, missing

    async def snapshot(self) -> dict[str, Any] | None:
        self.snapshots += 1
        return await self.controller.snapshot() if self.up else None

    async def decisions(self, limit: int) -> list[dict[str, Any]] | None:
        self.listings += 1
        return await self.controller.decisions(limit) if self.up else None

    async def drain(
        self, replica_id: str, drain: bool, spare_last: bool = False
    ) -> dict[str, Any] | None:
        if not self.up:
            raise NoAnswerError("unavailable")
        return await self.controller.drain(replica_id, drain, spare_last)

    async def remembers(self, replica_id: str) -> bool | None:
        self.asked += 1
        return None if not self.up else self.asked > self.forgets

    async def hear(self, metrics: RouterMetrics) -> None:
        """Take in what a router has counted."""
        endings, self.endings = self.endings, []
        push = newer_push("router", samples_of(metrics.registry))
        told = await self.controller.push_metrics(push, endings, (), self.waits())
        self.missing(told.late)
