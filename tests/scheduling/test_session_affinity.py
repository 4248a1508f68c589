"""Session affinity: sessions stay, loads stay bounded, and few sessions move."""

from collections import Counter
from math import ceil

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import RUNNING
from sluice.scheduling.routing import make_policy
from sluice.scheduling.routing.base import Job
from tests.scheduling.fleets import figures_of, fleet_of, job, report

sessions = st.integers(1, 2**63 - 1)


def asked(fleet: Fleet, session: int) -> Job:
    made = job(fleet)
    return made._replace(query=made.query._replace(session=session))


def place(fleet: Fleet, session: int, **options: object) -> int:
    return make_policy("session_affinity", options).choose(asked(fleet, session), fleet)


@given(st.lists(sessions, min_size=1, max_size=9), st.integers(1, 9), st.integers(0, 50))
def test_a_session_stays_while_loads_are_even(keys: list[int], replicas: int, load: int) -> None:
    fleet = figures_of(*[{"RUNNING": load} for _ in range(replicas)])
    policy = make_policy("session_affinity")
    chosen = {key: policy.choose(asked(fleet, key), fleet) for key in keys}
    for key, replica in chosen.items():
        # Also by another controller, and with other loads that are even.
        assert place(fleet, key) == replica
        assert place(figures_of(*[{"WAITING": 9}] * replicas), key) == replica


@given(
    sessions,
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.sampled_from((0.05, 0.25, 2.0)),
)
def test_no_replica_takes_more_than_its_bound(
    session: int, loads: list[int], epsilon: float
) -> None:
    fleet = figures_of(*[{"RUNNING": load} for load in loads])
    chosen = place(fleet, session, epsilon=epsilon)
    most = ceil((1 + epsilon) * (sum(loads) + 1) / len(loads))
    assert loads[chosen] + 1 <= most


def test_one_busy_session_spreads_no_further_than_the_bound_asks() -> None:
    fleet = figures_of(*[{}] * 4)
    loads = fleet.figures[: len(fleet), RUNNING]
    policy = make_policy("session_affinity", {"epsilon": 1.0})
    for count in range(1, 401):
        loads[policy.choose(asked(fleet, 5), fleet)] += 1
        assert loads.max() <= ceil(2 * count / 4)
    assert sorted(loads) == [0, 0, 200, 200]


def test_sessions_spread_evenly() -> None:
    fleet = figures_of(*[{}] * 8)
    counts = Counter(place(fleet, session) for session in range(1, 4_001))
    assert len(counts) == 8
    assert max(counts.values()) < 1.3 * 500


def test_only_the_sessions_of_a_replica_that_left_move() -> None:
    whole = fleet_of(*[report() for _ in range(6)])
    less = fleet_of(*[report() for _ in range(6)])
    less.leave("2")
    policy, other = make_policy("session_affinity"), make_policy("session_affinity")
    moved = 0
    for session in range(1, 600):
        before = asked(whole, session)
        after = asked(less, session)
        was = whole.ids[before.rows[policy.choose(before, whole)]]
        now = less.ids[after.rows[other.choose(after, less)]]
        assert now == was or was == "2"
        moved += now != was
    assert 50 < moved < 150


def test_a_row_that_another_replica_got_is_another_replica() -> None:
    fleet = fleet_of(*[report() for _ in range(4)])
    policy = make_policy("session_affinity")
    for session in range(1, 100):
        policy.choose(asked(fleet, session), fleet)
    fleet.leave("1")
    fleet.report("new", report(), 0.0)
    fresh = make_policy("session_affinity")
    for session in range(1, 100):
        request = asked(fleet, session)
        assert policy.choose(request, fleet) == fresh.choose(request, fleet)


def test_requests_without_a_session_go_by_the_other_policy() -> None:
    fleet = figures_of({"TOKENS": 9, "RUNNING": 1}, {"TOKENS": 5, "RUNNING": 4}, {"TOKENS": 7})
    assert place(fleet, 0) == 1
    assert place(fleet, 0, otherwise="min_load") == 2


def test_only_the_replicas_of_the_job_are_chosen() -> None:
    fleet = figures_of(*[{}] * 5)
    for session in range(1, 50):
        some = asked(fleet, session).of(np.array([1, 3]))
        chosen = make_policy("session_affinity").choose(some, fleet)
        every = place(fleet, session)
        assert every not in (1, 3) or some.rows[chosen] == every
