"""How much of a waiting request vLLM's prefix cache holds, and the memory of the host, for the
planner.

vLLM looks this up itself when it admits a request. A plan without it would reserve KV for every
whole prompt, so that with little KV, requests with a shared prefix would run one after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sluice.replica.vllm.host_blocks import HostBlocks

_REFRESHED = 8
"""Requests per pass that are looked up again: a pass costs no more in a longer queue."""

_BLOCKS_A_PASS = 2048
"""Max cached blocks examined in one pass, one to two milliseconds; the hit that exceeds it is the
last."""


class PrefixHit(NamedTuple):
    """``tokens`` need not be computed; ``blocks`` of theirs are in use, so that sharing them takes
    none of the free ones. An unused cached block counts as free until it is used again."""

    tokens: int
    blocks: int


_NONE = PrefixHit(0, 0)


class PrefixHits:
    """The hits of waiting requests.

    A pass goes over the waiting requests in queue order. It looks up new requests, and some others
    again if the free blocks have changed: filling, freeing and evicting blocks all change them. An
    outdated hit makes a worse plan, never a wrong output: vLLM looks it up again, and then also
    finds blocks that the step itself fills. A lookup changes nothing in vLLM, not even its
    statistics, for which ``get_computed_blocks`` of vLLM 0.26 counts.

    ``O(hit blocks)`` per lookup.

    Args:
        manager: vLLM's ``KVCacheManager``.
        groups: KV cache groups; hits count blocks of one group.
        block_tokens: tokens per block.
        host: the memory of the host. What vLLM loads from there before the request runs counts as
            computed, without blocks in use.
    """

    def __init__(self, manager: Any, groups: int, block_tokens: int, host: HostBlocks) -> None:
        self._coordinator = manager.coordinator
        self._pool = manager.block_pool
        self._enabled = bool(manager.enable_caching)
        self._groups = groups
        self._block_tokens = block_tokens
        self._host = host
        self._free_blocks = -1
        self._blocks_left = 0

    def begin_pass(self) -> int:
        """Start a pass over the waiting requests. Returns how many should be looked up again."""
        free_blocks = self._pool.get_num_free_blocks()
        changed = self._enabled and free_blocks != self._free_blocks
        self._free_blocks = free_blocks
        self._blocks_left = _BLOCKS_A_PASS
        return _REFRESHED if changed else 0

    def of(self, request: Any) -> PrefixHit | None:
        """The hit of a waiting request without computed tokens; ``None``: the pass has examined as
        many blocks as it may."""
        if not self._enabled or request.skip_reading_prefix_cache:
            return _NONE
        return self._look_up(request) if self._blocks_left > 0 else None

    def _look_up(self, request: Any) -> PrefixHit:
        # The last token is always computed, for its logits.
        found = self._coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        groups, tokens = found[0], int(found[1])  # later versions add a third value
        in_use = 0
        for group in groups:
            self._blocks_left -= 1 + len(group)
            # Null blocks stand for blocks that no layer reads any more.
            in_use += sum(block.ref_cnt > 0 or block.is_null for block in group)
        # A partly shared block must be copied.
        blocks = min(in_use // self._groups, tokens // self._block_tokens)
        loaded = self._host.beyond(request, tokens)
        self._blocks_left -= loaded // self._block_tokens
        return PrefixHit(tokens + loaded, blocks)
