from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.autoscaling.role_shares import PoolDemand
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.capacity import (
    MAX_REPLICAS,
    Pools,
    Search,
    least_busy,
    pool_demand,
    search,
    search_pools,
)
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.engine import Truth
from sluice.simulation.workload import Arrival, Stage, Workload
from tests.simulation.loads import clustered, met, workload

SERVICE = LinearLatency(a=0.05, b=5e-5)
"""A prompt of 1,000 tokens takes 0.1 s."""

counts = st.integers(1, MAX_REPLICAS)


class Counter:
    """Attainment by count, as given; it refuses to be asked twice."""

    def __init__(self, attainment: dict[int, float], otherwise: float) -> None:
        self._attainment = attainment
        self._otherwise = otherwise
        self.asked: list[int] = []

    def __call__(self, replicas: int) -> float:
        assert replicas not in self.asked
        self.asked.append(replicas)
        return self._attainment.get(replicas, self._otherwise)


@given(needed=counts, start=st.integers(-3, MAX_REPLICAS + 3), most=counts)
def test_where_attainment_grows_the_smallest_count_is_found_in_few_runs(
    needed: int, start: int, most: int
) -> None:
    asked: list[int] = []

    def attainment(replicas: int) -> float:
        assert 1 <= replicas <= most
        assert replicas not in asked
        asked.append(replicas)
        return 0.96 if replicas >= needed else 0.94

    found = search(attainment, 0.95, start, most)
    assert found.replicas == (needed if needed <= most else None)
    assert list(found.attainment) == asked
    nearest = min(max(start, 1), most)
    assert asked[0] == nearest
    # The gallop doubles its steps, and halving takes as many runs again.
    assert len(asked) <= 2 * log2(1 + abs(min(needed, most) - nearest)) + log2(nearest) + 3


@given(
    shares=st.lists(st.one_of(st.floats(0, 1), st.just(nan)), min_size=1, max_size=40),
    start=st.integers(1, 40),
)
def test_whatever_the_curve_the_answer_is_a_count_at_which_it_crosses_the_target(
    shares: list[float], start: int
) -> None:
    curve = Counter(dict(enumerate(shares, 1)), 0.0)
    found = search(curve, 0.5, start, len(shares))
    assert found.attainment.keys() == set(curve.asked)
    if found.replicas is None:
        assert not found.attainment[len(shares)] >= 0.5
    else:
        assert found.attainment[found.replicas] >= 0.5
        if found.replicas > 1:
            assert not found.attainment[found.replicas - 1] >= 0.5


def test_steps_away_from_the_start_double() -> None:
    curve = Counter({8: 1.0, 9: 1.0, 7: 0.9}, 0.9)
    assert search(curve, 0.95, 1, 64) == Search(8, {1: 0.9, 2: 0.9, 4: 0.9, 8: 1.0, 6: 0.9, 7: 0.9})
    down = Counter({1: 0.9, 2: 0.9}, 1.0)
    assert search(down, 0.95, 16, 64).replicas == 3
    assert down.asked == [16, 14, 10, 2, 6, 4, 3]


def test_the_search_starts_at_the_engines_that_the_work_fills() -> None:
    # Each request is a prompt of 0.05 s and one decode of 50 us more; ten of them in 0.2 s.
    even = workload(*((0.2 * index / 9, 1_000, 2) for index in range(10)))
    assert least_busy(even, SERVICE) == 3
    assert least_busy(workload((5.0, 10_000, 1)), SERVICE) == 1
    assert least_busy(Workload("none", ()), SERVICE) == 1


