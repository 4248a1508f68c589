from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.conftest import ASKING, LENIENT, System, system, wait_until

pytestmark = pytest.mark.ray

# A prompt takes about 0.1 s, and a request with its 40 tokens about 0.3 s of a replica.
_BODY = {"model": "sim", "prompt": "word " * 100, "max_tokens": 40}
_OBJECTIVE = {"slo": {"ttft_ms": 3000, "tpot_ms": 200}}
_FIELDS = {
    "controller": LENIENT,
    "router": {
        **ASKING,
        "classes": {
            "standard": {},
            "strict": {"ttft_ms": 500, "when_unattainable": "reject"},
        },
    },
    "engine": {
        "kind": "simulated",
        "model": "sim",
        "simulated": {"step_s": 0.002, "token_s": 0.001, "context_token_s": 0.0},
    },
    "replica": {
        "num_cpus": 0.1,
        "drain_timeout_s": 30,
        "autoscaling": {
            "min_replicas": 0,
            "max_replicas": 2,
            "zero_after_s": 8,
            "policy_options": {"smoothing_s": 0.5, "startup_s": 2.0, "down_after_s": 2.0},
        },
    },
}


PATIENCE_S = 240.0


class Clients:
    """Clients that ask again and again, one request at a time."""

    def __init__(self, url: str) -> None:
        self.answered = 0
        self.failed: list[tuple[int, str]] = []
        """Status and body of every answer that is not a whole one."""
        self._url = f"{url}/v1/completions"
        self._lock = threading.Lock()

    @contextmanager
    def asking(self, count: int, pause_s: float = 0.0) -> Iterator[None]:
        stop = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(stop, pause_s)) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _ask(self, stop: threading.Event, pause_s: float) -> None:
        with httpx.Client(timeout=120) as client:
            while not stop.is_set():
                answer = client.post(self._url, json={**_BODY, **_OBJECTIVE})
                told = answer.json()
                if told.get("error", {}).get("code") == "router_overloaded":
                    # The machine is busy with other things: the client comes again, as told.
                    stop.wait(float(answer.headers["retry-after"]))
                    continue
                whole = told.get("usage", {}).get("completion_tokens") == 40
                with self._lock:
                    self.answered += whole
                    if not whole:
                        self.failed.append((answer.status_code, answer.text))
                stop.wait(pause_s)


def _wait_for(running: System, count: int, what: str) -> None:
    def reached() -> bool:
        replicas = running.snapshot()["replicas"]
        return sum(replica["condition"] == "fresh" for replica in replicas) == count

    wait_until(reached, what, PATIENCE_S, every_s=0.5)


def _ask(running: System, name: str, **slo: float) -> httpx.Response:
    body = {**_BODY, "slo": {"class": name, **slo}}
    return running.post(body)


def test_load_brings_replicas_and_silence_takes_them_without_a_failed_request() -> None:
    with system(_FIELDS) as running:
        # It begins with none, and says that it takes requests.
        assert running.snapshot()["replicas"] == []
        assert httpx.get(f"{running.url}/health", timeout=60).json() == {"status": "ok"}
        clients = Clients(running.url)
        with clients.asking(1):
            _wait_for(running, 1, "a request brings the first")
        with clients.asking(8):
            _wait_for(running, 2, "load brings replicas")
        # Little enough for one replica on a busy machine, too, but there are requests all the time.
        with clients.asking(1, pause_s=1.0):
            _wait_for(running, 1, "silence takes them")
        assert clients.answered and not clients.failed
        wait_until(
            lambda: not running.snapshot()["replicas"], "the last one goes", PATIENCE_S, every_s=0.5
        )
        started = running.value("sluice_cold_starts_total")
        listed = httpx.get(f"{running.url}/v1/models", timeout=60).json()["data"]
        assert [entry["id"] for entry in listed] == ["sim"]
        # Neither question has started one; a request does, also one that cannot wait for it.
        assert running.snapshot()["replicas"] == []
        refused = _ask(running, "strict")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "slo_unattainable")
        assert "predicted to serve in" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        patient = _ask(running, "strict", ttft_ms=1000 * PATIENCE_S)
        assert patient.json()["usage"]["completion_tokens"] == 40
        assert patient.headers["x-sluice-admission"] == "guaranteed"
        assert float(patient.headers["x-sluice-predicted-ttft-ms"]) > 100
        wait_until(
            lambda: running.value("sluice_cold_starts_total") == started + 1,
            "the start is counted",
            every_s=0.5,
        )
        assert running.value("sluice_startup_seconds") > 0
