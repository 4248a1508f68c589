"""How a direct stream leaves for its reader: as records, or as the response to an HTTP request.

HAProxy sends a ticket and a line break, and gets records
(:mod:`sluice.replica.streams.direct`). A gateway that asked a router for an endpoint forwards its
client's request here, with the ticket in a header, and gets an HTTP response with the events alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from sluice.replica.streams.wire import TICKET_HEADER

MAX_TICKET_BYTES: Final = 128
MAX_HEAD_BYTES: Final = 64 << 10
"""Maximum head of an HTTP request, bytes. Envoy's default limit is 60 KiB."""

LINE_BYTES: Final = 4 << 10
"""A record ends with the chunk that makes its description of chunks reach this size: twice as much,
one line, must fit into a buffer of HAProxy's. A chunk with a longer description has only the number
of its tokens."""

_TICKET_NAME: Final = TICKET_HEADER.encode()
_NO_STREAM: Final = (
    b'{"type":"error","error":{"message":"There is no such stream: requests come here by way of '
    b'Sluice\'s endpoint picker, once.","type":"invalid_request_error","param":null,'
    b'"code":"not_found"}}'
)


class Format(NamedTuple):
    """How one kind of reader gets a stream.

    Attributes:
        begin: sent first.
        pack: what is sent for chunks that are ready at once, from their descriptions and bytes.
        beat: sent while there is nothing else.
        end: sent last.
        refusal: sent in place of it all to a reader without a valid ticket.
    """

    begin: bytes
    pack: Callable[[Sequence[bytes], Sequence[bytes]], bytes]
    beat: bytes
    end: bytes
    refusal: bytes


class Asked(NamedTuple):
    """What a reader has sent. An HTTP request without a ticket, or with two, has an empty one."""

    ticket: str
    format: Format


def asked(received: bytes | bytearray) -> Asked | None:
    """What a reader wants that has sent this; ``None`` while part of it is missing.

    Raises:
        ValueError: it is neither a ticket nor an HTTP request, or its head is too long.
    """
    line, ended, _ = received.partition(b"\n")
    if b" " not in line:
        if not ended and len(line) > MAX_TICKET_BYTES:
            raise ValueError(f"a ticket has at most {MAX_TICKET_BYTES} bytes")
        return Asked(line.decode("latin-1"), RECORDS) if ended else None
    head, ended, _ = received.partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD_BYTES:
        raise ValueError(f"the head of a request has at most {MAX_HEAD_BYTES} bytes")
    if not ended:
        return None
    headers = [header.partition(b":") for header in head.split(b"\r\n")[1:]]
    tickets = [value.strip() for name, _, value in headers if name.lower() == _TICKET_NAME]
    return Asked(tickets[0].decode("latin-1") if len(tickets) == 1 else "", HTTP)


def _records(told: Sequence[bytes], data: Sequence[bytes]) -> Iterator[bytes]:
    begin = size = 0
    for end, each in enumerate(told, 1):
        size += len(each)
        if size >= LINE_BYTES or end == len(told):
            joined = b"".join(data[begin:end])
            yield b"%d %s\n%s" % (len(joined), b"".join(told[begin:end]), joined)
            begin, size = end, 0


def _http_chunk(_: Sequence[bytes], data: Sequence[bytes]) -> bytes:
    joined = b"".join(data)
    return b"%x\r\n%s\r\n" % (len(joined), joined) if joined else b""  # an empty one is the last


RECORDS: Final = Format(
    begin=b"",
    pack=lambda told, data: b"".join(_records(told, data)),
    beat=b"0\n",
    end=b"end\n",
    refusal=b"",
)

HTTP: Final = Format(
    begin=b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\nconnection: close\r\n"
    b"transfer-encoding: chunked\r\n\r\n",
    pack=_http_chunk,
    beat=b"",
    end=b"0\r\n\r\n",
    refusal=b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_NO_STREAM), _NO_STREAM),
)
