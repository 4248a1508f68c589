"""The messages between a router and a replica on their connection: MessagePack frames.

After the token the router sends one ``Asked`` per frame, and gets lists of ``Delivery``. An
empty frame announces that the replica is about to leave: only its open requests continue. A
response may be ahead of its reader by ``WINDOW_BYTES``; the router reports what was read."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

import msgspec

from sluice.protocol.requests import (
    EngineRequest,
    KVHandle,
    RequestBody,
    ResponseChunk,
    ResponseHead,
    ResponseSent,
    ResponseTail,
    ResponseTaken,
    Resume,
    Turn,
)
from sluice.scheduling.fleet.prefix import PromptPrefix
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage

TICKET_HEADER: Final = "x-sluice-ticket"
"""HTTP header that names a direct stream (:mod:`sluice.replica.streams.direct`) by its ticket."""

GOODBYE: Final = b""

MAX_ASKED_BYTES: Final = 16 << 20
"""Max frame that a replica accepts, bytes. A larger request goes through Serve."""

MAX_CHUNK_BYTES: Final = 16 << 20
"""Max chunk of a response, bytes; a response with a longer one fails."""

BATCH_BYTES: Final = 1 << 20
"""A frame of deliveries ends with the response that reaches this size."""

MAX_DELIVERED_BYTES: Final = MAX_CHUNK_BYTES + (8 << 20)
"""Max frame that a router accepts, bytes: a batch, a response that exceeds it, and a chunk."""

WINDOW_BYTES: Final = 256 << 10
"""How far a response may be ahead of its reader, bytes. A long chunk, or a buffer of short ones,
may exceed it."""

_CHUNK_COST: Final = 64
"""Cost of a chunk besides its bytes."""


def cost(chunks: Iterable[ResponseChunk]) -> int:
    """Cost of chunks in the window, bytes."""
    size = 0
    for data, *_ in chunks:  # a loop is cheaper than a sum for one chunk
        size += len(data) + _CHUNK_COST
    return size


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Serve ``request``, whose body is ``raw`` with the changes; ``stream`` is its number."""

    stream: int
    request: EngineRequest
    raw: bytes
    changed: Mapping[str, Any]
    removed: frozenset[str]

    @classmethod
    def of(cls, stream: int, request: EngineRequest) -> Open:
        """The message for a request. ``O(changed fields)``: the body is not walked."""
        body = request.body
        if not isinstance(body, RequestBody):
            body = RequestBody.of(body)
        return cls(stream, replace(request, body={}), *body.parts)

    def asked(self) -> EngineRequest:
        """The request. Raises what ``RequestBody.parse`` raises."""
        request = self.request
        # It was decoded for this alone; a copy takes longer than all else here.
        object.__setattr__(
            request, "body", RequestBody.of_parts(self.raw, self.changed, self.removed)
        )
        return request


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The router does not need the response any more. After the response's end this is ignored."""

    stream: int


class Consumed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """This much of a response was read; see :func:`cost`."""

    stream: int
    size: int


Asked = Open | Cancel | Consumed


class Ending(enum.IntEnum):
    """How a response without a tail ended."""

    EARLY = 1
    """It was stopped."""
    ENGINE_DEAD = 2
    CANCELLED = 3
    FAILED = 4
    """An error in the replica's code; it is in the replica's log."""
    TOO_LARGE = 5
    """A chunk exceeded :data:`MAX_CHUNK_BYTES`."""
    LEFT = 6
    """The stream that the replica sends directly to the client has no reader."""
    STALLED = 7
    """The client has read nothing of such a stream for too long."""


class Delivery(msgspec.Struct, array_like=True):
    """The ready items of one response, in this order."""

    stream: int
    taken: ResponseTaken | None
    head: ResponseHead | None
    chunks: list[ResponseChunk]
    tail: ResponseTail | None
    ending: Ending | None = None
    sent: ResponseSent | None = None


class StreamEndpoint(NamedTuple):
    """The address where a replica takes requests, the token, and its message format."""

    replica_id: str
    host: str
    port: int
    token: str
    format: str


def _layouts() -> str:
    """Names the fields of messages, which other versions may change."""
    structs = (SLO, Open, Cancel, Consumed, Delivery)
    items = (ResponseTaken, ResponseHead, ResponseChunk, ResponseSent, ResponseTail)
    tuples = (*items, KVHandle, Resume, PromptPrefix, Stage, Turn)
    names = [
        [each.__struct_fields__ for each in structs],
        [each._fields for each in tuples],
        [field.name for field in fields(EngineRequest)],
        [ending.name for ending in Ending],
    ]
    return hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()


FORMAT: Final = _layouts()
"""Both sides must have the same format. Processes of different versions, as in a rolling update,
communicate through Serve, where new fields have defaults."""
