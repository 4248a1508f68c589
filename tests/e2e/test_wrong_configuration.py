"""``sluice serve`` with an engine that cannot run as it is configured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.ray_settings import free_port
from tests.documents import newcomer
from tests.e2e.command import SLUICE


def test_a_replica_that_cannot_run_as_configured_is_not_started_again(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"version": 1}')
    fields = {
        "engine": {"kind": "simulated", "latency_profile": str(profile)},
        "replica": {"count": 2},
        "router": {"port": free_port()},
    }
    config = tmp_path / "sluice.yaml"
    config.write_text(yaml.safe_dump(fields))
    ended = subprocess.run(
        [SLUICE, "serve", "--config", config],
        env=newcomer(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if "timed out during startup" in ended.stderr:
        pytest.skip("Ray gives its node 30 s to start, which this machine needs longer for")
    assert ended.returncode == 1, ended.stderr
    reason = next(line for line in ended.stderr.splitlines() if line.startswith("Error: "))
    assert reason.startswith("Error: replica: "), ended.stderr
    assert "latency profile" in reason
    assert "Traceback" not in ended.stderr
