"""Record of the part of a stream that the client has, so that another replica can resume it.

The resuming replica produces the whole stream again, without computing the known tokens
(:class:`~sluice.protocol.requests.Resume`). The repeated part is dropped here and compared with
what was sent: a stream that differs is not forwarded.
"""

from __future__ import annotations

import re
from array import array
from typing import NamedTuple

from sluice.protocol.requests import ResponseChunk, Resume
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReplicaFailedError

_CREATED = re.compile(rb'"created": ?\d+')
"""The date of an event; it precedes all generated text."""


class Piece(NamedTuple):
    """Bytes to forward, and the output tokens (of the first choice) in them. ``sent`` are the
    chunks that the replica has sent to the client itself: their token counts and send times, on the
    clock of the attempt. ``reasoned``: the reasoning ended with this many of all these tokens; 0:
    it did not end. ``made``: of a request of stages, the tokens of each chunk, and when they left
    the engine, on the same clock."""

    data: bytes
    tokens: int
    sent: tuple[tuple[int, float], ...] = ()
    reasoned: int = 0
    made: tuple[tuple[int, float], ...] = ()


NOTHING = Piece(b"", 0)


def whole_chunk(chunk: ResponseChunk) -> Piece:
    """All of a chunk."""
    return Piece(chunk.data, chunk.tokens, reasoned=chunk.reasoned)


class Transcript:
    """One stream, over all of its attempts. Its memory is 4 bytes per token and 4 per chunk.

    Each attempt starts with :meth:`begin`, and each of its chunks goes through :meth:`take`.
    """

    def __init__(self) -> None:
        self._response_id = ""
        self._token_ids = array("I")
        self._chunks = array("I")
        self._bytes = 0
        self._created = b""
        self._complete = True
        # Of the current attempt: the chunks and bytes that it has repeated, and its own date.
        self._repeated = self._repeated_bytes = 0
        self._created_again = b""

    @property
    def begun(self) -> bool:
        """Whether the client has any of it."""
        return self._bytes > 0

    @property
    def resumable(self) -> bool:
        """Whether all sent tokens are known. A replica does not report tokens from which another
        one could not resume."""
        return self._complete

    @property
    def repeated(self) -> bool:
        """Whether the current attempt has repeated everything that the client has."""
        return self._repeated == len(self._chunks)

    def begin(self, request_id: str) -> Resume | None:
        """An attempt under this id starts. Returns the state to resume from, if any was sent."""
        self._repeated = self._repeated_bytes = 0
        self._created_again = b""
        if self.begun:
            return Resume(tuple(self._token_ids), tuple(self._chunks), self._response_id)
        # A failed attempt may have generated tokens without text yet.
        self._token_ids, self._chunks = array("I"), array("I")
        self._response_id = request_id
        self._complete = True
        return None

    def take(self, chunk: ResponseChunk) -> Piece:
        """The part of a chunk to send to the client: nothing if the client has it already.

        Raises:
            ReplicaFailedError: the attempt does not repeat what was sent.
        """
        if self._repeated < len(self._chunks):
            return self._repeat(chunk)
        data = chunk.data
        if self._created_again:
            data = data.replace(self._created_again, self._created, 1)
        elif data and not self._created:
            self._created = _created_in(data)
        self._token_ids.extend(chunk.token_ids)
        self._chunks.append(chunk.tokens)
        self._complete = self._complete and len(chunk.token_ids) == chunk.tokens
        self._repeated += 1
        self._bytes += len(data)
        return Piece(data, chunk.tokens, reasoned=chunk.reasoned)

    def _repeat(self, chunk: ResponseChunk) -> Piece:
        same = chunk.tokens == self._chunks[self._repeated]
        self._repeated += 1
        self._repeated_bytes += len(chunk.data)
        if not self._created_again:
            self._created_again = _created_in(chunk.data)
        if self._repeated == len(self._chunks):
            # The names of tool calls differ each time, so the bytes are counted, not compared.
            same = same and self._repeated_bytes == self._bytes
        if not same:
            raise ReplicaFailedError(
                Reason.INTERNAL, "Another replica produced a different stream.", retry=False
            )
        return NOTHING


def _created_in(data: bytes) -> bytes:
    found = _CREATED.search(data)
    return found[0] if found is not None else b""
