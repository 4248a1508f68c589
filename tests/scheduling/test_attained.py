"""Least attained service between programs: short loops before long ones, no promise is broken for
it, and no tenant gains by splitting its work."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.policies import LOCAL
from sluice.scheduling.batching import BatchPolicy, make_policy
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.scheduling.request.kernels import PROGRAM, Floats
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from sluice.scheduling.tenancy.attained import (
    HALF_LIFE_S,
    OWN,
    PAUSE_S,
    SHARED,
    Attained,
    ProgramTokens,
    older_of,
    power_of_four,
)
from tests.examples import examples
from tests.scheduling.test_plan_invariants import VARIANTS
from tests.scheduling.views import (
    MODEL,
    NOW_S,
    ROOMY,
    budgets,
    decode,
    latencies,
    order,
    planned,
    prefill,
    queue_of,
    queues,
)

TIERS = (True, False)
"""Whether requests without a promise are best effort, or in the tail of the default policy."""

MARGINAL = LinearLatency(a=0.0, b=0.001)


def of(program: int, view: RequestView, tier: bool = True, tenant: int = 0) -> RequestView:
    return view._replace(program=program, best_effort=tier, tenant=tenant, expected_tokens=20.0)


def had(policy: BatchPolicy, program: int, tokens: int, tenant: int = 0, now_s: float = 0) -> None:
    """An engine of ``policy`` has computed ``tokens`` of ``program``."""
    table = rows(of(program, prefill("past", tokens), tenant=tenant))
    charge(policy.attained, table, [tokens], MARGINAL, now_s)


def charge(
    attained: Attained, table: Floats, tokens: list[int], model: LatencyModel, now_s: float
) -> None:
    """An engine has run a batch of these rows."""
    attained.charge(table, np.arange(len(tokens)), np.array(tokens), model, now_s - 1e-9)
    attained.of(table, now_s)


def rows(*views: RequestView) -> Floats:
    return queue_of(*views).table


def test_what_is_attained_adds_up_decays_and_is_over_the_weight_of_the_tenant() -> None:
    attained = Attained()
    table = rows(
        of(7, prefill("a", 100), tenant=1),
        of(8, prefill("b", 300), tenant=1)._replace(weight=2.0),
        prefill("c", 50),
    )
    for _ in range(2):
        charge(attained, table, [100, 300, 50], MODEL, 5.0)
    # A third of the fixed 10 ms each, and 1 ms for each token.
    both_s, alone_s = 2 * (0.4 + 0.02 / 3), 2 * (0.05 + 0.01 / 3)
    shared = np.array([both_s, both_s / 2, alone_s])
    # Of the programs 0.21 and 0.61 s.
    found = attained.of(table, 5.0)
    assert found[:, OWN].tolist() == [1 / 16, 1 / 4, 0.0]
    assert found[:, SHARED] == pytest.approx(shared)
    # Who waits forgets nothing, but a tenant's share is of the last minute.
    for second in range(1, int(HALF_LIFE_S) + 1):
        found = attained.of(table, 5.0 + second)
    assert found[:, OWN].tolist() == [1 / 16, 1 / 4, 0.0]
    assert found[:, SHARED] == pytest.approx(shared / 2)
    found = attained.of(table, 5.0 + 3 * HALF_LIFE_S + PAUSE_S)
    assert found[:, OWN].tolist() == [1 / 64, 1 / 16, 0.0]
    assert attained.of(table, 5.0 + 9 * HALF_LIFE_S)[:, OWN].tolist() == [0.0, 0.0, 0.0]


def test_programs_that_run_are_not_dropped_for_new_ones() -> None:
    attained = Attained(most=8)
    for old in range(1, 9):
        charge(attained, rows(of(old, prefill("a", 500))), [500], MARGINAL, 0.1 * old)
    running = rows(*(of(name, prefill(str(name), 20)) for name in (20, 21, 22)))
    for step in range(5):
        charge(attained, running, [20] * 3, MARGINAL, 10.0 + step)
        assert len(attained) == 8
    assert attained.of(running, 15.0)[:, OWN].tolist() == [1 / 16] * 3


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 99)), max_size=80))
def test_it_knows_a_bounded_number(served: list[tuple[int, int]]) -> None:
    attained, exact = Attained(most=8), dict[int, float]()
    for program, tokens in served:
        table = rows(of(program, prefill("a", tokens)))
        charge(attained, table, [tokens], MARGINAL, 1.0)
        exact[program] = exact.get(program, 0.0) + tokens / 1000
        assert len(attained) == min(8, len(exact) + 1)
    for program, seconds in exact.items():
        found = attained.of(rows(of(program, prefill("a", 1))), 1.0)[0, OWN]
        assert found == power_of_four(seconds) or (len(exact) > 7 and found < seconds)


def test_the_conversations_of_older_programs_count_while_they_have_turns() -> None:
    attained = Attained()
    for program, began_s in ((1, 0.0), (2, 10.0), (3, 20.0)):
        turn = rows(of(program, prefill("a", 100 * program)))
        charge(attained, turn, [100], MODEL, began_s)
    attained.of(rows(prefill("no program", 5_000)), 21.0)

    def older(*began_s: float, now_s: float) -> list[float]:
        found: list[float] = older_of(attained.known, np.array(began_s), now_s).tolist()
        return found

    assert older(-1.0, 5.0, 15.0, 25.0, now_s=21.0) == [0, 100, 300, 600]
    assert older(25.0, now_s=65.0) == [500], "a minute without a turn"
    attained.of(rows(of(3, prefill("a", 400))), 66.0)
    assert older(90.0, now_s=90.0) == [400], "its last turn"


def test_its_table_grows_with_the_programs_that_have_something_left() -> None:
    attained = Attained(most=16_000)
    for step in range(40):
        views = [of(1 + 50 * step + n, prefill(str(n), 100)) for n in range(50)]
        charge(attained, rows(*views), [1_000] * 50, MARGINAL, float(step))
    assert len(attained) == 2_001
    crowded = len(attained.known)
    everyone = rows(*(of(1 + n, prefill(str(n), 1)) for n in range(2_000)))
    assert (attained.of(everyone, 40.0)[:, OWN] > 0.0).all(), "each has had a second"
    # After an hour nothing is left of them.
    for step in range(60):
        views = [of(10_001 + 50 * step + n, prefill(str(n), 100)) for n in range(50)]
        charge(attained, rows(*views), [1_000] * 50, MARGINAL, 3_640.0 + step)
    assert len(attained) == 3_001 and len(attained.known) == crowded


@pytest.mark.parametrize("tier", TIERS)
def test_the_program_that_has_had_least_goes_first(tier: bool) -> None:
    policy = make_policy("deadline_triage")
    for program, tokens in ((1, 4_800), (2, 300), (3, 1_200)):
        had(policy, program, tokens, now_s=NOW_S)
    queue = [of(n, prefill(f"p{n}", 16), tier) for n in (1, 2, 3, 4)]
    begun = of(1, prefill("begun", 32, computed=16), tier)
    made = planned(policy, *queue, begun, budget=ROOMY._replace(tokens=64))
    if tier:
        assert order(made) == ["p4", "p2", "p3", "begun"]
    else:  # what has begun holds memory, and in the tail may do so for long
        assert order(made) == ["begun", "p4", "p2", "p3"]
    # In two half-lives without a request 4.8 s become 1.2 s.
    later_s = NOW_S + 2 * HALF_LIFE_S + PAUSE_S
    had(policy, 5, 4_800, now_s=later_s)
    queue = [of(n, prefill(f"p{n}", 16, arrival_s=later_s), tier) for n in (5, 1)]
    assert order(planned(policy, *queue, now_s=later_s)) == ["p1", "p5"]


def test_of_like_programs_the_one_that_began_first_goes_first() -> None:
    """So it is done sooner than if both took turns, and the other one no later."""
    policy = make_policy("deadline_triage")
    for program, tokens in ((1, 2_500), (2, 1_100)):
        had(policy, program, tokens, now_s=NOW_S + program)
    queue = [of(n, prefill(f"p{n}", 16)) for n in (2, 1)]
    assert order(planned(policy, *queue, now_s=NOW_S + 2)) == ["p1", "p2"]


def test_a_request_with_a_deadline_that_can_be_met_is_before_the_least_attained() -> None:
    policy = make_policy("deadline_triage")
    had(policy, 1, 4_000, now_s=NOW_S)
    urgent = of(1, prefill("urgent", 16, SLO(ttft_s=5.0), arrival_s=NOW_S))
    made = planned(policy, of(2, prefill("new", 16)), urgent)
    assert order(made) == ["urgent", "new"]


@pytest.mark.parametrize(("policy", "options"), VARIANTS)
@settings(max_examples=examples(20))
@given(data=st.data(), queue=queues(), latency=latencies)
def test_no_promise_is_broken_for_it(
    policy: str, options: dict[str, object], data: st.DataObject, queue: QueueView,
    latency: LinearLatency,
) -> None:  # fmt: skip
    budget = data.draw(budgets(queue))
    past = data.draw(st.lists(st.tuples(st.sampled_from([7, 2**61]), st.integers(1, 900))))
    plans = []
    for known in (False, True):
        made = LOCAL.make(policy, options)
        for program, tokens in past if known else ():
            had(made, program, tokens, now_s=90.0)
        views = [view._replace(program=view.program * known) for view in queue.requests]
        plan = made.plan(QueueView(views), 100.0, latency, budget)
        # A promise without a time for the first token leaves a prompt its turn in the tail.
        above = {
            view.request_id: plan.tokens_of.get(view.request_id)
            for view in views
            if view.promised and (not view.is_prefill or view.slo.ttft_s or view.slo.e2e_s)
        }
        plans.append(above)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("tier", TIERS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_no_tenant_gains_by_splitting_its_work(tier: bool, data: st.DataObject) -> None:
    """Whatever programs they name, tenants have the same places: they choose only which of their
    own requests is in each."""
    count = data.draw(st.integers(1, 12))
    tenants = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    budget = ROOMY._replace(tokens=data.draw(st.integers(1, 16 * count)))
    places = []
    for _ in range(2):
        policy = make_policy("deadline_triage")
        programs = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
        named = list(zip(tenants, programs, strict=True))
        for tenant, program in named:
            had(policy, 10 * tenant + program, 10 * (1 + tenant), tenant)
        queue = [
            of(10 * tenant + program, prefill(f"{tenant}-{n}", 16), tier, tenant)
            for n, (tenant, program) in enumerate(named)
        ]
        made = planned(policy, *queue, latency=MARGINAL, budget=budget)
        places.append([name.split("-")[0] for name in order(made)])
    assert places[0] == places[1]


def test_a_tenant_that_has_had_less_goes_first_and_by_weight() -> None:
    for tier in TIERS:
        policy = make_policy("deadline_triage")
        had(policy, 11, 1_000, tenant=1, now_s=NOW_S)
        had(policy, 21, 1_500, tenant=2, now_s=NOW_S)
        one = [of(12, prefill("one", 16), tier, tenant=1)]
        two = [of(22, prefill("two", 16), tier, tenant=2)]
        few = ROOMY._replace(tokens=16)
        assert order(planned(policy, *two, *one, budget=few)) == ["one"]
        heavy = [view._replace(weight=3.0) for view in two]
        assert order(planned(policy, *one, *heavy, budget=few)) == ["two"]


def test_requests_without_a_program_are_planned_as_ever() -> None:
    policy = make_policy("deadline_triage")
    had(policy, 1, 4_000, now_s=NOW_S)
    plain = [of(0, prefill(f"p{n}", 900 - 100 * n), False) for n in range(5)]
    plain += [of(0, decode("d")), of(0, prefill("b", 64))]
    assert not queue_of(*plain).table[:, PROGRAM].any()
    fresh = planned(make_policy("deadline_triage"), *plain)
    assert planned(policy, *plain).entries == fresh.entries


def served(policy: str, loops: dict[int, int], tier: bool) -> dict[int, float]:
    """When each of the loops ends that come at once, by number of turns, on an engine that runs one
    request at a time: turns of 40 tokens and an answer of one, 1 ms a token, without pauses."""
    made, now_s = make_policy(policy), 0.0
    left, ends = dict(loops), dict.fromkeys(loops, inf)
    queue = [of(n, prefill(f"{n}", 40), tier) for n in loops]
    while queue:
        budget = ROOMY._replace(tokens=40)
        plan = planned(made, *queue, latency=MARGINAL, budget=budget, now_s=now_s)
        (entry,) = plan.entries
        now_s += plan.predicted_s
        program = int(entry.request_id)
        queue = [view for view in queue if view.program != program]
        left[program] -= 1
        if left[program]:
            queue.append(of(program, prefill(f"{program}", 100, arrival_s=now_s), tier))
        else:
            ends[program] = now_s
    return ends


@pytest.mark.parametrize("tier", TIERS)
def test_short_loops_do_not_wait_behind_long_ones(tier: bool) -> None:
    """As in Autellix, §4.2."""
    loops = {1: 12, 2: 10, 3: 2, 4: 1}
    fair = served("deadline_triage", loops, tier)
    in_order = served("fcfs", loops, False)
    for short in (3, 4):
        assert fair[short] <= in_order[short]
    assert max(fair.values()) == pytest.approx(max(in_order.values()))


def test_tokens_of_programs_decay_and_the_longest_without_any_is_dropped() -> None:
    had = ProgramTokens(most=2)
    had.add(1, 800, 0.0)
    had.add(2, 100, 0.0)
    had.add(1, 100, HALF_LIFE_S)
    assert had.of(1, HALF_LIFE_S) == pytest.approx(500)
    assert had.of(1, 3 * HALF_LIFE_S) == pytest.approx(125)
    had.add(3, 7, HALF_LIFE_S)
    assert [had.of(n, HALF_LIFE_S) for n in (1, 2, 3)] == pytest.approx([500, 0, 7])
