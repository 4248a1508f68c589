"""The Serve deployment of a replica: Ray's names and lifecycle around ``replica.server``."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from operator import attrgetter
from typing import Any

import ray
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

from sluice.controller.client import ControllerClient, fleet_name
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.metrics import MetricsPusher
from sluice.protocol.requests import EngineRequest, Progress, ResponseItem, ResponseTaken
from sluice.protocol.streams import StreamEndpoint
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.engine import ConfigurationError, Engine, EngineInfo
from sluice.replica.gpus import GpuMonitor
from sluice.replica.metrics import ReplicaCollector
from sluice.replica.processes import core_of, has_cuda_vllm, start_fork_server
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.replica.streams.direct import DirectPort
from sluice.replica.streams.server import Response, StreamServer
from sluice.replica.vllm_args import devices, on_ray, ranks
from sluice.scheduling.batching.warm_up import warm_up
from sluice.scheduling.fleet.ranks import rank_name, rank_of
from sluice.scheduling.roles import Role
from sluice.simulation.rows import compile_now
from sluice.telemetry.logs import TelemetryConfig, configure_logs
from sluice.telemetry.phases import phase
from sluice.telemetry.tracing import make_tracer

# A replica's ranks. With data parallelism it has several engines, each with a queue of its own.
# Each is a :class:`~sluice.replica.server.Replica` here, with its own reports; this module joins
# them to the one that Serve knows.


def names_of(replica_id: str, ranks: int) -> list[str]:
    """The names of a replica's ranks; one rank has the replica's own name."""
    return [replica_id] if ranks == 1 else [rank_name(replica_id, each) for each in range(ranks)]


class Ranks:
    """The ranks of one replica, in order; the first one is started first, and stopped last."""

    def __init__(self, replica_id: str, replicas: Sequence[Replica]) -> None:
        self.replica_id = replica_id
        self.replicas = replicas

    async def start(self, first: Awaitable[EngineInfo] | None = None) -> None:
        """Start every rank; ``first``: the start of the first engine, if it has begun. Raises
        EngineDeadError: an engine could not start."""
        for each in self.replicas:
            await each.start(first)
            first = None

    def chosen(self, request: EngineRequest) -> Replica:
        """The rank that a request names, or else the one with the fewest live requests."""
        if request.rank is not None and request.rank < len(self.replicas):
            return self.replicas[request.rank]
        return min(self.replicas, key=attrgetter("live_requests"))

    def open(self, request: EngineRequest, wake: Callable[[], None]) -> Response:
        """Begin to serve a request; see :meth:`sluice.replica.server.Replica.open`."""
        return self.chosen(request).open(request, wake)

    async def generate(
        self, request: EngineRequest, target: str | None
    ) -> AsyncGenerator[list[ResponseItem], None]:
        """As ``Replica.generate``; if ``target`` is another replica, the first item is the rank."""
        moved = target is not None and not target.startswith(self.replica_id)
        if moved:
            request = request.at(None)
        rank = self.chosen(request)
        if moved or request.confirm:
            yield [ResponseTaken(rank.replica_id)]
        async with aclosing(rank.generate(request)) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        for each in self.replicas:
            await each.abort(request_id)

    def progress(self, request_ids: Sequence[str], target: str | None) -> Progress:
        """Whether the rank that ``target`` names makes progress, and which of these requests it
        does not serve; without a rank, whether all do, and which none serves."""
        rank = None if target is None else rank_of(target)
        if rank is not None and rank < len(self.replicas):
            return self.replicas[rank].progress(request_ids)
        found = [each.progress(request_ids) for each in self.replicas]
        unknown = set(request_ids).intersection(*(each.unknown for each in found))
        hung = any(each.hung for each in found)
        return Progress(self.replica_id, hung, tuple(sorted(unknown)))

    async def check_health(self) -> None:
        """Raises EngineDeadError: an engine is dead, or has been stalled for too long."""
        for each in self.replicas:
            await each.check_health()

    async def drain(self) -> None:
        """Drain every rank; see :meth:`sluice.replica.server.Replica.drain`."""
        await asyncio.gather(*(each.drain() for each in self.replicas))

    async def stop(self) -> None:
        """Leave the controller, and free the engines. Idempotent."""
        for each in reversed(self.replicas):
            await each.stop()

    def snapshot(self) -> dict[str, Any]:
        """Plain data of the first rank, ``ranks`` of all. Raises RuntimeError: an engine is
        gone."""
        found = [each.snapshot() for each in self.replicas]
        return found[0] | {
            "live_requests": sum(each["live_requests"] for each in found),
            "ranks": found,
        }


class ConfiguredReplicas:
    """The min number of replicas, which may change; Serve has it only in handles' long poll."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._client: LongPollClient | None = None

    def start(self, deployment: DeploymentID) -> None:
        """Start the long poll. Raises ValueError: Serve is not running."""
        self._client = LongPollClient(
            ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE),
            {(LongPollNamespace.DEPLOYMENT_CONFIG, deployment): self.on_config},
            call_in_event_loop=asyncio.get_running_loop(),
            client_id=f"{type(self).__name__}:{deployment}",
        )

    def on_config(self, config: DeploymentConfig) -> None:
        """Take the number from the deployment's configuration."""
        scaled = config.autoscaling_config
        self.number = config.num_replicas if scaled is None else scaled.min_replicas

    def stop(self) -> None:
        """Stop the long poll."""
        if self._client is not None:
            self._client.stop()