def test_pools_are_what_the_mean_request_takes_of_each_phase() -> None:
    # A prompt of 1,000 tokens is 50 ms; each of 100 tokens 50 us, of which 0.2 s hold 3,000, but
    # there are places for 100: steps of 55 ms.
    slo = SLO(ttft_s=1.0, tpot_s=0.2)
    load = workload(*((0.1 * index, 1_000, 100) for index in range(5)), slo=slo)
    config = EngineConfig(max_sequences=100)
    assert pool_demand(load, SERVICE, config) == pytest.approx((0.05, 100 * 0.055 / 100))
    # KV for 50 of them, 1,050 tokens each at the middle of the output.
    small = EngineConfig(kv_blocks=52_500, block_tokens=1)
    assert pool_demand(load, SERVICE, small) == pytest.approx((0.05, 100 * 0.0525 / 50))
    # What a tool answers is prefilled where the request decodes.
    tool = Arrival.of_stages(0.0, 1_000, [Stage(50, slo), Stage(50, slo, 2_000)])
    loop = Workload("loop", (tool,))
    assert pool_demand(loop, SERVICE, config) == pytest.approx((0.05, 0.1 + 100 * 0.055 / 100))
    with pytest.raises(ValueError, match="workload none has no request to measure"):
        pool_demand(Workload("none", ()), SERVICE, config)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        *(
            (partial(search, float, bad, 1, 8), "target must be above 0")
            for bad in (0.0, 1.01, nan)
        ),
        (partial(search, float, 0.9, 1, 0), "most must be at least 1, got 0"),
        (
            partial(search_pools, sum, 0.9, PoolDemand(1.0, 1.0), 2, 1),
            "at least 2, one replica of each role, got 1",
        ),
    ],
)
def test_impossible_searches_are_refused(run: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run()


@given(
    needed=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    demand=st.builds(PoolDemand, prefill=st.floats(0.01, 1), decode=st.floats(0.01, 1)),
    start=st.integers(0, 60),
    most=st.integers(2, 60),
)
def test_the_fewest_replicas_of_both_roles_are_found_whatever_the_formula_says(
    needed: Pools, demand: PoolDemand, start: int, most: int
) -> None:
    asked: list[Pools] = []

    def attainment(pools: Pools) -> float:
        assert min(pools) >= 1
        assert sum(pools) <= most
        assert pools not in asked
        asked.append(pools)
        return 0.96 if pools[0] >= needed[0] and pools[1] >= needed[1] else 0.5

    found = search_pools(attainment, 0.95, demand, start, most)
    assert list(found.attainment) == asked
    if found.pools is not None:
        assert found.pools == needed
    else:
        # Only sizes in the formula's ratio are tried until one reaches the target.
        split = demand.split(most)
        assert split[0] < needed[0] or split[1] < needed[1]


def test_of_pools_of_one_size_the_best_is_taken() -> None:
    def attainment(pools: Pools) -> float:
        return 0.5 if sum(pools) < 6 else 1.0 - abs(pools[0] - 4) / 100

    demand = PoolDemand(1.0, 1.0)
    assert search_pools(attainment, 0.95, demand, 2, 20).pools == (4, 2)


def test_requests_at_a_steady_pace_need_as_many_replicas_as_they_last() -> None:
    """One each 0.03 s, 0.1 s long: with four replicas none waits. With three, each waits 0.01 s
    longer than the one before it on its replica, and only the first few are in time."""
    slo = SLO(ttft_s=0.125)
    load = Workload("even", tuple(Arrival(0.03 * i, 1_000, 1, slo) for i in range(120)))

    def attainment(replicas: int) -> float:
        cluster = ClusterConfig(replicas=replicas, dispatch_s=0.0, report_interval_s=0.5)
        engine, exact = EngineConfig(max_sequences=1), Truth(SERVICE, noise=0.0)
        done = clustered(load, cluster, router="round_robin", truth=exact, engine=engine)
        return float(met(done).mean())

    found = search(attainment, 0.95, 1, 16)
    assert found.replicas == 4
    assert found.attainment[4] == 1.0
    # The k-th on a replica waits 0.01 k s, and may wait 0.025 s.
    assert found.attainment[3] == 9 / 120
