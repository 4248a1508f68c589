"""How the figures of ``waits`` are made of its measurements; test_real_engine runs its engines."""

from __future__ import annotations

from tests.replica.preemption.waits import spread


def test_overheads_are_told_with_the_interval_of_their_median():
    """Of 10 pairs, the sign test leaves out one at each end: 2 * 11 / 1024 is below 5 %, and
    2 * 56 / 1024 above."""
    ratios = iter([1.0, 1.0, 1.5, 0.9, 1.2, 1.1, 1.0, 1.3, 0.8, 1.4, 1.25, 0.95])
    found = spread(10, lambda: next(ratios), lambda: 1.0)  # the first one warms up
    assert (found["median"], found["interval"]) == (0.15, [-0.1, 0.4])
    assert (found["pairs"], found["one_ms"], found["other_ms"]) == (10, 1150.0, 1000.0)


def test_every_second_pair_is_the_other_way_round():
    calls = []
    spread(6, lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 1.0)
    assert "".join(calls) == "ab" + 3 * "abba"
