"""Roles that follow the load: worked splits, and what holds for every load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.scheduling.autoscaling.load import Load
from sluice.scheduling.autoscaling.role_shares import (
    Change,
    Means,
    Member,
    Need,
    PoolDemand,
    Prompts,
    RoleShares,
    Split,
    blocked,
    demand_of_work,
    served_by,
    split_of,
)
from sluice.scheduling.roles import ROLES, Role

LOOK_S = 2.5
EACH = 0.01
"""Share of a second that a decode takes at its pace."""

PROMPT_S, SLACK_S = 0.1, 1.0
"""Prefill time of a prompt, and how long after its arrival its first token is due."""


def fleet(mixed: int, prefill: int = 0, decode: int = 0) -> list[Member]:
    """That many replicas of each role, without requests."""
    roles: list[Role] = ["mixed"] * mixed + ["prefill"] * prefill + ["decode"] * decode
    return [Member(f"r{number:02}", role, 0.0, 0.0, 0.0) for number, role in enumerate(roles)]


class Run:
    """Replicas under a demand, look by look."""

    def __init__(
        self, members: Sequence[Member], policy: RoleShares | None = None, usable: float = 0.4
    ) -> None:
        self.members = list(members)
        self.splits = [split_of(members)]
        self.changes: list[Change] = []
        self.load = Load(100.0, float(len(members)))
        self.policy = policy or RoleShares()
        self.usable = usable
        self._means: Means | None = None

    def look(self, prefill: float, decode: float, **gauges: float) -> Change:
        """The next decision, and do what it says."""
        last, work_s = self.load, prefill * LOOK_S
        self.load = last._replace(
            now_s=last.now_s + LOOK_S,
            ready=float(len(self.members)),
            asked=last.asked + work_s / PROMPT_S,
            asked_s=last.asked_s + work_s,
            asked_s2=last.asked_s2 + work_s * PROMPT_S,
            slack_s2=last.slack_s2 + work_s * SLACK_S,
            decode_share=decode,
            capacity=self.usable if decode else 1.0,
            **gauges,
        )
        # Who decodes does not matter, only how many.
        self.members = [
            each._replace(
                decodes=decode / EACH / len(self.members), decode_shares=decode / len(self.members)
            )
            for each in self.members
        ]
        change = self.policy.decide(self.load, self.members, self._means)
        self._means = change.means
        self.members = [
            each._replace(role=change.roles.get(each.replica_id, each.role))
            for each in self.members
        ]
        if change.roles:
            self.changes.append(change)
            self.splits.append(split_of(self.members))
        return change

    def settle(self, prefill: float, decode: float, looks: int = 400) -> Split:
        """The split after a time under one demand."""
        for _ in range(looks):
            self.look(prefill, decode)
        return self.splits[-1]


def test_the_loss_formula() -> None:
    """Erlang B as in any table of it."""
    found = blocked(3.0, np.array([0.0, 1.0, 2.0, 5.0, np.inf]))
    assert found == pytest.approx([1.0, 0.75, 0.5294, 0.1101, 0.0], abs=1e-4)
    assert blocked(0.0, np.array([1.0])) == pytest.approx([0.0])


def test_what_each_split_serves() -> None:
    # A pace of 15 ms with 9 ms fixed leaves 40 % of a replica, and guarantees use 30 %: 30 decodes
    # of 1 %, 45 of which are offered.
    need = Need(asked=10.0, decode=0.45, decodes=45.0, shares=0.45, usable=0.4)
    served, left_s = served_by(need, Prompts(25.0, 2.5, 0.1, 1.0), 2.5, np.zeros(4))
    # One prefill replica does 0.9 s of work each second. Four mixed ones have 0.9 - 0.6 - 0.45 / 4
    # each, and their prompts can wait until 0.1 s of work fits: 4 * (0.1875 - 0.1) s of work.
    assert left_s.tolist() == pytest.approx([0.35, 0.25, 0.0, 0.0], rel=1e-3)
    lost = blocked(45.0, np.array([90.0, 60.0, 30.0]))
    assert served[1:] == pytest.approx(1.0 - lost)
    assert lost[2] == pytest.approx(0.36, abs=0.01)
    assert served[0] == pytest.approx(1.0 - (2.5 - 4 * 0.1875 * 2.5 - 0.35) / 2.5, rel=1e-3)
    # What waits is in the way of the next burst: 4.5 s come and 2.25 s are done, 0.8 s can wait.
    served, left_s = served_by(need, Prompts(45.0, 4.5, 0.1, 1.0), 2.5, left_s)
    assert served[1] == pytest.approx(1.0 - (0.25 + 4.5 - 2.25 - 0.8) / 4.5)
    assert left_s[1] == pytest.approx(0.8)


def test_long_prompts_are_lost_first_and_long_contexts_leave_a_replica_few_slots() -> None:
    idle = Need(asked=1.0)
    alike = served_by(idle, Prompts(10.0, 5.0, 0.5, 1.0), 1.0, np.zeros(2))[0][1]
    unlike = served_by(idle, Prompts(20.0, 5.0, 0.5, 1.0), 1.0, np.zeros(2))[0][1]
    assert alike == pytest.approx((0.9 + 0.4) / 5.0)
    assert unlike == pytest.approx(alike**0.5)
    # 3 decodes of 11 %: two fit into 30 %, and four into two replicas.
    long = Need(asked=1.0, decode=0.33, decodes=3.0, shares=0.33, usable=0.4)
    served = served_by(long, Prompts(1.0, 0.1, 0.1, 10.0), 2.5, np.zeros(4))[0]
    assert served[2:] == pytest.approx(1.0 - blocked(3.0, np.array([4.0, 2.0])))
    # KV may be scarcer: each decode fills half a replica.
    served = served_by(long._replace(held=1.5), Prompts(1.0, 0.1, 0.1, 10.0), 2.5, np.zeros(4))[0]
    assert served[1:] == pytest.approx(1.0 - blocked(3.0, np.array([6.0, 4.0, 2.0])))


def test_where_the_pace_is_tight_roles_follow_the_mix() -> None:
    run = Run(fleet(4))
    assert run.settle(2.6, 0.1) == Split(0, 3, 1)
    assert "100% served in time with 3 prefill and 1 decode" in run.changes[0].reason
    assert run.splits == [Split(4, 0, 0), Split(2, 1, 1), Split(1, 2, 1), Split(0, 3, 1)]
    assert run.settle(0.6, 0.75) == Split(0, 1, 3)


def test_where_the_pace_is_loose_all_are_mixed() -> None:
    assert Run(fleet(4), usable=0.95).settle(1.8, 1.0) == Split(4, 0, 0)
    run = Run(fleet(0, 1, 2), usable=0.95)
    assert run.settle(0.2, 2.0) == Split(3, 0, 0)
    assert run.splits[1:-1] == [Split(1, 1, 1)]


def test_new_replicas_take_what_lacks_at_the_next_look() -> None:
    run = Run(fleet(0, 2, 2))
    run.settle(2.5, 0.4, looks=60)
    run.members += fleet(1)
    assert list(run.look(2.5, 0.4).roles.values()) == ["prefill"]


def test_what_loses_much_is_left_soon_and_what_loses_little_late() -> None:
    def left_after(decode: float) -> int:
        """Looks until another decode replica comes."""
        run = Run(fleet(0, 3, 1))
        run.settle(2.0, 0.1)
        assert run.splits[-1] == Split(0, 3, 1)
        return next(n for n in range(1, 200) if run.look(0.9, decode).roles)

    assert left_after(0.6) < left_after(0.33) <= 20


def test_a_small_difference_changes_nothing() -> None:
    run = Run(fleet(0, 3, 1))
    # 24 decodes on 30 slots lose 4 %; without the dead band another replica decodes.
    assert run.settle(0.9, 0.24) == Split(0, 3, 1)
    run = Run(fleet(0, 3, 1), RoleShares(gain=0.0))
    assert run.settle(0.9, 0.24) == Split(0, 2, 2)


def test_where_all_is_served_nothing_changes() -> None:
    for members in (fleet(4), fleet(0, 3, 1), fleet(0, 1, 3)):
        assert not Run(members).settle(0.3, 0.05).mixed % 4
        assert len(Run(members).splits) == 1


def test_the_least_busy_replica_changes() -> None:
    members = [
        Member("a", "decode", 3.0, 0.0, 0.0),
        Member("b", "decode", 1.0, 0.0, 0.0),
        Member("c", "decode", 1.0, 0.0, 0.0),
        Member("d", "prefill", 0.0, 0.0, 0.0),
    ]
    run = Run(members)
    run.settle(1.7, 0.2)
    assert list(run.changes[0].roles.items()) == [("b", "prefill")]


def test_a_role_that_lost_its_last_replica_gets_another_one_soon() -> None:
    run = Run(fleet(0, 0, 3))
    run.look(0.5, 0.2)
    # The first look has nothing to compare with, and one that is only late is not replaced.
    assert not run.look(0.5, 0.2).roles
    assert set(run.look(0.5, 0.2).roles.values()) == {"prefill"}
    # Also where no request has come.
    idle = Run(fleet(0, 0, 3))
    assert idle.settle(0.0, 0.0, looks=8).settled


def test_a_restart_of_the_controller_is_no_load() -> None:
    policy, members = RoleShares(), fleet(4)
    before, after = Load(100.0, 4.0, asked_s=50.0), Load(900.0, 4.0, asked_s=1.0)
    means = policy.decide(before, members, None).means
    change = policy.decide(after, members, means)
    assert not change.roles and change.means.need is None


demands = st.floats(0.0, 6.0)
policies = st.floats(0.01, 0.3).map(RoleShares)


@st.composite
def runs(draw: Callable[..., Any]) -> Run:
    """Any replicas, of any roles."""
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=7))
    counts = st.integers(0, 3)
    members = [Member(f"r{at}", role, draw(counts), 0.0, 0.0) for at, role in enumerate(roles)]
    return Run(members, draw(policies), draw(st.floats(0.3, 1.0)))


@given(runs(), demands, demands)
@example(Run(fleet(5, 2), RoleShares(0.03125), 0.34375), 5.5, 6.0)
def test_a_constant_load_settles_after_few_changes(run: Run, prefill: float, decode: float) -> None:
    run.settle(prefill, decode, looks=40 * len(run.members) + 400)
    # While its means are young, a change may be taken back.
    assert len(run.changes) <= 2 * len(run.members)
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
def test_the_order_of_the_replicas_makes_no_difference(
    run: Run, prefill: float, decode: float
) -> None:
    again = Run(run.members[::-1], run.policy, run.usable)
    for _ in range(80):
        assert run.look(prefill, decode).roles == again.look(prefill, decode).roles


# SLOs-Serve appendix A against figures worked by hand, and against a search of all splits.

# 10,000 tokens a second, and steps of 50 ms of which 10 ms are fixed: 400 tokens in each, so that a
# decode device makes 8,000 of them a second.
CHAT = demand_of_work(0.08, 200, 1e-4, tpot_s=0.05, overhead_s=0.01)
CODER = demand_of_work(0.08, 25, 1e-4, tpot_s=0.05, overhead_s=0.01)
REASONING = demand_of_work(0.01, 4_000, 1e-4, tpot_s=0.05, overhead_s=0.01)


def test_the_ratio_is_that_of_the_paper() -> None:
    # (1 - 0.01 / 0.05) * E[prompt] / E[output].
    assert pytest.approx((0.08, 0.025)) == CHAT
    assert CHAT.ratio == pytest.approx(0.8 * 800 / 200) == pytest.approx(3.2)
    assert CODER.ratio == pytest.approx(0.8 * 800 / 25) == pytest.approx(25.6)
    assert REASONING.ratio == pytest.approx(0.8 * 100 / 4_000) == pytest.approx(0.02)


def test_the_goodput_is_that_of_the_paper() -> None:
    # 10,000 / (200 / 0.8 + 800) = 10,000 / 1,050.
    assert CHAT.best_goodput == pytest.approx(9.5238, abs=1e-4)
    # Two of three prefill 25 requests a second, and one could decode 40.
    assert CHAT.goodput(2, 1) == pytest.approx(25 / 3)
    # One of three prefills 12.5.
    assert CHAT.goodput(1, 2) == pytest.approx(12.5 / 3)


def test_one_ratio_is_right_for_one_mix_only() -> None:
    assert CHAT.split(8) == (6, 2)
    assert CODER.split(8) == (7, 1)
    assert REASONING.split(8) == (1, 7)
    # Each loses most of its rate on the devices that are right for the other.
    assert CODER.goodput(1, 7) < 0.15 * CODER.goodput(7, 1)
    assert REASONING.goodput(7, 1) < 0.15 * REASONING.goodput(1, 7)


def test_a_tighter_pace_moves_devices_to_decode() -> None:
    ratios = [demand_of_work(0.08, 200, 1e-4, tpot, 0.01).ratio for tpot in (0.011, 0.05, inf)]
    assert ratios == pytest.approx([4 / 11, 3.2, 4.0])


def test_devices_for_a_rate_are_whole() -> None:
    assert CHAT.least(0.001) == (1, 1)
    assert CHAT.least(50) == (4, 2)
    assert CHAT.least(51) == (5, 2)


def test_where_few_decodes_find_room_each_token_has_more_of_the_overhead() -> None:
    # Steps of 10 ms and 0.1 ms a token: 400 tokens in 50 ms, or 100 in 20 ms.
    assert demand_of_work(0.08, 200, 1e-4, 0.05, 0.01, most_decodes=1_000) == CHAT
    short = demand_of_work(0.08, 200, 1e-4, 0.05, 0.01, most_decodes=100)
    assert short == pytest.approx((0.08, 200 * 0.02 / 100))


@given(
    demand=st.builds(PoolDemand, prefill=st.floats(0.001, 10), decode=st.floats(0.001, 10)),
    devices=st.integers(2, 40),
    rate=st.floats(0.01, 50),
)
def test_splits_serve_what_they_say(demand: PoolDemand, devices: int, rate: float) -> None:
    prefillers, decoders = demand.split(devices)
    assert prefillers >= 1
    assert decoders >= 1
    assert prefillers + decoders == devices
    assert demand.goodput(prefillers, decoders) <= demand.best_goodput * (1 + 1e-9)
    least = demand.least(rate)
    assert demand.goodput(*least) * sum(least) >= rate * (1 - 1e-9)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("prefill_s must be positive and finite, got 0", (0.0, 1.0, 1.0, 0.05, 0.01)),
        ("output_tokens must be positive and finite, got inf", (1.0, inf, 1.0, 0.05, 0.01)),
        ("token_s must be positive and finite, got 0", (1.0, 1.0, 0.0, 0.05, 0.01)),
        ("overhead_s must be finite and >= 0, got -0.1", (1.0, 1.0, 1.0, 0.05, -0.1)),
        ("most_decodes must be positive, got 0", (1.0, 1.0, 1.0, 0.05, 0.01, 0)),
        ("a time per token of 0.01 s cannot be kept", (1.0, 1.0, 1.0, 0.01, 0.01)),
    ],
)
def test_what_cannot_be_is_refused(words: str, arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=words):
        demand_of_work(*arguments)
