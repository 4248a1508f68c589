"""An engine that cannot run as it is configured, on real Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.deploy.local import StartError
from tests.e2e.conftest import system

pytestmark = [pytest.mark.ray, pytest.mark.release]


def test_a_replica_that_cannot_run_as_configured_is_not_started_again(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"version": 1}')
    fields = {
        "engine": {"kind": "simulated", "latency_profile": str(profile)},
        "replica": {"count": 2},
    }
    # After three tries it would be Serve's message about the deployment.
    with pytest.raises(StartError, match=r"^replica: .*latency profile") as refused, system(fields):
        pass
    assert "Traceback" not in str(refused.value)
