"""Times of steps in a pipeline, against one whose stages' times are known, and what a step leaves
to the one behind it."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.scheduler.local_scheduler import (
    Occupancy,
    StepTimes,
    next_start_s,
    spare_tokens,
)
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


def test_empty_steps_where_all_requests_are_in_flight_change_nothing() -> None:
    times = StepTimes(2)
    assert times.ended(1.0, 1.2) == pytest.approx(0.2)
    assert times.ended(1.01, 1.2001, computed=False) >= 0.0
    assert times.ended(1.2, 1.5) == pytest.approx(0.3)


def launched(
    batches: Batches, off: float = 0.0, share: float = 1.0
) -> tuple[list[float], list[float]]:
    """What is measured, and what is true, of batches (seconds of launch and device) by a loop that
    launches each before it waits for the one before, and has a processor for a ``share`` of its
    launches. Each is predicted as ``off`` times the truth."""
    times = StepTimes(launches=True)
    now_s = cpu_s = free_s = 0.0
    found, true = list[float](), list[float]()
    in_flight = list[tuple[float, float]]()
    for launch_s, device_s in [*batches, (0.0, 0.0)]:
        started_s = now_s
        times.began(now_s, cpu_s)
        now_s, cpu_s = now_s + launch_s, cpu_s + share * launch_s
        times.launched(now_s, cpu_s)
        # The device computes what was launched already.
        entered_s = max(started_s, free_s)
        free_s = max(now_s, entered_s + device_s)
        true.append(free_s - entered_s)
        in_flight.append((started_s, free_s))
        if len(in_flight) == 2:
            own_s, end_s = in_flight.pop(0)
            now_s = max(now_s, end_s)
            predicted_s = off * true[len(found)]
            found.append(times.ended(own_s, now_s, cpu_s=cpu_s, predicted_s=predicted_s))
    return found, true[:-1]


LAUNCHES = st.lists(
    st.tuples(st.floats(0.001, 0.1), st.floats(0.001, 0.2)), min_size=1, max_size=30
)


@given(LAUNCHES, st.sampled_from([1.0, 0.3]))
def test_of_batches_that_are_predicted_right_each_time_is_exact(
    batches: Batches, share: float
) -> None:
    """Also of those whose end is seen late, behind a launch that is long or waits for a core."""
    found, true = launched(batches, 1.0, share)
    assert found == pytest.approx(true, rel=1e-6, abs=1e-9)


@given(LAUNCHES, st.floats(0.1, 10.0))
def test_a_wrong_prediction_moves_time_between_batches_and_adds_none(
    batches: Batches, off: float
) -> None:
    found, true = launched(batches, off)
    assert min(found) >= 0.0
    # The end of the last one is waited for.
    assert sum(found) == pytest.approx(sum(true), rel=1e-6)


@pytest.mark.parametrize(("launch_s", "device_s"), [(3, 7), (10, 12), (7, 7), (16, 7)])
def test_batches_that_are_alike_take_the_longer_of_launch_and_device(
    launch_s: float, device_s: float
) -> None:
    found, _ = launched([(launch_s, device_s)] * 20)
    # Until the device is behind the loop, which begins with an idle engine, ends are seen late.
    assert found[10:-1] == pytest.approx([max(launch_s, device_s)] * 9)
    assert sum(found[:-1]) == pytest.approx(19 * max(launch_s, device_s))


def test_a_launch_that_hides_the_end_of_the_batch_before_it_is_no_part_of_its_time() -> None:
    """Decodes of 7 ms, and a prefill whose launch takes 16 ms and the device 20. From end to end
    the decode before it took 16 ms, and the prefill 11."""
    decode, prefill = (0.003, 0.007), (0.016, 0.020)
    found, _ = launched([decode] * 4 + [prefill] + [decode] * 4)
    assert found[4] == pytest.approx(0.020)
    assert found[:4] + found[5:-1] == pytest.approx([0.007] * 7)
    # On CPUs nothing is computed while the loop does something else.
    alone = [(0.010, 0.0), (0.050, 0.0), (0.010, 0.0), (0.120, 0.0), (0.010, 0.0)]
    assert launched(alone)[0] == pytest.approx([launch_s for launch_s, _ in alone])


def test_an_empty_batch_that_is_seen_behind_a_launch_takes_no_time_of_the_next() -> None:
    times = StepTimes(launches=True)
    times.began(1.0, 0.0)
    times.began(1.0, 0.0)
    times.launched(1.020, 0.0)
    assert times.ended(1.0, 1.020, computed=False) == 0.0
    assert times.ended(1.0, 1.024) == pytest.approx(0.024)


@pytest.mark.parametrize(("predicted_s", "guessed"), [(0.0, True), (7.0, False)])
def test_times_around_an_end_that_is_seen_late_are_guesses_without_a_prediction(
    predicted_s: float, guessed: bool
) -> None:
    times, found = StepTimes(launches=True), list[bool]()
    # Launch of each; begin and end of the launch of the next one; its own end. That of the second
    # one is seen late.
    for began_s, next_s, launched_s, ended_s in (
        (0, 2, 4, 7),
        (2, 7, 23, 23),
        (7, 23, 25, 27),
        (23, 27, 29, 34),
    ):
        times.began(next_s, 0.0)
        times.launched(launched_s, 0.0)
        times.ended(began_s, ended_s, predicted_s=predicted_s)
        found.append(times.guessed)
    assert found == [False, guessed, guessed, False]


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=40), st.floats(1.0, 1.5))
def test_predictions_that_are_too_long_do_not_add_up_while_batches_are_in_flight(
    batches: list[float], off: float
) -> None:
    """Two in flight: the end of the running one is known up to the error of one prediction."""
    occupancy, now_s, ends_s = Occupancy(), 0.0, 0.0
    occupancy.began(0.0, 0.0, False)
    for seconds in batches:
        start_s = max(now_s, occupancy.entry_free_s)
        occupancy.began(start_s, off * seconds, True)
        # The one before it ends, and this one begins.
        now_s, ends_s = ends_s, ends_s + seconds
        occupancy.ended(now_s)
        assert ends_s - 1e-9 <= occupancy.entry_free_s <= now_s + off * seconds + 1e-9
        assert occupancy.busy_until_s == occupancy.entry_free_s


def test_a_batch_leaves_each_stage_behind_the_one_before_it() -> None:
    occupancy = Occupancy(2)
    occupancy.began(0.0, 1.0, False)
    assert (occupancy.entry_free_s, occupancy.busy_until_s) == (0.5, 1.0)
    occupancy.began(0.5, 0.4, True)
    assert (occupancy.entry_free_s, occupancy.busy_until_s) == pytest.approx((0.7, 1.2))
    # The first one has taken half as long as predicted.
    occupancy.ended(0.5)
    assert (occupancy.entry_free_s, occupancy.busy_until_s) == pytest.approx((0.7, 0.9))


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
