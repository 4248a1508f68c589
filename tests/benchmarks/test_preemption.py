"""The benchmarks of preemption: their loads, and how their figures are made of what they measure.
Their engines are tested beside those of preemption itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.live.client import End, Outcome
from sluice.benchmarks.live.preemption.command import spread
from sluice.benchmarks.live.preemption.whole_stack import (
    MOST,
    WAYS,
    Load,
    config_of,
    make_load,
    summary,
    tokens_body,
)
from sluice.scheduling.latency.request_model import PolynomialTTFT
from sluice.scheduling.request.objective import SLO
from sluice.simulation.workloads.settings import FLOWPREFILL_SHARES, FLOWPREFILL_TTFT_S

ALONE = PolynomialTTFT((0.004, 3e-4, 1e-8))


def test_overheads_are_told_with_the_interval_of_their_median():
    """Of 10 pairs, the sign test leaves out one at each end: 2 * 11 / 1024 is below 5 %, and
    2 * 56 / 1024 above."""
    ratios = iter([1.0, 1.0, 1.5, 0.9, 1.2, 1.1, 1.0, 1.3, 0.8, 1.4, 1.25, 0.95])
    found = spread(10, lambda: next(ratios), lambda: 1.0)  # the first one warms up
    assert (found["median"], found["interval"]) == (0.15, [-0.1, 0.4])
    assert (found["pairs"], found["one_ms"], found["other_ms"]) == (10, 1150.0, 1000.0)


def test_every_second_pair_is_the_other_way_round():
    calls = []
    spread(6, lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 1.0)
    assert "".join(calls) == "ab" + 3 * "abba"


@settings(max_examples=20, deadline=None)
@given(share=st.floats(0.2, 2.0), seed=st.integers(0, 50))
def test_prefills_fill_the_share_of_the_time_that_was_asked_for(share, seed):
    load, workload = make_load(share, ALONE, seconds=60.0, seed=seed)
    busy_s = sum(ALONE.seconds(each.prompt_tokens) for each in workload.arrivals)
    gaps = len(workload) - 1
    assert busy_s / len(workload) * workload.rate == pytest.approx(share)
    assert load.rate == pytest.approx(workload.rate)
    assert workload.duration_s == pytest.approx(gaps / load.rate, rel=0.25)
    assert max(each.prompt_tokens for each in workload.arrivals) <= MOST
    assert {each.output_tokens for each in workload.arrivals} == {1}


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_objectives_are_as_long_as_prefills_take_here(slower):
    alone = PolynomialTTFT(tuple(slower * each for each in ALONE.coefficients))
    load, workload = make_load(0.9, alone, seconds=600.0, seed=1)
    assert load.slo_scale == pytest.approx(slower, rel=0.5)
    names = Counter(each.slo.service_class for each in workload.arrivals)
    for name, percent in FLOWPREFILL_SHARES.items():
        assert names[name] / len(workload) == pytest.approx(percent / 100, abs=0.05)
    for each in workload.arrivals:
        paper_s = FLOWPREFILL_TTFT_S["llama3-8b"][each.slo.service_class]
        assert each.slo.ttft_s == pytest.approx(paper_s * load.slo_scale)


def test_every_way_is_a_configuration_of_the_whole_stack(tmp_path: Path):
    load = Load(0.2, 1.0, 4.5)
    configs = {
        name: config_of(way, tmp_path, load, tmp_path)
        for name, way in WAYS.items()
        if way.engine is not None
    }
    assert configs["operator"].engine.preemption.granularity == "operator"
    assert configs["EDF, chunks of 512"].engine.policy == "edf"
    assert [name for name in WAYS if name not in configs] == ["stock, threshold 256"]


def test_a_prompt_has_its_tokens_and_is_like_no_other():
    _, workload = make_load(0.9, ALONE, seconds=20.0, seed=1)
    prompts = [
        tokens_body("small", number, each)["prompt"]
        for number, each in enumerate(workload.arrivals)
    ]
    assert [len(each) for each in prompts] == [each.prompt_tokens for each in workload.arrivals]
    assert len({tuple(each[:8]) for each in prompts}) == len(prompts)


def test_figures_are_by_class_and_of_all_that_were_sent():
    text, file = (SLO(ttft_s=1.0, service_class=name) for name in ("text", "file"))
    outcomes = [
        Outcome(text, 9, 1, 0.0, 0.001, End.ANSWERED, "", ttft_s=0.5, tpot_s=0.0),
        Outcome(text, 9, 1, 0.0, 0.003, End.ANSWERED, "", ttft_s=1.5, tpot_s=0.0),
        Outcome(file, 9, 1, 0.0, 0.002, End.FAILED, "broken"),
    ]
    stops = {
        "sluice_prefill_suspensions_total": 4.0,
        "sluice_prefill_stop_seconds_count": 4.0,
        "sluice_prefill_stop_seconds_sum": 0.2,
    }
    found = summary(outcomes, stops)
    assert found["classes"]["text"]["attained"] == 0.5
    assert found["classes"]["file"]["attained"] == 0.0
    assert found["classes"]["image"]["attained"] is None
    assert found["all"]["attained"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["unanswered"] == ["broken"]
    assert (found["suspensions"], found["blocked_ms"]) == (4, 50.0)
