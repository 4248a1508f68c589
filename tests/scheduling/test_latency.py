"""The step-time models: their time, its inverse, their parts and their factors."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.batching import BatchBuilder
from sluice.scheduling.latency.model import (
    FAMILIES,
    UNBOUNDED_TOKENS,
    LatencyModel,
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
    StepSample,
    tokens_within,
)
from sluice.scheduling.request import kernels
from sluice.scheduling.request.queue import QueueView
from tests.scheduling.views import ROOMY, latencies, queues

LINEAR = LinearLatency(a=0.004, b=1.8e-4, c=8e-7, d=2e-8)
PREFILL_DECODE = PrefillDecodeLatency(1e-8, 2e-8, 1.5e-4, 9e-7, 4e-4, 0.005)
ROOFLINE = RooflineLatency(1e-4, 0.001, 0.002, 1e-6, 0.0005, 0.020)
MODELS = (LINEAR, PREFILL_DECODE, ROOFLINE)

small = st.floats(0, 1e-3)
tiny = st.sampled_from([0.0, 1e-9, 1e-7])
models = st.one_of(
    latencies,
    st.builds(
        PrefillDecodeLatency,
        a_p=tiny,
        b_p=tiny,
        c_p=small,
        a_d=st.floats(0, 1e-6),
        b_d=small,
        t_c=st.floats(1e-4, 0.05),
    ),
    st.builds(
        RooflineLatency,
        k1=small,
        k2=small,
        b=st.floats(1e-4, 0.05),
        k1_other=small,
        k2_other=small,
        b_other=st.floats(0, 0.05),
        spec_steps=st.integers(0, 10),
    ),
)
batches = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 5_000)), max_size=20)


def test_the_linear_model_by_hand() -> None:
    # A prefill of 100 tokens on 50, and a decode on 200.
    step = StepSample.of([(100, 50), (1, 200)])
    assert (step.new_tokens, step.context_tokens) == (101, 150 + 201)
    assert step.quadratic == 100 * (50 + 50) + 1 * 200.5
    assert LINEAR.step_s(step) == pytest.approx(0.004 + 101 * 1.8e-4 + 351 * 8e-7 + 10_200.5 * 2e-8)


def test_the_prefill_decode_model_by_hand() -> None:
    prefill_s = 1e-8 * 100**2 + 2e-8 * 100 * 50 + 1.5e-4 * 100
    decode_s = 9e-7 * 200 + 4e-4
    assert PREFILL_DECODE.work_s(100, 50) == pytest.approx(prefill_s)
    assert PREFILL_DECODE.work_s(1, 200) == pytest.approx(decode_s)
    step = StepSample.of([(100, 50), (1, 200)])
    assert PREFILL_DECODE.step_s(step) == pytest.approx(prefill_s + decode_s + 0.005)


def test_the_roofline_is_the_higher_of_its_lines() -> None:
    # The lines cross at 18 ms / 99 us, near 182 tokens.
    assert ROOFLINE.step_s(StepSample.of([(100, 0)])) == pytest.approx(0.0201)
    assert ROOFLINE.step_s(StepSample.of([(300, 0), (1, 9)])) == pytest.approx(0.002 + 301e-4)
    assert ROOFLINE.fixed_s == pytest.approx(0.020)
    speculating = RooflineLatency.of([*ROOFLINE.coefficients[:-1], 4])
    assert speculating.step_s(StepSample.of([(300, 0)])) == pytest.approx(0.032 + 4 * 0.001)
    assert speculating.fixed_s == pytest.approx(0.020 + 4 * 0.0005)


@given(model=models, batch=batches)
def test_a_step_is_the_largest_piece_of_its_sequences(
    model: LatencyModel, batch: list[tuple[int, int]]
) -> None:
    sums = [
        piece[kernels.FIXED] + sum(kernels.work_s(piece, float(n), float(k)) for n, k in batch)
        for piece in model.pieces
    ]
    assert model.step_s(StepSample.of(batch)) == pytest.approx(max(sums))


@given(
    model=models,
    seconds=st.floats(0, 10, allow_subnormal=False),
    computed=st.integers(0, 10_000),
)
def test_tokens_within_is_the_most_that_fits(
    model: LatencyModel, seconds: float, computed: int
) -> None:
    tokens = model.tokens_within(seconds, computed)
    if tokens == UNBOUNDED_TOKENS:
        assert model.work_s(UNBOUNDED_TOKENS, computed) <= seconds * (1 + 1e-6)
        return
    assert tokens == 0 or model.work_s(tokens, computed) <= seconds * (1 + 1e-9) + 1e-12
    assert model.work_s(tokens + 1, computed) >= seconds * (1 - 1e-9)
    assert model.work_s(tokens + 2, computed) >= seconds * (1 - 1e-9)


@given(model=models, tokens=st.integers(1, 5_000), computed=st.integers(0, 5_000))
def test_tokens_within_inverts_the_work(model: LatencyModel, tokens: int, computed: int) -> None:
    within = model.tokens_within(model.work_s(tokens, computed), computed)
    assert within >= tokens
    if tokens > 1:
        assert model.work_s(within, computed) == pytest.approx(model.work_s(tokens, computed))


def test_a_decode_that_does_not_fit_is_not_taken_for_a_short_prefill() -> None:
    # Two tokens of a prefill take 0.3 ms, one decode takes 0.4 ms.
    assert PREFILL_DECODE.tokens_within(0.000_35, 0) == 2
    nothing = np.zeros(1)
    assert tokens_within(PREFILL_DECODE.pieces, nothing, 0.000_35, 0, 1) == 0
    assert tokens_within(PREFILL_DECODE.pieces, nothing, 0.000_45, 0, 1) == 1


def test_no_time_fits_nothing_and_endless_time_everything() -> None:
    for model in MODELS:
        assert model.tokens_within(-1.0, 5) == 0
        assert model.tokens_within(inf, 1_000) == UNBOUNDED_TOKENS
    assert LINEAR.tokens_within(0.0, 5) == 0
    assert LinearLatency(a=0.01, b=0.0).tokens_within(0.001, 10) == UNBOUNDED_TOKENS


@given(model=models, batch=batches, correction=st.floats(0.25, 4), headroom=st.floats(1, 2))
def test_correction_and_headroom_scale_every_prediction(
    model: LatencyModel, batch: list[tuple[int, int]], correction: float, headroom: float
) -> None:
    scaled = model.corrected(correction).with_headroom(headroom)
    step, factor = StepSample.of(batch), correction * headroom
    assert scaled.step_s(step) == pytest.approx(factor * model.step_s(step))
    assert scaled.work_s(100, 50) == pytest.approx(factor * model.work_s(100, 50))
    assert scaled.fixed_s == pytest.approx(factor * model.fixed_s)
    assert scaled.corrected(1.0).with_headroom(1.0) == model, "the factors do not pile up"
    same = type(model).of(model.coefficients)
    assert scaled == same.with_headroom(headroom).corrected(correction)
    assert scaled.coefficients == model.coefficients
    assert model.corrected(correction, spread=0.2).with_headroom(headroom).spread == 0.2


@pytest.mark.parametrize("model", MODELS)
def test_a_family_is_its_name_and_its_coefficients(model: LatencyModel) -> None:
    assert FAMILIES[model.family].of(model.coefficients) == model
    with pytest.raises(ValueError, match=f"{len(model.names)} coefficients .*{model.names[0]}"):
        type(model).of((*model.coefficients, 1.0))


@pytest.mark.parametrize(
    "coefficients", [(0, 0, 0, 0), (-1, 1, 0, 0), (nan, 1, 0, 0), (1, inf, 0, 0)]
)
def test_impossible_models_are_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="coefficient"):
        LinearLatency(*coefficients)
    with pytest.raises(ValueError, match="coefficient"):
        RooflineLatency(*coefficients, 0, 0)


@pytest.mark.parametrize("bad", [0.0, -1.0, inf, nan])
def test_impossible_factors_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="correction must be positive"):
        LinearLatency(1.0, 1.0, correction=bad)
    with pytest.raises(ValueError, match="correction must be positive"):
        LINEAR.corrected(bad)
    with pytest.raises(ValueError, match="headroom must be finite and >= 1"):
        LINEAR.with_headroom(bad)
    with pytest.raises(ValueError, match="headroom must be finite and >= 1"):
        LinearLatency(1.0, 1.0, headroom=0.99)


@given(model=models, queue=queues(), within=st.floats(0, 0.2))
def test_a_batch_stays_within_its_time_by_every_model(
    model: LatencyModel, queue: QueueView, within: float
) -> None:
    batch = BatchBuilder(queue, ROOMY, model)
    until_s = model.fixed_s + within
    batch.take(np.arange(len(queue)), until_s)
    assert batch.cost_s <= until_s * (1 + 1e-9)
    plan = batch.plan()
    computed = queue.table[plan.rows, kernels.COMPUTED].astype(int)
    step = StepSample.of(zip(plan.tokens.tolist(), computed.tolist(), strict=True))
    assert plan.predicted_s == pytest.approx(model.step_s(step))
