"""What tests of several files share, as starting an engine takes long."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from sluice.replica.config import EngineConfig
from sluice.replica.engine import EngineInfo
from sluice.replica.vllm.engine import VllmEngine
from sluice.replica.vllm.local_model import local_model

os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # for KV transfers


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one."""
    return local_model(tmp_path_factory.mktemp("models"), layers=2, hidden=128)


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """What stock vLLM, with room for everything, generates for ``mixed_requests(24)``."""
    from .in_process import mixed_requests, outputs_of_stock

    outputs = outputs_of_stock(model, tmp_path_factory.mktemp("stock"), mixed_requests(24))
    assert len(set(outputs)) > 20
    return outputs


class Started(NamedTuple):
    """``compiled``: graphs of torch and loops of numba of its process when it was ready."""

    engine: VllmEngine
    info: EngineInfo
    compiled: list[int]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    """One of vLLM that measures its profile and tries grammars. No test may end it."""
    directory = tmp_path_factory.mktemp("engine")
    config = EngineConfig(
        model=str(model),
        served_model_name="small",
        cache_dir=directory,
        batch_log=directory / "batches",
        vllm_args={
            "max-model-len": 2048,
            "max-num-batched-tokens": 256,
            "kv-cache-memory-bytes": 64 << 20,
            "block-size": 32,
            # As exact as a comparison of one step with another needs it.
            "dtype": "float32",
            "enable-auto-tool-choice": True,
            "tool-call-parser": "hermes",
            "worker-cls": "tests.replica.compiling.CompilingWorker",
        },
    )
    engine = VllmEngine(config, "replica-1", 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sluice.replica.profiling.BUDGET_S", 3.0)
        info = await engine.start()
    (compiled,) = await engine._llm.collective_rpc("compilations")
    yield Started(engine, info, compiled)
    await engine.stop()
    await engine.stop()
