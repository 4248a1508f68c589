"""The vLLM engine behind the engine contract: one real engine process for all tests."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from sluice.protocol.requests import (
    EVENT_STREAM,
    EngineDeadError,
    ResponseTail,
    Resume,
    Turn,
    request_key,
)
from sluice.replica.profiling import profile_key
from sluice.replica.server import FIRST_STEPS, Watchdog
from sluice.replica.vllm import tokenizing
from sluice.replica.vllm.engine import VllmEngine
from sluice.replica.vllm.serving import is_plain
from sluice.router.request import prompt as prompts
from sluice.router.request.prompt import prefix_of
from sluice.scheduling.fleet.prefix import HELD_SLOTS, PrefixIndex
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from tests.replica.small_engine import batches_of, data_of, events_of, greedy, items_of, split
from tests.replica.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

MESSAGES = [{"role": "user", "content": "Please write a short story"}]
PROMPT = "In the morning the river was quiet"


@pytest.fixture
def engine(vllm):
    return vllm.engine


@pytest.fixture
def config(engine):
    return engine._config


def request(request_id, endpoint="completions", slo=None, **body):
    prompt = {"messages": MESSAGES} if endpoint == "chat" else {"prompt": PROMPT}
    return greedy(request_id, endpoint, slo, **(prompt | body))


async def answer(engine, request):
    """Its head, chunks and tail."""
    return split(await items_of(engine, request))


async def stopped(engine, *tasks):
    """Stop reading answers, and wait until the engine has forgotten their requests."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not len(engine.state().rows), 120)


async def test_what_is_fixed_about_the_engine(vllm, engine):
    info = vllm.info
    assert (info.model, info.policy) == ("small", "deadline_triage")
    assert (info.max_model_tokens, info.max_batch_tokens, info.block_tokens) == (2048, 256, 32)
    assert info.kv_blocks * 32 >= 2048
    assert info.profile.report is not None and info.profile.report.samples >= 8
    assert [model["id"] for model in (await engine.models())["data"]] == ["small"]


async def test_the_key_of_compiled_code_has_no_name_that_the_next_start_changes(engine):
    """vLLM's key has all of Sluice's settings."""
    settings = engine._llm.vllm_config.additional_config["sluice"]
    folder, log = r"\$SLUICE_TABLE_FOLDER_\d+/state", r"\$SLUICE_BATCH_LOG_\d+\.jsonl"
    assert re.fullmatch(folder, settings["state_table"])
    assert re.fullmatch(log, settings["batch_log"])


async def test_the_key_of_a_profile_has_threads_only_where_they_compute(
    engine, config, monkeypatch
):
    """Ray sets their number for replicas; `sluice profile` has none on a GPU."""
    from vllm.platforms import current_platform

    def keys():
        for threads in ("1", "7"):
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            yield profile_key(engine._llm.vllm_config, config)

    assert len(set(keys())) == 2
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert len(set(keys())) == 1


async def test_only_long_prompts_wait_for_the_thread_that_tokenizes(engine, monkeypatch):
    submitted, executor = [], engine._llm.renderer._executor
    own = executor.submit
    monkeypatch.setattr(executor, "submit", lambda *job: submitted.append(job) or own(*job))
    short = (await answer(engine, request("short")))[2]
    assert short.prompt_tokens > 1 and not submitted
    monkeypatch.setattr(tokenizing, "SHORT", len(PROMPT) - 1)
    assert (await answer(engine, request("long")))[2].prompt_tokens == short.prompt_tokens
    assert len(submitted) == 1


async def test_the_chunks_of_a_conversation_are_held_once_it_was_answered(engine):
    opening = {"role": "system", "content": "".join(f"Rule {i}: be kind. " for i in range(90))}
    asked = [opening, {"role": "user", "content": "Why?"}]
    first = request("holds", "chat", messages=asked)
    prefix = prefix_of("chat", first.body)
    assert len(prefix.hashes) == 3
    _, _, tail = await answer(engine, replace(first, prefix=prefix))

    def held():
        chunks = engine.state().held
        full = chunks[chunks["hash"] != 0]
        return dict(zip(full["hash"].tolist(), full["tokens"].tolist(), strict=True))

    await until(lambda: set(prefix.hashes) <= held().keys(), 120)
    tokens = [held()[chunk] for chunk in prefix.hashes]
    assert tokens == sorted(tokens)
    assert all(upto % 32 == 0 for upto in tokens)
    # 1536 characters of about 1650.
    assert 0.7 * tail.prompt_tokens < tokens[-1] <= tail.prompt_tokens

    longer = [*asked, {"role": "assistant", "content": "Because."}, *MESSAGES]
    index = PrefixIndex()
    index.write(0, np.arange(HELD_SLOTS), engine.state().held)
    following = prefix_of("chat", {**first.body, "messages": longer})
    assert index.cached_tokens(following.hashes, np.array([0, 1])).tolist() == [tokens[-1], 0]


