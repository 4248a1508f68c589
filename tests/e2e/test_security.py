"""TLS, keys that change and rate limits over two routers, on real Ray Serve behind its proxy."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
import ray

from sluice.controller.messages import QuotaUse
from tests.e2e.conftest import system, wait_until

pytestmark = pytest.mark.ray

BODY = {"model": "sim", "prompt": "Hello.", "max_tokens": 3, "stream": True}
PER_MINUTE, BURST_S = 0.1, 3_600  # six at once, and no more for as long as the test runs
FIXED = "a-key-in-the-configuration"


def entry(key: str, name: str, more: str = "") -> str:
    return f"- {{sha256: {hashlib.sha256(key.encode()).hexdigest()}, name: {name}{more}}}\n"


def test_the_edge_of_a_real_application(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    limits = f", requests_per_minute: {PER_MINUTE}, burst_s: {BURST_S}"
    path.write_text(entry("limited", "acme", limits) + entry("old-key", "other"))
    fields = {
        "name": "security",
        "engine": {"kind": "simulated", "model": "sim"},
        "replica": {"count": 1},
        "router": {"replicas": 2, "api_keys": [FIXED], "api_keys_file": str(path)},
    }

    def ask(key: str) -> httpx.Response:
        # A connection of its own, so that either router may get it.
        url, headers = f"{tls.url}/v1/completions", {"authorization": f"Bearer {key}"}
        answers: list[httpx.Response] = []

        def answered() -> bool:
            # The HAProxy before the one that knows the routers may still take connections.
            answers.append(
                httpx.post(url, json=BODY, headers=headers, verify=tls.trust, timeout=120)
            )
            return answers[-1].status_code != 503 or "no_router" not in answers[-1].text

        wait_until(answered, "a router answers", show=lambda: answers[-1].text)
        return answers[-1]

    with system(fields) as serving:
        tls = serving.tls
        assert tls is not None
        answer = ask(FIXED)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        assert ask("unknown").status_code == 401

        # The limit holds over both routers, once they know of each other's use.
        statuses: list[int] = []

        def refused_by_both() -> bool:
            statuses.append(ask("limited").status_code)
            return statuses[-12:] == [429] * 12

        wait_until(refused_by_both, "both routers refuse", show=lambda: statuses)
        admitted = statuses.count(200)
        assert set(statuses) == {200, 429}
        assert 6 <= admitted <= 2 * 6

        def known() -> float:
            use = QuotaUse("requests/name-acme", 0, 0, PER_MINUTE / 60)
            (level,) = ray.get(serving.controller().share_quotas.remote([use]), timeout=120)
            return float(level)

        wait_until(
            lambda: admitted - 1 < known() <= admitted, "the controller knows of all", show=known
        )

        # A key is changed without a restart, and the one in the configuration stays.
        path.write_text(entry("new-key", "other"))
        codes: list[int] = []

        def changed_in_both() -> bool:
            codes.append(ask("old-key").status_code)
            return codes[-12:] == [401] * 12

        wait_until(changed_in_both, "both routers have read the file again", show=lambda: codes)
        assert {ask("new-key").status_code for _ in range(6)} == {200}
        assert ask(FIXED).status_code == 200
