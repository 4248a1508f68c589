"""When refused requests are told to come again: what is told and kept, and whether it holds."""

from math import exp, isfinite

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling import batching, routing
from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.admission.room import MIN_WAIT_S
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.placement.retry_after import (
    GRACE_S,
    HORIZON_S,
    LEVEL,
    MAX_FACTOR,
    MAX_PLACES,
    MAX_TENANTS,
    MIN_FACTOR,
    Line,
    RetryAfter,
)
from sluice.scheduling.request.job import RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig
from sluice.simulation.requests import Requests
from sluice.simulation.workload import Arrival, Workload
from tests.examples import examples
from tests.scheduling.fleets import fleet_of, report, row

SLOW = SLO(ttft_s=1.0, tpot_s=0.1)


def query(name: str = "a", tenant: int = 0, key: int = 1) -> RouteQuery:
    return RouteQuery(
        key, SLOW, 1_000, tiers=frozenset({Tier.GUARANTEED}), tenant=tenant, client_request_id=name
    )


def busy_line() -> Line:
    """A line whose tenant is promised 1,000 tokens a second."""
    line = Line(0.0)
    for second in range(100):
        line.promised("other", 1_000.0, float(second))
    return line


def test_each_refused_one_is_told_a_later_moment() -> None:
    line = busy_line()
    told_s = [line.refused(name, 500.0, 1_000.0, 0.2, 100.0)[0] for name in range(10)]
    assert told_s[0] == pytest.approx(0.2)
    steps = np.diff(told_s[1:])
    # A second each for those of whom somebody comes, half of them as far as is known.
    assert np.all((steps > 0.4) & (steps < 0.6))


def test_who_asks_early_is_told_the_same_moment_again_and_teaches_nothing() -> None:
    line = busy_line()
    told_s, _ = line.refused("a", 500.0, 1_000.0, 4.0, 100.0)
    again_s, came = line.refused("a", 500.0, 1_000.0, 9.0, 101.0)
    assert (again_s, came, line.factor) == (pytest.approx(told_s - 1.0), False, 1.0)
    assert len(line.places) == 1
    _, came = line.refused("a", 500.0, 1_000.0, 0.2, 104.0)
    assert came
    assert line.factor > 1.0


def test_newcomers_leave_room_for_those_whose_moment_is_near_and_these_for_nobody() -> None:
    line = busy_line()
    line.refused("a", 500.0, 1_000.0, 3.0, 100.0)
    assert line.kept_tokens("new", 100.0) == 0.0
    assert line.kept_tokens("new", 102.5) == 250.0  # of half of them somebody comes
    assert line.kept_tokens("a", 102.5) == 0.0
    assert line.kept_tokens("a", 103.0) == 0.0
    assert line.kept_tokens("new", 103.0 + GRACE_S + 0.5) == 0.0
    assert (len(line.places), line.showing < 0.5) == (0, True)


def test_where_nobody_comes_again_nothing_is_kept_in_the_end() -> None:
    line = busy_line()
    for number in range(200):
        line.promised("other", 1_000.0, 100.0 + 2.0 * number)
        line.refused(number, 500.0, 1_000.0, 0.1, 100.0 + 2.0 * number)
    assert line.showing < 0.01
    assert line.kept_tokens("new", 498.0) < 5.0


def test_a_burst_that_never_comes_again_is_soon_forgotten() -> None:
    line = busy_line()
    for number in range(2_000):
        told_s, _ = line.refused(number, 500.0, 1_000.0, 0.1, 100.0)
    assert told_s == HORIZON_S
    line.promised("other", 30_000.0, 130.0)
    assert line.refused("new", 500.0, 1_000.0, 0.1, 130.0)[0] < 60.0
    line.promised("other", 30_000.0, 160.0)
    assert line.refused("newer", 500.0, 1_000.0, 0.1, 160.0)[0] < 5.0


def test_whom_nobody_can_remember_is_told_a_moment_and_those_before_teach_all_the_same() -> None:
    line, now_s = busy_line(), 100.0
    for number in range(4 * MAX_PLACES):
        now_s += 0.5 / MAX_PLACES
        line.refused(number, 500.0, 1_000.0, 0.1, now_s)
    assert len(line.places) == MAX_PLACES
    assert line.showing < 0.5


def test_a_long_line_moves_the_factor_no_further_than_a_short_one() -> None:
    """All of a line were told by one factor, so what comes of them is one test."""
    factors = []
    for length in (20, 2_000):
        line = busy_line()
        told = {name: line.refused(name, 1.0, 10.0, 0.1, 100.0)[0] for name in range(length)}
        for name, told_s in told.items():
            line.refused(name, 1.0, 10.0, 0.1, 100.0 + told_s)
        factors.append(line.factor)
    assert factors == pytest.approx([exp(LEVEL)] * 2, rel=0.1)


def test_tenants_have_lines_of_their_own() -> None:
    returns = RetryAfter()
    returns.refused(query("a", tenant=1), 100.0, 0.2, 0.0)
    assert returns.kept_tokens(query("b", tenant=1), 0.0) > 0.0
    assert returns.kept_tokens(query("b", tenant=2), 0.0) == 0.0


