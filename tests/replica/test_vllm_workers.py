"""Engines of several processes: workers that each have a part of the model, in a pipeline or of
every layer, and ranks that each have a scheduler, a queue and a KV cache. The model is dense:
vLLM's CPU build has no ranks that share experts."""

from __future__ import annotations

import asyncio
import itertools

import psutil
import pytest
import pytest_asyncio

from sluice.protocol.requests import EngineDeadError
from sluice.replica.deployment import make_engines
from sluice.replica.vllm.engine import VllmEngine
from tests.replica.in_process import mixed_requests
from tests.replica.small_engine import (
    batches_of,
    check_ended,
    check_killed_worker,
    greedy_tokens,
    small_config,
)
from tests.replica.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.release,
    pytest.mark.asyncio(loop_scope="module"),
]

REQUESTS = mixed_requests(24)


async def tokens(engine, number, output=None):
    """The greedy tokens of a request of ``REQUESTS``, or this many of them."""
    prompt, usual, _ = REQUESTS[number]
    return await greedy_tokens(engine, f"r{number}", prompt, output or usual, number)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["pipeline_parallel_size", "tensor_parallel_size"],
)
async def spanning(request, model, tmp_path_factory):
    config = small_config(model, tmp_path_factory.mktemp("engine"), **{request.param: 2})
    engine = VllmEngine(config, "replica-1", 32)
    await engine.start()
    yield engine
    await engine.stop()


async def test_tokens_are_those_of_one_worker(spanning, stock):
    found = await asyncio.gather(*(tokens(spanning, number) for number in range(len(REQUESTS))))
    assert found == stock
    summary = spanning.state().summary
    assert summary["running"] == summary["waiting"] == 0
    log = [batch for batch in batches_of(spanning) if batch["live"] > 4]
    ran = [{name for name, _, _ in batch["ran"]} for batch in log]
    # A decode is in one batch at a time: two that share none were in the pipeline together.
    apart = sum(not one & other for one, other in itertools.pairwise(ran))
    pipelined = spanning._llm.vllm_config.parallel_config.pipeline_parallel_size > 1
    assert (apart > len(ran) // 4) == pipelined, (apart, len(ran))


async def test_with_a_worker_the_engine_ends_and_leaves_no_process(spanning):
    """Its requests are not answered in part as if that were all: another replica continues them."""
    requests = [greedy_tokens(spanning, f"lost-{i}", range(300, 800), 500, i) for i in range(3)]
    await check_killed_worker(spanning, requests)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(model, tmp_path_factory):
    config = small_config(model, tmp_path_factory.mktemp("ranks"), data_parallel_size=2)
    engines = make_engines(config, "abc", 32, 0)
    try:
        for each in engines:
            await each.start()
        yield engines
    finally:
        for each in reversed(engines):
            await each.stop()


async def test_tokens_are_those_of_one_engine_and_each_request_is_at_its_rank(ranks, stock):
    # Not alternately: vLLM's own balancing would do that, too.
    places = [number // 3 % 2 for number in range(len(REQUESTS))]
    served = (tokens(ranks[place], number) for number, place in enumerate(places))
    assert await asyncio.gather(*served) == stock
    folder = ranks[0]._config.batch_log
    for rank, log in enumerate(("abc.jsonl", "abc.1.jsonl")):
        text = (folder / log).read_text()
        assert [f'"r{number}"' in text for number in range(len(places))] == [
            place == rank for place in places
        ]
        summary = ranks[rank].state().summary
        assert summary["steps"] > 0
        assert summary["running"] == summary["waiting"] == 0


async def test_a_rank_tells_of_its_own_requests_only(ranks):
    one, other = ranks
    task = asyncio.create_task(tokens(other, 0, output=900))
    await until(lambda: any(other.state().rows["emitted_tokens"] > 3), 120)
    assert len(one.state().rows) == 0
    assert one.waits_since_s() is None
    await other.abort("r0")
    await until(lambda: len(other.state().rows) == 0, 120)
    await asyncio.wait([task])
    await one.drain()
    await other.pulse()


async def test_with_the_process_of_a_rank_the_whole_engine_ends(ranks):
    """Those at other ranks may end before vLLM ends these."""
    here, there = (asyncio.create_task(tokens(each, n, 900)) for n, each in enumerate(ranks))
    await until(lambda: all(any(each.state().rows["emitted_tokens"] > 3) for each in ranks), 120)
    manager = ranks[0]._llm.engine_core.resources.engine_manager
    cores = [psutil.Process(each.pid) for each in manager.processes]
    assert len(cores) == 2
    cores[1].kill()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(there, 120)
    await asyncio.wait([here], timeout=120)
    assert here.exception() is None or isinstance(here.exception(), EngineDeadError)
    await check_ended(ranks, cores)
