"""What a client has of a streamed answer, so that another replica can go on with it.

What the client has is left out of what the next replica makes (:mod:`replica.replay`): here, or by
the replica where it sends the stream to the client itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from replica.engine import Direct, ResponseChunk, Resume
from replica.replay import NotRepeatedError, Replay, created_in
from router.answer import Piece, ReplicaFailedError
from router.errors import Reason

_NOTHING = Piece(b"", 0)


class Transcript:
    """Of one stream, over all of its attempts. Its memory is 4 bytes a token and 4 a chunk.

    Each attempt starts with :meth:`begin`, and each of its chunks goes through :meth:`take`; where
    replicas send the stream to the client, :meth:`told` says what the client has.
    """

    def __init__(self) -> None:
        self._response_id = ""
        self._token_ids = array("I")
        self._chunks = array("I")
        self._bytes = 0
        self._created = b""
        self._complete = True
        self._replay: Replay | None = None

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
        return self._replay is None or self._replay.done

    @property
    def direct(self) -> Direct:
        """What a replica must know to go on and send the rest itself."""
        return Direct(self._bytes, self._created.decode())

    def begin(self, request_id: str) -> Resume | None:
        """An attempt under this id starts. Returns what it is to go on from, if anything."""
        if self.begun:
            self._replay = Replay(tuple(self._chunks), self._bytes, self._created)
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
        if self._replay is not None:
            try:
                new = self._replay.take(chunk)
            except NotRepeatedError as error:
                raise ReplicaFailedError(Reason.INTERNAL, str(error), retry=False) from None
            if new is None:
                return _NOTHING
            chunk = new
        elif chunk.data and not self._created:
            self._created = created_in(chunk.data)
        self._token_ids.extend(chunk.token_ids)
        self._chunks.append(chunk.tokens)
        self._complete = self._complete and len(chunk.token_ids) == chunk.tokens
        self._bytes += len(chunk.data)
        return Piece(chunk.data, chunk.tokens)

    def told(
        self,
        counts: Sequence[int],
        chunks: Sequence[Sequence[int]],
        sent_bytes: int,
        created: bytes,
    ) -> None:
        """What the client has by now: how many tokens each chunk held, and which, as far as the
        replica told them; the bytes, and the date in them."""
        self._chunks = array("I", counts)
        self._token_ids = array("I", (token for chunk in chunks for token in chunk))
        self._bytes, self._created = sent_bytes, created
        self._complete = len(self._token_ids) == sum(counts)
