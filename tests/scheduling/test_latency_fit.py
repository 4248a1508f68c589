"""Fits: what made the data is found again, the error report is honest, the wrong family shows."""

import json
import random
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.latency.model import (
    FAMILIES,
    LatencyModel,
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
    StepSample,
)
from sluice.scheduling.latency.profile import (
    FitReport,
    LatencyProfile,
    best_fit,
    errors_by_kind,
    fit,
    fit_without_context,
    held_out_error,
    kind_of,
    step_errors,
)

LINEAR = LinearLatency(a=0.004, b=1.8e-4, c=8e-7, d=2e-8)
PREFILL_DECODE = PrefillDecodeLatency(1e-7, 2e-7, 1.5e-4, 2e-6, 8e-4, 0.005)
ROOFLINE = RooflineLatency(1e-4, 0.0, 0.002, 1e-6, 0.0, 0.020)
MODELS: tuple[LatencyModel, ...] = (LINEAR, PREFILL_DECODE, ROOFLINE)


def steps(model: LatencyModel, count: int, noise: float, seed: int = 1) -> list[StepSample]:
    """Steps of random batches: some decodes and up to two prefill chunks."""
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        batch = [(1, rng.randint(16, 2_000)) for _ in range(rng.randint(0, 32))]
        chunks = rng.randint(0 if batch else 1, 2)
        batch += [(rng.randint(2, 512), rng.randint(0, 2_000)) for _ in range(chunks)]
        step = StepSample.of(batch)
        seconds = model.step_s(step) * (1 + rng.uniform(-noise, noise))
        samples.append(step._replace(seconds=seconds))
    return samples


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("truth", MODELS)
def test_a_fit_recovers_the_model(truth: LatencyModel, noise: float) -> None:
    model, report = fit(steps(truth, 600, noise), truth.family)
    assert type(model) is type(truth)
    # On steps that it has not seen.
    for step in steps(truth, 50, 0.0, seed=2):
        assert model.step_s(step) == pytest.approx(step.seconds, rel=1e-6 + noise / 2)
    if noise == 0 and truth is not ROOFLINE:
        assert model.coefficients == pytest.approx(truth.coefficients, rel=1e-6)
    assert (report.samples, report.dropped) == (540, 60)
    assert report.mape <= noise + 1e-9
    assert report.r2 > 0.99


def test_a_roofline_fit_learns_the_price_of_draft_steps() -> None:
    rng = random.Random(3)
    samples = []
    for step in steps(ROOFLINE, 400, 0.0):
        drafts = rng.randint(0, 5)
        lines = (0.002 + 1e-4 * step.new_tokens, 0.020 + 1e-6 * step.new_tokens)
        samples.append(step._replace(spec_steps=drafts, seconds=max(lines) + 0.003 * drafts))
    model, report = fit(samples, "roofline")
    assert [line[1] for line in model.lines] == pytest.approx([0.003, 0.003])
    assert model.spec_steps == 0, "a setting, not a result"
    assert report.mape < 1e-6


@pytest.mark.parametrize(
    # The prefill/decode form has no term for the context of a chunk; a small one would not show.
    "truth",
    [LinearLatency(a=0.004, b=1e-4, c=6e-6), PREFILL_DECODE, ROOFLINE],
)
def test_the_wrong_family_shows_in_the_report(truth: LatencyModel) -> None:
    samples = steps(truth, 400, 0.01)
    errors = {family: fit(samples, family)[1].mape for family in FAMILIES}
    right = errors.pop(truth.family)
    assert right < 0.01
    assert min(errors.values()) > 1.5 * right


def test_the_report_is_of_the_kept_samples() -> None:
    samples = steps(LINEAR, 300, 0.05)
    model, report = fit(samples)
    errors = sorted(abs(model.step_s(step) / step.seconds - 1) for step in samples)
    assert report.samples == 270
    assert report.mape == pytest.approx(sum(errors[:270]) / 270, rel=0.02)
    assert report.p90_error == pytest.approx(np.quantile(errors[:270], 0.9), rel=0.02)
    untrimmed = fit(samples, trim=0.0)[1]
    assert (untrimmed.samples, untrimmed.dropped) == (300, 0)
    assert untrimmed.mape > report.mape


