"""The KV of finished prompts, kept in bounded memory until it is fetched."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hmac import compare_digest
from typing import NamedTuple

from sluice.replica.transfer.wire import Handle


class Kept(NamedTuple):
    """The KV of one prompt.

    Attributes:
        secret: the secret of its handle.
        layers: the bytes of each layer, block after block.
        blocks: number of blocks.
        until_s: when it expires, monotonic.
    """

    secret: bytes
    layers: tuple[memoryview, ...]
    blocks: int
    until_s: float

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(layer.nbytes for layer in self.layers)


class KeptPrompts:
    """KV by handle. Each is given away once. When memory or time runs out, the oldest is dropped.

    Thread-safe.

    Args:
        max_bytes: max memory; KV that is being sent counts until :meth:`sent`.
        keep_s: how long KV is kept, seconds.
        clock: seconds, monotonic.
    """

    def __init__(
        self, max_bytes: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._bytes = 0
        # The part of it that is being sent: this memory cannot be reused yet.
        self._sending = 0

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, handle: Handle, layers: Sequence[memoryview], blocks: int) -> bool:
        """Keep a prompt's KV; returns whether there is memory for it at all."""
        kept = Kept(handle.secret, tuple(layers), blocks, self._clock() + self._keep_s)
        with self._lock:
            self._drop_expired()
            if self._sending + kept.nbytes > self._max_bytes:
                return False
            while self._bytes + kept.nbytes > self._max_bytes:
                self._drop_oldest()
            self._kept[handle.name] = kept
            self._bytes += kept.nbytes
        return True

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` could be kept now, if others were dropped for it. KV that is being
        sent cannot be dropped."""
        return self._sending + nbytes <= self._max_bytes

    def take(self, handle: Handle) -> Kept | None:
        """Give the KV of ``handle`` away; ``None``: there is none, or the secret is wrong. Its
        memory counts until :meth:`sent` is called with it."""
        with self._lock:
            self._drop_expired()
            kept = self._kept.get(handle.name)
            if kept is None or not compare_digest(kept.secret, handle.secret):
                return None
            self._sending += kept.nbytes
            return self._kept.pop(handle.name)

    def sent(self, kept: Kept) -> None:
        """The KV that :meth:`take` returned is no longer needed."""
        with self._lock:
            self._bytes -= kept.nbytes
            self._sending -= kept.nbytes

    def drop_expired(self) -> None:
        """Free KV that was kept for too long. :meth:`take` and :meth:`keep` do that, too."""
        with self._lock:
            self._drop_expired()

    def _drop_expired(self) -> None:
        now_s = self._clock()
        # All are kept equally long, so the oldest expires first.
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, kept = self._kept.popitem(last=False)
        self._bytes -= kept.nbytes
