"""The leaky bucket: what is given back never forgives what others have put in."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.tenancy.leaky_bucket import Bucket


class Step(NamedTuple):
    """Time that passes, then what is set aside and how much of it is used, and which of those
    that are open ends."""

    pause_s: int
    tokens: int
    used: int
    ends: int


steps = st.lists(
    st.builds(
        lambda pause_s, tokens, used, ends: Step(pause_s, tokens, min(used, tokens), ends),
        st.integers(0, 6),
        st.integers(0, 20),
        st.integers(0, 20),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(steps)
def test_it_is_never_emptier_than_with_what_was_used_alone(given_steps: list[Step]) -> None:
    bucket, without = Bucket(0), Bucket(0)
    opened: list[tuple[int, Step]] = []
    now_s = 0.0
    for step in given_steps:
        now_s += step.pause_s
        for each in (bucket, without):
            each.drain(now_s, 1)
        bucket.add(step.tokens)
        without.add(step.used)
        opened.append((bucket.mark(), step))
        if step.ends < len(opened):
            mark, ended = opened.pop(step.ends)
            bucket.undo(mark, ended.tokens - ended.used)
        assert bucket.level >= without.level
        assert len(bucket._lows._levels) <= 2 * len(opened) + 9
    for mark, ended in opened:
        bucket.undo(mark, ended.tokens - ended.used)
    assert bucket.level == pytest.approx(without.level)
    assert bucket._lows._levels == []


@given(st.integers(0, 20), st.integers(0, 20), steps)
def test_all_that_makes_a_difference_comes_back(
    before: int, tokens: int, given_steps: list[Step]
) -> None:
    bucket, without = Bucket(0), Bucket(0)
    for each in (bucket, without):
        each.drain(0, 1)
        each.add(before)
    bucket.add(tokens)
    mark, now_s = bucket.mark(), 0.0
    for step in given_steps:
        now_s += step.pause_s
        for each in (bucket, without):
            each.drain(now_s, 1)
            each.add(step.tokens)
    assert 0 <= bucket.undo(mark, tokens) <= tokens
    assert bucket.level == pytest.approx(without.level)
