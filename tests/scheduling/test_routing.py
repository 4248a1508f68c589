"""Routing policies, by example and by property."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet import Fleet
from scheduling.fleet_rows import PAB
from scheduling.routing import POLICIES, make_policy
from tests.scheduling.fleets import figures_of, job

replicas = st.fixed_dictionaries(
    {
        "WAITING": st.integers(0, 9),
        "RUNNING": st.integers(0, 9),
        "RESERVED": st.integers(0, 3),
        "TOKENS": st.integers(0, 5_000),
        "CONTEXT": st.integers(0, 5_000),
        "FREE_BLOCKS": st.integers(0, 100),
        "PAB": st.floats(-1e5, 1e5),
    }
)


def choose(name: str, fleet: Fleet, **options: object) -> int:
    return make_policy(name, options).choose(job(fleet), fleet)


@given(fleet=st.lists(replicas, min_size=1, max_size=9).map(lambda each: figures_of(*each)))
def test_every_policy_names_a_replica_that_exists(fleet: Fleet) -> None:
    before = fleet.figures.copy()
    for name in POLICIES:
        policy = make_policy(name)
        for _ in range(3):
            assert 0 <= policy.choose(job(fleet), fleet) < len(fleet)
    assert np.array_equal(fleet.figures, before)


def test_round_robin_takes_turns_also_when_the_fleet_changes() -> None:
    policy = make_policy("round_robin")
    fleet = figures_of({}, {}, {})
    every = job(fleet)
    assert [policy.choose(every, fleet) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    # The next one in turn of those that may be chosen.
    assert every.rows[policy.choose(every, fleet)] == 1
    two = every.of(np.array([0, 1]))
    assert [two.rows[policy.choose(two, fleet)] for _ in range(3)] == [0, 1, 0]
    counts = Counter(policy.choose(every, fleet) for _ in range(300))
    assert set(counts.values()) == {100}


def test_power_of_two_takes_the_less_busy_of_two_different_replicas() -> None:
    policy = make_policy("power_of_two", {"seed": 3})
    busy, idle = {"RUNNING": 5}, {"WAITING": 1, "RUNNING": 2, "RESERVED": 1}
    for pair, better in ((figures_of(busy, idle), 1), (figures_of(idle, busy), 0)):
        assert {policy.choose(job(pair), pair) for _ in range(50)} == {better}
    # The busiest of all is never the less busy of two; every other one is at times.
    fleet = figures_of(*({"RUNNING": index} for index in range(6)))
    assert {policy.choose(job(fleet), fleet) for _ in range(500)} == {0, 1, 2, 3, 4}


def test_power_of_two_is_repeatable_with_a_seed() -> None:
    rng = random.Random(0)
    fleet = figures_of(*({"RUNNING": rng.randint(0, 3)} for _ in range(20)))
    runs = []
    for _ in range(2):
        policy = make_policy("power_of_two", {"seed": 11})
        runs.append([policy.choose(job(fleet), fleet) for _ in range(50)])
    assert runs[0] == runs[1]


def test_least_tokens_compares_prefill_then_decodes_then_context_then_order() -> None:
    many = {"TOKENS": 10}
    assert choose("least_tokens", figures_of(many, {"TOKENS": 9, "RUNNING": 50})) == 1
    assert choose("least_tokens", figures_of({"RUNNING": 2}, {"RUNNING": 1, "CONTEXT": 9})) == 1
    assert choose("least_tokens", figures_of({"CONTEXT": 9}, {"CONTEXT": 8})) == 1
    assert choose("least_tokens", figures_of(many, many, many)) == 0


@given(fleet=st.lists(replicas, min_size=1, max_size=9).map(lambda each: figures_of(*each)))
def test_pab_takes_a_replica_that_suffices_if_any_does(fleet: Fleet) -> None:
    budgets = fleet.figures[: len(fleet), PAB]
    assert budgets[choose("pab", fleet)] == budgets.max()


def test_pab_breaks_ties_by_requests_and_then_by_order() -> None:
    assert choose("pab", figures_of({"RUNNING": 2}, {"RESERVED": 1}, {"WAITING": 1})) == 1
    assert choose("pab", figures_of({}, {})) == 0


def test_what_a_replica_has_in_its_cache_counts() -> None:
    fleet = figures_of({"TOKENS": 300, "PAB": 700}, {"TOKENS": 200, "PAB": 800})
    warm = job(fleet)._replace(cached_tokens=np.array([400.0, 0.0]))
    for name in ("least_tokens", "pab"):
        assert choose(name, fleet) == 1
        assert make_policy(name).choose(warm, fleet) == 0


def test_unknown_policies_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown routing policy 'random'; known: "):
        make_policy("random")
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        make_policy("pab", {"seed": 1})
    with pytest.raises(ValueError, match="valid integer"):
        make_policy("power_of_two", {"seed": "now"})


def test_every_policy_and_option_is_described() -> None:
    for policy in POLICIES.values():
        assert policy.source
        assert all(field.description for field in policy.Options.model_fields.values())
