"""Streams that flow from a replica to the client without passing through this process.

HAProxy asks a router as ever, and says that it can fetch a stream by itself (:data:`EDGE_HEADER`).
The answer's head then names the place (:data:`STREAM_HEADER`). Its body is empty and ends with the
stream: if the client leaves, HAProxy closes that connection, and the call ends as ever. The replica
reports what it has sent. Where the stream breaks, HAProxy asks for another one
(:data:`BROKEN_PATH`), and says what the client has. ``deploy/direct/relay.lua`` is the other side.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from router.answer import Attempt, ReplicaFailedError
from router.errors import ApiError, Reason

EDGE_HEADER: Final = "x-sluice-edge"
"""Request: ``direct`` where who asks can fetch a stream. Clients cannot send it through HAProxy;
one that does without HAProxy gets no more than its own stream."""

STREAM_HEADER: Final = "x-sluice-stream"
"""Response: ``HOST:PORT TICKET`` of a stream to fetch."""

BROKEN_PATH: Final = "/sluice/broken"
"""Where HAProxy tells of a stream that broke. Its ticket is what opens this path."""

TICKET_HEADER: Final = "x-sluice-ticket"
BYTES_HEADER: Final = "x-sluice-bytes"
CREATED_HEADER: Final = "x-sluice-created"

REPORT_S: Final = 10.0
"""How long HAProxy has to tell what the client has of a stream that broke, seconds."""

MAX_REPORT_BYTES: Final = 8 << 20
"""Longest report: a stream of 131,072 tokens in chunks of one takes a fifth of it."""

_BROKEN: Final = "The connection to the replica broke."
_CHUNK = re.compile(rb"(\d{1,9})((?:,\d{1,10})*);")
_CREATED = re.compile(r'"created": ?\d{1,20}')


class NotReportedError(Exception):
    """HAProxy does not say what the client has of a stream that broke: nobody takes it any more."""


class Got(NamedTuple):
    """What a client has of a stream.

    Attributes:
        chunks: the output tokens of each chunk, as far as the replica tells them; counts: how many
            there are in each.
        sent_bytes: in all. created: the date in them.
    """

    counts: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    sent_bytes: int
    created: bytes


class DirectAnswer:
    """A stream that HAProxy fetches, over all attempts at it.

    Args:
        registry: knows those of this process.
    """

    def __init__(self, registry: DirectAnswers) -> None:
        self._registry = registry
        self._name = self._ticket = ""
        self._attempt: Attempt | None = None
        self._got: asyncio.Future[Got] | None = None
        self._next: asyncio.Future[str | bytes] | None = None

    def streams_from(self, attempt: Attempt) -> None:
        """An attempt sends the stream from now on. Who reported a break is told where."""
        told, loop = self._next, asyncio.get_running_loop()
        self._registry.forget(self._name)
        self._ticket = attempt.head.fetch.rpartition(" ")[2]
        self._name = self._ticket.partition(".")[0]
        self._attempt = attempt
        self._got, self._next = loop.create_future(), loop.create_future()
        self._registry.expect(self._name, self)
        if told is not None and not told.done():
            told.set_result(attempt.head.fetch)

    async def broken(self) -> Got:
        """What the client has of the stream that broke.

        Raises:
            NotReportedError: nobody says it.
        """
        assert self._got is not None
        try:
            async with asyncio.timeout(REPORT_S):
                return await asyncio.shield(self._got)
        except TimeoutError:
            raise NotReportedError from None

    def end(self, last: bytes) -> None:
        """There is no more of the stream than ``last``. Who reports a break later is told so."""
        if self._next is not None and not self._next.done():
            self._next.set_result(last)
        loop = asyncio.get_running_loop()
        loop.call_later(REPORT_S, self._registry.forget, self._name)

    def opens(self, ticket: str) -> bool:
        """Whether ``ticket`` is that of the stream."""
        return hmac.compare_digest(self._ticket.encode(), ticket.encode())

    async def report(self, got: Got) -> str | bytes:
        """HAProxy tells of a break. Returns where the stream goes on, or its last bytes."""
        assert self._got is not None and self._next is not None and self._attempt is not None
        follows = self._next
        if not self._got.done():
            self._got.set_result(got)
        # Where the attempt has not failed: the connection between HAProxy and the replica has.
        self._attempt.give_up(ReplicaFailedError(Reason.REPLICA_FAILED, _BROKEN, blame=False))
        return await asyncio.shield(follows)


class DirectAnswers:
    """Those of a router's process, by the names of their tickets."""

    def __init__(self) -> None:
        self._answers: dict[str, DirectAnswer] = {}

    def expect(self, name: str, answer: DirectAnswer) -> None:
        """HAProxy has the ticket of this name."""
        self._answers[name] = answer

    def forget(self, name: str) -> None:
        """The ticket is void. Unknown ones are ignored."""
        self._answers.pop(name, None)

    async def broken(self, request: Request) -> Response:
        """HAProxy tells of a break.

        Raises:
            ApiError: 404, the ticket is unknown. 400, the report is malformed. 413, it is too long.
        """
        ticket = request.headers.get(TICKET_HEADER, "")
        answer = self._answers.get(ticket.partition(".")[0])
        if answer is None or not answer.opens(ticket):
            raise ApiError(Reason.NOT_FOUND, "There is no such stream.")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_REPORT_BYTES:
                raise ApiError(Reason.TOO_LARGE, "The report is too long.")
        got = parse_report(bytes(body), request.headers)
        follows = await answer.report(got)
        if isinstance(follows, bytes):
            return Response(follows)
        return Response(headers={STREAM_HEADER: follows})


def parse_report(body: bytes, headers: Mapping[str, str]) -> Got:
    """A report of a break.

    Raises:
        ApiError: 400, it is malformed.
    """
    sent_bytes, created = headers.get(BYTES_HEADER, ""), headers.get(CREATED_HEADER, "")
    if not re.fullmatch(r"\d{1,15}", sent_bytes, re.ASCII):
        raise ApiError(Reason.INVALID_VALUE, f"{BYTES_HEADER} must be a number.")
    if created and not _CREATED.fullmatch(created):
        raise ApiError(Reason.INVALID_VALUE, f"{CREATED_HEADER} must be a date as in an event.")
    counts, chunks, end = [], [], 0
    while found := _CHUNK.match(body, end):
        ids = tuple([int(token) for token in found[2].split(b",")[1:]])
        if len(ids) not in (0, int(found[1])) or max(ids, default=0) >= 1 << 32:
            break
        counts.append(int(found[1]))
        chunks.append(ids)
        end = found.end()
    if end != len(body):
        raise ApiError(Reason.INVALID_VALUE, "The report must be chunks: TOKENS[,TOKEN ...];")
    return Got(tuple(counts), tuple(chunks), int(sent_bytes), created.encode())
