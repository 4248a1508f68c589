"""The step-time model: its inverse, its fit, its correction and its stored form."""

import json
import random
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.latency import (
    UNBOUNDED_TOKENS,
    FitReport,
    LatencyProfile,
    LinearLatency,
    OnlineCorrection,
    StepSample,
    fit,
)
from tests.scheduling.views import latencies

TRUTH = LinearLatency(a=0.004, b=1.8e-4, c=8e-7, d=2e-8)


def sample(rng: random.Random, model: LinearLatency, noise: float) -> StepSample:
    """One step of a random batch: some decodes and up to two prefill chunks."""
    new = context = quadratic = 0.0
    for _ in range(rng.randint(0, 32)):
        computed = rng.randint(16, 2_000)
        new, context, quadratic = new + 1, context + computed + 1, quadratic + computed + 0.5
    for _ in range(rng.randint(0 if new else 1, 2)):
        tokens, computed = rng.randint(1, 512), rng.randint(0, 2_000)
        new, context = new + tokens, context + tokens + computed
        quadratic += tokens * (computed + tokens / 2)
    seconds = model.step_s(new, context, quadratic) * (1 + rng.uniform(-noise, noise))
    return StepSample(new, context, quadratic, seconds)


def test_a_step_is_the_fixed_time_and_the_sum_of_its_sequences() -> None:
    work_s = TRUTH.work_s(100, 50) + TRUTH.work_s(1, 200)
    step_s = TRUTH.step_s(101, 150 + 201, 100 * (50 + 50) + 1 * 200.5)
    assert TRUTH.fixed_s + work_s == pytest.approx(step_s)
    assert step_s == pytest.approx(0.004 + 101 * 1.8e-4 + 351 * 8e-7 + 10_200.5 * 2e-8)


@given(model=latencies, seconds=st.floats(0, 10), computed=st.integers(0, 10_000))
def test_tokens_within_is_the_most_that_fits(
    model: LinearLatency, seconds: float, computed: int
) -> None:
    tokens = model.tokens_within(seconds, computed)
    if tokens == UNBOUNDED_TOKENS:
        assert model.work_s(UNBOUNDED_TOKENS, computed) <= seconds * (1 + 1e-6)
        return
    assert tokens == 0 or model.work_s(tokens, computed) <= seconds * (1 + 1e-9)
    assert model.work_s(tokens + 1, computed) >= seconds * (1 - 1e-9)


@given(model=latencies, tokens=st.integers(1, 5_000), computed=st.integers(0, 5_000))
def test_tokens_within_inverts_the_work(model: LinearLatency, tokens: int, computed: int) -> None:
    within = model.tokens_within(model.work_s(tokens, computed), computed)
    assert within >= tokens
    assert model.work_s(within, computed) == pytest.approx(model.work_s(tokens, computed))


def test_no_time_fits_nothing_and_endless_time_everything() -> None:
    assert TRUTH.tokens_within(-1.0, 0) == TRUTH.tokens_within(0.0, 5) == 0
    assert TRUTH.tokens_within(inf, 1_000) == UNBOUNDED_TOKENS
    assert LinearLatency(a=0.01, b=0.0).tokens_within(0.001, 10) == UNBOUNDED_TOKENS


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_fit_recovers_the_model(noise: float) -> None:
    rng = random.Random(1)
    model, report = fit([sample(rng, TRUTH, noise) for _ in range(400)])
    tolerance = 1e-6 if noise == 0 else 0.15
    for name in ("a", "b", "c", "d"):
        assert getattr(model, name) == pytest.approx(getattr(TRUTH, name), rel=tolerance), name
    assert report.samples + report.dropped == 400
    assert report.mape <= noise + 1e-9
    assert report.r2 > 0.99


def test_a_fit_leaves_outliers_out_and_reports_them() -> None:
    rng = random.Random(2)
    samples = [sample(rng, TRUTH, 0.02) for _ in range(300)]
    for index in range(0, 300, 20):
        held_up = samples[index]
        samples[index] = held_up._replace(seconds=held_up.seconds * 20)
    model, report = fit(samples)
    assert report.dropped == 30
    assert report.mape < 0.02
    assert model.b == pytest.approx(TRUTH.b, rel=0.1)
    assert model.a == pytest.approx(TRUTH.a, rel=0.1)


