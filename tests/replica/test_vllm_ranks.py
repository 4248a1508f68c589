"""A vLLM engine with two ranks, each with a scheduler, a queue and a KV cache of its own. The model
is dense: vLLM's CPU build has no ranks that share experts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import pytest_asyncio

from sluice.protocol.requests import EngineDeadError
from sluice.replica.deployment import make_engines
from sluice.replica.engine import Engine
from tests.replica.in_process import mixed_requests
from tests.replica.small_engine import greedy_tokens, small_config
from tests.replica.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.release,
    pytest.mark.asyncio(loop_scope="module"),
]

REQUESTS = mixed_requests(24)


class Ranked(NamedTuple):
    """The ranks of a started engine, the folder of their batch logs, and what one engine of stock
    vLLM generates for ``REQUESTS``."""

    ranks: list[Engine]
    logs: Path
    stock: list[tuple[int, ...]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranked(
    model: Path, stock: list[tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ranked]:
    directory = tmp_path_factory.mktemp("ranks")
    config = small_config(model, directory, data_parallel_size=2)
    engines = make_engines(config, "abc", 32, 0)
    try:
        for each in engines:
            await each.start()
        yield Ranked(engines, directory, stock)
    finally:
        for each in reversed(engines):
            await each.stop()


async def tokens(engine: Engine, number: int, output: int | None = None) -> tuple[int, ...]:
    """The greedy tokens of a request of ``REQUESTS``, or this many of them."""
    prompt, usual, _ = REQUESTS[number]
    return await greedy_tokens(engine, f"r{number}", prompt, output or usual, number)


def names_in(log: Path) -> set[str]:
    """The requests that were in batches, those before the engine was ready left out."""
    batches = map(json.loads, log.read_text().splitlines())
    ran = {name for batch in batches for name, _, _ in batch["ran"]}
    return {name for name in ran if name.startswith("r") and name[1:].isdecimal()}


async def test_tokens_are_those_of_one_engine_and_each_request_is_at_its_rank(
    ranked: Ranked,
) -> None:
    # Not alternately: vLLM's own balancing would do that, too.
    places = [number // 3 % 2 for number in range(len(REQUESTS))]
    found = await asyncio.gather(
        *(tokens(ranked.ranks[place], number) for number, place in enumerate(places))
    )
    assert found == ranked.stock
    for rank, log in enumerate(("abc.jsonl", "abc.1.jsonl")):
        assert names_in(ranked.logs / log) == {
            f"r{number}" for number, place in enumerate(places) if place == rank
        }
        summary = ranked.ranks[rank].state().summary
        assert summary["steps"] > 0
        assert summary["running"] == summary["waiting"] == 0


async def test_a_rank_tells_of_its_own_requests_only(ranked: Ranked) -> None:
    one, other = ranked.ranks
    task = asyncio.create_task(tokens(other, 0, output=900))
    await until(lambda: any(other.state().rows["emitted_tokens"] > 3), 120)
    assert len(one.state().rows) == 0
    assert one.waits_since_s() is None
    await other.abort("r0")
    await until(lambda: len(other.state().rows) == 0, 120)
    await asyncio.wait([task])
    await one.drain()
    await other.pulse()


async def test_with_the_process_of_a_rank_the_whole_engine_ends(ranked: Ranked) -> None:
    """Requests there are not answered in part as if that were all: another replica continues them.
    Those at other ranks may end before vLLM ends these."""
    ranks = ranked.ranks
    tasks = [
        asyncio.create_task(tokens(each, number, output=900)) for number, each in enumerate(ranks)
    ]
    await until(lambda: all(any(each.state().rows["emitted_tokens"] > 3) for each in ranks), 120)
    client: Any = ranks[0]._llm.engine_core  # type: ignore[attr-defined]
    cores = [psutil.Process(each.pid) for each in client.resources.engine_manager.processes]
    assert len(cores) == 2
    cores[1].kill()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(tasks[1], 120)
    await asyncio.wait([tasks[0]], timeout=120)
    assert tasks[0].exception() is None or isinstance(tasks[0].exception(), EngineDeadError)
    for each in ranks:
        with pytest.raises(EngineDeadError):
            await each.check_health()
    _, alive = await asyncio.to_thread(psutil.wait_procs, cores, 60)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
