"""The controller's client in routers and replicas. It never blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from sluice.controller.config import ControllerConfig
from sluice.controller.link import Link
from sluice.controller.lookup import (
    controller_actor_name,
    ensure_controller,
    fleet_name,
    observer_actor_name,
    stop_controller,
)
from sluice.controller.messages import (
    MAX_ENDINGS,
    MAX_KEYS,
    FirstTokenWait,
    LateNotice,
    MetricsPush,
    QuotaUse,
    ReplicaDelta,
    ReplicaHello,
    ReportReply,
    RequestEnding,
    RouteDecision,
    RouteQuery,
    RouteReply,
    SyncReply,
    Trouble,
    TroubleNotice,
)
from sluice.controller.transport.channel import Endpoint, RouteChannel
from sluice.controller.transport.coalesce import Coalescer
from sluice.controller.transport.failure import NoAnswerError
from sluice.controller.transport.report_wire import fits
from sluice.scheduling.autoscaling import Load
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

REPORT_TIMEOUT_S = 0.5
"""Longest wait for the answer to a report, seconds. It bounds how long a restarted controller waits
for the replicas' hellos."""

QUARANTINE_KEPT_S = 60.0
"""How long the controller's last list of quarantined replicas counts while it does not answer: the
longest quarantine before a replica is tried again, seconds."""

LOOP_TIMEOUT_S = 0.25
"""Longest wait for the age of a tool loop, seconds: a request waits for it."""

