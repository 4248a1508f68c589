"""vLLM's prefix cache: hits of waiting requests for the planner, held chunks for reports."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sluice.replica.scheduler.state_table import StateTable
from sluice.scheduling.fleet.prefix import HELD, HELD_SLOTS, PromptPrefix


class _Mark(NamedTuple):
    """A row of :data:`~sluice.scheduling.fleet.prefix.HELD`."""

    chunk: int
    tokens: int
    load_s: float = 0.0


class HeldPrefixes:
    """The table of held chunks of one engine, in its state table. ``O(chunks)`` per request.

    A chunk (:mod:`sluice.scheduling.fleet.prefix`) is tied to the last whole KV block before its
    end, and held until that block is gone from the GPU and from host memory. As the engine evicts
    the end of a prefix first, that block implies all before it. A new chunk replaces the one whose
    prompt came longest ago. The table may miss a cached chunk, but never lists one that is not.
    ``load_s``: seconds to load a token of a block from host memory; 0: not there, or unknown."""

    def __init__(
        self,
        table: StateTable,
        is_cached: Callable[[bytes], bool],
        block_tokens: int,
        hash_tokens: int,
        slots: int = HELD_SLOTS,
        load_s: Callable[[bytes], float] = lambda block_hash: 0.0,
    ) -> None:
        self._table = table
        self._is_cached = is_cached
        self._load_s = load_s
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens
        self._free = list(range(slots - 1, -1, -1))
        # Chunk -> its slot, least recently seen first.
        self._slots: OrderedDict[int, int] = OrderedDict()
        # Chunk -> its block's hash and its tokens, and the reverse.
        self._block_of: dict[int, tuple[bytes, int]] = {}
        self._chunks_of: dict[bytes, set[int]] = {}
        # By request, the last first.
        self._pending: dict[str, list[_Mark]] = {}
        self._changed: dict[int, _Mark] = {}

    def begin(self, request_id: str, prefix: PromptPrefix, prompt_tokens: int) -> None:
        """A request whose prompt begins with ``prefix`` has arrived."""
        marks = [
            _Mark(chunk, upto // self._block_tokens * self._block_tokens)
            for chunk, upto in prefix.chunk_tokens(prompt_tokens).items()
            if upto >= self._block_tokens
        ]
        if marks:
            self._pending[request_id] = marks[::-1]

    def computed(self, request_id: str, tokens: int, block_hashes: Sequence[bytes]) -> None:
        """The first ``tokens`` tokens of a request are computed, with these block hashes. A
        recomputed prompt is not recorded again; the next one with its prefix is."""
        marks = self._pending.get(request_id)
        if marks is None:
            return
        while marks and marks[-1].tokens <= tokens:
            mark = marks.pop()
            last = mark.tokens // self._hash_tokens - 1
            # An engine without a prefix cache hashes no blocks.
            if last < len(block_hashes) and self._is_cached(block_hashes[last]):
                self._put(mark, block_hashes[last])
        if not marks:
            del self._pending[request_id]

    def forget(self, request_id: str) -> None:
        """The request has left the engine; unknown ids are ignored."""
        self._pending.pop(request_id, None)

    def removed(self, block_hash: bytes) -> None:
        """A block left the cache or host memory; another with this hash may be there still."""
        chunks = self._chunks_of.get(block_hash)
        if chunks is None or self._is_cached(block_hash):
            return
        load_s = self._load_s(block_hash)
        for chunk in list(chunks):
            if load_s > 0:
                tokens = self._block_of[chunk][1]
                self._changed[self._slots[chunk]] = _Mark(chunk, tokens, load_s)
                continue
            slot = self._slots.pop(chunk)
            self._untie(chunk)
            self._free.append(slot)
            self._changed[slot] = _Mark(0, 0)

    def cleared(self) -> None:
        """The engine may have cleared its cache."""
        for block_hash in list(self._chunks_of):
            self.removed(block_hash)

    def publish(self) -> None:
        """Write what changed to the state table."""
        if self._changed:
            slots = np.fromiter(self._changed, np.int64)
            self._table.write_held(slots, np.array(list(self._changed.values()), HELD))
            self._changed.clear()

    def _put(self, mark: _Mark, block_hash: bytes) -> None:
        chunk = mark.chunk
        slot = self._slots.pop(chunk, None)
        if slot is not None:
            self._untie(chunk)
        elif self._free:
            slot = self._free.pop()
        else:
            oldest, slot = self._slots.popitem(last=False)
            self._untie(oldest)
        self._slots[chunk] = slot
        self._block_of[chunk] = block_hash, mark.tokens
        self._chunks_of.setdefault(block_hash, set()).add(chunk)
        self._changed[slot] = mark

    def _untie(self, chunk: int) -> None:
        block_hash, _ = self._block_of.pop(chunk)
        chunks = self._chunks_of[block_hash]
        chunks.discard(chunk)
        if not chunks:
            del self._chunks_of[block_hash]


def on_removed_blocks(pool: Any, listener: Callable[[bytes], None]) -> None:
    """Call ``listener`` with the hash of each block that leaves vLLM's prefix cache, even if
    another one with the same hash stays; not when the whole cache is cleared. vLLM's own queue of
    events copies the tokens of every block that enters."""
    from vllm.v1.core.kv_cache_utils import get_block_hash

    emit = pool._emit_block_removed_events

    def emit_and_call(block_hashes: list[Any], *args: Any, **kwargs: Any) -> None:
        emit(block_hashes, *args, **kwargs)
        for block_hash in block_hashes:
            listener(get_block_hash(block_hash))

    pool._emit_block_removed_events = emit_and_call


class PrefixHit(NamedTuple):
    """``tokens`` need not be computed; ``blocks`` of theirs are in use, so that sharing them takes
    none of the free ones. An unused cached block counts as free until it is used again."""

    tokens: int
    blocks: int


_NONE = PrefixHit(0, 0)


class PrefixHits:
    """The hits of waiting requests; a plan without them would reserve KV for whole prompts, so with
    little KV requests with a shared prefix would run one after another.

    A pass looks up new requests in queue order, and others again if the free blocks have changed.
    An outdated hit makes a worse plan, never a wrong output. A lookup changes nothing in vLLM, not
    even statistics. ``O(hit blocks)`` per lookup. ``loaded``: tokens beyond these that vLLM loads
    from the host; they count as computed, without blocks in use."""

    def __init__(
        self, manager: Any, groups: int, block_tokens: int, loaded: Callable[[Any, int], int]
    ) -> None:
        self._coordinator = manager.coordinator
        self._pool = manager.block_pool
        self._enabled = bool(manager.enable_caching)
        self._groups = groups
        self._block_tokens = block_tokens
        self._loaded = loaded
        self._free_blocks = -1
        self._blocks_left = 0

    def begin_pass(self) -> int:
        """Start a pass over the waiting requests. Returns how many should be looked up again."""
        free_blocks = self._pool.get_num_free_blocks()
        changed = self._enabled and free_blocks != self._free_blocks
        self._free_blocks = free_blocks
        # One to two milliseconds; the hit that exceeds it is the last.
        self._blocks_left = 2048
        # A pass costs no more in a longer queue.
        return 8 if changed else 0

    def of(self, request: Any) -> PrefixHit | None:
        """The hit of a waiting request; ``None``: the pass has reached its limit of blocks."""
        if not self._enabled or request.skip_reading_prefix_cache:
            return _NONE
        return self._look_up(request) if self._blocks_left > 0 else None

    def now(self, request: Any) -> int:
        """Tokens of a request in whole blocks of the cache, whatever the pass's limit."""
        if not self._enabled or request.skip_reading_prefix_cache:
            return 0
        return self._look_up(request).tokens // self._block_tokens * self._block_tokens

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
        loaded = self._loaded(request, tokens)
        self._blocks_left -= loaded // self._block_tokens
        return PrefixHit(tokens + loaded, blocks)
