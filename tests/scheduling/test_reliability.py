"""Forecasts of the first token hold what they say, and the curve tells when they do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.placement.reliability import (
    CHECKED,
    FEW,
    QUANTILES,
    WINDOW,
    Curve,
    Forecast,
    Reliability,
)

SHARES = pytest.approx(QUANTILES, abs=0.05)


def feed(known: Reliability, replica: str, predicted_s: float, ratio: float) -> Forecast:
    """One promise: forecast, then observed."""
    forecast = known.forecast(replica, predicted_s)
    known.observe(replica, forecast, predicted_s * ratio)
    return forecast


@pytest.mark.parametrize(("middle", "spread"), [(0.6, 0.05), (1.0, 0.3), (3.0, 1.0)])
def test_half_lie_below_the_median_and_the_curve_on_the_diagonal(
    middle: float, spread: float
) -> None:
    rng, known = np.random.default_rng(7), Reliability()
    for ratio in middle * rng.lognormal(0.0, spread, 2_000):
        feed(known, "a", 0.5, float(ratio))
    assert known.forecast("a", 0.5).median_s == pytest.approx(0.5 * middle, rel=0.25 * spread)
    assert len(known.curve("a")) == len(known.curve()) == CHECKED
    assert known.curve("a").shares == SHARES and known.curve().shares == SHARES


def test_replicas_and_sizes_have_ratios_of_their_own() -> None:
    """One replica is twice as slow as predicted; and 20 ms on top are much of a short time only."""
    rng, known = np.random.default_rng(7), Reliability()
    for _ in range(2_000):
        for name, pace in (("sound", 1.0), ("slow", 2.0)):
            predicted_s = float(rng.choice((0.02, 2.0)))
            observed_s = predicted_s * pace * float(rng.normal(1.0, 0.05)) + 0.02
            known.observe(name, known.forecast(name, predicted_s), observed_s)
    medians = {
        (name, predicted_s): known.forecast(name, predicted_s).median_s
        for name in ("sound", "slow")
        for predicted_s in (0.02, 2.0)
    }
    expected = {
        ("sound", 0.02): 0.04,
        ("slow", 0.02): 0.06,
        ("sound", 2.0): 2.0,
        ("slow", 2.0): 4.0,
    }
    assert medians == pytest.approx(expected, rel=0.03)
    for name in ("sound", "slow", None):
        assert known.curve(name).shares == SHARES


def test_a_replica_of_which_little_is_known_takes_the_fleets_ratios() -> None:
    known = Reliability()
    for _ in range(FEW - 1):
        feed(known, "a", 1.0, 2.0)
    assert known.forecast("a", 1.0).ratios is None and known.forecast("a", 1.0).median_s == 1.0
    assert known.curve().shares == (), "nothing was said, so nothing can be judged"
    feed(known, "a", 1.0, 2.0)
    assert known.forecast("new", 1.0).median_s == known.forecast("a", 1.0).median_s == 2.0
    assert known.forecast("a", 100.0).median_s == 100.0, "of another size nothing is known"
    for _ in range(FEW):
        feed(known, "new", 1.0, 0.5)
    assert known.forecast("new", 1.0).median_s == 0.5 and known.forecast("a", 1.0).median_s == 2.0


def test_what_long_promises_take_says_nothing_of_short_ones() -> None:
    """An engine that schedules by deadlines uses the time that it has."""
    known = Reliability()
    for _ in range(2 * FEW):
        for bound_s, observed_s in ((30.0, 2.3), (0.9, 0.4)):
            known.observe("a", known.forecast("a", 0.3, bound_s), observed_s)
    assert known.forecast("a", 0.3, 0.9).median_s == pytest.approx(0.4)
    assert known.forecast("a", 0.3, 30.0).median_s == pytest.approx(2.3)
    # Of the same size, but a little tighter than what the others took.
    for _ in range(WINDOW):
        known.observe("a", known.forecast("a", 0.3, 1.0), 0.95)
    assert known.forecast("a", 0.3, 0.9).median_s == pytest.approx(0.9)
    assert known.forecast("a", 0.3).median_s == 0.3, "nothing was promised"


def test_the_median_follows_a_change_and_the_curve_shows_that_it_came() -> None:
    known = Reliability()
    for _ in range(2 * WINDOW):
        feed(known, "a", 1.0, 1.0)
    for _ in range(WINDOW // 2):
        assert feed(known, "a", 1.0, 1.5).median_s == 1.0
    assert known.forecast("a", 1.0).median_s == 1.5
    assert known.curve("a").shares[4] < 0.8, "of equal ratios all had kept the median"


def test_a_forecast_is_judged_as_it_was_made() -> None:
    known = Reliability()
    for _ in range(FEW):
        feed(known, "a", 1.0, 1.0)
    told = known.forecast("a", 1.0)
    for _ in range(WINDOW):
        feed(known, "a", 1.0, 9.0)
    before = known.curve("a").shares
    known.observe("a", told, 5.0)
    assert known.curve("a").shares < before, "late by what it was told, early by what is known now"


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.floats(0.0, 1e3) | st.just(float("inf")),
            st.floats(-1.0, 1e3),
            st.floats(1e-6, 1e3) | st.just(float("inf")),
        ),
        max_size=400,
    )
)
def test_any_history_keeps_quantiles_in_order_and_memory_bounded(
    history: list[tuple[str, float, float, float]],
) -> None:
    known = Reliability()
    for name, predicted_s, observed_s, bound_s in history:
        forecast = known.forecast(name, predicted_s, bound_s)
        assert forecast.median_s <= bound_s
        if forecast.ratios is not None:
            assert list(forecast.ratios) == sorted(forecast.ratios) and forecast.ratios[0] >= 0.0
        known.observe(name, forecast, observed_s)
    shares = known.curve().shares
    assert list(shares) == sorted(shares) and all(0.0 <= share <= 1.0 for share in shares)


def test_ratios_are_the_latest_ones_only() -> None:
    """Against the same by hand, over ties and over more than fit."""
    rng, known = np.random.default_rng(3), Reliability()
    ratios = rng.integers(1, 40, 3 * WINDOW).astype(float).tolist()
    for count, ratio in enumerate(ratios):
        latest = sorted(ratios[max(0, count - WINDOW) : count])
        found = known.forecast("a", 1.0).ratios
        assert (found is None) == (len(latest) < FEW)
        if found is not None:
            assert found[4] == latest[-(-(len(latest) + 1) // 2) - 1]
        feed(known, "a", 1.0, ratio)


def test_a_curve_forgets() -> None:
    curve = Curve()
    for place in (0, len(QUANTILES)):
        for _ in range(CHECKED):
            curve.note(place)
    assert (len(curve), curve.shares) == (CHECKED, (0.0,) * len(QUANTILES))
