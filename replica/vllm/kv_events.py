"""vLLM's prefix cache for :mod:`sluice.replica.scheduler.prefix_index`: which blocks it holds, and
which are removed.

vLLM can keep a queue of KV events for every block that enters or leaves its prefix cache. Each
block that enters costs an event with a copy of the block's tokens, which the index does not need.
So the queue stays as the operator has configured it, and this module hooks the one place where all
events of removed blocks are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PooledBlocks:
    """The blocks of vLLM's prefix cache. With several groups of layers, only the first one counts.

    Args:
        pool: vLLM's ``BlockPool``.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block with this hash is cached."""
        return self._pool.get_cached_block(block_hash, [0]) is not None

    def tell_removed(self, listener: Callable[[bytes], None]) -> None:
        """Call ``listener`` with the hash of each removed block, even if another one with the same
        hash stays. It is not called when the whole cache is cleared."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        emit = self._pool._emit_block_removed_events

        def emit_and_tell(block_hashes: list[Any], *args: Any, **kwargs: Any) -> None:
            emit(block_hashes, *args, **kwargs)
            for block_hash in block_hashes:
                listener(get_block_hash(block_hash))

        self._pool._emit_block_removed_events = emit_and_tell
