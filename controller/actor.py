"""The central actor: it tracks every replica's queue and decides where each request goes.

``Controller`` is a plain class, which ``discovery`` wraps as a Ray actor. Its methods do not
await while they change state, so two decisions never interleave. Nothing is on disk: after a
restart the replicas' hellos restore the state."""

from __future__ import annotations

import asyncio
import pickle
import secrets
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import msgspec
import ray.util

from sluice.controller.config import ControllerConfig, fingerprint_of
from sluice.controller.observability.decision_log import DecisionLog, ending_shown
from sluice.controller.observability.readings import Detail, Figures, Readings
from sluice.controller.observability.recent_decisions import (
    Counters,
    DecisionRecord,
    LatestDecisions,
    RecentDecisions,
    RequestClasses,
)
from sluice.controller.observability.traffic import RecordedDecisions, Traffic
from sluice.controller.state.drains import Drains, Roles, drain_of, leaving, left_at
from sluice.controller.state.mirror import Mirror, late_of
from sluice.controller.state.promises import PromiseLog
from sluice.controller.state.quarantine import Quarantine
from sluice.controller.transport.channel import Endpoint, RouteServer
from sluice.controller.transport.checks import (
    Ids,
    Keys,
    LateNotices,
    Notices,
    RequestEndings,
    TurnEnds,
    Uses,
    Waits,
    checked,
    checked_delta,
    checked_query,
    short,
)
from sluice.protocol.messages import (
    MAX_QUERIES,
    FaultNotice,
    FirstTokenWait,
    Hold,
    LateNotice,
    QuotaUse,
    ReplicaDelta,
    ReplicaHello,
    ReportReply,
    RequestEnding,
    RouteReply,
    SyncReply,
    decode_report,
)
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.fleet.fleet import Fleet, FleetSettings
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.cold_start import ColdStart
from sluice.scheduling.placement.loops import LoopPart, LoopPromises, LoopTurn, LoopTurnEnd
from sluice.scheduling.placement.output_lengths import OutputLengths
from sluice.scheduling.placement.placer import MAX_TOGETHER, Placer
from sluice.scheduling.placement.quotes import Quote
from sluice.scheduling.placement.windows import Leftover, SpareTime, line_s
from sluice.scheduling.request.job import (
    DECLINED,
    INVALID_QUERY,
    STAYS,
    Id,
    Key,
    RouteDecision,
    RouteQuery,
)
from sluice.scheduling.roles import Role
from sluice.scheduling.tenancy.leaky_bucket import Bucket
from sluice.telemetry.records import RecordLog

# How much of their rate limits API keys have used, over all routers.
#
# A limit is a leaky bucket: use fills it, it drains at the limit's rate, and use that would make
# it overflow is refused. Each router keeps its own buckets, so that no request waits for a
# message. About once a second it reports what it has added and receives the fill level of the
# fleet's bucket. In between, routers do not know each other's use: together they may admit more
# than fits. The excess still counts: the fleet's bucket holds it, and drains it at the same rate.

MAX_ACCOUNTS = 1 << 16
"""Most buckets. Empty ones are not kept."""


