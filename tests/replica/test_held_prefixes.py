"""The table of held chunks against a cache of blocks that fills and is evicted at random;
test_kv_events.py has real vLLM's."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.vllm.prefix_cache import HeldPrefixes
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, TOKEN_UNITS, PromptPrefix

BLOCK = 16


class Bench:
    """One engine with a prefix cache, which has some blocks twice."""

    def __init__(self, slots=8):
        self.table = StateTable.create(4)
        self.copies = Counter()
        self.load_s = {}
        self.held = HeldPrefixes(
            *(self.table, lambda block: self.copies[block] > 0, BLOCK, BLOCK, slots),
            lambda block: self.load_s.get(block, 0),
        )

    def compute(self, name, tokens, block_hashes):
        self.held.computed(name, tokens, block_hashes)
        self.held.publish()

    def serve(self, name, prefix, prompt_tokens, block_hashes):
        """Compute a whole prompt."""
        self.held.begin(name, prefix, prompt_tokens)
        self.copies.update(block_hashes)
        self.compute(name, prompt_tokens, block_hashes)
        self.held.forget(name)

    def evict(self, block_hash):
        """Drop one copy of a block."""
        if self.copies[block_hash]:
            self.copies[block_hash] -= 1
            self.held.removed(block_hash)
        self.held.publish()

    def shown(self):
        held = self.table.read().held
        full = held[held["hash"] != 0]
        assert len(np.unique(full["hash"])) == len(full)
        self.in_host = {int(row["hash"]) for row in full if row["load_s"] > 0}
        return dict(zip(full["hash"].tolist(), full["tokens"].tolist(), strict=True))


def ids_prefix(tokens, start=1):
    """Of a prompt of so many token ids."""
    chunks = sum(end <= tokens * TOKEN_UNITS for end in CHUNK_ENDS)
    return PromptPrefix(tuple(range(start, start + chunks)), tokens * TOKEN_UNITS)


def test_a_chunk_is_held_while_its_last_block_is():
    bench = Bench()
    hashes = list(range(100, 120))
    bench.held.begin("r", ids_prefix(320), 320)
    bench.compute("r", 320, [])
    assert bench.shown() == {}, "an engine without a prefix cache has no hashes"
    bench.held.begin("r", ids_prefix(320), 320)
    bench.copies.update(hashes)
    for computed, chunks in ((127, {}), (128, {1: 128}), (300, {1: 128, 2: 256})):
        bench.compute("r", computed, hashes)
        assert bench.shown() == chunks
    bench.evict(115)
    assert bench.shown() == {1: 128}
    bench.evict(100)
    assert bench.shown() == {1: 128}, "the block before its end stands for the chunk"
    bench.serve("again", ids_prefix(128), 128, hashes[:8])
    bench.evict(107)
    assert bench.shown() == {1: 128}, "there is a second copy"
    bench.evict(107)
    assert bench.shown() == {}
    bench.held.begin("gone", ids_prefix(128), 128)
    bench.compute("gone", 128, hashes[:8])
    assert bench.shown() == {}, "its last block is not cached"


def test_a_chunk_of_text_reaches_to_the_last_whole_block_of_its_share():
    bench = Bench()
    # 512 of 1100 characters are 46 of 100 tokens: two blocks.
    bench.serve("r", PromptPrefix((7, 8), 1100), 100, list(range(6)))
    assert bench.shown() == {7: 32, 8: 80}
    short = Bench()
    short.serve("r", PromptPrefix((7, 8), 1100), 20, [1])
    assert short.shown() == {8: 16}, "a chunk of less than a block is not held"


def test_a_whole_prompt_is_held_to_its_last_whole_block():
    bench = Bench()
    bench.serve("r", PromptPrefix((7, 8), 1100, (5, 6)), 100, list(range(6)))
    assert bench.shown() == {7: 32, 8: 80, 6: 96}
    bench.evict(5)
    assert bench.shown() == {7: 32, 8: 80}


def test_a_block_that_leaves_the_gpu_for_the_host_stays_with_the_time_to_load_it():
    bench = Bench()
    hashes = list(range(100, 116))
    bench.serve("r", ids_prefix(256), 256, hashes)
    bench.load_s = {115: 3e-6}
    bench.evict(115)
    bench.evict(107)  # its copy in the host is gone already, or was never timed
    assert (bench.shown(), bench.in_host) == ({2: 256}, {2})
    assert bench.table.read().held["load_s"].max() == np.float32(3e-6)
    # Back on the GPU, and evicted again; then the host evicts it, too.
    bench.serve("r", ids_prefix(256), 256, hashes)
    assert (bench.shown(), bench.in_host) == ({1: 128, 2: 256}, set())
    bench.evict(115)
    assert (bench.shown(), bench.in_host) == ({1: 128, 2: 256}, {2})
    del bench.load_s[115]
    bench.held.removed(115)
    bench.held.publish()
    assert bench.shown() == {1: 128}


def test_a_full_table_drops_the_prompt_of_longest_ago():
    bench = Bench(slots=2)
    for name in (0, 1, 0, 2):
        bench.serve(str(name), ids_prefix(128, 10 + name), 128, [*range(7), 100 + name])
    assert bench.shown() == {10: 128, 12: 128}


conversations = st.tuples(st.integers(0, 3), st.integers(1, 700), st.integers(0, 8))


@given(st.lists(conversations | st.integers(0, 200), max_size=30), st.integers(1, 12))
def test_what_is_shown_is_cached_and_no_more_than_fits(events, slots):
    bench = Bench(slots)
    for step, event in enumerate(events):
        if isinstance(event, int):
            bench.evict(event)
        else:
            # Prompts of one start share what the shorter has; estimates may put a chunk elsewhere.
            start, tokens, error = event
            prefix = ids_prefix(tokens, 1 + 10 * start)
            hashes = [50 * start + block for block in range(tokens // BLOCK)]
            bench.serve(str(step), prefix._replace(size=prefix.size + error), tokens, hashes)
        shown = bench.shown()
        assert len(shown) <= slots
        for chunk, upto in shown.items():
            assert bench.copies[50 * (chunk // 10) + upto // BLOCK - 1] > 0
    # After all of it every slot can be used.
    bench.serve("last", ids_prefix(20_000, 1000), 20_000, range(10_000, 10_000 + 20_000 // BLOCK))
    assert len(bench.shown()) == slots
    bench.copies.clear()
    bench.held.cleared()
    bench.held.publish()
    assert bench.shown() == {}
