"""The autoscaling experiment: what it compares, on cases small enough to check by hand."""

from __future__ import annotations

import pytest

from sluice.benchmarks.experiments.autoscaling import (
    OURS,
    SETUP,
    Scaling,
    changing,
    measure,
    peak_load,
    surges,
)
from sluice.benchmarks.experiments.loads import GENERATED, full_load_rate
from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Workload

CHAT_RATE = full_load_rate(GENERATED["proserve sharegpt"], SETUP)


def at(*times_s: float) -> Workload:
    return Workload("times", tuple(Arrival(time_s, 10, 2, SLO(ttft_s=1.0)) for time_s in times_s))


def test_the_peak_is_the_largest_rate_over_a_while() -> None:
    workload = at(0.0, 10.0, 10.5, 11.0, 11.9, 40.0)
    assert peak_load(workload, full_rate=1.0, over_s=2.0) == 4 / 2.0
    assert peak_load(workload, full_rate=2.0, over_s=100.0) == pytest.approx(6 / 100 / 2)


def test_the_changing_mix_has_its_load_and_two_kinds_of_objectives() -> None:
    workload = changing(600.0, SETUP, 2.0 * CHAT_RATE, round(2.0 * CHAT_RATE * 600), 1)
    assert workload.duration_s == pytest.approx(600.0, rel=0.1)
    assert {arrival.slo.ttft_s for arrival in workload.arrivals} == {0.8, 4.0}
    documents = [a.arrival_s for a in workload.arrivals if a.slo.ttft_s == 4.0]
    chats = [a.arrival_s for a in workload.arrivals if a.slo.ttft_s == 0.8]
    night = sum(time_s < 150 for time_s in documents) / len(documents)
    day = sum(time_s < 150 for time_s in chats) / len(chats)
    assert night > 0.3 > 0.15 > day


def test_a_fixed_pool_and_one_that_scales_serve_the_same_requests() -> None:
    fixed = measure(1, (surges, CHAT_RATE), Scaling(peak=True), 1.0, 30.0)
    scaled = measure(1, (surges, CHAT_RATE), OURS, 1.0, 30.0)
    assert fixed["changes"] == 0
    assert fixed["rate"] == scaled["rate"]
    assert fixed["replica_hours"] >= fixed["most_replicas"] * 25 / 3600
    assert 0 < scaled["attainment_mean"] <= 1
