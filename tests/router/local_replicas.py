"""Replicas with simulated engines in this process, which report to a controller here and which a
router reaches over its own connections."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.protocol.requests import EngineRequest
from sluice.protocol.streams import StreamEndpoint
from sluice.replica.config import EngineConfig, ReplicaConfig, SimulatedEngineConfig
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.replica.streams.server import StreamServer
from sluice.router.serve.contract import ReplicaStream
from sluice.router.serve.replicas import Channels
from sluice.scheduling.roles import Role
from tests.replica.waiting import until
from tests.router.far_side import FarSide
from tests.router.local_controller import LocalController


class Replicas(FarSide):
    """Replicas that a router reaches over its own connections only."""

    def __init__(
        self,
        controller: LocalController,
        engine: SimulatedEngineConfig,
        report_interval_s: float = 0.01,
    ) -> None:
        super().__init__()
        self.engine, self.report_interval_s = engine, report_interval_s
        self.controller = controller
        self.replicas: dict[str, Replica] = {}
        self.servers: dict[str, StreamServer] = {}
        self.channels = Channels(self.find)

    async def start(self, name: str) -> None:
        config = ReplicaConfig(report_interval_s=self.report_interval_s)
        engine = SimulatedEngine(
            EngineConfig(kind="simulated", model="m", simulated=self.engine), name, 64
        )
        replica = Replica(name, "node", engine, config, self.controller.controller)  # type: ignore[arg-type]
        await replica.start()
        self.replicas[name], self.servers[name] = replica, StreamServer(name, replica.open)
        self.channels.open(EngineRequest("x", "chat", {}, None), name, "mixed", self.nowhere)  # type: ignore[arg-type]
        await until(lambda: self.channels.connected(name))

    async def find(self, replica_id: str, role: Role) -> StreamEndpoint:
        return await self.servers[replica_id].endpoint("127.0.0.1")

    def nowhere(self) -> ReplicaStream:
        raise AssertionError("all calls take the connections")

    def generate(  # type: ignore[override]
        self, request: EngineRequest, target: str | None, avoid: Sequence[str], role: Role = "mixed"
    ) -> ReplicaStream:
        assert target is not None
        stream = self.channels.open(request, target, role, self.nowhere)
        assert stream is not None
        return stream

    def transfer_kv(self, request: EngineRequest, target: str) -> ReplicaStream | None:  # type: ignore[override]
        return self.channels.open_at(request, target)
