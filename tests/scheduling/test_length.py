"""Predicted output lengths: what is learned, what is stated, and what is left of an output."""

import random
from math import inf, isnan, nan, sqrt
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.placement.output_lengths import (
    MAX_TASK_NAME,
    MAX_TASKS,
    GaussianLength,
    LengthDistribution,
    LengthRange,
    OracleLengths,
    TaskLengths,
)

gaussians = st.builds(
    GaussianLength,
    mean=st.floats(1, 5_000),
    deviation=st.one_of(st.just(0.0), st.floats(0.01, 2_000)),
)


@st.composite
def ranges(draw: st.DrawFn) -> LengthRange:
    low = draw(st.integers(1, 5_000))
    return LengthRange(low, low + draw(st.integers(0, 5_000)))


distributions = st.one_of(gaussians, ranges())
shares = st.floats(0.01, 0.99)


@given(distribution=distributions, emitted=st.integers(0, 50_000))
def test_an_output_that_goes_on_has_something_left(
    distribution: LengthDistribution, emitted: int
) -> None:
    expected = distribution.given(emitted)
    assert emitted + 1 <= expected < inf
    assert distribution.quantile(0.5, emitted) >= emitted + 1


@given(distribution=distributions, emitted=st.integers(0, 10_000), more=st.integers(0, 1_000))
def test_a_longer_output_is_expected_to_end_no_earlier(
    distribution: LengthDistribution, emitted: int, more: int
) -> None:
    later = distribution.given(emitted + more)
    assert later >= distribution.given(emitted) * (1 - 1e-3)
    assert later >= distribution.mean * (1 - 1e-9)


@given(
    distribution=distributions, share=shares, more=st.floats(0, 0.5), emitted=st.integers(0, 9_000)
)
def test_more_reserved_holds_more_outputs(
    distribution: LengthDistribution, share: float, more: float, emitted: int
) -> None:
    wider = min(0.99, share + more)
    narrow = distribution.quantile(share, emitted)
    assert distribution.quantile(wider, emitted) >= narrow * (1 - 1e-9)


def test_the_gaussian_tail_against_samples() -> None:
    rng = random.Random(1)
    lengths = [rng.gauss(300, 80) for _ in range(200_000)]
    gaussian = GaussianLength(300, 80)
    for emitted in (100, 300, 400, 500):
        tail = sorted(length for length in lengths if length > emitted)
        assert gaussian.given(emitted) == pytest.approx(fmean(tail), rel=0.01)
        for share in (0.5, 0.9):
            expected = tail[int(share * len(tail))]
            assert gaussian.quantile(share, emitted) == pytest.approx(expected, rel=0.01)


def test_the_gaussian_tail_has_no_seam() -> None:
    # The series takes over at eight deviations.
    gaussian = GaussianLength(100, 10)
    assert gaussian.given(181) - 181 == pytest.approx(gaussian.given(180) - 180, rel=0.02)
    step = gaussian.quantile(0.9, 181) - gaussian.quantile(0.9, 180)
    assert 0.5 < step < 1.5


def test_an_output_without_spread_ends_at_its_mean_or_one_later() -> None:
    fixed = GaussianLength(50, 0)
    assert [fixed.given(n) for n in (0, 20, 49, 50, 80)] == [50, 50, 50, 51, 81]
    assert fixed.quantile(0.9, 80) == 81
    assert 1 <= GaussianLength(50, 5).quantile(1e-30) < 20


def test_a_range_by_hand() -> None:
    stated = LengthRange(10, 20)
    assert stated.mean == 15
    assert [stated.given(n) for n in (0, 9, 13, 19, 20, 30)] == [15, 15, 17, 20, 21, 31]
    # Of eleven lengths, nine are up to 18 and ten up to 19.
    assert stated.quantile(0.85) == 19
    assert stated.quantile(0.99) == 20
    assert LengthRange(1, 10).quantile(0.5) == 5
    assert stated.quantile(1e-30) == 10
    assert stated.quantile(0.5, 18) == 19


