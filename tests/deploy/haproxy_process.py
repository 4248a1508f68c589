"""A real HAProxy in front of what tests serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx

START_S = 20.0


@asynccontextmanager
async def answering(
    client: httpx.AsyncClient, *command: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """HAProxy, started by ``command``, for the block, which begins once it answers ``client``."""
    proxy = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        async with asyncio.timeout(START_S):
            while True:
                assert proxy.returncode is None, "HAProxy has ended"
                try:
                    await client.get("/health")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
        yield
    finally:
        proxy.terminate()
        await proxy.wait()
