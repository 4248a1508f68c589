"""The far side of the router: replicas that run as tasks of their own, and a controller.

A replica here is an async generator of items, as a real one is; it runs on its own and hands over
batches of what is ready, and a cancelled call closes it, as over the wire.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing

import httpx
from fastapi import FastAPI
from prometheus_client import generate_latest
from starlette.types import Message, Send

from sluice.controller.client import ControllerClient
from sluice.controller.transport.checks import checked_query
from sluice.protocol.messages import FirstTokenWait, LateNotice, RequestEnding
from sluice.protocol.requests import (
    EngineRequest,
    Progress,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    ResponseTaken,
)
from sluice.router.admin.api import AdminService
from sluice.router.api import make_api
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.attempt import Answer, Attempt, SuspicionState
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.dispatch.models import Catalog, Model, ModelRegistry
from sluice.router.errors import Reason
from sluice.router.ingress.middleware import Shedder
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.router.serve.contract import Forward, ReplicaFailedError, ReplicaStream
from sluice.router.serve.running import CHOSEN
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.placement.quotes import Quote
from sluice.scheduling.placement.windows import Leftover
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.request.lateness import Cause
from sluice.scheduling.request.objective import SLO, TokenClock
from sluice.scheduling.roles import Role
from tests.router.virtual_time import VirtualTime

Items = AsyncIterator[ResponseItem]
Behaviour = Callable[["FarSide", str, EngineRequest], Items]

DIED = ReplicaFailedError(Reason.REPLICA_FAILED, "The replica died.", dead=True)
UNREACHABLE = ReplicaFailedError(Reason.REPLICA_FAILED, "The replica could not be reached.")

CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
COMPLETION_BODY = {"model": "m", "prompt": "hello there"}
WORDS = ("one", " two", " three")


def event(text: str, request_id: str, last: bool = False) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop" if last else None}
    body = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def serve(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """A replica that works: three tokens, streamed or plain."""
    if request.body.get("stream"):
        yield ResponseHead(200, "text/event-stream", replica)
        for word in WORDS:
            yield ResponseChunk(event(word, request.request_id, word is WORDS[-1]), 1)
        yield ResponseChunk(b"data: [DONE]\n\n")
        yield ResponseTail(5, len(WORDS))
        return
    yield ResponseHead(200, "application/json", replica)
    message = {"role": "assistant", "content": "".join(WORDS)}
    body = {
        "id": f"chatcmpl-{request.request_id}",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
    }
    yield ResponseChunk(json.dumps(body).encode())
    yield ResponseTail(5, len(WORDS), (0.1, 0.2, 0.3))


async def hang(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """A long prefill."""
    await asyncio.Event().wait()
    yield ResponseHead(200, "application/json", replica)


async def stall(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """One token, and then none."""
    yield ResponseHead(200, "text/event-stream", replica)
    yield ResponseChunk(event("one", request.request_id), 1)
    await asyncio.Event().wait()


def answer(status: int, body: bytes, media_type: str = "application/json") -> Behaviour:
    """A replica that answers with this."""

    async def behaviour(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(status, media_type, replica)
        yield ResponseChunk(body)
        yield ResponseTail(0, 0)

    return behaviour


def fail(error: ReplicaFailedError, after: int = 0) -> Behaviour:
    """A replica that fails, ``after`` a head and so many tokens if that is positive."""

    async def behaviour(side: FarSide, replica: str, request: EngineRequest) -> Items:
        if after:
            yield ResponseHead(200, "text/event-stream", replica)
            await side.let_go()
        for index in range(after):
            yield ResponseChunk(event(WORDS[index], request.request_id), 1)
            await side.let_go()
        raise error

    return behaviour


async def confirmed(
    replica: str, items: AsyncIterator[ResponseItem]
) -> AsyncIterator[ResponseItem]:
    """What comes of a replica that is to say first that it has the request."""
    yield ResponseTaken(replica)
    async with aclosing(items) as rest:  # type: ignore[type-var]
        async for item in rest:
            yield item


class FarStream:
    """A call under way."""

    forward: Forward | None = None

    def __init__(
        self, side: FarSide, items: AsyncIterator[ResponseItem], request_id: str, name: str = ""
    ) -> None:
        self._name = name
        self._queue: asyncio.Queue[ResponseItem | BaseException | None] = asyncio.Queue()
        self._side = side
        self._request_id = request_id
        self._task = asyncio.create_task(self._pump(items))

    async def _pump(self, items: AsyncIterator[ResponseItem]) -> None:
        self._side.live.add(self._request_id)
        self._side.changed.set()
        try:
            async with aclosing(items) as generator:  # type: ignore[type-var]
                async for item in generator:
                    await self._side.moves(self._name)
                    self._queue.put_nowait(item)
            self._queue.put_nowait(None)
        except Exception as error:  # also one of the test itself, which must not hang
            self._queue.put_nowait(error)
        finally:
            self._side.live.discard(self._request_id)
            self._side.changed.set()

    async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        while True:
            ready = [await self._queue.get()]
            while not self._queue.empty():
                ready.append(self._queue.get_nowait())
            end = ready.pop() if not isinstance(ready[-1], tuple) else ready
            if ready:
                yield ready  # type: ignore[misc]
            if end is None:
                return
            if isinstance(end, BaseException):
                raise end

    def cancel(self) -> None:
        if not self._task.done():
            self._side.cancelled.append(self._request_id)
            self._task.cancel()


class FarSide:
    """Replicas by name, each with its behaviour, and what was asked of them."""

    def __init__(self, **behaviours: Behaviour) -> None:
        self.behaviours = behaviours
        self.roles: Sequence[Role] = ("mixed",)
        self.pools: list[Role] = []
        """The pool that each of :attr:`calls` went to."""
        self.empty: set[Role] = set()
        """Pools without a replica."""
        self.left_s = 40.0
        """Predicted time until the first replica runs, if none does."""
        self.asleep = False
        """Whether there is no replica, and a request starts one; end it with :meth:`awake`."""
        self.wakes = 0
        self.no_start: ReplicaFailedError | None = None
        """Why no replica starts."""
        self.drained = False
        """Whether its replicas take no new requests."""
        self.calls: list[tuple[str, EngineRequest]] = []
        self.live: set[str] = set()
        self.cancelled: list[str] = []
        self.changed = asyncio.Event()
        self.max_model_len: int | None = None
        """Longest prompt and output, as replicas say; ``None``: they do not."""
        self.hung: set[str] = set()
        """Replicas whose engine stands still, as they say."""
        self.questions: list[str | None] = []
        """Who was asked whether it goes on; ``None``: anybody."""
        self.frozen: dict[str, asyncio.Event] = {}
        """Replicas whose process stands still."""
        self.addresses: dict[str, str] = {}
        """Where replicas send streams past the routers."""

    async def at(self, endpoints: Collection[str]) -> dict[str, Role]:
        return {name: "mixed" for name, each in self.addresses.items() if each in endpoints}

    def generate(
        self, request: EngineRequest, target: str | None, avoid: Sequence[str], role: Role = "mixed"
    ) -> FarStream:
        self.pools.append(role)
        if role in self.empty:
            nobody = ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.", retry=False)
            nobody = self.no_start or nobody
            return FarStream(self, fail(nobody)(self, role, request), request.request_id)
        if target not in self.behaviours:
            rest = [name for name in self.behaviours if name not in avoid]
            target = rest[0] if rest else next(iter(self.behaviours))
            # As Serve's request router does, a moment later.
            name, chosen = request.request_id, target
            asyncio.get_running_loop().call_soon(
                lambda: CHOSEN[name](chosen) if name in CHOSEN else None
            )
        self.calls.append((target, request))
        self.changed.set()
        items = self.behaviours[target](self, target, request)
        if request.confirm:
            items = confirmed(target, items)
        return FarStream(self, items, request.request_id, target)

    def transfer_kv(self, request: EngineRequest, target: str) -> FarStream | None:
        return self.generate(request, target, ()) if target in self.behaviours else None

    def freeze(self, name: str) -> None:
        """A replica's process stands still: nothing comes of it any more."""
        self.frozen[name] = asyncio.Event()

    def thaw(self, name: str) -> None:
        """It goes on."""
        self.frozen.pop(name).set()

    async def moves(self, name: str) -> None:
        """Return when a replica's process goes on."""
        if name in self.frozen:
            await self.frozen[name].wait()

    async def progress(
        self, request_ids: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
    ) -> Progress:
        self.questions.append(target)
        if target not in self.behaviours:
            rest = [name for name in self.behaviours if name not in avoid]
            target = rest[0] if rest else next(iter(self.behaviours))
        await self.moves(target)
        unknown = tuple(name for name in request_ids if name not in self.live)
        return Progress(target, target in self.hung, unknown)

    async def models(self) -> dict[str, object]:
        if not self.behaviours:
            if self.no_start is not None:
                raise self.no_start
            await asyncio.Event().wait()
        entry = {"id": "m", "object": "model", "max_model_len": self.max_model_len}
        return {"object": "list", "data": [entry]}

    def is_leaving(self, replica_id: str) -> bool:
        return False

    async def all_models(self) -> list[dict[str, object]]:
        return [await self.models()]

    async def check(self) -> None:
        if self.drained:
            raise ReplicaFailedError(Reason.NO_REPLICA, "Every replica is drained.", retry=False)
        await self.models()

    @property
    def single(self) -> bool:
        return len(self.roles) == 1

    def awake(self, failure: ReplicaFailedError | None = None) -> None:
        """A replica runs, or none starts because of ``failure``."""
        self.asleep, self.no_start = False, failure
        self.changed.set()

    @property
    def starts_in_s(self) -> float | None:
        return self.left_s if self.asleep or not self.behaviours else None

    async def wake(self) -> None:
        self.wakes += 1
        while self.asleep:
            self.changed.clear()
            await self.changed.wait()
        if self.no_start is not None:
            raise self.no_start

    async def let_go(self) -> None:
        """Let the other side take what is ready."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on this object."""
        async with asyncio.timeout(120):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class NoItems:
    """A stream without items."""

    forward: Forward | None = None

    async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        for items in ():
            yield items

    def cancel(self) -> None:
        pass