@given(lengths=st.lists(st.integers(1, 9_999), min_size=1, max_size=150))
def test_the_learned_moments_are_the_observed_ones(lengths: list[int]) -> None:
    predictor = TaskLengths(memory=200)
    for length in lengths:
        predictor.observe("chat", length)
    learned = predictor.distribution("chat")
    assert isinstance(learned, GaussianLength)
    assert learned.mean == pytest.approx(fmean(lengths))
    assert learned.deviation == pytest.approx(pstdev(lengths), abs=1e-6 * max(lengths))
    assert predictor.predict("chat", 77) == learned.mean
    assert isnan(predictor.predict("code", 77)), "nothing is known of another class"


def test_old_lengths_are_forgotten() -> None:
    predictor = TaskLengths(memory=50)
    rng = random.Random(2)
    for mean in (100, 1_000):
        for _ in range(500):
            predictor.observe("chat", round(rng.gauss(mean, mean / 10)))
    learned = predictor.distribution("chat")
    assert isinstance(learned, GaussianLength)
    assert learned.mean == pytest.approx(1_000, rel=0.05)
    assert learned.deviation == pytest.approx(100, rel=0.5)


def test_what_the_user_states_is_kept() -> None:
    predictor = TaskLengths({"code": LengthRange(10, 30)})
    predictor.observe("code", 5_000)
    assert predictor.predict("code") == 20
    assert predictor.distribution("code") == LengthRange(10, 30)


def test_the_classes_are_bounded() -> None:
    predictor = TaskLengths(max_tasks=3)
    for task in ("a", "b", "c", "a", "d"):
        predictor.observe(task, 10)
    known = [task for task in "abcd" if not isnan(predictor.predict(task))]
    assert known == ["a", "c", "d"], "b completed longest ago"
    endless = TaskLengths()
    for index in range(3 * MAX_TASKS):
        endless.observe(f"task {index}", 10)
    assert sum(not isnan(endless.predict(f"task {i}")) for i in range(3 * MAX_TASKS)) == MAX_TASKS


def test_what_teaches_nothing() -> None:
    predictor = TaskLengths()
    predictor.observe("aborted", 0)
    predictor.observe("x" * (MAX_TASK_NAME + 1), 10)
    assert isnan(predictor.predict("aborted"))
    assert isnan(predictor.predict("x" * (MAX_TASK_NAME + 1)))


@pytest.mark.parametrize("error", [0.0, 0.05, 0.5])
def test_the_oracle_errs_as_much_as_it_should(error: float) -> None:
    rng = random.Random(3)
    lengths = [rng.randint(100, 2_000) for _ in range(2_000)]
    oracle, again = (OracleLengths(lengths, error, seed=4) for _ in range(2))
    predicted = [oracle.predict("chat", 10) for _ in lengths]
    assert predicted == [again.predict("chat", 10) for _ in lengths]
    errors = [p / real - 1 for p, real in zip(predicted, lengths, strict=True)]
    assert max(map(abs, errors)) <= error + 0.005 + 1e-9, "and a rounded token"
    assert fmean(errors) == pytest.approx(0, abs=0.02)
    assert pstdev(errors) == pytest.approx(error / sqrt(3), rel=0.1, abs=1e-3)
    assert isnan(oracle.predict("chat", 10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianLength(0.5, 1), "mean >= 1"),
        (lambda: GaussianLength(5, -1), "deviation >= 0"),
        (lambda: GaussianLength(nan, 1), "mean >= 1"),
        (lambda: LengthRange(0, 5), "1 <= low <= high"),
        (lambda: LengthRange(6, 5), "1 <= low <= high"),
        (lambda: GaussianLength(5, 1).quantile(1.0), "share must be between 0 and 1"),
        (lambda: LengthRange(5, 6).quantile(0.0), "share must be between 0 and 1"),
        (lambda: TaskLengths(memory=1), "memory must be at least 2"),
        (lambda: TaskLengths(max_tasks=0), "max_tasks must be from 1"),
        (lambda: OracleLengths([], 1.5, 0), "error must be from 0 to 1"),
        (lambda: OracleLengths([], nan, 0), "error must be from 0 to 1"),
    ],
)
def test_what_is_impossible_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
