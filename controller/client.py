"""The controller's client in routers and replicas. It never blocks the event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from sluice.controller.cell_client import NOTICE_TIMEOUT_S, CallMetrics, Calls, CellClient, Link
from sluice.controller.config import ControllerConfig
from sluice.controller.discovery import (
    controller_actor_name,
    ensure_controller,
    fleet_name,
    observer_actor_name,
    stop_controller,
)
from sluice.controller.transport.channel import NoAnswerError
from sluice.protocol.messages import (
    FirstTokenWait,
    LateNotice,
    MetricsPush,
    QuotaUse,
    ReplicaDelta,
    ReplicaHello,
    ReportReply,
    RequestEnding,
    TroubleNotice,
)
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.fleet.breaker import Trouble
from sluice.scheduling.placement.cells import CellChoice, cell_of
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
"""Longest wait for the age of a tool loop, seconds: a request waits for it."""

SCRAPE_TIMEOUT_S = 2.0


class ControllerClient:
    """One process's access to its application's controller, or to the cells of it, and observer.

    Create one per process and use it from one event loop. The constructor blocks, and finds, starts
    or replaces the actors (:func:`ensure_controller`). Everything else is asynchronous and returns
    ``None`` or ``False`` if the actor does not answer, at once while it is known to be
    unresponsive. No call is retried: a caller that gets ``None`` continues without the controller.

    With several cells, what concerns a replica goes to the cell that owns it
    (:func:`~sluice.scheduling.placement.cells.cell_of`), a request's decision to at most two cells
    (:class:`~sluice.scheduling.placement.cells.CellChoice`), and what is the application's, the
    rate limits and the tool loops, to the first cell.

    Args:
        app_name: name of the application, or of one of its fleets (:func:`fleet_name`).
        config: the controller's configuration.
        timeout_s: longest wait for a cell's decision, seconds, time in the client's queue included.
        registry: registry of the client's own metrics; ``None``: they are not registered.
        clock: monotonic seconds.
        replica_id: if the process is this replica and nothing else: it needs only its own cell.
    """

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
        self._is_router = False
        self._observer = Calls(Link(app_name, config, _nothing, "observer"), metrics)

    @property
    def up(self) -> bool:
        """Whether a cell of the controller answered the last call."""
        return any(cell.up for cell in self._of.values())

    @property
    def closed(self) -> frozenset[str]:
        """The replicas that an operator has closed to new requests, as the controller last
        reported with a decision or a push of metrics. The report stays valid while the controller
        does not answer."""
        return frozenset[str]().union(*(cell.closed for cell in self._of.values()))

    @property
    def quarantined(self) -> frozenset[str]:
        """The replicas that have failed or hang, as the controller last reported in the same way.
        While it does not answer, the report stays valid for ``QUARANTINE_KEPT_S``."""
        return frozenset[str]().union(*(cell.quarantined for cell in self._of.values()))

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        """The decision on ``query``, or ``None`` if the controller did not answer in time.

        A single timeout affects only its own question. The controller counts as hung after
        ``MAX_TIMEOUTS`` in a row (:mod:`sluice.controller.transport.channel`); its death is
        detected at once. While there is no connection and decisions are actor calls, one timeout is
        enough.
        """
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

    def _some_leave(self) -> None:
        self._leaving([name for cell in self._of.values() for name in cell.leaving])

    def _heard(self, number: int, slack_s: float) -> None:
        if self._choice is not None:
            self._choice.heard(number, slack_s, self._clock())

    async def hello(self, hello: ReplicaHello) -> ReportReply | None:
        """Register a replica.

        Raises:
            ValueError: the controller refused the message, and says why.
        """
        return await self._owner(hello.replica_id).hello(hello)

    async def report(self, delta: ReplicaDelta) -> ReportReply | None:
        """Report a replica's changes. After ``None`` it is unknown whether they arrived; if they
        were lost, the next report is answered with ``resync``.

        Raises:
            ValueError: the controller refused the message, and says why.
        """
        return await self._owner(delta.replica_id).report(delta)

    async def goodbye(self, replica_id: str) -> bool:
        """A replica ends."""
        return await self._owner(replica_id).delivered("goodbye", replica_id)

    async def push_metrics(self, push: MetricsPush) -> bool:
        """Deliver a process's metrics to the observer. In a router (:meth:`on_push`), also start to
        send the controller the request endings and late notices since the last push.

        Raises:
            ValueError: the observer refused them, and says why.
        """
        if self._is_router:
            waits = self._waits()
            for cell in self._of.values():
                own = [wait for wait in waits if self._owner(wait.replica_id) is cell]
                cell.sync_soon(own, self._missing, self._some_leave)
        try:
            await self._observer.call("push_metrics", push, timeout_s=NOTICE_TIMEOUT_S)
        except NoAnswerError:
            return False
        return True

    async def share_quotas(self, uses: list[QuotaUse]) -> list[float] | None:
        """Report the rate-limit use of a router's clients. Returns how full these buckets are over
        all routers; see :mod:`sluice.controller.actor`.

        Raises:
            ValueError: the controller refused the message, and says why.
        """
        levels: list[float] | None
        levels = await self._first.calls.answer("share_quotas", uses, timeout_s=NOTICE_TIMEOUT_S)
        return levels

    async def loop_age(self, key: int, age_s: float) -> float | None:
        """How long ago a tool loop began over all routers, seconds, if its first turn here came
        ``age_s`` ago; see :mod:`sluice.scheduling.request.stages`."""
        age: float | None
        age = await self._first.calls.answer("loop_age", key, age_s, timeout_s=LOOP_TIMEOUT_S)
        return age

    async def render_metrics(self, timeout_s: float = SCRAPE_TIMEOUT_S) -> bytes | None:
        """The metrics of the whole application in Prometheus' text format, from the observer."""
        text: bytes | None = await self._observer.answer("render_metrics", timeout_s=timeout_s)
        return text

    async def snapshot(self, timeout_s: float = SCRAPE_TIMEOUT_S) -> dict[str, Any] | None:
        """The controller's state, for an operator, from the observer."""
        view: dict[str, Any] | None = await self._observer.answer("snapshot", timeout_s=timeout_s)
        return view

    async def decisions(self, limit: int) -> list[dict[str, Any]] | None:
        """The last decisions and their reasons, the latest first, from the observer.

        Raises:
            ValueError: ``limit`` is out of range.
        """
        told: list[dict[str, Any]] | None
        told = await self._observer.answer("decisions", limit, timeout_s=SCRAPE_TIMEOUT_S)
        return told

    async def drain(
        self, replica_id: str, drain: bool, spare_last: bool = False
    ) -> dict[str, Any] | None:
        """Close a replica to new requests, or open it again. Returns the requests left there;
        ``None`` for an unknown replica. See :meth:`sluice.controller.actor.Controller.drain`.

        Raises:
            NoAnswerError: the controller did not answer; the change may have been made or not.
            ValueError: ``replica_id`` is no id.
        """
        owner, asked = self._owner(replica_id).calls, ("drain", replica_id, drain)
        told: dict[str, Any] | None
        told = await owner.call(*asked, spare_last, timeout_s=SCRAPE_TIMEOUT_S)
        if told is not None and told["last"] and await self._others_ready(replica_id):
            told = await owner.call(*asked, False, timeout_s=SCRAPE_TIMEOUT_S)
        return told

    async def _others_ready(self, replica_id: str) -> bool:
        """Whether another cell than a replica's has replicas that take requests."""
        for cell in self._of.values():
            if cell is not self._owner(replica_id):
                load: Load | None = await cell.calls.answer("demand", timeout_s=SCRAPE_TIMEOUT_S)
                if load is not None and load.ready:
                    return True
        return False

    async def remembers(self, replica_id: str) -> bool | None:
        """See :meth:`sluice.controller.actor.Controller.remembers`; also ``None`` without an
        answer."""
        told: bool | None = await self._owner(replica_id).calls.answer(
            "remembers", replica_id, timeout_s=SCRAPE_TIMEOUT_S
        )
        return told

    async def load(self, role: Role | None = None) -> Load | None:
        """The load on all replicas together, or on the replicas of ``role``, from the observer;
        autoscaling reads it.

        Raises:
            ValueError: no such role.
        """
        load: Load | None = await self._observer.answer("load", role, timeout_s=SCRAPE_TIMEOUT_S)
        return load

    def release(self, key: int) -> None:
        """Release the reservation of a request that has ended or was sent elsewhere. Does not wait;
        if the message is lost, the reservation expires."""
        for cell in self._of.values():
            cell.release(key)

    def ended(self, ending: RequestEnding) -> None:
        """A request ended. Does not wait; the ending is sent at the next push of metrics. Of more
        than ``MAX_ENDINGS`` between two pushes the latest are sent."""
        self._owner(ending.replica_id).ended(ending)

    def late(self, notice: LateNotice) -> None:
        """A promised response is late. Sent and bounded like an ending (:meth:`ended`)."""
        for cell in self._of.values():
            cell.late(notice)

    def on_push(
        self,
        waits: Callable[[], Sequence[FirstTokenWait]],
        missing: Callable[[Sequence[int]], None],
    ) -> None:
        """From now on, with each push of metrics, tell the controller how requests ended, ask it
        about the requests of ``waits``, at most ``MAX_WAITS``, and call ``missing`` with the keys
        of those predicted to miss their TTFT. Neither callback may block."""
        self._waits, self._missing = waits, missing
        self._is_router = True

    def on_leaving(self, leaving: Callable[[Sequence[str]], None]) -> None:
        """From now on, with each answer to such a push, call ``leaving`` with the replicas that are
        drained or about to stop. It must not block."""
        self._leaving = leaving

    def replica_gone(self, replica_ids: Iterable[str]) -> None:
        """These replicas left the application. Does not wait; if the message is lost, the replicas
        go stale."""
        for replica_id in replica_ids:
            self._owner(replica_id).replica_gone(replica_id)

    def troubled(self, replica_id: str, trouble: Trouble) -> None:
        """A request failed at this replica, or its stream hangs. Does not wait; a lost notice is
        not repeated, and the next failure sends another."""
        self._owner(replica_id).troubled(TroubleNotice(replica_id, trouble))

    async def close(self) -> None:
        """Send pending notices, and stop. The actors keep running."""
        await asyncio.gather(*(cell.close() for cell in self._of.values()))
        await self._observer.link.close()

    def _owner(self, replica_id: str) -> CellClient:
        """The cell of a replica. Of no replica (an empty id): the first one."""
        if self._choice is None or not replica_id:
            return self._first
        return self._of[cell_of(replica_id, self._cells)]


def _nothing(*_: object) -> None:
    """A callback that is not needed."""
