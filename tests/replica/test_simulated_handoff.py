"""Prompts that one simulated engine computes and another one goes on with."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.requests import (
    EngineRequest,
    KVHandle,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    Resume,
)
from sluice.replica.simulated.core import Transfer
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.request.objective import SLO
from tests.examples import examples
from tests.replica.test_simulated_core import Bench
from tests.replica.test_simulated_engine import (
    INSTANT,
    chat,
    collect,
    completion,
    running,
    text_of,
    until_live,
)


def prefill_of(request: EngineRequest) -> EngineRequest:
    return replace(request, request_id=f"{request.request_id}.prefill", prefill_only=True)


async def hand_over(engine: SimulatedEngine, request: EngineRequest) -> KVHandle:
    head, tail = await collect(engine, prefill_of(request))
    assert head == ResponseHead(200, "application/json")
    assert isinstance(tail, ResponseTail)
    assert tail.kv_handle is not None
    assert (tail.output_tokens, tail.prompt_tokens) == (0, tail.kv_handle.prompt_tokens)
    return tail.kv_handle


def choices(items: list[ResponseItem]) -> list[bytes]:
    """What follows ids and times in each event."""
    data = b"".join(item.data for item in items if isinstance(item, ResponseChunk))
    return [event.partition(b'"choices"')[2] for event in data.split(b"\n\n")]


@pytest.mark.parametrize(
    "request_",
    [chat(max_tokens=6, n=1), completion(max_tokens=6), completion(max_tokens=6, stream=True)],
    ids=["chat", "completion", "stream"],
)
async def test_the_answer_is_that_of_one_engine(request_: EngineRequest) -> None:
    async with running() as prefill, running() as decode:
        plain = await collect(prefill, request_)
        kv_handle = await hand_over(prefill, request_)
        split = await collect(decode, replace(request_, kv_handle=kv_handle))
        summary = decode.state().summary
        assert not len(prefill.state().rows)
    assert choices(split) == choices(plain)
    tail = split[-1]
    assert isinstance(tail, ResponseTail)
    assert (tail.prompt_tokens, tail.output_tokens) == (kv_handle.prompt_tokens, 6)
    assert (summary["transfers"], summary["transfer_failures"]) == (1, 0)
    assert summary["transfer_tokens"] == kv_handle.prompt_tokens - 1


@pytest.mark.parametrize(
    "wrong",
    [
        KVHandle("p", {}, 2),
        KVHandle("p", {"model": "model", "prompt": 1}, 2),
        KVHandle("p", {"model": "another", "prompt": 0}, 2),
    ],
)
async def test_what_cannot_be_had_is_computed(wrong: KVHandle) -> None:
    request = completion(max_tokens=4, stream=True)
    async with running() as engine:
        plain = await collect(engine, request)
        split = await collect(engine, replace(request, kv_handle=wrong))
        summary = engine.state().summary
    assert text_of(split) == text_of(plain)
    assert (summary["transfers"], summary["transfer_failures"]) == (0, 1)


async def test_only_one_prompt_with_one_answer_is_computed_apart() -> None:
    async with running() as engine:
        for request in (
            completion(n=2),
            EngineRequest("r", "completions", {"prompt": ["a", "b"]}, SLO()),
            EngineRequest("r", "tokenize", {"prompt": "a"}, SLO()),
        ):
            head, *_ = await collect(engine, prefill_of(request))
            assert head == ResponseHead(400, "application/json")


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
async def test_clients_cannot_name_kv(field: str) -> None:
    async with running() as engine:
        head, *_ = await collect(engine, completion(**{field: {"do_remote_prefill": True}}))
    assert head == ResponseHead(400, "application/json")


async def test_a_running_stream_gives_its_kv_away_and_stops() -> None:
    slow = {**INSTANT, "step_s": 0.001, "max_batch_tokens": 64}
    request = replace(
        completion(prompt=list(range(400)), max_tokens=300, stream=True), resumable=True
    )
    async with running() as one:
        whole = text_of(await collect(one, replace(request, request_id="whole")))
    async with running(slow) as source, running(slow) as target:
        had: list[ResponseChunk] = []
        stream = source.generate(request)
        async for item in stream:
            if isinstance(item, ResponseChunk):
                had.append(item)
            if len(had) == 5:
                break
        ids = tuple(token for chunk in had for token in chunk.token_ids)
        resume = Resume(ids, tuple(chunk.tokens for chunk in had), request.request_id)
        rest = replace(request, request_id="rest", resume=resume)
        steps = int(source.state().summary["steps"])
        asked = replace(prefill_of(rest), kv_of_request=request.request_id)
        head, tail = await collect(source, asked)
        assert head == ResponseHead(200, "application/json") and isinstance(tail, ResponseTail)
        assert [item async for item in stream if isinstance(item, ResponseTail)] == []
        assert int(source.state().summary["steps"]) <= steps + 2, "its prompt is not computed again"
        assert tail.kv_handle is not None and tail.kv_handle.prompt_tokens == 400 + len(ids)
        moved = await collect(target, replace(rest, kv_handle=tail.kv_handle))
        summary = target.state().summary
        assert not len(source.state().rows)
    assert text_of(moved) == whole
    assert (summary["transfers"], summary["transfer_failures"]) == (1, 0)
    async with running() as engine:
        head, *_ = await collect(engine, replace(request, kv_of_request="x"))
    assert head == ResponseHead(400, "application/json"), "only a prompt's KV is handed over"


async def test_an_aborted_transfer_leaves_nothing() -> None:
    async with running({**INSTANT, "transfer_s": 3600.0}) as engine:
        request = completion(max_tokens=4)
        stream = engine.generate(
            replace(request, kv_handle=await hand_over(engine, request))
        ).__aiter__()
        waiting = asyncio.ensure_future(anext(stream))
        await until_live(engine, 1)
        row = engine.state().rows[0]
        assert (row["computed_tokens"], row["pending_tokens"]) == (1, 1)
        await engine.abort(request.request_id)
        with pytest.raises(StopAsyncIteration):
            await waiting
        await engine.drain()
        assert not len(engine.state().rows)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(2, 60), st.integers(1, 8), st.floats(0, 0.5), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_kv_is_used_when_it_is_here_and_never_before(
    asked: list[tuple[int, int, float, bool]],
) -> None:
    bench = Bench(kv_blocks=256, block_tokens=4)  # room for all: nothing is preempted
    core = bench.core
    ready: dict[int, float] = {}
    for owner, (prompt, output, seconds, moved) in enumerate(asked):
        ready[owner] = seconds if moved else 0.0
        bench.submit(owner, prompt, output, transfer=Transfer(0.0, seconds) if moved else None)
    computed = dict.fromkeys(ready, 0)
    while core.queued:
        arrival_s = core.next_arrival_s()
        if not core.live and arrival_s is not None:
            bench.now_s = max(bench.now_s, arrival_s)
        begun_s = bench.now_s
        for owner, tokens in bench.step():
            assert begun_s >= ready[owner]
            computed[owner] += tokens
    for owner, (prompt, output, _, moved) in enumerate(asked):
        # The last token of a prompt and all of the output but its last.
        assert computed[owner] == (1 if moved else prompt) + output - 1
    assert core.rows.free_blocks == 256
    moved_tokens = sum(prompt - 1 for prompt, _, _, moved in asked if moved)
    assert bench.table.read().summary["transfer_tokens"] == moved_tokens


def test_a_prompt_computed_for_another_engine_says_nothing_of_lengths() -> None:
    bench = Bench()
    for owner in range(40):
        bench.submit(owner, 10, 1, prefill_only=True)
    bench.run()
    later = bench.submit("later", 10, 30)
    assert later.tracked.expected_tokens != 1
