"""A workload through several simulated engines behind a router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, nan
from typing import NamedTuple

import numpy as np

from scheduling.admission import AdmissionPolicy
from scheduling.batching import BatchPolicy
from scheduling.job import UNATTAINABLE
from scheduling.latency import LatencyModel
from scheduling.length import LengthPredictor
from scheduling.roles import Role
from scheduling.routing import RouteQuery, RoutingPolicy, Tier
from simulation.config import (
    Autoscaling,
    ClusterConfig,
    EngineConfig,
    Failure,
    Resize,
    Slowdown,
    WhenUnattainable,
)
from simulation.engine import Engine
from simulation.events import Events
from simulation.judged import Judged
from simulation.mirror import Mirror
from simulation.replica import Replica
from simulation.requests import Requests
from simulation.run import TOO_LONG, Result, Size, result_of, sides
from simulation.scaling import Scaler
from simulation.truth import Belief, Truth
from simulation.workload import Workload

REPLICA_FAILED = "its replica failed after the output had begun"
NO_ATTEMPT_LEFT = "the last replica that it was given failed"
NO_REPLICA = "no replica was there for too long"
REFUSED = "refused at admission"

_PROMISED = frozenset({Tier.GUARANTEED})

Incident = Failure | Resize | Slowdown
"""What happens to replicas in a run."""


class Node(NamedTuple):
    """What one replica is made of.

    Attributes:
        truth: how long its steps take.
        belief: what it plans with, and reports to the router.
        engine: its limits.
    """

    truth: Truth
    belief: Belief
    engine: EngineConfig


class _Pool:
    """The replicas of one role, and the router's way to them."""

    def __init__(
        self,
        role: Role,
        config: ClusterConfig,
        routing: RoutingPolicy,
        depths: Mapping[int, int],
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self.role = role
        self.mirror = Mirror(config, routing, admission, depths)
        self.replicas: dict[str, Replica] = {}


class Cluster:
    """Places requests by a routing policy, runs the engines, and loses no request.

    A request whose replica fails before its first token left is placed again, up to
    ``max_attempts``; one whose output has begun ends with an explicit failure, because a client has
    part of an answer (production does the same). While no replica is there at all, requests wait at
    the router, for a bounded time.

    With disaggregated roles a request runs to its first token on a prefill replica. Then its KV is
    sent to a decode replica, which takes the time of its prompt's tokens; the prefill replica keeps
    the blocks until that ends, and the decode replica finds blocks when it admits the request. What
    later stages add to the prompt is prefilled where the request decodes.

    Args:
        requests: of the run.
        make_engine: a new engine for a role and a replica's number in order of start.
        make_route: a new routing policy for a role.
        config: the cluster.
        rng: source of lost reports.
        admission: tells which replicas can promise a request its objective; default: nothing is
            promised. A request that nobody can promise is served as best effort, waits, or ends
            with an explicit failure, as ``config`` says for its class.
        autoscaling: who changes the numbers of replicas that ``config`` begins with; default:
            nobody.
    """

    def __init__(
        self,
        requests: Requests,
        make_engine: Callable[[Role, int], Engine],
        make_route: Callable[[Role], RoutingPolicy],
        config: ClusterConfig,
        rng: np.random.Generator,
        admission: AdmissionPolicy | None = None,
        autoscaling: Autoscaling | None = None,
    ) -> None:
        self.events = Events()
        self.moved = 0
        self.ended = 0
        self.replicas: list[Replica] = []
        """Every replica that there was, in order of start."""
        self._requests = requests
        self._make_engine = make_engine
        self._config = config
        self._rng = rng
        self._attempts: dict[int, int] = {}
        # Since when there has been no replica for a request.
        self._waiting_since: dict[int, float] = {}
        # Whose KV is on its way: from where, and the blocks that it has there.
        self._sending: dict[int, tuple[Replica, int]] = {}
        self._arrived = 0
        entry: Role = "prefill" if config.decoders else "mixed"
        depths = requests.depths
        self._entry = _Pool(entry, config, make_route(entry), depths, admission)
        self._pools: dict[Role, _Pool] = {entry: self._entry}
        self._grow(self._entry, config.replicas)
        if config.decoders:
            self._pools["decode"] = _Pool("decode", config, make_route("decode"), depths)
            self._grow(self._pools["decode"], config.decoders)
        self._judged = Judged(requests)
        self.scalers = self._autoscale(autoscaling) if autoscaling is not None else []
        """Who sizes each role, if anybody does."""

    def run(self, incidents: Sequence[Incident] = ()) -> float:
        """Run until every request has ended; return the time.

        Raises:
            ValueError: an incident names a role that the cluster has not, or a factor that is not
                positive.
        """
        for incident in incidents:
            self.events.at(incident.at_s, self._happening(incident))
        if len(self._requests):
            self.events.at(self._requests.arrivals[0].arrival_s, self._arrive)
        while self.ended < len(self._requests):
            if not self.events.run_next():
                raise RuntimeError(f"the clock stopped with {self.ended} requests ended")
        return self.events.now_s

    def _happening(self, incident: Incident) -> Callable[[], None]:
        """What to do when it happens."""
        match incident:
            case Failure():
                return partial(self._fail, incident)
            case Slowdown():
                if not 0 < incident.factor < inf:
                    words = f"a slowdown's factor must be positive, got {incident.factor}"
                    raise ValueError(words)
                return partial(self._slow_down, incident)
            case Resize():
                if incident.role not in self._pools:
                    known = ", ".join(self._pools)
                    words = f"no replica has the role {incident.role!r}; there are: {known}"
                    raise ValueError(words)
                return partial(self._resize, incident)

    # Arrival and placement.

    def _arrive(self) -> None:
        key = self._arrived
        self._arrived += 1
        if self._arrived < len(self._requests):
            self.events.at(self._requests.arrivals[self._arrived].arrival_s, self._arrive)
        self._requests.predict(key)
        self._place(key)

    def _place(self, key: int) -> None:
        replica = self._choose(self._entry, key)
        if replica is not None:
            deliver = partial(self._deliver, replica, key)
            self.events.after(self._config.dispatch_s, deliver)

    def _choose(self, pool: _Pool, key: int) -> Replica | None:
        """The router's choice. Where there is nobody to choose from, the request waits, and is
        placed again or ended later."""
        now_s = self.events.now_s
        arrival = self._requests.arrivals[key]
        entry = pool is self._entry
        query = RouteQuery(
            key,
            arrival.slo,
            arrival.prompt_tokens,
            now_s - arrival.arrival_s,
            self._tiers(key) if entry else frozenset(Tier),
            prefix=arrival.block_hashes if entry else (),
        )
        placement = pool.mirror.place(query, now_s, moved=not entry)
        if placement.replica_id is None:
            if placement.reason == UNATTAINABLE:
                limit_s, failure = self._patience_s(key), REFUSED
            else:
                limit_s, failure = self._config.edge_wait_s, NO_REPLICA
            self._wait(key, limit_s, failure, self._place if entry else self._hand_over)
            return None
        self._waiting_since.pop(key, None)
        if entry:
            ttft_s = placement.predicted_ttft_s
            promised_s = nan if ttft_s is None else query.waited_s + ttft_s
            self._requests.serve_as(key, placement.tier is Tier.BEST_EFFORT, promised_s)
        return pool.replicas[placement.replica_id]

    def _tiers(self, key: int) -> frozenset[Tier]:
        """Those that a request may be served in, by its class."""
        return frozenset(Tier) if self._when(key) == "best_effort" else _PROMISED

    def _patience_s(self, key: int) -> float:
        """How long a request waits that nobody can promise: not beyond its own first deadline."""
        if self._when(key) == "reject":
            return 0.0
        return min(self._config.queue_limit_s, self._requests.arrivals[key].slo.columns[0])

    def _when(self, key: int) -> WhenUnattainable:
        service_class = self._requests.arrivals[key].slo.service_class
        return self._config.when_unattainable.get(service_class, "best_effort")

    def _wait(self, key: int, limit_s: float, failure: str, again: Callable[[int], None]) -> None:
        """Do ``again`` soon what could not be done, or end the request after ``limit_s``."""
        now_s = self.events.now_s
        if now_s - self._waiting_since.setdefault(key, now_s) >= limit_s:
            self._end(key, failure)
        else:
            self.events.after(self._config.retry_s, partial(again, key))

    def _deliver(self, replica: Replica, key: int) -> None:
        if not replica.alive:
            self._pool(replica).mirror.forget(replica.name)
            self._retry(key, self._place)
        elif not replica.submit(key):
            self._end(key, TOO_LONG)

    def _retry(self, key: int, again: Callable[[int], None]) -> None:
        """Do ``again`` what a failed replica has undone, after a pause, if attempts are left."""
        tried = self._attempts.get(key, 1)
        if tried >= self._config.max_attempts:
            self._end(key, NO_ATTEMPT_LEFT)
            return
        self._attempts[key] = tried + 1
        self.moved += 1
        self.events.after(self._config.retry_s * 2 ** (tried - 1), partial(again, key))

    def _finished(self, replica: Replica, keys: list[int]) -> None:
        for key in keys:
            if replica.role == "prefill" and not self._requests.one_token(key):
                self._send(replica, key)
            else:
                self._end(key)

    def _end(self, key: int, failure: str | None = None) -> None:
        self._stop_sending(key)
        if failure is not None:
            self._requests.failures[key] = failure
        if self.scalers:
            self._judged.ended(key)
        self.ended += 1

    # From prefill to decode.

    def _send(self, source: Replica, key: int) -> None:
        self._sending[key] = (source, source.keep(self._requests.arrivals[key].prompt_tokens))
        self._hand_over(key)

    def _hand_over(self, key: int) -> None:
        target = self._choose(self._pools["decode"], key)
        if target is not None:
            tokens = self._requests.arrivals[key].prompt_tokens
            seconds = self._config.transfer_s + tokens / self._config.transfer_tokens_per_s
            self.events.after(seconds, partial(self._sent, target, key))

    def _sent(self, target: Replica, key: int) -> None:
        if not self._sending[key][0].alive:
            # The KV went with its replica.
            self._end(key, REPLICA_FAILED)
        elif not target.alive:
            self._pool(target).mirror.forget(target.name)
            self._retry(key, self._hand_over)
        else:
            self._stop_sending(key)
            if not target.take_over(key, self._requests.first_token_s(key)):
                self._end(key, TOO_LONG)

    def _stop_sending(self, key: int) -> None:
        sending = self._sending.pop(key, None)
        if sending is not None:
            source, blocks = sending
            source.let_go(blocks)

    # What happens to replicas.

    def _pool(self, replica: Replica) -> _Pool:
        return self._pools[replica.role]

    def _grow(self, pool: _Pool, count: int) -> None:
        for _ in range(count):
            name = f"{pool.role}-{len(self.replicas)}"
            replica = Replica(
                name,
                pool.role,
                self._make_engine(pool.role, len(self.replicas)),
                self.events,
                pool.mirror,
                self._config,
                self._rng,
                self._finished,
            )
            self.replicas.append(replica)
            pool.replicas[name] = replica

    def _resize(self, resize: Resize) -> None:
        self._change(self._pools[resize.role], resize.change)

    def _change(self, pool: _Pool, change: int) -> None:
        """Let so many replicas join, or the youngest leave."""
        if change >= 0:
            self._grow(pool, change)
            return
        serving = [r for r in pool.replicas.values() if r.alive and not r.draining]
        for replica in serving[change:]:
            replica.drain()

    def _autoscale(self, autoscaling: Autoscaling) -> list[Scaler]:
        return [
            Scaler(
                autoscaling,
                role,
                self.events,
                partial(pool.mirror.load, self._judged),
                partial(self._change, pool),
                len(pool.replicas),
            )
            for role, pool in self._pools.items()
        ]

    def _alive(self, number: int) -> Replica | None:
        """The replica with a number, if it is there."""
        known = 0 <= number < len(self.replicas)
        return self.replicas[number] if known and self.replicas[number].alive else None

    def _slow_down(self, slowdown: Slowdown) -> None:
        replica = self._alive(slowdown.replica)
        if replica is not None:
            replica.engine.slowness = slowdown.factor

    def _fail(self, failure: Failure) -> None:
        replica = self._alive(failure.replica)
        if replica is None:
            return
        keys = replica.fail()
        self.events.after(self._config.detect_s, partial(self._noticed, replica, keys))
        if failure.down_s is not None:
            grow = partial(self._grow, self._pool(replica), 1)
            self.events.after(failure.down_s, grow)

    def _noticed(self, replica: Replica, keys: list[int]) -> None:
        self._pool(replica).mirror.forget(replica.name)
        for key in keys:
            if self._requests.begun(key):
                self._end(key, REPLICA_FAILED)
            else:
                self._retry(key, self._place)


def simulate_cluster(
    workload: Workload,
    make_batch: Callable[[Role], BatchPolicy],
    make_route: Callable[[Role], RoutingPolicy],
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
) -> Result:
    """Run ``workload`` through a cluster until every request has ended.

    Arguments that :func:`~simulation.run.simulate` has mean what they mean there. Equal arguments
    give equal results, if the policies are new and those that draw are given a seed.

    Args:
        workload: what arrives.
        make_batch: gives each engine its policy, by its role.
        make_route: gives the router its policy, by the role of the replicas that it chooses from.
        truth: of an engine; each has its own noise.
        belief: of an engine; each corrects its own.
        engine: limits of an engine.
        cluster: how many there are, and how the router learns of them.
        incidents: failures, scale events, replicas that become slow.
        seed: of all noise.
        predictor: one for the whole cluster, while replicas have one each.
        admission: see :class:`Cluster`; a policy keeps no state, so one serves many runs.
        nodes: what the first replicas to start are, where they differ from ``truth``, ``belief``
            and ``engine``, of which the others are.
        autoscaling: who changes the numbers of replicas; default: nobody.

    Raises:
        ValueError: see :meth:`Cluster.run`.
        StuckError: an engine could run nothing.
    """
    believed, true = sides(truth, belief)
    usual = Node(true, believed, engine or EngineConfig())
    requests = Requests(workload, predictor)
    seeds = np.random.SeedSequence(seed)
    network = np.random.default_rng(seeds.spawn(1)[0])

    def make_engine(role: Role, number: int) -> Engine:
        rng = np.random.default_rng(seeds.spawn(1)[0])
        node = nodes[number] if number < len(nodes) else usual
        policy, prefill_only = make_batch(role), role == "prefill"
        return Engine(node.engine, policy, node.belief, node.truth, requests, rng, prefill_only)

    run = Cluster(
        requests,
        make_engine,
        make_route,
        cluster or ClusterConfig(),
        network,
        admission,
        autoscaling,
    )
    end_s = run.run(incidents)
    up_s = sum(
        (end_s if replica.ended_s is None else replica.ended_s) - replica.started_s
        for replica in run.replicas
    )
    sizes: dict[str, tuple[Size, ...]] = {}
    for scaler in run.scalers:
        sizes[scaler.role] = tuple(scaler.sizes)
    started_s = sum(scaler.started_s(end_s) for scaler in run.scalers)
    engines = [replica.engine for replica in run.replicas]
    return result_of(requests, engines, end_s, up_s, run.moved, started_s, sizes)