class Quotas:
    """The buckets of the fleet."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def share(self, uses: Sequence[QuotaUse], now_s: float) -> list[float]:
        """Add a router's uses; the fill level of each of their buckets, in order.
        ``O(len(uses))``, occasionally ``O(buckets)``. Raises ValueError: too many buckets."""
        if len(self._buckets) + len(uses) > MAX_ACCOUNTS:
            self._drop_empty(now_s)
            if len(self._buckets) + len(uses) > MAX_ACCOUNTS:
                raise ValueError(f"there are more than {MAX_ACCOUNTS} accounts")
        return [self._take(use, now_s) for use in uses]

    def _take(self, use: QuotaUse, now_s: float) -> float:
        bucket = self._buckets.get(use.account)
        if bucket is None:
            bucket = self._buckets[use.account] = Bucket(now_s)
            bucket.add(use.level)
        else:
            bucket.drain(now_s, use.per_s)
            bucket.add(use.used)
        return bucket.drain(now_s, use.per_s)

    def _drop_empty(self, now_s: float) -> None:
        for account, bucket in list(self._buckets.items()):
            if bucket.drain(now_s, bucket.per_s) <= 0:
                del self._buckets[account]


SETTLING_S = 5.0
"""Time after a start in which the replicas of an earlier run register again, seconds."""


class Controller:
    """Mirror, ledger and decisions. ``clock``: monotonic seconds."""

    def __init__(
        self, config: ControllerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._last_call_s = clock()
        self._epoch = secrets.randbits(63)
        self._fleet = Fleet(
            FleetSettings(
                config.aged_after_s,
                config.stale_after_s,
                config.reservation_ttl_s,
            )
        )
        routing, admission = config.make_routing(), config.make_admission()
        self._recent = RecentDecisions() if config.shadow is None else RecordedDecisions()
        self._calibration = Calibration(config.promise_level)
        self._lengths = OutputLengths(config.promise_level)
        self._promises = PromiseLog(config.promise_level)
        self._cold_start = (
            ColdStart(config.startup_s, self._last_call_s + SETTLING_S)
            if config.startup_s
            else None
        )
        self._placer = Placer(
            self._fleet,
            routing,
            admission,
            self._calibration,
            self._lengths,
            self._cold_start,
        )
        self._mirror = Mirror(
            self._epoch, self._fleet, config.forget_after_s, ended=self._placer.shares.settle
        )
        self._drains = Drains(self._fleet)
        self._counters = counters = Counters()
        demand = self._placer.demand
        self._roles = Roles(self._mirror, self._fleet, demand, counters.changed)
        self._quarantine = Quarantine(self._mirror, self._fleet)
        self._classes = RequestClasses()
        self._quotas = Quotas()
        self._loops = LoopPromises(config.promise_level)
        self._spare = SpareTime(config.promise_level)
        window_s = admission.window_s if admission is not None else 0.0
        self._server = RouteServer(self._route, self._read_report, clock, window_s)
        self._readings = Readings(
            self._counters,
            self._mirror,
            self._fleet,
            self._placer,
            self._quarantine,
            self._calibration,
            self._promises,
            self._classes,
            self._loops,
        )
        self._started_s = clock()
        self._log: RecordLog | None = None
        if config.decision_log is not None:
            self._log = RecordLog(config.decision_log / f"decisions-{self._epoch:016x}.jsonl")
            self._placer.explains = True
            self._explained = DecisionLog(routing).explained

    @property
    def silent_s(self) -> float:
        """Seconds since any replica or client last spoke to it."""
        return self._clock() - self._last_call_s

    async def route(self, queries: list[RouteQuery]) -> RouteReply:
        """Decide on each query and reserve what it takes; up to ``MAX_TOGETHER`` are decided
        together. A malformed query is answered with the reason ``invalid_query``. Raises
        ValueError: not a list, or more than ``MAX_QUERIES``."""
        if not isinstance(queries, list) or len(queries) > MAX_QUERIES:
            raise ValueError(f"queries must be a list of at most {MAX_QUERIES}")
        found: list[RouteQuery | None] = []
        for query in queries:
            try:
                found.append(checked_query(query))
            except ValueError:
                found.append(None)
        return await self._server.window.route(found)

    async def quote(self, query: RouteQuery, hold_s: float = 0.0) -> Quote:
        """What would be decided on a query now, see ``Placer.quote``. Raises ValueError: malformed,
        or out of range."""
        with self._counters.refusals():
            query, hold_s = checked_query(query), checked("hold_s", hold_s, Hold)
        return self._placer.quote(query, self._touch(), hold_s)

    async def endpoint(self) -> Endpoint:
        """Address at which :meth:`route` and :meth:`report` are served over a plain connection; see
        :mod:`sluice.controller.transport.channel`."""
        self._touch()
        return await self._server.endpoint(ray.util.get_node_ip_address())

    async def hello(self, hello: ReplicaHello) -> ReportReply:
        """Register or replace a replica. Raises ValueError: malformed, or too many replicas are
        known."""
        now_s = self._touch()
        self._forget_silent(now_s)
        with self._counters.refusals():
            self._mirror.hello(hello, now_s)
        self._roles.greet(hello)
        self._drains.greet(hello.replica_id, hello.closed)
        self._quarantine.reported(hello, (), now_s)
        self._counters.reported("hello")
        if self._cold_start is not None and not hello.draining:
            self._cold_start.served(now_s)
        return self._reply(hello.replica_id, resync=False)

    async def report(self, delta: ReplicaDelta) -> ReportReply:
        """Apply what changed in a replica, or ask for a hello. Raises ValueError: malformed."""
        with self._counters.refusals():
            delta = checked_delta(delta)
        return self._report(delta)

    async def goodbye(self, replica_id: str) -> None:
        """A replica has drained and ends: forget it."""
        checked("replica_id", replica_id, Id)
        self._touch()
        self._mirror.forget(replica_id)
        self._drains.forget(replica_id)
        self._roles.forget(replica_id)
        self._quarantine.forget(replica_id)

    async def replica_gone(self, replica_ids: Sequence[str]) -> None:
        """Stop choosing replicas that a router saw leave. Raises ValueError: not a list of ids."""
        replica_ids = checked("replica_ids", replica_ids, Ids)
        self._mirror.mark_gone(replica_ids, self._touch())

    async def faulted(self, source: int, notices: Sequence[FaultNotice]) -> None:
        """The router ``source`` saw requests fail or hang. Raises ValueError: malformed, or no
        source."""
        checked("source", source, Key)
        notices = checked("notices", notices, Notices)
        self._quarantine.faulted(source, notices, self._touch())

    async def release(self, keys: Sequence[int]) -> None:
        """A router abandoned these requests, or sent them elsewhere. Raises ValueError: no keys."""
        keys = checked("keys", keys, Keys)
        self._quarantine.released(keys, self._touch())
        self._fleet.release(keys)
        self._classes.ended(keys)

    async def share_quotas(self, uses: list[QuotaUse]) -> list[float]:
        """Add the rate-limit use of a router's clients; how full each of these buckets is over
        all routers. Raises ValueError: malformed, or over a limit."""
        with self._counters.refusals():
            return self._quotas.share(checked("uses", uses, Uses), self._touch())

    async def loop_turn(self, turn: LoopTurn) -> LoopPart:
        """A turn of a tool loop has arrived at a router: its part of the loop's deadline. Raises
        ValueError: malformed."""
        with self._counters.refusals():
            turn = checked("turn", turn, LoopTurn)
        return self._loops.begin(turn, self._touch())

    async def sync(
        self,
        endings: Sequence[RequestEnding] = (),
        late: Sequence[LateNotice] = (),
        waits: Sequence[FirstTokenWait] = (),
        turns: Sequence[LoopTurnEnd] = (),
    ) -> SyncReply:
        """Take a router's endings, late notices and ended turns of loops since its last call. The
        reply names the requests of ``waits`` that are predicted to miss their TTFT, and the
        replicas that leave. Raises ValueError: malformed, or over a limit."""
        now_s = self._touch()
        with self._counters.refusals():
            endings = checked("endings", endings, RequestEndings)
            late = checked("late", late, LateNotices)
            waits = checked("waits", waits, Waits)
            turns = checked("turns", turns, TurnEnds)
        self._recent.ended(endings)
        for notice in late:
            self._calibration.behind(*notice, now_s)
        for ending in endings:
            self._learn(ending, now_s)
            if self._log is not None:
                ended = {"ended": ending_shown(ending)}
                self._log.write({"request_id": ending.request_id, "at_s": now_s, **ended})
        for turn in turns:
            self._loops.end(turn, now_s)
        self._loops.expire(now_s)
        missing: tuple[int, ...] = ()
        if waits:
            has_cells = self._config.cells > 1
            missing = late_of(waits, self._mirror, self._fleet, now_s, has_cells)
        self._readings.note_load(now_s)
        if now_s >= self._spare.due_s:
            self._spare.note(self._placer.demand.load(self._fleet, now_s))
        quarantined, slack_s = self._quarantine.names, self._slack_s(now_s)
        left = leaving(self._mirror, self._fleet)
        return SyncReply(self._closed(), quarantined, missing, slack_s, left)

    async def demand(self, role: Role | None = None) -> Load:
        """The load on all replicas together, or on the replicas of ``role``, without what routers
        count. The observer adds that. ``O(replicas)``."""
        now_s = self._look()
        return self._placer.demand.load(self._fleet, now_s, role=role)

    async def leftover(self, query: RouteQuery, in_flight: int) -> Leftover | None:
        """What promised requests leave for batches, and what a line like ``query`` takes of it
        beside others of ``in_flight``; ``None``: nothing is known yet. Raises ValueError:
        malformed."""
        with self._counters.refusals():
            query = checked_query(query)
            in_flight = checked("in_flight", in_flight, Key)
        now_s, spare = self._look(), self._spare.within()
        if spare is None:
            return None
        tokens = self._lengths.of(query).mean
        line = line_s(self._fleet, now_s, float(query.prompt_tokens), tokens, in_flight)
        return Leftover(line, spare)

    async def figures(self) -> Figures:
        """The numbers of its metrics, for the observer. ``O(replicas)``."""
        return self._readings.figures(self._look())

    async def detail(self) -> Detail:
        """Its state, for the observer. ``O(live requests)``; decisions are made meanwhile."""
        now_s = self._look()
        up_s = now_s - self._started_s
        return await self._readings.detail(now_s, up_s, self._recent.took_s())

    async def latest_decisions(self, limit: int) -> LatestDecisions:
        """The last decisions, at most ``limit``, for the observer."""
        now_s = self._touch()
        pickled = []
        for record in self._recent.latest(limit):
            pickled.append(pickle.dumps(record, pickle.HIGHEST_PROTOCOL))
            await asyncio.sleep(0)  # decisions have priority over this listing
        return LatestDecisions(now_s, pickled)

    async def traffic(self, with_replicas: bool = False) -> Traffic | None:
        """What was recorded for the shadow policies since the last call, at most a part of it;
        ``None`` without any."""
        now_s = self._touch()
        if not isinstance(self._recent, RecordedDecisions):
            return None
        return self._recent.read(self._mirror.replicas, now_s, with_replicas)

    async def drain(
        self, replica_id: str, drain: bool, spare_last: bool = False
    ) -> dict[str, Any] | None:
        """Close a replica to new requests, or open it again. The setting lasts until the replica
        says goodbye, over restarts of this controller too (``controller.state.drains``).

        Returns the requests left there and whether it was spared as the ``last`` open one (with
        ``spare_last``); ``None``: unknown replica. An unreachable one can be opened again.
        Raises ValueError: ``replica_id`` is no id, or ``drain`` is no flag."""
        checked("replica_id", replica_id, Id)
        if not isinstance(drain, bool):
            raise ValueError(f"drain must be true or false, got {short(drain)}")
        now_s = self._look()
        reopened = not drain and self._drains.take_back(replica_id)
        known = replica_id in self._mirror.replicas
        if not known and not reopened:
            return None
        spared = drain and spare_last and self._is_last(replica_id, now_s)
        if drain and not spared:
            self._drains.drain(replica_id)
        found = drain_of(self._mirror, self._fleet, replica_id) if known else None
        left = left_at(self._fleet, replica_id)
        return {
            "replica_id": replica_id,
            "draining": found is not None,
            "drain": found,
            "last": spared,
            **left,
        }

    async def remembers(self, replica_id: str) -> bool | None:
        """Whether a replica remembers its last setting of :meth:`drain`, over a restart of this
        controller; ``None`` for an unknown replica."""
        self._touch()
        known = replica_id in self._mirror.replicas
        return self._drains.remembered(replica_id) if known else None

    async def fingerprint(self) -> str:
        """See :func:`fingerprint_of`."""
        self._touch()
        return fingerprint_of(self._config)

    def _touch(self) -> float:
        """Note that a replica or client called. Returns the time, monotonic seconds."""
        now_s = self._clock()
        if now_s - self._last_call_s > self._config.stale_after_s:
            # No heartbeat arrived: this process stalled, and the reports that would confirm
            # reservations may still be in its sockets.
            self._fleet.ledger.postpone(now_s - self._last_call_s)
        self._last_call_s = now_s
        return now_s

    def _look(self) -> float:
        """As :meth:`_touch`; also forget what is too old to be shown."""
        now_s = self._touch()
        self._forget_silent(now_s)
        self._fleet.expire(now_s)
        return now_s

    def _is_last(self, replica_id: str, now_s: float) -> bool:
        """Whether no other replica takes requests, and this one does."""
        rows: list[int] = self._fleet.candidates(now_s).tolist()
        return rows == [self._fleet.row_of.get(replica_id)]

    def _forget_silent(self, now_s: float) -> None:
        forgotten = self._mirror.forget_silent(now_s)
        self._drains.silent(forgotten, now_s)
        for replica_id in forgotten:
            self._roles.forget(replica_id)
            self._quarantine.forget(replica_id)
        self._quarantine.advance(now_s)

    def _route(self, queries: list[RouteQuery | None]) -> RouteReply:
        """Decide on each query; ``None``: a malformed one."""
        now_s = self._touch()
        decisions: list[RouteDecision] = []
        if len(queries) == 1 and queries[0] is not None:
            decisions.append(self._decide(queries[0], None, 0.0))
        else:
            for start in range(0, len(queries), MAX_TOGETHER):
                decisions += self._together(queries[start : start + MAX_TOGETHER])
        slack_s = self._fleet.slack_s(now_s) if self._config.cells > 1 else None
        quarantined = self._quarantine.names
        return RouteReply(self._epoch, tuple(decisions), self._closed(), quarantined, slack_s)

    def _together(self, queries: list[RouteQuery | None]) -> list[RouteDecision]:
        """Decide on queries, at most ``MAX_TOGETHER``, in the order that is best."""
        started_s = self._clock()
        valid = [query for query in queries if query is not None]
        turns = self._placer.order(valid, started_s)
        # Each decision takes its part of the order's time.
        part_s = (self._clock() - started_s) / max(1, len(turns))
        made = {}
        for index, row in turns:
            made[index] = self._decide(valid[index], row, part_s)
        found = iter([made[index] for index in range(len(valid))])
        return [self._invalid() if query is None else next(found) for query in queries]

    def _learn(self, ending: RequestEnding, now_s: float) -> None:
        """Learn from the outcome of a promise and from the output length. A failed request teaches
        no times, a cancelled one only its TTFT."""
        self._promises.ended(ending, now_s)
        name = ending.request_id
        quotes, seen_s = self._placer.quotes, (ending.ttft_s, ending.tpot_s, ending.e2e_s)
        judged_s = ending.judged_s or seen_s
        if ending.outcome == "ok":
            quotes.ended(name, seen_s)
            self._calibration.ended(name, *judged_s, now_s)
        elif ending.outcome == "cancelled":
            quotes.ended(name, (ending.ttft_s, None, None))
            self._calibration.ended(name, judged_s[0], None, None, now_s)
        else:
            quotes.ended(name, None)
            self._calibration.dropped(name)
        most = ending.most_tokens or inf
        ended = ending.outcome == "ok" and ending.tokens < most
        self._lengths.observe(
            *(ending.service_class, ending.tenant, ending.tokens, ended, ending.expected_tokens)
        )

    def _closed(self) -> tuple[str, ...] | None:
        settling = self._clock() - self._started_s < SETTLING_S
        if not self._fleet.row_of or (settling and not len(self._drains)):
            return None
        return self._fleet.closed

    def _slack_s(self, now_s: float) -> float | None:
        return self._fleet.slack_s(now_s) if self._config.cells > 1 else None

    def _read_report(self, data: msgspec.Raw) -> ReportReply:
        with self._counters.refusals():
            delta = decode_report(data)
        return self._report(delta)

    def _report(self, delta: ReplicaDelta) -> ReportReply:
        now_s = self._touch()
        with self._counters.refusals():
            applied = self._mirror.delta(delta, now_s)
        self._counters.reported("applied" if applied else "resync")
        if applied:
            self._classes.ended(delta.finished)
            self._quarantine.reported(delta, delta.finished, now_s)
            self._drains.answered(delta.replica_id)
        self._roles.advance(now_s)
        return self._reply(delta.replica_id, resync=not applied)

    def _reply(self, replica_id: str, resync: bool) -> ReportReply:
        closed, role = replica_id in self._fleet.closed, self._roles.of(replica_id)
        return ReportReply(self._epoch, resync, closed, role)

    def _invalid(self) -> RouteDecision:
        decision = RouteDecision(None, INVALID_QUERY)
        self._counters.decided(decision, 0.0)
        return decision

    def _decide(self, query: RouteQuery, at: int | None, ordered_s: float) -> RouteDecision:
        """Decide on a query, at the replica's row ``at`` if that can promise it, after
        ``ordered_s`` seconds for its place among others."""
        started_s = self._clock()
        if started_s >= self._quarantine.look_s:
            self._quarantine.advance(started_s)
        decision = self._promises.made(query, self._placer.place(query, started_s, at))
        if self._quarantine.names:
            self._quarantine.placed(query, decision, started_s)
        took_s = self._clock() - started_s + ordered_s
        self._counters.decided(decision, took_s)
        if decision.reason in (STAYS, DECLINED):
            # The log keeps why the request is where it is, or what another cell decides.
            return decision
        self._recent.note(query, decision, started_s, took_s, self._placer.inputs)
        if self._log is not None:
            record = DecisionRecord(query, decision, started_s, took_s, 1, self._placer.inputs)
            (shown,) = self._explained([record], started_s)
            self._log.write({**shown, "at_s": started_s})
        if decision.replica_id is not None:
            self._classes.note(query.key, query.slo.service_class)
        if decision.prefill_id is not None:
            self._classes.note(query.prefill_key, query.slo.service_class)
        return decision
