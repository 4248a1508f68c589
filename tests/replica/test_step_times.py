"""Times of steps in a pipeline, against one whose stages' times are known, and what a step leaves
to the one behind it."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.scheduler.step_times import StepTimes, next_start_s, spare_tokens
from sluice.scheduling.batching import BatchPlan
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView

Batches = list[tuple[float, float]]
"""Seconds of each batch in all stages, and from the end of a batch to this one's arrival."""

BATCHES = st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.0, 2.0)), min_size=1, max_size=30)


def measured(stages: int, batches: Batches) -> list[float]:
    """What is measured of batches that pass stages of equal speed, with as many in flight."""
    times, left = StepTimes(stages), [0.0] * stages
    ends: list[float] = [0.0] * stages
    starts = []
    for seconds, idle_s in batches:
        # Scheduled once there is room in the pipeline.
        starts.append(ends[-stages] + (idle_s if idle_s > 1 else 0.0))
        at = starts[-1]
        for stage in range(stages):
            left[stage] = at = max(at, left[stage]) + seconds / stages
        ends.append(at)
    return [times.ended(*each) for each in zip(starts, ends[stages:], strict=True)]


@given(st.sampled_from([1, 2]), BATCHES)
def test_of_one_or_two_stages_the_time_is_exact(stages: int, batches: Batches) -> None:
    assert measured(stages, batches) == pytest.approx([seconds for seconds, _ in batches], rel=1e-6)


@given(st.sampled_from([3, 4]), BATCHES)
def test_of_more_stages_it_is_exact_if_batches_are_alike_and_else_never_longer(
    stages: int, batches: Batches
) -> None:
    assert all(
        found <= seconds * (1 + 1e-6)
        for found, (seconds, _) in zip(measured(stages, batches), batches, strict=True)
    )
    alike = [(0.1, idle_s) for _, idle_s in batches]
    assert measured(stages, alike) == pytest.approx([0.1] * len(alike), rel=1e-6)


def test_empty_steps_between_change_nothing() -> None:
    """Where all requests are in flight an engine with a pipeline runs empty steps."""
    times = StepTimes(2)
    assert times.ended(1.0, 1.2) == pytest.approx(0.2)
    assert times.ended(1.01, 1.2001, computed=False) >= 0.0
    assert times.ended(1.2, 1.5) == pytest.approx(0.3)


DECODE = RequestView("a", SLO(ttft_s=1.0, tpot_s=0.1), 0.0, 8, 9, 1, 2, 1.0, running=True)
"""Its third token is due at 1.2, its fourth at 1.3."""


@pytest.mark.parametrize(
    ("view", "tokens", "latest_s"),
    [
        (DECODE, 1, 1.3 - 0.05),
        (DECODE._replace(best_effort=True), 1, inf),
        (DECODE._replace(slo=SLO()), 1, inf),
        # Late in any case: it would have to begin before its batch ends at 1.1.
        (DECODE._replace(first_token_s=0.8, slo=SLO(ttft_s=0.8, tpot_s=0.1)), 1, inf),
        # The first token leaves when the batch ends, or is due before; the next one after a TPOT.
        (RequestView("a", DECODE.slo, 0.5, 8, 0, 8), 8, 1.2 - 0.05),
        (RequestView("a", DECODE.slo, 0.05, 8, 0, 8), 8, 1.15 - 0.05),
        (RequestView("a", DECODE.slo, 0.5, 8, 0, 8), 4, inf),
    ],
)
def test_when_the_next_batch_of_these_requests_must_begin(
    view: RequestView, tokens: int, latest_s: float
) -> None:
    queue = QueueView([view])
    plan = BatchPlan(queue, np.array([0]), np.array([tokens]), 0.05)
    assert next_start_s(queue, plan, 1.1) == pytest.approx(latest_s)


def test_a_batch_behind_others_has_the_time_that_they_leave() -> None:
    latency = LinearLatency(a=0.010, b=0.001)
    assert spare_tokens([], 0.0, latency, 2) > 1_000_000
    assert spare_tokens([(inf, 0.5), (0.030, 0.015)], 0.010, latency, 2) == 30
    assert spare_tokens([(0.030, 0.015)], 0.029, latency, 2) == 5, "as long as the one before"
