"""The lateness of a request by cause."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.request.lateness import ENGINE, Cause, StepTimeline, allowance, split

SECONDS = st.floats(0, 1e4)
PARTS = st.dictionaries(st.sampled_from(Cause), SECONDS)
MODEL = LinearLatency(0.01, 0.001)


@given(PARTS, PARTS, st.floats(1e-6, 1e4))
def test_parts_sum_to_the_lateness(
    observed: dict[Cause, float], allowed: dict[Cause, float], lateness_s: float
) -> None:
    found = split(observed, allowed, lateness_s)
    assert sum(found.values()) == pytest.approx(lateness_s)
    assert all(part_s >= 0 for part_s in found.values())
    assert list(found.values()) == sorted(found.values(), reverse=True)


@given(PARTS, SECONDS, SECONDS, SECONDS)
def test_no_more_is_allowed_than_was_predicted(
    observed: dict[Cause, float], predicted_s: float, own_s: float, transfer_s: float
) -> None:
    allowed = allowance(observed, predicted_s, own_s, transfer_s)
    assert sum(allowed.values()) <= predicted_s * (1 + 1e-9) + 1e-9
    assert all(part_s >= 0 for part_s in allowed.values())


def test_what_was_predicted_is_no_cause() -> None:
    observed = {Cause.PREFILLS: 0.6, Cause.OWN_PREFILL: 0.1, Cause.WAY_BACK: 0.2}
    allowed = allowance(observed, 0.7, 0.1, 0.0)
    assert split(observed, allowed, 0.1) == {Cause.WAY_BACK: pytest.approx(0.1)}
    # Half of the wait was predicted: it exceeds by as much as the way back.
    allowed = allowance(observed, 0.5, 0.1, 0.0)
    expected = {Cause.PREFILLS: pytest.approx(0.1), Cause.WAY_BACK: pytest.approx(0.1)}
    assert split(observed, allowed, 0.2) == expected


def timeline(*steps: tuple[float, list[tuple[int, int]], float]) -> StepTimeline:
    """Steps by their end, their sequences (new and computed tokens) and free blocks."""
    made = StepTimeline()
    for end_s, sequences, free in steps:
        work = StepSample.of(sequences)
        made.add(end_s, MODEL.step_s(work), free, work[:7])
    return made


def named(parts: tuple[float, ...]) -> dict[Cause, float]:
    return {cause: round(part_s, 6) for cause, part_s in zip(ENGINE, parts, strict=True) if part_s}


OTHERS, OWN, DECODE = [(400, 0)], [(100, 0)], [(1, 50)]


def test_a_step_tells_what_a_request_waited_for() -> None:
    steps = timeline((1.0, DECODE, 99), (1.41, OTHERS, 99), (1.421, DECODE, 99), (1.531, OWN, 99))
    own_s = MODEL.work_s(100, 0)
    found = named(steps.parts(1.2, 1.531, MODEL.pieces, own_s, 7))
    assert sum(found.values()) == pytest.approx(0.331)
    # It came while half of the other prefill was left.
    assert found[Cause.PREFILLS] == pytest.approx(0.21, abs=0.02)
    assert found[Cause.OWN_PREFILL] == pytest.approx(0.11, abs=0.02)
    assert found[Cause.DECODES] == pytest.approx(0.011)
    # With too few blocks for it, it waited for memory.
    few = timeline((1.0, DECODE, 99), (1.011, DECODE, 5), (1.022, DECODE, 9))
    assert named(few.parts(1.0, 1.022, MODEL.pieces, own_s, 7)) == {
        Cause.KV_MEMORY: 0.011,
        Cause.DECODES: 0.011,
    }


def test_a_stalled_step_and_times_apart_count_for_themselves() -> None:
    steps = timeline((1.0, DECODE, 99), (3.0, DECODE, 99), (3.011, DECODE, 99))
    assert named(steps.parts(1.0, 3.011, MODEL.pieces)) == {
        Cause.DECODES: 0.022,
        Cause.ENGINE_STALL: 1.989,
    }
    apart = ((1.0, 2.995, Cause.KV_TRANSFER), (3.0, inf, Cause.KV_MEMORY))
    assert named(steps.parts(1.0, 3.011, MODEL.pieces, apart=apart)) == {
        Cause.KV_TRANSFER: 1.995,
        Cause.DECODES: 0.005,
        Cause.KV_MEMORY: 0.011,
    }


@given(st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=40), st.data())
def test_the_parts_of_an_engine_sum_to_the_time_there(
    seconds: list[float], data: st.DataObject
) -> None:
    made, ends = StepTimeline(most=8), np.cumsum(seconds)
    kinds = st.sampled_from(([], DECODE, OTHERS, OWN, OWN + DECODE))
    for end_s in ends:
        work = StepSample.of(data.draw(kinds))
        made.add(end_s, MODEL.step_s(work), data.draw(st.integers(0, 20)), work[:7])
    start_s = data.draw(st.floats(0, float(ends[-1])))
    cut = (start_s, data.draw(st.floats(start_s, float(ends[-1]))), Cause.KV_TRANSFER)
    parts = made.parts(start_s, float(ends[-1]), MODEL.pieces, 0.1, 7, (cut,))
    assert min(parts) >= 0
    whole_s = ends[-1] - start_s
    assert sum(parts) == pytest.approx(whole_s, abs=1e-9) or sum(parts) == 0
