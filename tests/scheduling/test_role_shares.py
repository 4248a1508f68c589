"""Roles that follow the load: worked splits, and what holds for every load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.autoscaling.load import Load
from sluice.scheduling.autoscaling.role_shares import (
    Change,
    Loads,
    Means,
    Member,
    Need,
    RoleShares,
    RoleSharesOptions,
    Split,
    busy_of,
    split_of,
)
from sluice.scheduling.roles import ROLES, Role

LOOK_S = 2.5
MANY = 1e3
"""Decodes of a replica that has some all the time."""


def fleet(mixed: int, prefill: int = 0, decode: int = 0) -> list[Member]:
    """That many replicas of each role, without requests."""
    roles: list[Role] = ["mixed"] * mixed + ["prefill"] * prefill + ["decode"] * decode
    return [Member(f"r{number:02}", role, 0.0, MANY) for number, role in enumerate(roles)]


def busiest(need: Need, split: Split) -> float:
    return max(busy_of(need, split).values())


class Run:
    """Replicas under a demand, look by look."""

    def __init__(
        self, members: Sequence[Member], policy: RoleShares | None = None, usable: float = 0.4
    ) -> None:
        self.members = list(members)
        self.splits = [split_of(members)]
        self.changes: list[Change] = []
        self._policy = policy or RoleShares()
        self._usable = usable
        self._load = Load(100.0, float(len(members)))
        self._means: Means | None = None

    def look(self, prefill: float, decode: float, **gauges: float) -> Change:
        """The next decision, and do what it says."""
        last = self._load
        self._load = last._replace(
            now_s=last.now_s + LOOK_S,
            ready=float(len(self.members)),
            asked_s=last.asked_s + prefill * LOOK_S,
            decode_share=decode,
            capacity=self._usable if decode else 1.0,
            **gauges,
        )
        change = self._policy.decide(self.loads, self.members, self._means)
        self._means = change.means
        self.members = [
            each._replace(role=change.roles.get(each.replica_id, each.role))
            for each in self.members
        ]
        if change.roles:
            self.changes.append(change)
            self.splits.append(split_of(self.members))
        return change

    @property
    def loads(self) -> Loads:
        """What was seen last, without a request lost."""
        return Loads(self._load, self._load, self._load, self._load)

    def settle(self, prefill: float, decode: float, looks: int = 400) -> Split:
        """The split after a time under one demand."""
        for _ in range(looks):
            self.look(prefill, decode)
        return self.splits[-1]


def test_how_busy_the_busiest_is() -> None:
    # A pace of 15 ms with 9 ms fixed leaves 40 % of a replica: 1 s of prefills and 0.6 s of decodes
    # take four mixed replicas whole.
    need = Need(prefill=1.0, decode=0.6, usable=0.4)
    assert busiest(need, Split(4, 0, 0)) == pytest.approx(1.6 / 0.4 / 4)
    # Apart, 2 prefill replicas are half busy, and two decode ones for 0.6 / 0.4 / 2.
    assert busiest(need, Split(0, 2, 2)) == pytest.approx(0.75)
    assert busiest(need, Split(0, 3, 1)) == pytest.approx(1.5)
    # A prefill replica is full when it is busy for 70 %.
    assert busiest(need, Split(0, 1, 3)) == pytest.approx(1.0 / 0.7)
    # One decode at a time on four: a replica has none for exp(-1/4) of its time.
    usable = 1 - (1 - exp(-1 / 4)) * 0.6
    few = need._replace(decodes=1.0)
    assert busiest(few, Split(4, 0, 0)) == pytest.approx(1.6 / usable / 4)
    # KV that fills 1.8 replicas needs more of them than the time of its decodes.
    assert busiest(need._replace(held=1.8), Split(0, 2, 2)) == pytest.approx(0.9)


def test_where_the_pace_is_tight_roles_follow_the_mix() -> None:
    run = Run(fleet(4))
    assert run.settle(1.5, 0.3) == Split(0, 3, 1)
    assert (
        "the busiest is 75% busy with 3 prefill and 1 decode, 112% before" in run.changes[0].reason
    )
    assert run.splits == [Split(4, 0, 0), Split(2, 1, 1), Split(1, 2, 1), Split(0, 3, 1)]
    assert run.settle(0.4, 1.0) == Split(0, 1, 3)


def test_where_the_pace_is_loose_all_are_mixed() -> None:
    assert Run(fleet(4), usable=0.85).settle(1.4, 1.2) == Split(4, 0, 0)
    run = Run(fleet(0, 1, 2), usable=0.85)
    assert run.settle(0.2, 1.9) == Split(3, 0, 0)
    assert run.splits[1:-1] == [Split(1, 1, 1)]


def test_new_replicas_take_what_lacks_at_once() -> None:
    run = Run(fleet(0, 2, 2))
    run.settle(1.6, 0.6, looks=60)
    run.members += fleet(1)
    assert list(run.look(1.6, 0.6).roles.values()) == ["prefill"]


def test_the_next_split_is_looked_for_after_a_while() -> None:
    run = Run(fleet(0, 3, 1))
    at = [number for number in range(200) if run.look(0.4, 1.0).roles]
    assert run.splits[-1] == Split(0, 1, 3)
    assert all((later - now) * LOOK_S >= 60.0 for now, later in pairwise([0, *at]))


def test_a_small_difference_changes_nothing() -> None:
    # 71 % against 65 %: better by a tenth.
    run = Run(fleet(0, 2, 2))
    assert run.settle(1.0, 0.26) == Split(0, 2, 2)
    assert run.settle(1.0, 0.2) == Split(0, 3, 1)  # 50 %


def test_the_least_busy_replica_changes() -> None:
    members = [
        Member("a", "decode", 3.0, MANY),
        Member("b", "decode", 1.0, MANY),
        Member("c", "decode", 1.0, MANY),
        Member("d", "prefill", 0.0, 0.0),
    ]
    run = Run(members)
    run.settle(1.4, 0.2)
    assert list(run.changes[0].roles.items()) == [("b", "prefill")]


def test_a_role_that_lost_its_last_replica_gets_another_one_soon() -> None:
    run = Run(fleet(0, 0, 3))
    run.look(0.5, 0.2)
    # The first look has nothing to compare with, and one that is only late is not replaced.
    assert not run.look(0.5, 0.2).roles
    assert set(run.look(0.5, 0.2).roles.values()) == {"prefill"}


def test_a_restart_of_the_controller_is_no_load() -> None:
    policy, members = RoleShares(), fleet(4)
    before, after = Load(100.0, 4.0, asked_s=50.0), Load(900.0, 4.0, asked_s=1.0)
    means = policy.decide(Loads(before, before, before, before), members, None).means
    change = policy.decide(Loads(after, after, after, after), members, means)
    assert not change.roles and change.means.fast is None


demands = st.floats(0.0, 6.0)
policies = st.builds(
    RoleSharesOptions,
    gain=st.floats(0.05, 0.5),
).map(RoleShares)


@st.composite
def runs(draw: Callable[..., Any]) -> Run:
    """Any replicas, of any roles."""
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=7))
    counts = st.integers(0, 3)
    members = [Member(f"r{at}", role, draw(counts), draw(counts)) for at, role in enumerate(roles)]
    return Run(members, draw(policies), draw(st.floats(0.3, 1.0)))


@given(runs(), demands, demands)
def test_a_constant_load_settles_and_never_sees_a_split_twice(
    run: Run, prefill: float, decode: float
) -> None:
    run.settle(prefill, decode, looks=40 * len(run.members) + 400)
    assert len(set(run.splits)) == len(run.splits)
    assert len(run.changes) <= len(run.members)
    settled = len(run.changes)
    run.settle(prefill, decode)
    assert len(run.changes) == settled


@given(runs(), st.lists(st.tuples(demands, demands), min_size=2, max_size=8))
def test_no_role_is_left_empty_and_no_replica_is_lost(
    run: Run, phases: Sequence[tuple[float, float]]
) -> None:
    for prefill, decode in phases:
        run.settle(prefill, decode, looks=60)
    whole = [bool(split.prefill) == bool(split.decode) for split in run.splits]
    # Both roles have replicas or none has, once those that were torn at the beginning have changed.
    assert whole == sorted(whole)
    assert whole[-1] or len(run.members) < 2
    assert all(1 <= len(change.roles) <= 2 for change in run.changes)


@given(runs(), demands, demands)
def test_equal_input_gives_equal_output(run: Run, prefill: float, decode: float) -> None:
    policy, means = run._policy, run._means
    for _ in range(80):
        load = run._load
        backwards = list(reversed(run.members))
        change = run.look(prefill, decode)
        again = policy.decide(run.loads, backwards, means)
        assert again == change and load.now_s < run._load.now_s
        means = change.means
