from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import ray

from sluice.benchmarks.live.client import AnswerCheck, simulated
from tests import injuries
from tests.documents import ROOT, marked, shell
from tests.e2e.conftest import System, system, wait_until

pytestmark = pytest.mark.ray

KEY = "admin-key-of-the-drain-test"
DOCUMENT = ROOT / "docs" / "page.md"
BODY = {"model": "sim", "prompt": "one", "max_tokens": 2}
PREFILL_S = 3.0
FIELDS = {
    "name": "leaving",
    "engine": {
        "kind": "simulated",
        "model": "sim",
        "simulated": {"step_s": 0.01, "token_s": PREFILL_S / 300, "context_token_s": 0.0},
        "transfer": {},
    },
    "replica": {"count": 2, "num_cpus": 0.1},
    # A silent replica is silent in earnest, however busy the machine is.
    # By chance both replicas are in one of the two cells, or each in its own.
    "controller": {"cells": 2, "stale_after_s": 8},
    # What looks for replicas that hang does not come first.
    "router": {
        "replicas": 1,
        "stall_after_s": 3_600,
        "decision_timeout_s": 10,
        "admin": {"keys": [KEY]},
    },
}
PROMISED = {
    "model": "sim",
    "prompt": list(range(300)),
    "max_tokens": 3,
    "stream": True,
    "slo": {"ttft_ms": 25_000, "tpot_ms": 5_000},
}


LONG = {"model": "sim", "prompt": "one", "max_tokens": 4_000, "stream": True}
"""A stream that takes minutes."""


class Reader(threading.Thread):
    """A client that reads a long stream and checks each token, until it closes it."""

    def __init__(self, serving: System, number: int) -> None:
        super().__init__(daemon=True)
        # Every second one is promised.
        promise = {"slo": PROMISED["slo"]} if number % 2 else {}
        self._body = {**LONG, "prompt": f"stream {number}", **promise}
        self._url = f"{serving.url}/v1/completions"
        self._closed = threading.Event()
        self.check = AnswerCheck(simulated("completions", self._body))
        self.error: Exception | None = None
        self.ended = False
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
                for data in response.iter_raw():
                    self.check.feed(data)
                    if self._closed.is_set():
                        return
            self.ended = True
        except Exception as error:
            self.error = error

    def close(self) -> None:
        self._closed.set()
        self.join(timeout=120)


@contextmanager
def streams(serving: System, count: int = 6) -> Iterator[list[Reader]]:
    """Streams that run, on each replica."""
    wait_until(lambda: serving.live() == 0, "nothing is left of the test before")
    readers = [Reader(serving, number) for number in range(count)]
    try:
        wait_for_tokens(readers, 5)
        yield readers
    finally:
        for reader in readers:
            reader.close()


def wait_for_tokens(readers: list[Reader], more: int) -> None:
    """Wait until each stream has so many more tokens, all of them right."""
    wanted = [reader.check.chunks + more for reader in readers]

    def come() -> bool:
        assert [reader.error for reader in readers if reader.error is not None] == []
        assert not any(reader.ended for reader in readers), "they take minutes"
        counts = [reader.check.chunks for reader in readers]
        return all(count >= least for count, least in zip(counts, wanted, strict=True))

    wait_until(come, "their tokens come", show=lambda: [each.check.chunks for each in readers])


def moved_streams(serving: System) -> dict[str, float]:
    """How many streams have moved, by what became of their KV."""
    found = re.findall(
        r'sluice_migration_pause_seconds_count{.*kv="(\w+)".*} (\S+)', serving.metrics()
    )
    return {kv: float(count) for kv, count in found}


@pytest.fixture(scope="module")
def serving() -> Iterator[System]:
    with system(FIELDS) as running:
        wait_until(lambda: len(running.snapshot()["replicas"]) == 2, "both have reported")
        yield running


def admin(serving: System, method: str, path: str, key: str = KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, f"{serving.url}/admin/v1/{path}", headers=headers, timeout=120)


def served_by(serving: System, count: int) -> set[str]:
    """The replicas of so many requests, one after the other."""
    answers = [serving.post(BODY) for _ in range(count)]
    assert {answer.status_code for answer in answers} == {200}
    return {answer.headers["x-sluice-replica"] for answer in answers}


def drains(serving: System) -> dict[str, Any]:
    """Who drains each replica, as the controller says; nothing while it is away."""
    answer = admin(serving, "GET", "fleet")
    rows = answer.json()["replicas"] if answer.status_code == 200 else []
    return {row["replica_id"]: row["drain"] for row in rows}


def test_a_promised_request_leaves_a_replica_that_stopped(serving: System) -> None:
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
    assert answer.text.count('"text"') == PROMISED["max_tokens"], "no token comes twice"
    assert answer.headers["x-sluice-admission"] == "guaranteed"
    assert answer.headers["x-sluice-replica"] != victim
    _check_counted(serving, victim, answer.headers["x-sluice-request-id"])


def _ask(serving: System) -> httpx.Response:
    return serving.post(PROMISED)


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
    def told() -> dict[str, Any]:
        found: dict[str, Any] = serving.snapshot()["calibration"]
        return found

    wait_until(lambda: told()["promised"] == 1, "its end is known", show=told)
    assert (told()["kept"], told()["moved"], told()["moved_kept"]) == (1, 1, 1)
    assert serving.value("sluice_promises_moved_total") == 1
    assert serving.value("sluice_promises_moved_total", outcome="kept") == 1
    moved, first = _log(serving)
    assert moved["request_id"] == first["request_id"] == request_id
    assert (first["replica_id"], first["tried_again"]) == (victim, True)
    assert moved["moved_from"] == victim and victim in moved["why"]
    assert moved["ended"]["attained"] is True


