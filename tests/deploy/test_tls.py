from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import StartError, base_url, check
from sluice.deploy.ray_start import free_port
from sluice.router.config import RouterConfig, TlsConfig
from sluice.router.ingress.http_server import Certificate
from tests.deploy.certificate import make_certificate
from tests.router.far_side import CHAT_BODY, Edge, FarSide, hang, serve, stall
from tests.router.listening import listening

CHAT = "/v1/chat/completions"


def tls_in(folder: Path) -> TlsConfig:
    return TlsConfig(certificate=folder / "tls.crt", key=folder / "tls.key")


@asynccontextmanager
async def behind_tls(side: FarSide, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that speaks TLS."""
    _, trust = make_certificate(folder)
    edge = Edge(side, config=RouterConfig(tls=tls_in(folder)))
    async with (
        listening(edge) as system,
        httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{system.port}", verify=trust, timeout=120
        ) as client,
    ):
        yield client


async def test_a_stream_comes_token_by_token_and_ends_with_its_client(tmp_path: Path) -> None:
    side = FarSide(a=stall)
    async with behind_tls(side, tmp_path) as client:
        body = {**CHAT_BODY, "stream": True}
        async with client.stream("POST", CHAT, json=body) as response:
            # The second token never comes: whoever gathered would show nothing.
            async for text in response.aiter_text():
                assert "one" in text
                break
            assert side.live
        await side.until(lambda: not side.live)

        side.behaviours["a"] = hang
        left = asyncio.create_task(client.post(CHAT, json=body))
        await side.until(lambda: bool(side.live))
        left.cancel()
        await side.until(lambda: not side.live)

        side.behaviours["a"] = serve
        response = await client.post(CHAT, json=body)
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
async def test_neither_old_tls_nor_plain_text_gets_through(tmp_path: Path) -> None:
    async with behind_tls(FarSide(a=serve), tmp_path) as client:
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


async def test_a_renewed_certificate_is_used(tmp_path: Path) -> None:
    (new := tmp_path / "new").mkdir()
    _, trust = make_certificate(new)
    async with behind_tls(FarSide(a=serve), tmp_path) as client:
        assert (await client.get("/health")).status_code == 200
        # One file after the other: in between they do not fit.
        for name in ("tls.crt", "tls.key"):
            (new / name).replace(tmp_path / name)

        async with asyncio.timeout(60):
            while True:
                with suppress(httpx.ConnectError):  # it has another certificate
                    async with httpx.AsyncClient(verify=trust) as other:
                        url = client.base_url.join("/health")
                        assert (await other.get(url)).status_code == 200
                        break
                await asyncio.sleep(0.1)


def test_half_a_renewal_changes_nothing(tmp_path: Path) -> None:
    (new := tmp_path / "new").mkdir()
    make_certificate(tmp_path), make_certificate(new)
    used = Certificate(tls_in(tmp_path))
    (new / "tls.crt").replace(tmp_path / "tls.crt")
    used.renew()
    (tmp_path / "tls.key").unlink()
    used.renew()
    (new / "tls.key").replace(tmp_path / "tls.key")
    used.renew()
    assert used._stamp == used._stamp_now()


def refusal(tls: TlsConfig) -> str:
    """Why `sluice serve` does not start."""
    config = SluiceConfig.model_validate({"router": {"port": free_port(), "tls": tls.model_dump()}})
    assert base_url(config).startswith("https://")
    with pytest.raises(StartError) as refused:
        check(config)
    return str(refused.value)


def test_a_certificate_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    tls = tls_in(tmp_path)
    assert "missing.crt" in refusal(
        tls.model_copy(update={"certificate": tmp_path / "missing.crt"})
    )
    tls.key.write_text("no key")
    assert "tls.key" in refusal(tls)
    if os.geteuid():
        tls.key.chmod(0)
        assert "tls.key" in refusal(tls)