@pytest.mark.parametrize("truth", MODELS)
def test_a_fit_leaves_outliers_out_and_reports_them(truth: LatencyModel) -> None:
    samples = steps(truth, 300, 0.02)
    for index in range(0, 300, 20):
        held_up = samples[index]
        samples[index] = held_up._replace(seconds=held_up.seconds * 20)
    model, report = fit(samples, truth.family)
    assert report.dropped == 30
    assert report.mape < 0.02
    for step in steps(truth, 20, 0.0, seed=4):
        assert model.step_s(step) == pytest.approx(step.seconds, rel=0.05)


def test_a_fit_has_no_negative_coefficients() -> None:
    # Time falls with context: the best free coefficient is negative, the best allowed is 0.
    samples = [
        StepSample.of([(new, context)], 0.01 + 0.0001 * new - 0.000_001 * context)
        for new in range(2, 102, 10)
        for context in range(1_000, 5_000, 1_000)
    ]
    model, _ = fit(samples, trim=0.0)
    assert model.c == model.d == 0
    assert model.b > 0


def test_a_fit_is_the_same_every_time() -> None:
    samples = steps(ROOFLINE, 200, 0.05)
    for family in FAMILIES:
        results = [fit(samples, family) for _ in range(2)]
        assert results[0] == results[1]


def test_a_fit_needs_usable_samples() -> None:
    good = [StepSample.of([(n, 0)], 0.01 + 0.001 * n) for n in range(1, 8)]
    useless = [StepSample.of([(1, 1)], bad) for bad in (0.0, -1.0, inf, nan)]
    idle = [StepSample.of([], 0.01)]
    with pytest.raises(ValueError, match="at least 8 samples, got 7"):
        fit(good + useless + idle)
    with pytest.raises(ValueError, match="at least 8 samples, got 0"):
        fit([])
    with pytest.raises(ValueError, match="at least 12 samples, got 7"):
        fit(good, "roofline")
    with pytest.raises(ValueError, match="trim must be"):
        fit(good, trim=0.9)
    with pytest.raises(ValueError, match=r"unknown family 'cubic'; known: linear, "):
        fit(good, "cubic")
    prefills = [StepSample.of([(n, 0)], 0.01 + 0.001 * n) for n in range(2, 50)]
    with pytest.raises(ValueError, match="no sample has decodes"):
        fit(prefills, "prefill_decode")


@pytest.mark.parametrize("truth", [LINEAR, PREFILL_DECODE])
def test_the_form_of_the_engine_is_found(truth: LatencyModel) -> None:
    samples = steps(truth, 300, 0.03)
    model, report = best_fit(samples)
    assert model.family == truth.family
    # The noise is uniform, so its mean is half of it; the context is most of what else there is.
    assert report.held_out == pytest.approx(0.015, abs=0.004)
    assert report.held_out_without_context is not None
    assert report.held_out_without_context > 4 * report.held_out
    assert (model, report) == best_fit(samples), "no chance in it"
    kept = LatencyProfile.of("key", model, report)
    assert LatencyProfile.from_json(kept.to_json()) == kept


def test_each_step_is_predicted_by_a_fit_without_it() -> None:
    samples, parts = steps(LINEAR, 50, 0.1), []

    def fitted(seen: list[StepSample], trim: float) -> tuple[LatencyModel, None]:
        parts.append(seen)
        return LINEAR, None

    errors = sorted(abs(LINEAR.step_s(step) / step.seconds - 1) for step in samples)
    assert held_out_error(samples, fitted, 0.2) == pytest.approx(sum(errors[:40]) / 40)
    assert [len(seen) for seen in parts] == [40] * 5
    assert all(sum(step in seen for seen in parts) == 4 for step in samples)


def test_where_noise_hides_the_form_it_is_linear() -> None:
    # Half of the time is chance: both forms are about as far off.
    assert best_fit(steps(PREFILL_DECODE, 60, 0.8))[0].family == "linear"


def test_a_form_that_prices_no_new_token_is_not_chosen() -> None:
    # Each prefill costs by the square of its tokens alone: the budget of tokens would be infinite.
    free = PrefillDecodeLatency(a_p=2e-6, b_p=0.0, c_p=0.0, a_d=2e-6, b_d=8e-4, t_c=0.005)
    assert best_fit(steps(free, 300, 0.0))[0].family == "linear"


def test_too_few_steps_hold_none_out() -> None:
    model, report = best_fit(steps(LINEAR, 9, 0.0))
    assert (model.family, report.held_out, report.held_out_without_context) == (
        "linear",
        None,
        None,
    )
    # Steps of one kind have no second price.
    decodes = [step for step in steps(PREFILL_DECODE, 300, 0.01) if not step.prefills]
    assert best_fit(decodes)[0].family == "linear"
    with pytest.raises(ValueError, match="at least 8 samples"):
        best_fit([])


