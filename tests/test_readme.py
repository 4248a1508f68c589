"""Every command and every file in the README is run or checked as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deploy.config import SluiceConfig
from tests.e2e.conftest import free_port

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def _blocks(marker: str) -> list[str]:
    pattern = rf"<!-- {re.escape(marker)} -->\n```\w*\n(.*?)```"
    found = re.findall(pattern, README, flags=re.DOTALL)
    assert found, f"the README has no block marked {marker!r}"
    return found


def _newcomer() -> dict[str, str]:
    """The environment without what the tests set for their own Ray."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def _shell(command: str, timeout_s: float = 300) -> str:
    (activate,) = _blocks("run: activate")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{activate}\n{command}"],
        cwd=ROOT,
        env=_newcomer(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """`sluice serve` as `make serve` starts it, but on a free port; its address."""
    port = free_port()
    process = subprocess.Popen(
        [BIN / "sluice", "serve", "--port", str(port)],
        cwd=ROOT,
        env=_newcomer(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("curl "), line + process.stderr.read()
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    try:
        yield f"127.0.0.1:{port}"
        assert '"choices"' in _shell(line)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == [], "Ctrl-C left processes behind"


@pytest.mark.vllm
@pytest.mark.ray
def test_the_first_request_and_the_client_script_work(served: str) -> None:
    for command in _blocks("run: curl"):
        assert '"choices"' in _shell(command.replace("127.0.0.1:8000", served))
    for script in _blocks("run: python"):
        output = _shell(f"python -c {shlex.quote(script.replace('127.0.0.1:8000', served))}")
        assert "interactive" in output.splitlines()[-1]


def test_the_commands_work() -> None:
    for command in _blocks("run: cli"):
        _shell(command)


@pytest.mark.ray
def test_the_benchmarks_run() -> None:
    for command in _blocks("run: bench"):
        _shell(command)


def test_the_configurations_are_accepted() -> None:
    for text in _blocks("check: config"):
        SluiceConfig.model_validate(yaml.safe_load(text))
    for text in _blocks("check: serve-config"):
        schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
        for application in schema.applications:
            assert application.import_path == "deploy.app:build"
            SluiceConfig.model_validate(application.args)
