"""Which prompt prefixes the replicas have cached, by chunks of the prompts' text.

The edge does not tokenise, so a prompt is cut at fixed places, ``CHUNK_ENDS``, and each chunk has a
hash that covers everything before it. A replica, which knows tokens and KV blocks, reports the
chunks that it holds.

The next turn of a conversation begins with all of this one, of which whole chunks may leave an
eighth. So a long prompt has hashes up to the ends of its last messages, too; a replica reports the
last one, which is the whole prompt, as another chunk, and a later turn has it among its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.request.job import MAX_CHUNKS
from sluice.scheduling.request.kernels import Floats

TOKEN_UNITS = 4
"""Characters that one token id counts for where a prompt consists of token ids."""

_FIRST_CHUNK = 512


def _chunk_ends() -> tuple[int, ...]:
    ends = [_FIRST_CHUNK]
    while len(ends) < MAX_CHUNKS:
        growth = ends[-1] // 8 // _FIRST_CHUNK * _FIRST_CHUNK
        ends.append(ends[-1] + max(_FIRST_CHUNK, growth))
    return tuple(ends)


CHUNK_ENDS = _chunk_ends()
"""Where chunks end, characters: 512 apart, then an eighth of what lies before, so that few hashes
reach far. Multiples of 512 characters, or 128 token ids: a whole number of KV blocks."""

MIN_MESSAGE_END = 16 * _FIRST_CHUNK
"""Before this the next chunk ends within 512 characters, and no end of a message is hashed."""

HELD_SLOTS = 2048
"""Most chunks that a replica reports as held."""

HELD = np.dtype([("hash", "<i8"), ("tokens", "<i4"), ("load_s", "<f4")])
"""A chunk that a replica holds: its hash (0: an empty slot), the prompt's tokens up to its end, and
0 on the GPU or the seconds to load a token of it from the host."""

NO_HELD = np.empty(0, HELD)
NO_HELD.flags.writeable = False
"""No chunks."""

NO_HELD_SLOTS = np.empty(0, np.int32)
NO_HELD_SLOTS.flags.writeable = False
"""Their slots."""


class PromptPrefix(NamedTuple):
    """The beginning of a prompt: ``hashes`` of its chunks in order, 63 bits and not 0, each
    covering all before it. ``size`` is of the whole prompt, characters, or ``TOKEN_UNITS`` for each
    token id. ``message_ends``: hashes up to the ends of its last messages behind
    ``MIN_MESSAGE_END``, the last one of the whole prompt; none of a prompt with media."""

    hashes: tuple[int, ...] = ()
    size: int = 0
    message_ends: tuple[int, ...] = ()

    def chunk_tokens(self, prompt_tokens: int) -> dict[int, int]:
        """How many of the prompt's tokens lie before the end of each chunk, by hash and in order,
        the whole prompt the last one if it has a hash: by its share of the size, rounded down.
        Exact for token ids and for the whole, an estimate for other chunks of text."""
        ends = islice(CHUNK_ENDS, len(self.hashes))
        tokens = {
            chunk: end * prompt_tokens // self.size
            for chunk, end in zip(self.hashes, ends, strict=True)
        }
        return tokens | dict.fromkeys(self.message_ends[-1:], prompt_tokens)


NO_PREFIX = PromptPrefix()


class ChunkRows:
    """Which rows of a fleet hold which chunks, in one kind of memory.

    A chunk has one number of tokens, the last one reported: replicas of one model agree up to
    rounding. A lookup costs one dictionary access per chunk of the prompt and a pass over its rows
    for each depth at which some of them part; a change ``O(changed chunks)``."""

    def __init__(self) -> None:
        # Chunk -> the rows that hold it, as bits, and its tokens.
        self._chunks: dict[int, tuple[int, int]] = {}
        self._held: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """Chunks that some row holds."""
        return len(self._chunks)

    def hold(self, row: int, chunks: Mapping[int, int]) -> None:
        """``row`` holds ``chunks`` from now on: tokens by hash."""
        bit = 1 << row
        self._held.setdefault(row, set()).update(chunks)
        for chunk, tokens in chunks.items():
            rows = self._chunks.get(chunk, (0, 0))[0]
            self._chunks[chunk] = (rows | bit, tokens)

    def drop(self, row: int, chunks: Iterable[int]) -> None:
        """``row`` no longer holds ``chunks``; those that it does not hold are passed over."""
        held = self._held.get(row, set())
        bit = 1 << row
        for chunk in chunks:
            if chunk not in held:
                continue
            held.discard(chunk)
            rows, tokens = self._chunks.pop(chunk)
            if rows != bit:
                self._chunks[chunk] = (rows ^ bit, tokens)

    def clear(self, row: int) -> None:
        """Nothing is known of ``row`` any more. ``O(its chunks)``."""
        self.drop(row, list(self._held.get(row, ())))
        self._held.pop(row, None)

    def cached_tokens(
        self, prefix: tuple[int, ...], rows: NDArray[np.integer], most: float = inf
    ) -> Floats:
        """``float64[len(rows)]``: tokens up to the deepest chunk of ``prefix`` that each row holds,
        at most ``most``. A chunk missing before it counts as held: reports are bounded, and engines
        evict the end of a prefix first."""
        found: list[tuple[int, float]] = []
        seen = 0
        for chunk in reversed(prefix):
            held, tokens = self._chunks.get(chunk, (0, 0))
            new = held & ~seen
            if new:
                seen |= new
                found.append((new, min(tokens, most)))
        if not found:
            return np.zeros(len(rows))
        size = (max(seen.bit_length(), int(rows.max(initial=0)) + 1) + 7) // 8
        cached = np.zeros(8 * size)
        for new, up_to in found:
            packed = np.frombuffer(new.to_bytes(size, "little"), np.uint8)
            cached[np.unpackbits(packed, bitorder="little").view(np.bool_)] = up_to
        own: Floats = cached[rows]
        return own


class PrefixIndex(ChunkRows):
    """The chunks on the GPUs of a fleet, and in ``hosted`` those in the memory of its hosts. Its
    only input is the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.hosted = ChunkRows()
        self._load_s: dict[int, float] = {}
        self._slots: dict[int, NDArray[np.int64]] = {}

    def write(self, row: int, slots: NDArray[np.integer], held: np.ndarray) -> None:
        """Take in changed slots of a replica's table: ``slots`` below ``HELD_SLOTS``, each once,
        and what they hold now, ``HELD[n]``. A chunk stands in one slot of a replica."""
        if not len(slots):
            return
        table = self._slots.get(row)
        if table is None:
            table = self._slots[row] = np.zeros(HELD_SLOTS, np.int64)
        before = table[slots].tolist()
        self.drop(row, before)
        self.hosted.drop(row, before)
        table[slots] = held["hash"]
        full = held[held["hash"] != 0]
        in_host = full["load_s"] > 0
        self.hold(row, _tokens(full[~in_host]))
        if in_host.any():
            self.hosted.hold(row, _tokens(full[in_host]))
            self._load_s[row] = float(full["load_s"][in_host][-1])

    def clear(self, row: int) -> None:
        """Nothing is known of ``row`` any more. ``O(its chunks)``."""
        super().clear(row)
        self.hosted.clear(row)
        self._load_s.pop(row, None)
        self._slots.pop(row, None)

    def hosted_tokens(
        self, prefix: tuple[int, ...], rows: NDArray[np.integer]
    ) -> tuple[Floats, Floats]:
        """As :meth:`cached_tokens`, for the memory of the hosts; and the time to load one of these
        tokens, seconds, as each row reported last."""
        load_s = [self._load_s.get(row, 0.0) for row in rows.tolist()]
        return self.hosted.cached_tokens(prefix, rows), np.array(load_s, np.float64)


def _tokens(held: np.ndarray) -> dict[int, int]:
    """Tokens by hash."""
    return dict(zip(held["hash"].tolist(), held["tokens"].tolist(), strict=True))
