from __future__ import annotations

import socket

import pytest

from sluice.deploy.local import StartError
from sluice.deploy.ray_start import free_port
from tests.e2e.conftest import system

pytestmark = [pytest.mark.ray, pytest.mark.release]

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