def attempt_at(
    place: str | None,
    stream: ReplicaStream,
    clock: Callable[[], float] = time.monotonic,
    request_id: str = "r",
) -> Attempt:
    """An attempt by itself."""
    request = EngineRequest(request_id, "chat", {}, SLO())
    return Attempt(request, RouteDecision(place, "test"), "mixed", stream, clock=clock)


def waiting_call() -> Answer:
    """A call that waits for an answer, and may be tried again."""
    call = Call("r", "chat", {}, SLO(), PromptSize(1, 1), 0.0)
    return Answer(call, SuspicionState(), TokenClock(call.slo, 0.0), max_attempts=2)


class FarController:
    """Answers with what it is given, in turn and the last for ever, and notes what it is told.

    A name stands for a replica, without a tier.
    """

    def __init__(self, *decisions: str | RouteDecision | None) -> None:
        self.decisions = list(decisions)
        self.queries: list[RouteQuery] = []
        self.released: list[int] = []
        self.gone: list[str] = []
        self.troubles: list[tuple[str, ReplicaFault]] = []
        self.endings: list[RequestEnding] = []
        self.late_notices: list[LateNotice] = []
        self.silent = not decisions
        self.left: Leftover | None = None

    async def leftover(self, query: RouteQuery, in_flight: int) -> Leftover | None:
        checked_query(query)
        return self.left

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        self.queries.append(query)
        if self.silent:
            return None
        choice = self.decisions.pop(0) if len(self.decisions) > 1 else self.decisions[0]
        return choice if isinstance(choice, RouteDecision) else RouteDecision(choice, "test")

    async def quote(self, query: RouteQuery, hold_s: float) -> Quote | None:
        return None if self.silent else Quote(RouteDecision("a", "test"))

    def release(self, key: int) -> None:
        self.released.append(key)

    def replica_gone(self, replica_ids: Sequence[str]) -> None:
        self.gone.extend(replica_ids)

    def faulted(self, replica_id: str, fault: ReplicaFault) -> None:
        self.troubles.append((replica_id, fault))

    def ended(self, ending: RequestEnding) -> None:
        self.endings.append(ending)

    def late(self, notice: LateNotice) -> None:
        self.late_notices.append(notice)

    def on_leaving(self, leaving: Callable[[Sequence[str]], None]) -> None:
        self.leaving = leaving

    def on_sync(
        self,
        waits: Callable[[], Sequence[FirstTokenWait]],
        missing: Callable[[Sequence[int]], None],
    ) -> None:
        self.waits, self.missing = waits, missing


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def pause(self, seconds: float) -> None:
        self.now_s += seconds


