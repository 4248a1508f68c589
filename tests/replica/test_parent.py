"""Processes that must not outlive who made them, even where they stand still."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sluice.replica.vllm.local_model import local_model
from tests.replica.waiting import until

CHILD = """
import multiprocessing, signal, time
from sluice.replica.parent_watch import end_with_parent

def child(ready):
    end_with_parent()
    ready.set()
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=child, args=(ready,))
    process.start()
    ready.wait()
    print("child", process.pid, flush=True)
    time.sleep(600)
"""

ENGINE = """
import asyncio, sys
import psutil
from sluice.replica.config import EngineConfig
from sluice.replica.vllm.engine import VllmEngine

async def main():
    model, folder = sys.argv[1:]
    args = {"max-model-len": 256, "kv-cache-memory-bytes": 16 << 20}
    # Without the process for grammars the child is the engine.
    config = EngineConfig(
        model=model, cache_dir=folder, profile_budget_s=0.1, grammar_check_s=0, vllm_args=args
    )
    await VllmEngine(config, "replica-1", 4).start()
    for each in psutil.Process().children(recursive=True):
        if "resource_tracker" not in " ".join(each.cmdline()):
            print("child", each.pid, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def check(folder: Path, text: str, *words: str) -> None:
    """The child that a program names ends with it, though it stands still."""
    script = folder / "program.py"
    script.write_text(text)
    command = [sys.executable, str(script), *words]
    program = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert program.stdout is not None
    try:
        while not (line := await program.stdout.readline()).startswith(b"child "):
            assert line, "the program has ended"  # others are vLLM's
        child = psutil.Process(int(line.split()[1]))
        child.suspend()
    finally:
        program.kill()
        await program.wait()
    try:
        await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


async def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    await check(tmp_path, CHILD)


@pytest.mark.vllm
async def test_an_engine_ends_with_its_replica(tmp_path: Path) -> None:
    model = local_model(tmp_path, layers=1, hidden=64)
    await check(tmp_path, ENGINE, str(model), str(tmp_path))
