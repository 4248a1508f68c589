"""The process of the shadow policies beside a real application."""

from __future__ import annotations

import httpx
import psutil
import pytest

from tests.e2e.conftest import system, wait_until

pytestmark = pytest.mark.ray

KEY = "admin-key-of-the-shadow-test"
FIELDS = {
    "name": "shadowed",
    "engine": {"kind": "simulated", "model": "sim"},
    "replica": {"count": 1, "num_cpus": 0.1},
    "controller": {"shadow": {"batching": "fcfs"}},
    "router": {"replicas": 1, "admin": {"keys": [KEY]}},
}


def test_it_runs_at_the_lowest_priority_and_the_page_has_its_figures() -> None:
    with system(FIELDS) as served:
        wait_until(
            lambda: "sluice_shadow_windows 0.0" in served.metrics(), "its metrics are pushed"
        )
        name = "ray::ServeReplica:shadowed:Shadow"  # and of the method that runs in it
        found = psutil.process_iter(["cmdline"])
        (process,) = (each for each in found if (each.info["cmdline"] or ("",))[0].startswith(name))
        assert process.nice() == 19
        headers = {"authorization": f"Bearer {KEY}"}
        fleet = httpx.get(f"{served.url}/admin/v1/fleet", headers=headers, timeout=60).json()
        assert fleet["controller"]["shadow"] == {
            "policies": {"batching": "fcfs"},
            "windows": 0,
            "figures": {},
        }