def local_page(metrics: RouterMetrics) -> Callable[[], Awaitable[bytes]]:
    """Renders the metrics of one router."""

    async def render() -> bytes:
        return generate_latest(metrics.registry)

    return render


class Edge:
    """A whole router without Ray: the real API over a far side."""

    def __init__(
        self,
        side: FarSide,
        controller: FarController | None = None,
        config: RouterConfig | None = None,
        clock: Clock | VirtualTime | None = None,
        unix_clock: Callable[[], float] = time.time,
        telemetry: Telemetry | None = None,
        admin_service: AdminService | None = None,
        loop_service: ControllerClient | None = None,
    ) -> None:
        self.side = side
        self.controller = controller or FarController(next(iter(side.behaviours), None))
        self.config = config or RouterConfig()
        self.metrics = RouterMetrics()
        extra = {"clock": clock, "pause": clock.pause} if clock else {}
        self.dispatcher = Dispatcher(
            self.controller,
            side,
            self.metrics,
            self.config,
            **extra,  # type: ignore[arg-type]
            transfers_kv=True,
        )
        fleet = Model("m", self.dispatcher, Catalog(side), self.metrics, adapters=("local",))
        self.fleets = ModelRegistry([fleet], self.metrics)
        self.shedder = Shedder(self.metrics.loop_delay_s, clock or time.monotonic)
        self.api: FastAPI = make_api(
            self.config,
            self.fleets,
            local_page(self.metrics),
            unix_clock=unix_clock,
            telemetry=telemetry,
            admin_service=admin_service,
            loop_service=loop_service,
            shedder=self.shedder,
            pause=clock.pause if clock else asyncio.sleep,
        )

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def causes(self, objective: str, service_class: str = "standard") -> dict[str, float]:
        """Promises that missed an objective, by cause."""
        labels = {"class": service_class, "objective": objective}
        name = "sluice_promises_missed_total"
        return {
            cause: count for cause in Cause if (count := self.sample(name, **labels, cause=cause))
        }


class Client:
    """One HTTP request, driven by hand. ``whole``: its body is complete. ``takes``: number of
    messages of its answer that it reads; ``None``: all. ``send``: in place of its own."""

    def __init__(
        self,
        edge: Edge,
        content: bytes,
        whole: bool = True,
        key: str = "",
        takes: int | None = None,
        send: Send | None = None,
    ) -> None:
        self._room = None if takes is None else asyncio.Semaphore(takes)
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": content, "more_body": not whole})
        self.got: list[Message] = []
        self.changed = asyncio.Event()
        headers = {"host": "localhost", "content-type": "application/json"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(edge.api(scope, self._inbox.get, send or self._send))

    @property
    def status(self) -> int:
        return int(self.got[0]["status"])

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})
        for _ in range(0 if self._room is None else 9):  # a server drops what is sent to nobody
            self._room.release()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def _send(self, message: Message) -> None:
        if self._room is not None:
            await self._room.acquire()
        self.got.append(message)
        self.changed.set()
