"""The predictors of a whole request: by hand, against sums, and what must grow."""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.latency.model import (
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
    StepSample,
)
from sluice.scheduling.latency.request_model import Interaction, InteractionLatency, PolynomialTTFT

PAPER = InteractionLatency.paper()
STEPS = LinearLatency(a=0.010, b=0.001, c=0.000_01)


def test_the_papers_coefficients_by_hand() -> None:
    # Table 2 in ms: 0.1 * 4 * 100 + 5.7 * 4 + 0.01 * 100 + 43.67.
    assert PAPER.prefill_s(4, 100) == pytest.approx(0.107_47)
    # 0.0002 * 4 * 101 + 0.275 * 4 + 0.00088 * 101 + 15.85.
    assert PAPER.decode_s(4, 100, 1) == pytest.approx(0.017_119_68)


@given(batch=st.integers(1, 32), prompt=st.integers(1, 8_000), output=st.integers(1, 300))
def test_decode_is_the_sum_over_its_tokens(batch: int, prompt: int, output: int) -> None:
    tokens = [PAPER.decode.seconds(batch, prompt + k) for k in range(1, output + 1)]
    decode_s = PAPER.decode_s(batch, prompt, output)
    assert decode_s == pytest.approx(sum(tokens))
    assert PAPER.e2e_s(batch, prompt, output) == pytest.approx(
        PAPER.prefill_s(batch, prompt) + decode_s
    )
    assert PAPER.tpot_s(batch, prompt, output) == pytest.approx(decode_s / output)


@given(batch=st.integers(1, 32), length=st.integers(2, 4_000))
@pytest.mark.parametrize("model", [STEPS, PrefillDecodeLatency(0, 0, 1e-4, 1e-6, 1e-3, 0.01)])
def test_derived_from_a_step_model_it_gives_the_steps_times(
    model: LinearLatency, batch: int, length: int
) -> None:
    derived = InteractionLatency.of_steps(model.with_headroom(1.5))
    prefill = StepSample.of([(length, 0)] * batch)
    assert derived.prefill_s(batch, length) == pytest.approx(1.5 * model.step_s(prefill))
    decode = StepSample.of([(1, length)] * batch)
    assert derived.decode.seconds(batch, length) == pytest.approx(1.5 * model.step_s(decode))


@given(batch=st.integers(1, 32), length=st.integers(2, 4_000))
def test_derived_from_a_roofline_it_underestimates_nothing(batch: int, length: int) -> None:
    model = RooflineLatency(1e-4, 0, 0.002, 1e-6, 0, 0.020)
    derived = InteractionLatency.of_steps(model)
    prefill = StepSample.of([(length, 0)] * batch)
    assert derived.prefill_s(batch, length) >= model.step_s(prefill) * (1 - 1e-12)


def test_the_factors_scale_every_time() -> None:
    scaled = replace(PAPER, correction=1.2, headroom=1.1)
    assert scaled.prefill_s(2, 50) == pytest.approx(1.32 * PAPER.prefill_s(2, 50))
    assert scaled.e2e_s(2, 50, 7) == pytest.approx(1.32 * PAPER.e2e_s(2, 50, 7))
    assert scaled.coefficients == pytest.approx(1.32 * PAPER.coefficients)
    assert PAPER.coefficients.shape == (2, 4)
    assert PAPER.coefficients[1].tolist() == pytest.approx(list(PAPER.decode))
    ttft = PolynomialTTFT((0.01, 1e-4), correction=2.0, headroom=1.5)
    assert ttft.seconds(100) == pytest.approx(3 * 0.02)


@given(tokens=st.integers(1, 100_000), more=st.integers(0, 1_000))
def test_a_longer_prompt_never_takes_less(tokens: int, more: int) -> None:
    ttft = PolynomialTTFT((0.02, 5e-5, 3e-9))
    assert ttft.seconds(tokens) == pytest.approx(0.02 + 5e-5 * tokens + 3e-9 * tokens**2)
    assert ttft.seconds(tokens + more) >= ttft.seconds(tokens)
    both = ttft.all_seconds(np.array([tokens, tokens + more], dtype=float))
    assert both.tolist() == [ttft.seconds(tokens), ttft.seconds(tokens + more)]


def test_a_polynomial_derived_from_a_step_model_gives_the_prefills_time() -> None:
    model = LinearLatency(a=0.01, b=1e-4, c=1e-6, d=1e-8).corrected(1.3)
    ttft = PolynomialTTFT.of_steps(model)
    assert ttft.seconds(700) == pytest.approx(model.fixed_s + model.work_s(700, 0))


@pytest.mark.parametrize("bad", [-1.0, nan, inf])
def test_impossible_predictors_are_refused(bad: float) -> None:
    good, nothing = Interaction(1, 1, 1, 1), Interaction(0, 0, 0, 0)
    with pytest.raises(ValueError, match="finite and >= 0"):
        InteractionLatency(good._replace(gamma=bad), good)
    with pytest.raises(ValueError, match="at least one"):
        InteractionLatency(nothing, nothing)
    with pytest.raises(ValueError, match="finite and >= 0"):
        PolynomialTTFT((0.1, bad))
    with pytest.raises(ValueError, match="at least one"):
        PolynomialTTFT(())
    with pytest.raises(ValueError, match="headroom"):
        PolynomialTTFT((0.1,), headroom=bad)
    with pytest.raises(ValueError, match="correction"):
        InteractionLatency(good, good, correction=bad)
