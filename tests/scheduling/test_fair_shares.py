"""Fair shares: the water level, who must leave room, and what is remembered."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery
from sluice.scheduling.tenancy.fair_shares import (
    REFRESH_S,
    SHORT,
    FairShares,
    has_room,
    water_level,
)
from sluice.scheduling.tenancy.leaky_bucket import Bucket
from tests.examples import examples

# The leaky bucket: what is given back never forgives what others have put in.


class Step(NamedTuple):
    """Time that passes, then what is set aside and how much of it is used, and which of those
    that are open ends."""

    pause_s: int
    tokens: int
    used: int
    ends: int


steps = st.lists(
    st.builds(
        lambda pause_s, tokens, used, ends: Step(pause_s, tokens, min(used, tokens), ends),
        st.integers(0, 6),
        st.integers(0, 20),
        st.integers(0, 20),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(steps)
def test_it_is_never_emptier_than_with_what_was_used_alone(given_steps: list[Step]) -> None:
    bucket, without = Bucket(0), Bucket(0)
    opened: list[tuple[int, Step]] = []
    now_s = 0.0
    for step in given_steps:
        now_s += step.pause_s
        for each in (bucket, without):
            each.drain(now_s, 1)
        bucket.add(step.tokens)
        without.add(step.used)
        opened.append((bucket.mark(), step))
        if step.ends < len(opened):
            mark, ended = opened.pop(step.ends)
            bucket.undo(mark, ended.tokens - ended.used)
        assert bucket.level >= without.level
        assert len(bucket._lows._levels) <= 2 * len(opened) + 9
    for mark, ended in opened:
        bucket.undo(mark, ended.tokens - ended.used)
    assert bucket.level == pytest.approx(without.level)
    assert bucket._lows._levels == []


@given(st.integers(0, 20), st.integers(0, 20), steps)
def test_all_that_makes_a_difference_comes_back(
    before: int, tokens: int, given_steps: list[Step]
) -> None:
    bucket, without = Bucket(0), Bucket(0)
    for each in (bucket, without):
        each.drain(0, 1)
        each.add(before)
    bucket.add(tokens)
    mark, now_s = bucket.mark(), 0.0
    for step in given_steps:
        now_s += step.pause_s
        for each in (bucket, without):
            each.drain(now_s, 1)
            each.add(step.tokens)
    assert 0 <= bucket.undo(mark, tokens) <= tokens
    assert bucket.level == pytest.approx(without.level)


EASY = SLO(ttft_s=1.0)


def query(tenant: int, key: int, prompt: int = 100, weight: float = 1.0) -> RouteQuery:
    return RouteQuery(key, EASY, prompt, tenant=tenant, weight=weight)


claims = st.lists(
    st.tuples(st.floats(0.0, 1e6), st.floats(0.001, 1_000.0)), min_size=1, max_size=12
)


def level_by_filling(asked: list[float], weights: list[float], capacity: float) -> float:
    """Raise the level until it meets the next one's claim, and so on."""
    rest, left, level = set(range(len(asked))), capacity, 0.0
    while rest:
        level = left / sum(weights[one] for one in rest)
        full = {one for one in rest if asked[one] <= weights[one] * level}
        if not full:
            return level
        left -= sum(asked[one] for one in full)
        rest -= full
    return inf


@given(claims, st.floats(0.0, 2.0))
def test_the_water_level_is_that_of_filling_step_by_step(
    claims: list[tuple[float, float]], part: float
) -> None:
    asked, weights = (list(column) for column in zip(*claims, strict=True))
    capacity = part * sum(asked)
    level = water_level(np.array(asked), np.array(weights), capacity)
    filled = [min(one, weight * level) for one, weight in claims]
    assert sum(filled) == pytest.approx(min(capacity, sum(asked)), rel=1e-6, abs=1e-3)
    expected = level_by_filling(asked, weights, capacity)
    given = [min(one, weight * expected) for one, weight in claims]
    assert filled == pytest.approx(given, rel=1e-6, abs=1e-3)


