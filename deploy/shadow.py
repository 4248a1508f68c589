"""Shadow policies on live traffic: a Serve deployment of one process, which serves no requests.

It records traffic for two minutes, replays it in the simulator under the live policies and under
the shadow ones, at the lowest priority, and publishes what would have changed as metrics. Then it
rests, so that its replays use at most ``CPU_SHARE`` of a core, and records again."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from operator import itemgetter
from typing import Final

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge
from ray import serve

from sluice.controller.client import ControllerClient, fleet_name
from sluice.controller.observability.metrics import MetricsPusher
from sluice.controller.observability.traffic import Traffic
from sluice.deploy.config import ModelFleet
from sluice.protocol.messages import RequestEnding
from sluice.replica.config import EngineConfig
from sluice.scheduling.batching import BatchPolicy, make_policy
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, TOKEN_UNITS
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import ROLES, Role
from sluice.simulation.cluster import Node
from sluice.simulation.config import ClusterConfig, WhenUnattainable
from sluice.simulation.config import EngineConfig as VirtualEngineConfig
from sluice.simulation.engine import Belief, StuckError, Truth
from sluice.simulation.shadow import (
    FIGURES,
    Policies,
    Recorded,
    Replicas,
    compared,
    estimates,
)
from sluice.simulation.workload import Arrival
from sluice.telemetry.logs import TelemetryConfig, configure_logs

RECORD_S: Final = 120.0
MAX_REQUESTS: Final = 20_000
"""Length of a recording, seconds and requests."""

ENDINGS_S: Final = 60.0
"""How long its last requests may take to end."""

MAX_RECORDINGS: Final = 90
"""Recordings that the shown figures rest on, the latest ones."""

CPU_SHARE: Final = 0.1
"""Most of one core that replays use on average."""

MAX_NOISE: Final = 0.5
MAX_RATIO: Final = 4.0
"""Most noise of a replayed step, log deviation, and of its mean time over the predicted one: after
a stall they would be large."""

READ_S: Final = 0.5
"""Interval at which the controller's records are read while traffic is recorded."""

_LEARNED = "correction", "fixed_correction", "step_spread"
_CHUNK_TOKENS = CHUNK_ENDS[0] // TOKEN_UNITS

_log = logging.getLogger(__name__)


