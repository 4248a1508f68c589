"""The process of the shadow policies beside a real application."""

from __future__ import annotations

import httpx
import psutil
import pytest
import ray

from tests.e2e.conftest import System, system, wait_until

pytestmark = pytest.mark.ray

KEY = "admin-key-of-the-shadow-test"
FIELDS = {
    "name": "shadowed",
    "engine": {"kind": "simulated", "model": "sim"},
    "replica": {"count": 1, "num_cpus": 0.1},
    "controller": {"shadow": {"batching": "fcfs"}},
    "router": {"replicas": 1, "admin": {"keys": [KEY]}},
}


def read(served: System) -> bool:
    """Whether the process has read what was recorded."""
    left = ray.get(served.controller().traffic.remote(), timeout=60)
    return not (left.queries or left.endings)


def test_it_reads_the_traffic_at_the_lowest_priority_and_the_page_has_its_figures() -> None:
    with system(FIELDS) as served:
        wait_until(
            lambda: "sluice_shadow_windows 0.0" in served.metrics(), "its metrics are pushed"
        )
        name = "ray::ServeReplica:shadowed:Shadow"
        found = psutil.process_iter(["cmdline"])
        (process,) = (each for each in found if name in (each.info["cmdline"] or ())[:1])
        assert process.nice() == 19
        assert served.post({"model": "sim", "prompt": "one", "max_tokens": 2}).status_code == 200
        wait_until(lambda: read(served), "what was recorded is read")
        headers = {"authorization": f"Bearer {KEY}"}
        fleet = httpx.get(f"{served.url}/admin/v1/fleet", headers=headers, timeout=60).json()
        assert fleet["controller"]["shadow"] == {
            "policies": {"batching": "fcfs"},
            "windows": 0,
            "figures": {},
        }
