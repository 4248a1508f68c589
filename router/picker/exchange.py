"""One external processing stream of Envoy: one HTTP request, from its headers to its response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.types import ASGIApp

from sluice.replica.streams.wire import TICKET_HEADER
from sluice.router.errors import ApiError, Reason, invalid
from sluice.router.picker.app_call import AppCall, Pick, Whole, whole_of
from sluice.router.picker.messages import (
    ENDPOINT_KEY,
    BodyMode,
    Headers,
    MalformedError,
    Part,
    Received,
    answer,
    decode,
    immediate,
    streamed,
)
from sluice.router.wire import KEY_HEADERS

REQUEST_S: Final = 60.0
"""Longest wait for the next message of a request that is not complete, seconds."""

LINGER_S: Final = 600.0
"""Longest wait for the end of Envoy's stream after the end of the call, seconds: Envoy may hold the
end of a response for a slow client."""

SECRETS: Final = ("authorization", *KEY_HEADERS)
"""Headers that endpoints do not get: the router has checked them."""

_MODES: Final = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED)

Read = Callable[[], Awaitable[bytes | None]]
"""The next message of Envoy; ``None``: it sends no more."""

Write = Callable[[bytes], Awaitable[None]]


class BrokenError(Exception):
    """The response broke after the client had received some of it: Envoy must reset it."""


class Exchange:
    """Answers one stream of messages.

    Args:
        app: the router's application.
        calls: holds the call while the application runs it, which may be longer than this stream.
        read: Envoy's messages.
        write: sends an answer.
    """

    def __init__(
        self, app: ASGIApp, calls: set[asyncio.Task[None]], read: Read, write: Write
    ) -> None:
        self._app = app
        self._calls = calls
        self._read = read
        self._send = write
        self._writing = asyncio.Lock()
        # The endpoint picker protocol demands this mode of both.
        self._mode = self._response_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._subset: frozenset[str] | None = None
        self._has_body = self._has_trailers = False
        self._pick: Pick | None = None
        self._responded = False

    async def run(self) -> None:
        """Return when Envoy has ended the stream, or has an answer in place of the endpoint's.

        Raises:
            MalformedError: Envoy sent something else than the protocol has.
            TimeoutError: it did not complete a request.
            BrokenError: see there.
        """
        async with asyncio.timeout(REQUEST_S):
            first = await self._next()
        if first is None:
            return
        if first.part is not Part.REQUEST_HEADERS:
            raise MalformedError(f"a stream must begin with request_headers, not {first.part}")
        self._has_body = not first.ends
        if first.modes is not None:
            self._mode, self._response_mode = first.modes
        if self._has_body and self._mode not in _MODES:
            await self._write(immediate(*_mode_refused(self._mode)))
            return
        self._subset = first.subset
        try:
            call = AppCall(self._app, first.headers, first.subset)
        except MalformedError as error:
            await self._write(immediate(*whole_of(invalid(str(error)))))
            return
        self._calls.add(call.task)
        call.task.add_done_callback(self._calls.discard)
        parts = asyncio.create_task(self._follow(call))
        try:
            if await self._decide(call, first, parts):
                await asyncio.wait((parts, call.task), return_when=asyncio.FIRST_COMPLETED)
                if call.broken:
                    raise BrokenError
                await asyncio.wait((parts,), timeout=LINGER_S)
                if parts.done():
                    parts.result()
        finally:
            parts.cancel()
            # Once the endpoint has answered, it knows better than Envoy's stream whether the
            # client has all of it.
            if self._pick is None or not self._responded:
                call.leave()

    async def _decide(self, call: AppCall, first: Received, parts: asyncio.Task[None]) -> bool:
        """Answer the request. Returns whether an endpoint was chosen."""
        buffered = self._has_body and self._mode is BodyMode.BUFFERED
        if buffered:
            await self._write(answer(Part.REQUEST_HEADERS))
        if first.ends:
            await call.feed(b"", True)
        await asyncio.wait((call.outcome, parts), return_when=asyncio.FIRST_COMPLETED)
        if not call.outcome.done():
            parts.result()
            return False  # the client has left
        outcome = call.outcome.result()
        if outcome is None:
            await asyncio.wait((parts,), timeout=LINGER_S)
            return False
        if isinstance(outcome, Pick) and self._subset is not None:
            # The replica that was chosen may have gone, and Serve have taken another.
            names = {outcome.endpoint, outcome.endpoint.rpartition(":")[0]}
            outcome = outcome if names & self._subset else _outside(outcome)
        if isinstance(outcome, Whole):
            await self._write(immediate(*outcome))
            return False
        self._pick = outcome
        set_headers = [
            (ENDPOINT_KEY.encode(), outcome.endpoint.encode()),
            (TICKET_HEADER.encode(), outcome.ticket.encode()),
        ]
        if buffered:
            set_headers.append((b"content-length", b"0"))
            rest = (set_headers, SECRETS, outcome.endpoint)
            await self._write(answer(Part.REQUEST_BODY, *rest, clears=True))
            return True
        await self._write(answer(Part.REQUEST_HEADERS, set_headers, SECRETS, outcome.endpoint))
        # The replica has the body already.
        if self._has_body:
            for message in streamed(Part.REQUEST_BODY, b"", not self._has_trailers):
                await self._write(message)
        if self._has_trailers:
            await self._write(answer(Part.REQUEST_TRAILERS))
        return True

    async def _follow(self, call: AppCall) -> None:
        """Take Envoy's messages after the first, until it sends no more."""
        complete = not self._has_body
        while True:
            if not complete:
                await call.wanted()
            async with asyncio.timeout(None if complete else REQUEST_S):
                received = await self._next()
            if received is None:
                return
            if received.part in (Part.REQUEST_BODY, Part.REQUEST_TRAILERS):
                if complete and received.part is Part.REQUEST_BODY:
                    raise MalformedError("a request continues after its end")
                self._has_trailers = received.part is Part.REQUEST_TRAILERS
                ends = received.ends or self._mode is BodyMode.BUFFERED
                if not complete:
                    await call.feed(received.body, ends)
                    complete = ends
                elif self._mode is BodyMode.BUFFERED:
                    await self._write(answer(Part.REQUEST_TRAILERS))
                continue
            if self._pick is None:  # Envoy answers by itself: a timeout, say
                call.leave()
            await self._respond(received)

    async def _respond(self, received: Received) -> None:
        """Answer a part of the response."""
        headers: Headers = ()
        if received.part is Part.RESPONSE_HEADERS:
            self._responded = True
            status = next((value for name, value in received.headers if name == b":status"), b"")
            if self._pick is not None and status == b"200":
                headers = self._pick.headers
        echoes = self._response_mode is BodyMode.FULL_DUPLEX_STREAMED
        if received.part is Part.RESPONSE_BODY and echoes:
            for message in streamed(Part.RESPONSE_BODY, received.body, received.ends):
                await self._write(message)
            return
        await self._write(answer(received.part, headers))

    async def _next(self) -> Received | None:
        data = await self._read()
        return None if data is None else decode(data)

    async def _write(self, message: bytes) -> None:
        async with self._writing:
            await self._send(message)


def _mode_refused(mode: BodyMode) -> Whole:
    text = (
        f"Envoy's external processing has request_body_mode {mode.name}; the endpoint picker needs "
        "FULL_DUPLEX_STREAMED or BUFFERED."
    )
    return whole_of(ApiError(Reason.INTERNAL, text))


def _outside(pick: Pick) -> Whole:
    return whole_of(
        ApiError(
            Reason.NO_REPLICA,
            f"The gateway's subset of endpoints does not include {pick.endpoint}, the replica that "
            "was chosen.",
        )
    )