@dataclass
class Recording:
    """Traffic from ``first``, a part of it with the replicas, to ``last``, such a part, too."""

    first: Traffic
    last: Traffic | None = None
    queries: dict[str, tuple[float, RouteQuery]] = field(default_factory=dict)
    """The first one of each request that arrived in it, with the time of its arrival."""
    endings: dict[str, RequestEnding] = field(default_factory=dict)
    open: bool = True
    """Whether requests that arrive are still recorded."""
    whole: bool = True
    """Whether nothing was lost, and the replicas were the same all the time."""

    def add(self, traffic: Traffic) -> None:
        """Take what was read."""
        self.whole &= not traffic.lost and traffic.members == self.first.members
        for decided_s, query in traffic.queries if self.open else ():
            if (arrived_s := decided_s - query.waited_s) >= self.first.now_s:
                self.queries.setdefault(query.request_id, (arrived_s, query))
        for ending in traffic.endings:
            if ending.request_id in self.queries:
                self.endings[ending.request_id] = ending

    def records(self, block_tokens: int) -> list[Recorded]:
        """Its requests for a replay, in order of arrival; ``block_tokens``: of the replicas."""
        ordered = sorted(self.queries.values(), key=itemgetter(0))
        return [self._record(*each, block_tokens) for each in ordered]

    def _record(self, arrived_s: float, query: RouteQuery, block_tokens: int) -> Recorded:
        ending, slo, tokens = self.endings.get(query.request_id), query.slo, query.prompt_tokens
        attained = kept = False
        output_tokens = 0
        if ending is not None and ending.outcome in ("ok", "cancelled"):
            output_tokens = ending.tokens
            attained = ending.outcome == "ok" and not ending.missed
            kept = attained and bool(ending.kept)
        if slo.stages:  # the lengths of the stages are not known: it is only load
            slo = SLO(priority=slo.priority, service_class=slo.service_class)
        hashes: tuple[int, ...] = ()
        if _CHUNK_TOKENS % block_tokens == 0:
            hashes = tuple(_blocks(query.prefix))[: tokens // _CHUNK_TOKENS]
        task = f"{slo.service_class} {query.tenant}"
        arrival = Arrival(arrived_s, max(1, tokens), output_tokens, slo, task, hashes)
        arrival = arrival._replace(tenant=query.tenant, weight=query.weight)
        return Recorded(arrival, attained, kept)

    def replicas(self, fleet: ModelFleet, when: Mapping[str, WhenUnattainable]) -> Replicas:
        """The replicas for a replay: real times are what they had learned at the end, times what
        the steps in the recording took over that. ``when``: by class, what happens to a request
        that none can promise."""
        assert self.last is not None
        headroom = fleet.config.engine.headroom
        nodes: dict[Role, list[Node]] = {role: [] for role in ROLES}
        for name, (hello, summary) in self.last.replicas.items():
            work, fixed, spread = (float(summary[name]) for name in _LEARNED)
            model = hello.profile.model.corrected(work, fixed, spread)
            before = self.first.replicas[name][1]
            steps = int(summary["steps"]) - int(before["steps"])
            took = float(summary["step_ratio_sum"]) - float(before["step_ratio_sum"])
            off = min(MAX_RATIO, max(1 / MAX_RATIO, took / steps)) if steps > 0 else 1.0
            engine = VirtualEngineConfig(
                kv_blocks=max(1, int(summary["total_kv_blocks"])),
                block_tokens=hello.block_tokens,
                max_batch_tokens=max(hello.block_tokens, hello.max_batch_tokens),
                max_sequences=hello.max_sequences,
            )
            truth = Truth(model.corrected(work * off, fixed * off), min(MAX_NOISE, spread))
            nodes[hello.role].append(Node(truth, Belief(model.with_headroom(headroom)), engine))
        cluster = ClusterConfig(
            replicas=len(nodes["mixed"]),
            prefillers=len(nodes["prefill"]),
            decoders=len(nodes["decode"]),
            promise_level=fleet.controller.promise_level,
            when_unattainable=dict(when),
        )
        return Replicas([node for role in ROLES for node in nodes[role]], cluster)


def _blocks(prefix: Iterable[int]) -> Iterable[int]:
    """A hash for each block of the size of the first chunk: later chunks have several."""
    before = 0
    for chunk, end in zip(prefix, CHUNK_ENDS, strict=False):
        for number in range((end - before) // CHUNK_ENDS[0]):
            yield hash((chunk, number))
        before = end


def policies_of(fleet: ModelFleet, shadow: bool) -> Policies:
    """The live policies of a model, or those with what its shadow replaces."""
    config = fleet.controller
    engines: dict[Role, EngineConfig] = {pool.role: pool.engine for pool in fleet.pools}

    def batching(role: Role) -> BatchPolicy:
        engine, other = engines.get(role, fleet.config.engine), config.shadow
        if shadow and other is not None and other.batching is not None:
            return make_policy(other.batching, other.batching_options, role=role)
        return make_policy(engine.policy, engine.policy_options, role=role)

    chosen = config.shadowed() if shadow else config
    return Policies(batching, chosen.make_routing, chosen.make_admission)


class ShadowMetrics:
    """What the shadow policies would have changed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        gauge = partial(Gauge, registry=self.registry)
        self.live = gauge("sluice_shadow_live", "Measured in the compared windows.", ["figure"])
        self.replayed = gauge(
            "sluice_shadow_replayed", "The same in the replay under the live policies.", ["figure"]
        )
        self.difference = gauge(
            "sluice_shadow_difference",
            "What the shadow policies would have changed, and its 95 % interval.",
            ["figure", "bound"],
        )
        self.windows = gauge("sluice_shadow_windows", "Windows of traffic compared.")
        self.cpu = Counter(
            "sluice_shadow_cpu_seconds", "CPU time of replays.", registry=self.registry
        )

    def show(self, recordings: Sequence[Floats]) -> None:
        """The figures over all recordings."""
        self.windows.set(sum(map(len, recordings)))
        for name, found in zip(FIGURES, estimates(recordings), strict=True):
            if isnan(found.difference):
                continue
            self.live.labels(name).set(found.live)
            self.replayed.labels(name).set(found.replayed)
            self.difference.labels(name, "expected").set(found.difference)
            self.difference.labels(name, "low").set(found.low)
            self.difference.labels(name, "high").set(found.high)


class ShadowReplays:
    """Records a model's traffic, which ``read`` gives part by part, and replays it. The argument of
    ``read``: whether the replicas are wanted, too. ``when``: see :meth:`Recording.replicas`."""

    def __init__(
        self,
        fleet: ModelFleet,
        when: Mapping[str, WhenUnattainable],
        read: Callable[[bool], Awaitable[Traffic | None]],
    ) -> None:
        self.metrics = ShadowMetrics()
        self._fleet = fleet
        self._when = when
        self._read = read
        self._compared: deque[Floats] = deque(maxlen=MAX_RECORDINGS)

    async def run(self) -> None:
        """Forever."""
        seed = 0
        while True:
            recording = await self.record()
            if recording is not None:
                seed += 1
                await asyncio.sleep(await asyncio.to_thread(self.compare, recording, seed))

    async def record(self) -> Recording | None:
        """The traffic of some minutes from the next request on; ``None`` if a part is missing."""
        traffic = await self._read(False)
        while traffic is not None and traffic.more:  # what came before is not whole
            traffic = await self._read(False)
        first = await self._read(True)
        await asyncio.sleep(READ_S)
        if first is None or not first.replicas:
            return None
        recording, since_s = Recording(first), time.monotonic()
        while recording.whole:
            if not recording.queries:
                since_s = time.monotonic()
            age_s = time.monotonic() - since_s
            recording.open &= age_s < RECORD_S and len(recording.queries) < MAX_REQUESTS
            ended = len(recording.endings) == len(recording.queries)
            ends = not recording.open and (ended or age_s > RECORD_S + ENDINGS_S)
            traffic = await self._read(ends)
            if traffic is None:  # what was in it is lost
                return None
            recording.add(traffic)
            if ends:
                recording.last = traffic
                return recording if recording.whole else None
            if not traffic.more:
                await asyncio.sleep(READ_S)
        return None

    def compare(self, recording: Recording, seed: int) -> float:
        """Replay a recording, and publish what comes of it. Returns for how long to rest."""
        began_s = time.thread_time()
        replicas = recording.replicas(self._fleet, self._when)
        records = recording.records(replicas.nodes[0].engine.block_tokens)
        live, shadow = policies_of(self._fleet, False), policies_of(self._fleet, True)
        try:
            found = compared(records, live, shadow, replicas, _CHUNK_TOKENS, seed)
        except (StuckError, ValueError) as error:
            _log.warning("recorded traffic could not be replayed: %s", error)
        else:
            if len(found):
                self._compared.append(found)
                self.metrics.show(self._compared)
        used_s = time.thread_time() - began_s
        self.metrics.cpu.inc(used_s)
        return used_s / CPU_SHARE


class Shadow:
    """The process of one model's shadow policies."""

    async def __init__(  # type: ignore[misc]
        self,
        fleet: ModelFleet,
        when: Mapping[str, WhenUnattainable],
        telemetry: TelemetryConfig,
    ) -> None:
        for thread in psutil.Process().threads():  # each has its own priority
            os.setpriority(os.PRIO_PROCESS, thread.id, 19)
        context = serve.get_replica_context()
        source = f"shadow-{context.replica_id.unique_id}"
        configure_logs(telemetry.logs, source)
        name = fleet_name(context.app_name, fleet.key)
        self._client = await asyncio.to_thread(ControllerClient, name, fleet.controller)
        replays = ShadowReplays(fleet, when, self._client.traffic)
        registry = replays.metrics.registry
        self._pusher = MetricsPusher(self._client.push_metrics, registry, source)
        self._pusher.start()
        self._task = asyncio.get_running_loop().create_task(replays.run())

    def check_health(self) -> None:
        """Called by Serve. Raises RuntimeError: it has failed, and is started again."""
        if self._task.done():
            raise RuntimeError("the shadow policies have failed") from self._task.exception()

    async def __del__(self) -> None:
        """Serve awaits this when it stops the process."""
        self._task.cancel()
        await self._pusher.stop()
        await self._client.close()
