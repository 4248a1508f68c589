"""vLLM's KV events, listened to where they are made: which blocks left the prefix cache.

vLLM collects an event for every block that enters or leaves its prefix cache and gives those of a
step to a publisher. That is the one public account of evictions; the alternative, to ask the block
pool after each step whether the blocks of all known chunks are still there, costs as much as there
are chunks. The events stay in the scheduler's process: no publisher is started, unless the operator
has configured one, which then gets them as before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from replica.held_prefixes import HeldPrefixes

if TYPE_CHECKING:
    from collections.abc import Hashable


def enable_kv_events(vllm_config: Any) -> None:
    """Have a scheduler that is made with ``vllm_config`` collect events, if it caches prefixes."""
    from vllm.config import KVEventsConfig

    given = vllm_config.kv_events_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return
    if given is None:
        given = KVEventsConfig()
    if not given.enable_kv_cache_events:
        vllm_config.kv_events_config = replace(given, enable_kv_cache_events=True, publisher="null")


class PooledBlocks:
    """vLLM's prefix cache, see :class:`replica.held_prefixes.BlockCache`.

    Of several groups of layers the first one counts.

    Args:
        pool: vLLM's ``BlockPool``.
    """

    def __init__(self, pool: Any) -> None:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._pool = pool
        self._convert = maybe_convert_block_hash

    def holds(self, block_hash: Any) -> bool:
        """Whether some block with this hash is cached."""
        return self._pool.get_cached_block(block_hash, [0]) is not None

    def name(self, block_hash: Any) -> Hashable:
        """How events name it."""
        name: Hashable = self._convert(block_hash)
        return name


class EventTap:
    """An event publisher that tells ``held`` of removed blocks, and hands everything on.

    Args:
        held: the table to keep.
        publisher: vLLM's own.
    """

    def __init__(self, held: HeldPrefixes, publisher: Any) -> None:
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

        self._held = held
        self._publisher = publisher
        self._removed = BlockRemoved
        self._cleared = AllBlocksCleared

    def publish(self, events: Any) -> None:
        """Called by vLLM with the events of a step."""
        for event in events.events:
            if isinstance(event, self._removed):
                for name in event.block_hashes:
                    self._held.removed(name)
            elif isinstance(event, self._cleared):
                self._held.cleared()
        self._publisher.publish(events)

    def shutdown(self) -> None:
        """Called by vLLM at the end."""
        self._publisher.shutdown()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)
