"""A drain with all parts but Ray in one process: the controller, replicas with simulated engines
that report to it, the router's connections to them, and the real API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sluice.benchmarks.live.client import AnswerCheck, simulated
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
from tests.router.far_side import Edge, FarSide
from tests.router.local_controller import LocalController

TRUTH = SimulatedEngineConfig(step_s=0.005, token_s=0.0001, context_token_s=0.0)
BODY = {"model": "m", "stream": True, "max_tokens": 5_000}
PROMISE = {"slo": {"ttft_ms": 20_000, "tpot_ms": 2_000}}


class Replicas(FarSide):
    """Replicas that a router reaches over its own connections only."""

    def __init__(
        self,
        controller: LocalController,
        engine: SimulatedEngineConfig = TRUTH,
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

    async def stop(self, name: str) -> bool:
        """As its deployment does when Serve stops it. Returns whether all requests had left."""
        self.servers[name].goodbye()
        left = await self.replicas[name].drain()
        await self.servers[name].stop()
        await self.replicas[name].stop()
        return left

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

    def served(self, name: str) -> int:
        return self.replicas[name].live_requests


@asynccontextmanager
async def started(*names: str) -> AsyncIterator[tuple[Edge, Replicas, LocalController]]:
    controller = LocalController(time.monotonic)
    side = Replicas(controller)
    for name in names:
        await side.start(name)
    edge = Edge(side, controller)  # type: ignore[arg-type]
    try:
        yield edge, side, controller
    finally:
        for name in names:
            await side.servers[name].stop()
            await side.replicas[name].stop()


class Client:
    """Reads a stream and checks each of its tokens, without a proxy that collects it."""

    def __init__(self, edge: Edge, number: int) -> None:
        body = {**BODY, "prompt": f"stream {number}", **(PROMISE if number % 2 else {})}
        self.check = AnswerCheck(simulated("completions", body))
        self._request = json.dumps(body).encode()
        self.task = asyncio.create_task(self._read(edge))

    async def _read(self, edge: Edge) -> None:
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": self._request}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200
            else:
                self.check.feed(message["body"])

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            **{"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"},
            **{"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b""},
            **{"root_path": "", "headers": headers, "client": None, "server": ("router", 80)},
        }
        await edge.api(scope, receive, send)


async def more(clients: list[Client], tokens: int) -> None:
    """Each stream gets so many more tokens."""
    wanted = [client.check.chunks + tokens for client in clients]

    def come() -> bool:
        for client in clients:
            if client.task.done():
                client.task.result()
                raise AssertionError("a stream has ended")
        return all(c.check.chunks >= least for c, least in zip(clients, wanted, strict=True))

    await until(come)


async def push(edge: Edge, controller: LocalController) -> None:
    """What a router does once a second."""
    controller.leaving((await controller.controller.sync()).leaving)
    await asyncio.sleep(0)


@pytest.mark.parametrize("stops", [False, True])
async def test_the_streams_of_a_drained_or_stopped_replica_move(stops: bool) -> None:
    async with started("a", "b") as (edge, side, controller):
        assert await controller.drain("b", True)
        clients = [Client(edge, number) for number in range(20)]
        await more(clients, 3)
        assert (side.served("a"), side.served("b")) == (20, 0)
        assert await controller.drain("b", False)
        stopping = None
        if stops:
            stopping = asyncio.create_task(side.stop("a"))
            await until(lambda: not side.channels.connected("a"))
            await until(lambda: controller.controller._mirror.replicas["a"].draining)
        else:
            await controller.drain("a", True)
        while side.served("a"):
            await push(edge, controller)
            await more(clients, 1)
        assert stopping is None or await stopping, "it has ended before its streams"
        await more(clients, 20)
        labels = {"reason": "leaving", "kv": "transferred"}
        assert edge.sample("sluice_migration_pause_seconds_count", **labels) == 20
        assert side.replicas["b"].engine.state().summary["transfers"] == 20
        assert edge.sample("sluice_resumes_total") == 0
        for client in clients:
            client.task.cancel()
        await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
