"""A replica stops while a promised request waits there: another one keeps the promise."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
import ray

from tests import injuries
from tests.e2e.conftest import System, system, wait_until

pytestmark = pytest.mark.ray

PREFILL_S = 3.0
FIELDS = {
    "name": "moves",
    "engine": {
        "kind": "simulated",
        "model": "sim",
        "simulated": {"step_s": 0.01, "token_s": PREFILL_S / 300, "context_token_s": 0.0},
    },
    "replica": {"count": 2, "num_cpus": 0.1},
    # A silent replica is silent in earnest, however busy the machine is.
    "controller": {"aged_after_s": 4, "stale_after_s": 60, "forget_after_s": 100},
    # What looks for replicas that hang does not come first.
    "router": {"replicas": 1, "stall_after_s": 3_600, "decision_timeout_s": 10},
}
BODY = {
    "model": "sim",
    "prompt": list(range(300)),
    "max_tokens": 3,
    "stream": True,
    "slo": {"ttft_ms": 25_000, "tpot_ms": 5_000},
}


def test_a_promised_request_leaves_a_replica_that_stopped() -> None:
    with system(FIELDS) as serving:
        wait_until(lambda: len(serving.snapshot()["replicas"]) == 2, "both have reported")
        answers: list[httpx.Response] = []
        asked = threading.Thread(target=lambda: answers.append(_ask(serving)))
        asked.start()
        wait_until(lambda: _busy(serving) != [], "a replica has it")
        (victim,) = _busy(serving)
        (placed,) = _log(serving)
        assert (placed["replica_id"], placed["tier"]) == (victim, "guaranteed"), placed["why"]
        with injuries.replica(victim).frozen():
            asked.join(timeout=120)
        (answer,) = answers
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert answer.text.count('"text"') == BODY["max_tokens"], "no token comes twice"
        assert answer.headers["x-sluice-admission"] == "guaranteed"
        assert answer.headers["x-sluice-replica"] != victim
        _check_counted(serving, victim, answer.headers["x-sluice-request-id"])


def _ask(serving: System) -> httpx.Response:
    return httpx.post(f"{serving.url}/v1/completions", json=BODY, timeout=120)


def _log(serving: System) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.get(serving.observer().decisions.remote(10), timeout=120)
    return found


def _busy(serving: System) -> list[str]:
    return [
        each["replica_id"]
        for each in serving.snapshot()["replicas"]
        if each["waiting"] + each["running"]
    ]


def _check_counted(serving: System, victim: str, request_id: str) -> None:
    """It moved once, its promise was kept, and the log of decisions says so."""

    def told() -> dict[str, Any]:
        found: dict[str, Any] = serving.snapshot()["calibration"]
        return found

    wait_until(lambda: told()["promised"] == 1, "its end is known", show=told)
    assert (told()["kept"], told()["moved"], told()["moved_kept"]) == (1, 1, 1)
    page = httpx.get(f"{serving.url}/metrics", timeout=120).text
    lines = [line for line in page.splitlines() if line.startswith("sluice_promises_moved_total")]
    assert [float(line.rsplit(" ", 1)[1]) for line in lines] == [1.0], lines
    assert 'outcome="kept"' in lines[0]
    moved, first = _log(serving)
    assert moved["request_id"] == first["request_id"] == request_id
    assert (first["replica_id"], first["tried_again"]) == (victim, True)
    assert moved["moved_from"] == victim and victim in moved["why"]
    assert moved["ended"]["attained"] is True
