"""What one response has ready for its consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from replica.engine import ResponseChunk, ResponseItem

MAX_BUFFERED_ITEMS = 256
"""Items of one response that may wait for their consumer; then the engine's stream waits."""

MAX_BATCH_BYTES = 1 << 20
"""A batch of items ends with the one that reaches this: each batch is one message."""


class Response:
    """A response on its way. Bounded: :meth:`put` waits for room.

    Args:
        wake: called when there is something to take, or the end; never while it is made.
        items: of a response that is complete.

    Attributes:
        over: nothing more will be put.
        error: what ended it early.
    """

    __slots__ = ("_items", "_room", "_wake", "close", "error", "over")

    def __init__(self, wake: Callable[[], None], items: Iterable[ResponseItem] = ()) -> None:
        self._items = deque(items)
        self._wake = wake
        self._room: asyncio.Event | None = None
        self.over = bool(self._items)
        self.error: BaseException | None = None
        self.close: Callable[[], None] = _nothing
        """To be called by the consumer once, in any case: stops what still goes on."""

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._items)

    async def put(self, item: ResponseItem) -> None:
        """Add an item, when there is room."""
        while len(self._items) >= MAX_BUFFERED_ITEMS:
            if self._room is None:
                self._room = asyncio.Event()
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._wake()

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes. What is said first holds."""
        if not self.over:
            self.over = True
            self.error = error
            self._wake()

    def take(self, limit: int = MAX_BATCH_BYTES) -> list[ResponseItem]:
        """What is ready, if anything: no further item once there are ``limit`` bytes."""
        items, batch, size = self._items, [], 0
        while items and size < limit:
            item = items.popleft()
            if isinstance(item, ResponseChunk):
                size += len(item.data)
            batch.append(item)
        if self._room is not None:
            self._room.set()
        return batch


def _nothing() -> None:
    """A response that is complete stops nothing."""
