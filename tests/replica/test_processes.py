"""Processes of an engine: their cores, their end with their parent, and their private folders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sluice.replica import worker
from sluice.replica.private_dir import LOCK, make_private_dir, private_dir
from sluice.replica.processes import core_of, pin_thread
from tests.replica.waiting import until

CHILD = """
import multiprocessing, time
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


async def test_a_stopped_process_ends_with_its_parent(tmp_path):
    """test_vllm_workers.py has the same of an engine."""
    script = tmp_path / "program.py"
    script.write_text(CHILD)
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=subprocess.PIPE
    )
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


WORKER = """
import os, pathlib, sys, threading
import setproctitle
from sluice.replica.processes import EngineContext

def child(pipe):
    print("from the engine", file=sys.stderr, flush=True)
    pipe.send((os.getpid(), "vllm.v1.engine.core" in LOADED, sys.argv[1]))
    pipe.recv()

LOADED = frozenset(sys.modules)
if __name__ == "__main__":
    assert "vllm.v1.engine.core" in sys.modules and threading.active_count() == 1
    setproctitle.setproctitle("a worker of Ray")
    assert b"a worker of Ray" in pathlib.Path("/proc/self/cmdline").read_bytes()
    with open(sys.argv[2], "w") as log:  # as Ray does by then
        os.dup2(log.fileno(), 2)
    context = EngineContext()
    mine, its = context.Pipe()
    context.Process(target=child, args=(its,)).start()
    print(os.getpid(), *mine.recv(), flush=True)
    mine.recv()
"""


@pytest.mark.vllm
def test_the_worker_of_a_replica_imports_vllm_and_what_forks_from_it_has_that(tmp_path):
    script = tmp_path / "default_worker.py"
    script.write_text(WORKER)
    log = tmp_path / "worker.err"
    # As Ray starts it: a part of a shell's line.
    line = f"exec {worker.command()} {script} its-argument {log}"
    with subprocess.Popen(["bash", "-c", line], stdout=subprocess.PIPE, text=True) as program:
        try:
            pid, child, loaded, argument = program.stdout.readline().split()
            assert (int(pid), loaded, argument) == (program.pid, "True", "its-argument")
            assert "from the engine" in log.read_text()
            below = psutil.Process(program.pid).children(recursive=True)
            assert int(child) in [each.pid for each in below]
        finally:
            program.kill()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive


def test_a_node_may_have_its_python_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "only here" / "python3"))
    line = f"{worker.command()} --help".replace(" -P -m sluice.replica.worker", " -P")
    done = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True)
    assert "usage" in done.stdout


def test_replicas_are_spread_over_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 4, 6})
    assert [core_of(worker) for worker in range(5)] == [4, 6, 9, 4, 6]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [core_of(worker) for worker in range(3)] == [0, 1, 0]


def test_only_the_calling_thread_is_pinned_and_only_to_an_allowed_core(caplog):
    caplog.set_level("WARNING", logger="sluice")
    allowed = os.sched_getaffinity(0)
    first, *others = sorted(allowed)

    def pinned(core, rank=0):
        pin_thread(core, rank)
        return os.sched_getaffinity(0)

    for core, rank, expected in (
        (max(allowed), 0, {max(allowed)}),
        (10_000, 0, allowed),
        (first, 1, {[*others, first][0]}),
    ):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(pinned, core, rank).result() == expected
    assert "not pinned to core 10000" in caplog.text
    assert os.sched_getaffinity(0) == allowed


OTHER = """
import pathlib, sys
from sluice.replica.private_dir import make_private_dir
made = make_private_dir(pathlib.Path(sys.argv[1]))
(made / "ray" / "sockets").mkdir(parents=True)
(made / "ray" / "sockets" / "raylet").write_text("x")
print(made, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process with a folder in ``tmp_path``."""
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def test_a_folder_is_for_this_user_alone_and_goes_at_the_end(tmp_path):
    with private_dir(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "state").write_bytes(b"x")
    assert not folder.exists()


def test_a_folder_goes_after_its_process_and_all_that_have_it_on_their_command_line(
    tmp_path, other
):
    process, folder = other
    with private_dir(tmp_path):
        assert (folder / "ray" / "sockets" / "raylet").exists()
    process.send_signal(signal.SIGSTOP)  # a frozen process has not died
    make_private_dir(tmp_path)
    assert folder.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", folder], stdin=subprocess.PIPE
    )
    make_private_dir(tmp_path)
    assert folder.exists()
    child.communicate()
    own = make_private_dir(tmp_path)
    assert not folder.exists()
    make_private_dir(tmp_path)
    assert own.exists()


def test_other_folders_are_not_touched(tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / LOCK).touch()
    (tmp_path / "sluice-link").symlink_to(target)
    (tmp_path / "sluice-file").touch()
    for name in ("being-made", "linked-lock", "batches", "of-another-user"):
        (tmp_path / f"sluice-{name}").mkdir()
    (tmp_path / "sluice-linked-lock" / LOCK).symlink_to(target / LOCK)
    # Batches may lie beside private folders, and have a file of another name.
    (tmp_path / "sluice-batches" / "lock").touch()
    if os.getuid() == 0:  # only root can make folders of another user
        (tmp_path / "sluice-of-another-user" / LOCK).touch()
        os.chown(tmp_path / "sluice-of-another-user", 12345, 12345)
    before = {path.name for path in tmp_path.iterdir()}
    make_private_dir(tmp_path)
    assert before < {path.name for path in tmp_path.iterdir()}
    assert (target / LOCK).exists()
