"""Running streams that move between simulated replicas, chosen by the policy of production
(:mod:`sluice.scheduling.placement.migration`) as one router would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf, nan

from sluice.scheduling.placement.migration import MigrationPolicy, RunningStream
from sluice.scheduling.request.job import RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.kernels import BEST_EFFORT, PROMISED
from sluice.scheduling.request.tpot import TPOTAnchor
from sluice.simulation.cells import CellMirrors
from sluice.simulation.config import ClusterConfig
from sluice.simulation.events import Events
from sluice.simulation.mirror import VirtualMirror
from sluice.simulation.replica import VirtualReplica
from sluice.simulation.requests import Requests

PACE_TOKENS = 32
"""A stream's recent pace is that of its last tokens, at most this many."""


class Migrations:
    """The streams of a run that have moved, move now, or could move next.

    Args:
        requests: of the run. Those with several stages never move.
        mirror: decides where a stream goes.
        events: the clock. config: of the cluster.
        named: the replicas by name.
        send: transfers the KV of a stream from its replica to another one, which takes it over;
            :meth:`end` is called when it has arrived.
    """

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
        self._policy = MigrationPolicy()
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
        for place in self._policy.chosen(streams, under_way, now_s, source.draining):
            query = self._query(keys[place], streams[place], source, now_s)
            placed = self._mirror.place(query, now_s)
            target = self._named.get(placed.replica_id or "")
            if target is None or target is source:
                continue
            if not self._policy.pays(streams[place], placed.kv_transfer_s):
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
        lately = times_s[-PACE_TOKENS - 1 :]
        token_s = float(lately[-1] - lately[0]) / (len(lately) - 1) if len(lately) > 1 else 0.0
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
