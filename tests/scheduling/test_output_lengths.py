"""Output lengths, learned from how requests ended."""

import random
from math import exp, inf, isnan, nan, sqrt
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.placement import output_lengths
from sluice.scheduling.placement.output_lengths import (
    EVERY,
    MAX_CLASSES,
    MAX_TASK_NAME,
    MAX_TENANTS,
    MEMORY,
    MIN_ENDED,
    UNKNOWN,
    UNSEEN,
    GaussianLength,
    OracleLengths,
    OutputLength,
    OutputLengths,
    TaskLengths,
    length_of,
)
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO

# Predicted output lengths: what is learned, and what is left of an output.

gaussians = st.builds(
    GaussianLength,
    mean=st.floats(1, 5_000),
    deviation=st.one_of(st.just(0.0), st.floats(0.01, 2_000)),
)


@given(distribution=gaussians, emitted=st.integers(0, 50_000))
def test_an_output_that_goes_on_has_something_left(
    distribution: GaussianLength, emitted: int
) -> None:
    expected = distribution.given(emitted)
    assert emitted + 1 <= expected < inf


@given(distribution=gaussians, emitted=st.integers(0, 10_000), more=st.integers(0, 1_000))
def test_a_longer_output_is_expected_to_end_no_earlier(
    distribution: GaussianLength, emitted: int, more: int
) -> None:
    later = distribution.given(emitted + more)
    assert later >= distribution.given(emitted) * (1 - 1e-3)
    assert later >= distribution.mean * (1 - 1e-9)


def test_the_gaussian_tail_against_samples() -> None:
    rng = random.Random(1)
    lengths = [rng.gauss(300, 80) for _ in range(200_000)]
    gaussian = GaussianLength(300, 80)
    for emitted in (100, 300, 400, 500):
        tail = [length for length in lengths if length > emitted]
        assert gaussian.given(emitted) == pytest.approx(fmean(tail), rel=0.01)


def test_the_gaussian_tail_has_no_seam() -> None:
    # The series takes over at eight deviations.
    gaussian = GaussianLength(100, 10)
    assert gaussian.given(181) - 181 == pytest.approx(gaussian.given(180) - 180, rel=0.02)


def test_an_output_without_spread_ends_at_its_mean_or_one_later() -> None:
    fixed = GaussianLength(50, 0)
    assert [fixed.given(n) for n in (0, 20, 49, 50, 80)] == [50, 50, 50, 51, 81]


@given(lengths=st.lists(st.integers(1, 9_999), min_size=1, max_size=150))
def test_the_learned_moments_are_the_observed_ones(lengths: list[int]) -> None:
    predictor = TaskLengths()
    for length in lengths:
        predictor.observe("chat", length)
    learned = predictor.distribution("chat")
    assert learned is not None
    assert learned.mean == pytest.approx(fmean(lengths))
    assert learned.deviation == pytest.approx(pstdev(lengths), abs=1e-6 * max(lengths))
    assert predictor.predict("chat", 77) == learned.mean
    assert isnan(predictor.predict("code", 77)), "nothing is known of another class"


@pytest.mark.parametrize(("median", "spread"), [(200, 0.7), (20, 1.8)])
def test_nearly_all_outputs_have_the_least_length(median: float, spread: float) -> None:
    predictor, rng = TaskLengths(), random.Random(5)
    lengths = [max(1, round(median * rng.lognormvariate(0.0, spread))) for _ in range(600)]
    assert predictor.least("chat") == 0.0
    for count, length in enumerate(lengths, 1):
        predictor.observe("chat", length)
        if count < MIN_ENDED:
            assert predictor.least("chat") == 0.0, "too few are known"
    shorter = sum(length < predictor.least("chat") for length in lengths) / len(lengths)
    assert shorter <= 0.05
    assert predictor.least("chat") == pytest.approx(median * exp(-2.0 * spread), rel=0.4)


def test_old_lengths_are_forgotten() -> None:
    predictor = TaskLengths()
    rng = random.Random(2)
    for mean in (100, 1_000):
        for _ in range(2_000):
            predictor.observe("chat", round(rng.gauss(mean, mean / 10)))
    learned = predictor.distribution("chat")
    assert learned is not None
    assert learned.mean == pytest.approx(1_000, rel=0.05)
    assert learned.deviation == pytest.approx(100, rel=0.5)


