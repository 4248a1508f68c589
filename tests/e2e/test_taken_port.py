"""A port of HAProxy's that another program has when Serve starts, on real Ray."""

from __future__ import annotations

import socket

import pytest
from ray import serve

from sluice.deploy.local import StartError, start_serve
from sluice.deploy.ray_settings import free_port
from tests.own_ray import own_ray

pytestmark = [pytest.mark.ray, pytest.mark.own_ray, pytest.mark.release]


def test_serve_is_started_again_while_a_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port()
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(taken))
    said: list[str] = []
    with own_ray(num_cpus=4), socket.socket() as other:
        other.bind(("", taken))
        other.listen()
        with pytest.raises(StartError, match=rf"HTTP .* cannot bind .*{taken}"):
            start_serve("127.0.0.1", free_port(), said.append)
        assert len(said) == 2

        def report(line: str) -> None:
            said.append(line)
            other.close()

        start_serve("127.0.0.1", free_port(), report)
        assert len(said) == 3 and f"{taken}" in said[-1]
        assert serve.status().proxies
        serve.shutdown()