class Fleet:
    """Promises what fits into a number of tokens that run off at a rate, and for tenants over their
    share only what leaves the reserve free."""

    def __init__(self, per_s: float, size: float) -> None:
        self.shares = FairShares()
        self.per_s, self.size = per_s, size
        self.level, self.level_s = 0.0, 0.0
        self.promised: dict[int, float] = {}
        self.asked: dict[int, float] = {}

    def ask(self, asked: RouteQuery, now_s: float) -> bool:
        tokens = float(asked.prompt_tokens)
        self.level = max(0.0, self.level - (now_s - self.level_s) * self.per_s)
        self.level_s = now_s
        self.asked[asked.tenant] = self.asked.get(asked.tenant, 0.0) + tokens
        fits = self.level + tokens <= self.size
        reserve = self.shares.reserve_tokens(asked.tenant, now_s)
        over = fits and self.level > 0.0 and self.level + tokens + reserve > self.size
        if fits and not over:
            self.level += tokens
            self.promised[asked.tenant] = self.promised.get(asked.tenant, 0.0) + tokens
            self.shares.promise(asked, 0.0, now_s)
            return True
        self.shares.refuse(asked, 0.0, now_s, again=False, over_share=over)
        return False


def run(fleet: Fleet, rates: dict[int, float], weights: dict[int, float], seconds: float) -> None:
    """Each tenant asks for so many tokens a second, 100 at a time, at random times."""
    rng = np.random.default_rng(1)
    times = sorted(
        (float(at_s), tenant)
        for tenant, rate in rates.items()
        for at_s in rng.uniform(0, seconds, round(rate * seconds / 100))
    )
    for key, (at_s, tenant) in enumerate(times):
        fleet.ask(query(tenant, key, 100, weights.get(tenant, 1.0)), at_s)


@pytest.mark.parametrize(
    ("rates", "weights"),
    [
        ({1: 1_000, 2: 29_000}, {}),
        ({1: 10_000, 2: 20_000}, {}),
        ({1: 500, 2: 2_000, 3: 27_500}, {3: 2.0}),
        ({1: 8_000, 2: 12_000, 3: 10_000}, {2: 2.0}),
    ],
)
def test_under_overload_each_gets_its_share_and_nothing_is_left_idle(
    rates: dict[int, float], weights: dict[int, float]
) -> None:
    fleet, alone = Fleet(10_000, 10_000), Fleet(10_000, 10_000)
    run(fleet, rates, weights, 60.0)
    total = sum(fleet.promised.values())
    asked = np.array([fleet.asked[tenant] for tenant in rates])
    by = np.array([weights.get(tenant, 1.0) for tenant in rates])
    fair = np.minimum(asked, by * water_level(asked, by, total))
    got = np.array([fleet.promised[tenant] for tenant in rates])
    assert np.abs(got - fair).max() <= 0.03 * total
    run(alone, {0: sum(rates.values())}, {}, 60.0)
    assert total >= 0.99 * sum(alone.promised.values())


def test_one_alone_is_never_held_back_whatever_came_before() -> None:
    fleet = Fleet(1_000, 1_000)
    run(fleet, {1: 5_000, 2: 5_000}, {}, 20.0)
    held = [fleet.shares.reserve_tokens(tenant, 20.0) for tenant in (1, 2)]
    assert min(held) == 0.0
    # The other one has left. What is reserved for it goes before its share is forgotten.
    for step in range(1, 40):
        fleet.ask(query(1, 10**6 + step), 20.0 + step)
    assert fleet.shares.reserve_tokens(1, 60.0) == 0.0
    assert fleet.ask(query(1, 10**7), 61.0)


events = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.01, 0.5, 5.0, 400.0]),
        st.integers(0, 5),
        st.integers(1, 4_000),
        st.sampled_from(["promise", "refuse", "deny", "settle"]),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=examples(50))