def test_the_classes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lengths, "MAX_TASKS", 3)
    predictor = TaskLengths()
    for task in ("a", "b", "c", "a", "d"):
        predictor.observe(task, 10)
    known = [task for task in "abcd" if not isnan(predictor.predict(task))]
    assert known == ["a", "c", "d"], "b completed longest ago"


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
        (lambda: OracleLengths([], 1.5, 0), "error must be from 0 to 1"),
        (lambda: OracleLengths([], nan, 0), "error must be from 0 to 1"),
    ],
)
def test_what_is_impossible_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


OUTPUTS = st.lists(st.tuples(st.integers(1, 10_000), st.booleans()), max_size=2 * MEMORY)


def expected(
    lengths: OutputLengths, service_class: str, tenant: int = 0, most_tokens: int = 0
) -> OutputLength:
    slo = SLO(service_class=service_class)
    return lengths.of(RouteQuery(1, slo, 1, tenant=tenant, output_tokens=most_tokens))


def learned(*tokens: int, level: float = 0.99, tenant: int = 0) -> OutputLengths:
    lengths = OutputLengths(level)
    for each in tokens:
        lengths.observe("chat", tenant, each, ended=True)
    return lengths


def test_nothing_known_is_bounded_by_the_most_that_may_come() -> None:
    lengths = OutputLengths()
    assert expected(lengths, "chat") == UNKNOWN == (256, 512)
    assert expected(lengths, "chat", most_tokens=300) == (256, 300)
    assert expected(lengths, "chat", most_tokens=40) == (40, 40)


def test_a_class_has_the_lengths_that_it_had() -> None:
    lengths = learned(*[100] * 150)
    assert expected(lengths, "chat") == (pytest.approx(100), 100)
    assert expected(lengths, "other") == UNKNOWN
    # Most are short, one in fifty is long: a promise counts with the long ones.
    lengths = learned(*([10] * 49 + [1_000]) * 4)
    mean, bound = expected(lengths, "chat")
    assert mean == pytest.approx((49 * 10 + 1_000) / 50)
    assert bound == 1_000


def test_few_outputs_do_not_bound_the_next_one() -> None:
    one = expected(learned(10), "chat")
    assert one == (pytest.approx((256 + 10) / 2), UNSEEN * 256)
    assert expected(learned(*[10] * MIN_ENDED), "chat") == (pytest.approx(10), UNSEEN * 10)
    # So many that the 0.9 quantile is one of them.
    assert expected(learned(*range(1, 21), level=0.9), "chat").bound == 19


def test_what_was_cut_off_does_not_teach_that_outputs_are_short() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.observe("chat", 0, 16, ended=False)
    assert expected(lengths, "chat") == UNKNOWN
    # Half of them are cut off at 16 tokens: of the others, the lengths are those without any limit.
    chance = random.Random(5)
    real = [chance.randint(1, 100) for _ in range(400)]
    for tokens in real:
        cut = chance.random() < 0.5 and tokens > 16
        lengths.observe("chat", 0, 16 if cut else tokens, ended=not cut)
    mean, bound = expected(lengths, "chat")
    assert mean == pytest.approx(50, rel=0.15)
    assert 90 <= bound <= 200


def test_the_share_within_the_bound_is_the_level() -> None:
    chance = random.Random(7)
    lengths, within = OutputLengths(0.95), 0
    for number in range(4_000):
        tokens = 1 + int(chance.lognormvariate(4.0, 1.0))
        if number >= 200:
            within += tokens <= expected(lengths, "chat").bound
        lengths.observe("chat", 0, tokens, ended=True)
    assert within / 3_800 == pytest.approx(0.95, abs=0.015)


def test_it_follows_a_change() -> None:
    lengths = learned(*[1_000] * 300, *[10] * (MEMORY + EVERY))
    assert expected(lengths, "chat") == (pytest.approx(10), 10)


