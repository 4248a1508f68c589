"""A process that must not outlive its parent; test_vllm_serving.py has the same of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from tests.replica.waiting import until

CHILD = """
import multiprocessing, signal, time
from sluice.replica.processes import end_with_parent

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


async def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Though it stands still."""
    script = tmp_path / "program.py"
    script.write_text(CHILD)
    command = [sys.executable, str(script)]
    program = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert program.stdout is not None
    try:
        line = await program.stdout.readline()
        assert line.startswith(b"child "), "the program has ended"
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
