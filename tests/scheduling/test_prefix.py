"""The index of held chunks against a dictionary per row."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.prefix import (
    CHUNK_ENDS,
    HELD,
    HELD_SLOTS,
    TOKEN_UNITS,
    PrefixIndex,
    PromptPrefix,
)
from sluice.scheduling.placement.placer import Placer, job_of
from sluice.scheduling.request.job import MAX_CHUNKS, RouteDecision
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery, Tier
from sluice.scheduling.routing import make_policy as make_routing
from tests.scheduling.fleets import MODEL, fleet_of, report

# A prefix in the memory of a replica's host counts as computed, after the time to load it.

PREFIX, HIT, PROMPT = (7, 8), 800, 1_000
FAST_S, SLOW_S = 20e-6, 200e-6
"""To load a token. To compute one takes 100 us, and more with the context."""

GPU = {7: (400, 0.0), 8: (HIT, 0.0)}
HOST = {7: (400, 0.0), 8: (HIT, FAST_S)}
"""The first half is on the GPU."""

ALL_IN_HOST = {7: (400, FAST_S), 8: (HIT, FAST_S)}


def fleet_with(*held: dict[int, tuple[int, float]]) -> Fleet:
    """A replica for each: the tokens of its chunks, and the time to load one."""
    fleet = fleet_of(*(report() for _ in held))
    for replica, chunks in enumerate(held):
        rows = np.array([(chunk, *rest) for chunk, rest in chunks.items()], HELD)
        fleet.hold(str(replica), np.arange(len(rows)), rows)
    return fleet


def query(ttft_s: float = 1.0) -> RouteQuery:
    tiers = frozenset({Tier.GUARANTEED, Tier.BEST_EFFORT})
    return RouteQuery(1, SLO(ttft_s=ttft_s, tpot_s=0.1), PROMPT, prefix=PREFIX, tiers=tiers)


def placed(fleet: Fleet, routing: str = "most_gain", ttft_s: float = 1.0) -> RouteDecision:
    admission = make_admission("moore_hodgson")
    return Placer(fleet, make_routing(routing), admission).place(query(ttft_s), 0.0)


def test_what_is_loaded_takes_time_and_no_compute() -> None:
    fleet = fleet_with({}, ALL_IN_HOST, HOST, GPU, {8: (HIT, SLOW_S)})
    made = job_of(fleet, query(), np.arange(5), 0.0, 1.0)
    assert made.cached_tokens.tolist() == [0, HIT, HIT, HIT, 0]
    assert made.lead_s == pytest.approx([0, HIT * FAST_S, (HIT - 400) * FAST_S, 0, 0])
    rest_s, all_s = MODEL.work_s(PROMPT - HIT, HIT), MODEL.work_s(PROMPT, 0)
    assert made.work_s == pytest.approx([all_s, rest_s, rest_s, rest_s, all_s])


def test_the_next_turn_of_a_conversation_finds_all_of_the_one_before() -> None:
    """Each replica by the deeper of its chunks and its turns, on the GPU and in the host."""
    turn = query()._replace(message_ends=(3, 4, 5))
    held = {**GPU, 3: (200, 0.0), 4: (950, 0.0)}
    hosted = {**HOST, 4: (950, FAST_S)}
    fleet = fleet_with({}, held, GPU, {4: (950, 0.0)}, {3: (200, 0.0), 7: (400, 0.0)}, hosted)
    made = job_of(fleet, turn, np.arange(6), 0.0, 1.0)
    assert made.cached_tokens.tolist() == [0, 950, HIT, 950, 400, 950]
    assert made.work_s[1] == pytest.approx(MODEL.work_s(50, 950))
    assert made.lead_s == pytest.approx([0, 0, 0, 0, 0, 550 * FAST_S])


@pytest.mark.parametrize("routing", ["most_gain", "least_work"])
def test_a_hit_in_the_host_is_better_than_none_and_worse_than_one_on_the_gpu(routing: str) -> None:
    assert placed(fleet_with({}, HOST), routing).replica_id == "1"
    assert placed(fleet_with({}, ALL_IN_HOST, GPU, HOST), routing).replica_id == "2"
    assert placed(fleet_with({}, ALL_IN_HOST, HOST), routing).replica_id == "2"
    assert placed(fleet_with({8: (HIT, SLOW_S)}, {7: (400, 0.0)}), routing).replica_id == "1"


@pytest.mark.parametrize("routing", ["most_gain", "least_work"])
def test_a_promise_counts_the_wait_for_what_a_connector_holds(routing: str) -> None:
    fleet = fleet_of(report()._replace(kv_answer_s=0.1), report()._replace(kv_answer_s=0.05))
    alone_s = MODEL.a + MODEL.work_s(PROMPT, 0)
    held = placed(fleet, routing)
    assert (held.replica_id, held.tier) == ("1", Tier.GUARANTEED)
    assert held.predicted_ttft_s == pytest.approx(0.05 + alone_s)
    assert placed(fleet, routing, 0.05 + alone_s - 0.01).tier is Tier.BEST_EFFORT


def test_a_promise_counts_the_load() -> None:
    load_s, rest_s = HIT * FAST_S, MODEL.a + MODEL.work_s(PROMPT - HIT, HIT)
    held = placed(fleet_with(ALL_IN_HOST))
    assert held.tier is Tier.GUARANTEED
    assert held.predicted_ttft_s == pytest.approx(load_s + rest_s)
    # An objective that only computing and no loading would keep, and one that both keep.
    margin_s = 2e-3
    for ttft_s, tier in (
        (rest_s + load_s - margin_s, Tier.BEST_EFFORT),
        (2 * (rest_s + load_s), Tier.GUARANTEED),
    ):
        assert placed(fleet_with(ALL_IN_HOST), ttft_s=ttft_s).tier is tier
        assert placed(fleet_with(GPU), ttft_s=2 * (rest_s + load_s)).tier is Tier.GUARANTEED
    assert placed(fleet_with({}), ttft_s=2 * (rest_s + load_s)).tier is Tier.BEST_EFFORT


ROWS = 70  # more than one machine word
CHUNKS = st.integers(1, 12)
SLOTS = st.lists(st.integers(0, 7), unique=True, max_size=8)


class NaiveIndex:
    """A table per row, and the tokens of a chunk as told last by any row that held it since."""

    def __init__(self):
        self.tables = {}
        self.tokens = {}

    def write(self, row, slots, chunks, tokens):
        table = self.tables.setdefault(row, {})
        for slot in slots:
            table.pop(slot, None)
        self._prune()
        for slot, chunk in zip(slots, chunks, strict=True):
            if chunk:
                table[slot] = chunk
        self.tokens.update({chunk: tokens[chunk] for chunk in chunks if chunk})

    def clear(self, row):
        self.tables.pop(row, None)
        self._prune()

    def _prune(self):
        held = {chunk for table in self.tables.values() for chunk in table.values()}
        self.tokens = {chunk: tokens for chunk, tokens in self.tokens.items() if chunk in held}

    def cached(self, prefix, row):
        table = self.tables.get(row, {})
        held = [chunk for chunk in prefix if chunk in table.values()]
        return self.tokens[held[-1]] if held else 0

    def unused(self, row, slots):
        """Chunks that no slot of ``row`` outside of ``slots`` holds."""
        rest = {chunk for slot, chunk in self.tables.get(row, {}).items() if slot not in slots}
        return [chunk for chunk in range(1, 13) if chunk not in rest]


@given(st.data())
def test_the_index_answers_as_one_dictionary_per_row_would(data):
    index, naive = PrefixIndex(), NaiveIndex()
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.integers(0, ROWS - 1))
        if data.draw(st.integers(0, 5)) == 0:
            index.clear(row)
            naive.clear(row)
            continue
        slots = data.draw(SLOTS)
        free = data.draw(st.permutations(naive.unused(row, slots)))
        full = data.draw(st.integers(0, min(len(slots), len(free))))
        chunks = list(free[:full]) + [0] * (len(slots) - full)
        tokens = {chunk: data.draw(st.integers(0, 1000)) for chunk in chunks if chunk}
        held = np.array([(chunk, tokens.get(chunk, 0), 0) for chunk in chunks], HELD)
        index.write(row, np.array(slots, np.int32), held)
        naive.write(row, slots, chunks, tokens)
    prefix = tuple(data.draw(st.lists(CHUNKS, unique=True)))
    rows = np.array(data.draw(st.lists(st.integers(0, ROWS + 9), max_size=6)), np.int64)
    assert index.cached_tokens(prefix, rows).tolist() == [
        naive.cached(prefix, row) for row in rows.tolist()
    ]
    assert len(index) == len(naive.tokens)


def test_a_slot_that_changes_hands_keeps_what_moved():
    index = PrefixIndex()
    rows = np.array([0])
    index.write(0, np.array([0, 1]), np.array([(7, 100, 0), (8, 200, 0)], HELD))
    index.write(0, np.array([0, 1]), np.array([(8, 200, 0), (9, 300, 0)], HELD))
    assert index.cached_tokens((7,), rows).tolist() == [0]
    assert index.cached_tokens((8,), rows).tolist() == [200]
    index.write(0, np.array([HELD_SLOTS - 1]), np.array([(5, 1, 0)], HELD))
    index.clear(0)
    assert len(index) == 0


def test_a_chunk_is_on_the_gpu_or_in_the_memory_of_the_host():
    """Row 3 has loads of 2 us a token. A chunk that leaves its GPU, or comes back, stays in its
    slot."""
    index, rows, prefix = PrefixIndex(), np.array([3, 4]), (7, 8)
    load_s = np.float32(2e-6)
    index.write(3, np.array([0, 1]), np.array([(7, 100, 0), (8, 200, load_s)], HELD))
    index.write(4, np.array([0]), np.array([(7, 100, 0)], HELD))

    def found():
        hosted, token_s = index.hosted_tokens(prefix, rows)
        return index.cached_tokens(prefix, rows).tolist(), hosted.tolist(), token_s.tolist()

    assert found() == ([100, 100], [200, 0], [load_s, 0])
    index.write(3, np.array([0, 1]), np.array([(7, 100, load_s), (8, 200, 0)], HELD))
    assert found() == ([200, 100], [100, 0], [load_s, 0])
    index.write(3, np.array([0]), np.array([(0, 0, 0)], HELD))
    assert found() == ([200, 100], [0, 0], [load_s, 0])
    index.clear(3)
    assert found() == ([0, 100], [0, 0], [0, 0]) and not len(index.hosted)


def test_chunks_can_be_told_without_slots():
    index = PrefixIndex()
    index.hold(3, {5: 128, 6: 256})
    index.hold(64, {5: 128})
    assert index.cached_tokens((5, 6), np.array([3, 64, 0])).tolist() == [256, 128, 0]
    index.drop(3, [6, 99])
    assert index.cached_tokens((5, 6), np.array([3])).tolist() == [128]
    index.drop(3, [5])
    assert index.cached_tokens((5, 6), np.array([3, 64])).tolist() == [0, 128]


def test_chunk_ends_are_whole_blocks_of_token_ids_and_reach_far():
    assert len(CHUNK_ENDS) == MAX_CHUNKS
    assert all(end % (128 * TOKEN_UNITS) == 0 for end in CHUNK_ENDS)
    # What a match leaves unused is at most an eighth of it, or one first chunk.
    for earlier, later in pairwise(CHUNK_ENDS):
        assert 0 < later - earlier <= max(CHUNK_ENDS[0], earlier / 8)
    assert CHUNK_ENDS[-1] > 400_000 * TOKEN_UNITS


@pytest.mark.parametrize("prompt_tokens", [1, 300, 700, 2000])
def test_the_tokens_of_chunks_are_their_share_of_the_prompt(prompt_tokens):
    prefix = PromptPrefix((1, 2, 3), 2000)
    tokens = prefix.chunk_tokens(prompt_tokens)
    shares = [int(end / 2000 * prompt_tokens) for end in CHUNK_ENDS[:3]]
    assert list(tokens.items()) == list(zip((1, 2, 3), shares, strict=True))
    assert tokens[3] <= prompt_tokens
    whole = PromptPrefix((1, 2, 3), 2000, (8, 9)).chunk_tokens(prompt_tokens)
    assert list(whole.items()) == [*tokens.items(), (9, prompt_tokens)]


def test_the_tokens_of_token_ids_are_exact():
    assert PromptPrefix((1, 2), 300 * TOKEN_UNITS).chunk_tokens(300) == {1: 128, 2: 256}