NOTICE_TIMEOUT_S = 2.0
SCRAPE_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class CallMetrics:
    """Metrics of a process's calls to the controller."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.outcomes = Counter(
            "sluice_controller_calls",
            "Calls to the controller and observer by method and outcome; each decision of a batch "
            "counts.",
            ("method", "outcome"),
            registry=registry,
        )
        self.batches = Histogram(
            "sluice_controller_batch_queries",
            "Decisions asked for in one call to the controller.",
            buckets=_BATCH_BUCKETS,
            registry=registry,
        )


class ControllerClient:
    """One process's access to its application's controller and observer.

    Create one per process and use it from one event loop. The constructor blocks, and finds, starts
    or replaces the two actors (:func:`ensure_controller`). Everything else is asynchronous and
    returns ``None`` or ``False`` if the actor does not answer, at once while it is known to be
    unresponsive. No call is retried: a caller that gets ``None`` continues without the controller.

    Args:
        app_name: name of the application, or of one of its fleets (:func:`fleet_name`).
        config: the controller's configuration.
        timeout_s: longest wait for a decision, seconds, time in the client's queue included.
        registry: registry of the client's own metrics; ``None``: they are not registered.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        app_name: str,
        config: ControllerConfig,
        timeout_s: float = 0.25,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._source = secrets.randbits(63)
        self._queries: Coalescer[RouteQuery, RouteDecision] = Coalescer(
            self._send_queries, self._release_unwanted, timeout_s
        )
        self._metrics = CallMetrics(registry)
        self._closed: frozenset[str] = frozenset()
        self._quarantined: frozenset[str] = frozenset()
        self._told_s = -inf
        self._released: dict[int, None] = {}
        self._gone: dict[str, None] = {}
        self._troubled: list[TroubleNotice] = []
        self._ended: deque[RequestEnding] = deque(maxlen=MAX_ENDINGS)
        self._late: deque[LateNotice] = deque(maxlen=MAX_ENDINGS)
        self._waits: Callable[[], Sequence[FirstTokenWait]] = tuple
        self._missing: Callable[[Sequence[int]], None] = _nothing
        self._leaving: Callable[[Sequence[str]], None] = _nothing
        self._is_router = False
        self._notice_task: asyncio.Task[None] | None = None
        self._sync_task: asyncio.Task[None] | None = None
        self._link = Link(app_name, config, self._queries.fail_queued)
        self._observer = Link(app_name, config, _nothing, "observer")
        # The connection's end is the first sign of a dead controller.
        self._channel = RouteChannel(self._find_endpoint, self._link.lost, self._release_unwanted)

    @property
    def up(self) -> bool:
        """Whether the controller answered the last call."""
        return self._link.up

    @property
    def closed(self) -> frozenset[str]:
        """The replicas that an operator has closed to new requests, as the controller last
        reported with a decision or a push of metrics. The report stays valid while the controller
        does not answer."""
        return self._closed

    @property
    def quarantined(self) -> frozenset[str]:
        """The replicas that have failed or hang, as the controller last reported in the same way.
        While it does not answer, the report stays valid for ``QUARANTINE_KEPT_S``."""
        if self._clock() - self._told_s > QUARANTINE_KEPT_S:
            return frozenset()
        return self._quarantined

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        """The decision on ``query``, or ``None`` if the controller did not answer in time.

        A single timeout affects only its own question. The controller counts as hung after
        ``MAX_TIMEOUTS`` in a row (:mod:`sluice.controller.transport.channel`); its death is
        detected at once. While there is no connection and decisions are actor calls, one timeout is
        enough.
        """
        try:
            self._link.check()
            decision = await self._queries.ask(query)
        except NoAnswerError as error:
            self._count("route", error.reason)
            return None
        except ValueError as error:
            _log.warning("the controller refused a batch of queries: %s", error)
            self._count("route", "refused")
            return None
        except asyncio.CancelledError:
            self._count("route", "cancelled")
            raise
        self._count("route", "answered")
        return decision

    async def hello(self, hello: ReplicaHello) -> ReportReply | None:
        """Register a replica.

        Raises:
            ValueError: the controller refused the message, and says why.
        """
        reply: ReportReply | None = await self._answer("hello", hello, timeout_s=REPORT_TIMEOUT_S)
        return reply

    async def report(self, delta: ReplicaDelta) -> ReportReply | None:
        """Report a replica's changes. After ``None`` it is unknown whether they arrived; if they
        were lost, the next report is answered with ``resync``.

        Raises:
            ValueError: the controller refused the message, and says why.
        """
        self._channel.connect_soon()
        if not (self._channel.open and fits(delta)):
            told: ReportReply | None
            told = await self._answer("report", delta, timeout_s=REPORT_TIMEOUT_S)
            return told
        try:
            self._link.check()
            reply = await self._channel.report(delta, REPORT_TIMEOUT_S)
        except NoAnswerError as error:
            self._count("report", error.reason)
            return None
        except ValueError:
            self._count("report", "refused")
            raise
        self._count("report", "answered")
        return reply

    async def goodbye(self, replica_id: str) -> bool:
        """A replica ends."""
        return await self._delivered("goodbye", replica_id)

    async def push_metrics(self, push: MetricsPush) -> bool:
        """Deliver a process's metrics to the observer. In a router (:meth:`on_push`), also start to
        send the controller the request endings and late notices since the last push.

        Raises:
            ValueError: the observer refused them, and says why.
        """
        if self._is_router and self._sync_task is None:
            self._sync_task = asyncio.get_running_loop().create_task(self._sync())
        try:
            await self._call("push_metrics", push, timeout_s=NOTICE_TIMEOUT_S, to=self._observer)
        except NoAnswerError:
            return False
        return True

    async def share_quotas(self, uses: list[QuotaUse]) -> list[float] | None:
        """Report the rate-limit use of a router's clients. Returns how full these buckets are over
        all routers; see :mod:`sluice.controller.state.quotas`.

        Raises:
            ValueError: the controller refused the message, and says why.
        """
        levels: list[float] | None
        levels = await self._answer("share_quotas", uses, timeout_s=NOTICE_TIMEOUT_S)
        return levels

    async def loop_age(self, key: int, age_s: float) -> float | None:
        """How long ago a tool loop began over all routers, seconds, if its first turn here came
        ``age_s`` ago; see :mod:`sluice.scheduling.request.loops`."""
        age: float | None
        age = await self._answer("loop_age", key, age_s, timeout_s=LOOP_TIMEOUT_S)
        return age

    async def render_metrics(self, timeout_s: float = SCRAPE_TIMEOUT_S) -> bytes | None:
        """The metrics of the whole application in Prometheus' text format, from the observer."""
        text: bytes | None
        text = await self._answer("render_metrics", timeout_s=timeout_s, to=self._observer)
        return text

    async def snapshot(self, timeout_s: float = SCRAPE_TIMEOUT_S) -> dict[str, Any] | None:
        """The controller's state, for an operator, from the observer."""
        view: dict[str, Any] | None
        view = await self._answer("snapshot", timeout_s=timeout_s, to=self._observer)
        return view

    async def decisions(self, limit: int) -> list[dict[str, Any]] | None:
        """The last decisions and their reasons, the latest first, from the observer.

        Raises:
            ValueError: ``limit`` is out of range.
        """
        told: list[dict[str, Any]] | None
        told = await self._answer("decisions", limit, timeout_s=SCRAPE_TIMEOUT_S, to=self._observer)
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
        told: dict[str, Any] | None
        told = await self._call("drain", replica_id, drain, spare_last, timeout_s=SCRAPE_TIMEOUT_S)
        return told

    async def remembers(self, replica_id: str) -> bool | None:
        """See :meth:`sluice.controller.actor.Controller.remembers`; also ``None`` without an
        answer."""
        told: bool | None
        told = await self._answer("remembers", replica_id, timeout_s=SCRAPE_TIMEOUT_S)
        return told

    async def load(self, role: Role | None = None) -> Load | None:
        """The load on all replicas together, or on the replicas of ``role``, from the observer;
        autoscaling reads it.

        Raises:
            ValueError: no such role.
        """
        load: Load | None
        load = await self._answer("load", role, timeout_s=SCRAPE_TIMEOUT_S, to=self._observer)
        return load

    def release(self, key: int) -> None:
        """Release the reservation of a request that has ended or was sent elsewhere. Does not wait;
        if the message is lost, the reservation expires."""
        self._notice(self._released, key, "release")

    def ended(self, ending: RequestEnding) -> None:
        """A request ended. Does not wait; the ending is sent at the next push of metrics. Of more
        than ``MAX_ENDINGS`` between two pushes the latest are sent."""
        self._ended.append(ending)

    def late(self, notice: LateNotice) -> None:
        """A promised response is late. Sent and bounded like an ending (:meth:`ended`)."""
        self._late.append(notice)

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
            self._notice(self._gone, replica_id, "replica_gone")

    def troubled(self, replica_id: str, trouble: Trouble) -> None:
        """A request failed at this replica, or its stream hangs. Does not wait; a lost notice is
        not repeated, and the next failure sends another."""
        if len(self._troubled) >= MAX_KEYS:
            self._count("troubled", "full")
            return
        self._troubled.append(TroubleNotice(replica_id, trouble))
        self._send_notices_soon()

    async def close(self) -> None:
        """Send pending notices, and stop. The actors keep running."""
        if self._notice_task is not None:
            await self._notice_task
        if self._sync_task is not None:
            await self._sync_task
        self._queries.fail_queued()
        await self._channel.close()
        await self._link.close()
        await self._observer.close()

    async def _send_queries(self, queries: list[RouteQuery], left_s: float) -> list[RouteDecision]:
        self._metrics.batches.observe(len(queries))
        reply: RouteReply
        if self._channel.open:
            reply = await self._channel.route(queries, left_s)
        else:
            self._channel.connect_soon()
            reply = await self._link.call(
                "route", queries, timeout_s=left_s, on_late=partial(self._release_late, queries)
            )
        self._note(reply)
        return list(reply.decisions)

    async def _find_endpoint(self) -> Endpoint:
        endpoint: Endpoint = await self._link.call("endpoint", timeout_s=NOTICE_TIMEOUT_S)
        return endpoint

    def _note(self, reply: RouteReply | SyncReply) -> None:
        """Keep the closed and quarantined replicas that come with the controller's answer."""
        if reply.closed is not None:
            self._closed = frozenset(reply.closed)
        self._quarantined = frozenset(reply.quarantined)
        self._told_s = self._clock()

    def _release_late(self, queries: list[RouteQuery], reply: RouteReply) -> None:
        for query, decision in zip(queries, reply.decisions, strict=True):
            self._release_unwanted(query, decision)

    def _release_unwanted(self, query: RouteQuery, decision: RouteDecision) -> None:
        if decision.replica_id is not None:
            self.release(query.key)
        if decision.prefill_id is not None:
            self.release(query.prefill_key)

    async def _sync(self) -> None:
        """Send the endings and late notices, and ask about the requests that wait."""
        endings, late = tuple(self._ended), tuple(self._late)
        self._ended.clear()
        self._late.clear()
        try:
            reply: SyncReply = await self._call(
                "sync", endings, late, self._waits(), timeout_s=NOTICE_TIMEOUT_S
            )
        except NoAnswerError:
            # Endings are sent again with the next push, the latest MAX_ENDINGS of them. Late
            # notices are dropped: a late request is reported again by its ending.
            self._ended = deque((*endings, *self._ended), maxlen=MAX_ENDINGS)
        except ValueError as error:
            _log.warning("the controller refused sync: %s", error)
        else:
            self._note(reply)
            self._leaving(reply.leaving)
            if reply.late:
                self._missing(reply.late)
        finally:
            self._sync_task = None

    async def _answer(
        self, method: str, *args: Any, timeout_s: float, to: Link | None = None
    ) -> Any:
        try:
            return await self._call(method, *args, timeout_s=timeout_s, to=to)
        except NoAnswerError:
            return None

    async def _call(self, method: str, *args: Any, timeout_s: float, to: Link | None = None) -> Any:
        """Call and count. ``to``: the controller if not given.

        Raises:
            NoAnswerError, ValueError: as :meth:`Link.call`.
        """
        try:
            answer = await (to or self._link).call(method, *args, timeout_s=timeout_s)
        except NoAnswerError as error:
            self._count(method, error.reason)
            raise
        except ValueError:
            self._count(method, "refused")
            raise
        self._count(method, "answered")
        return answer

    async def _deliver(self, method: str, *args: Any) -> None:
        try:
            await self._delivered(method, *args)
        except ValueError as error:
            _log.warning("the controller refused %s: %s", method, error)

    async def _delivered(self, method: str, *args: Any) -> bool:
        try:
            await self._call(method, *args, timeout_s=NOTICE_TIMEOUT_S)
        except NoAnswerError:
            return False
        return True

    def _notice(self, pending: dict[Any, None], item: Any, method: str) -> None:
        if len(pending) >= MAX_KEYS:
            self._count(method, "full")
            return
        pending[item] = None
        self._send_notices_soon()

    def _send_notices_soon(self) -> None:
        if self._notice_task is None:
            self._notice_task = asyncio.get_running_loop().create_task(self._send_notices())

    async def _send_notices(self) -> None:
        """Send the pending notices until none is left; one call at a time."""
        try:
            while self._released or self._gone or self._troubled:
                released, self._released = list(self._released), {}
                gone, self._gone = list(self._gone), {}
                troubled, self._troubled = self._troubled, []
                if released:
                    await self._deliver("release", released)
                if gone:
                    await self._deliver("replica_gone", gone)
                if troubled:
                    await self._deliver("troubled", self._source, troubled)
        finally:
            self._notice_task = None

    def _count(self, method: str, outcome: str) -> None:
        self._metrics.outcomes.labels(method, outcome).inc()


def _nothing(*_: object) -> None:
    """A callback that is not needed."""