_PLAIN = TelemetryConfig()


class ReplicaServer:
    """One replica in Serve, known everywhere by its Serve replica's unique id. Raises
    ConfigurationError. Raises EngineDeadError: the engine could not start."""

    async def __init__(  # type: ignore[misc]
        self,
        engine: EngineConfig,
        replica: ReplicaConfig,
        controller: ControllerConfig,
        key: str | None = None,
        telemetry: TelemetryConfig = _PLAIN,
        role: Role = "mixed",
    ) -> None:
        context = serve.get_replica_context()
        replica_id = context.replica_id.unique_id
        process = f"replica-{replica_id}"
        configure_logs(telemetry.logs, process)
        self._tracer = make_tracer(telemetry.tracing, process)
        if on_ray(engine.vllm_args):
            # The engine's process, which starts the workers, must not look for another cluster.
            os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        with _configuration_errors():
            made = make_engines(
                engine,
                replica_id,
                replica.max_live_requests,
                context.rank.local_rank,
                traced=self._tracer is not None,
                role=role,
            )
        # The controller starts, or is found, while the engine does.
        starting = asyncio.create_task(_started(made[0], engine))
        registry = CollectorRegistry(auto_describe=False)
        self._client = await asyncio.to_thread(
            phase("replica: find the controller")(ControllerClient),
            fleet_name(context.app_name, key),
            controller,
            registry=registry,
            replica_id=replica_id,
        )
        self._elastic = replica.elastic
        self._port = DirectPort(ray.util.get_node_ip_address())
        self._role = role
        self._configured = ConfiguredReplicas()
        node_id = ray.get_runtime_context().get_node_id()
        self._ranks = Ranks(
            replica_id,
            [
                Replica(name, node_id, one, replica, self._client, self._tracer, role, self._port)
                for name, one in zip(names_of(replica_id, len(made)), made, strict=True)
            ],
        )
        self._streams = StreamServer(replica_id, self._ranks.open)
        # Where Ray runs the workers, they have the GPUs, and this process has none.
        self._gpus = GpuMonitor(ray.get_runtime_context().get_accelerator_ids()["GPU"], len(made))
        registry.register(
            ReplicaCollector(
                self._ranks.replicas,
                lambda: self._configured.number,
                role,
                lambda: self._gpus.uses,
                (replica.num_gpus or devices(engine.vllm_args)) / len(made),
            )
        )
        self._pusher = MetricsPusher(self._client.push_metrics, registry, source=process)
        try:
            with _configuration_errors():
                await self._ranks.start(starting)
        except BaseException:
            await self._ranks.stop()
            raise
        self._configured.start(context.replica_id.deployment_id)
        self._pusher.start()
        self._gpus.start()

    async def generate(
        self, request: EngineRequest, _target: str | None = None
    ) -> AsyncGenerator[list[ResponseItem], None]:
        """As ``Ranks.generate``; ``_target`` is the request router's hint."""
        async with aclosing(self._ranks.generate(request, _target)) as batches:
            async for batch in batches:
                yield batch

    async def stream_endpoint(self, _target: str | None = None) -> StreamEndpoint:
        """The endpoint for requests over a plain connection, see ``replica.streams.server``."""
        return await self._streams.endpoint(ray.util.get_node_ip_address())

    async def direct_address(self, _target: str | None = None) -> tuple[str, str]:
        """This replica's id, and the address of its port for streams past the routers."""
        await self._port.start()
        return self._ranks.replica_id, self._port.address

    async def progress(self, request_ids: Sequence[str], _target: str | None = None) -> Progress:
        """Whether this replica makes progress; see ``Ranks.progress``."""
        return self._ranks.progress(request_ids, _target)

    async def models(self, _target: str | None = None) -> dict[str, Any]:
        """The OpenAI list-models body. ``_target`` as in :meth:`generate`."""
        return await self._ranks.replicas[0].engine.models()

    async def abort(self, request_id: str, _target: str | None = None) -> None:
        """Stop a request; unknown ids are ignored. ``_target`` as in :meth:`generate`."""
        await self._ranks.abort(request_id)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of this replica's pool for Serve's autoscaling, from the first few replicas
        only. Without an answer of the controller there is none, so the number of replicas stays."""
        rank = serve.get_replica_context().rank
        if rank is not None and rank.rank >= 3:
            return {}
        # Where roles change, the number of replicas is for all of them together.
        load = await self._client.load(None if self._elastic else self._role)
        return {} if load is None else load._asdict()

    async def engine_snapshot(self) -> dict[str, Any]:
        """The replica's state as plain data; see :meth:`Ranks.snapshot`."""
        return self._ranks.snapshot()

    async def check_health(self) -> None:
        """Serve replaces this replica if it raises. Raises EngineDeadError."""
        await self._ranks.check_health()

    async def __del__(self) -> None:
        """Serve awaits this after its own drain, when it stops the replica."""
        self._streams.goodbye()
        await self._ranks.drain()
        await self._streams.stop()
        self._configured.stop()
        self._gpus.stop()
        await self._pusher.stop()
        await self._ranks.stop()
        await self._port.stop()
        await self._client.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.shutdown)


