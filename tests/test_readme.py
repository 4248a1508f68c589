from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sluice.deploy.ray_start import free_port
from tests.documents import README, ROOT, marked, newcomer, shell
from tests.e2e.conftest import wait_until
from tests.e2e.test_serve_command import check_ports

BIN = Path(sys.executable).parent
GUIDE = ROOT / "docs" / "getting-started.md"


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of ``sluice serve`` as ``make serve`` starts it, with one replica."""
    port = free_port()
    process = subprocess.Popen(
        [BIN / "sluice", "serve", "--port", str(port), "--replicas", "1"],
        cwd=ROOT,
        env=newcomer(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("curl "), line + process.stderr.read()
    own = psutil.Process(process.pid)
    family = own.children(recursive=True)
    assert family
    try:
        yield f"127.0.0.1:{port}"
        assert '"choices"' in shell(line)
        check_ports((own, *family))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
        assert f"live page: http://127.0.0.1:{port}/ui#key=" in process.stderr.read()
        _, alive = psutil.wait_procs(family, timeout=120)
        assert alive == [], "Ctrl-C left processes behind"


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.own_ray
def test_the_first_requests_and_the_client_script_work(served: str) -> None:
    def run(path: Path, marker: str) -> list[str]:
        return [
            shell(command.replace("127.0.0.1:8000", served)) for command in marked(path, marker)
        ]

    for path in (README, GUIDE):
        assert all('"choices"' in output for output in run(path, "run: curl"))
    shown: list[str] = []

    def promised() -> bool:
        shown[:] = run(GUIDE, "run: headers")
        return "x-sluice-admission: guaranteed" in shown[0]

    # On a busy machine a report comes late, and at a silent replica nothing is promised.
    wait_until(promised, "a promise", show=lambda: shown)
    assert "x-sluice-admission: best-effort" in shown[1]
    (script,) = marked(GUIDE, "run: python")
    output = shell(f"python -c {shlex.quote(script.replace('127.0.0.1:8000', served))}")
    assert "interactive" in output.splitlines()[-1]
    (metrics,) = run(GUIDE, "run: metrics")
    assert re.search(r"^sluice_promises_total\{.* [1-9]", metrics, re.MULTILINE)


def test_the_commands_work() -> None:
    for block in marked(README, "run: cli"):
        for command in block.splitlines():
            assert shell(command)


BENCHMARKS = [line for block in marked(README, "run: bench") for line in block.splitlines()]
ON_RAY = "sluice bench gateway"


@pytest.mark.release  # `sluice bench list` is in the documents, too
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=(pytest.mark.ray, pytest.mark.own_ray))
        if each.startswith(ON_RAY)
        else each
        for each in BENCHMARKS
    ],
)
def test_the_benchmarks_run(command: str) -> None:
    assert shell(command)


def test_one_of_them_needs_ray() -> None:
    assert sum(each.startswith(ON_RAY) for each in BENCHMARKS) == 1
