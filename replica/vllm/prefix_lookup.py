"""How much of a waiting request vLLM's prefix cache holds, and the memory of the host, for the
planner.

vLLM looks this up itself when it admits a request. A plan without it would reserve KV for every
whole prompt, so that with little KV, requests with a shared prefix would run one after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sluice.replica.vllm.host_blocks import HostBlocks

_REFRESHED = 8
"""Requests per pass that are looked up again."""

_AGE = 4
"""Passes until a hit is looked up again: those of the first 32 waiting requests are at most that
old, and a pass costs no more in a longer queue."""

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
    """The hits of the waiting requests, as of their last lookup.

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
        # With the pass of the lookup.
        self._hits: dict[str, tuple[PrefixHit, int]] = {}
        self._pass = 0
        self._free_blocks = -1
        self._refresh_left = 0
        self._blocks_left = 0

    def begin_pass(self) -> None:
        """Start a pass over the waiting requests."""
        self._pass += 1
        free_blocks = self._pool.get_num_free_blocks()
        self._refresh_left = _REFRESHED if free_blocks != self._free_blocks else 0
        self._free_blocks = free_blocks
        self._blocks_left = _BLOCKS_A_PASS

    def of(self, request: Any) -> PrefixHit:
        """The hit of a waiting request without computed tokens."""
        if not self._enabled or request.skip_reading_prefix_cache:
            return _NONE
        hit, looked_up = self._hits.get(request.request_id, (None, 0))
        if hit is not None:
            if self._refresh_left <= 0 or self._pass - looked_up < _AGE:
                return hit
            self._refresh_left -= 1
        if self._blocks_left > 0:
            hit = self._look_up(request)
            self._hits[request.request_id] = hit, self._pass
        return _NONE if hit is None else hit

    def forget(self, request_id: str) -> None:
        """The request has left the engine; unknown ids are ignored."""
        self._hits.pop(request_id, None)

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
