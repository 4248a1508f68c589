"""The simulated engine in real time, by its contract. Nothing here asserts on seconds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.protocol.requests import (
    EVENT_STREAM,
    EngineDeadError,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    request_key,
)
from sluice.replica.config import EngineConfig
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.batching import POLICIES
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.request.objective import SLO
from tests.replica.waiting import until

INSTANT = {"step_s": 0.0, "token_s": 0.0, "context_token_s": 0.0}
STUCK = {"step_s": 3600.0}
"""A step that no test waits for: what is submitted stays live."""


@asynccontextmanager
async def running(
    truth: dict[str, float] = INSTANT,
    max_live: int = 64,
    clock: Callable[[], float] = time.monotonic,
    **config: Any,
) -> AsyncIterator[SimulatedEngine]:
    simulated = {**truth, **config.pop("simulated", {})}
    config = {"policy": "fcfs", "simulated": simulated, **config}
    made = EngineConfig.model_validate({"kind": "simulated", "model": "model", **config})
    engine = SimulatedEngine(made, "replica-1", max_live, clock)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def completion(
    request_id: str = "r", waited_s: float = 0.0, slo: SLO | None = None, **body: Any
) -> EngineRequest:
    return EngineRequest(
        request_id, "completions", {"prompt": "a prompt", **body}, slo or SLO(), waited_s
    )


def chat(request_id: str = "r", content: Any = "a prompt", **body: Any) -> EngineRequest:
    messages = [{"role": "user", "content": content}]
    return EngineRequest(request_id, "chat", {"messages": messages, **body}, SLO())


async def collect(engine: SimulatedEngine, request: EngineRequest) -> list[ResponseItem]:
    return [item async for item in engine.generate(request)]


async def body_of(engine: SimulatedEngine, request: EngineRequest) -> dict[str, Any]:
    items = await collect(engine, request)
    data = b"".join(item.data for item in items if isinstance(item, ResponseChunk))
    return dict(json.loads(data))


def text_of(items: list[ResponseItem]) -> str:
    data = b"".join(item.data for item in items if isinstance(item, ResponseChunk)).decode()
    events = [line.removeprefix("data: ") for line in data.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def until_live(engine: SimulatedEngine, requests: int) -> None:
    await until(lambda: len(engine.state().rows) == requests)


async def test_streamed_and_plain_give_the_same_text_and_counts() -> None:
    async with running() as engine:
        plain = await collect(engine, completion(max_tokens=20))
        streamed = await collect(engine, completion(max_tokens=20, stream=True))
    assert plain[0] == ResponseHead(200, "application/json")
    assert streamed[0] == ResponseHead(200, EVENT_STREAM)
    chunk = plain[1]
    assert isinstance(chunk, ResponseChunk)
    text = json.loads(chunk.data)["choices"][0]["text"]
    assert len(text.split()) == 20
    assert text == text_of(streamed)
    for items in (plain, streamed):
        assert sum(item.tokens for item in items if isinstance(item, ResponseChunk)) == 20
        tail = items[-1]
        assert isinstance(tail, ResponseTail)
        assert (tail.prompt_tokens, tail.output_tokens) == (2, 20)
    offsets = plain[-1].token_offsets_s
    assert len(offsets) == 20
    assert list(offsets) == sorted(offsets)
    assert streamed[-1].token_offsets_s == ()


async def test_the_text_depends_on_the_prompt_and_nothing_else() -> None:
    async with running() as one, running(policy="slidebatching") as other:
        asked = ((one, "a", "first"), (other, "b", "first"), (one, "c", "second"))
        texts = [
            (await body_of(engine, completion(name, prompt=prompt)))["choices"][0]["text"]
            for engine, name, prompt in asked
        ]
    assert texts[0] == texts[1] != texts[2]


async def test_choices_are_numbered_prompt_by_prompt() -> None:
    async with running() as engine:
        body = await body_of(engine, completion(prompt=["one", "two"], n=3, max_tokens=5))
        alone = await body_of(engine, completion(prompt="two", max_tokens=5))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 30, "total_tokens": 32}
    texts = {choice["text"] for choice in body["choices"]}
    assert len(texts) == 6
    assert alone["choices"][0]["text"] not in texts


async def test_integers_may_be_written_with_a_point() -> None:
    async with running() as engine:
        plain = {"n": 2, "max_tokens": 5, "min_tokens": 2, "top_k": 3, "seed": 1}
        bodies = [
            await body_of(engine, completion(**{name: kind(each) for name, each in plain.items()}))
            for kind in (int, float)
        ]
    assert bodies[0]["choices"] == bodies[1]["choices"]


@pytest.mark.parametrize(
    ("request_", "status", "param"),
    [
        (completion(max_tokens=0), 400, "max_tokens"),
        (completion(max_tokens="5"), 400, "max_tokens"),
        (completion(max_tokens=8191), 400, "max_tokens"),
        (completion(min_tokens=20), 400, None),
        (completion(min_tokens=2.5), 400, "min_tokens"),
        (completion(min_tokens=True), 400, "min_tokens"),
        (completion(n=17), 400, "n"),
        (completion(n=9, prompt=["a", "b"]), 400, "prompt"),
        (completion(prompt=[]), 400, "prompt"),
        (completion(prompt=[[]]), 400, "prompt"),
        (completion(stream_options={"include_usage": True}), 400, None),
        (completion(model="another"), 404, "model"),
        (EngineRequest("r", "completions", {}, SLO()), 400, None),
        (EngineRequest("r", "chat", {"messages": []}, SLO()), 400, "messages"),
        (chat(content=[{"type": "image_url", "image_url": {"url": "x"}}]), 400, None),
    ],
)
async def test_a_mistake_gets_an_openai_error(
    request_: EngineRequest, status: int, param: str | None
) -> None:
    async with running() as engine:
        head, chunk, tail = await collect(engine, request_)
        assert len(engine.state().rows) == 0
    assert head == ResponseHead(status, "application/json")
    assert isinstance(chunk, ResponseChunk)
    error = json.loads(chunk.data)["error"]
    assert error["message"]
    assert error["code"] == ("model_not_found" if status == 404 else "invalid_value")
    if param is not None:
        assert error["param"] == param
    assert tail == ResponseTail(0, 0)


async def test_closing_the_stream_frees_the_engine() -> None:
    async with running(simulated={"kv_blocks": 64, "max_model_tokens": 1024}) as engine:
        stream = engine.generate(completion(max_tokens=1000, stream=True))
        async for item in stream:
            if isinstance(item, ResponseChunk) and item.tokens:
                break
        assert len(engine.state().rows) == 1
        await stream.aclose()
        assert len(engine.state().rows) == 0
        await engine.drain()
        # The step that was under way may still publish; the next one must see all blocks free.
        await collect(engine, completion(max_tokens=1))
        assert engine.state().summary["free_kv_blocks"] == 64


async def test_abort_ends_the_response_without_a_tail() -> None:
    async with running(STUCK) as engine:
        plain = asyncio.create_task(collect(engine, completion("a")))
        streamed = asyncio.create_task(collect(engine, completion("b", stream=True, n=2)))
        await until_live(engine, 3)
        await engine.abort("nobody")
        await engine.abort("a")
        assert await plain == []
        assert len(engine.state().rows) == 2
        await engine.abort("b")
        assert [type(item) for item in await streamed] == [ResponseHead]
        assert len(engine.state().rows) == 0
        await engine.drain()


async def test_a_full_engine_refuses_and_keeps_what_it_has() -> None:
    async with running(STUCK, max_live=4) as engine:  # 16 sequences
        first = asyncio.create_task(collect(engine, completion("a", n=10)))
        await until_live(engine, 10)
        head, chunk, _ = await collect(engine, completion("b", n=7))
        assert isinstance(head, ResponseHead)
        assert isinstance(chunk, ResponseChunk)
        assert head.status == 503
        assert "16 sequences" in json.loads(chunk.data)["error"]["message"]
        assert len(engine.state().rows) == 10
        first.cancel()


async def test_the_state_tells_age_objective_and_key() -> None:
    slo = SLO(ttft_s=0.5, priority=3)
    async with running(STUCK, clock=lambda: 1000.0) as engine:
        task = asyncio.create_task(collect(engine, completion("a", waited_s=0.25, slo=slo)))
        await until_live(engine, 1)
        row = engine.state().rows[0]
        assert (row["arrival_s"], row["priority"], row["ttft_s"]) == (999.75, 3, 0.5)
        assert (row["key"], row["prompt_tokens"]) == (request_key("a"), 2)
        task.cancel()


@pytest.mark.parametrize("waited_s", [-0.1, float("nan"), float("inf")])
def test_an_impossible_age_is_refused(waited_s: float) -> None:
    with pytest.raises(ValueError, match="waited_s must be finite and at least 0"):
        completion(waited_s=waited_s)


async def test_without_latency_the_loop_is_still_shared() -> None:
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with running() as engine:
        worker = asyncio.create_task(other_work())
        await collect(engine, completion(max_tokens=500))
        worker.cancel()
        assert engine.state().summary["steps"] == 500
    assert turns >= 500


async def test_a_slow_consumer_gets_larger_chunks() -> None:
    async with running() as engine:
        stream = engine.generate(completion(max_tokens=500, stream=True))
        assert isinstance(await anext(stream), ResponseHead)
        await until_live(engine, 0)
        chunks = [item async for item in stream if isinstance(item, ResponseChunk)]
    assert [chunk.tokens for chunk in chunks] == [500, 0]


async def test_stop_ends_live_requests_with_an_error() -> None:
    async with running(STUCK) as engine:
        await engine.check_health()
        task = asyncio.create_task(collect(engine, completion()))
        await until_live(engine, 1)
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            await task
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine, completion())


async def test_a_fault_in_the_engine_ends_requests_and_fails_the_health_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault in a policy")

    monkeypatch.setattr(POLICIES["fcfs"], "fill", broken)
    async with running() as engine:
        with pytest.raises(EngineDeadError, match="failed"):
            await collect(engine, completion())
        with pytest.raises(EngineDeadError):
            await engine.check_health()


async def test_it_plans_with_the_truth_or_with_a_given_profile(tmp_path: Path) -> None:
    async with running({"step_s": 0.01, "token_s": 0.002}) as engine:
        profile = (await engine.start()).profile
        assert profile.coefficients[:2] == (0.01, 0.002)
    async with running() as engine:
        assert (await engine.start()).profile.coefficients[1] > 0
    path = tmp_path / "profile.json"
    path.write_text(LatencyProfile.of("belief", LinearLatency(0.5, 0.25), None).to_json())
    async with running(latency_profile=path) as engine:
        assert (await engine.start()).profile.coefficients[0] == 0.5
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a latency profile"):
        async with running(latency_profile=path):
            pass


async def test_the_batch_log_tells_what_ran(tmp_path: Path) -> None:
    async with running(batch_log=tmp_path) as engine:
        await collect(engine, completion("a", max_tokens=3))
    lines = (tmp_path / "replica-1.jsonl").read_text().splitlines()
    ran = [json.loads(line)["ran"] for line in lines]
    assert ran == [[["a", 2, 0]], [["a", 1, 2]], [["a", 1, 3]]]
