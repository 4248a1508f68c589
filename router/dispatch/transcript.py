"""What a client has of a streamed answer, so that another replica can go on with it.

The replica that goes on makes the whole stream again, without computing what it is told
(:class:`~replica.engine.Resume`). What the client has is left out here and held against what was
sent: a stream that is not the same is not handed on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from replica.engine import ResponseChunk, Resume
from router.answer import Piece, ReplicaFailedError
from router.errors import Reason

_CREATED = re.compile(rb'"created": ?\d+')
"""The date of an event; it stands before anything that was generated."""

_NOTHING = Piece(b"", 0)


class Transcript:
    """Of one stream, over all of its attempts. Its memory is 4 bytes a token and 4 a chunk.

    Each attempt starts with :meth:`begin`, and each of its chunks goes through :meth:`take`; where
    a replica has sent the stream to the client itself, :meth:`told` says what the client has.
    """

    def __init__(self) -> None:
        self._response_id = ""
        self._token_ids = array("I")
        self._chunks = array("I")
        self._bytes = 0
        self._created = b""
        self._complete = True
        # Of the attempt under way: the chunks and bytes that it has repeated, and its own date.
        self._repeated = self._repeated_bytes = 0
        self._created_again = b""

    @property
    def begun(self) -> bool:
        """Whether the client has any of it."""
        return self._bytes > 0

    @property
    def resumable(self) -> bool:
        """Whether all tokens that were sent are known. A replica does not tell them where another
        one could not go on from them."""
        return self._complete

    @property
    def repeated(self) -> bool:
        """Whether the attempt under way has given again all that the client has."""
        return self._repeated == len(self._chunks)

    def begin(self, request_id: str) -> Resume | None:
        """An attempt under this id starts. Returns what it is to go on from, if anything."""
        self._repeated = self._repeated_bytes = 0
        self._created_again = b""
        if self.begun:
            return Resume(tuple(self._token_ids), tuple(self._chunks), self._response_id)
        # An attempt that failed may have made tokens that no text has come of.
        self._token_ids, self._chunks = array("I"), array("I")
        self._response_id = request_id
        self._complete = True
        return None

    def take(self, chunk: ResponseChunk) -> Piece:
        """What the client gets of a chunk: nothing of one that it has.

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

    def told(
        self, counts: Sequence[int], token_ids: Sequence[int], sent_bytes: int, created: bytes
    ) -> None:
        """What the client has by now: how many tokens each chunk held, and which in all, as far as
        the replica told them; the bytes, and the date in them."""
        self._chunks, self._token_ids = array("I", counts), array("I", token_ids)
        self._bytes, self._created = sent_bytes, created
        self._complete = len(token_ids) == sum(counts)

    def _repeat(self, chunk: ResponseChunk) -> Piece:
        same = chunk.tokens == self._chunks[self._repeated]
        self._repeated += 1
        self._repeated_bytes += len(chunk.data)
        if not self._created_again:
            self._created_again = _created_in(chunk.data)
        if self._repeated == len(self._chunks):
            # The names of tool calls are made anew each time, so the bytes are counted, not kept.
            same = same and self._repeated_bytes == self._bytes
        if not same:
            raise ReplicaFailedError(
                Reason.INTERNAL, "Another replica did not make the same stream.", retry=False
            )
        return _NOTHING


def _created_in(data: bytes) -> bytes:
    found = _CREATED.search(data)
    return found[0] if found is not None else b""
