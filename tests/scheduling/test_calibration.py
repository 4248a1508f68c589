"""Margins: that the level is kept whatever the scores do, and that they go again."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.placement.calibration import (
    MAX_APART,
    MAX_MARGIN,
    MEMORY,
    MEMORY_S,
    PRIOR,
    Calibration,
)
from sluice.scheduling.request.objective import SLO, TPOTAnchor

LEVEL = 0.99
SLOW = SLO(ttft_s=1.0, tpot_s=0.1)
EARLY = SLO(ttft_s=0.8, tpot_s=0.08)
"""The same with a margin of 0.2."""


def ttft_takes(
    calibration: Calibration,
    stated_s: float,
    planned_s: float,
    observed_s: float,
    now_s: float,
    replica_id: str = "",
) -> None:
    """A promise of a TTFT, and how it turned out."""
    calibration.promised("only", SLO(ttft_s=stated_s), SLO(ttft_s=planned_s), replica_id)
    calibration.ended("only", observed_s, None, None, now_s)


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
        ttft_takes(calibration, stated_s, planned_s, observed_s, 0.1 * number)
    return kept, margins


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.release) for s in (1, 2))])
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
    assert (margins == PRIOR).all()
    assert kept.sum() == 99


def test_what_is_known_takes_the_place_of_what_is_supposed() -> None:
    rng = np.random.default_rng(5)
    early, _ = kept_of(rng.lognormal(0.0, 0.015, 100))
    assert early.mean() >= LEVEL  # from the first promise on
    _, margins = kept_of(np.full(MEMORY, 1.01))
    assert margins[0] == PRIOR
    assert margins[-1] == pytest.approx(0.01, abs=0.001)


def test_at_a_low_level_nothing_is_supposed() -> None:
    assert Calibration(0.9).margin("tpot", 0.1, 0.0) == 0.0


def test_how_late_a_promise_becomes_does_not_matter() -> None:
    calibration = Calibration(LEVEL)
    margins = []
    for _ in range(6):
        planned = calibration.plan(SLO(ttft_s=1.0), 0.0)
        margins.append(calibration.margin("ttft", 1.0, 0.0))
        # All of them were made before the first of them was late.
        for key in range(20):
            calibration.promised(key, SLO(ttft_s=1.0), planned)
        for key in range(20):
            calibration.ended(key, 50.0, None, None, 0.0)
    assert margins == pytest.approx([PRIOR, 0.08, 0.16, 0.32, MAX_MARGIN, MAX_MARGIN])


def test_what_is_old_counts_no_more() -> None:
    calibration = Calibration(LEVEL)
    for _ in range(10):
        calibration.promised("p", SLOW, EARLY)
        calibration.ended("p", None, 0.12, None, 0.0)
    assert calibration.margin("tpot", 0.1, 0.0) == pytest.approx(1 / 3)
    # Also where nothing new comes, because nothing can be promised.
    assert calibration.margin("tpot", 0.1, MEMORY_S + 1.0) == PRIOR


def test_each_objective_and_length_has_its_own() -> None:
    calibration = Calibration(LEVEL)
    for _ in range(10):
        ttft_takes(calibration, 0.5, 0.4, 0.6, 0.0)
    assert calibration.margin("ttft", 0.5, 0.0) > PRIOR
    assert calibration.margin("ttft", 0.6, 0.0) > PRIOR  # about as long
    assert calibration.margin("ttft", 8.0, 0.0) == PRIOR
    assert calibration.margin("e2e", 0.5, 0.0) == PRIOR
    assert calibration.largest(0.0) == {"ttft": pytest.approx(1 / 3), "tpot": PRIOR, "e2e": PRIOR}
    assert set(calibration.largest(MEMORY_S + 1.0).values()) == {PRIOR}


def test_a_promise_that_is_missed_teaches_before_it_ends() -> None:
    calibration = Calibration(LEVEL)
    for key in range(8):
        calibration.promised(key, SLOW, EARLY)
        calibration.behind(key, 1.25, 0.2, now_s=1.0)
        calibration.behind(key, 1.25, 0.125, now_s=1.5)  # the first token is told of twice
    assert calibration.margin("ttft", 1.0, 2.0) == pytest.approx(0.36)
    assert calibration.margin("tpot", 0.1, 2.0) == pytest.approx(0.36)
    for key in range(8):
        calibration.ended(key, 1.25, 0.08, None, now_s=3.0)
    # The paces recovered, the first tokens did not, and each of them counts once.
    assert calibration.margin("tpot", 0.1, 4.0) == PRIOR
    assert calibration.margin("ttft", 1.0, 4.0) == pytest.approx(0.36)


def test_what_no_router_tells_of_any_more_counts_for_a_time_only() -> None:
    calibration = Calibration(LEVEL)
    for key in range(8):
        calibration.promised(key, SLOW, EARLY)
        calibration.behind(key, None, 0.2, now_s=0.0)
    calibration.behind("unknown", 9.0, 9.0, now_s=0.0)
    assert calibration.margin("tpot", 0.1, 0.0) == pytest.approx(0.4)
    assert calibration.margin("tpot", 0.1, MEMORY_S + 1.0) == PRIOR


@pytest.mark.parametrize("end", ["dropped", "promised again"])
def test_a_promise_that_goes_elsewhere_is_no_more_behind(end: str) -> None:
    calibration = Calibration(LEVEL)
    for key in range(8):
        calibration.promised(key, SLOW, SLOW)
        calibration.behind(key, None, 0.2, now_s=0.0)
        if end == "dropped":
            calibration.dropped(key)
        else:
            calibration.promised(key, SLOW, SLOW)
    assert calibration.margin("tpot", 0.1, 1.0) == PRIOR


@given(
    st.lists(
        st.tuples(st.floats(0.001, 1e3), st.floats(0.0, 0.5), st.floats(0.0, 1e6) | st.just(inf)),
        max_size=300,
    )
)
def test_margins_are_bounded_whatever_comes(ends: list[tuple[float, float, float]]) -> None:
    calibration = Calibration(LEVEL)
    for number, (stated_s, margin, observed_s) in enumerate(ends):
        ttft_takes(calibration, stated_s, stated_s * (1 - margin), observed_s, float(number))
        assert 0.0 <= calibration.margin("ttft", stated_s, 0.0) <= MAX_MARGIN


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, float("nan")])
def test_an_odd_level_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Calibration(level)


class Fleet:
    """Promises of a second that take what is planned times the replica's factor, and noise."""

    def __init__(self, **factors: float) -> None:
        self.calibration = Calibration(LEVEL)
        self.factors = factors
        self.now_s = 0.0
        self._rng = np.random.default_rng(3)

    def run(self, rounds: int) -> dict[str, list[bool]]:
        """So many promises of each: which were kept."""
        kept: dict[str, list[bool]] = {name: [] for name in self.factors}
        for _ in range(rounds):
            for name, factor in self.factors.items():
                self.now_s += 0.1
                stated = SLO(ttft_s=1.0)
                planned = self.calibration.plan(stated, self.now_s, name)
                assert planned.ttft_s is not None
                took_s = planned.ttft_s * factor * self._rng.lognormal(0.0, 0.01)
                ttft_takes(self.calibration, 1.0, planned.ttft_s, took_s, self.now_s, name)
                kept[name].append(took_s <= 1.0)
        return kept

    def margin(self, name: str = "") -> float:
        return self.calibration.margin("ttft", 1.0, self.now_s, name)


