"""A stream that another replica goes on with: it is made again, without what its client has.

The engine makes the whole stream, without computing the tokens that it is told
(:class:`~replica.engine.Resume`). A stream that is not the same is not handed on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from replica.engine import ResponseChunk

_CREATED = re.compile(rb'"created": ?\d+')
"""The date of an event; it stands before anything that was generated."""


class NotRepeatedError(Exception):
    """The stream is not the one that its client has."""


class Replay:
    """Leaves out what a client has of a stream.

    Args:
        chunks: the output tokens of each chunk that the client has.
        sent_bytes: of them.
        created: the date in them, as :func:`created_in` finds it.
    """

    def __init__(self, chunks: Sequence[int], sent_bytes: int, created: bytes) -> None:
        self._chunks = chunks
        self._bytes = sent_bytes
        self._created = created
        self._repeated = self._repeated_bytes = 0
        self._created_again = b""

    @property
    def done(self) -> bool:
        """Whether all was made again that the client has."""
        return self._repeated == len(self._chunks)

    def take(self, chunk: ResponseChunk) -> ResponseChunk | None:
        """The chunk as the client gets it; ``None`` where the client has it.

        Raises:
            NotRepeatedError: the stream is another one.
        """
        if self.done:
            if not self._created_again:
                return chunk
            return chunk._replace(data=chunk.data.replace(self._created_again, self._created, 1))
        same = chunk.tokens == self._chunks[self._repeated]
        self._repeated += 1
        self._repeated_bytes += len(chunk.data)
        if not self._created_again:
            self._created_again = created_in(chunk.data)
        # The names of tool calls are made anew each time, so the bytes are counted, not kept.
        if not same or (self.done and self._repeated_bytes != self._bytes):
            raise NotRepeatedError("Another replica did not make the same stream.")
        return None


def created_in(data: bytes) -> bytes:
    """The date in an event; empty where there is none."""
    found = _CREATED.search(data)
    return found[0] if found is not None else b""