def test_a_tenant_is_told_from_its_class_when_enough_is_known_of_it() -> None:
    lengths = learned(*[20] * 200)
    for number in range(MIN_ENDED):
        assert expected(lengths, "chat", 7).mean < 100, number
        assert expected(lengths, "chat", 7) == expected(lengths, "chat")
        lengths.observe("chat", 7, 500, ended=True)
    assert expected(lengths, "chat", 7) == (pytest.approx(500), UNSEEN * 500)
    assert expected(lengths, "chat", 8) == expected(lengths, "chat")
    assert expected(lengths, "code", 7) == UNKNOWN


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, 2.0])
def test_a_level_that_is_none_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        OutputLengths(level)


def test_memory_is_bounded_and_the_latest_stay() -> None:
    lengths = OutputLengths()
    for tenant in range(1, 3 * MAX_TENANTS):
        lengths.observe(f"class-{tenant % (2 * MAX_CLASSES)}", tenant, 10, ended=True)
    assert len(lengths) == MAX_CLASSES + MAX_TENANTS
    for _ in range(MIN_ENDED):
        lengths.observe("chat", 5, 10, ended=True)
    assert expected(lengths, "chat", 5) == (pytest.approx(10), 20)
    for name, tokens in (("", 10), ("x" * 300, 10), ("empty", 0)):
        lengths.observe(name, 0, tokens, ended=True)
        assert expected(lengths, name) == UNKNOWN
    # More than any model gives, from a router that is out of order.
    lengths.observe("huge", 0, 10**30, ended=True)
    assert expected(lengths, "huge").bound < 1 << 32


@given(OUTPUTS, st.integers(0, 1 << 20), st.floats(0.01, 0.999))
def test_the_bound_is_at_least_the_mean_and_never_above_the_most(
    outputs: list[tuple[int, bool]], most: int, level: float
) -> None:
    lengths = OutputLengths(level)
    for tokens, ended in outputs:
        lengths.observe("chat", 7, tokens, ended)
    for tenant in (0, 7):
        mean, bound = expected(lengths, "chat", tenant, most)
        assert 0 < mean <= bound
        assert not most or bound <= most
        free = expected(lengths, "chat", tenant)
        assert (mean, bound) == (min(free.mean, most or mean), min(free.bound, most or bound))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=MEMORY), st.floats(0.01, 0.999))
def test_without_cuts_the_mean_is_the_mean_and_enough_are_within_the_bound(
    tokens: list[int], level: float
) -> None:
    mean, bound = length_of(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_), level)
    assert mean == pytest.approx(np.mean(tokens))
    assert np.mean(np.array(tokens) <= bound) >= level - 1e-9


# What clients expect of their outputs.


def expecting(tokens: int, tenant: int = 7) -> RouteQuery:
    slo = SLO(ttft_s=1.0, service_class="chat")
    return RouteQuery(1, slo, 10, tenant=tenant, expected_tokens=tokens)


def test_an_expectation_only_raises_the_prediction_until_it_is_known_how_such_turn_out() -> None:
    lengths = OutputLengths()
    for _ in range(MEMORY):
        lengths.observe("chat", 7, 400, ended=True)
    learned = lengths.of(expecting(0))
    assert learned.mean == 400
    assert lengths.of(expecting(40)) == learned
    assert lengths.of(expecting(900)) == OutputLength(900, 900)
    assert lengths.of(expecting(900)._replace(output_tokens=500)) == OutputLength(500, 500)
    for _ in range(MIN_ENDED):
        lengths.observe("chat", 7, 50, ended=True, expected_tokens=40)
    # Within a factor of two, of this tenant, and what was seen, not what was said.
    assert lengths.of(expecting(40)).mean == lengths.of(expecting(63)).mean == 50
    assert lengths.of(expecting(64)).mean == lengths.of(expecting(40, tenant=8)).mean > 300
    assert lengths.of(expecting(40)).bound >= 50


def test_a_client_that_expects_too_little_is_known_by_what_it_gets() -> None:
    lengths = OutputLengths()
    for _ in range(MIN_ENDED):
        lengths.observe("chat", 7, 2_000, ended=True, expected_tokens=1)
    assert lengths.of(expecting(1)).mean == 2_000


def test_expectations_are_bounded_in_number() -> None:
    lengths = OutputLengths()
    for tenant in range(1, MAX_TENANTS + 50):
        lengths.observe("chat", tenant, 5, ended=True, expected_tokens=4)
    assert len(lengths) == 1 + 2 * MAX_TENANTS
