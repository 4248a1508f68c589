"""The form of an engine's model is the one that predicts steps which its fit has not seen."""

import pytest

from sluice.scheduling.latency.model import LatencyModel, PrefillDecodeLatency, StepSample
from sluice.scheduling.latency.profile import (
    LatencyProfile,
    best_fit,
    fit_without_context,
    held_out_error,
)
from tests.scheduling.test_latency_fit import LINEAR, PREFILL_DECODE, steps


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
