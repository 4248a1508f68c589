"""A router that listens on a port of this machine, for clients that speak real HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.router.request.http_head import use_strict_heads
from tests.router.far_side import Edge


class Listening(NamedTuple):
    server: uvicorn.Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _below(api: ASGIApp, prefix: str) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not scope["path"].startswith(prefix):
                await Response(status_code=404)(scope, receive, send)
                return
            scope = {**scope, "path": scope["path"].removeprefix(prefix)}
        await api(scope, receive, send)

    return app


@asynccontextmanager
async def listening(
    edge: Edge, host: str = "127.0.0.1", prefix: str = "", **settings: Any
) -> AsyncIterator[Listening]:
    """``edge`` behind uvicorn as Serve starts it for routers, with these settings, on a free port;
    who connects early waits. It has nothing but below ``prefix``, as where Serve puts it there."""
    use_strict_heads()
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen(128)
        config = uvicorn.Config(_below(edge.api, prefix), **{"log_level": "error", **settings})
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield Listening(server, listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task
