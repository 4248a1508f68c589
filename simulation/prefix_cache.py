"""A prefix cache by block hashes: prompts that begin alike share KV.

A cached block is in use while a running request holds it; otherwise it is idle, counts as free, and
is evicted when its blocks are needed, the one that was released first before the others. Within a
request the end of the prefix is released first, so that what is left can still be found. This is
what vLLM's block pool does, at the size of the workload's hashed blocks.

Three things are simpler than in vLLM, and each finds less: outputs are not cached, as traces hash
prompts only; a block can be shared from the step after the one that computes it, while vLLM lets
another request of the same step have it (0.006 % of the tokens in the first half of the Mooncake
conversation trace); and the last block of a prompt that was cached whole keeps its old place in the
order of eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from sluice.scheduling.request.kernels import (
    COMPUTED,
    EMITTED,
    KV_BLOCKS,
    PENDING,
    PROMPT,
    RUNNING,
    Ints,
)
from sluice.simulation.rows import Rows
from sluice.simulation.steps import FREE_BLOCKS, SHARED, SOLE
from sluice.simulation.workload import Arrival

_REFRESHED = 32
"""Waiting requests at the head of the queue whose hits are kept fresh, as in the replica."""


class PrefixCache:
    """The cache of one engine. It changes the engine's rows: what it holds of a waiting request
    counts as computed there, and as held as far as others use it.

    ``O(blocks of the prefix)`` per admission and release, and per refreshed request in a step after
    which the cache has changed.

    Args:
        arrivals: of the run, by key.
        hashed_tokens: tokens per hash.
        block_tokens: tokens per KV block.

    Raises:
        ValueError: hashes do not cover whole KV blocks.
    """

    def __init__(self, arrivals: Sequence[Arrival], hashed_tokens: int, block_tokens: int) -> None:
        if hashed_tokens % block_tokens:
            raise ValueError(
                f"the workload hashes blocks of {hashed_tokens} tokens, which must be a multiple "
                f"of the engine's block_tokens ({block_tokens})"
            )
        self.hit_tokens = 0
        """Tokens that admitted requests did not have to compute."""
        self._arrivals = arrivals
        self._tokens = hashed_tokens
        self._block_tokens = block_tokens
        self._blocks = hashed_tokens // block_tokens
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._held: dict[int, list[int]] = {}
        # Number of blocks of a running request's prefix that have been looked up, held or not.
        self._seen: dict[int, int] = {}
        # Requests that came with the KV of their prompts and have not lost it.
        self._brought: set[int] = set()
        self._changed = False

    def enter(self, rows: Rows, row: int, brought: bool = False) -> None:
        """A request has come: write what is cached of it into its row. One that has ``brought`` the
        KV of its prompt, from another engine, looks for no more."""
        key = int(rows.keys[row])
        if brought:
            self._brought.add(key)
        else:
            self._show(rows, row, self._hits(key))

    def refresh(self, rows: Rows) -> None:
        """Before a plan: write what is cached now into the first waiting rows."""
        if not self._changed:
            return
        self._changed = False
        waiting = np.flatnonzero(rows.table[: rows.live, RUNNING] == 0.0)
        for row in waiting[:_REFRESHED].tolist():
            key = int(rows.keys[row])
            if key not in self._brought:
                self._show(rows, row, self._hits(key))

    def admit(self, rows: Rows, planned: Ints, tokens: Ints, evicts: bool = False) -> list[int]:
        """Before a step: hold the cached prefixes of the waiting requests in it; return their rows.

        It holds no more than their rows show, which is what the plan is made for. ``evicts`` says
        whether the step begins by taking blocks from others.
        """
        admitted = []
        need = 0
        for row, new in zip(planned.tolist(), tokens.tolist(), strict=True):
            table = rows.table[row]
            if table[RUNNING] > 0.0:
                upto = int(table[COMPUTED]) + new
                need += -(-upto // self._block_tokens) - int(table[KV_BLOCKS])
                continue
            key = int(rows.keys[row])
            if not self._prefix(key) or key in self._brought:
                continue
            shown = int(table[COMPUTED]) // self._tokens
            self._hold(rows, row, key, min(shown, self._hits(key)))
            admitted.append(row)
        if evicts or need > rows.counters[FREE_BLOCKS]:
            self._count_sole(rows)
        return admitted

    def settle(self, rows: Rows, admitted: Sequence[int]) -> None:
        """After a step began: release the blocks of requests that were not admitted or were
        preempted, and evict the blocks that the step has taken."""
        for row in admitted:
            key = int(rows.keys[row])
            if rows.table[row, RUNNING] > 0.0:
                self.hit_tokens += self._tokens * len(self._held[key])
            else:
                self._release(rows, key)
                rows.private[row, SHARED] = 0
                self._show(rows, row, self._hits(key))
        for row in rows.victims.tolist():
            # The step has counted the blocks that were the victim's alone.
            rows.counters[FREE_BLOCKS] -= rows.private[row, SOLE]
            self._release(rows, int(rows.keys[row]))
            rows.private[row, SHARED] = rows.private[row, SOLE] = 0
        self.trim(rows)

    def trim(self, rows: Rows) -> None:
        """Evict what others have taken."""
        while self._idle and self.idle_blocks > rows.counters[FREE_BLOCKS]:
            self._idle.popitem(last=False)
            self._changed = True

    def fill(self, rows: Rows, ran: Ints) -> None:
        """Before a step ends: its rows' prefixes are computed as far as the step goes."""
        for row, new in ran.tolist():
            key = int(rows.keys[row])
            prefix = self._prefix(key)
            seen = self._seen.get(key, 0)
            if seen >= len(prefix):
                continue
            upto = min(len(prefix), int(rows.table[row, COMPUTED] + new) // self._tokens)
            for block in prefix[seen:upto]:
                # Another request was first: this copy stays private.
                if block not in self._users and block not in self._idle:
                    self._users[block] = 1
                    self._held.setdefault(key, []).append(block)
                    rows.private[row, SHARED] += self._blocks
                    self._changed = True
            self._seen[key] = max(seen, upto)

    def leave(self, rows: Rows, keys: Sequence[int]) -> None:
        """Requests have ended; the step has freed the blocks that were never cached."""
        for key in keys:
            self._release(rows, key)

    @property
    def held(self) -> frozenset[int]:
        """The hashes that it has, in use or not."""
        return frozenset(self._users) | self._idle.keys()

    @property
    def idle_blocks(self) -> int:
        """KV blocks of prefixes that no request uses."""
        return len(self._idle) * self._blocks

    @property
    def used_blocks(self) -> int:
        """KV blocks of prefixes that requests use."""
        return len(self._users) * self._blocks

    def _prefix(self, key: int) -> tuple[int, ...]:
        """The hashes of the whole blocks of a prompt."""
        arrival = self._arrivals[key]
        return arrival.block_hashes[: arrival.prompt_tokens // self._tokens]

    def _hits(self, key: int) -> int:
        """Cached blocks at the beginning of a prompt, of which one token must be left to compute:
        it gives the first output."""
        prefix = self._prefix(key)
        most = (self._arrivals[key].prompt_tokens - 1) // self._tokens
        hits = 0
        while hits < min(most, len(prefix)) and (
            prefix[hits] in self._users or prefix[hits] in self._idle
        ):
            hits += 1
        return hits

    def _show(self, rows: Rows, row: int, hits: int) -> None:
        table = rows.table[row]
        prefix = self._prefix(int(rows.keys[row]))
        table[COMPUTED] = hits * self._tokens
        table[PENDING] = table[PROMPT] + table[EMITTED] - table[COMPUTED]
        used = sum(block in self._users for block in prefix[:hits])
        table[KV_BLOCKS] = used * self._blocks

    def _hold(self, rows: Rows, row: int, key: int, hits: int) -> None:
        held = list(self._prefix(key)[:hits])
        for block in held:
            if block in self._idle:
                del self._idle[block]
                rows.counters[FREE_BLOCKS] -= self._blocks
            self._users[block] = self._users.get(block, 0) + 1
        self._held[key] = held
        self._seen[key] = hits
        table = rows.table[row]
        table[COMPUTED] = hits * self._tokens
        table[PENDING] = table[PROMPT] + table[EMITTED] - table[COMPUTED]
        table[KV_BLOCKS] = rows.private[row, SHARED] = hits * self._blocks

    def _count_sole(self, rows: Rows) -> None:
        """Before a step that may preempt: which blocks would come free with their request."""
        for row in np.flatnonzero(rows.private[: rows.live, SHARED]).tolist():
            held = self._held.get(int(rows.keys[row]), [])
            sole = sum(self._users[block] == 1 for block in held)
            rows.private[row, SOLE] = sole * self._blocks

    def _release(self, rows: Rows, key: int) -> None:
        self._seen.pop(key, None)
        self._brought.discard(key)
        for block in reversed(self._held.pop(key, [])):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = None
                rows.counters[FREE_BLOCKS] += self._blocks
            self._changed = True
