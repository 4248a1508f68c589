from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.connection import ClockOffset

_ways_s = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60)


@given(_ways_s, st.floats(-1e6, 1e6), st.floats(0.001, 20.0))
def test_the_quickest_recent_message_tells_how_the_clocks_differ(
    ways_s: list[float], skew_s: float, every_s: float
) -> None:
    """Whatever the skew: what is said of a message is how much longer than the quickest it took,
    of all in the last window, and perhaps of some in the two before."""
    offset, window_s = ClockOffset(window_s=30.0), 30.0
    heard: list[tuple[float, float]] = []
    now_s = 0.0
    for way_s in ways_s:
        now_s += every_s
        heard.append((now_s, way_s))
        longer_s = offset.observe(now_s - way_s - skew_s, now_s)
        least_s = way_s - longer_s
        recent = [way for at, way in heard if now_s - at <= 3 * window_s]
        latest = [way for at, way in heard if now_s - at < window_s]
        assert min(recent) - 1e-6 <= least_s <= min(latest) + 1e-6
        assert offset.seconds == pytest.approx(skew_s + least_s, abs=1e-6)
        assert longer_s >= 0.0


def test_a_clock_that_stood_still_is_followed() -> None:
    offset = ClockOffset(window_s=30.0)
    assert offset.observe(100.0, 100.0) == 0.0
    # The sender's machine was moved, and its clock was not told of those 7 s.
    for now_s in (101.0, 115.0, 129.0, 131.0, 159.0):
        assert offset.observe(now_s - 7.0, now_s) == 7.0
    assert offset.observe(165.0 - 7.0, 165.0) == 0.0
    assert offset.seconds == 7.0


def test_one_that_was_silent_for_long_is_judged_anew() -> None:
    offset = ClockOffset(window_s=30.0)
    offset.observe(100.0, 100.0)
    assert offset.observe(1_000.0, 1_005.0) == 0.0
    assert offset.seconds == 5.0
