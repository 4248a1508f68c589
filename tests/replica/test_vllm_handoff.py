"""Prompts that one real vLLM engine computes and another one goes on with: two engine processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from sluice.protocol.requests import (
    EVENT_STREAM,
    EngineDeadError,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
    Resume,
)
from sluice.replica.config import TransferConfig
from sluice.replica.vllm.engine import VllmEngine
from sluice.scheduling.request.objective import SLO
from tests.replica.attentive import attentive_model
from tests.replica.small_engine import (
    batches_of,
    data_of,
    events_of,
    greedy,
    items_of,
    small_config,
    split,
)
from tests.replica.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
CHUNK = 96
"""Most tokens of a batch: prompts of more are computed in chunks."""

LIMITS = {"max_num_batched_tokens": CHUNK, "max_model_len": 2048}

KV_BYTES = {"prefill": 64 << 20, "decode": 6 << 20}
"""The decode side has room for a few prompts only."""

WORDS = ("the", "river", "was", "quiet", "in", "a", "morning", "and", "nobody", "spoke", "of", "it")


def words(count, seed=0):
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(count))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines")
    model = attentive_model(directory)
    fields = {"transfer": TransferConfig(max_bytes=16 << 20)}
    both = []
    for name, kv_bytes in KV_BYTES.items():
        args = {**LIMITS, "kv_cache_memory_bytes": kv_bytes}
        both.append(VllmEngine(small_config(model, directory, fields, **args), name, 32))
    await asyncio.gather(*(engine.start() for engine in both))
    yield both
    for engine in both:
        await engine.stop()


def request(request_id, endpoint="completions", **body):
    prompt = {} if body.keys() & {"messages", "prompt"} else {"prompt": words(60)}
    fixed = {"max_tokens": 10, **prompt, **body}
    return greedy(request_id, endpoint, SLO(ttft_s=5.0, tpot_s=1.0), **fixed)


async def whole_answer(engine, request):
    """The answer of one engine, as a client sees it."""
    return content(await items_of(engine, replace(request, request_id="whole")))


async def prefill(engine, request):
    asked = replace(request, request_id=f"{request.request_id}.prefill", prefill_only=True)
    head, tail = await items_of(engine, asked)
    assert (head, tail.output_tokens) == (ResponseHead(200, "application/json"), 0)
    assert tail.kv_handle.prompt_tokens == tail.prompt_tokens
    assert tail.kv_handle.replica_id in KV_BYTES
    return tail.kv_handle


def content(items):
    """What a client sees, without names and times."""
    head, chunks, tail = split(items)
    if head.media_type == EVENT_STREAM:
        # Which tokens share an event is chance.
        events = events_of(chunks)
        body = ["".join(map(said, events)), events[-1].get("usage")]
    else:
        body = json.loads(data_of(chunks))
        for name in ("id", "created", "system_fingerprint"):  # of the engine
            body.pop(name, None)
    tokens = sum(chunk.tokens for chunk in chunks)
    return head, body, tokens, tail.prompt_tokens, tail.output_tokens


def said(event):
    """The text of one event."""
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in event["choices"]
    )


async def in_parts(engines, request):
    """The answer to a prompt that the first engine computes and the second one continues."""
    kv_handle = await prefill(engines[0], request)
    return await items_of(engines[1], replace(request, kv_handle=kv_handle))


def counts(engine):
    summary = engine.state().summary
    return {name: summary[name].item() for name in summary.dtype.names if "transfer" in name}


SAME = {
    "shorter than a block": {"prompt": "One two"},
    "exactly some blocks": {"prompt": [300 + i for i in range(2 * BLOCK)]},
    "in chunks": {"prompt": words(150)},
    "a stream": {"prompt": words(80, 1), "stream": True, "stream_options": {"include_usage": True}},
    "a stop string": {"prompt": words(40, 3), "max_tokens": 40, "stop": ["a", "e"]},
    "sampled with a seed": {"prompt": words(50, 4), "temperature": 1.0, "seed": 7},
    "structured": {
        "prompt": words(20, 5),
        "response_format": {"type": "json_object"},
        "ignore_eos": False,
    },
}


@pytest.mark.parametrize("kind", SAME)
async def test_the_answer_is_that_of_one_engine(engines, kind):
    asked = request(f"same {kind}", **SAME[kind])
    whole = await whole_answer(engines[0], asked)
    before = counts(engines[1])
    assert content(await in_parts(engines, asked)) == whole
    after = counts(engines[1])
    assert after["transfers"] == before["transfers"] + 1
    assert after["transfer_failures"] == before["transfer_failures"]
    assert after["transfer_bytes"] > before["transfer_bytes"]


async def test_a_chat_with_tools(engines):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": words(70, 6)}]
    tools = {"tools": [tool], "tool_choice": "none"}
    asked = request("chat", "chat", messages=messages, stream=True, **tools)
    whole = await whole_answer(engines[0], asked)
    assert content(await in_parts(engines, asked)) == whole


def resume_after(chunks, request_id):
    token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return Resume(token_ids, tuple(chunk.tokens for chunk in chunks), request_id)


async def test_a_stream_that_goes_on_is_split_like_any_other(engines):
    asked = request("onward", prompt=words(60, 13), stream=True, max_tokens=16)
    asked = replace(asked, resumable=True)
    whole = await items_of(engines[0], replace(asked, request_id="onward whole"))
    rest = replace(asked, resume=resume_after(whole[1:7], "onward whole"))
    before = counts(engines[1])
    assert content(await in_parts(engines, rest)) == content(whole)
    assert counts(engines[1])["transfers"] == before["transfers"] + 1


async def test_a_running_stream_moves_with_its_kv(engines):
    source, target = engines
    asked = request("moves", prompt=words(150, 14), stream=True, max_tokens=300)
    asked = replace(asked, resumable=True)
    whole = await items_of(source, replace(asked, request_id="moves whole"))
    await source._llm.reset_prefix_cache()
    stream, had = source.generate(asked), []
    async for item in stream:
        if isinstance(item, ResponseChunk):
            had.append(item)
        if len(had) == 40:
            break
    rest = replace(asked, request_id="moved", resume=resume_after(had, "moves"))
    steps, before = len(batches_of(source)), counts(target)
    kv = replace(rest, request_id="moved.prefill", prefill_only=True, kv_of_request="moves")
    _, tail = await items_of(source, kv)
    assert not [item async for item in stream if isinstance(item, ResponseTail)], "it was stopped"
    ran = [entry for batch in batches_of(source)[steps:] for entry in batch["ran"]]
    own = [tokens for name, tokens, _ in ran if name == "moved.prefill"]
    assert 0 < sum(own) <= BLOCK, "only the block that was not full is computed again"
    assert tail.kv_handle.prompt_tokens == tail.prompt_tokens
    moved = await items_of(target, replace(rest, kv_handle=tail.kv_handle))
    assert content(moved) == content(whole)
    after = counts(target)
    assert after["transfers"] == before["transfers"] + 1
    assert after["transfer_failures"] == before["transfer_failures"]
    await source.drain()
    assert not len(source.state().rows)


async def test_only_what_the_decode_side_lacks_is_moved_and_one_token_is_computed(engines):
    prompt = words(100, 8)
    await items_of(engines[1], request("warm", prompt=words(60, 8), max_tokens=1))
    before, steps = counts(engines[1]), len(batches_of(engines[1]))
    asked = request("prefix", prompt=prompt)
    whole = await whole_answer(engines[0], asked)
    tail = (await in_parts(engines, asked))[-1]
    moved = counts(engines[1])["transfer_tokens"] - before["transfer_tokens"]
    assert 0 < moved < tail.prompt_tokens - BLOCK
    ran = [entry for batch in batches_of(engines[1])[steps:] for entry in batch["ran"]]
    assert [tokens for _, tokens, _ in ran] == [1] * 10
    assert ran[0] == ["prefix", 1, tail.prompt_tokens - 1]
    # Again, with all whole blocks there: only the last one is moved.
    before = counts(engines[1])
    assert content(await in_parts(engines, replace(asked, request_id="again"))) == whole
    assert counts(engines[1])["transfer_tokens"] - before["transfer_tokens"] < BLOCK
    assert counts(engines[1])["transfer_failures"] == before["transfer_failures"]


def ran_of(engine, steps, name):
    """Tokens computed of a request in the batches after the first ``steps``."""
    ran = [entry for batch in batches_of(engine)[steps:] for entry in batch["ran"]]
    return sum(tokens for own, tokens, _ in ran if own == name)


async def given(engine, request_id, asked):
    kv = replace(asked, request_id=request_id, prefill_only=True, cached_only=True)
    return await items_of(engine, kv)


async def test_a_turn_moves_with_what_is_cached_of_its_prompt(engines):
    """All of what was computed and cached at one engine is computed at no other."""
    source, target = engines
    for engine in engines:
        await engine._llm.reset_prefix_cache()
    first = words(90, 31)
    await items_of(source, request("turn 1", prompt=first, max_tokens=12))
    second = request("turn 2", prompt=f"{first} {words(40, 32)}", max_tokens=10)
    steps, before = [len(batches_of(each)) for each in engines], counts(target)
    _, tail = await given(source, "given", second)
    # The other beginning of a prompt than it is given for, and its own.
    other = request("other", prompt=words(130, 33), max_tokens=10)
    wrong = await items_of(target, replace(other, kv_handle=tail.kv_handle))
    assert counts(target)["transfers"] == before["transfers"], "the tokens are others"
    assert counts(target)["transfer_failures"] == before["transfer_failures"] + 1
    moved = await items_of(target, replace(second, kv_handle=tail.kv_handle))
    after = counts(target)
    assert after["transfers"] == before["transfers"] + 1
    prompt_tokens = moved[-1].prompt_tokens
    fetched = after["transfer_tokens"] - before["transfer_tokens"]
    assert fetched % BLOCK == 0 and fetched >= 2 * BLOCK
    assert ran_of(source, steps[0], "given") == 1, "only the last token of what it gives"
    assert ran_of(target, steps[1], "turn 2") == prompt_tokens - fetched + 9
    assert content(moved) == await whole_answer(source, second)
    assert content(wrong) == await whole_answer(source, other)
    for engine in engines:
        await engine.drain()
        assert not len(engine.state().rows)


async def test_a_beginning_that_cannot_be_had_is_computed(engines):
    source, target = engines
    asked = request("late turn", prompt=words(120, 34), max_tokens=8)
    whole = await whole_answer(source, asked)
    for lost in ("nothing cached", "fetched elsewhere"):
        if lost == "nothing cached":
            await source._llm.reset_prefix_cache()
        else:
            await whole_answer(source, asked)
        await target._llm.reset_prefix_cache()
        steps, before = len(batches_of(source)), counts(target)
        _, tail = await given(source, f"given {lost}", asked)
        assert ran_of(source, steps, f"given {lost}") == 1, "it computes nothing that it lacks"
        if lost == "fetched elsewhere":
            await items_of(target, replace(asked, request_id="thief", kv_handle=tail.kv_handle))
            await target._llm.reset_prefix_cache()
        known = replace(asked, request_id=lost, kv_handle=tail.kv_handle)
        assert content(await items_of(target, known)) == whole
        assert counts(target)["transfer_failures"] == before["transfer_failures"] + 1, lost


async def test_of_a_prompt_that_is_too_long_to_keep_the_beginning_moves(engines, tmp_path):
    target = engines[1]
    asked = request("too long", prompt=words(720, 35), max_tokens=8)
    fields = {"transfer": TransferConfig(max_bytes=1 << 20)}
    args = {**LIMITS, "kv_cache_memory_bytes": KV_BYTES["prefill"]}
    source = VllmEngine(small_config(Path(target._config.model), tmp_path, fields, **args), "s", 32)
    await source.start()
    try:
        _, tail = await items_of(source, replace(asked, request_id="kept", prefill_only=True))
        kept = tail.kv_handle.prompt_tokens
        assert kept % BLOCK == 0 and BLOCK < kept < tail.prompt_tokens - BLOCK
        steps, before = len(batches_of(target)), counts(target)
        moved = await items_of(target, replace(asked, kv_handle=tail.kv_handle))
        after = counts(target)
        assert after["transfer_tokens"] == before["transfer_tokens"] + kept
        assert after["transfer_failures"] == before["transfer_failures"]
        assert ran_of(target, steps, "too long") == tail.prompt_tokens - kept + 7
        assert content(moved) == await whole_answer(source, asked)
    finally:
        await source.stop()


async def test_two_engines_change_their_roles_while_one_streams(engines):
    first, second = engines
    begun = request("begun", prompt=words(40, 11), max_tokens=60, stream=True)
    running = second.generate(replace(begun, kv_handle=await prefill(first, begun)))
    there = [await anext(running) for _ in range(3)]
    first.set_role("decode"), second.set_role("prefill")
    asked = request("asked", prompt=words(70, 12))
    before = counts(first)["transfers"]
    answered = await in_parts((second, first), asked)
    assert counts(first)["transfers"] == before + 1
    there += [item async for item in running]
    for own, found in ((begun, there), (asked, answered)):
        assert content(found) == await whole_answer(first, own)


async def test_several_at_once_beside_decodes(engines):
    # Together they need several times the KV that there is.
    asked = [
        request(f"many-{i}", prompt=words(20 + 20 * i, 20 + i), max_tokens=12) for i in range(12)
    ]
    long = request("long", prompt=words(10, 9), max_tokens=200)
    beside = [await whole_answer(engines[0], each) for each in (*asked, long)]
    before = counts(engines[1])
    running = asyncio.create_task(items_of(engines[1], long))
    parts = await asyncio.gather(*(in_parts(engines, each) for each in asked))
    assert [content(each) for each in (*parts, await running)] == beside
    after = counts(engines[1])
    assert after["transfers"] == before["transfers"] + len(asked)
    assert after["transfer_failures"] == before["transfer_failures"]
    for engine in engines:
        await engine.drain()
        assert not len(engine.state().rows)


WRONG = {
    "fetched": {},
    "layout": {"layout": "00" * 16},
    "prompt": {"prompt": "00" * 16},
    "tokens": {"prompt_tokens": 7},
    "garbage": {"addresses": [[5]], "handle": "x"},
    "nothing": None,
    # Of the range that is for documentation: no host answers.
    "address": {"addresses": [["192.0.2.1", 9]]},
}
"""Why KV cannot be fetched, and what its handle says then."""


async def test_kv_that_cannot_be_had_is_computed(engines):
    asked = request("wrong", prompt=words(70, 10), max_tokens=6)
    whole = await whole_answer(engines[0], asked)
    for what, change in WRONG.items():
        kv_handle = await prefill(engines[0], replace(asked, request_id=f"wrong {what}"))
        params = {} if change is None else {**kv_handle.params, **change}
        if what == "fetched":
            first = replace(asked, request_id="first", kv_handle=kv_handle)
            assert content(await items_of(engines[1], first)) == whole
            await engines[1]._llm.reset_prefix_cache()
        kv_handle = kv_handle._replace(params=params)
        before = counts(engines[1])
        given = await items_of(engines[1], replace(asked, request_id=what, kv_handle=kv_handle))
        assert content(given) == whole, what
        after = counts(engines[1])
        assert after["transfer_failures"] == before["transfer_failures"] + 1, what
        assert after["transfers"] == before["transfers"], what
        await engines[1]._llm.reset_prefix_cache()


async def test_clients_cannot_name_kv(engines):
    for own in (
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ):
        head, _, _ = await items_of(engines[1], request("named", **own))
        assert head == ResponseHead(400, "application/json")


async def test_an_aborted_hand_over_leaves_nothing(engines):
    kv_handle = await prefill(engines[0], request("left", prompt=words(90, 11)))
    given = request("left", prompt=words(90, 11), max_tokens=500)
    stream = engines[1].generate(replace(given, kv_handle=kv_handle))
    waiting = asyncio.ensure_future(anext(stream))
    await until(lambda: "left" in engines[1]._llm.calls, 120)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await engines[1].drain()
    # The engine still serves, and in time all blocks are free.
    total = engines[1].state().summary["total_kv_blocks"]
    asked = request("after", prompt=words(5))
    async with asyncio.timeout(120):
        while True:
            await items_of(engines[1], asked)
            if engines[1].state().summary["free_kv_blocks"] >= total:
                break


async def test_a_prefill_replica_that_died_costs_the_prompt_only(engines):
    """It ends the first engine."""
    asked = request("killed", prompt=words(120, 12))
    whole = await whole_answer(engines[0], asked)
    kv_handle = await prefill(engines[0], asked)
    process = engines[0]._llm.engine_core.resources.engine_manager.processes[0]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = counts(engines[1])
    assert content(await items_of(engines[1], replace(asked, kv_handle=kv_handle))) == whole
    assert counts(engines[1])["transfer_failures"] == before["transfer_failures"] + 1
    with pytest.raises(EngineDeadError):
        await prefill(engines[0], replace(asked, request_id="dead"))


async def test_stopping_an_engine_ends_its_requests_with_an_error(engines):
    """The last test: it ends the second engine."""
    (_, engine) = engines
    long = {"max_tokens": 800, "prompt": words(5)}
    asked = [request(f"cut-{stream}", stream=stream, **long) for stream in (False, True)]
    tasks = [asyncio.create_task(items_of(engine, each)) for each in asked]
    await until(lambda: sum(engine.state().rows["emitted_tokens"] > 3) == 2, 120)
    await engine.stop()
    for task in tasks:
        with pytest.raises(EngineDeadError, match="was stopped"):
            await asyncio.wait_for(task, 120)
    await asyncio.wait_for(engine.drain(), 120)