def test_a_replica_that_misses_more_than_the_others_has_a_margin_of_its_own() -> None:
    fleet = Fleet(a=1.0, b=1.0, c=1.3)
    fleet.run(20)
    assert list(fleet.calibration.apart) == ["c"]
    kept = fleet.run(200)
    assert fleet.margin("c") > 0.2
    assert fleet.margin("a") == fleet.margin("b") == fleet.margin() <= PRIOR
    assert all(np.mean(each) >= LEVEL - 0.01 for each in kept.values())
    # What an operator sees is the largest.
    assert fleet.calibration.largest(fleet.now_s)["ttft"] == fleet.margin("c")


def test_it_joins_the_others_when_it_is_as_they_are() -> None:
    fleet = Fleet(a=1.0, b=1.0, c=1.3)
    fleet.run(50)
    fleet.factors["c"] = 1.0
    fleet.run(round(MEMORY_S / 0.3) + 10)
    assert not list(fleet.calibration.apart)


def test_where_all_are_slow_nobody_is_set_apart() -> None:
    fleet = Fleet(a=1.3, b=1.3, c=1.3)
    fleet.run(200)
    assert not list(fleet.calibration.apart)
    assert fleet.margin() > 0.2


def test_places_for_those_set_apart_are_bounded_and_come_free() -> None:
    names = [f"r{number}" for number in range(MAX_APART + 2)]
    fleet = Fleet(**dict.fromkeys(names, 1.0), z=1.0)
    for name in names:
        fleet.factors[name] = 1.5
        fleet.run(40)
    assert set(fleet.calibration.apart) == set(names[:MAX_APART])
    # Those that are heard of no more make place.
    for name in names[:MAX_APART]:
        del fleet.factors[name]
    fleet.factors[names[-2]] = fleet.factors[names[-1]] = 1.0
    fleet.run(round(MEMORY_S / 0.3))
    fleet.factors["z"] = 1.5
    fleet.run(40)
    assert list(fleet.calibration.apart) == ["z"]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefghijkl"), st.floats(0.0, 3.0), st.floats(0.0, 30.0)),
        max_size=400,
    )
)
def test_whatever_replicas_do_few_are_set_apart(ends: list[tuple[str, float, float]]) -> None:
    calibration, now_s = Calibration(LEVEL), 0.0
    for replica_id, took_s, later_s in ends:
        now_s += later_s
        planned = calibration.plan(SLO(ttft_s=1.0), now_s, replica_id).ttft_s
        assert planned is not None and 1.0 - MAX_MARGIN - 1e-9 <= planned <= 1.0
        ttft_takes(calibration, 1.0, planned, took_s, now_s, replica_id)
        assert len(list(calibration.apart)) <= MAX_APART


def test_each_anchor_of_tpot_has_a_margin_of_its_own() -> None:
    calibration = Calibration(LEVEL)
    slos = {anchor: SLO(tpot_s=0.1, tpot_anchor=anchor) for anchor in TPOTAnchor}
    unseen = calibration.plan(SLO(tpot_s=0.1), 0.0).tpot_s
    for number in range(20):
        for anchor, slo in slos.items():
            planned, key = calibration.plan(slo, 1.0 * number), (anchor, number)
            calibration.promised(key, slo, planned)
            # The worst window is always 20 % above the plan, the other two are at it.
            over = 1.2 if anchor is TPOTAnchor.WINDOW else 1.0
            calibration.ended(key, None, over * (planned.tpot_s or 0.0), None, 1.0 * number)
    planned_s = {anchor: calibration.plan(slo, 20.0).tpot_s for anchor, slo in slos.items()}
    assert planned_s.pop(TPOTAnchor.WINDOW) == pytest.approx(0.1 / 1.2)
    assert set(planned_s.values()) == {unseen}