def test_a_drain_ends_long_before_its_streams(serving: System) -> None:
    with streams(serving) as readers:
        drained = _busy(serving)[0]
        (other,) = set(drains(serving)) - {drained}
        here = next(
            each["running"]
            for each in serving.snapshot()["replicas"]
            if each["replica_id"] == drained
        )
        assert admin(serving, "POST", f"replicas/{drained}/drain").json()["left"] == here
        wait_until(lambda: _busy(serving) == [other], "its streams have moved")
        wait_for_tokens(readers, 10)
        told = moved_streams(serving)
        assert sum(told.values()) == here and told["transferred"] > 0, told
    why = [each["why"] for each in _log(serving) if each["moved_from"] == drained]
    assert sum("moved with its KV" in each for each in why) == here, why
    assert not admin(serving, "DELETE", f"replicas/{drained}/drain").json()["draining"]


def test_a_drained_replica_gets_nothing_until_it_is_taken_back(serving: System) -> None:
    wait_until(lambda: serving.live() == 0, "nothing is left of the test before")
    drained, other = sorted(drains(serving))
    assert admin(serving, "POST", f"replicas/{drained}/drain", "user").status_code == 401
    told = admin(serving, "POST", f"replicas/{drained}/drain").json()
    assert told["draining"] and told["left"] == 0
    assert served_by(serving, 10) == {other}

    # Neither does Serve's own choice send there while the controller is away, nor a new
    # controller, which the replica tells.
    before = serving.snapshot()["epoch"]
    ray.kill(serving.controller(drained), no_restart=False)
    assert served_by(serving, 20) == {other}
    wait_until(
        lambda: drains(serving) == {drained: "operator", other: None},
        "the new controller knows",
        show=lambda: drains(serving),
    )
    assert serving.snapshot()["epoch"] != before
    assert served_by(serving, 10) == {other}

    wanted, found = "", []

    def decided() -> bool:
        nonlocal wanted, found
        last = serving.post(BODY)
        wanted = last.headers["x-sluice-request-id"]
        found = admin(serving, "GET", f"decisions?request_id={wanted}").json()["decisions"]
        return bool(found)

    wait_until(decided, "the controller answers in time")
    assert [(each["replica_id"], each["candidates"]) for each in found] == [(other, 1)]

    # A new controller learns that it was taken back, too.
    told = admin(serving, "DELETE", f"replicas/{drained}/drain").json()
    assert (told["draining"], told["remembered"]) == (False, True)
    ray.kill(serving.controller(drained), no_restart=False)
    both = {drained: None, other: None}
    wait_until(lambda: drains(serving) == both, "it knows both", show=lambda: drains(serving))
    wait_until(lambda: drained in served_by(serving, 5), "it gets requests again")

    # With all of them drained nothing is well, and each answer says why.
    assert admin(serving, "POST", f"replicas/{drained}/drain").json()["draining"]
    refused = admin(serving, "POST", f"replicas/{other}/drain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_replica")
    assert admin(serving, "POST", f"replicas/{other}/drain?force=true").json()["draining"]
    for path, body in (("/health", None), ("/v1/completions", BODY)):

        def unserved(path: str = path, body: Any = body) -> bool:
            method = "GET" if body is None else "POST"
            answer = httpx.request(method, f"{serving.url}{path}", json=body, timeout=120)
            if answer.status_code == 200:  # the router has not heard of it yet
                return False
            assert answer.status_code == 503
            assert "drained" in answer.json()["error"]["message"]
            return True

        wait_until(unserved, f"{path} says that all are drained")
    assert httpx.get(f"{serving.url}/-/healthz", timeout=120).status_code == 200
    assert httpx.get(f"{serving.url}/v1/models", timeout=120).json()["data"]
    for name in (drained, other):
        assert not admin(serving, "DELETE", f"replicas/{name}/drain").json()["draining"]

    def well() -> bool:
        return httpx.get(f"{serving.url}/health", timeout=120).json() == {"status": "ok"}

    wait_until(well, "it is healthy again")
    values = {"SLUICE_ADMIN_KEY": KEY, "REQUEST_ID": wanted, "REPLICA": drained}
    for command in [
        line for block in marked(DOCUMENT, "run: admin") for line in block.splitlines()
    ]:
        set_ = " ".join(f"{name}={value}" for name, value in values.items())
        told = shell(f"{set_}\n{command.replace('http://127.0.0.1:8000', serving.url)}")
        assert "error" not in json.loads(told), command
    assert set(drains(serving).values()) == {None}, "drained and taken back"
    page = httpx.get(f"{serving.url}/ui", timeout=120)
    assert page.status_code == 200 and "Sluice" in page.text


def test_a_replica_that_is_stopped_gives_its_streams_away(serving: System) -> None:
    """The last test: one replica is left."""
    before = sum(moved_streams(serving).values())
    with streams(serving) as readers:
        serving.scale(1)
        wait_until(lambda: len(serving.snapshot()["replicas"]) == 1, "it has ended")
        wait_for_tokens(readers, 10)
    assert sum(moved_streams(serving).values()) > before