async def test_a_later_turn_finds_all_of_a_conversation_that_was_answered(engine, monkeypatch):
    monkeypatch.setattr(prompts, "MIN_MESSAGE_END", 512)
    opening = {"role": "system", "content": "".join(f"Rule {i}: be just. " for i in range(90))}
    asked = [opening, {"role": "user", "content": "Why? " * 60}]
    first = request("turn", "chat", messages=asked)
    prefix = prefix_of("chat", first.body)
    _, _, tail = await answer(engine, replace(first, prefix=prefix))
    whole = prefix.message_ends[-1]
    await until(lambda: whole in engine.state().held["hash"], 120)
    longer = [*asked, {"role": "assistant", "content": "Because."}, *MESSAGES]
    later = prefix_of("chat", {**first.body, "messages": longer})
    index = PrefixIndex()
    index.write(0, np.arange(HELD_SLOTS), engine.state().held)
    by_chunks, by_ends = (
        float(index.cached_tokens(found, np.array([0]))[0])
        for found in (later.hashes, later.message_ends)
    )
    assert by_chunks < by_ends == tail.prompt_tokens // 32 * 32
    _, _, after = await answer(engine, request("later", "chat", messages=longer))
    assert after.cached_tokens >= by_ends, "the cache has no less than what is predicted"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_streamed_and_plain_say_the_same_and_count_alike(engine, endpoint):
    head, (body,), tail = await answer(engine, request("plain", endpoint))
    assert (head.status, head.media_type) == (200, "application/json")
    plain = json.loads(body.data)
    assert body.tokens == tail.output_tokens == plain["usage"]["completion_tokens"] == 12
    assert tail.prompt_tokens == plain["usage"]["prompt_tokens"]
    offsets_s = list(tail.token_offsets_s)
    assert len(offsets_s) == 12 and offsets_s == sorted(offsets_s) and offsets_s[0] > 0

    streamed = request("stream", endpoint, stream=True)
    head, chunks, tail = await answer(engine, streamed)
    assert (head.status, head.media_type) == (200, EVENT_STREAM)
    assert sum(chunk.tokens for chunk in chunks) == tail.output_tokens == 12
    assert tail.token_offsets_s == ()
    choices = [choice for event in events_of(chunks) for choice in event["choices"]]
    if endpoint == "chat":
        assert plain["choices"][0]["message"]["content"] == "".join(
            choice["delta"].get("content") or "" for choice in choices
        )
    else:
        assert plain["choices"][0]["text"] == "".join(choice["text"] for choice in choices)
    assert plain["id"].endswith("plain")


def form_of(chunks):
    """Texts by choice, usage and endings of a stream, and what its events have besides. vLLM may
    put two steps into one event."""
    texts, usage, rest = {}, None, set()
    for event in events_of(chunks):
        usage = event.pop("usage", None) or usage
        for choice in event["choices"]:
            place = choice.get("delta", choice)
            key = "content" if "delta" in choice else "text"
            index = choice["index"]
            texts[index] = texts.get(index, "") + place.pop(key, "")
            choice.update(dict.fromkeys({"logprobs", "token_ids"} & choice.keys()))
        rest.add(json.dumps({**event, "id": "", "created": 0}))
    return texts, usage, rest


