"""The controller's client in routers and replicas. It never blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from sluice.controller.cell_client import NOTICE_TIMEOUT_S, CallMetrics, CellClient, Link
from sluice.controller.config import ControllerConfig
from sluice.controller.discovery import (
    controller_actor_name,
    ensure_controller,
    fleet_name,
    observer_actor_name,
    stop_controller,
)
from sluice.controller.observability.traffic import Traffic
from sluice.controller.transport.channel import NoAnswerError
from sluice.protocol.messages import (
    FaultNotice,
    FirstTokenWait,
    LateNotice,
    MetricsPush,
    QuotaUse,
    ReplicaDelta,
    ReplicaHello,
    ReportReply,
    RequestEnding,
)
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.placement.cells import CellChoice, cell_of
from sluice.scheduling.placement.loops import LoopPart, LoopTurn, LoopTurnEnd
from sluice.scheduling.placement.quotes import Quote
from sluice.scheduling.placement.windows import Leftover
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.roles import Role

__all__ = [
    "ControllerClient",
    "NoAnswerError",
    "controller_actor_name",
    "ensure_controller",
    "fleet_name",
    "observer_actor_name",
    "stop_controller",
]

LOOP_TIMEOUT_S = 0.25
"""Longest wait for a turn's part of its tool loop, seconds: a request waits for it."""

QUOTE_TIMEOUT_S = 1.0
"""Longest wait for a quote or an offer, seconds."""

SCRAPE_TIMEOUT_S = 2.0
SYNC_PERIOD_S = 1.0

_log = logging.getLogger(__name__)


