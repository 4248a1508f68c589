from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.latency.profile import errors_by_kind, kind_of, step_errors

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
