"""Routing policies, by example and by property."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.objective import SLO
from scheduling.routing import POLICIES, ReplicaView, RouteQuery, make_policy

QUERY = RouteQuery(key=7, slo=SLO(ttft_s=1.0), prompt_tokens=500)


def replica(name: str = "r", **fields: float) -> ReplicaView:
    """An idle replica, but for ``fields``."""
    idle: dict[str, float] = {
        "waiting": 0,
        "running": 0,
        "reserved": 0,
        "prefill_tokens": 0,
        "context_tokens": 0,
        "free_kv_blocks": 100,
        "pab_tokens": 1_000.0,
    }
    return ReplicaView(name, **(idle | fields))  # type: ignore[arg-type]


replicas = st.builds(
    ReplicaView,
    replica_id=st.text(max_size=3),
    waiting=st.integers(0, 9),
    running=st.integers(0, 9),
    reserved=st.integers(0, 3),
    prefill_tokens=st.integers(0, 5_000),
    context_tokens=st.integers(0, 5_000),
    free_kv_blocks=st.integers(0, 100),
    pab_tokens=st.floats(-1e5, 1e5),
)


@given(fleet=st.lists(replicas, min_size=1, max_size=9))
def test_every_policy_names_a_replica_that_exists(fleet: list[ReplicaView]) -> None:
    before = list(fleet)
    for name in POLICIES:
        policy = make_policy(name)
        for _ in range(3):
            assert 0 <= policy.choose(QUERY, fleet) < len(fleet)
    assert fleet == before


def test_round_robin_takes_turns_also_when_the_fleet_changes() -> None:
    policy = make_policy("round_robin")
    fleet = [replica(str(index)) for index in range(3)]
    assert [policy.choose(QUERY, fleet) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [policy.choose(QUERY, fleet[:1]) for _ in range(3)] == [0, 0, 0]
    counts = Counter(policy.choose(QUERY, fleet) for _ in range(300))
    assert set(counts.values()) == {100}


def test_power_of_two_takes_the_less_busy_of_two_different_replicas() -> None:
    policy = make_policy("power_of_two", {"seed": 3})
    busy, idle = replica("busy", running=5), replica("idle", waiting=1, running=2, reserved=1)
    assert {policy.choose(QUERY, [busy, idle]) for _ in range(50)} == {1}
    assert {policy.choose(QUERY, [idle, busy]) for _ in range(50)} == {0}
    assert policy.choose(QUERY, [busy]) == 0
    # The busiest of all is never the less busy of two; every other one is at times.
    fleet = [replica(str(index), running=index) for index in range(6)]
    assert {policy.choose(QUERY, fleet) for _ in range(500)} == {0, 1, 2, 3, 4}


def test_power_of_two_is_repeatable_with_a_seed() -> None:
    rng = random.Random(0)
    fleet = [replica(str(index), running=rng.randint(0, 3)) for index in range(20)]
    runs = []
    for _ in range(2):
        policy = make_policy("power_of_two", {"seed": 11})
        runs.append([policy.choose(QUERY, fleet) for _ in range(50)])
    assert runs[0] == runs[1]


def test_power_of_two_balances_far_better_than_one_random_choice() -> None:
    policy = make_policy("power_of_two", {"seed": 5})
    rng = random.Random(5)
    load, chance = [0] * 50, [0] * 50
    for _ in range(5_000):
        load[policy.choose(QUERY, [replica(running=count) for count in load])] += 1
        chance[rng.randrange(50)] += 1
    assert max(load) - min(load) <= 6
    assert max(chance) - min(chance) > 20


def test_least_tokens_compares_prefill_then_decodes_then_context_then_order() -> None:
    policy = make_policy("least_tokens")
    many = replica(prefill_tokens=10)
    assert policy.choose(QUERY, [many, replica(prefill_tokens=9, running=50)]) == 1
    assert policy.choose(QUERY, [replica(running=2), replica(running=1, context_tokens=9)]) == 1
    assert policy.choose(QUERY, [replica(context_tokens=9), replica(context_tokens=8)]) == 1
    assert policy.choose(QUERY, [many, many, many]) == 0


@given(fleet=st.lists(replicas, min_size=1, max_size=9), prompt=st.integers(1, 10_000))
def test_pab_takes_a_replica_that_suffices_if_any_does(
    fleet: list[ReplicaView], prompt: int
) -> None:
    chosen = fleet[make_policy("pab").choose(QUERY._replace(prompt_tokens=prompt), fleet)]
    if any(view.pab_tokens >= prompt for view in fleet):
        assert chosen.pab_tokens >= prompt
    assert chosen.pab_tokens == max(view.pab_tokens for view in fleet)


def test_pab_breaks_ties_by_requests_and_then_by_order() -> None:
    policy = make_policy("pab")
    assert policy.choose(QUERY, [replica(running=2), replica(reserved=1), replica(waiting=1)]) == 1
    assert policy.choose(QUERY, [replica(), replica()]) == 0


def test_unknown_policies_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown routing policy 'random'; known: least_tokens"):
        make_policy("random")
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        make_policy("pab", {"seed": 1})
    with pytest.raises(ValueError, match="valid integer"):
        make_policy("power_of_two", {"seed": "now"})


def test_every_policy_and_option_is_described() -> None:
    for policy in POLICIES.values():
        assert policy.source
        assert all(field.description for field in policy.Options.model_fields.values())
