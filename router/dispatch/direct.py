"""Streams that flow from a replica to the client without passing through this process.

HAProxy forwards the request to a router, and states that it can fetch a stream by itself
(:data:`EDGE_HEADER`), as the endpoint picker (:mod:`sluice.router.picker`) does for Envoy. The head
of the router's answer then names the stream's address (:data:`STREAM_HEADER`). Its body is empty
and ends with the stream: if the client leaves, HAProxy closes that connection, and the call ends as
usual. The replica reports to the router what it has sent. If the stream breaks, or cannot be
fetched, HAProxy reports what the client has (:data:`BROKEN_PATH`). The answer to that report is the
rest of the stream: it comes from another replica and passes through this process. Envoy reports
nothing, so its streams are not resumed.
``deploy/direct/relay.lua`` is the other side.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sluice.replica.streams.wire import TICKET_HEADER
from sluice.router.dispatch.attempt import Attempt
from sluice.router.errors import ApiError, Reason
from sluice.router.serve.contract import ReaderLostError

EDGE_HEADER: Final = "x-sluice-edge"
"""Request: :data:`HAPROXY` or :data:`PICKER` if the sender can fetch a stream. Clients cannot send
it through HAProxy or Envoy; a client that sends it to a router can only fetch its own stream."""

HAPROXY: Final = "direct"
PICKER: Final = "picker"

STREAM_HEADER: Final = "x-sluice-stream"
"""Response: ``HOST:PORT TICKET`` of a stream to fetch."""

BYTES_HEADER: Final = "x-sluice-bytes"
CREATED_HEADER: Final = "x-sluice-created"

REPORT_S: Final = 10.0
"""Timeout for HAProxy's report on a broken stream, seconds."""

UNFETCHED_S: Final = 60.0
"""How long streams of a replica go through this process after one could not be fetched, seconds."""

MAX_REPORT_BYTES: Final = 8 << 20
"""Maximum size of a report: a stream of 131,072 tokens in chunks of one takes a fifth of it."""

_CHUNK = re.compile(rb"(\d{1,9})((?:,\d{1,10})*);")
_CREATED = re.compile(r'"created": ?\d{1,20}')


class NotReportedError(Exception):
    """HAProxy has not reported a broken stream: it has no reader any more."""


class Got(NamedTuple):
    """The part of a stream that a client has received.

    Attributes:
        counts: the output tokens of each chunk.
        token_ids: of all chunks, as far as the replica reports them.
        sent_bytes: bytes of all chunks.
        created: the date in them, as :class:`~sluice.router.dispatch.transcript.Transcript` finds
            it.
    """

    counts: tuple[int, ...]
    token_ids: tuple[int, ...]
    sent_bytes: int
    created: bytes


class DirectAnswer:
    """A stream that HAProxy or Envoy fetches, and its rest if it breaks.

    Args:
        answers: of this process.
        patience_s: how long its client may read nothing, seconds.
        reported: the sender reports a break, so another replica may resume the stream.
    """

    def __init__(self, answers: DirectAnswers, patience_s: float, reported: bool = True) -> None:
        self._answers = answers
        self._patience_s = patience_s
        self.reported = reported
        self._name = self._ticket = ""
        self._attempt: Attempt | None = None
        self._got: asyncio.Future[Got] | None = None
        self._over: asyncio.Future[None] | None = None
        self._send: Send | None = None
        self.claimed = False
        """HAProxy has begun to report that the stream broke."""
        self.is_broken = False
        """HAProxy has reported that the stream broke."""
        self.tokens = 0
        """Output tokens that the client has of a stream that broke."""

    def patience_s(self, replica_id: str | None) -> float | None:
        """How long the client may read nothing, seconds; ``None`` if streams of this replica cannot
        be fetched, as far as is known."""
        return self._patience_s if self._answers.possible(replica_id) else None

    def began(self, attempt: Attempt) -> None:
        """HAProxy receives the address of the stream of an attempt."""
        loop = asyncio.get_running_loop()
        self._ticket = attempt.head.fetch.rpartition(" ")[2]
        self._name = self._ticket.partition(".")[0]
        self._attempt = attempt
        self._got, self._over = loop.create_future(), loop.create_future()
        self._answers.expect(self._name, self)

    async def broken(self) -> Got:
        """The part of the broken stream that the client has.

        Raises:
            NotReportedError: HAProxy does not report it in time.
        """
        assert self._got is not None and self._attempt is not None
        try:
            async with asyncio.timeout(REPORT_S):
                got = await asyncio.shield(self._got)
        except TimeoutError:
            raise NotReportedError from None
        self.is_broken, self.tokens = True, sum(got.counts)
        if not got.counts:
            self._answers.unfetched(self._attempt.head.replica_id)
        return got

    async def send(self, data: bytes) -> None:
        """Forward more of the rest of a broken stream."""
        assert self._send is not None
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, last: bytes) -> None:
        """Send ``last`` and end the stream; ``last`` is empty unless the stream failed."""
        if self._send is not None:
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def close(self) -> None:
        """The stream is over. Idempotent."""
        self._answers.forget(self._name)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def opens(self, ticket: str) -> bool:
        """Whether ``ticket`` is that of this stream, and no report of a break has used it yet."""
        same = hmac.compare_digest(self._ticket.encode(), ticket.encode())
        return same and not self.claimed

    async def report(self, got: Got, send: Send) -> None:
        """HAProxy reports a break, and receives the rest by ``send``. Returns when that is sent."""
        assert self._got is not None and self._over is not None and self._attempt is not None
        self._send = send
        headers = [(b"transfer-encoding", b"chunked")]  # so that a truncated rest is detected
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._got.set_result(got)
        # If the attempt has not failed, the connection between HAProxy and the replica has.
        self._attempt.give_up(ReaderLostError())
        await asyncio.shield(self._over)


