from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from sluice.benchmarks.live.client import AnswerCheck, simulated
from tests.e2e.conftest import ASKING, LENIENT, System, system, wait_until
from tests.processes import title_of

pytestmark = [pytest.mark.ray, pytest.mark.release]

NAME = "connections"
STREAMS = 8
TOKENS = 60


class Streams:
    """Streams under way, each held against what it must say."""

    def __init__(self, serving: System) -> None:
        self._url = f"{serving.url}/v1/completions"
        self._pool = ThreadPoolExecutor(STREAMS)
        self.begun: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._ended = [self._pool.submit(self._read, number) for number in range(STREAMS)]

    def _read(self, number: int) -> str:
        body = {"model": "sim", "prompt": f"number {number}", "max_tokens": TOKENS, "stream": True}
        check = AnswerCheck(simulated("completions", body))
        with httpx.stream("POST", self._url, json=body, timeout=120) as answer:
            assert answer.status_code == 200
            replica = answer.headers["x-sluice-replica"]
            for index, data in enumerate(answer.iter_bytes()):
                if not index:
                    with self._lock:
                        self.begun[replica] += 1
                check.feed(data)
        check.end_stream()
        return replica

    def finish(self) -> None:
        with self._pool:
            for each in self._ended:
                each.result(timeout=120)


def sent(serving: System, counter: str = "sluice_replica_calls") -> dict[str, float]:
    """Calls to replicas so far, or what else is counted, by their way."""
    page = serving.metrics()
    found = re.findall(rf'^{counter}_total{{.*way="(\w+)".*}} (\S+)$', page, re.MULTILINE)
    return {way: float(value) for way, value in found}


def replica_processes() -> list[int]:
    """Of the application's replicas, on this machine."""
    title = f"ServeReplica:{NAME}:Replica"
    return [
        each.pid for each in psutil.Process().children(recursive=True) if title in title_of(each)
    ]


def test_streams_outlive_replicas_that_are_stopped_or_killed() -> None:
    fields: dict[str, Any] = {
        "name": NAME,
        "engine": {
            "kind": "simulated",
            "model": "sim",
            "simulated": {"step_s": 0.05, "token_s": 0.0},
        },
        "replica": {"count": 2, "num_cpus": 0.1, "drain_timeout_s": 60},
        "controller": {**LENIENT, "policy": "round_robin"},
        "router": ASKING,
    }
    with system(fields) as serving:
        wait_until(lambda: len(serving.snapshot()["replicas"]) == 2, "both have reported")

        def travels() -> bool:
            body = {"model": "sim", "prompt": "p", "max_tokens": 1}
            serving.post(body)
            return sent(serving).get("connection", 0.0) >= 4

        wait_until(travels, "calls travel over connections", every_s=0.2)

        before = sent(serving)
        streams = Streams(serving)
        wait_until(lambda: streams.begun.total() == STREAMS, "all stream", every_s=0.01)
        assert len(streams.begun) == 2
        killed = replica_processes()
        assert len(killed) == 2
        os.kill(killed[0], signal.SIGKILL)
        streams.finish()
        after = sent(serving)
        assert after["connection"] >= before["connection"] + STREAMS
        assert sent(serving, "sluice_streams") == {"router": STREAMS}

        wait_until(lambda: len(served_by(serving)) == 2, "both serve again", every_s=0.2)
        streams = Streams(serving)
        wait_until(lambda: streams.begun.total() == STREAMS, "all stream", every_s=0.01)
        serving.scale(1)
        streams.finish()
        wait_until(lambda: len(replica_processes()) == 1, "one is left", every_s=0.2)


def served_by(serving: System) -> set[str]:
    """The replicas of a few requests."""
    body = {"model": "sim", "prompt": "p", "max_tokens": 1}
    answers = [serving.post(body) for _ in range(4)]
    return {answer.headers["x-sluice-replica"] for answer in answers if answer.status_code == 200}
