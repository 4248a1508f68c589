"""When tool loops began, and how much of that is remembered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.request import stages
from sluice.scheduling.request.stages import KEPT_S, LoopStarts


def test_a_loop_begins_with_the_earliest_of_its_turns() -> None:
    starts = LoopStarts()
    assert starts.started_s(1, 10.0, 10.0) == 10.0
    assert starts.started_s(1, 50.0, 50.0) == 10.0
    assert starts.started_s(1, 4.0, 51.0) == 4.0, "another router saw its first turn"
    assert starts.started_s(2, 50.0, 52.0) == 50.0


def test_a_loop_without_a_turn_for_a_day_is_forgotten() -> None:
    starts = LoopStarts()
    for at_s in (0.0, 0.9 * KEPT_S, 1.8 * KEPT_S):
        assert starts.started_s(1, at_s, at_s) == 0.0
    later_s = 1.8 * KEPT_S + KEPT_S + 1.0
    assert starts.started_s(1, later_s, later_s) == later_s
    assert len(starts) == 1


@given(st.lists(st.integers(0, 9), max_size=60))
def test_those_with_the_latest_turns_are_remembered(turns: list[int]) -> None:
    most, starts = 3, LoopStarts()
    first: dict[int, float] = {}
    latest: list[int] = []
    whole, stages.MOST_LOOPS = stages.MOST_LOOPS, most  # type: ignore[misc]
    try:
        for at, key in enumerate(turns):
            remembered = key in latest[-most:]
            first[key] = first[key] if remembered else float(at)
            assert starts.started_s(key, float(at), float(at)) == first[key]
            latest = [each for each in latest if each != key] + [key]
            assert len(starts) <= most
    finally:
        stages.MOST_LOOPS = whole  # type: ignore[misc]
