from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from ray.serve.api import RunTarget, run_many

from sluice.deploy.app import build
from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import StartError, base_url, start_serve
from sluice.deploy.ray_start import free_port
from tests.e2e.conftest import system, wait_until
from tests.own_ray import shared_ray

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


def test_clients_of_a_model_that_serve_has_given_up_are_not_told_to_wait(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"version": 1}')
    config = SluiceConfig.model_validate(
        {
            "engine": {"kind": "simulated", "model": "sim", "latency_profile": str(profile)},
            "router": {"port": free_port()},
        }
    )
    shared_ray.start()
    try:
        start_serve()
        target = RunTarget(build(config), name=config.name, route_prefix=None)
        run_many([target], wait_for_applications_running=False)
        body = {"model": "sim", "prompt": "word", "max_tokens": 1}
        code = ""

        def given_up() -> bool:
            nonlocal code
            with suppress(httpx.TransportError):
                answer = httpx.post(f"{base_url(config)}/v1/completions", json=body, timeout=30)
                code = answer.json()["error"]["code"]
                assert answer.status_code == 503 and code in ("model_starting", "no_replica")
            return code == "no_replica"

        wait_until(given_up, "no start is predicted", 240, lambda: code)
    finally:
        shared_ray.clear()


FIELDS = {"engine": {"kind": "simulated", "model": "sim"}, "replica": {"count": 1}}


@pytest.mark.parametrize("shares", [False, True])
def test_routers_do_not_share_the_port_of_another_program(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = free_port()
    monkeypatch.setattr("tests.e2e.conftest.free_port", lambda: taken)
    with socket.socket() as other:
        if shares:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", taken))
        other.listen()
        with pytest.raises(StartError, match="cannot listen on"), system(FIELDS):
            pytest.fail("it started")
