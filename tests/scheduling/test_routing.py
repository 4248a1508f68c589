"""Routing policies, by example and by property."""

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import EXPECTED_BLOCKS, RUNNING, work_on
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import POLICIES, make_policy
from sluice.scheduling.routing.base import Job
from tests.scheduling.fleets import QUERY, figures_of, fleet_of, job, report, row

# Session affinity: sessions stay, loads stay bounded, and few sessions move.

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


def test_requests_without_a_session_go_by_the_tokens_ahead() -> None:
    fleet = figures_of({"TOKENS": 9, "RUNNING": 1}, {"TOKENS": 5, "RUNNING": 4}, {"TOKENS": 7})
    assert place(fleet, 0) == 1


replicas = st.fixed_dictionaries(
    {
        "WAITING": st.integers(0, 9),
        "RUNNING": st.integers(0, 9),
        "RESERVED": st.integers(0, 3),
        "TOKENS": st.integers(0, 5_000),
        "CONTEXT": st.integers(0, 5_000),
        "FREE_BLOCKS": st.integers(0, 100),
        "SPENT_S": st.floats(0, 2),
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


def test_least_tokens_compares_prefill_then_decodes_then_context_then_order() -> None:
    many = {"TOKENS": 10}
    assert choose("least_tokens", figures_of(many, {"TOKENS": 9, "RUNNING": 50})) == 1
    assert choose("least_tokens", figures_of({"RUNNING": 2}, {"RUNNING": 1, "CONTEXT": 9})) == 1
    assert choose("least_tokens", figures_of({"CONTEXT": 9}, {"CONTEXT": 8})) == 1
    assert choose("least_tokens", figures_of(many, many, many)) == 0


@given(fleet=st.lists(replicas, min_size=1, max_size=9).map(lambda each: figures_of(*each)))
def test_pab_takes_a_replica_that_suffices_if_any_does(fleet: Fleet) -> None:
    asked = job(fleet)
    promised = make_admission("pab").promises(asked, fleet)
    chosen = make_policy("pab").choose(asked, fleet)
    assert promised.holds[chosen] == promised.holds.any()
    assert promised.wait_s[chosen] == promised.wait_s.min(), "or it is late by the least"


def test_pab_breaks_ties_by_requests_and_then_by_order() -> None:
    assert choose("pab", figures_of({"RUNNING": 2}, {"RESERVED": 1}, {"WAITING": 1})) == 1
    assert choose("pab", figures_of({}, {})) == 0


def test_pab_has_the_reference_horizon_where_no_ttft_is_stated() -> None:
    fleet = fleet_of(report(row(SLO(ttft_s=9.0), 3_000)), report(row(SLO(ttft_s=9.0), 2_000)))
    assert make_policy("pab").choose(job(fleet, QUERY._replace(slo=SLO())), fleet) == 1


def test_what_a_replica_has_in_its_cache_counts() -> None:
    fleet = fleet_of(report(row(prompt=300)), report(row(prompt=200)))
    warm = job(fleet)
    work_s = work_on(fleet.pieces, warm.rows, 500.0, np.array([400.0, 0.0]))
    warm = warm._replace(cached_tokens=np.array([400.0, 0.0]), work_s=work_s)
    for name in ("least_tokens", "pab"):
        assert choose(name, fleet) == 1
        assert make_policy(name).choose(warm, fleet) == 0


def test_min_load_counts_requests() -> None:
    busy, idle = {"RUNNING": 3}, {"WAITING": 1, "RESERVED": 1, "TOKENS": 9_000}
    assert choose("min_load", figures_of(busy, idle)) == 1
    assert choose("min_load", figures_of({}, {})) == 0


def test_least_work_compares_predicted_seconds_and_not_tokens() -> None:
    fast = LinearLatency(a=0.005, b=0.000_05, c=0.000_000_5)
    longer, shorter = row(prompt=3_000), row(prompt=2_000)
    fleet = fleet_of(report(longer, latency=fast), report(shorter))
    assert choose("least_tokens", fleet) == 1
    assert choose("least_work", fleet) == 0


def test_least_work_counts_what_was_done_since_the_report_and_the_share_of_decodes() -> None:
    fleet = fleet_of(report(row(prompt=3_000)), report(row(prompt=2_000), made_s=0.25))
    policy = make_policy("least_work")
    assert policy.choose(job(fleet), fleet) == 1
    assert policy.choose(job(fleet, now_s=0.25), fleet) == 0
    # Decodes that take half of the time make the shorter queue the longer one.
    decodes = [row(prompt=2_000, emitted=1, first_token_s=0.0) for _ in range(19)]
    fleet = fleet_of(report(row(prompt=3_000)), report(row(prompt=2_000), *decodes))
    assert choose("least_work", fleet) == 0


def test_least_work_takes_a_cached_prefix_while_its_queue_is_not_longer_by_more_than_it_saves() -> (
    None
):
    def warm(queued: int) -> int:
        fleet = fleet_of(report(row(prompt=queued)), report(row(prompt=1_000)))
        tokens = np.array([400.0, 0.0])
        rows = np.array([0, 1])
        work_s = work_on(fleet.pieces, rows, 500.0, tokens)
        made = job(fleet)._replace(cached_tokens=tokens, work_s=work_s)
        return make_policy("least_work").choose(made, fleet)

    assert warm(1_350) == 0
    assert warm(1_450) == 1


def test_least_memory_takes_the_most_left_after_what_is_expected() -> None:
    much = {"FREE_BLOCKS": 900, "EXPECTED_BLOCKS": 500}
    some = {"FREE_BLOCKS": 700, "EXPECTED_BLOCKS": 200}
    assert choose("least_memory", figures_of(much, some)) == 1
    # Half as many blocks of twice the size hold as much.
    large = {"FREE_BLOCKS": 400, "EXPECTED_BLOCKS": 100, "BLOCK_TOKENS": 32}
    assert choose("least_memory", figures_of(some, large)) == 1


def test_least_memory_begins_a_round_where_the_request_fits_nowhere() -> None:
    # The request needs 47 blocks: 500 tokens of prompt and 256 of output.
    total = {"TOTAL_BLOCKS": 200, "FREE_BLOCKS": 200}
    fleet = figures_of({**total, "EXPECTED_BLOCKS": 190}, {**total, "EXPECTED_BLOCKS": 170})
    policy = make_policy("least_memory")
    expected = fleet.figures[:2, EXPECTED_BLOCKS]
    # All count as empty, whatever they had.
    assert policy.choose(job(fleet), fleet) == 0
    chosen = []
    for _ in range(8):
        place = policy.choose(job(fleet), fleet)
        expected[place] += 48
        chosen.append(place)
    # Four fit at each; they take turns.
    assert sorted(chosen) == [0, 0, 0, 0, 1, 1, 1, 1]
    # One that is joined by more than fits there is passed over until the next round.
    expected[0] += 100
    assert policy.choose(job(fleet), fleet) == 0  # a new round: all are empty again
    expected[0] += 48
    assert policy.choose(job(fleet), fleet) == 1
    # The round ends when a request fits in what is really left.
    expected[:] = [100, 150]
    assert policy.choose(job(fleet), fleet) == 0


def test_slos_serve_asks_in_turn_and_skips_those_that_decline() -> None:
    full = [row(SLO(ttft_s=1.0), 9_000)]
    fleet = fleet_of(report(), report(*full), report())
    policy = make_policy("slos_serve")
    assert [policy.choose(job(fleet), fleet) for _ in range(6)] == [0, 2, 2, 0, 2, 2]


def test_slos_serve_leaves_it_to_least_tokens_after_so_many_hops() -> None:
    full, fuller = [row(SLO(ttft_s=1.0), 9_000)], [row(SLO(ttft_s=1.0), 9_500)]
    fleet = fleet_of(report(*fuller), report(*fuller), report(*full), report())
    policy = make_policy("slos_serve", {"hops": 2})
    assert policy.choose(job(fleet), fleet) == 3  # asked 0 and 1; that one has the least


@given(
    fleet=st.lists(replicas, min_size=2, max_size=9).map(lambda each: figures_of(*each)),
    data=st.data(),
)
def test_decisions_are_repeatable_and_among_the_replicas_of_the_job(
    fleet: Fleet, data: st.DataObject
) -> None:
    some = data.draw(st.sets(st.integers(0, len(fleet) - 1), min_size=1))
    for name in sorted(POLICIES):
        options = {"seed": 1} if name == "power_of_two" else {}
        policy, again = make_policy(name, options), make_policy(name, options)
        made = job(fleet)._replace(query=QUERY._replace(session=5)).of(np.array(sorted(some)))
        for _ in range(3):
            chosen = policy.choose(made, fleet)
            assert chosen == again.choose(made, fleet)
            assert made.rows[chosen] in some


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
