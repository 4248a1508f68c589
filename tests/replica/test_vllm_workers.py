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

from sluice.replica.vllm.engine import VllmEngine
from tests.replica.in_process import mixed_requests
from tests.replica.killed_worker import check_killed_worker
from tests.replica.small_engine import greedy_tokens, small_config

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
    config = small_config(model, directory, **{request.param: 2})
    engine = VllmEngine(config, "replica-1", 32)
    await engine.start()
    yield Spanning(engine, directory / "replica-1.jsonl", request.param)
    await engine.stop()


async def test_tokens_are_those_of_one_worker(
    spanning: Spanning, stock: list[tuple[int, ...]]
) -> None:
    engine, log, option = spanning
    found = await asyncio.gather(
        *(
            greedy_tokens(engine, f"r{number}", prompt, output, number)
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
    asked = [greedy_tokens(engine, f"lost-{i}", list(range(300, 800)), 500, i) for i in range(3)]
    await check_killed_worker(engine, asked)
