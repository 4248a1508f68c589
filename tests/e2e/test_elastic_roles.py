from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.conftest import ASKING, PATIENT, System, system, wait_until
from tests.e2e.pools import roles, stream

pytestmark = [pytest.mark.ray, pytest.mark.release]

REPLICAS = 3
# A step takes 200 ms beside its tokens, and every token is due 300 ms after the one before: beside
# decodes a replica has a quarter of its time for prompts, so mixed ones serve few prompts in time.
FIELDS: dict[str, Any] = {
    "name": "elastic",
    "controller": PATIENT,
    "engine": {
        "kind": "simulated",
        "model": "sim",
        "simulated": {"step_s": 0.2, "token_s": 0.005, "context_token_s": 0.0},
    },
    "replica": {
        "num_cpus": 0.1,
        "drain_timeout_s": 10,
        "count": REPLICAS,
        "elastic": True,
    },
    "router": {**ASKING, "classes": {"standard": {"ttft_ms": 3_000, "tpot_ms": 300}}},
}
PROMPT = {"words": 100, "max_tokens": 2}
ANSWER = {"words": 5, "max_tokens": 20}


class Clients:
    """Clients that ask for one stream after the other, each of which must be whole."""

    def __init__(self, serving: System) -> None:
        self.done = 0
        self._serving = serving
        self._lock = threading.Lock()

    @contextmanager
    def asking(self, count: int, words: int, max_tokens: int) -> Iterator[None]:
        stop = threading.Event()
        body = {"model": "sim", "max_tokens": max_tokens}

        def ask(client: int) -> None:
            number = 0
            while not stop.is_set():
                prompt = f"{'word ' * (words - 2)}{client} {number}"
                stream(self._serving, {**body, "prompt": prompt})
                number += 1
                with self._lock:
                    self.done += 1

        with ThreadPoolExecutor(count) as threads:
            asked: list[Future[None]] = [threads.submit(ask, client) for client in range(count)]
            try:
                yield
            finally:
                stop.set()
            for each in asked:
                each.result()


def test_roles_follow_the_load_while_streams_run_and_all_of_them_are_whole() -> None:
    with system(FIELDS) as serving:
        wait_until(lambda: roles(serving) == {"mixed": REPLICAS}, "all begin mixed")
        clients = Clients(serving)
        with clients.asking(6, **ANSWER):
            with clients.asking(8, **PROMPT):
                wait_until(
                    lambda: roles(serving) == {"prefill": 2, "decode": 1},
                    "prompts have replicas of their own",
                    show=serving.snapshot,
                )
                wait_until(lambda: serving.value("sluice_split_decisions_total") > 0, "pairs serve")
            with clients.asking(14, **ANSWER):
                wait_until(
                    lambda: roles(serving)["prefill"] < 2,
                    "answers have them",
                    show=serving.snapshot,
                )
        assert clients.done > 20
        assert serving.value("sluice_role_changes_total") >= REPLICAS
        # Nothing was cut off, so nothing had to be resumed.
        assert serving.value("sluice_resumes_total") == 0
