"""A router that listens on a port of this machine, for clients that speak real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from sluice.router.ingress.http_server import IDLE_S, HttpServer, bound
from tests.router.far_side import Edge


class Listening(NamedTuple):
    server: HttpServer
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def listening(
    edge: Edge, host: str = "127.0.0.1", idle_s: float = IDLE_S
) -> AsyncIterator[Listening]:
    """``edge`` behind the server of a router, on a free port."""
    listener = bound(host, 0)
    port = listener.getsockname()[1]
    server = HttpServer(edge.api, edge.config, idle_s)
    await server.start(listener)
    try:
        yield Listening(server, port)
    finally:
        await server.stop(limit_s=2)
