"""A router that listens on a port of this machine, for clients that speak real HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn

from router.http_head import use_strict_heads
from tests.router.far_side import Edge


class Listening(NamedTuple):
    server: uvicorn.Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def listening(
    edge: Edge, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[Listening]:
    """``edge`` behind uvicorn as Serve starts it for routers, with these settings, on a free port;
    who connects early waits."""
    use_strict_heads()
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen(128)
        config = uvicorn.Config(edge.api, **{"log_level": "error", **settings})
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield Listening(server, listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task
