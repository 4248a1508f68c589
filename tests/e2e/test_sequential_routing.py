from __future__ import annotations

import json
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
import ray

from tests.e2e.conftest import ASKING, PATIENT, System, system, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.release]

FIELDS = {
    "name": "sequential",
    "engine": {
        "kind": "simulated",
        "model": "sim",
        "simulated": {"step_s": 0.01, "token_s": 0.05, "context_token_s": 0.0},
    },
    "replica": {"count": 3, "num_cpus": 0.1},
    "controller": {
        **PATIENT,
        "policy": "slos_serve",
        "policy_options": {"hops": 2},
        "admission": "slos_serve",
    },
    "router": ASKING,
}


def test_a_replica_that_declines_is_followed_by_the_next_in_turn() -> None:
    with system(FIELDS) as serving, ExitStack() as clients:
        wait_until(lambda: len(serving.snapshot()["replicas"]) == 3, "all have reported")

        def ask(tokens: int) -> dict[str, Any]:
            return _ask(serving, clients.enter_context(_connection(serving)), tokens)

        # Of 60 s: 50 s at the first replica, and next to nothing at the two others.
        first, second, third = (ask(tokens)["replica_id"] for tokens in (1_000, 1, 1))
        assert len({first, second, third}) == 3
        # It is the first one's turn again, which cannot compute 20 s more in time.
        hopped = ask(400)
        assert (hopped["replica_id"], hopped["tier"]) == (second, "guaranteed"), hopped["why"]
        assert (hopped["candidates"], hopped["able"]) == (2, 1)
        # None of the next two can compute 57 s more in time, and a third one is not tested.
        declined = ask(1_150)
        assert declined["tier"] == "best-effort", declined["why"]
        assert (declined["candidates"], declined["able"]) == (2, 0)
        clients.close()
        wait_until(lambda: serving.live() == 0, "all are cancelled as their clients have left")


def _connection(serving: System) -> closing[HTTPConnection]:
    return closing(HTTPConnection(urlsplit(serving.url).netloc, timeout=120))


def _ask(serving: System, connection: HTTPConnection, tokens: int) -> dict[str, Any]:
    body = {
        "model": "sim",
        "prompt": list(range(tokens)),
        "max_tokens": 2,
        "slo": {"ttft_ms": 60_000, "tpot_ms": 10_000},
    }
    before = len(_log(serving))
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    wait_until(lambda: len(_log(serving)) > before, "it was decided")
    return _log(serving)[0]


def _log(serving: System) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.get(serving.observer().decisions.remote(10), timeout=120)
    return found
