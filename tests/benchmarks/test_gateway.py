"""The benchmark of gateways: its client, its processes, what is reported, and short real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from sluice.benchmarks.live import gateway as gateway_command
from sluice.benchmarks.live import rest
from sluice.benchmarks.live import systems as live
from sluice.benchmarks.live.client import LoadError
from sluice.benchmarks.live.engine import MODEL, events
from sluice.benchmarks.live.gateway import (
    SYSTEMS,
    Load,
    figures,
    further_tokens,
    load,
    sluice_config,
    summary,
    tables,
)
from sluice.benchmarks.live.peers import CPU_ARGS
from sluice.benchmarks.live.report import CORES, Process, kind_of, processes, spent
from sluice.benchmarks.live.systems import (
    VLLM_ROUTER,
    Bench,
    LeftOutError,
    Server,
    System,
    engines,
    environment,
    served,
    sluice,
    spawned,
    vllm_command,
    vllm_router,
    wait_until_ready,
)
from sluice.deploy.cli import main
from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import base_url
from sluice.deploy.ray_start import free_port
from tests.e2e.conftest import on_the_shared_ray

START_S = 120.0


def never() -> bool:
    return False


# The client.


@asynccontextmanager
async def answering(chunks: list[bytes], status: int = 200) -> AsyncIterator[str]:
    """The address of a server that answers with ``chunks``, whatever is asked for."""

    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/prefix/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/prefix"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("bytes_each", [1, 7, 10_000])
async def test_answers_are_read_however_they_are_cut(bytes_each: int) -> None:
    whole = b"".join(events(5, "id"))
    cut = [whole[start : start + bytes_each] for start in range(0, len(whole), bytes_each)]
    async with answering(cut) as url:
        measured = await load([url], at_once=3, tokens=5, seconds=0.0, stopped=never)
    # The time was over at once, and what was under way has ended.
    assert len(measured.ttfts_s) == 3
    assert 0 < min(measured.ttfts_s) <= max(measured.ttfts_s) <= measured.elapsed_s


@pytest.mark.parametrize(
    ("chunks", "status", "says"),
    [
        (list(events(4, "id")), 200, "4 of 5 tokens"),
        (list(events(5, "id"))[:-1], 200, "5 of 5 tokens"),  # without its end mark
        ([b'{"error": "busy"}'], 503, "status 503.*busy"),
    ],
)
async def test_an_answer_that_lacks_something_ends_the_measurement(
    chunks: list[bytes], status: int, says: str
) -> None:
    async with answering(chunks, status) as url:
        with pytest.raises(LoadError, match=says):
            await load([url], at_once=2, tokens=5, seconds=60.0, stopped=never)


async def test_a_connection_that_is_lost_or_refused_ends_the_measurement() -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: half")
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", break_off)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        with pytest.raises(LoadError, match="connection lost"):
            await load([url], at_once=1, tokens=5, seconds=60.0, stopped=never)
    finally:
        await runner.cleanup()
    with pytest.raises(LoadError, match="Connect call failed"):
        await load([url], at_once=1, tokens=5, seconds=60.0, stopped=never)


STATED = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": %d}}\n\n'


@pytest.mark.parametrize(("stated", "works"), [(5, True), (4, False)])
async def test_tokens_that_an_answer_states_count_before_its_words(
    stated: int, works: bool
) -> None:
    whole = list(events(3, "id"))
    async with answering([*whole[:-1], STATED % stated, whole[-1]]) as url:
        asked = load([url], at_once=1, tokens=5, seconds=0.0, stopped=never)
        if works:
            assert len((await asked).ttfts_s) == 1
        else:
            with pytest.raises(LoadError, match="4 of 5 tokens"):
                await asked


# The processes.


async def test_the_engines_answer_with_as_many_tokens_as_asked_for_and_their_time_is_told(
    tmp_path: Path,
) -> None:
    bench = Bench({}, tmp_path, print, threading.Event(), 0.0)
    with engines(bench) as found:
        roots = dict.fromkeys(found, "replicas")
        before = processes(roots)
        # Longer than the clock of processor time ticks.
        measured = await load(
            list(found.values()), at_once=4, tokens=200, seconds=1.0, stopped=never
        )
        used = spent(before, processes(roots))
        assert set(used) == {"replicas"}
        assert used["replicas"] > 0
        assert len(measured.ttfts_s) >= 4
    assert not any(psutil.pid_exists(pid) for pid in found)


def test_a_process_that_came_counts_whole_and_one_that_ended_not_at_all() -> None:
    def process(kind: str, cpu_s: float) -> Process:
        return Process(kind, cpu_s, 1.0, 1.0)

    before = {1: process("routers", 5.0), 2: process("Ray", 7.0)}
    after = {1: process("routers", 6.5), 3: process("routers", 0.25)}
    assert spent(before, after) == {"routers": 1.75}


@contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[int]:
    """The process id of a server that is ready, until the block ends."""
    with spawned(command, log) as server:
        url = f"http://127.0.0.1:{port}/health"
        wait_until_ready(server, url, log, START_S, threading.Event())
        yield server.pid


def test_a_server_that_does_not_start_is_left_out_with_what_it_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('\\x1b[31mno such\\x1b[0m flag')"]
    with (
        pytest.raises(LeftOutError, match="has ended: no such flag"),
        serving(command, 1, tmp_path / "log"),
    ):
        pass


ENGINE = [sys.executable, "-m", "sluice.benchmarks.live.engine", "--port"]


def test_all_processes_below_a_server_end_with_the_block(tmp_path: Path) -> None:
    port = free_port()
    below = f"import subprocess; subprocess.Popen({[*ENGINE, str(port)]!r}).wait()"
    command = [sys.executable, "-c", below]
    with serving(command, port, tmp_path / "log") as pid:
        family = psutil.Process(pid).children(recursive=True)
        assert family
    assert not any(process.is_running() for process in family)


KILLED = """
import sys
from pathlib import Path
from threading import Event
from sluice.benchmarks.live.systems import spawned, wait_until_ready
port, log = sys.argv[1:]
command = [sys.executable, "-m", "sluice.benchmarks.live.engine", "--port", port]
with spawned(command, Path(log)) as server:
    wait_until_ready(server, f"http://127.0.0.1:{port}/health", Path(log), 120, Event())
    print(server.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux only")
def test_a_server_ends_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(free_port()), str(tmp_path / "log")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.kill()
        _, alive = psutil.wait_procs([server], timeout=120)
        assert alive == []


# Other gateways.


def test_a_router_is_started_in_front_of_all_engines_with_ports_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "environment", lambda package, say: Path("python"))
    workers = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    bench = Bench(dict(enumerate(workers)), tmp_path, print, threading.Event(), 0.0)
    command = [*map(str, vllm_router(bench, 3).command)]
    assert command[:3] == ["python", "-m", "vllm_router.launch_router"]
    assert command[command.index("--port") + 1] == "3"
    assert command[command.index("--prometheus-port") + 1] != "3"
    assert command[-2:] == workers and command[-3] == "--worker-urls"
    assert "==" in VLLM_ROUTER  # the same one in every run


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user whose pip finds no package."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in [name for name in os.environ if name in ("PIP_FIND_LINKS", "PIP_CONFIG_FILE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "sluice" / "bench"


