"""Frames over a TCP connection: four bytes of length, then that number of bytes."""

from __future__ import annotations

import asyncio
from typing import Final, cast

from sluice.controller.transport.dead_hosts import notice_dead_host

_LENGTH: Final = 4


class Frames(asyncio.Protocol):
    """Splits received bytes into frames.

    Args:
        limit: max frame length, bytes; a longer frame closes the connection.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        # No type check: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        notice_dead_host(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Handle the complete frames. ``O(bytes)``, for any split of the input."""
        got: bytes | bytearray = data
        if self._rest:
            self._rest += data
            got = self._rest
        start, end = 0, len(got)
        while end - start >= _LENGTH and not self.closed:
            size = int.from_bytes(got[start : start + _LENGTH], "big")
            if size > self.limit:
                self.abort()
                return
            stop = start + _LENGTH + size
            if stop > end:
                break
            self.frame_received(got[start + _LENGTH : stop])
            start = stop
        if got is self._rest:
            del self._rest[:start]
        elif start < end:
            self._rest += got[start:]

    def connection_lost(self, _error: Exception | None) -> None:
        """The connection ended."""
        self.closed = True
        self._rest.clear()

    def frame_received(self, frame: bytes | bytearray) -> None:
        """Handle one frame."""
        raise NotImplementedError

    def send(self, frame: bytes) -> None:
        """Write one frame; does nothing on a closed connection."""
        if self._transport is not None and not self.closed and not self._transport.is_closing():
            self._transport.write(len(frame).to_bytes(_LENGTH, "big") + frame)

    def close(self) -> None:
        """Close the connection after all sent data has left. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once. Idempotent."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
