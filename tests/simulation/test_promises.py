"""Simulated promises have the margins of production, and are judged by what was stated."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from sluice.scheduling.request.kernels import E2E, TPOT, TTFT
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import ClusterConfig
from sluice.simulation.engine import Belief, Truth
from sluice.simulation.mirror import SLOCounter, late, observed
from sluice.simulation.requests import Requests
from sluice.simulation.run import Result, simulate
from sluice.simulation.workload import Arrival, Stage, Workload
from tests.simulation.loads import MODEL, batch, clustered, met, of, workload, workloads

STATED = SLO(ttft_s=0.5, tpot_s=0.05, e2e_s=4.0)


def run(load: Workload, level: float | None, **more: Any) -> Result:
    one = ClusterConfig(replicas=1, promise_level=level)
    return clustered(load, one, policy="deadline_triage", belief=Belief(MODEL), seed=1, **more)


def promised_and_kept(level: float | None, noise: float) -> tuple[float, float]:
    """Shares of the requests, of more than the engine can prefill."""
    load = workload(*((0.015 * n, 300, 8) for n in range(1_000)), slo=SLO(ttft_s=0.3))
    result = run(load, level, truth=Truth(MODEL, noise), admission="moore_hodgson")
    promised = ~np.isnan(result.requests.promised_s)
    return float(promised.mean()), float(met(result)[promised].mean())


def test_margins_keep_promises_that_are_missed_without() -> None:
    (promised, kept), (more, fewer) = (promised_and_kept(level, 0.03) for level in (0.99, None))
    assert min(promised, more) > 0.5
    assert 1 - kept < 0.6 * (1 - fewer)


def test_promises_are_kept_where_no_step_takes_the_time_that_is_predicted() -> None:
    promised, kept = promised_and_kept(None, noise=0.3)
    # The policy's head-room grows with the noise; with a tenth it would keep 71 %.
    assert promised > 0.8 and kept > 0.85


@given(workloads)
def test_without_admission_there_are_no_margins(load: Workload) -> None:
    with_level, without = (run(load, level) for level in (0.99, None))
    assert np.array_equal(with_level.requests.times, without.requests.times, equal_nan=True)
    assert with_level.end_s == without.end_s


def test_an_engine_works_by_the_plan_and_later_stages_by_the_same_shares() -> None:
    own = [Stage(2, SLO(0.5, 0.05)), Stage(2, SLO(1.0, 0.1, 8.0), prompt_tokens=20)]
    requests = Requests(of([Arrival.of_stages(0.0, 100, own)]))
    stated = requests.arrivals[0].slo
    requests.serve_as(0, False, 0.1, stated, (0.4, 0.04, None))
    row = requests.rows[0]
    assert row[TTFT : E2E + 1].tolist() == [0.4, 0.04, np.inf]
    assert requests.slos[0] == SLO(0.4, 0.04)
    assert requests.rest(0, 0.2) == stated, "what is asked for again is what was stated"
    (later,) = requests.later(np.array([0]), requests.private).tolist()
    assert later == pytest.approx([0.08, 1, 20]), "what is to come is planned, too"
    requests.next_stage(0, row, requests.private[0], 1.0)
    assert row[[TTFT, TPOT, E2E]] == pytest.approx([0.8, 0.08, 8.0])
    (later,) = requests.later(np.array([0]), requests.private).tolist()
    assert later == [np.inf, 0, 0]
    requests.serve_as(0, True, stated=stated)
    assert requests.slos[0] == SLO(0.5, 0.05), "and where it is promised no more, as stated"


def test_margins_learn_from_the_stage_that_took_the_largest_share() -> None:
    own = [Stage(1, SLO(0.5, 0.05)), Stage(3, SLO(1.0, 0.1), prompt_tokens=20)]
    requests = Requests(of([Arrival.of_stages(1.0, 100, own)]))
    assert observed(requests, 0) is None
    requests.emitted_s[:] = [1.2, 2.1, 2.16, 2.22]
    found = observed(requests, 0)
    assert found is not None
    ttft_s, tpot_s, e2e_s = found
    assert ttft_s == pytest.approx(0.9 / 1.0 * 0.5)
    assert tpot_s == pytest.approx(0.06 / 0.1 * 0.05)
    assert e2e_s is None


@given(workloads)
def test_what_margins_learn_is_what_attainment_is_judged_by(load: Workload) -> None:
    result = simulate(load, batch("fcfs")("mixed"), Truth(MODEL, 0.1))
    requests, attains = result.requests, met(result)
    counted = SLOCounter(requests)
    for key, arrival in enumerate(load.arrivals):
        before = counted.attained
        counted.ended(key)
        if any(stage.slo.stated for stage in arrival.stages) or arrival.slo.stated:
            assert (counted.attained > before) == attains[key]
        seen = observed(requests, key)
        assert (seen is None) == (key in requests.failures)
        if seen is not None and not arrival.stages:
            pairs = zip(seen, arrival.slo.columns, strict=False)
            assert attains[key] == all((real_s or 0.0) <= due_s for real_s, due_s in pairs)


def test_what_is_late_by_now_is_told_while_it_goes_on() -> None:
    requests = Requests(of([Arrival(1.0, 100, 20, SLO(0.5, 0.05))]))
    assert late(requests, 0) == (None, None)
    requests.emitted_s[:7] = 1.6 + 0.1 * np.arange(7)
    assert late(requests, 0) == (pytest.approx(0.6), None), "too few tokens for a pace"
    requests.emitted_s[:9] = 1.4 + 0.1 * np.arange(9)
    assert late(requests, 0) == (None, pytest.approx(0.1))
    requests.emitted_s[:9] = 1.4 + 0.04 * np.arange(9)
    assert late(requests, 0) == (None, None)
