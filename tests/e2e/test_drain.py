"""An operator drains a replica of a running application."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import ray

from tests.documents import ROOT, marked, shell
from tests.e2e.conftest import PATIENT, System, system, wait_until

pytestmark = pytest.mark.ray

KEY = "admin-key-of-the-drain-test"
DOCUMENT = ROOT / "docs" / "page.md"
BODY = {"model": "sim", "prompt": "one", "max_tokens": 2}


def admin(serving: System, method: str, path: str, key: str = KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, f"{serving.url}/admin/v1/{path}", headers=headers, timeout=120)


def served_by(serving: System, count: int) -> set[str]:
    """The replicas of so many requests, one after the other."""
    answers = [
        httpx.post(f"{serving.url}/v1/completions", json=BODY, timeout=120) for _ in range(count)
    ]
    assert {answer.status_code for answer in answers} == {200}
    return {answer.headers["x-sluice-replica"] for answer in answers}


def drains(serving: System) -> dict[str, Any]:
    """Who drains each replica, as the controller says; nothing while it is away."""
    answer = admin(serving, "GET", "fleet")
    rows = answer.json()["replicas"] if answer.status_code == 200 else []
    return {row["replica_id"]: row["drain"] for row in rows}


def test_a_drained_replica_gets_nothing_until_it_is_taken_back() -> None:
    fields = {
        "name": "drain",
        "controller": PATIENT,
        "engine": {"kind": "simulated", "model": "sim"},
        "replica": {"count": 2, "num_cpus": 0.1},
        "router": {"admin": {"keys": [KEY]}},
    }
    with system(fields) as serving:
        wait_until(lambda: len(drains(serving)) == 2, "both replicas have reported")
        drained, other = sorted(drains(serving))
        assert admin(serving, "POST", f"replicas/{drained}/drain", "user").status_code == 401
        told = admin(serving, "POST", f"replicas/{drained}/drain").json()
        assert told["draining"] and told["left"] == 0
        assert served_by(serving, 10) == {other}

        # Neither does Serve's own choice send there while the controller is away, nor a new
        # controller, which the replica tells.
        before = serving.snapshot()["epoch"]
        ray.kill(serving.controller(), no_restart=False)
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
            last = httpx.post(f"{serving.url}/v1/completions", json=BODY, timeout=120)
            wanted = last.headers["x-sluice-request-id"]
            found = admin(serving, "GET", f"decisions?request_id={wanted}").json()["decisions"]
            return bool(found)

        wait_until(decided, "the controller answers in time")
        assert [(each["replica_id"], each["candidates"]) for each in found] == [(other, 1)]

        assert not admin(serving, "DELETE", f"replicas/{drained}/drain").json()["draining"]
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
