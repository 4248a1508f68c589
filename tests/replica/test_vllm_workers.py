"""Engines of several workers, each with a part of the model: in a pipeline, or of every layer."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from sluice.replica.config import EngineConfig
from sluice.replica.engine import EngineRequest, ResponseChunk, ResponseTail
from sluice.replica.vllm.engine import VllmEngine
from tests.known_profile import known_profile
from tests.replica.in_process import OBJECTIVES, mixed_requests
from tests.replica.killed_worker import check_killed_worker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.release,
    pytest.mark.asyncio(loop_scope="module"),
]


class Spanning(NamedTuple):
    """An engine, the log of its batches, and the option that gives it two workers."""

    engine: VllmEngine
    log: Path
    option: str


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["pipeline-parallel-size", "tensor-parallel-size"],
)
async def spanning(
    request: Any, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Spanning]:
    directory = tmp_path_factory.mktemp("engine")
    config = EngineConfig(
        model=str(model),
        served_model_name="small",
        cache_dir=directory,
        batch_log=directory,
        vllm_args={
            "max-model-len": 1024,
            "max-num-batched-tokens": 512,
            "kv-cache-memory-bytes": 64 << 20,
            "block-size": 32,
            "dtype": "float32",
            request.param: 2,
        },
        latency_profile=known_profile(directory),
        grammar_check_s=0,
    )
    engine = VllmEngine(config, "replica-1", 32)
    await engine.start()
    yield Spanning(engine, directory / "replica-1.jsonl", request.param)
    await engine.stop()


async def tokens(
    engine: VllmEngine, name: str, prompt: list[int], output: int, number: int
) -> tuple[int, ...]:
    """The greedy output tokens of a request."""
    body = {
        "model": "small",
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    asked = EngineRequest(name, "completions", body, OBJECTIVES[number % len(OBJECTIVES)])
    items = [item async for item in engine.generate(asked)]
    assert isinstance(items[-1], ResponseTail)
    answer = json.loads(b"".join(each.data for each in items if isinstance(each, ResponseChunk)))
    return tuple(answer["choices"][0]["token_ids"])


async def test_tokens_are_those_of_one_worker(
    spanning: Spanning, stock: list[tuple[int, ...]]
) -> None:
    engine, log, option = spanning
    found = await asyncio.gather(
        *(
            tokens(engine, f"r{number}", prompt, output, number)
            for number, (prompt, output, _) in enumerate(mixed_requests(24))
        )
    )
    assert found == stock
    summary = engine.state().summary
    assert summary["running"] == summary["waiting"] == 0
    ran = [
        {name for name, _, _ in batch["ran"]}
        for batch in map(json.loads, log.read_text().splitlines())
        if batch["live"] > 4
    ]
    # A decode is in one batch at a time: two that share none were in the pipeline together.
    apart = sum(not one & other for one, other in itertools.pairwise(ran))
    assert (apart > len(ran) // 4) == (option == "pipeline-parallel-size"), (apart, len(ran))


async def test_with_a_worker_the_engine_ends_and_leaves_no_process(spanning: Spanning) -> None:
    """Its requests are not answered in part as if that were all: another replica continues them."""
    engine = spanning.engine
    asked = [tokens(engine, f"lost-{i}", list(range(300, 800)), 500, i) for i in range(3)]
    await check_killed_worker(engine, asked)