async def _started(engine: Engine, config: EngineConfig) -> EngineInfo:
    """Start an engine. Raises EngineDeadError."""
    if config.kind == "simulated":  # vLLM's scheduler warms up in its own process
        await asyncio.to_thread(warm_up, config.policy, config.policy_options)
        await asyncio.to_thread(compile_now)
    gc.disable()  # collections take a quarter of the time in which vLLM is imported
    try:
        return await engine.start()
    finally:
        gc.collect()
        gc.freeze()  # what is imported is looked through no more
        gc.set_threshold(700, 10, 100)  # all requests in flight rarely, as in the router
        gc.enable()


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """Convert configuration errors raised in the block to the type that `sluice serve` handles."""
    try:
        yield
    except (ValueError, ConfigurationError) as error:
        raise ConfigurationError(str(error)) from error


def make_engines(
    config: EngineConfig,
    replica_id: str,
    max_live_requests: int,
    rank: int,
    traced: bool = False,
    role: Role = "mixed",
) -> list[Engine]:
    """An engine per rank of data parallelism. ``rank`` numbers a host's replicas, for pinning."""
    number = ranks(config.vllm_args)
    if config.kind == "simulated":
        return [
            SimulatedEngine(config, name, max_live_requests, role=role)
            for name in names_of(replica_id, number)
        ]
    if config.pin_cpu and not has_cuda_vllm():
        os.environ["OMP_NUM_THREADS"] = "1"
    start_fork_server()
    # Imported only where it runs: the import takes seconds, and simulated engines do not need vLLM.
    from sluice.replica.vllm.engine import VllmEngine, VllmRank

    core = core_of(rank * devices(config.vllm_args)) if config.pin_cpu else None
    first = VllmEngine(config, replica_id, max_live_requests, core, traced, role)
    return [first, *(VllmRank(first, each) for each in range(1, number))]
