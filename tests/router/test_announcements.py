"""Streams that say that their promise is going to be missed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import httpx
import pytest

from sluice.protocol.requests import EngineRequest, ResponseChunk, ResponseHead, ResponseTail
from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.dispatch.announcements import first_is_late, late
from sluice.router.dispatch.attempt import Announcement, Answer, SuspicionState
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.scheduling.request.job import RouteDecision
from sluice.scheduling.request.objective import SLO, TokenClock
from tests.router.far_side import Edge, FarController, FarSide, Items, event
from tests.router.listening import listening
from tests.router.test_admission import best_effort, guaranteed
from tests.router.test_disconnect import content
from tests.router.test_openai_client import KEY, served

CLASSES = {"standard": ServiceClass(ttft_ms=50, tpot_ms=60_000)}


def after(go: asyncio.Event, status: int = 200) -> Callable[..., Items]:
    """A replica whose answer begins when the test says so."""

    async def behaviour(side: FarSide, replica: str, request: EngineRequest) -> Items:
        await go.wait()
        if status != 200:
            yield ResponseHead(status, "application/json", replica)
            yield ResponseChunk(b'{"error": {"message": "no", "code": 400}}')
            yield ResponseTail(0, 0)
            return
        yield ResponseHead(200, "text/event-stream", replica)
        yield ResponseChunk(event("one", request.request_id, last=True), 1)
        yield ResponseChunk(b"data: [DONE]\n\n")
        yield ResponseTail(5, 1)

    return behaviour


def edge_of(
    go: asyncio.Event, announce: Literal["comment", "event", "off"] = "comment", **more: Any
) -> Edge:
    decision = more.pop("decision", guaranteed())
    config = RouterConfig(classes=CLASSES, announce_misses=announce, api_keys=(KEY,))
    return Edge(FarSide(a=after(go, **more)), FarController(decision), config)


async def lines_until(stream: Any, text: str) -> list[str]:
    found: list[str] = []
    while not found or text not in found[-1]:
        found.append(await anext(stream))
    return found


@pytest.mark.parametrize("announce", ["comment", "event"])
async def test_a_first_token_that_will_be_late_is_announced_with_the_head(
    announce: Literal["comment", "event"],
) -> None:
    """The OpenAI client sees the head and the announcement before the token is there."""
    go = asyncio.Event()
    edge = edge_of(go, announce)
    async with served(edge) as client:
        made = await client.chat.completions.with_raw_response.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert made.headers["x-sluice-late"] == "ttft"
        assert made.headers["x-sluice-admission"] == "guaranteed"
        assert made.headers["x-sluice-promised-ttft-ms"] == "50.0"
        go.set()
        chunks = [chunk async for chunk in made.parse()]
        texts = [each.delta.content for chunk in chunks for each in chunk.choices]
        assert "".join(text or "" for text in texts) == "one"
        assert len(chunks) == (2 if announce == "event" else 1)
    labels = {"class": "standard", "outcome": "missed"}
    assert edge.sample("sluice_promises_announced_total", **labels) == 1
    assert edge.sample("sluice_promises_total", **labels) == 1


@asynccontextmanager
async def streamed(url: str) -> AsyncIterator[httpx.Response]:
    """A streamed chat by a plain HTTP client."""
    headers = {"authorization": f"Bearer {KEY}"}
    body, url = json.loads(content(stream=True)), f"{url}/v1/chat/completions"
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", url, json=body, headers=headers) as response,
    ):
        yield response


async def test_the_announcement_names_the_objective_and_is_made_once() -> None:
    go = asyncio.Event()
    edge = edge_of(go)
    async with listening(edge) as system, streamed(system.url) as response:
        lines = response.aiter_lines()
        said = (await lines_until(lines, "late"))[-1]
        assert said.startswith(": sluice.late ")
        assert json.loads(said[14:]) == {"objective": "ttft", "promised_ms": 50.0}
        edge.dispatcher._announcements.look()
        go.set()
        rest = await lines_until(lines, "[DONE]")
        assert not any("late" in line for line in rest)


async def test_a_refusal_after_the_announcement_is_an_event_of_the_stream() -> None:
    go = asyncio.Event()
    edge = edge_of(go, status=400)
    async with listening(edge) as system, streamed(system.url) as response:
        lines = response.aiter_lines()
        await lines_until(lines, "late")
        go.set()
        assert (await lines_until(lines, "error"))[-1].startswith('data: {"error"')


async def test_an_answer_without_a_stream_stays_json_whatever_its_body_asks_for() -> None:
    async def late_vectors(side: FarSide, replica: str, request: EngineRequest) -> Items:
        edge.dispatcher._announcements.look()
        await asyncio.sleep(0.1)  # past its TTFT
        yield ResponseHead(200, "application/json", replica)
        yield ResponseChunk(b'{"data": []}')
        yield ResponseTail(5, 0)

    config = RouterConfig(classes=CLASSES)
    edge = Edge(FarSide(a=late_vectors), FarController(guaranteed()), config)
    async with edge.client() as client:
        body = {"model": "m", "input": "Hi", "stream": True}
        response = await client.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()) == (200, {"data": []})
    assert "x-sluice-late" not in response.headers


@pytest.mark.parametrize(
    ("announce", "decision"), [("off", guaranteed()), ("comment", best_effort())]
)
async def test_without_a_promise_or_if_disabled_nothing_is_announced(
    announce: Literal["comment", "off"], decision: RouteDecision
) -> None:
    go = asyncio.Event()
    edge = edge_of(go, announce, decision=decision)
    async with listening(edge) as system, asyncio.TaskGroup() as tasks:

        async def read() -> str:
            async with streamed(system.url) as response:
                return (await response.aread()).decode()

        reading = tasks.create_task(read())
        await edge.side.until(lambda: bool(edge.side.live))
        for attempt, open_answer in edge.dispatcher._attempts.items():
            edge.dispatcher._announcements.look()
            first_is_late(attempt, open_answer)
        go.set()
        assert "late" not in await reading


def stream_of(slo: SLO, tokens: int, pace_s: float) -> Answer:
    """A stream of at most 100 tokens, with these so far, the first one at 1 s."""
    call = Call("r", "chat", {}, slo, PromptSize(1, 1), 0.0, output_tokens=100)
    clock = TokenClock(slo, 0.0)
    for number in range(tokens):
        clock.emit(1, 1.0 + number * pace_s)
    return Answer(call, SuspicionState(), clock)


@pytest.mark.parametrize(
    ("pace_s", "now_s", "missed"),
    [
        (0.02, 2.0, None),  # 50 tokens in time
        (0.02, 3.5, None),  # behind, and 1.5 s are left for 50 tokens, at best .5 s
        (0.02, 5.6, "tpot"),  # .35 s are left
    ],
)
def test_a_stream_is_late_once_it_could_not_catch_up(
    pace_s: float, now_s: float, missed: str | None
) -> None:
    answer = stream_of(SLO(tpot_s=0.05), 50, pace_s)
    known = Announcement(tokens=1, at_s=1.0)
    assert late(answer, known, now_s) == missed
    assert known.best_s == pytest.approx(pace_s)
    bounded = stream_of(SLO(e2e_s=6.0), 50, pace_s)
    said = late(bounded, Announcement(tokens=1, at_s=1.0), now_s)
    assert said == ("e2e" if missed else None)


def test_a_stream_of_unknown_length_may_become_some_times_as_long() -> None:
    answer = stream_of(SLO(tpot_s=0.05), 10, 0.02)
    answer.call = replace(answer.call, output_tokens=0)
    # 30 more tokens take .3 s at best, and are due at 1 s + 39 * .05 s.
    assert late(answer, Announcement(tokens=1, at_s=1.0), 2.64) is None
    assert late(answer, Announcement(tokens=1, at_s=1.0), 2.66) == "tpot"
