"""Real vLLM engines with a small model, as replicas have them: their configuration and requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.protocol.requests import (
    EngineDeadError,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
)
from sluice.replica.config import EngineConfig
from sluice.replica.engine import Engine
from sluice.replica.vllm.engine import VllmEngine
from sluice.scheduling.request.objective import SLO
from tests.known_profile import known_profile
from tests.replica.in_process import OBJECTIVES
from tests.replica.waiting import until


def small_config(
    model: Path, directory: Path, fields: Mapping[str, Any] | None = None, **args: Any
) -> EngineConfig:
    """``directory`` gets its batch logs; ``args``: arguments of vLLM, with ``_`` for ``-``."""
    given = {
        "model": str(model),
        "served_model_name": "small",
        "cache_dir": directory,
        "batch_log": directory,
        "latency_profile": known_profile(directory),
        "grammar_check_s": 0,
        **(fields or {}),
    }
    vllm_args = {
        "max-model-len": 1024,
        "max-num-batched-tokens": 512,
        "kv-cache-memory-bytes": 64 << 20,
        "block-size": 32,
        "dtype": "float32",
        **{name.replace("_", "-"): value for name, value in args.items()},
    }
    return EngineConfig(**given, vllm_args=vllm_args)


def greedy(
    name: str, endpoint: Any = "completions", slo: SLO | None = None, **body: Any
) -> EngineRequest:
    """A request for 12 greedy tokens, unless ``body`` says otherwise."""
    fixed = {"model": "small", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return EngineRequest(name, endpoint, fixed | body, slo or SLO())


async def items_of(engine: Engine, request: EngineRequest) -> list[Any]:
    return [item async for item in engine.generate(request)]


def split(items: Sequence[ResponseItem]) -> tuple[ResponseHead, list[Any], ResponseTail]:
    head, *chunks, tail = items
    assert isinstance(head, ResponseHead) and isinstance(tail, ResponseTail)
    return head, chunks, tail


def data_of(items: Iterable[ResponseItem]) -> bytes:
    return b"".join(item.data for item in items if isinstance(item, ResponseChunk))


def events_of(items: Iterable[ResponseItem]) -> list[Any]:
    """The JSON of a stream's server-sent events, up to its end."""
    lines = data_of(items).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def greedy_tokens(
    engine: Engine, name: str, prompt: Sequence[int], output: int, number: int
) -> tuple[int, ...]:
    """The ``output`` greedy tokens of a request with the objective of this number."""
    body = {"prompt": list(prompt), "max_tokens": output, "return_token_ids": True}
    request = greedy(name, slo=OBJECTIVES[number % len(OBJECTIVES)], **body)
    _, chunks, _ = split(await items_of(engine, request))
    return tuple(json.loads(data_of(chunks))["choices"][0]["token_ids"])


def batches_of(engine: VllmEngine) -> list[dict[str, Any]]:
    """Its batch log so far."""
    path = engine._config.batch_log
    assert path is not None
    lines = (path / f"{engine._replica_id}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


async def check_killed_worker(
    engine: VllmEngine, requests: Iterable[Coroutine[Any, Any, Any]]
) -> None:
    """With one of two workers all of these requests end with an error, and the engine ends."""
    tasks = [asyncio.ensure_future(each) for each in requests]
    await until(lambda: any(engine.state().rows["emitted_tokens"] > 3), 120)
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    family = psutil.Process(core.pid).children(recursive=True)
    workers = [each for each in family if "Worker" in each.name()]
    assert len(workers) == 2
    workers[1].kill()
    for task in tasks:
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, 120)
    await check_ended([engine], [*family, psutil.Process(core.pid)])


async def check_ended(engines: Iterable[Engine], processes: Iterable[psutil.Process]) -> None:
    """Health checks of ``engines`` fail, and none of ``processes`` is left."""
    for engine in engines:
        with pytest.raises(EngineDeadError):
            await engine.check_health()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [*processes], 60)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