def test_nothing_grows_without_bound() -> None:
    line = busy_line()
    for number in range(MAX_PLACES + 10):
        assert line.refused(number, 1.0, 1_000.0, 1.0, 100.0)[0] <= HORIZON_S
    assert len(line.places) == MAX_PLACES
    returns = RetryAfter()
    for tenant in range(MAX_TENANTS + 10):
        returns.refused(query(tenant=tenant), 1.0, 1.0, 0.0)
    assert returns.kept_tokens(query("b", tenant=0), 0.0) == 0.0
    assert returns.kept_tokens(query("b", tenant=MAX_TENANTS + 9), 0.0) > 0.0


events = st.lists(
    st.tuples(st.floats(0.0, 30.0), st.integers(0, 8), st.booleans(), st.floats(MIN_WAIT_S, 1e4)),
    max_size=60,
)


@given(events=events)
def test_what_is_told_is_within_bounds_whatever_comes(
    events: list[tuple[float, int, bool, float]],
) -> None:
    line, now_s = Line(0.0), 0.0
    for after_s, name, held, wait_s in events:
        now_s += after_s
        assert 0.0 <= line.kept_tokens(name, now_s) <= 9 * 100.0
        if held:
            line.promised(name, 150.0, now_s)
        else:
            told_s, _ = line.refused(name, 100.0, 150.0, wait_s, now_s)
            assert MIN_WAIT_S / 2 < told_s <= HORIZON_S + 1e-6
        assert MIN_FACTOR <= line.factor <= MAX_FACTOR
        assert 0.0 <= line.showing <= 1.0
        assert len(line.places) <= 9


@settings(max_examples=examples(20))
@given(late=st.floats(0.3, 20.0), spread=st.floats(0.05, 1.0), seed=st.integers(0, 99))
def test_the_level_is_held_however_far_off_predictions_are(
    late: float, spread: float, seed: int
) -> None:
    """Room comes ``late`` times as late as predicted, in the median; after that it is there."""
    rng, line, held = np.random.default_rng(seed), Line(0.0), []
    for number in range(1_000):
        now_s = 10.0 * number
        told_s, _ = line.refused(number, 1.0, 1.0, 0.1, now_s)
        promised = told_s >= 0.1 * late * rng.lognormal(0.0, spread)
        if promised:
            line.promised(number, 1.0, now_s + told_s)
        else:
            line.refused(number, 1.0, 1.0, 0.1, now_s + told_s)
            line.promised(number, 0.0, now_s + told_s)
        held.append(promised)
    assert np.mean(held[200:]) > LEVEL - 0.05


def test_a_placer_keeps_room_for_who_was_told_to_come() -> None:
    fleet = fleet_of(report(*[row(SLOW, 4_000, key=key) for key in range(3)]))
    placer = Placer(fleet, routing.make_policy("least_tokens"), make_admission("moore_hodgson"))
    refused = placer.place(query("a"), 0.0)
    assert refused.retry_after_s is not None
    assert refused.room_s is not None
    now_s = refused.retry_after_s
    # There is room for one of them.
    left = row(SLOW, 7_500, arrival_s=now_s)
    fleet.report("0", report(left, made_s=now_s), now_s)
    newcomer = placer.place(query("b", key=2), now_s)
    came = placer.place(query("a", key=3), now_s)
    assert (newcomer.replica_id, came.replica_id) == (None, "0")
    assert (placer.returns.held, placer.returns.missed) == (1, 0)


def poisson(rate: float, seconds: float, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0 / rate, round(rate * seconds))).tolist()
    slo = SLO(ttft_s=0.5, tpot_s=0.05)
    arrivals = tuple(
        Arrival(at_s, int(rng.integers(200, 2_000)), int(rng.integers(20, 120)), slo)
        for at_s in times
    )
    return Workload("poisson", arrivals)


@pytest.mark.parametrize("rate", [10.0, pytest.param(18.0, marks=pytest.mark.release)])
def test_four_fifths_of_those_who_come_when_told_to_are_promised(rate: float) -> None:
    """All come again, up to ten times; at the highest rate more come than can be promised."""
    requests = simulated(rate)
    returns = [each for each in requests.retries if each.at_s > 30.0]
    assert len(returns) > 50
    assert all(isfinite(each.retry_after_s) for each in returns)
    assert np.mean([each.promised for each in returns]) >= 0.8


def simulated(rate: float) -> Requests:
    model = LinearLatency(a=0.010, b=0.000_1, c=0.000_000_01)
    when = {SLOW.service_class: "reject"}
    config = ClusterConfig.model_validate({"replicas": 2, "retries": 10, "when_unattainable": when})
    result = simulate_cluster(
        poisson(rate, 150.0, 1),
        lambda role: batching.make_policy("deadline_triage"),
        routing.make_policy("least_tokens"),
        model,
        cluster=config,
        admission=make_admission("moore_hodgson"),
    )
    return result.requests
