"""A workload through several simulated engines behind a router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isnan, nan
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.autoscaling import Load, Pool, State
from sluice.scheduling.autoscaling.role_shares import (
    LOOK_EVERY_S,
    Means,
    RoleShares,
    members_of,
    split_of,
)
from sluice.scheduling.batching import BatchPolicy
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.placement.migration import RunningStream, streams_to_move
from sluice.scheduling.placement.output_lengths import LengthPredictor
from sluice.scheduling.placement.placer import MAX_TOGETHER
from sluice.scheduling.request.job import MAX_TOKENS, UNATTAINABLE, RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.kernels import ARRIVAL, BEST_EFFORT, PROMISED
from sluice.scheduling.request.objective import SLO, TPOTAnchor
from sluice.scheduling.roles import ROLES, Role
from sluice.scheduling.routing import RoutingPolicy
from sluice.simulation.config import (
    Autoscaling,
    ClusterConfig,
    EngineConfig,
    WhenUnattainable,
)
from sluice.simulation.engine import Belief, Truth, VirtualEngine
from sluice.simulation.loops import VirtualLoops
from sluice.simulation.mirror import (
    PREFILL_KEYS,
    CellMirrors,
    SLOCounter,
    VirtualMirror,
    late,
    observed,
)
from sluice.simulation.program_queue import ProgramQueue
from sluice.simulation.replica import Events, Incident, Replicas, Shared, VirtualReplica
from sluice.simulation.requests import Requests, Retry
from sluice.simulation.run import TOO_LONG, Result, Size, result_of, sides
from sluice.simulation.workload import Workload


class Scaler:
    """Samples a role's load every ``interval_s`` and applies its policy. A new replica serves
    ``startup_s`` later; scaling down cancels pending orders, the latest first, then drains."""

    def __init__(
        self,
        config: Autoscaling,
        role: Role,
        events: Events,
        load: Callable[[float], Load],
        change: Callable[[int], None],
        replicas: int,
    ) -> None:
        self.role = role
        self.sizes = [Size(events.now_s, replicas, "at the start")]
        """The wanted numbers of replicas, with the times from which they are wanted."""
        self._config = config
        self._policy = config.make(role)
        self._events = events
        self._load = load
        self._change = change
        self._state: State = {}
        # Orders that do not serve yet, by number: when they were made.
        self._ordered: dict[int, float] = {}
        self._orders = 0
        self._started_s = 0.0
        events.after(config.interval_s, self._look)

    @property
    def target(self) -> int:
        """How many replicas there should be."""
        return self.sizes[-1].replicas

    def started_s(self, end_s: float) -> float:
        """Sum until ``end_s`` of the times for which orders did not serve yet."""
        return self._started_s + sum(end_s - at_s for at_s in self._ordered.values())

    def _look(self) -> None:
        config, now_s = self._config, self._events.now_s
        pool = Pool(self.target, config.least, config.most)
        decision = self._policy.decide(self._load(now_s), pool, self._state)
        self._state = decision.state
        change = decision.replicas - self.target
        if change:
            self.sizes.append(Size(now_s, decision.replicas, decision.reason))
        for _ in range(change):
            self._order()
        for _ in range(-change):
            if self._ordered:
                self._end_order(max(self._ordered))
            else:
                self._change(-1)
        self._events.after(config.interval_s, self._look)

    def _order(self) -> None:
        number, self._orders = self._orders, self._orders + 1
        self._ordered[number] = self._events.now_s
        self._events.after(self._config.startup_s, partial(self._ready, number))

    def _ready(self, number: int) -> None:
        if number in self._ordered:
            self._end_order(number)
            self._change(1)

    def _end_order(self, number: int) -> None:
        self._started_s += self._events.now_s - self._ordered.pop(number)


class RoleChanger:
    """Changes roles by the load of all replicas, as ``controller.state.drains`` does; of another
    role an engine has another policy."""

    def __init__(
        self,
        shares: RoleShares,
        make_batch: Callable[[Role], BatchPolicy],
        events: Events,
        mirror: VirtualMirror,
        replicas: Mapping[str, VirtualReplica],
    ) -> None:
        self.sizes: dict[str, list[Size]] = {role: [] for role in ROLES}
        """The number of replicas of each role, with the times from which they had it."""
        self._shares = shares
        self._make_batch = make_batch
        self._events = events
        self._mirror = mirror
        self._replicas = replicas
        self._means: Means | None = None
        events.after(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now_s, fleet = self._events.now_s, self._mirror.fleet
        load = self._mirror.load_of_all(now_s)
        change = self._shares.decide(load, members_of(fleet, now_s), self._means)
        self._means = change.means
        for name, role in change.roles.items():
            self._mirror.assign(name, role)
            self._replicas[name].follow(role, self._make_batch(role))
        for role, count in zip(ROLES, split_of(members_of(fleet, now_s)), strict=True):
            sizes = self.sizes[role]
            if not sizes or sizes[-1].replicas != count:
                sizes.append(Size(now_s, count, change.reason))
        self._events.after(LOOK_EVERY_S, self._look)


class Endings:
    """Pushes endings and late promised requests every ``interval_s`` where the mirror learns
    margins."""

    def __init__(
        self,
        requests: Requests,
        mirror: VirtualMirror | CellMirrors,
        events: Events,
        interval_s: float,
    ) -> None:
        self._requests = requests
        self._mirror = mirror
        self._events = events
        self._interval_s = interval_s
        # Promised requests in progress, and requests that ended since the last push.
        self._promised: set[int] = set()
        self._ended: list[int] = []
        self._pushes = False

    def promised(self, key: int) -> None:
        """A request is promised its objective."""
        if self._mirror.calibration is not None:
            self._promised.add(key)
            self._push_soon()

    def ended(self, key: int) -> None:
        """A request ended."""
        if self._mirror.calibration is not None:
            self._promised.discard(key)
            self._ended.append(key)
            self._push_soon()

    def _push_soon(self) -> None:
        if not self._pushes:
            self._pushes = True
            next_s = (self._events.now_s // self._interval_s + 1) * self._interval_s
            # 0.5 // 0.1 is 4, so the product may be now.
            later_s = 0.0 if next_s > self._events.now_s else self._interval_s
            self._events.at(next_s + later_s, self._push)

    def _push(self) -> None:
        """Report late promised requests, and request endings since the last push."""
        requests, now_s = self._requests, self._events.now_s
        self._pushes = False
        for key in sorted(self._promised):
            self._mirror.by(key).behind(key, *late(requests, key), now_s)
        for key in self._ended:
            arrival = requests.arrivals[key]
            found = observed(requests, key)
            name, tokens = arrival.slo.service_class, arrival.output_tokens
            self._mirror.by(key).learn(key, found, name, tokens, now_s)
        self._ended.clear()
        if self._promised:
            self._push_soon()


RECENT_TOKENS = 32
"""Most tokens of which a stream's recent TPOT is the mean."""


