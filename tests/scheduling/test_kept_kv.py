"""Which idle blocks go first: those of the session that is expected latest, from the end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.kept_kv import MAX_SESSIONS, RELEASE_S, KeptBlocks, ToolGaps
from sluice.scheduling.latency.model import LinearLatency

READ, TEST, PERSON = 7, 8, 0


def learned(kept: KeptBlocks) -> KeptBlocks:
    """Reads take a tenth of a second, tests half a minute, people do not come back."""
    for _ in range(20):
        kept.gaps.observe(1, READ, 0.1)
        kept.gaps.observe(1, TEST, 30.0)
        kept.gaps.observe(1, PERSON, 1e9)
    return kept


def end(kept: KeptBlocks, session: int, tool: int | None, blocks: list[int], now_s: float) -> None:
    kept.end(session, 1, blocks, now_s)
    for block in reversed(blocks):
        kept.keep(block)
    if tool is not None:
        kept.called(session, tool)


def test_the_session_expected_latest_goes_first_from_the_end_of_its_prompt() -> None:
    kept = learned(KeptBlocks())
    end(kept, 1, READ, [10, 11], 0.0)
    end(kept, 2, TEST, [20, 21, 22], 0.0)
    end(kept, 3, PERSON, [30], 0.0)
    assert kept.by_worth(0.05) == [30, 22, 21, 20, 11, 10]
    assert kept.take(3, 0.05) == [30, 22, 21]
    assert len(kept) == 3 and 20 in kept and 21 not in kept
    # A read that has not come back after ten seconds is not coming soon.
    assert kept.take(3, 10.0) == [11, 10, 20]
    assert len(kept) == 0 and kept.take(1, 11.0) == []


def test_later_blocks_of_a_prompt_are_worth_more_where_attention_costs() -> None:
    for quadratic, goes in ((0.0, [11]), (1e-4, [20])):
        kept = learned(KeptBlocks())
        kept.price(LinearLatency(a=0.01, b=1e-4, c=0.0, d=quadratic), 16)
        end(kept, 2, TEST, [20], 0.0)
        # Expected a little later than the other.
        end(kept, 1, TEST, [10, 11], 1.0)
        assert kept.take(1, 1.0) == goes


def test_gaps_are_learned_by_tool_then_by_tenant_then_of_all() -> None:
    gaps = ToolGaps()
    unknown = gaps.rate(1, READ, 0.0)
    for _ in range(20):
        gaps.observe(1, READ, 0.1)
        gaps.observe(2, TEST, 30.0)
    assert gaps.rate(1, READ, 0.0) == pytest.approx(10.0, rel=0.3)
    assert gaps.rate(1, 99, 0.0) == gaps.rate(1, None, 0.0) == gaps.rate(1, READ, 0.0)
    assert gaps.rate(2, READ, 0.0) < 0.1, "another tenant's reads are its own"
    assert gaps.rate(2, READ, 0.0) < gaps.rate(3, READ, 0.0) < gaps.rate(1, READ, 0.0)
    assert unknown != gaps.rate(3, READ, 0.0)
    # The later, the likelier, until it is too late.
    assert gaps.rate(2, TEST, 0.0) < gaps.rate(2, TEST, 25.0) > gaps.rate(2, TEST, 50.0)
    assert gaps.rate(1, PERSON, 0.0) < gaps.rate(2, TEST, 0.0)
    for _ in range(10_000):
        gaps.observe(1, READ, 1.0)
    assert gaps.rate(1, READ, 0.0) == pytest.approx(1.0, rel=0.3), "the old are forgotten"


def test_a_session_learns_from_its_own_turns() -> None:
    kept = KeptBlocks()
    for turn in range(20):
        end(kept, 1, TEST, [10], 100.0 * turn)
        kept.begin(1, PERSON, 100.0 * turn + 30.0)
        assert kept.find(10)
    assert kept.gaps.rate(1, TEST, 0.0) == pytest.approx(1 / 30, rel=0.3)


def test_a_prompt_that_sessions_share_outlives_each_of_them() -> None:
    kept = learned(KeptBlocks())
    end(kept, 1, TEST, [1, 2, 10], 0.0)
    assert kept.find(2) and kept.find(1)
    end(kept, 2, TEST, [1, 2, 20], 1.0)
    assert set(kept.take(2, 1.5)) == {10, 20}
    assert kept.take(2, 1.5) == [2, 1]


def test_a_prompt_that_others_find_again_is_kept_as_well() -> None:
    kept = learned(KeptBlocks())
    assert not kept.keep(5), "the first time it goes by the time of its use"
    end(kept, 1, TEST, [10], 0.0)
    assert not kept.find(5)
    assert kept.keep(5)
    assert kept.take(1, 0.5) == [10]
    # A session that finds it has it.
    assert kept.find(5)
    kept.forget([5])
    assert not kept.find(6)
    end(kept, 2, TEST, [6], 1.0)
    assert kept.release(1.0 + RELEASE_S + 0.1) == [6]


def test_a_minute_without_a_turn_releases_and_the_oldest_go_beyond_a_limit() -> None:
    kept = learned(KeptBlocks())
    end(kept, 1, TEST, [10, 11], 0.0)
    end(kept, 2, TEST, [20], 30.0)
    end(kept, 3, TEST, [30], 30.0)
    kept.begin(3, TEST, 31.0)
    assert kept.release(RELEASE_S) == []
    assert kept.release(RELEASE_S + 1.0) == [11, 10]
    assert not kept.keep(10)
    assert kept.release(RELEASE_S + 31.0) == [20], "the third waits for its turn"
    for session in range(4, MAX_SESSIONS + 10):
        end(kept, session, TEST, [1000 + session], 100.0)
    released = kept.release(100.0)
    assert released[0] == 30 and len(released) == 7
    assert len(kept.clear()) == MAX_SESSIONS and len(kept) == 0


def test_a_session_that_ends_keeps_nothing() -> None:
    kept = learned(KeptBlocks())
    end(kept, 1, TEST, [1, 10, 11], 0.0)
    assert kept.find(1)
    end(kept, 2, TEST, [1, 20], 0.0)
    kept.begin(1, TEST, 1.0)
    assert kept.find(1) and kept.find(10)
    kept.end(1, 1, [1, 10, 12], 2.0)
    assert kept.finish(1, [1, 10, 12]) == [11], "the turn's own are in use"
    assert [kept.keep(block) for block in (12, 10, 1)] == [False, False, True]
    assert set(kept) == {1, 20}, "the first is another's, too"
    # Not while another turn of it runs.
    kept.begin(2, TEST, 3.0)
    kept.begin(2, TEST, 3.0)
    kept.end(2, 1, [], 4.0)
    assert kept.finish(2, []) == [] and 20 in kept
    assert kept.finish(3, []) == []


blocks = st.lists(st.integers(1, 30), unique=True, max_size=8)
events = st.tuples(st.integers(0, 5), st.integers(1, 4), blocks, st.floats(0, 40))


@given(st.lists(events, max_size=40))
def test_each_block_is_kept_once_and_comes_back_once(
    history: list[tuple[int, int, list[int], float]],
) -> None:
    """Against a pool that knows which blocks are in use, idle in its own queue, or kept."""
    kept, now_s = KeptBlocks(), 0.0
    idle, mine = set[int](), set[int]()
    for kind, session, some, later_s in history:
        now_s += later_s
        if kind == 0:
            kept.begin(session, READ, now_s)
        elif kind in (1, 5):
            # A request of a session, or of none, finds or takes blocks, and releases them.
            held = []
            for block in some:
                if block in idle or block in mine:
                    assert kept.find(block) == (block in mine)
                    held.append(block)
                    idle.discard(block)
                    mine.discard(block)
                else:
                    held.append(block)
            if session > 1:
                kept.end(session, 1, held, now_s)
            if kind == 5:
                over = kept.finish(session, held)
                mine -= set(over)
                idle |= set(over)
            for block in reversed(held):
                (mine if kept.keep(block) else idle).add(block)
        elif kind == 2:
            taken = kept.take(len(some), now_s)
            assert len(taken) == min(len(some), len(mine))
            mine -= set(taken)
        elif kind == 3:
            released = kept.release(now_s)
            mine -= set(released)
            idle |= set(released)
        elif kept.used:
            kept.called(session, TEST)
        assert Counter(kept) == Counter(mine) == Counter(kept.by_worth(now_s))
        assert len(kept) == len(mine) and all(block in kept for block in mine)
        assert not any(block in kept for block in idle)