def test_without_context_there_are_two_coefficients() -> None:
    model, _ = fit_without_context(steps(LINEAR, 300, 0.0))
    assert model.a > 0
    assert model.b > LINEAR.b
    assert (model.c, model.d) == (0, 0)


REPORT = FitReport(samples=90, dropped=10, mape=0.03, p90_error=0.05, r2=0.99)


@pytest.mark.parametrize("report", [None, REPORT])
@pytest.mark.parametrize(
    "model", [LINEAR, PrefillDecodeLatency(1, 2, 3, 4, 5, 6), RooflineLatency(1, 2, 3, 4, 5, 6, 7)]
)
def test_a_profile_survives_its_text(model: LatencyModel, report: FitReport | None) -> None:
    used = model.corrected(2.0).with_headroom(1.1)
    profile = LatencyProfile.of("llama/cpu", used, report)
    again = LatencyProfile.from_json(profile.to_json())
    assert again == profile
    assert again.model == model, "correction and head-room belong to a run, not to the profile"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coefficients": [-1.0, 0, 0, 0]}, "finite and >= 0"),
        ({"coefficients": ["0.004", 0, 0, 0]}, "coefficients.0: Input should be a valid number"),
        ({"coefficients": [1.0]}, "has 4 coefficients (a, b, c, d), got 1"),
        ({"coefficients": [0, 0, 0, 0]}, "at least one coefficient"),
        ({"coefficients": 5}, "coefficients: Input should be a valid array"),
        ({"family": "cubic"}, "unknown family 'cubic'; known: linear, prefill_decode, roofline"),
        ({"key": 5}, "key: Input should be a valid string"),
        ({"e": 0.1}, "e: Unexpected keyword argument"),
        ({"report": {"samples": 1}}, "report.dropped: Field required"),
    ],
)
def test_a_broken_profile_is_refused_with_the_reason(
    change: dict[str, object], message: str
) -> None:
    fields = json.loads(LatencyProfile.of("k", LINEAR, REPORT).to_json())
    with pytest.raises(ValueError, match="not a latency profile") as raised:
        LatencyProfile.from_json(json.dumps(fields | change))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"key": "k"}',
        '{"key": NaN}',
        '{"key": "k", "a": 0.1}',
        '{"key": "k", "a": -1, "b": 0, "c": 0, "d": 0}',
        "[" * 10_000,
    ],
)
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a latency profile"):
        LatencyProfile.from_json(text)


MODEL = LinearLatency(a=0.01, b=1e-4)


def step(seconds: float, *sequences: tuple[int, int]) -> StepSample:
    return StepSample.of(sequences, seconds)


def test_kinds() -> None:
    assert kind_of(step(1.0, (512, 0))) == "prefill"
    assert kind_of(step(1.0, (1, 512), (1, 3))) == "decode"
    assert kind_of(step(1.0, (1, 512), (2, 0))) == "mixed"


def test_the_figures_of_a_worked_example() -> None:
    # 20 ms predicted for each: 0 %, 100 % and 50 % off.
    steps = [step(seconds, (100, 0)) for seconds in (0.02, 0.01, 0.04)]
    found = step_errors(MODEL, steps)
    assert found.steps == 3
    assert found.mape == found.median == pytest.approx(0.5)
    assert found.p90 == pytest.approx(0.9)
    assert found.bias == pytest.approx(0.06 / 0.07 - 1)


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 4000)), min_size=1, max_size=8))
def test_the_truth_has_no_error_and_a_factor_is_the_error(sequences: list[tuple[int, int]]) -> None:
    real = StepSample.of(sequences, MODEL.step_s(StepSample.of(sequences)))
    assert step_errors(MODEL, [real]).mape == pytest.approx(0, abs=1e-12)
    slower = step_errors(MODEL.with_headroom(1.25), [real])
    assert (slower.mape, slower.bias) == pytest.approx((0.25, 0.25))


def test_each_kind_has_its_own_figures() -> None:
    found = errors_by_kind(MODEL, [step(0.02, (100, 0)), step(0.0202, (1, 5), (1, 5))])
    assert set(found) == {"all", "prefill", "decode"}
    assert found["all"].steps == 2
    assert found["prefill"].mape == pytest.approx(0)
    assert found["decode"].bias == pytest.approx(0.0102 / 0.0202 - 1)


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        step_errors(MODEL, [])
    with pytest.raises(ValueError, match="some time"):
        step_errors(MODEL, [step(0.0, (1, 1))])
