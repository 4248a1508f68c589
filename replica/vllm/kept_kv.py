"""KV of sessions that vLLM's pool of blocks evicts last, by worth.

vLLM frees the blocks of an ended request into one queue and evicts from its front. Here blocks of
sessions (:mod:`sluice.scheduling.kept_kv`) wait beside that queue, count as free like its own, and
join its end when the rest of it does not suffice."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import vllm
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from sluice.protocol.requests import Turn
from sluice.replica.vllm.contract import WITH_KEPT_KV, Part, age, unfit, unmet
from sluice.scheduling.kept_kv import KeptBlocks
from sluice.scheduling.latency.model import LatencyModel

logger = logging.getLogger(__name__)

_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
_POOL = "vllm.v1.core.block_pool:BlockPool"

KEPT_KV = (
    Part(
        (_QUEUE,),
        "popleft() popleft_n(_) remove(_) append(_) prepend_n(_) append_n(_) "
        "get_all_free_blocks() iter_blocks_after(_)",
        "num_free_blocks fake_free_list_head fake_free_list_tail",
    ),
    Part(("vllm.v1.core.sched.output:SchedulerOutput",), made="scheduled_new_reqs"),
    Part(("vllm.v1.core.sched.output:NewRequestData",), made="req_id"),
    Part((_POOL,), made="blocks free_block_queue", called="popleft_n", by="get_new_blocks"),
    Part((_POOL,), called="remove", by="touch"),
    Part((_POOL,), called="prepend_n append_n", by="free_blocks"),
    Part((_POOL,), called="num_free_blocks", by="get_num_free_blocks"),
)
"""For the order in which blocks are evicted."""


class WorthQueue(FreeKVCacheBlockQueue):
    """The free blocks of ``pool``, those of sessions beside the others. Without sessions its
    methods cost a comparison more than vLLM's. ``take_calls``: sessions that have ended turns, and
    the tools that these have called."""

    def __init__(
        self,
        pool: Any,
        take_calls: Callable[[], Iterable[tuple[int, int]]] = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        queue = pool.free_block_queue
        self.num_free_blocks = queue.num_free_blocks
        self.fake_free_list_head = queue.fake_free_list_head
        self.fake_free_list_tail = queue.fake_free_list_tail
        self._blocks = pool.blocks
        self._take_calls = take_calls
        self._clock = clock
        self._kept = KeptBlocks()

    # Called by Sluice's scheduler.

    def begin(self, turn: Turn) -> None:
        """A turn begins to run."""
        self._learn_calls()
        self._kept.begin(turn.session, turn.tool, self._clock())

    def end(self, turn: Turn, tenant: int, blocks: Iterable[Sequence[int]]) -> None:
        """A turn has ended; its ``blocks``, by group of layers, will become free."""
        self._learn_calls()
        numbers = [n for group in blocks for n in group]
        self._kept.end(turn.session, tenant, numbers, self._clock())
        if turn.final:
            self._join(self._kept.finish(turn.session, numbers))
        self._join(self._kept.release(self._clock()))

    def price(self, latency: LatencyModel, block_tokens: int) -> None:
        """See :meth:`~sluice.scheduling.kept_kv.KeptBlocks.price`."""
        self._kept.price(latency, block_tokens)

    def clear(self) -> None:
        """The cache was cleared."""
        self._join(self._kept.clear())

    # Called by vLLM.

    def popleft(self) -> KVCacheBlock:
        """The block that is evicted first."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """The ``n`` blocks that are evicted first; those of sessions only if others are too few."""
        others = self.num_free_blocks - len(self._kept)
        if n > others:
            self._learn_calls()
            self._join(self._kept.take(n - others, self._clock()))
        blocks: list[KVCacheBlock] = super().popleft_n(n)
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """A free block is used again."""
        if self._kept.used and self._kept.find(block.block_id):
            self.num_free_blocks -= 1
        else:
            super().remove(block)

    def append(self, block: KVCacheBlock) -> None:
        """A cached block becomes free."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Cached blocks become free, the one to evict first at the front."""
        kept = self._kept
        if kept.used:
            others = [block for block in blocks if not kept.keep(block.block_id)]
            self.num_free_blocks += len(blocks) - len(others)
            blocks = others
        super().append_n(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Blocks without a hash become free."""
        if self._kept.used:
            self._kept.forget(block.block_id for block in blocks)
        super().prepend_n(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks, the one that is evicted first at the front."""
        return [*super().get_all_free_blocks(), *self._by_worth()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks in the order of eviction, behind ``cursor``."""
        kept = self._by_worth()
        if cursor is not None and cursor.block_id in self._kept:
            yield from kept[kept.index(cursor) + 1 :]
        else:
            yield from super().iter_blocks_after(cursor)
            yield from kept

    def _learn_calls(self) -> None:
        for session, tool in self._take_calls():
            self._kept.called(session, tool)

    def _by_worth(self) -> list[KVCacheBlock]:
        return [self._blocks[n] for n in self._kept.by_worth(self._clock())]

    def _join(self, numbers: list[int]) -> None:
        """Blocks that are kept no longer become the last ones of the queue."""
        self.num_free_blocks -= len(numbers)  # they were counted
        super().append_n([self._blocks[n] for n in numbers])


def keep_sessions(
    pool: Any, take_calls: Callable[[], Iterable[tuple[int, int]]]
) -> WorthQueue | None:
    """Have ``pool`` evict by worth; ``None``: it is not known to Sluice, or caches nothing."""
    if not pool.enable_caching:
        return None
    lacking = [*unmet(KEPT_KV), *unfit([WorthQueue])]
    if lacking or age(vllm.__version__, WITH_KEPT_KV) == "older":
        logger.warning(
            "KV of sessions is evicted by time of use, as stock vLLM %s does: %s",
            vllm.__version__,
            f"it lacks {'; '.join(lacking)}" if lacking else "this is an older version",
        )
        return None
    pool.free_block_queue = queue = WorthQueue(pool, take_calls)
    return queue