class Migrations:
    """The streams that moved, move or could move; requests of several stages never do. ``send``
    transfers a stream's KV; ``end`` is called when it has arrived."""

    def __init__(
        self,
        requests: Requests,
        mirror: VirtualMirror | CellMirrors,
        events: Events,
        config: ClusterConfig,
        named: Mapping[str, VirtualReplica],
        send: Callable[[VirtualReplica, VirtualReplica, int], None],
    ) -> None:
        self.done = 0
        """Moves so far."""
        self._requests = requests
        self._mirror = mirror
        self._events = events
        self._interval_s = config.push_interval_s
        self._named = named
        self._send = send
        self._left: dict[int, list[str]] = {}
        self._moved_s: dict[int, float] = {}
        # The replica that each stream is leaving.
        self._moving: dict[int, VirtualReplica] = {}

    def start(self) -> None:
        """Look for streams to move with each push of routers, from now on."""
        self._events.after(self._interval_s, self._look)

    def _look(self) -> None:
        for replica in tuple(self._named.values()):
            if replica.alive and replica.role != "prefill":
                self._move_some(replica)
        self.start()

    def _move_some(self, source: VirtualReplica) -> None:
        """Ask for another replica for the streams that the policy chooses. ``O(live requests)``."""
        now_s, requests = self._events.now_s, self._requests
        seen = {
            key: self._seen(key, emitted, now_s)
            for key, emitted in source.engine.decoding()
            if key not in self._moving and not requests.arrivals[key].stages
        }
        keys, streams = list(seen), list(seen.values())
        under_way = sum(each is source for each in self._moving.values())
        for place in streams_to_move(streams, under_way, now_s, source.draining):
            query = self._query(keys[place], streams[place], source, now_s)
            placed = self._mirror.place(query, now_s)
            target = self._named.get(placed.replica_id or "")
            if target is None or target is source:
                continue
            if not streams[place].pays(placed.kv_transfer_s):
                self._mirror.release(query.key)
                continue
            self._moving[query.key] = source
            source.give_away(query.key, partial(self._stopped, source, target, query, placed))

    def _stopped(
        self,
        source: VirtualReplica,
        target: VirtualReplica,
        query: RouteQuery,
        placed: RouteDecision,
    ) -> None:
        """A stream has stopped at ``source``, and goes to ``target``."""
        key, ttft_s = query.key, placed.predicted_ttft_s
        self._left.setdefault(key, []).append(source.name)
        self._moved_s[key] = self._events.now_s
        promised_s = nan if ttft_s is None else query.waited_s + ttft_s
        best_effort = placed.tier is Tier.BEST_EFFORT
        self._requests.serve_as(key, best_effort, promised_s, query.slo, placed.planned)
        self.done += 1
        self._send(source, target, key)

    def end(self, key: int) -> bool:
        """A stream has arrived, or any request has ended. Returns whether it was moving."""
        source = self._moving.pop(key, None)
        if source is not None and source.alive and source.draining:
            self._move_some(source)
        return source is not None

    def _seen(self, key: int, emitted: int, now_s: float) -> RunningStream:
        requests = self._requests
        slo = requests.arrivals[key].slo
        start = int(requests.offsets[requests.first_stage[key]])
        # All that its client has, of earlier replicas, too.
        times_s = requests.emitted_s[start : start + emitted]
        recent = times_s[-RECENT_TOKENS - 1 :]
        token_s = float(recent[-1] - recent[0]) / (len(recent) - 1) if len(recent) > 1 else 0.0
        tpot_s = slack_s = e2e_left_s = inf
        if requests.rows[key, PROMISED]:
            _, tpot_s, e2e_s, _ = slo.columns
            if tpot_s < inf:
                slack_s = float(times_s[0]) + emitted * tpot_s - now_s
            e2e_left_s = requests.arrivals[key].arrival_s + e2e_s - now_s
        return RunningStream(
            inf,
            token_s,
            tpot_s,
            slack_s,
            e2e_left_s,
            slo.tpot_anchor is TPOTAnchor.MEAN,
            len(self._left.get(key, ())),
            self._moved_s.get(key, -inf),
        )

    def _query(
        self, key: int, stream: RunningStream, replica: VirtualReplica, now_s: float
    ) -> RouteQuery:
        requests = self._requests
        arrival, terms = requests.arrivals[key], stream.terms
        row, slo, waited_s = requests.rows[key], arrival.slo, now_s - arrival.arrival_s
        if terms is not None:
            tpot_s = terms.tpot_s if terms.tpot_s < inf else slo.tpot_s
            slo = replace(slo, ttft_s=waited_s + terms.pause_s, tpot_s=tpot_s)
        elif slo.ttft_s is not None:
            slo = replace(slo, ttft_s=waited_s + slo.ttft_s)
        tiers = frozenset(Tier)
        if row[PROMISED] or row[BEST_EFFORT]:
            tiers = frozenset({Tier.GUARANTEED if row[PROMISED] else Tier.BEST_EFFORT})
        return RouteQuery(
            key,
            slo,
            replica.engine.context_tokens(key),
            waited_s,
            tiers,
            avoid=tuple(self._left.get(key, ())),
            tenant=arrival.tenant,
            weight=arrival.weight,
            client_request_id=str(key),
            moves_from=replica.name,
            brings_kv=True,
        )


