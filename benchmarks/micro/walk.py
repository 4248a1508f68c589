"""How far a reader walks through the code: ``sluice bench walk``.

A profile hook counts our calls in a streamed chat, a decision and an engine step; the second of
each kind counts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import click

from sluice.benchmarks.live.report import table
from sluice.benchmarks.micro.decision_fleet import FleetMessages
from sluice.benchmarks.options import as_json, show
from sluice.controller.config import ControllerConfig
from sluice.protocol.requests import ResponseChunk, ResponseHead, ResponseItem, ResponseTail
from sluice.replica.config import EngineConfig, SimulatedEngineConfig
from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.replica.simulated.core import SimulatedCore
from sluice.router.config import RouterConfig
from sluice.scheduling import batching
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.job import RouteDecision
from sluice.scheduling.request.objective import SLO

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("router", "controller", "replica", "scheduling", "simulation", "benchmarks", "deploy"),
    *("telemetry", "protocol"),
)
HERE = str(ROOT / "benchmarks")


class Walk(NamedTuple):
    """Calls of own functions, their files, changes of file, and returns to one left before."""

    calls: int
    files: int
    moves: int
    returns: int

    @classmethod
    def of(cls, path: Sequence[str]) -> Walk:
        """The walk whose calls were in the files of ``path``, in this order."""
        files = len(set(path))
        moves = sum(path[at] != path[at - 1] for at in range(1, len(path))) + bool(path)
        return cls(len(path), files, moves, moves - files)


@contextmanager
def walked() -> Iterator[list[str]]:
    """The files of the calls of own functions, in this thread and without the benchmarks'."""
    path: list[str] = []
    own: dict[str, str | None] = {}

    def called(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename
        if name not in own:
            real = str(Path(name).resolve())
            ours = any(real.startswith(f"{ROOT}/{package}/") for package in PACKAGES)
            own[name] = real if ours and not real.startswith(f"{HERE}/") else None
        found = own[name]
        if found is not None:
            path.append(found)

    sys.setprofile(called)
    try:
        yield path
    finally:
        sys.setprofile(None)


class _Answer:
    """Three tokens of a chat, one at a time."""

    async def __aiter__(self) -> AsyncIterator[list[ResponseItem]]:
        yield [ResponseHead(200, "text/event-stream", "a")]
        for word in ("one", " two", " three"):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
            text = json.dumps({**event, "model": "m", "choices": [choice]})
            yield [ResponseChunk(f"data: {text}\n\n".encode(), 1)]
        yield [ResponseChunk(b"data: [DONE]\n\n"), ResponseTail(5, 3)]

    def cancel(self) -> None:
        """There is no work to stop."""


class _FarSide:
    """A replica and a controller that answer at once."""

    roles, single, asleep = ("mixed",), True, False

    async def route(self, _: object) -> RouteDecision:
        return RouteDecision("a", "test")

    def generate(self, *_: object) -> _Answer:
        return _Answer()

    async def models(self) -> dict[str, Any]:
        data = [{"id": "m", "object": "model"}]
        return {"object": "list", "data": data, "endpoints": ["chat"]}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


async def chat() -> Walk:
    """A streamed chat of three tokens in the router."""
    # They import Ray, which must not happen before `sluice serve` has set Ray's environment.
    from sluice.router.api import make_api
    from sluice.router.dispatch.dispatcher import Dispatcher
    from sluice.router.dispatch.models import Catalog, Model, ModelRegistry
    from sluice.router.metrics.instruments import RouterMetrics

    far: Any = _FarSide()
    config, metrics = RouterConfig(), RouterMetrics()
    model = Model("m", Dispatcher(far, far, metrics, config), Catalog(far), metrics)
    api = make_api(config, ModelRegistry([model], metrics), far.render)
    request = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    body = json.dumps(request).encode()
    headers = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"},
        **{"scheme": "http", "path": "/v1/chat/completions", "query_string": b""},
        **{"raw_path": b"/v1/chat/completions", "root_path": ""},
        **{"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1)},
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }

    async def once() -> list[str]:
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()
            raise AssertionError("the client stays")

        async def send(message: Any) -> None:
            sent.append(message)

        with walked() as path:
            await api({**scope, "state": {}}, receive, send)
        text = b"".join(message.get("body", b"") for message in sent)
        if sent[0]["status"] != 200 or text.count(b"data: ") != 4:
            raise RuntimeError(f"the router did not stream the chat: {sent}")
        return path

    await once()
    return Walk.of(await once())


async def decision() -> Walk:
    """A decision with two replicas, for a request with TTFT and TPOT."""
    from sluice.controller.actor import Controller

    # The replicas say hello only once, and must not go stale.
    controller, messages = Controller(ControllerConfig(stale_after_s=7_200.0)), FleetMessages(2)
    for index in range(messages.replicas):
        await controller.hello(messages.hello(index))
    path: list[str] = []
    for key in (1 << 50, (1 << 50) + 1):
        query = messages.query(key)
        with walked() as calls:
            reply = await controller.route([query])
        path = calls
        if reply.decisions[0].replica_id is None:
            raise RuntimeError(f"no replica was chosen: {reply.decisions[0].reason}")
    return Walk.of(path)


def engine_step() -> Walk:
    """A step of four requests under the default policy: a prefill, and then decodes."""
    config, states = SimulatedEngineConfig(), StateTable.create(64)
    model = LinearLatency(config.step_s, config.token_s, config.context_token_s)
    policy = batching.make_policy(EngineConfig(kind="simulated", model="m").policy)
    core = SimulatedCore(config, LocalScheduler(policy, states, model), states)
    for key in range(4):
        core.submit(RequestArgs(str(key), 0.0, SLO(ttft_s=1.0, tpot_s=0.1)), key, 100, 8)
    now_s, path = 0.0, list[str]()
    for _ in range(3):
        with walked() as calls:
            step = core.begin(now_s)
            if step is None or len(step.ran) != 4:
                raise RuntimeError(f"the step does not have the four requests: {step}")
            now_s += step.seconds
            core.complete(step, now_s, lambda _: None)
        path = calls
    return Walk.of(path)


@click.command(name="walk")
@as_json
def walk(as_json: bool) -> None:
    """Count the calls and files of a chat, a decision and an engine step.

    \b
    Example:
      sluice bench walk --json
    """
    walks = {
        "a streamed chat of 3 tokens, router only": asyncio.run(chat()),
        "a decision, 2 replicas, TTFT and TPOT": asyncio.run(decision()),
        "an engine step of 4 requests, default policy": engine_step(),
    }
    rows = [{"walk": name, **each._asdict()} for name, each in walks.items()]
    title = "calls of own functions; returns: to a file left before"
    found = {name: each._asdict() for name, each in walks.items()}
    show({"walks": found}, [table(rows, *rows[0], title=title)], as_json)
