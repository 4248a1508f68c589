"""An engine of two workers, one of which is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import psutil
import pytest

from sluice.protocol.requests import EngineDeadError
from sluice.replica.vllm.engine import VllmEngine
from tests.replica.waiting import until


async def check_killed_worker(
    engine: VllmEngine, asked: Iterable[Coroutine[Any, Any, Any]]
) -> None:
    """While the requests of ``asked`` run, a worker is killed: all of them end with an error, the
    health check fails, and the engine ends with all of its processes."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    await until(lambda: any(engine.state().rows["emitted_tokens"] > 3), 120)
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    family = psutil.Process(core.pid).children(recursive=True)
    workers = [each for each in family if "Worker" in each.name()]
    assert len(workers) == 2
    workers[1].kill()
    for task in tasks:
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, 120)
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    # The other one has computed with it, and waited for it.
    _, alive = await asyncio.to_thread(psutil.wait_procs, [*family, psutil.Process(core.pid)], 60)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
