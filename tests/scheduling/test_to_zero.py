"""Pools that may have no replica: when the last one goes, and what brings one back."""

from __future__ import annotations

import json
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.autoscaling import Load, Pool, State, ToZero, make_policy
from tests.examples import examples

ZERO_AFTER_S = 30.0


class Life:
    """A pool in which ordered replicas serve at once, looked at every 2 s."""

    def __init__(self, target: int = 1, policy: str = "head_room") -> None:
        self.scaler = ToZero(make_policy(policy), ZERO_AFTER_S)
        self.pool = Pool(target, 0, 4)
        self.load = Load(100.0, float(target))
        self.state: State = {}
        self.reason = ""

    def look(self, arrivals: int = 0, ongoing: int = 0, ready: int | None = None) -> int:
        self.load = self.load._replace(
            now_s=self.load.now_s + 2.0,
            ready=float(self.pool.target if ready is None else ready),
            arrived=self.load.arrived + arrivals,
            ongoing=float(ongoing),
        )
        decision = self.scaler.decide(self.load, self.pool, self.state)
        self.state = json.loads(json.dumps(decision.state))  # Serve hands back plain data
        self.pool = self.pool._replace(target=decision.replicas)
        self.reason = decision.reason
        return decision.replicas


def test_the_last_replica_goes_after_the_time_without_a_request() -> None:
    life = Life()
    sizes = [life.look() for _ in range(17)]
    # The time begins with the first look.
    assert sizes == [1] * 15 + [0] * 2
    life = Life()
    for _ in range(15):
        life.look()
    assert life.look(arrivals=1) == 1
    assert [life.look() for _ in range(15)] == [1] * 14 + [0]
    assert life.reason == "no request for 30 s"


def test_one_request_brings_it_back_and_its_time_starts_over() -> None:
    life = Life(0)
    assert [life.look() for _ in range(3)] == [0] * 3
    assert life.look(arrivals=1) == 1
    assert [life.look() for _ in range(16)] == [1] * 15 + [0]
    # Serve starts one by itself where a request waits in its own queue.
    life.pool = life.pool._replace(target=1)
    assert [life.look() for _ in range(16)] == [1] * 15 + [0]


def test_a_replica_that_is_not_heard_of_may_have_requests() -> None:
    life = Life()
    assert {life.look(ready=0) for _ in range(60)} == {1}


looks = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=12
)


@settings(max_examples=examples(60))
@given(looks, st.sampled_from(("head_room", "ongoing_requests")), st.integers(0, 4))
def test_never_zero_beside_a_request_nor_soon_after_one(
    history: list[tuple[int, int, int]], policy: str, start: int
) -> None:
    """Each entry: how many arrive, how many are under way, and for how many looks."""
    life = Life(start, policy)
    active_s = -inf
    for arrivals, ongoing, times in history:
        for _ in range(times):
            before = life.pool.target
            size = life.look(arrivals, ongoing)
            assert 0 <= size <= 4
            if arrivals or ongoing:
                active_s = life.load.now_s
                assert size >= 1 or before == 0
            if before > 0 and size == 0:
                assert before == 1
                assert life.load.now_s - active_s >= ZERO_AFTER_S
    for _ in range(400):
        life.look()
    assert life.pool.target == 0
    assert life.look(arrivals=1) == 1


@settings(max_examples=examples(30))
@given(looks, st.integers(1, 4))
def test_with_one_replica_or_more_the_policy_decides(
    history: list[tuple[int, int, int]], start: int
) -> None:
    life, alone, state = Life(start), make_policy("head_room"), {}
    for arrivals, ongoing, times in history:
        for _ in range(times):
            pool = life.pool
            if pool.target == 0:
                return
            size = life.look(arrivals, ongoing)
            own = alone.decide(life.load, pool._replace(least=1), state)
            state = json.loads(json.dumps(own.state))
            assert size in (own.replicas, 0)
