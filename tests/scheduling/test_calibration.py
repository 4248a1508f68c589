"""Margins: that the level is kept whatever the scores do, and that they go again."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.calibration import MEMORY, MEMORY_S, MOST_MARGIN, Calibration

LEVEL = 0.99


def kept_of(factors: np.ndarray, stated_s: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Promises one after another, each observed at its plan times a factor: whether each was kept,
    and its margin."""
    calibration = Calibration(LEVEL)
    kept, margins = np.zeros(len(factors), bool), np.zeros(len(factors))
    for number, factor in enumerate(factors):
        margins[number] = calibration.margin("ttft", stated_s, 0.1 * number)
        planned_s = stated_s * (1.0 - margins[number])
        observed_s = planned_s * factor
        kept[number] = observed_s <= stated_s
        calibration.observe("ttft", stated_s, planned_s, observed_s, now_s=0.1 * number)
    return kept, margins


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.02, 0.1, 0.25])
def test_the_level_is_kept_where_every_promise_comes_around_its_plan(
    seed: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    kept, margins = kept_of(rng.lognormal(0.0, spread, 5_000))
    assert kept[MEMORY:].mean() >= LEVEL - 0.01
    # And not by much more than it takes: the 99th percentile of the factors.
    needed = 1.0 - np.exp(-2.326 * spread)
    assert np.median(margins[MEMORY:]) <= 1.5 * needed


def test_an_engine_that_becomes_slower_is_followed_both_ways() -> None:
    rng = np.random.default_rng(7)
    factors = rng.lognormal(0.0, 0.05, 6_000)
    factors[2_000:4_000] *= 1.3
    kept, margins = kept_of(factors)
    # All but the first few late ones are kept again, and the margin goes when it is needed no more.
    assert kept[2_000:4_000].mean() >= LEVEL - 0.01
    assert kept[2_010:4_000].mean() >= LEVEL - 0.005
    assert margins[3_900] > 0.25
    assert margins[-1] < 0.2


def test_an_outlier_among_early_promises_changes_nothing() -> None:
    factors = np.full(100, 0.5)
    factors[3] = 50.0
    kept, margins = kept_of(factors)
    assert not margins.any()
    assert kept.sum() == 99


def test_what_is_old_counts_no_more() -> None:
    calibration = Calibration(LEVEL)
    for _ in range(10):
        calibration.observe("tpot", 0.1, 0.1, 0.12, now_s=0.0)
    assert calibration.margin("tpot", 0.1, 0.0) == pytest.approx(1 / 6)
    # Also where nothing new comes, because nothing can be promised.
    assert calibration.margin("tpot", 0.1, MEMORY_S + 1.0) == 0.0


def test_each_objective_and_length_has_its_own() -> None:
    calibration = Calibration(LEVEL)
    for _ in range(10):
        calibration.observe("ttft", 0.5, 0.5, 0.6, now_s=0.0)
    assert calibration.margin("ttft", 0.5, 0.0) > 0.0
    assert calibration.margin("ttft", 0.6, 0.0) > 0.0  # about as long
    assert calibration.margin("ttft", 8.0, 0.0) == 0.0
    assert calibration.margin("e2e", 0.5, 0.0) == 0.0
    assert calibration.largest(0.0) == {"ttft": pytest.approx(1 / 6), "tpot": 0.0, "e2e": 0.0}
    assert not any(calibration.largest(MEMORY_S + 1.0).values())


@given(
    st.lists(
        st.tuples(st.floats(0.001, 1e3), st.floats(0.0, 0.5), st.floats(0.0, 1e6) | st.just(inf)),
        max_size=300,
    )
)
def test_margins_are_bounded_whatever_comes(ends: list[tuple[float, float, float]]) -> None:
    calibration = Calibration(LEVEL)
    for number, (stated_s, margin, observed_s) in enumerate(ends):
        calibration.observe("ttft", stated_s, stated_s * (1 - margin), observed_s, float(number))
        assert 0.0 <= calibration.margin("ttft", stated_s, 0.0) <= MOST_MARGIN


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, float("nan")])
def test_an_odd_level_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Calibration(level)