NO_ATTEMPT_LEFT = "the last replica that it was given failed"
NO_REPLICA = "no replica was there for too long"
REFUSED = "refused at admission"
LOOP_ENDED = "an earlier turn of its loop failed"

RETRY_PAUSE_S = 0.02
"""Pause before a request is placed again; it doubles."""

ACCEPT_S = 0.5
"""How long a client takes to take up an offer."""

_GOLDEN = 0.6180339887498949

QUEUE_LIMIT_S = 10.0
"""Longest wait of a request whose class queues."""


class Node(NamedTuple):
    """One replica: real step times, its limits, and the model that it plans with and reports."""

    truth: Truth
    belief: Belief
    engine: EngineConfig


class Cluster:
    """Places requests by a routing policy, runs the engines, and loses no request.

    A request whose replica fails is placed again, up to ``max_attempts``, and resumes after its
    emitted tokens. In a P/D pair the prefill replica keeps its blocks during the KV transfer; the
    decode replica computes the prompt's last token again, or all of it if the prefill replica
    fails. With ``migrate`` running streams move at the end of a step.

    Raises ValueError if roles change and ``config`` has several cells."""

    def __init__(
        self,
        requests: Requests,
        make_engine: Callable[[Role, int], VirtualEngine],
        routing: RoutingPolicy,
        config: ClusterConfig,
        rng: np.random.Generator,
        admission: AdmissionPolicy | None = None,
        autoscaling: Autoscaling | None = None,
        change_roles: Callable[..., RoleChanger] | None = None,
    ) -> None:
        self.events = Events()
        self.moved = 0
        self.split = 0
        self.fetched = 0
        self.ended = 0
        self._requests = requests
        self._config = config
        make_mirror: type[VirtualMirror] | type[CellMirrors]
        make_mirror = VirtualMirror if config.cells == 1 else CellMirrors
        self._mirror = make_mirror(config, routing, admission, requests.depths)
        self.loops = VirtualLoops(requests, config.loops, config.promise_level)
        self._attempts: dict[int, int] = {}
        self._retried: dict[int, int] = {}
        self._accepted: set[int] = set()
        # Time since which there has been no replica for a request.
        self._waiting_since: dict[int, float] = {}
        # Requests that wait at the router to be decided together.
        self._undecided: list[int] = []
        # Requests whose prompt is being computed for another replica, and that replica.
        self._targets: dict[int, VirtualReplica] = {}
        arrivals = enumerate(requests.arrivals)
        # Requests that arrive at a known time, in order; and how many each other one waits for.
        self._timed = iter([key for key, arrival in arrivals if not arrival.after])
        self._awaited = {key: len(each.after) for key, each in enumerate(requests.arrivals)}
        self._programs = ProgramQueue(config.in_flight) if config.in_flight else None
        shared = Shared(config, self.events, self._mirror, rng, self._finished, self._noticed)
        self.replicas = Replicas(shared, make_engine)
        self._named = self.replicas.named
        self._endings = Endings(requests, self._mirror, self.events, config.push_interval_s)
        self._judged = SLOCounter(requests)
        self.migrations = Migrations(
            requests, self._mirror, self.events, config, self._named, self._send
        )
        self.scalers = self._autoscale(autoscaling) if autoscaling is not None else []
        """The scaler of each role; empty without autoscaling."""
        self.changer: RoleChanger | None = None
        """Changes roles; ``None`` where they are fixed."""
        if change_roles is not None:
            if not isinstance(self._mirror, VirtualMirror):
                raise ValueError(f"cells must be 1 where roles change, got {config.cells}")
            self.changer = change_roles(self.events, self._mirror, self._named)

    def run(self, incidents: Sequence[Incident] = ()) -> float:
        """Run until every request has ended; return the time. Raises ValueError for an incident
        with a role that the cluster has not or a factor that is not positive."""
        for incident in incidents:
            self.events.at(incident.at_s, self.replicas.happening(incident))
        self._await_next()
        if self._config.migrate:
            self.migrations.start()
        while self.ended < len(self._requests):
            if not self.events.run_next():
                raise RuntimeError(f"the clock stopped with {self.ended} requests ended")
        return self.events.now_s

    # Arrival and placement.

    def _await_next(self) -> None:
        key = next(self._timed, None)
        if key is not None:
            arrive = partial(self._arrive, key)
            self.events.at(self._requests.arrivals[key].arrival_s, arrive)

    def _arrive(self, key: int) -> None:
        self._await_next()
        self._enter(key)

    def _arrive_after(self, key: int) -> None:
        """A turn arrives after those that it waited for."""
        self._requests.arrived_at(key, self.events.now_s)
        self._enter(key)

    def _enter(self, key: int) -> None:
        self._requests.predict(key)
        self.loops.begin(key, self.events.now_s)
        if self._loop_is_refused(key):
            self._end(key, REFUSED)
            return
        if self._programs is None:
            self._place(key)
            return
        turn = self._requests.arrivals[key].turn
        self._programs.join(key, 0 if turn is None else turn.program, self.events.now_s)
        self._place_next(self._programs)

    def _loop_is_refused(self, key: int) -> bool:
        part = self.loops.of(key)
        return part is not None and part.promised is False and self._when(key) != "best_effort"

    def _place_next(self, programs: ProgramQueue) -> None:
        """Place what may leave the router's queue."""
        while (key := programs.next(self.events.now_s)) is not None:
            self._place(key)

    def _follow(self, key: int) -> None:
        """A request that a turn waits for has ended; the turn ends, too, if one of them failed."""
        self._awaited[key] -= 1
        turn = self._requests.arrivals[key].turn
        if turn is None or self._awaited[key]:
            return
        if any(each in self._requests.failures for each in turn.after):
            self.events.after(0.0, partial(self._end, key, LOOP_ENDED))
        else:
            self.events.after(turn.gap_s, partial(self._arrive_after, key))

    def _place(self, key: int) -> None:
        """Ask the router where a request goes. With a window it waits there for others."""
        undecided = self._undecided
        undecided.append(key)
        if self._mirror.window_s <= 0.0 or len(undecided) >= MAX_TOGETHER:
            self._decide(undecided)
        elif len(undecided) == 1:
            self.events.after(self._mirror.window_s, partial(self._decide, undecided))

    def _decide(self, undecided: list[int]) -> None:
        """Decide on the requests that wait together, unless that has been done."""
        if undecided is not self._undecided:
            return
        self._undecided = []
        now_s = self.events.now_s
        queries = [self._query(key) for key in undecided]
        if self._config.quotes:
            for query in queries:
                self._requests.quoted[query.key] = self._mirror.quote(query, now_s).times_s
        for index, row in self._mirror.order(queries, now_s):
            self._placed(undecided[index], *self._decided(queries[index], now_s, row))

    def _decided(
        self, query: RouteQuery, now_s: float, row: int | None
    ) -> tuple[RouteQuery, RouteDecision]:
        """The query, or with the first alternative of its class that can be promised if it cannot
        be as it is, and the decision."""
        requests, key = self._requests, query.key
        accepts = self._config.accepts.get(query.slo.service_class, ())
        if not accepts or requests.begun(key) or requests.arrivals[key].stages:
            return query, self._mirror.place(query, now_s, row)
        for less in (None, *accepts):
            asked, tokens = query, requests.arrivals[key].output_tokens
            if less is not None:
                tokens = min(tokens, less.max_tokens or tokens)
                ttft_s, tpot_s, e2e_s = query.slo.times_s
                times_s = ttft_s and max(ttft_s, less.ttft_s), tpot_s and max(tpot_s, less.tpot_s)
                slo = replace(query.slo, ttft_s=times_s[0], tpot_s=times_s[1], e2e_s=e2e_s)
                asked = query._replace(slo=slo, output_tokens=tokens if less.max_tokens else 0)
            only = asked._replace(elsewhere=True, tiers=frozenset({Tier.GUARANTEED}))
            placed = self._mirror.place(only, now_s)
            if placed.tier is Tier.GUARANTEED:
                if less is not None:
                    requests.degrade(key, asked.slo, tokens)
                return asked, placed
        return query, self._mirror.place(query, now_s, row)

    def _placed(self, key: int, query: RouteQuery, placed: RouteDecision) -> None:
        """Send a request to the replica that the router chose; without one it waits."""
        if placed.replica_id is None:
            if placed.reason == UNATTAINABLE:
                self._refused(key, placed.retry_after_s)
            else:
                self._wait(key, self._config.edge_wait_s, NO_REPLICA)
            return
        self._waiting_since.pop(key, None)
        ttft_s = placed.predicted_ttft_s
        promised_s = nan if ttft_s is None else query.waited_s + ttft_s
        best_effort = placed.tier is Tier.BEST_EFFORT
        self._requests.serve_as(key, best_effort, promised_s, query.slo, placed.planned)
        if placed.planned is not None:
            self._endings.promised(key)
        target = self._named[placed.replica_id]
        deliver = partial(self._deliver, target, key)
        if placed.prefill_id is not None:
            source = self._named[placed.prefill_id]
            deliver = partial(self._prefill, source, target, key, placed.kv_transfer_s)
        elif placed.kv_from is not None:
            source = self._named[placed.kv_from]
            deliver = partial(source.give_cached, partial(self._fetch, source, target, key))
        self.events.after(self._config.dispatch_s, deliver)

    def _refused(self, key: int, retry_after_s: float | None) -> None:
        """No replica can promise a request, and its class does not allow best effort."""
        if self._accepts(key):
            return
        left = self._config.retries - self._retried.get(key, 0)
        if self._when(key) != "reject" or retry_after_s is None or left <= 0:
            self._wait(key, self._patience_s(key), REFUSED)
            return
        self._retried[key] = self._config.retries - left + 1
        self.events.after(retry_after_s, partial(self._return, key, retry_after_s))

    def _accepts(self, key: int) -> bool:
        """Whether a refused request's client will take up an offer."""
        draws = key * _GOLDEN % 1.0 < self._config.accepting
        if key in self._accepted or self._when(key) != "reject" or not draws:
            return False
        query = self._query(key)
        asked = query._replace(client_request_id=f"offer {key}")  # it has no retry time yet
        offer = self._mirror.quote(asked, self.events.now_s).offer
        if offer is None:
            return False
        self._accepted.add(key)
        slo = query.slo.with_times(offer.times_s)
        self.events.after(ACCEPT_S, partial(self._return, key, ACCEPT_S, slo))
        return True

    def _return(self, key: int, after_s: float, offered: SLO | None = None) -> None:
        """A refused request's client sends it again, with the objective that it was offered."""
        requests, now_s = self._requests, self.events.now_s
        requests.arrived_at(key, now_s)
        if offered is None:
            self._place(key)
        else:
            requests.restate(key, offered)
            query = self._query(key)._replace(takes=key)
            self._placed(key, query, self._mirror.place(query, now_s))
        promised = not isnan(requests.promised_s[key])
        requests.retries.append(Retry(key, now_s, after_s, promised))

    def _query(self, key: int) -> RouteQuery:
        requests, now_s = self._requests, self.events.now_s
        turn = requests.arrivals[key].turn
        return RouteQuery(
            key,
            requests.rest(key, now_s),
            requests.context_tokens(key),
            now_s - float(requests.rows[key, ARRIVAL]),
            self._tiers(key),
            session=turn.program if turn is not None else 0,
            prefix=requests.arrivals[key].block_hashes,
            prefill_key=key + PREFILL_KEYS,
            tenant=requests.arrivals[key].tenant,
            weight=requests.arrivals[key].weight,
            client_request_id=str(key),
            fetches_kv=MAX_TOKENS if self._config.fetch and turn and turn.session else 0,
        )

    def _tiers(self, key: int) -> frozenset[Tier]:
        part = self.loops.of(key)
        if part is not None and part.promised is False:
            return frozenset({Tier.BEST_EFFORT})
        goes_on = part is not None and part.promised and part.turns > 1
        if goes_on or self._requests.begun(key) or self._when(key) == "best_effort":
            return frozenset(Tier)
        return frozenset({Tier.GUARANTEED})

    def _patience_s(self, key: int) -> float:
        """Longest wait of a request without a promise: at most until its first deadline."""
        if self._when(key) == "reject":
            return 0.0
        return min(QUEUE_LIMIT_S, self._requests.arrivals[key].slo.columns[0])

    def _when(self, key: int) -> WhenUnattainable:
        service_class = self._requests.arrivals[key].slo.service_class
        return self._config.when_unattainable.get(service_class, "best_effort")

    def _wait(self, key: int, limit_s: float, failure: str) -> None:
        """Place a request again soon, or end it after ``limit_s``."""
        now_s = self.events.now_s
        if now_s - self._waiting_since.setdefault(key, now_s) >= limit_s:
            self._end(key, failure)
        else:
            self.events.after(RETRY_PAUSE_S, partial(self._place, key))

    def _deliver(self, replica: VirtualReplica, key: int) -> None:
        if not replica.alive:
            self._lost(replica, key)
        elif not replica.submit(key):
            self._end(key, TOO_LONG)

    def _lost(self, replica: VirtualReplica, key: int) -> None:
        """A request reached a replica that is gone."""
        self._mirror.of(replica.name).forget(replica.name)
        self._retry(key)

    def _retry(self, key: int) -> None:
        """Place a request that a replica has lost again, after a pause, if attempts are left."""
        tried = self._attempts.get(key, 1)
        if tried >= self._config.max_attempts:
            self._end(key, NO_ATTEMPT_LEFT)
            return
        self._attempts[key] = tried + 1
        self.moved += 1
        self._mirror.release(key)
        self.events.after(RETRY_PAUSE_S * 2 ** (tried - 1), partial(self._place, key))

    def _finished(self, replica: VirtualReplica, keys: list[int]) -> None:
        for key in keys:
            target = self._targets.pop(key, None)
            if target is None:
                self._end(key)
            else:
                self._send(replica, target, key)

    def _end(self, key: int, failure: str | None = None) -> None:
        self.migrations.end(key)
        if failure is not None:
            self._requests.failures[key] = failure
        self.loops.end(key, self.events.now_s)
        self._mirror.by(key).ended(key, self._requests.whole_tokens(key))
        self._endings.ended(key)
        if self.scalers:
            self._judged.ended(key)
        self.ended += 1
        for later in self._requests.followers.get(key, ()):
            self._follow(later)
        if self._programs is not None:
            arrival = self._requests.arrivals[key]
            tokens = arrival.prompt_tokens, arrival.output_tokens
            self._programs.ended(key, *tokens, self.events.now_s)
            self._place_next(self._programs)

    # From prefill to decode.

    def _prefill(
        self, source: VirtualReplica, target: VirtualReplica, key: int, kv_transfer_s: float
    ) -> None:
        """A request comes to the replica that computes its prompt for ``target``."""
        if not source.alive:
            self._lost(source, key)
        elif source.prefill(key, kv_transfer_s):
            self._targets[key] = target
        else:
            self._end(key, TOO_LONG)

    def _fetch(self, source: VirtualReplica, target: VirtualReplica, key: int) -> None:
        """``source`` has given ``target`` what it has cached of a prompt, if it has any."""
        cache, own = source.engine.cache, target.engine.cache
        tokens = cache.cached(key) if cache is not None and source.alive else 0
        missing = tokens - (own.cached(key) if own is not None else 0)
        if missing <= 0:
            self._deliver(target, key)
            return
        seconds = self._config.transfer_s + missing / self._config.transfer_tokens_per_s
        self.events.after(seconds, partial(self._fetched, target, key, tokens, seconds))

    def _fetched(self, target: VirtualReplica, key: int, tokens: int, seconds: float) -> None:
        self.fetched += 1
        if not target.alive:
            self._lost(target, key)
        elif not target.take_over(key, tokens, seconds):
            self._end(key, TOO_LONG)

    def _send(self, source: VirtualReplica, target: VirtualReplica, key: int) -> None:
        """Notify ``target``, which fetches the KV; ``source`` keeps it meanwhile."""
        tokens = self._requests.context_tokens(key)
        blocks = source.keep(tokens)
        seconds = self._config.transfer_s + tokens / self._config.transfer_tokens_per_s
        sent = partial(self._sent, source, target, key, blocks, seconds)
        self.events.after(self._config.dispatch_s + seconds, sent)

    def _sent(
        self, source: VirtualReplica, target: VirtualReplica, key: int, blocks: int, seconds: float
    ) -> None:
        source.let_go(blocks)
        moved = self.migrations.end(key)
        if not target.alive:
            self._lost(target, key)
            return
        if source.alive:
            self.split += not moved
            taken = target.take_over(key, self._requests.context_tokens(key), seconds)
        else:
            taken = target.submit(key)  # The KV went with its replica.
        if not taken:
            self._end(key, TOO_LONG)

    # Failures and scaling.

    def _autoscale(self, autoscaling: Autoscaling) -> list[Scaler]:
        return [
            Scaler(
                autoscaling,
                role,
                self.events,
                partial(self._mirror.load, self._judged, role),
                partial(self.replicas.change, role),
                self._config.counts[role],
            )
            for role in self.replicas.roles
        ]

    def _noticed(self, replica: VirtualReplica, keys: list[int]) -> None:
        self._mirror.of(replica.name).forget(replica.name)
        for key in keys:
            self._targets.pop(key, None)
            self._retry(key)