class ControllerClient:
    """One process's access to its application's controller, or to the cells of it, and observer.

    Use it from one event loop. The constructor blocks, and finds, starts or replaces the actors.
    Everything else returns ``None`` or ``False`` if the actor does not answer, at once while it
    is known to be unresponsive. No call is retried.

    With several cells, what concerns a replica goes to the cell that owns it, a decision to at
    most two cells (``CellChoice``), and rate limits and tool loops to the first cell.
    ``timeout_s`` includes the time in the client's queue. A client with ``replica_id`` serves
    that replica only and needs only its own cell."""

    def __init__(
        self,
        app_name: str,
        config: ControllerConfig,
        timeout_s: float = 0.25,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
        replica_id: str = "",
    ) -> None:
        self._clock = clock
        self._cells = config.cells
        metrics, source = CallMetrics(registry), secrets.randbits(63)
        own = range(config.cells)
        if replica_id:
            own = range(at := cell_of(replica_id, config.cells), at + 1)
        self._of = {
            number: CellClient(
                app_name, config, number, timeout_s, metrics, source, self._heard, clock
            )
            for number in own
        }
        self._first = self._of[own[0]]
        self._choice = CellChoice(config.cells) if len(own) > 1 else None
        self._waits: Callable[[], Sequence[FirstTokenWait]] = tuple
        self._missing: Callable[[Sequence[int]], None] = _nothing
        self._leaving: Callable[[Sequence[str]], None] = _nothing
        self._observer = Link(app_name, config, _nothing, metrics, "observer")

    @property
    def up(self) -> bool:
        """Whether a cell of the controller answered the last call."""
        return any(cell.up for cell in self._of.values())

    @property
    def closed(self) -> frozenset[str]:
        """The replicas closed by an operator, as the controller last reported with a decision or
        a sync; valid while the controller does not answer."""
        return frozenset[str]().union(*(cell.closed for cell in self._of.values()))

    @property
    def quarantined(self) -> frozenset[str]:
        """The replicas that have failed or hang, as the controller last reported in the same way.
        While it does not answer, the report stays valid for ``QUARANTINE_KEPT_S``."""
        return frozenset[str]().union(*(cell.quarantined for cell in self._of.values()))

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        """The decision on ``query``, or ``None`` if the controller did not answer in time. It
        counts as hung after ``MAX_TIMEOUTS`` timeouts in a row; after one while decisions are
        actor calls."""
        choice = self._choice
        if choice is None:
            return await self._first.route(query)
        up = [cell.up for cell in self._of.values()]
        questions = choice.questions(query, self._clock(), up)
        number, asked = next(questions)
        while True:
            decision = await self._of[number].route(asked)
            choice.answered(number, asked, decision, self._clock())
            try:
                number, asked = questions.send(decision)
            except StopIteration as end:
                found: RouteDecision | None = end.value
                return found

    async def quote(self, query: RouteQuery, hold_s: float) -> Quote | None:
        """What would be decided on ``query`` now, by the cell that it would be asked of first; of
        several cells none holds it."""
        cell, choice = self._first, self._choice
        if choice is not None:
            up = [each.up for each in self._of.values()]
            cell, hold_s = self._of[next(choice.questions(query, self._clock(), up))[0]], 0.0
        quote: Quote | None
        quote = await cell.link.answer("quote", query, hold_s, timeout_s=QUOTE_TIMEOUT_S)
        return quote

    def _some_leave(self) -> None:
        self._leaving([name for cell in self._of.values() for name in cell.leaving])

    def _heard(self, number: int, slack_s: float) -> None:
        if self._choice is not None:
            self._choice.heard(number, slack_s, self._clock())

    async def hello(self, hello: ReplicaHello) -> ReportReply | None:
        """Register a replica. Raises ValueError: the controller refused the message."""
        return await self._owner(hello.replica_id).hello(hello)

    async def report(self, delta: ReplicaDelta) -> ReportReply | None:
        """Report a replica's changes. ``None``: perhaps lost; the next report then gets
        ``resync``. Raises ValueError: the controller refused the message, and says why."""
        return await self._owner(delta.replica_id).report(delta)

    async def goodbye(self, replica_id: str) -> bool:
        """A replica ends."""
        return await self._owner(replica_id).delivered("goodbye", replica_id)

    async def push_metrics(self, push: MetricsPush) -> bool:
        """Deliver a process's metrics to the observer. Raises ValueError: it refused them."""
        try:
            await self._observer.call("push_metrics", push, timeout_s=NOTICE_TIMEOUT_S)
        except NoAnswerError:
            return False
        return True

    def sync(self) -> None:
        """Start to send endings and late notices, and to ask about the waits (:meth:`on_sync`)."""
        waits = self._waits()
        for cell in self._of.values():
            own = [wait for wait in waits if self._owner(wait.replica_id) is cell]
            cell.sync_soon(own, self._missing, self._some_leave)

    async def sync_repeatedly(self) -> None:
        """Sync every :data:`SYNC_PERIOD_S`, for a router, until cancelled."""
        while True:
            try:
                self.sync()
            except Exception:
                # Waits that cannot be read once must not end it for good.
                _log.exception("a sync with the controller failed")
            await asyncio.sleep(SYNC_PERIOD_S)

    async def share_quotas(self, uses: list[QuotaUse]) -> list[float] | None:
        """Report the rate-limit use of a router's clients; how full these buckets are over all
        routers. Raises ValueError: the controller refused the message, and says why."""
        levels: list[float] | None
        levels = await self._first.link.answer("share_quotas", uses, timeout_s=NOTICE_TIMEOUT_S)
        return levels

    async def loop_turn(self, turn: LoopTurn) -> LoopPart | None:
        """A turn of a tool loop has arrived here: its part of the loop's deadline."""
        part: LoopPart | None
        part = await self._first.link.answer("loop_turn", turn, timeout_s=LOOP_TIMEOUT_S)
        return part

    async def leftover(self, query: RouteQuery, in_flight: int) -> Leftover | None:
        """What promised requests leave for batches with lines like ``query``, over all cells.
        ``None``: not known yet, or no answer. Raises ValueError: the controller refused it."""
        parts = await asyncio.gather(
            *(
                cell.link.answer("leftover", query, in_flight, timeout_s=SCRAPE_TIMEOUT_S)
                for cell in self._of.values()
            )
        )
        return Leftover.of([part for part in parts if part is not None])

    def loop_ended(self, ended: LoopTurnEnd) -> None:
        """A turn of a tool loop ended. Sent and bounded like an ending (:meth:`ended`)."""
        self._first.turns.append(ended)

    async def render_metrics(self, timeout_s: float = SCRAPE_TIMEOUT_S) -> bytes | None:
        """The metrics of the whole application in Prometheus' text format, from the observer."""
        text: bytes | None = await self._observer.answer("render_metrics", timeout_s=timeout_s)
        return text

    async def snapshot(self, timeout_s: float = SCRAPE_TIMEOUT_S) -> dict[str, Any] | None:
        """The controller's state, for an operator, from the observer."""
        view: dict[str, Any] | None = await self._observer.answer("snapshot", timeout_s=timeout_s)
        return view

    async def decisions(self, limit: int) -> list[dict[str, Any]] | None:
        """The last decisions and reasons, the latest first. Raises ValueError: ``limit``."""
        answer: list[dict[str, Any]] | None
        answer = await self._observer.answer("decisions", limit, timeout_s=SCRAPE_TIMEOUT_S)
        return answer

    async def usage(self) -> dict[str, Any] | None:
        """Who has used the engines, by tenant and class."""
        answer: dict[str, Any] | None
        answer = await self._observer.answer("usage", timeout_s=SCRAPE_TIMEOUT_S)
        return answer

    async def traffic(self, with_replicas: bool = False) -> Traffic | None:
        """The next of what the controller recorded for the shadow policies."""
        read: Traffic | None
        calls = self._first.link
        read = await calls.answer("traffic", with_replicas, timeout_s=SCRAPE_TIMEOUT_S)
        return read

    async def drain(
        self, replica_id: str, drain: bool, spare_last: bool = False
    ) -> dict[str, Any] | None:
        """As ``Controller.drain``. Raises NoAnswerError: the change may have been made or not;
        ValueError: ``replica_id`` is no id."""
        owner, asked = self._owner(replica_id).link, ("drain", replica_id, drain)
        answer: dict[str, Any] | None
        answer = await owner.call(*asked, spare_last, timeout_s=SCRAPE_TIMEOUT_S)
        if answer is not None and answer["last"] and await self._others_ready(replica_id):
            answer = await owner.call(*asked, False, timeout_s=SCRAPE_TIMEOUT_S)
        return answer

    async def _others_ready(self, replica_id: str) -> bool:
        """Whether another cell than a replica's has replicas that take requests."""
        for cell in self._of.values():
            if cell is not self._owner(replica_id):
                load: Load | None = await cell.link.answer("demand", timeout_s=SCRAPE_TIMEOUT_S)
                if load is not None and load.ready:
                    return True
        return False

    async def remembers(self, replica_id: str) -> bool | None:
        """See :meth:`sluice.controller.actor.Controller.remembers`; also ``None`` without an
        answer."""
        answer: bool | None = await self._owner(replica_id).link.answer(
            "remembers", replica_id, timeout_s=SCRAPE_TIMEOUT_S
        )
        return answer

    async def load(self, role: Role | None = None) -> Load | None:
        """The load on all replicas, or those of ``role``. Raises ValueError: no such role."""
        load: Load | None = await self._observer.answer("load", role, timeout_s=SCRAPE_TIMEOUT_S)
        return load

    def release(self, key: int) -> None:
        """Release the reservation of a request that has ended or was sent elsewhere. Does not wait;
        if the message is lost, the reservation expires."""
        for cell in self._of.values():
            cell.notify("release", key)

    def ended(self, ending: RequestEnding) -> None:
        """A request ended. Does not wait; the ending is sent at the next sync. Of more
        than ``MAX_ENDINGS`` between two syncs the latest are sent."""
        self._owner(ending.replica_id).endings.append(ending)

    def late(self, notice: LateNotice) -> None:
        """A promised response is late. Sent and bounded like an ending (:meth:`ended`)."""
        for cell in self._of.values():
            cell.late.append(notice)

    def on_sync(
        self,
        waits: Callable[[], Sequence[FirstTokenWait]],
        missing: Callable[[Sequence[int]], None],
    ) -> None:
        """With each sync ask about ``waits``: ``missing`` gets the keys of those (of at most
        ``MAX_WAITS``) that are predicted to miss their TTFT. Neither callback may block."""
        self._waits, self._missing = waits, missing

    def on_leaving(self, leaving: Callable[[Sequence[str]], None]) -> None:
        """From now on, with each answer to a sync, call ``leaving`` with the replicas that are
        drained or about to stop. It must not block."""
        self._leaving = leaving

    def replica_gone(self, replica_ids: Iterable[str]) -> None:
        """These replicas left the application. Does not wait; if the message is lost, the replicas
        go stale."""
        for replica_id in replica_ids:
            self._owner(replica_id).notify("replica_gone", replica_id)

    def faulted(self, replica_id: str, fault: ReplicaFault) -> None:
        """A request failed at this replica, or its stream hangs. Does not wait; a lost notice is
        not repeated, and the next failure sends another."""
        self._owner(replica_id).notify("faulted", FaultNotice(replica_id, fault))

    async def close(self) -> None:
        """Send pending notices, and stop. The actors keep running."""
        await asyncio.gather(*(cell.close() for cell in self._of.values()))
        await self._observer.close()

    def _owner(self, replica_id: str) -> CellClient:
        """The cell of a replica. Of no replica (an empty id): the first one."""
        if self._choice is None or not replica_id:
            return self._first
        return self._of[cell_of(replica_id, self._cells)]


def _nothing(*_: object) -> None:
    """A callback that is not needed."""