class DirectAnswers:
    """The direct answers of a router's process, by the names of their tickets.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[str, DirectAnswer] = {}
        self._unfetched: dict[str, float] = {}

    def possible(self, replica_id: str | None) -> bool:
        """Whether streams of a replica can be fetched, as far as is known."""
        if replica_id is None or replica_id not in self._unfetched:
            return True
        if self._clock() < self._unfetched[replica_id]:
            return False
        del self._unfetched[replica_id]
        return True

    def unfetched(self, replica_id: str) -> None:
        """A stream of this replica could not be fetched."""
        now_s = self._clock()
        kept = {name: until_s for name, until_s in self._unfetched.items() if now_s < until_s}
        self._unfetched = {**kept, replica_id: now_s + UNFETCHED_S}

    def expect(self, name: str, answer: DirectAnswer) -> None:
        """HAProxy has the ticket of this name."""
        self._answers[name] = answer

    def forget(self, name: str) -> None:
        """The ticket is void. Unknown ones are ignored."""
        self._answers.pop(name, None)

    async def broken(self, request: Request) -> Response:
        """HAProxy reports a break.

        Raises:
            ApiError: 404, the ticket is unknown. 400, the report is malformed. 413, it is too long.
        """
        ticket = request.headers.get(TICKET_HEADER, "")
        name = ticket.partition(".")[0]
        if name not in self._answers or not self._answers[name].opens(ticket):
            raise ApiError(Reason.NOT_FOUND, "There is no such stream.")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_REPORT_BYTES:
                raise ApiError(Reason.TOO_LARGE, "The report is too long.")
        got = parse_report(bytes(body), request.headers)
        # It may be over by now.
        answer = self._answers.get(name)
        if answer is None or not answer.opens(ticket):
            raise ApiError(Reason.NOT_FOUND, "There is no such stream.")
        answer.claimed = True
        return _Rest(answer, got)


class _Rest(Response):
    """The rest of a stream that broke."""

    def __init__(self, answer: DirectAnswer, got: Got) -> None:
        self._answer = answer
        self._got = got
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        await self._answer.report(self._got, send)


def parse_report(body: bytes, headers: Mapping[str, str]) -> Got:
    """Parse a report of a break.

    Raises:
        ApiError: 400, it is malformed.
    """
    sent_bytes, created = headers.get(BYTES_HEADER, ""), headers.get(CREATED_HEADER, "")
    if not re.fullmatch(r"\d{1,15}", sent_bytes, re.ASCII):
        raise ApiError(Reason.INVALID_VALUE, f"{BYTES_HEADER} must be a number.")
    if created and not _CREATED.fullmatch(created):
        raise ApiError(Reason.INVALID_VALUE, f"{CREATED_HEADER} must be a date as in an event.")
    counts: list[int] = []
    token_ids: list[int] = []
    end = 0
    while found := _CHUNK.match(body, end):
        ids = [int(token) for token in found[2].split(b",")[1:]]
        if len(ids) not in (0, int(found[1])) or max(ids, default=0) >= 1 << 32:
            break
        counts.append(int(found[1]))
        token_ids += ids
        end = found.end()
    if end != len(body):
        raise ApiError(Reason.INVALID_VALUE, "The report must be chunks: TOKENS[,TOKEN ...];")
    return Got(tuple(counts), tuple(token_ids), int(sent_bytes), created.encode())
