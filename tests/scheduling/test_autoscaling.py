"""Autoscaling policies: bounds, when a pool grows, when it shrinks, Serve's own rule, and zero."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import ceil, inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sluice.scheduling.autoscaling import (
    POLICIES,
    AutoscalingPolicy,
    Load,
    Pool,
    State,
    ToZero,
    make_policy,
)
from sluice.scheduling.autoscaling.head_room import MIN_LIMIT
from tests.examples import examples

INTERVAL_S = 2.0
ASKED = 10.0
"""Requests a second in these loads."""


class Loads:
    """Loads of a pool whose work per second is given from look to look; counters add up."""

    def __init__(self) -> None:
        self.load = Load(100.0, 1.0)

    def next(
        self,
        demand: float,
        ready: int,
        lost: float = 0.0,
        judged: float = 1.0,
        arrivals: int = 0,
        **gauges: float,
    ) -> Load:
        """Half of ``demand`` is prefill; ``lost`` is the share of those asked that get no promise,
        ``judged`` that of those that ended in time."""
        last = self.load
        asked = ASKED * INTERVAL_S
        self.load = last._replace(
            now_s=last.now_s + INTERVAL_S,
            ready=float(ready),
            asked=last.asked + asked,
            asked_s=last.asked_s + demand / 2 * INTERVAL_S,
            unpromised=last.unpromised + lost * asked,
            unpromised_s=last.unpromised_s + lost * demand / 2 * INTERVAL_S,
            judged=last.judged + asked,
            attained=last.attained + judged * asked,
            decode_share=demand / 2 * (1 - lost),
            arrived=last.arrived + arrivals,
            **{"head_room": 0.5, "ongoing": 0.0, **gauges},
        )
        return self.load


class Life:
    """A pool under a policy, in which ordered replicas serve at once."""

    def __init__(
        self, policy: AutoscalingPolicy | ToZero, target: int = 1, most: int = 50, least: int = 1
    ) -> None:
        self.policy = policy
        self.pool = Pool(target, least, most)
        self.loads = Loads()
        self.state: State = {}
        self.sizes = [target]
        self.reasons: list[str] = []

    def look(self, demand: float, ready: int | None = None, **figures: Any) -> int:
        load = self.loads.next(demand, self.pool.target if ready is None else ready, **figures)
        decision = self.policy.decide(load, self.pool, self.state)
        # What comes back from Serve was plain data.
        self.state = json.loads(json.dumps(decision.state))
        if decision.replicas != self.pool.target:
            self.reasons.append(decision.reason)
        self.pool = self.pool._replace(target=decision.replicas)
        self.sizes.append(decision.replicas)
        return decision.replicas

    def look_for(
        self, seconds: float, demand: Callable[[float], float] | float, **figures: Any
    ) -> int:
        for index in range(round(seconds / INTERVAL_S)):
            now = demand(index * INTERVAL_S) if callable(demand) else demand
            self.look(now, **figures)
        return self.pool.target


def head_room(**options: Any) -> AutoscalingPolicy:
    return make_policy("head_room", options)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    look = st.fixed_dictionaries(
        {
            "demand": st.floats(0, 30),
            "lost": st.floats(0, 1),
            "judged": st.floats(0, 1),
            "head_room": st.floats(-5, 1),
            "kv_share": st.floats(0, 1),
            "best_effort_s": st.floats(0, 500),
            "ongoing": st.floats(0, 500),
            "ready": st.integers(0, 12),
        }
    )
    return draw(st.lists(look, min_size=2, max_size=40))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(50))
@given(
    history=histories(), least=st.integers(1, 5), extra=st.integers(0, 8), start=st.integers(1, 20)
)
def test_the_size_is_within_bounds_and_a_function_of_what_went_in(
    name: str, history: list[dict[str, Any]], least: int, extra: int, start: int
) -> None:
    lives = []
    for _ in range(2):
        life = Life(make_policy(name), start)
        life.pool = Pool(start, least, least + extra)
        for look in history:
            size = life.look(look["demand"], **{k: v for k, v in look.items() if k != "demand"})
            assert least <= size <= least + extra
        lives.append((life.sizes, life.state))
    assert lives[0] == lives[1]


def test_unknown_policies_and_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="no_such_option"):
        make_policy("head_room", {"no_such_option": 1})
    with pytest.raises(ValueError, match="unknown autoscaling policy 'none'"):
        make_policy("none")


class TestHeadRoom:
    @settings(max_examples=examples(25))
    @given(demand=st.floats(0, 12), start=st.integers(1, 16))
    def test_under_constant_load_it_settles_and_stays(self, demand: float, start: int) -> None:
        life = Life(head_room(), start)
        life.look_for(16 * 180 + 300, demand)
        settled = life.pool.target
        assert settled >= max(1, ceil(demand / 0.75 - 1e-6))
        # One that more could leave is left: no more than the margin asks for.
        assert settled <= max(1, ceil(demand / (0.75 * 0.85) + 1e-6))
        ways = [after - before for before, after in pairwise(life.sizes) if after != before]
        assert all(way > 0 for way in ways) or all(way < 0 for way in ways)

    @settings(max_examples=examples(40))
    @given(history=histories(), more=st.floats(1, 3), start=st.integers(1, 10))
    def test_more_work_never_means_fewer_replicas(
        self, history: list[dict[str, Any]], more: float, start: int
    ) -> None:
        """Of two pools of one size that had the same until now."""
        life = Life(head_room(), start)
        for look in history[:-1]:
            life.look(look["demand"], ready=life.pool.target)
        sizes = []
        for factor in (1.0, more):
            loads = Loads()
            loads.load = life.loads.load
            load = loads.next(history[-1]["demand"] * factor, life.pool.target)
            sizes.append(life.policy.decide(load, life.pool, life.state).replicas)
        assert sizes[0] <= sizes[1]

    def test_it_grows_before_a_rising_load_arrives(self) -> None:
        def rising(at_s: float) -> float:
            return 1.0 + at_s / 100

        life = Life(head_room(startup_s=60))
        late = 0
        for index in range(300):
            size = life.look(rising(index * INTERVAL_S))
            # What a replica that is ordered now will find when it serves.
            late += index > 60 and size < rising(index * INTERVAL_S + 60)
        assert late == 0
        assert "demand" in life.reasons[-1]

    def test_it_goes_down_only_after_long_enough_and_one_by_one(self) -> None:
        life = Life(head_room(down_after_s=100))
        assert life.look_for(600, 5.0) == 7
        before = len(life.sizes)
        life.look_for(600, 1.0)
        steps = [
            (index - before) * INTERVAL_S
            for index in range(before, len(life.sizes))
            if life.sizes[index] < life.sizes[index - 1]
        ]
        assert steps[0] >= 100
        assert all(later - sooner >= 100 for sooner, later in pairwise(steps))
        assert min(b - a for a, b in pairwise(life.sizes[before:])) == -1

    def test_a_short_dip_changes_nothing(self) -> None:
        life = Life(head_room(down_after_s=100))
        life.look_for(600, 5.0)
        for _ in range(5):
            life.look_for(60, 1.0)
            life.look_for(60, 5.0)
        assert all(after >= before for before, after in pairwise(life.sizes))
        assert life.pool.target <= 1.5 * 7

    def test_what_gets_no_promise_is_demand_too(self) -> None:
        """A pool that turns half of the work away needs twice what the promised half takes."""
        life = Life(head_room(), 4)
        assert life.look_for(60, 6.0, lost=0.5, judged=0.5) >= 8

    @pytest.mark.parametrize(
        ("gauges", "reason"),
        [
            ({"head_room": -0.5}, "admission budget"),
            ({"kv_share": 1.0}, "KV"),
            ({"best_effort_s": 300.0}, "best effort"),
        ],
    )
    def test_every_sign_of_need_makes_it_grow(self, gauges: dict[str, float], reason: str) -> None:
        life = Life(head_room(), 4)
        life.look_for(60, 0.5, **gauges)
        assert life.pool.target > 4
        assert reason in life.reasons[0]

    def test_objectives_lost_teach_it_to_keep_more_room(self) -> None:
        """Two requests in a hundred are late at a load of 0.7 and none below 0.6."""
        life = Life(head_room(startup_s=10), 10)
        for _ in range(2000):
            crowded = 7.0 / life.pool.target > 0.6
            life.look(7.0, judged=0.98 if crowded else 1.0)
        assert life.pool.target >= 12
        assert "lost at a load of" in life.reasons[0]
        assert MIN_LIMIT <= life.state["limit"] < 0.7

    def test_what_replicas_do_not_cure_is_borne(self) -> None:
        """Requests that are late on any number of replicas, such as objectives that cannot be."""
        life = Life(head_room(startup_s=10), 10)
        life.look_for(4000, 7.0, judged=0.9)
        assert max(life.sizes) <= 12
        # Tried once in a while: what was learnt fades.
        assert sum(size > before for before, size in pairwise(life.sizes)) <= 3
        assert life.state["limit"] > 0.7

    def test_a_restarted_controller_is_no_loss_of_load(self) -> None:
        life = Life(head_room(), 8)
        life.look_for(600, 5.0)
        life.state = {**life.state, "limit": 0.7}
        life.loads.load = Load(3.0, 8.0)
        assert life.look(5.0) == 8
        assert life.state["limit"] == 0.7
        assert life.look_for(60, 5.0) == 8

    def test_a_state_of_another_version_is_none(self) -> None:
        life = Life(head_room(), 8)
        life.look_for(60, 5.0)
        life.state = {"limit": 0.6, "something": 1}
        assert life.look(5.0) == 8
        assert life.state["limit"] == 0.6

    def test_without_replicas_it_waits(self) -> None:
        life = Life(head_room(), 3)
        life.look_for(20, 1.0)
        for _ in range(100):
            assert life.look(0.0, ready=0) == 3


class TestOngoingRequests:
    def test_it_has_so_many_requests_at_each_replica(self) -> None:
        life = Life(make_policy("ongoing_requests", {"target_ongoing_requests": 4}))
        life.look_for(28, 0.0, ongoing=22.0)
        assert life.pool.target == 1
        life.look_for(10, 0.0, ongoing=22.0)
        assert life.pool.target == 6

    @settings(max_examples=examples(30))
    @given(
        ongoing=st.lists(st.floats(0, 60), min_size=5, max_size=60),
        target=st.floats(0.5, 8),
        up_s=st.sampled_from([0.0, 4.0, 10.0]),
        down_s=st.sampled_from([0.0, 6.0, 20.0]),
        most=st.integers(1, 20),
    )
    def test_it_is_serves_own_rule(
        self,
        ongoing: list[float],
        target: float,
        up_s: float,
        down_s: float,
        most: int,
    ) -> None:
        """Against Serve's code, with the number of requests of now as Serve's mean."""
        ours = make_policy(
            "ongoing_requests",
            {
                "target_ongoing_requests": target,
                "look_back_period_s": 1e-3,
                "upscale_delay_s": up_s,
                "downscale_delay_s": down_s,
            },
        )
        life = Life(ours, most=most)
        assert [life.look(0.0, ongoing=each) for each in ongoing] == list(
            serves_own(ongoing, target, up_s, down_s, most)
        )


def serves_own(
    ongoing: list[float], target: float, up_s: float, down_s: float, most: int
) -> Iterable[int]:
    """What Ray Serve would do, look by look, in which ordered replicas run at once."""
    autoscaling = pytest.importorskip("ray.serve.autoscaling_policy")
    from ray.serve.config import AutoscalingConfig

    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=most,
        target_ongoing_requests=target,
        upscale_delay_s=up_s,
        downscale_delay_s=down_s,
    )
    state: dict[str, Any] = {}
    size, now_s = 1, 100.0
    for requests in ongoing:
        now_s += INTERVAL_S
        context = SimpleNamespace(
            current_num_replicas=size,
            target_num_replicas=size,
            total_num_requests=requests,
            config=config,
        )
        desired, _ = autoscaling._core_replica_queue_length_policy(context)
        scaled = autoscaling._apply_scaling_factors(desired, size, config)
        size, state = autoscaling._apply_delay_logic(max(0, scaled), size, config, state, now_s)
        size = min(max(size, 1), most)
        yield size


ZERO_AFTER_S = 30.0


def to_zero(target: int = 1, policy: str = "head_room") -> Life:
    """A pool that may have no replica."""
    return Life(ToZero(make_policy(policy), ZERO_AFTER_S), target, most=4, least=0)


def test_the_last_replica_goes_after_the_time_without_a_request() -> None:
    life = to_zero()
    sizes = [life.look(0.0) for _ in range(17)]
    # The time begins with the first look.
    assert sizes == [1] * 15 + [0] * 2
    life = to_zero()
    for _ in range(15):
        life.look(0.0)
    assert life.look(0.0, arrivals=1) == 1
    assert [life.look(0.0) for _ in range(15)] == [1] * 14 + [0]
    assert life.reasons[-1] == "no request for 30 s"


def test_one_request_brings_it_back_and_its_time_starts_over() -> None:
    life = to_zero(0)
    assert [life.look(0.0) for _ in range(3)] == [0] * 3
    assert life.look(0.0, arrivals=1) == 1
    assert [life.look(0.0) for _ in range(16)] == [1] * 15 + [0]
    # Serve starts one by itself where a request waits in its own queue.
    life.pool = life.pool._replace(target=1)
    assert [life.look(0.0) for _ in range(16)] == [1] * 15 + [0]


def test_a_replica_that_is_not_heard_of_may_have_requests() -> None:
    life = to_zero()
    assert {life.look(0.0, ready=0) for _ in range(60)} == {1}


looks = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=12
)


@settings(max_examples=examples(60))
@given(looks, st.sampled_from(("head_room", "ongoing_requests")), st.integers(0, 4))
def test_never_zero_beside_a_request_nor_soon_after_one(
    history: list[tuple[int, int, int]], policy: str, start: int
) -> None:
    """Each entry: how many arrive, how many are under way, and for how many looks."""
    life = to_zero(start, policy)
    active_s = -inf
    for arrivals, ongoing, times in history:
        for _ in range(times):
            before = life.pool.target
            size = life.look(0.0, arrivals=arrivals, ongoing=float(ongoing))
            assert 0 <= size <= 4
            if arrivals or ongoing:
                active_s = life.loads.load.now_s
                assert size >= 1 or before == 0
            if before > 0 and size == 0:
                assert before == 1
                assert life.loads.load.now_s - active_s >= ZERO_AFTER_S
    for _ in range(400):
        life.look(0.0)
    assert life.pool.target == 0
    assert life.look(0.0, arrivals=1) == 1


@settings(max_examples=examples(30))
@given(looks, st.integers(1, 4))
def test_with_one_replica_or_more_the_policy_decides(
    history: list[tuple[int, int, int]], start: int
) -> None:
    life, alone, state = to_zero(start), make_policy("head_room"), {}
    for arrivals, ongoing, times in history:
        for _ in range(times):
            pool = life.pool
            if pool.target == 0:
                return
            size = life.look(0.0, arrivals=arrivals, ongoing=float(ongoing))
            own = alone.decide(life.loads.load, pool._replace(least=1), state)
            state = json.loads(json.dumps(own.state))
            assert size in (own.replicas, 0)