USAGE = {"include_usage": True}
CONTINUED = {
    "messages": [*MESSAGES, {"role": "assistant", "content": "Once"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "echo": True,
}


@pytest.mark.parametrize(
    ("endpoint", "body", "passes"),
    [
        ("completions", {}, True),
        ("completions", {"temperature": 1.9, "seed": 3, "stop": ["e", "\ufffd"]}, True),
        ("completions", {"echo": True, "stream_options": USAGE}, True),
        ("completions", {"logprobs": 1}, False),
        ("completions", {"return_token_ids": True}, False),
        ("completions", {"n": 2, "temperature": 1, "seed": 1}, False),
        ("completions", {"prompt": [PROMPT, PROMPT]}, False),
        ("chat", {"temperature": 1.9, "seed": 5, "stream_options": USAGE}, True),
        ("chat", {"stream_options": {**USAGE, "continuous_usage_stats": True}}, False),
        ("chat", {**CONTINUED, "logprobs": True}, False),
        ("chat", {**CONTINUED, "return_token_ids": True}, False),
    ],
    ids=str,
)
async def test_events_that_pass_by_vllms_layer_are_like_its_own(
    engine, monkeypatch, endpoint, body, passes
):
    """Also where there is no space for them now and then."""
    monkeypatch.setattr(engine._servings["chat"].layer, "parser_cls", None)
    number = itertools.count()

    async def streamed(full):
        name = f"passes {endpoint} {body} {next(number)}"
        asked = request(name, endpoint, stream=True, max_tokens=40, **body)
        items, offered = [], []

        def forward(chunk):
            offered.append(chunk)
            if full(len(offered)):
                return False
            items.append(chunk)
            return True

        async for item in engine.generate(replace(asked, resumable=True), forward):
            items.append(item)  # noqa: PERF401, for others come in between
        return items, offered

    own, _ = await streamed(lambda _: True)
    for full in (lambda _: False, lambda at: at % 5 == 3):
        found, offered = await streamed(full)
        assert bool(offered) == passes
        (_, chunks, tail), (_, own_chunks, own_tail) = split(found), split(own)
        assert form_of(chunks) == form_of(own_chunks)
        assert tail[:2] == own_tail[:2]
        assert sum(chunk.tokens for chunk in chunks) == sum(chunk.tokens for chunk in own_chunks)
        ids = [
            [token for chunk in each for token in chunk.token_ids] for each in (chunks, own_chunks)
        ]
        assert ids[0] == ids[1]


@pytest.mark.parametrize("beside", [{}, {"prompt_embeds": "AAAA"}])
async def test_embeddings_beside_a_prompt_are_a_second_prompt(engine, beside):
    completions = engine._servings["completions"]
    body = completions.body.validate_python({"prompt": PROMPT, "stream": True, **beside})
    assert is_plain("completions", completions, body) == (not beside)


async def test_of_several_prompts_and_choices_the_first_is_followed(engine):
    two = {"prompt": [PROMPT, PROMPT + " and the boats"], "n": 2, "temperature": 1.0, "seed": 7}
    _, (body,), tail = await answer(engine, request("many", "completions", **two))
    plain = json.loads(body.data)
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    assert body.tokens == len(tail.token_offsets_s) == 12
    assert tail.output_tokens == plain["usage"]["completion_tokens"] == 48
    assert tail.prompt_tokens == plain["usage"]["prompt_tokens"]

    _, chunks, tail = await answer(engine, request("s", "completions", stream=True, **two))
    assert sum(chunk.tokens for chunk in chunks) == 12
    assert tail.output_tokens == 48


async def test_a_seed_gives_the_same_text_however_its_prompt_is_cut_into_chunks(vllm, engine):
    """The first of them computes its prompt in several batches, the second finds nearly all of it
    in the prefix cache."""

    async def text(request_id, **body):
        prompt = "".join(f"{i} ships came to the harbour " for i in range(150))
        asked = request(request_id, "completions", prompt=prompt, max_tokens=24, **body)
        _, (whole,), tail = await answer(engine, asked)
        assert tail.prompt_tokens > 3 * vllm.info.max_batch_tokens
        cached[request_id] = tail.cached_tokens / tail.prompt_tokens
        return json.loads(whole.data)["choices"][0]["text"]

    cached: dict[str, float] = {}
    seeded = {"temperature": 1.0, "seed": 11}
    chunked = await text("chunked", **seeded)
    assert await text("cached", **seeded) == chunked
    assert await text("other seed", **{**seeded, "seed": 12}) != chunked
    assert await text("greedy", seed=11) == await text("greedy, no seed") != chunked
    ran = [name for batch in batches_of(engine) for name, tokens, _ in batch["ran"] if tokens > 1]
    assert ran.count("chunked") > 3
    assert ran.count("cached") == 1
    assert cached["chunked"] == 0 and 0.8 < cached["cached"] < 1


async def test_log_probabilities_and_structured_output_are_vllms(engine):
    probable = request("lp", "chat", logprobs=True, top_logprobs=2)
    _, (body,), _ = await answer(engine, probable)
    assert len(json.loads(body.data)["choices"][0]["logprobs"]["content"]) == 12

    grammar = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
    _, (body,), _ = await answer(engine, request("so", "chat", **grammar))
    assert json.loads(body.data)["choices"][0]["message"]["content"] in ("yes", "no")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STREAMS = {
    "completion": ("completions", {"max_tokens": 24, "stream_options": {"include_usage": True}}),
    "chat": ("chat", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "tools": ("chat", {"tools": [TOOL]}),
    "bytes of characters": ("completions", {"allowed_token_ids": list(range(131, 259))}),
}


async def streamed(engine, request):
    """The chunks of a stream, without the time in them."""
    _, chunks, tail = await answer(engine, request)
    texts = [re.sub(rb'"created":\d+', b'"created":0', chunk.data) for chunk in chunks]
    return [chunk._replace(data=data) for chunk, data in zip(chunks, texts, strict=True)], tail


def resumed(asked, chunks, request_id):
    """The request for what comes after these chunks of the answer to ``asked``."""
    token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    groups = tuple(chunk.tokens for chunk in chunks)
    return replace(asked, request_id=request_id, resume=Resume(token_ids, groups, asked.request_id))


def said(chunks):
    """What a stream says, however it is cut into chunks."""
    events = events_of(chunks)
    choices = [choice for event in events for choice in event["choices"]]
    texts = [each.get("text") or each.get("delta", {}).get("content") or "" for each in choices]
    return "".join(texts), choices[-1]["finish_reason"], events[-1].get("usage")


@pytest.mark.parametrize("stream", [True, False])
async def test_the_scheduler_learns_that_a_sessions_turn_called_no_tool(engine, stream):
    """Which tools an answer calls is read as in test_vllm_serving.py."""
    engine._table.take_calls()
    for name, turn in ((f"turn {stream}", Turn(8, 8)), (f"no session {stream}", None)):
        await answer(engine, replace(request(name, "chat", stream=stream), turn=turn))
    assert engine._table.take_calls() == [(8, 0)]


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_goes_on_where_another_engine_stopped(engine, name):
    """Wherever it was cut: what was sent comes again byte for byte, and then what had come."""
    endpoint, body = STREAMS[name]
    asked = replace(request(f"whole {name}", endpoint, stream=True, **body), resumable=True)
    whole, tail = await streamed(engine, asked)
    assert sum(chunk.tokens for chunk in whole) == tail.output_tokens > 8
    assert all(len(chunk.token_ids) == chunk.tokens for chunk in whole)
    await check_cuts(engine, asked, whole, tail)


async def check_cuts(engine, asked, whole, tail):
    """That the stream goes on as it was after every part of it. All at once: it takes no longer."""

    async def check(cut):
        rest = resumed(asked, whole[:cut], f"{asked.request_id} {cut}")
        again, end = await streamed(engine, rest)
        assert again[:cut] == whole[:cut]
        assert said(again) == said(whole)
        assert end[:2] == tail[:2]

    cuts = list(range(1, len(whole)))
    for start in range(0, len(cuts), 8):
        await asyncio.gather(*map(check, cuts[start : start + 8]))


async def test_a_stop_text_is_found_over_the_cut(engine):
    asked = replace(request("no stop", "completions", stream=True, max_tokens=40), resumable=True)
    text, _, _ = said((await streamed(engine, asked))[0])
    # Long enough that it does not come earlier, nor within one token.
    stop = text[len(text) // 2 :][:8]
    asked = replace(asked, request_id="stop", body={**asked.body, "stop": [stop]})
    whole, tail = await streamed(engine, asked)
    assert said(whole)[:2] == (text[: text.index(stop)], "stop")
    await check_cuts(engine, asked, whole, tail)


async def test_a_stream_that_has_ended_ends_as_it_did(engine):
    """With a token that ends it: nothing is computed behind that one."""
    asked = replace(request("no end", "chat", stream=True, max_tokens=30), resumable=True)
    ids = [token for chunk in (await streamed(engine, asked))[0] for token in chunk.token_ids]
    last = max(set(ids), key=ids.index)
    assert ids.index(last) > 3
    body = {**asked.body, "stop_token_ids": [last], "stream_options": {"include_usage": True}}
    asked = replace(asked, request_id="end", body=body)
    whole, tail = await streamed(engine, asked)
    assert tail.output_tokens == ids.index(last) + 1
    assert events_of(whole)[-2]["choices"][0]["stop_reason"] == last
    await check_cuts(engine, asked, whole, tail)


async def test_a_stream_goes_on_once_its_prompt_was_computed_apart(engine):
    asked = replace(request("apart", "chat", stream=True), resumable=True)
    whole, _ = await streamed(engine, asked)
    rest = resumed(asked, whole[:5], "apart 2")
    leg = replace(rest, request_id="apart 2.prefill", prefill_only=True)
    head, tail = await items_of(engine, leg)
    assert head.status == 200
    tokens = sum(chunk.tokens for chunk in whole[:5])
    assert tail.kv_handle.prompt_tokens == (await streamed(engine, asked))[1].prompt_tokens + tokens


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": True},
        {"n": 2, "temperature": 1},
        {"presence_penalty": 0.5},
        {"bad_words": ["river"]},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"vllm_xargs": {"mine": 1}},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_tokens_that_no_other_engine_could_go_on_from_are_not_told(engine, body):
    asked = request(f"kept {body}", "chat", stream=True, max_tokens=4, **body)
    _, chunks, _ = await answer(engine, replace(asked, resumable=True))
    assert sum(chunk.tokens for chunk in chunks) > 0
    assert not any(chunk.token_ids for chunk in chunks)


async def test_the_objective_reaches_the_scheduler(engine):
    slo = SLO(ttft_s=0.5, tpot_s=0.25, e2e_s=60.0, priority=7)
    asked = request("objective", slo=slo, max_tokens=1500, vllm_xargs={"session_id": "s"})
    running = asyncio.create_task(items_of(engine, replace(asked, waited_s=10.0)))
    await until(lambda: len(engine.state().rows), 120)
    state = engine.state()
    (row,) = state.rows
    assert row["key"] == request_key("objective")
    assert (row["ttft_s"], row["tpot_s"], row["e2e_s"]) == (0.5, 0.25, 60.0)
    assert row["priority"] == 7
    assert 10 <= state.now_s - row["arrival_s"] < 40
    await stopped(engine, running)


async def test_the_stage_that_a_request_is_in_is_the_schedulers(engine):
    slo = SLO.of_stages((Stage(9.0, 0.9, tokens=3), Stage(7.0, 0.7)), 60.0)
    asked = request("staged", "completions", slo, stream=True, max_tokens=1800)
    sent_s = time.monotonic()
    running = asyncio.create_task(items_of(engine, replace(asked, waited_s=10.0)))
    await until(lambda: engine.state().rows["later_stages"].tolist() == [0], 120)
    (row,) = engine.state().rows
    assert row[["ttft_s", "tpot_s"]].tolist() == (pytest.approx(7.0), pytest.approx(0.7))
    # Its times count from the third token, and the whole ends 60 s after it came to the edge.
    assert row["arrival_s"] > sent_s
    ends_s = row["arrival_s"] + float(row["e2e_s"])
    assert sent_s + 49.9 < ends_s < time.monotonic() + 50.1
    await stopped(engine, running)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_frees_the_engine(engine, stream):
    asked = request(f"gone-{stream}", "chat", max_tokens=1800, stream=stream)
    task = asyncio.create_task(items_of(engine, asked))
    await until(lambda: any(engine.state().rows["emitted_tokens"] > 3), 120)
    await stopped(engine, task)
    assert task.cancelled()
    await asyncio.wait_for(engine.drain(), 120)
    await until(lambda: engine.state().summary["running"] == 0, 120)


async def test_abort_ends_a_response_without_a_tail(engine):
    response = engine.generate(request("ab", "chat", max_tokens=1800, stream=True))
    received = [await anext(response) for _ in range(4)]
    await engine.abort("unknown")
    await engine.abort("ab")
    async with asyncio.timeout(120):
        received += [item async for item in response]
    assert not isinstance(received[-1], ResponseTail)
    assert 0 < sum(item.tokens for item in received[1:]) < 1800
    await stopped(engine)


async def test_each_choice_has_its_own_row_and_the_first_the_requests_key(engine):
    asked = request("pair", "completions", n=2, temperature=1.0, max_tokens=1800)
    task = asyncio.create_task(items_of(engine, asked))
    await until(lambda: len(engine.state().rows) == 2, 120)
    keys = set(engine.state().rows["key"].tolist())
    assert len(keys) == 2
    assert request_key("pair") in keys
    await engine.abort("pair")
    assert await asyncio.wait_for(task, 120) == []
    await stopped(engine)


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "named"),
    [
        ("chat", {"messages": "hello"}, 400, "messages"),
        ("chat", {"messages": 3}, 400, "malformed"),
        ("chat", {"max_tokens": -1}, 400, "max_tokens"),
        ("completions", {"temperature": -1}, 400, "temperature"),
        ("completions", {"n": "many"}, 400, "n"),
        ("completions", {"prompt": "a " * 4000}, 400, "2048"),
        ("completions", {"model": "other"}, 404, "other"),
        ("completions", {"vllm_xargs": {"sluice_id": "x"}}, 400, "sluice_id"),
        ("completions", {"vllm_xargs": 3}, 400, "vllm_xargs"),
        ("completions", {"use_beam_search": True}, 400, "Beam search"),
        ("chat", {"logit_bias": {"9999999": 1}, "stream": True}, 400, "logit_bias"),
        ("completions", {"allowed_token_ids": [], "stream": True}, 400, "allowed_token_ids"),
    ],
)
async def test_mistakes_get_openai_errors(engine, endpoint, body, status, named):
    head, (chunk,), tail = await answer(engine, request("wrong", endpoint, **body))
    error = json.loads(chunk.data)["error"]
    assert head.status == status
    assert error["code"] == ("model_not_found" if status == 404 else "invalid_value")
    assert named in error["message"]
    assert tail == ResponseTail(0, 0)
    assert not len(engine.state().rows)


async def test_a_corrupt_explicit_profile_is_an_error(config, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"a": 1}')
    other = config.model_copy(update={"latency_profile": path})
    with pytest.raises(ValueError, match="not a latency profile"):
        await VllmEngine(other, "replica-2", 4).start()
    with pytest.raises(EngineDeadError):
        await VllmEngine(other, "replica-3", 4).check_health()


async def test_an_engine_that_stands_still_is_seen_to_and_answers_when_it_moves(vllm, engine):
    dog = Watchdog(engine, vllm.info, hung_after_s=0.5)
    dog._first_step = -FIRST_STEPS
    assert engine.waits_since_s() is None
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    response = engine.generate(request("hang", "completions", max_tokens=1500, stream=True))
    await anext(response)
    os.kill(core.pid, signal.SIGSTOP)

    async def read():
        return [item async for item in response]

    try:
        task = asyncio.create_task(read())
        await until(dog.look, 120)
        assert engine.waits_since_s() is not None
        await engine.check_health()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await response.aclose()
        assert engine.waits_since_s() is None
        assert dog.look(), "nobody waits, and still"
    finally:
        os.kill(core.pid, signal.SIGCONT)
    await until(lambda: not dog.look(), 120)
    dog.stop()


@pytest.mark.parametrize(
    ("body", "per_token"),
    [
        ({"prompt_logprobs": 3}, 4),
        ({"prompt_logprobs": 1, "n": 2}, 4),
        ({"echo": True, "logprobs": 3}, 4),
    ],
    ids=["one", "choices", "echo"],
)
async def test_log_probabilities_of_prompts_are_bounded(engine, monkeypatch, body, per_token):
    monkeypatch.setattr("sluice.replica.vllm.client.MAX_PROMPT_LOGPROBS", 1_000)
    fits = 1_000 // per_token
    fixed = {"max_tokens": 1, "temperature": 0.5, **body}
    most = request("fits", "completions", prompt=[7] * fits, **fixed)
    head, chunks, _ = await answer(engine, most)
    assert head.status == 200
    choices = json.loads(data_of(chunks))["choices"]
    if "echo" not in body:
        assert len(choices[0]["prompt_logprobs"]) == fits
    longer = request("longer", "completions", prompt=[7] * (fits + 1), **fixed)
    head, chunks, tail = await answer(engine, longer)
    assert head.status == 400
    assert b"allowed are 1000" in chunks[0].data
    assert tail == ResponseTail(0, 0)
    several = request("several", "completions", prompt=[[7] * fits, [7, 7]], **fixed)
    head, *_ = await answer(engine, several)
    assert head.status == 400
