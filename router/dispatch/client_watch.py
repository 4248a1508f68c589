"""Watches the client of a response: it may leave, or stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from math import inf
from types import TracebackType
from typing import Final

from starlette.types import Message, Receive, Send

from sluice.router.wire import STOP_MESSAGE

_RESOLUTION_S: Final = 1e-3


class DisconnectGuard:
    """Cancels the block inside it when the client leaves or the router stops, and then ends it
    without an exception.

    An ASGI server does not cancel a handler whose client left. The guard covers every phase,
    including the wait for the first token. ``receive`` must belong to a request whose body was
    read.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.disconnected = False
        self.stopped = False
        """The router stops, and its server has given up waiting for this answer."""

    async def __aenter__(self) -> DisconnectGuard:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._watch.cancel()
        if not (self.disconnected or self.stopped):
            return False
        ours_alone = self._task.uncancel() <= self._cancelling
        return ours_alone and kind is asyncio.CancelledError

    async def _wait(self) -> None:
        while (kind := (await self._receive())["type"]) not in ("http.disconnect", STOP_MESSAGE):
            pass
        self.stopped = kind == STOP_MESSAGE
        self.disconnected = not self.stopped
        self._task.cancel()


class StalledReaderError(OSError):
    """The client has read nothing for too long."""


class TimeoutSend:
    """Forwards the messages of one response within the block, and drops a client that reads
    nothing.

    The server blocks the sending task once its buffers are full. One timer watches the whole
    response: a timer per message would cost more than the sending.

    Args:
        send: of the server.
        limit_s: longest wait for the client to accept a message, seconds.
    """

    def __init__(self, send: Send, limit_s: float) -> None:
        self._send = send
        self._limit_s = limit_s
        self._due_s = inf
        self._gave_up = False

    def __enter__(self) -> TimeoutSend:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    async def __call__(self, message: Message) -> None:
        """Forward a message.

        Raises:
            StalledReaderError: the client does not read it.
        """
        await self.wait(self._send(message))

    async def wait(self, sent: Awaitable[None]) -> None:
        """Wait until something is sent to the client, in whatever way.

        Raises:
            StalledReaderError: the client does not read it.
        """
        self._due_s = self._loop.time() + self._limit_s
        try:
            await sent
        except asyncio.CancelledError:
            # If the task was also cancelled for another reason, it ends as cancelled.
            if self._gave_up and self._task.uncancel() == 0:
                raise StalledReaderError("the client reads nothing") from None
            raise
        finally:
            self._due_s = inf

    def _look(self) -> None:
        """Drop the client, or check again at the next possible deadline."""
        now_s = self._loop.time()
        if self._due_s - now_s < _RESOLUTION_S:
            self._gave_up = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(min(self._due_s, now_s + self._limit_s), self._look)
