"""`sluice serve` whose HAProxy fetches streams from the replicas, one of which is killed."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sluice.benchmarks.live.answers import AnswerCheck, simulated
from sluice.deploy.haproxy import DIRECT_VARIABLE
from sluice.deploy.ray_settings import free_port
from tests.e2e.command import ServeCommand
from tests.e2e.conftest import ASKING, LENIENT, wait_until
from tests.processes import title_of

pytestmark = [pytest.mark.ray, pytest.mark.own_ray, pytest.mark.release]

STREAMS = 6
TOKENS = 80


def stream(url: str, number: int, begun: list[str]) -> None:
    """A stream, held against what it must say."""
    body = {"model": "sim", "prompt": f"number {number}", "max_tokens": TOKENS, "stream": True}
    check = AnswerCheck(simulated("completions", body))
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for index, data in enumerate(answer.iter_bytes()):
            if not index:
                begun.append(answer.headers["x-sluice-replica"])
            check.feed(data)
    check.end_stream()


def counted(url: str, sample: str) -> float:
    """What the samples of the page that match say together."""
    page = httpx.get(f"{url}/metrics", timeout=120).text
    return sum(map(float, re.findall(rf"^{sample} (\S+)$", page, re.MULTILINE)))


def test_streams_that_go_past_routers_go_on_when_their_replica_is_killed(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    fields: dict[str, Any] = {
        "engine": {"kind": "simulated", "model": "sim", "simulated": {"step_s": 0.05}},
        "replica": {"count": 2, "num_cpus": 0.1},
        "controller": {**LENIENT, "policy": "round_robin"},
        "router": {**ASKING, "port": port},
    }
    command = ServeCommand(fields, tmp_path, **{DIRECT_VARIABLE: "1"})
    try:
        begun: list[str] = []
        with ThreadPoolExecutor(STREAMS) as threads:
            streams = [threads.submit(stream, url, number, begun) for number in range(STREAMS)]
            wait_until(lambda: len(begun) == STREAMS, "all stream", every_s=0.01)
            replicas = [
                each
                for each in command.family()
                if re.search("ServeReplica:.*:Replica", title_of(each))
            ]
            assert len(replicas) == len(set(begun)) == 2
            psutil.Process(replicas[0].pid).kill()
            for each in streams:
                each.result(timeout=120)
        assert counted(url, 'sluice_streams_total{.*way="direct".*}') == STREAMS
        assert counted(url, "sluice_streams_total.*") == STREAMS
        assert counted(url, "sluice_resumes_total.*") == STREAMS / 2
    finally:
        command.kill()
