"""The buffer between one response and its consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from sluice.protocol.requests import ResponseChunk, ResponseItem

MAX_BUFFERED_ITEMS = 256
"""Max buffered items of one response; beyond it, the engine's stream waits."""

MAX_BATCH_BYTES = 1 << 20
"""A batch of items ends with the item that reaches this size; each batch is one message."""


class Response:
    """A response in progress. Its buffer is bounded: :meth:`put` waits for free space.

    Args:
        wake: called when there are items to take, or at the end; never in the constructor.
        items: all items of a response that is already complete.

    Attributes:
        over: no more items will be put.
        error: the error that cut it short, if any.
    """

    __slots__ = ("_items", "_room", "_wake", "close", "error", "over")

    def __init__(self, wake: Callable[[], None], items: Iterable[ResponseItem] = ()) -> None:
        self._items = deque(items)
        self._wake = wake
        self._room: asyncio.Event | None = None
        self.over = bool(self._items)
        self.error: BaseException | None = None
        self.close: Callable[[], None] = _nothing
        """The consumer calls this exactly once, in any case: it stops the work that is still in
        progress."""

    @property
    def ready(self) -> bool:
        """Whether there are items to take."""
        return bool(self._items)

    async def put(self, item: ResponseItem) -> None:
        """Add an item as soon as there is space."""
        while len(self._items) >= MAX_BUFFERED_ITEMS:
            if self._room is None:
                self._room = asyncio.Event()
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._wake()

    def end(self, error: BaseException | None) -> None:
        """No more items will be put. Only the first call counts."""
        if not self.over:
            self.over = True
            self.error = error
            self._wake()

    def take(self, limit: int = MAX_BATCH_BYTES) -> list[ResponseItem]:
        """The items that are ready, if any; adds no further item once there are ``limit`` bytes."""
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
    """For a complete response: there is nothing to stop."""