def test_an_environment_that_is_there_is_used_as_it_is(no_index: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = no_index / f"some-router-1.0-python{version}"
    folder.mkdir(parents=True)
    said: list[str] = []
    assert environment("some-router==1.0", said.append) == folder / "bin" / "python"
    assert said == []


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that make figures steadier, and nothing else."""
    monkeypatch.setattr(gateway_command, "WARM_UP_S", 0.1)
    monkeypatch.setattr(gateway_command, "IDLE_S", 0.2)


def measure(*options: str) -> Result:
    return CliRunner().invoke(main, ["bench", "gateway", *options])


LEAST = ["--rounds", "1", "--seconds", "0.2", "--at-once", "2", "--tokens", "5"]


@pytest.mark.release
def test_a_router_that_cannot_be_installed_is_left_out_and_the_rest_measured(
    no_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measure("--system", "direct", "--system", "vllm-router", "--json", *LEAST)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["system"] for row in found["summary"]] == ["direct"]
    assert "cannot install it" in found["left_out"]["vllm-router"]
    assert "vllm-router is left out" in result.stderr
    assert found["further_token"] == []
    assert list(no_index.iterdir()) == []  # nothing half-made stays
    ends = served("vllm-router", lambda bench, port: Server([sys.executable, "-c", ""]))
    monkeypatch.setitem(SYSTEMS, "vllm-router", ends)
    alone = measure("--system", "vllm-router", *LEAST)
    assert alone.exit_code == 1
    assert "no system could be started" in alone.stderr


# What is reported.


def run_of(
    system: str, number: int, tokens: int, per_second: float, ttft_ms: float, **cpu_s: float
) -> dict[str, Any]:
    requests = 100
    measured = Load([ttft_ms / 1e3] * requests, requests / per_second, cpu_s=0.01)
    cell = {"system": system, "at_once": 16, "tokens": tokens, "round": number}
    return {**cell, **figures(measured, cpu_s)}


RUNS = [
    # The second round met a busy machine.
    run_of("direct", 0, 20, 1_000.0, 2.0, replicas=0.04),
    run_of("vllm-router", 0, 20, 500.0, 3.0, replicas=0.04, routers=0.02),
    run_of("sluice", 0, 20, 100.0, 12.0, replicas=0.2, routers=0.6, Ray=0.1),
    run_of("sluice", 1, 20, 40.0, 26.0, replicas=0.2, routers=0.8, Ray=0.3),
    run_of("vllm-router", 1, 20, 200.0, 7.0, replicas=0.04, routers=0.02),
    run_of("direct", 1, 20, 500.0, 6.0, replicas=0.04),
]


def test_systems_are_compared_within_a_round() -> None:
    direct, router, sluice = summary(RUNS)
    assert [row["system"] for row in (direct, router, sluice)] == [
        "direct",
        "vllm-router",
        "sluice",
    ]
    assert direct["ratio"] == {"vllm-router": 2.25}  # 2 and 2.5
    assert sluice["ratio"] == {"direct": 0.09, "vllm-router": 0.2}
    assert sluice["per_second"] == 70.0 and sluice["requests"] == 200
    assert sluice["cpu_ms"] == {
        "replicas": 2.0,
        "routers": 7.0,
        "Ray": 2.0,
        "client": 0.1,
        "gateway": 9.0,
    }
    assert direct["cpu_ms"]["gateway"] == 0.0


def test_at_rest_a_system_is_compared_with_the_engines_own_server() -> None:
    figures = {"cores": 0.02, "processes": 3, "second_s": 10.0, "nothing_cached_s": 20.0}
    runs = [
        {"system": "stock", "start_s": 10.0, "memory_mib": 1_000} | figures,
        {"system": "sluice", "start_s": 12.0, "memory_mib": 1_500} | figures,
        {"system": "sluice", "start_s": 18.0, "memory_mib": 1_700} | figures,
    ]
    stock, ours = rest.summary(runs)
    assert stock["ratio"] == {"start_s": 1.0, "second_s": 1.0, "memory_mib": 1.0}
    assert ours["start_s"] == 15.0
    assert ours["ratio"] == {"start_s": 1.5, "second_s": 1.0, "memory_mib": 1.6}


def test_a_further_token_is_the_difference_of_long_and_short_streams() -> None:
    runs = [
        run_of("sluice", 0, 20, 100.0, 12.0, replicas=0.2, routers=0.6),
        run_of("sluice", 0, 200, 10.0, 12.0, replicas=2.0, routers=4.2, Ray=0.9),
    ]
    assert runs[0]["cpu_ms"] == {"replicas": 2.0, "routers": 6.0, "client": 0.1}
    (row,) = further_tokens(summary(runs))
    assert row["cpu_us"]["routers"] == 200.0  # 36 ms for 180 tokens
    assert row["cpu_us"]["replicas"] == 100.0
    assert row["cpu_us"]["gateway"] == 250.0
    assert further_tokens(summary(runs[:1])) == []
    assert [each.row_count for each in tables(summary(RUNS), [row])] == [3, 3, 1]


# Real ones.


@contextmanager
def sluice_here(bench: Bench) -> Iterator[System]:
    """Sluice as the command configures it, on the Ray that tests share."""
    config = SluiceConfig.model_validate(sluice_config(bench, free_port()))
    with redirect_stdout(sys.stderr), on_the_shared_ray(config):
        yield System((base_url(config),), {os.getpid(): ""})


@pytest.mark.release
@pytest.mark.ray
def test_sluice_is_measured_beside_engines_without_a_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {"direct", "sluice", "ray-serve-llm", "vllm-router"} == set(SYSTEMS)
    monkeypatch.setitem(SYSTEMS, "sluice", sluice_here)
    names = ("direct", "sluice")
    result = measure(*(f"--system={name}" for name in names), *LEAST, "--tokens", "25", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["left_out"] == {}
    assert set(found["idle_cores"]) == set(names)
    cells = [(row["at_once"], row["tokens"], row["system"]) for row in found["summary"]]
    assert cells == [(2, tokens, name) for tokens in (5, 25) for name in names]
    for row in found["summary"]:
        assert row["requests"] >= row["at_once"]
        parts = set(row["cpu_ms"])
        if row["system"] == "sluice":
            assert {"replicas", "routers", "controller", "client"} <= parts
            assert row["ratio"]["direct"] > 0
        else:
            assert parts == {"replicas", "client", "gateway"}
    assert [row["system"] for row in found["further_token"]] == list(names)


STAND_IN = """#!{python}
import json, os, sys
from pathlib import Path
from sluice.benchmarks.live.engine import main
from sluice.deploy.config import SluiceConfig
verb, option, path = sys.argv[1:]
config = SluiceConfig.model_validate(json.loads(Path(path).read_text()))
assert (verb, option) == ("serve", "--config") and os.environ["XDG_STATE_HOME"] == "{folder}"
step_ms = 1e3 * config.engine.simulated.step_s
main(["--port", str(config.router.port), "--step-ms", str(step_ms)])
"""


def test_sluice_is_started_by_its_program_apart_from_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sluice"
    program.write_text(STAND_IN.format(python=sys.executable, folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setattr(live, "SLUICE", program)
    bench = Bench({}, tmp_path, print, threading.Event(), 2.0)
    with sluice("other", sluice_config)(bench) as system:
        (pid,) = system.processes
        assert psutil.Process(pid).is_running() and len(system.urls) == 1
    assert not psutil.pid_exists(pid)


TITLED = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import set_process_title
print(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]).served_model_name)
set_process_title("EngineCore")
print("titled", flush=True)
sys.stdin.read()
"""


@pytest.mark.release
@pytest.mark.vllm
def test_vllms_server_takes_its_arguments_and_its_engines_process_is_told_by_its_title(
    tmp_path: Path,
) -> None:
    command = vllm_command(tmp_path, MODEL, 8001, {"max-model-len": 2_048, **CPU_ARGS})
    assert kind_of(" ".join(command)) == "replicas"
    run = [sys.executable, "-c", TITLED, *command[3:]]
    with subprocess.Popen(run, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        said = list(takewhile("titled\n".__ne__, process.stdout))
        assert said[-1].strip() == f"['{MODEL}']"
        found = processes({process.pid: ""})
        assert set(found) == {process.pid}
    assert found[process.pid].kind == CORES and found[process.pid].cpu_s > 0
