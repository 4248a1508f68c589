"""Measurements against worked examples, and against the token clock of the live system."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO, GainWeights, TokenClock, TPOTAnchor
from sluice.simulation.config import EngineConfig
from sluice.simulation.metrics import (
    TPOTMetric,
    attained,
    deadline_gain,
    judged_tpot_s,
    metric_name,
    stages,
    worst_by_request,
)
from sluice.simulation.mirror import SLOCounter
from sluice.simulation.requests import Requests
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival, Stage, Workload
from tests.examples import examples
from tests.simulation.loads import of, workloads

# Token times of one request that arrived at 1.0.
TIMES = [1.5, 1.52, 1.62, 1.64, 1.66]


def emitted(times: list[float], slo: SLO, output: int | None = None) -> Requests:
    requests = Requests(of([Arrival(1.0, 100, output or len(times), slo)]))
    requests.emitted_s[: len(times)] = times
    return requests


def test_four_readings_of_tpot() -> None:
    requests = emitted(TIMES, SLO(ttft_s=0.4, tpot_s=0.05))
    tpot_s = {metric: float(value[0]) for metric, value in stages(requests).tpot_s.items()}
    assert tpot_s[TPOTMetric.MEAN] == pytest.approx(0.16 / 4)
    assert tpot_s[TPOTMetric.RUNNING_MAX] == pytest.approx(0.12 / 2)
    assert tpot_s[TPOTMetric.WINDOW] == pytest.approx(0.16 / 4), "one window for five tokens"
    # Deadlines start at 1.4: the second token is 0.12 behind that, the third 0.22 over two.
    assert tpot_s[TPOTMetric.ENVELOPE] == pytest.approx(0.12)
    assert attained(emitted(TIMES, SLO(ttft_s=0.5, tpot_s=0.04)), stages(requests), TPOTMetric.MEAN)
    verdicts = {
        metric: bool(attained(requests, stages(requests), metric)[0])
        for metric, requests in (
            (m, emitted(TIMES, SLO(ttft_s=0.6, tpot_s=0.05))) for m in TPOTMetric
        )
    }
    assert verdicts == {
        TPOTMetric.MEAN: True,
        TPOTMetric.RUNNING_MAX: False,
        TPOTMetric.WINDOW: True,
        TPOTMetric.ENVELOPE: True,
    }


def test_a_request_cut_short_attains_nothing_but_keeps_its_gain() -> None:
    requests = emitted([1.1, 1.12], SLO(ttft_s=0.5, tpot_s=0.05), output=4)
    measured = stages(requests)
    assert not attained(requests, measured, TPOTMetric.MEAN)[0]
    assert np.isnan(measured.e2e_s[0])
    gain = deadline_gain(requests, measured, GainWeights(10, 1))
    assert (gain.gain[0], gain.ideal[0], gain.ratio) == (11, 13, 11 / 13)


def test_the_gain_counts_priority_and_the_workload_sets_the_weights() -> None:
    slo = SLO(ttft_s=0.5, tpot_s=0.05, priority=3)
    requests = emitted([1.6, 1.61, 1.62], slo)
    measured = stages(requests)
    # Mean input 100, mean output 3. The first token is late by the envelope, its followers early:
    # due at 1.5, 1.55 and 1.6.
    assert deadline_gain(requests, measured).ideal[0] == 3 * (100 + 2 * 3)
    assert deadline_gain(requests, measured).gain[0] == 0
    relaxed = emitted([1.6, 1.61, 1.62], replace(slo, tpot_s=0.2))
    assert deadline_gain(relaxed, stages(relaxed)).gain[0] == 3 * 2 * 3
    # In time is before the deadline, as for the token clock, not at it.
    exact = emitted([1.25, 1.5, 1.75], SLO(ttft_s=0.25, tpot_s=0.25))
    assert deadline_gain(exact, stages(exact)).gain[0] == 0


def clocks_of(requests: Requests, weights: GainWeights) -> list[TokenClock]:
    """The live system's clocks, one per stage, fed with a run's times."""
    clocks = []
    for index, slo in enumerate(requests.stage_slos):
        key = int(requests.stage_request[index])
        start = int(requests.offsets[index])
        times = requests.emitted_s[start : int(requests.offsets[index + 1])].tolist()
        continues = index > requests.first_stage[key]
        arrival_s = requests.emitted_s[start - 1] if continues else requests.arrivals[key].arrival_s
        clock = TokenClock(slo, float(arrival_s), weights)
        for when in times:
            clock.emit(1, when)
        clocks.append(clock)
    return clocks


@settings(max_examples=examples(60))
@given(load=workloads)
def test_measurements_agree_with_the_token_clock(load: Workload) -> None:
    config = EngineConfig(max_batch_tokens=64, max_sequences=3)
    # So slow that tokens are late by little, by much, and not at all.
    slow = LinearLatency(a=0.018, b=2e-4, c=1e-6)
    requests = simulate(load, make_policy("slidebatching"), slow, config=config).requests
    measured = stages(requests)
    weights = GainWeights(first=5.0, later=1.5)
    clocks = clocks_of(requests, weights)
    assert measured.ttft_s.tolist() == pytest.approx([clock.ttft_s for clock in clocks])
    mean = [np.nan if clock.tpot_s is None else clock.tpot_s for clock in clocks]
    assert measured.tpot_s[TPOTMetric.MEAN].tolist() == pytest.approx(mean, nan_ok=True)
    met = [clock.attained(clock.last_token_s or 0.0) for clock in clocks]
    expected = np.ones(len(requests), bool)
    np.logical_and.at(expected, requests.stage_request, met)
    assert attained(requests, measured, TPOTMetric.MEAN).tolist() == expected.tolist()
    some = ~np.isnan(measured.tpot_s[TPOTMetric.MEAN])
    largest, means = (measured.tpot_s[m][some] for m in (TPOTMetric.RUNNING_MAX, TPOTMetric.MEAN))
    assert (largest >= means - 1e-9).all()
    gain = deadline_gain(requests, measured, weights)
    assert gain.gain.sum() == pytest.approx(sum(clock.gain for clock in clocks))
    ideal = sum(clock.earned.first_ideal + clock.earned.later_ideal for clock in clocks)
    assert gain.ideal.sum() == pytest.approx(ideal)


@settings(max_examples=examples(100))
@given(
    streams=st.lists(
        st.tuples(
            st.sampled_from(TPOTAnchor),
            st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 6)), min_size=1, max_size=12),
        ),
        min_size=1,
        max_size=4,
    ),
    tpot_s=st.floats(0.01, 0.5),
)
def test_the_simulator_judges_as_the_edge(
    streams: list[tuple[TPOTAnchor, list[tuple[float, int]]]], tpot_s: float
) -> None:
    clocks, made, times = [], [], list[float]()
    for anchor, groups in streams:
        slo = SLO(ttft_s=0.9, tpot_s=tpot_s, tpot_anchor=anchor)
        clock, now_s = TokenClock(slo, 1.0), 1.0
        for gap_s, tokens in groups:
            now_s += gap_s
            clock.emit(tokens, now_s)
            times += [now_s] * tokens
        clocks.append(clock)
        made.append(Arrival(1.0, 100, clock.tokens, slo))
    requests = Requests(of(made))
    requests.emitted_s[:] = times
    measured = stages(requests)
    expected = [np.nan if clock.tpot_s is None else clock.tpot_s for clock in clocks]
    np.testing.assert_array_equal(judged_tpot_s(requests, measured), expected)
    met = [clock.attained(clock.last_token_s or 0.0) for clock in clocks]
    assert attained(requests, measured).tolist() == met
    counted = SLOCounter(requests)
    for key in range(len(requests)):
        counted.ended(key)
    assert counted.attained == sum(met)


def test_results_name_the_tpot_that_was_judged() -> None:
    mean, window = SLO(), SLO(tpot_anchor=TPOTAnchor.WINDOW)
    assert metric_name(None, [mean]) == metric_name(None, []) == "mean"
    assert metric_name(None, [window, window]) == "window"
    assert metric_name(None, [mean, window]) == "stated"
    assert metric_name(TPOTMetric.ENVELOPE, [mean]) == "envelope"


def test_a_request_of_stages_is_as_good_as_its_worst() -> None:
    stages_of = [Stage(3, SLO(tpot_s=0.05)), Stage(3, SLO(tpot_s=0.02))]
    requests = Requests(of([Arrival.of_stages(0.0, 10, stages_of)]))
    requests.emitted_s[:] = [0.1, 0.14, 0.18, 0.19, 0.2, 0.21]
    measured = stages(requests)
    pace_s = measured.tpot_s[TPOTMetric.MEAN]
    assert pace_s.tolist() == pytest.approx([0.04, 0.01])
    assert worst_by_request(requests, measured, pace_s).tolist() == pytest.approx([0.04])
    assert measured.start_s.tolist() == pytest.approx([0.0, 0.18])
    assert attained(requests, measured, TPOTMetric.MEAN).tolist() == [True]
    requests.emitted_s[5] = 0.24
    assert attained(requests, stages(requests), TPOTMetric.MEAN).tolist() == [False]