def test_a_fit_has_no_negative_coefficients() -> None:
    # Time falls with context: the best free coefficient is negative, the best allowed is 0.
    samples = [
        StepSample(new, context, 0.0, 0.01 + 0.0001 * new - 0.000_001 * context)
        for new in range(1, 101, 10)
        for context in range(1_000, 5_000, 1_000)
    ]
    model, _ = fit(samples, trim=0.0)
    assert model.c == 0
    assert model.b > 0


def test_a_fit_needs_usable_samples() -> None:
    good = [StepSample(n, n, n * n / 2, 0.01 + 0.001 * n) for n in range(1, 8)]
    useless = [StepSample(1, 1, 0.5, bad) for bad in (0.0, -1.0, inf, nan)]
    idle = [StepSample(0, 0, 0, 0.01)]
    with pytest.raises(ValueError, match="at least 8 samples, got 7"):
        fit(good + useless + idle)
    with pytest.raises(ValueError, match="trim must be"):
        fit(good, trim=0.9)


@pytest.mark.parametrize(
    "coefficients", [(0, 0, 0, 0), (-1, 1, 0, 0), (nan, 1, 0, 0), (1, inf, 0, 0)]
)
def test_impossible_models_are_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="coefficient"):
        LinearLatency(*coefficients)
    with pytest.raises(ValueError, match="correction must be positive"):
        LinearLatency(1.0, 1.0, correction=0.0)


@given(ratio=st.floats(0.3, 3.5), theta=st.floats(0, 0.97))
def test_the_correction_converges_to_the_real_ratio(ratio: float, theta: float) -> None:
    correction = OnlineCorrection(theta=theta)
    for _ in range(500):
        correction.observe(0.01, 0.01 * ratio)
    assert correction.factor == pytest.approx(ratio, rel=1e-3)
    model = TRUTH.corrected(correction.factor)
    assert model.step_s(10, 100) == pytest.approx(TRUTH.step_s(10, 100) * ratio, rel=1e-3)
    assert model.work_s(10, 100) == pytest.approx(TRUTH.work_s(10, 100) * ratio, rel=1e-3)


@given(
    steps=st.lists(
        st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), min_size=1, max_size=50
    )
)
def test_the_correction_stays_in_its_bounds(steps: list[tuple[float, float]]) -> None:
    correction = OnlineCorrection(theta=0.5, max_ratio=100.0, max_factor=3.0)
    for predicted_s, real_s in steps:
        correction.observe(predicted_s, real_s)
        assert 1 / 3 <= correction.factor <= 3


def test_one_stalled_step_counts_a_bounded_ratio() -> None:
    correction = OnlineCorrection(theta=0.9, max_ratio=4.0)
    correction.observe(0.01, 10.0)
    assert correction.factor == pytest.approx(0.9 + 0.1 * 4)


@pytest.mark.parametrize("bad", [{"theta": 1.0}, {"theta": -0.1}, {"max_ratio": 0.5}])
def test_impossible_corrections_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"theta|max_ratio"):
        OnlineCorrection(**bad)


REPORT = FitReport(samples=90, dropped=10, mape=0.03, p90_error=0.05, r2=0.99)


@pytest.mark.parametrize("report", [None, REPORT])
def test_a_profile_survives_its_text(report: FitReport | None) -> None:
    profile = LatencyProfile.of("llama/cpu", TRUTH.corrected(2.0), report)
    again = LatencyProfile.from_json(profile.to_json())
    assert again == profile
    assert again.model == TRUTH, "a correction belongs to a run, not to the profile"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": -1.0}, "finite and >= 0"),
        ({"a": "0.004"}, "a: Input should be a valid number"),
        ({"a": None}, "a: Input should be a valid number"),
        ({"key": 5}, "key: Input should be a valid string"),
        ({"e": 0.1}, "e: Unexpected keyword argument"),
        ({"report": {"samples": 1}}, "report.dropped: Field required"),
        ({"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0}, "at least one coefficient"),
    ],
)
def test_a_broken_profile_is_refused_with_the_reason(
    change: dict[str, object], message: str
) -> None:
    fields = json.loads(LatencyProfile.of("k", TRUTH, REPORT).to_json())
    with pytest.raises(ValueError, match="not a latency profile") as raised:
        LatencyProfile.from_json(json.dumps(fields | change))
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": "k"}', '{"key": NaN}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a latency profile"):
        LatencyProfile.from_json(text)
