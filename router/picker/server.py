"""The endpoint picker's gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from starlette.types import ASGIApp

from sluice.router.errors import ApiError
from sluice.router.picker.exchange import BrokenError, Exchange
from sluice.router.picker.messages import MalformedError

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH: Final = "grpc.health.v1.Health"

MORE_STREAMS: Final = 256
"""Streams in addition to the requests that a router may have in flight: it refuses those itself."""

DRAIN_S: Final = 300.0
"""Longest wait for open streams when the server stops, seconds. Serve may end the router before."""

_KEEPALIVE: Final = (
    # A host that vanished is noticed within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_ROOM: Final = 1 << 20  # of a message, for what is not its body

_LIVENESS: Final = b"\n\x08liveness"  # HealthCheckRequest, and then its responses
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"

_log = logging.getLogger(__name__)


class PickerServer:
    """Listens for Envoy's external processing streams, and runs their requests in an application.

    Args:
        app: the router's application.
        healthy: raises :class:`ApiError` if no replica takes requests.
        max_body_bytes: of a request.
        max_in_flight: requests that the application takes.
    """

    def __init__(
        self,
        app: ASGIApp,
        healthy: Callable[[], Awaitable[Any]],
        max_body_bytes: int,
        max_in_flight: int,
    ) -> None:
        self._app = app
        self._healthy = healthy
        self._max_message_bytes = max_body_bytes + _ROOM
        self._max_streams = max_in_flight + MORE_STREAMS
        self._calls: set[asyncio.Task[None]] = set()
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chooses if it is 0. Routers of one node share
        a port.

        Raises:
            OSError: the port cannot be used.
        """
        self._server = server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", self._max_message_bytes),
                *_KEEPALIVE,
            ),
            maximum_concurrent_rpcs=self._max_streams,
        )
        # Without deserializers handlers get bytes, and what is malformed gets an answer of ours.
        process = grpc.stream_stream_rpc_method_handler(self._process)
        check = grpc.unary_unary_rpc_method_handler(self._check)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
            )
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = int(server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"the endpoint picker cannot listen on {address}: {error}") from None
        await server.start()
        return bound

    async def stop(self) -> None:
        """Take no new streams, and wait for the open ones. Idempotent."""
        if self._server is not None:
            await self._server.stop(DRAIN_S)
        if self._calls:
            await asyncio.wait(tuple(self._calls), timeout=DRAIN_S)

    async def _process(self, _: AsyncIterator[bytes], context: Any) -> None:
        """One stream."""

        async def read() -> bytes | None:
            data = await context.read()
            return None if data is grpc.aio.EOF else data

        try:
            await Exchange(self._app, self._calls, read, context.write).run()
        except MalformedError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request is not complete")
        except BrokenError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the response broke off")
        except grpc.aio.UsageError:
            _log.debug("Envoy ended a stream before its answer")

    async def _check(self, request: bytes, _: Any) -> bytes:
        """Whether the process lives, or else whether there are replicas for requests."""
        try:
            if request != _LIVENESS:
                await self._healthy()
        except ApiError:
            return _NOT_SERVING
        return _SERVING