def simulate_cluster(
    workload: Workload,
    make_batch: Callable[[Role], BatchPolicy],
    routing: RoutingPolicy,
    truth: Truth | LatencyModel,
    belief: Belief | LatencyModel | None = None,
    engine: EngineConfig | None = None,
    cluster: ClusterConfig | None = None,
    incidents: Sequence[Incident] = (),
    seed: int = 0,
    predictor: LengthPredictor | None = None,
    admission: AdmissionPolicy | None = None,
    nodes: Sequence[Node] = (),
    autoscaling: Autoscaling | None = None,
    roles: RoleShares | None = None,
) -> Result:
    """Run ``workload`` through a cluster until every request has ended. Equal arguments give equal
    results, if the policies are new and those that draw are given a seed. ``nodes``: the first
    replicas, if they differ from ``truth``, ``belief`` and ``engine``.

    Raises:
        ValueError: see ``Cluster.run``.
        StuckError: an engine could run nothing."""
    believed, true = sides(truth, belief)
    usual = Node(true, believed, engine or EngineConfig())
    requests = Requests(workload, predictor)
    seeds = np.random.SeedSequence(seed)
    network = np.random.default_rng(seeds.spawn(1)[0])

    def make_engine(role: Role, number: int) -> VirtualEngine:
        rng = np.random.default_rng(seeds.spawn(1)[0])
        node = nodes[number] if number < len(nodes) else usual
        policy = make_batch(role)
        return VirtualEngine(node.engine, policy, node.belief, node.truth, requests, rng)

    run = Cluster(
        requests,
        make_engine,
        routing,
        cluster or ClusterConfig(),
        network,
        admission,
        autoscaling,
        None if roles is None else partial(RoleChanger, roles, make_batch),
    )
    end_s = run.run(incidents)
    up_s = sum(
        (end_s if replica.ended_s is None else replica.ended_s) - replica.started_s
        for replica in run.replicas.started
    )
    sizes: dict[str, tuple[Size, ...]] = {each.role: tuple(each.sizes) for each in run.scalers}
    if run.changer is not None:
        sizes |= {role: tuple(found) for role, found in run.changer.sizes.items()}
    return result_of(
        requests,
        [replica.engine for replica in run.replicas.started],
        end_s,
        up_s,
        moved=run.moved,
        split=run.split,
        migrated=run.migrations.done,
        fetched=run.fetched,
        drains_s=tuple(r.drained_s for r in run.replicas.started if r.drained_s is not None),
        starting_s=sum(scaler.started_s(end_s) for scaler in run.scalers),
        sizes=sizes,
        loops=run.loops.ended(),
    )