@given(events)
def test_who_is_below_its_share_is_never_held_back(
    events: list[tuple[float, int, int, str, int]],
) -> None:
    """Against plain sums that forget in the same way, by the level of at most ``REFRESH_S`` ago."""
    shares, now_s = FairShares(), 50.0
    for after_s, tenant, tokens, what, key in events:
        now_s += after_s
        asked = query(tenant, key, tokens, 1.0 + tenant % 3)
        if what == "promise":
            shares.promise(asked, 10.0, now_s)
        elif what == "settle":
            shares.settle(key, float(tokens))
        else:
            shares.refuse(asked, 10.0, now_s, again=key > 4, over_share=what == "deny")
        now_s += 2 * REFRESH_S
        known = dict(shares._tenants)
        promised = {one: own.promised for one, own in known.items()}
        claims = np.array([own.asked for own in known.values()])
        weights = np.array([1.0 + one % 3 for one in known])
        assert min(promised.values(), default=0.0) >= 0.0
        assert all(claims >= np.array(list(promised.values())) * (1 - 1e-9))
        level = water_level(claims, weights, sum(promised.values()))
        for one in known:
            reserve = shares.reserve_tokens(one, now_s)
            assert 0.0 <= reserve < inf
            if promised[one] <= SHORT * (1.0 + one % 3) * level:
                assert reserve == 0.0


def test_what_is_remembered_is_bounded() -> None:
    shares = FairShares(most_tenants=16, most_keys=100)
    for key in range(5_000):
        asked = query(key % 400, key)
        if key % 3:
            shares.promise(asked, 1.0, key / 100)
        else:
            shares.refuse(asked, 1.0, key / 100, again=True, over_share=False)
    assert len(shares) == 16
    assert len(shares._charges) <= 100 and len(shares._refused) <= 100
    # Who has been away for long is not known any more.
    shares.promise(query(1_000, 9_999), 1.0, 10_000.0)
    assert len(shares) == 1


def test_requests_that_are_never_heard_of_again_are_forgotten() -> None:
    shares = FairShares()
    for key in range(100):
        shares.promise(query(1, 2 * key), 1.0, key / 100)
        shares.refuse(query(2, 2 * key + 1), 1.0, key / 100, again=True, over_share=False)
    shares.promise(query(1, 999), 1.0, 1_000.0)
    assert list(shares._charges) == [999] and not shares._refused
    shares.settle(0, 1_000.0)
    assert shares._tenants[1].promised == pytest.approx(101.0)


def test_of_too_many_tenants_the_one_that_asked_for_least_is_forgotten() -> None:
    shares = FairShares(most_tenants=3)
    for tenant, tokens in ((1, 300), (2, 100), (3, 200), (4, 50)):
        shares.promise(query(tenant, tenant, tokens), 1.0, 0.0)
    assert sorted(shares._tenants) == [1, 3, 4]
    shares.promise(query(5, 5), 1.0, 0.0)
    assert sorted(shares._tenants) == [1, 3, 5]


def test_a_request_that_asks_again_counts_once() -> None:
    shares = FairShares()
    shares.promise(query(2, 1), 0.0, 0.0)
    for step in range(10):
        shares.refuse(query(1, 7), 0.0, 0.1 * step, again=True, over_share=False)
    shares.promise(query(1, 7), 0.0, 1.0)
    # As of the time of the promise, in the unit of the first second.
    assert shares._tenants[1].asked == pytest.approx(100.0 * np.exp(0.1))


def test_a_promise_counts_as_long_as_its_answer_was() -> None:
    shares = FairShares()
    shares.promise(query(1, 1), 256.0, 0.0)
    shares.promise(query(1, 2), 256.0, 5.0)
    shares.settle(1, 100.0)
    shares.settle(2, 1_100.0)
    shares.settle(3, 7.0)
    counted = 100.0 + 1_100.0 * np.exp(0.5)
    assert shares._tenants[1].promised == pytest.approx(counted)
    assert shares._total == pytest.approx(counted)


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8),
    st.floats(0.5, 8.0),
    st.integers(10, 2_000),
)
def test_places_are_left_for_whoever_comes_next(
    weights: list[float], part: float, places: int
) -> None:
    held = [0] * len(weights)
    while True:
        free = places - sum(held)
        takers = [
            one
            for one, weight in enumerate(weights)
            if free and has_room(held[one], free, weight, part)
        ]
        if not takers:
            break
        held[takers[0]] += 1
    assert sum(held) <= places
    free = places - sum(held)
    assert all(held[one] >= part * weight * free for one, weight in enumerate(weights))
    assert not free or has_room(0, free, 0.1, part)
