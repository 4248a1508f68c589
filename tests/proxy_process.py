"""A real proxy in front of what tests serve, such as Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

START_S = 20.0


@asynccontextmanager
async def answering(
    client: httpx.AsyncClient,
    *command: str | Path,
    environment: Mapping[str, str] | None = None,
    start_s: float = START_S,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The proxy that ``command`` starts, for the block, which begins once it answers ``client``."""
    proxy = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        async with asyncio.timeout(start_s):
            while True:
                assert proxy.returncode is None, "the proxy has ended"
                try:
                    await client.get("/health")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
        yield proxy
    finally:
        if proxy.returncode is None:
            proxy.terminate()
        await proxy.wait()
