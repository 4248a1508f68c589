from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests import injuries
from tests.e2e.conftest import ASKING, LENIENT, System, system, wait_until
from tests.known_profile import known_profile

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.release]

STREAMS = 12
TOKENS = 120
REPLACED_S = 400.0
"""Longest wait for another replica with its engine, seconds."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    profile: Path = known_profile(tmp_path_factory.mktemp("profile"))
    fields = {
        "controller": LENIENT,
        "engine": {
            "latency_profile": str(profile),
            "grammar_check_s": 0,
            "vllm_args": {"max-model-len": 2048, "block-size": 32, "pipeline-parallel-size": 2},
        },
        "replica": {"count": 2},
        "router": ASKING,
    }
    with system(fields) as started:
        yield started


async def stream(http: httpx.AsyncClient, number: int, model: str, begun: list[str]) -> str:
    """The text of a stream that ends whole. ``begun`` gets the replica at which it begins."""
    body = {
        "model": model,
        "prompt": f"request {number}",
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        begun.append(answer.headers["x-sluice-replica"])
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
    raise AssertionError("the stream was cut off")


async def load(url: str, model: str, begun: list[str]) -> list[str]:
    """The texts of so many streams at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        asked = (stream(http, number, model, begun) for number in range(STREAMS))
        return await asyncio.gather(*asked)


async def hurt(url: str, model: str, process: psutil.Process) -> tuple[list[str], list[str]]:
    """The texts where ``process`` is killed while all stream, and where each began."""
    begun: list[str] = []

    def kill() -> None:
        wait_until(lambda: len(begun) == STREAMS, "all stream")
        process.kill()

    found, _ = await asyncio.gather(load(url, model, begun), asyncio.to_thread(kill))
    return found, begun


def ended(*processes: psutil.Process) -> bool:
    states = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return all(not each.is_running() or each.status() in states for each in processes)


def test_a_killed_worker_costs_no_request(serving: System) -> None:
    whole = asyncio.run(load(serving.url, "local", []))
    before = {row["replica_id"] for row in serving.snapshot()["replicas"]}
    assert len(before) == 2
    replica = psutil.Process(injuries.replica(min(before)).pid)
    family = replica.children(recursive=True)
    workers = [each for each in family if "Worker" in each.name()]
    assert len(workers) == 2
    found, _ = asyncio.run(hurt(serving.url, "local", workers[1]))
    assert found == whole
    wait_until(lambda: ended(replica, *family), "the replica has ended with all its processes")
    wait_until(
        lambda: len({row["replica_id"] for row in serving.snapshot()["replicas"]} - before) == 1,
        "another replica has its place",
        REPLACED_S,
    )


def test_frozen_workers_end_with_their_replica(serving: System) -> None:
    """As if they waited for a device that does not answer. The last test: a replica is gone."""
    replica = psutil.Process(injuries.replica(serving.snapshot()["replicas"][0]["replica_id"]).pid)
    engine = [each for each in replica.children(recursive=True) if "VLLM" in each.name()]
    assert len(engine) == 3
    for each in engine:
        each.suspend()
    replica.kill()
    wait_until(lambda: ended(*engine), "engine and workers have ended")
