"""The best-effort tier under every policy: what was promised is served as if it were not there, it
gets what is left, and it does not wait for ever."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.policies import LOCAL
from sluice.scheduling.batching import (
    POLICIES,
    BatchBudget,
    BatchBuilder,
    BatchPlan,
    BatchPolicy,
    BestEffortOptions,
    make_policy,
)
from sluice.scheduling.batching.base import (
    BestEffort,
    in_turns,
    longest_wait_s,
    tokens_ahead,
    victims,
)
from sluice.scheduling.batching.token_budget import FCFS
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.scheduling.request.kernels import TENANT
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from tests.examples import examples
from tests.scheduling.steps import OVERLOAD, run
from tests.scheduling.test_plan_invariants import VARIANTS, run_as_engine
from tests.scheduling.views import (
    MODEL,
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

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

NOW_S = 100.0
CHAT = SLO(ttft_s=1.0, tpot_s=0.1)

EAGER = BestEffortOptions(patience_s=1e-6, aged_share=0.5)
"""Everything that has waited at all is aged."""


def behind(view: RequestView) -> RequestView:
    """``view`` without a promise."""
    return view._replace(best_effort=True)


def plan(*requests: RequestView, policy: str | BatchPolicy = "fcfs", **more: Any) -> BatchPlan:
    return planned(policy, *requests, **{"now_s": 0.0, **more})


def without_best_effort(
    queue: QueueView, budget: BatchBudget
) -> tuple[list[RequestView], BatchBudget]:
    """The promised requests, and the limits of an engine in which nobody else is."""
    promised = [view for view in queue.requests if not view.best_effort]
    freed = sum(view.kv_blocks for view in queue.requests if view.best_effort and view.running)
    return promised, budget._replace(kv_blocks=budget.kv_blocks + freed)


@settings(max_examples=examples(100))
@given(data=st.data(), queue=queues(), latency=latencies)
def test_promised_requests_are_planned_as_if_nobody_else_were_there(
    data: st.DataObject, queue: QueueView, latency: LatencyModel
) -> None:
    budget = data.draw(budgets(queue))
    if any(view.best_effort and view.running for view in queue.requests):
        # Nobody is evicted for drafts, so with those who hold blocks there may be fewer of them.
        queue = QueueView([view._replace(drafted_tokens=0) for view in queue.requests])
    promised, alone = without_best_effort(queue, budget)
    names = {view.request_id for view in promised}
    for name, options in VARIANTS:
        both = LOCAL.make(name, options).plan(queue, NOW_S, latency, budget)
        expected = LOCAL.make(name, options).plan(QueueView(promised), NOW_S, latency, alone)
        taken = tuple(entry for entry in both.entries if entry.request_id in names)
        # At a standstill best-effort work is evicted that nothing promised would need.
        assert taken == expected.entries or not expected.entries, name
        assert both.entries[: len(taken)] == taken, name


@settings(max_examples=examples(60))
@given(data=st.data(), queue=queues(), latency=latencies)
def test_plans_with_an_aged_lane_can_be_run(
    data: st.DataObject, queue: QueueView, latency: LatencyModel
) -> None:
    budget = data.draw(budgets(queue))
    views = {view.request_id: view for view in queue.requests}
    places = max(1, sum(view.running for view in queue.requests) // 2)
    for name, options in VARIANTS:
        policy = LOCAL.make(name, options)
        policy.best_effort = BestEffort(EAGER)
        for now_s in (NOW_S, NOW_S + 0.5):
            aged = [v for v in queue.requests if now_s - v.arrival_s > 1e-6 and v.best_effort]
            lane = sorted(aged, key=lambda v: v.arrival_s)[:places]
            made = policy.plan(queue, now_s, latency, budget)
            run_as_engine(queue, made, budget)
            if sum(entry.tokens for entry in made.entries) > budget.block_tokens:
                # No standstill.
                assert not {view.request_id for view in lane} & set(made.evicted_ids), name
            assert all(views[rid].running and views[rid].best_effort for rid in made.kept_ids)


@settings(max_examples=examples(200))
@given(
    sizes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 300)), max_size=8),
    blocks=st.integers(-2, 60),
    places=st.integers(-2, 6),
)
def test_as_few_are_evicted_as_are_needed(
    sizes: list[tuple[int, int]], blocks: int, places: int
) -> None:
    held = np.array([size[0] for size in sizes], np.float64)
    computed = np.array([size[1] for size in sizes], np.float64)
    chosen = victims(held, computed, blocks, places).tolist()
    assert len(set(chosen)) == len(chosen)
    enough = held[chosen].sum() >= blocks and len(chosen) >= places
    assert enough or len(chosen) == len(sizes)
    for spared in chosen:
        rest = [row for row in chosen if row != spared]
        assert held[rest].sum() < blocks or len(rest) < places
    alone = [row for row in range(len(sizes)) if held[row] >= blocks]
    if blocks > 0 and places <= 1 and alone:
        assert len(chosen) == 1
        assert computed[chosen[0]] == min(computed[row] for row in alone)


def test_a_promised_prompt_takes_the_memory_of_the_one_that_loses_least() -> None:
    old = behind(decode("old", context=800))
    new = behind(decode("new", context=640))
    tiny = behind(decode("tiny", context=16))
    budget = BatchBudget(tokens=4_096, sequences=8, kv_blocks=5, block_tokens=16)
    made = plan(old, new, tiny, prefill("chat", 600, CHAT), budget=budget)
    # It needs 38 blocks: 5 are free, and 40 come free.
    assert made.evicted_ids == ["new"]
    assert made.evicted_tokens == 640
    assert made.tokens_of["chat"] == 600


def test_nothing_is_evicted_for_a_prompt_that_would_not_fit_all_the_same() -> None:
    running = decode("running", CHAT, context=160)
    held = behind(decode("held", context=160))
    budget = BatchBudget(tokens=64, sequences=8, kv_blocks=5, block_tokens=16)
    made = plan(running, held, prefill("long", 400, CHAT), budget=budget)
    assert not made.evicted_ids
    # What the long one waits for is memory, not time.
    assert made.tokens_of == {"running": 1, "held": 1}


def test_best_effort_decodes_fill_the_time_that_promised_ones_leave() -> None:
    chat = decode("chat", CHAT, arrival_s=9.5, first_token_s=9.99)
    others = [behind(decode(f"other-{i}")) for i in range(100)]
    # 0.09 s are left of 0.1, of which 0.9 may be used: less 10 ms a step and 1 ms for the decode.
    assert sum(plan(chat, *others, now_s=10.0).tokens_of.values()) == 70


@pytest.mark.parametrize(("ahead_s", "tokens"), [(0.09, 22), (0.49, 22), (0.55, 39), (0.8, 79)])
def test_best_effort_prompts_leave_promised_decodes_time_to_get_ahead(
    ahead_s: float, tokens: int
) -> None:
    chat = decode("chat", CHAT, emitted=9, arrival_s=9.0, first_token_s=9.1 + ahead_s)
    batch = behind(prefill("batch", 5_000))
    # A quarter of what 11 ms leave of 0.1 s; what it is ahead by beyond half a TTFT of 1 s; at most
    # 0.9 of its TPOT.
    assert plan(chat, batch, now_s=10.0).tokens_of == {"chat": 1, "batch": tokens}


def test_a_long_ttft_does_not_keep_best_effort_prompts_waiting() -> None:
    slow = SLO(ttft_s=30.0, tpot_s=0.1)
    chat = decode("chat", slow, emitted=9, arrival_s=9.0, first_token_s=10.3)
    # It is 1.2 s ahead: 0.9 of its TPOT, less 10 ms a step and 1 ms for the decode.
    made = plan(chat, behind(prefill("batch", 5_000)), now_s=10.0).tokens_of
    assert made == {"chat": 1, "batch": 79}


def test_a_late_decode_is_caught_up_with() -> None:
    late = decode("late", CHAT, emitted=5, first_token_s=9.0)
    others = [behind(decode(f"other-{i}")) for i in range(100)]
    # Half of its TPOT of 0.1 s.
    assert sum(plan(late, *others, now_s=10.0).tokens_of.values()) == 34


def test_a_promised_pace_counts_however_little_it_leaves() -> None:
    tight = decode("tight", SLO(tpot_s=0.0145), emitted=5, first_token_s=9.0)
    batch = behind(prefill("batch", 5_000))
    # One that leaves less than a quarter of a batch counts for nothing: 20 empty steps.
    assert plan(tight, batch, now_s=10.0).tokens_of == {"tight": 1, "batch": 189}
    promised = tight._replace(promised=True)
    assert plan(promised, batch, now_s=10.0).tokens_of == {"tight": 1}


def test_while_a_promised_prefill_is_left_all_time_is_its_own() -> None:
    budget = ROOMY._replace(tokens=256)
    long, batch = prefill("long", 300, CHAT), behind(prefill("batch", 50))
    assert plan(long, batch, budget=budget).tokens_of == {"long": 256}
    assert plan(long, batch, policy="sarathi", token_budget=100).tokens_of == {"long": 100}


def test_alone_best_effort_runs_in_batches_that_a_newcomer_can_wait_for() -> None:
    made = plan(behind(prefill("a", 150)), behind(prefill("b", 5_000)))
    # 20 empty steps.
    assert made.tokens_of == {"a": 150, "b": 40}
    assert made.predicted_s == pytest.approx(0.2)


def test_with_steps_that_cost_nothing_themselves_batches_are_still_full() -> None:
    free = LinearLatency(a=0.0, b=0.001)
    answers = [behind(decode(f"a{n}")) for n in range(3)]
    made = plan(*answers, behind(prefill("b", 5_000)), latency=free)
    # 50 ms.
    assert made.tokens_of == {"a0": 1, "a1": 1, "a2": 1, "b": 47}


def test_work_of_less_worth_delays_the_prompts_of_more_by_a_tenth() -> None:
    policy = make_policy("fcfs")
    lines = [behind(decode(f"line-{n}")) for n in range(30)]
    chat = prefill("chat", 100, SLO(ttft_s=5.0, priority=2))
    alone = plan(*lines, policy=policy)
    assert len(alone.tokens_of) == 30
    assert plan(*lines, chat, policy=policy, now_s=1.0).tokens_of == {"chat": 100}
    # Another may come: 1.8 empty steps of 10 ms, for prompts and answers.
    after = plan(*lines[:5], behind(prefill("line", 500)), policy=policy, now_s=2.0)
    assert after.tokens_of == {**{f"line-{n}": 1 for n in range(5)}, "line": 3}
    # Long prompts take so long that a tenth of theirs is more.
    plan(prefill("long", 1_000, SLO(ttft_s=5.0, priority=2)), *lines, policy=policy, now_s=70.0)
    longer = plan(behind(prefill("line", 500)), policy=policy, now_s=71.0)
    assert longer.predicted_s == pytest.approx(0.1)
    # None has come for a minute.
    assert len(plan(*lines, policy=policy, now_s=132.0).tokens_of) == 30


def test_work_of_the_same_worth_and_that_beside_is_not_held_back() -> None:
    policy = make_policy("fcfs")
    chat = prefill("chat", 100, SLO(ttft_s=5.0, priority=2))
    same = behind(prefill("same", 500, SLO(priority=2)))
    assert plan(chat, same, policy=policy).tokens_of == {"chat": 100, "same": 90}
    line = behind(prefill("line", 500))
    assert plan(same, line, policy=policy, now_s=1.0).tokens_of == {"same": 190}


def test_a_policy_is_not_asked_where_nothing_is_promised() -> None:
    class NeedsRequests(FCFS):
        def fill(
            self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
        ) -> None:
            assert len(queue)
            super().fill(batch, queue, now_s, latency)

    made = plan(behind(prefill("a", 50)), policy=NeedsRequests())
    assert made.tokens_of == {"a": 50}


def test_answers_come_first_then_what_can_be_on_time_then_the_oldest() -> None:
    made = plan(
        behind(prefill("old", 40, arrival_s=0.0)),
        behind(prefill("late", 40, SLO(ttft_s=1.0), arrival_s=5.0)),
        behind(prefill("due", 40, SLO(ttft_s=1.0), arrival_s=9.8)),
        behind(prefill("first", 40, SLO(ttft_s=0.9), arrival_s=9.8)),
        behind(decode("answer", arrival_s=9.9)),
        now_s=10.0,
    )
    assert [entry.request_id for entry in made.entries] == ["answer", "first", "due", "old", "late"]


def test_a_best_effort_request_begins_only_with_a_reserve_to_spare() -> None:
    chat = decode("chat", SLO(ttft_s=1.0, tpot_s=10.0), context=1_600)._replace(expected_tokens=2.0)
    batch = behind(prefill("batch", 160))._replace(expected_tokens=160.0)
    # Its whole length takes 20 blocks; one more is for the running one, and 10 % for newcomers.
    for free, begins in ((20, False), (34, False), (35, True)):
        budget = BatchBudget(tokens=4_096, sequences=8, kv_blocks=free, block_tokens=16)
        made = plan(chat, batch, budget=budget)
        assert ("batch" in made.tokens_of) == begins


def test_what_best_effort_requests_hold_is_counted_once_for_the_reserve() -> None:
    runs = behind(decode("runs", context=1_600))._replace(expected_tokens=2.0)
    batch = behind(prefill("batch", 160))._replace(expected_tokens=160.0)
    # 100 blocks are held. 20 for its whole length, one for the running one, and a tenth of all.
    for free, begins in ((33, False), (35, True)):
        budget = BatchBudget(tokens=4_096, sequences=8, kv_blocks=free, block_tokens=16)
        assert ("batch" in plan(runs, batch, budget=budget).tokens_of) == begins


def test_after_an_eviction_none_begins_until_its_loss_is_made_good() -> None:
    policy = make_policy("fcfs")
    chat = prefill("chat", 100, SLO(ttft_s=5.0, tpot_s=1.0))
    tight = BatchBudget(tokens=4_096, sequences=8, kv_blocks=0, block_tokens=16)
    made = plan(behind(decode("b", context=200)), chat, policy=policy, budget=tight)
    assert made.evicted_ids == ["b"]
    # 200 tokens are 0.2 s of work: at a twentieth of the time that is 4 s.
    answer = decode("chat", SLO(ttft_s=5.0, tpot_s=10.0), context=100)
    waiting = behind(prefill("b", 200))
    early = plan(answer, waiting, policy=policy, now_s=3.9)
    assert "b" not in early.tokens_of
    assert "b" in plan(answer, waiting, policy=policy, now_s=4.1).tokens_of
    # With nothing promised there is nothing to wait for.
    policy = make_policy("fcfs", {})
    plan(behind(decode("b", context=200)), chat, policy=policy, budget=tight)
    assert "b" in plan(waiting, policy=policy, now_s=0.1).tokens_of


def test_running_best_effort_requests_out_of_memory_give_way_to_each_other() -> None:
    views = [behind(decode(f"b{n}", context=32, arrival_s=float(n))) for n in range(3)]
    budget = BatchBudget(tokens=64, sequences=8, kv_blocks=0, block_tokens=16)
    made = plan(*views, budget=budget)
    assert made.evicted_ids == ["b2"]
    assert made.entries == (("b0", 1),)


def test_an_aged_request_has_begun_is_in_every_batch_and_is_not_evicted() -> None:
    aged = behind(decode("aged", context=320, arrival_s=-40.0))
    young = behind(decode("young", context=640, arrival_s=-1.0))
    budget = BatchBudget(tokens=256, sequences=8, kv_blocks=1, block_tokens=16)
    made = plan(aged, young, prefill("chat", 600, CHAT), budget=budget)
    assert made.evicted_ids == ["young"]
    assert made.tokens_of == {"aged": 1, "chat": 255}


def test_an_aged_request_comes_first_where_nothing_is_promised() -> None:
    aged = behind(prefill("aged", 400, arrival_s=-40.0))
    due = [behind(prefill(f"due{n}", 150, SLO(ttft_s=1.0))) for n in range(2)]
    assert plan(aged, *due).tokens_of == {"aged": 190}


def test_small_requests_do_not_pass_a_long_one_that_waits_for_memory_for_ever() -> None:
    long = behind(prefill("long", 1_600, arrival_s=0.0))._replace(expected_tokens=160.0)
    small = behind(prefill("small", 16, arrival_s=50.0))._replace(expected_tokens=16.0)
    other = behind(decode("other", context=640, arrival_s=50.0))._replace(expected_tokens=2.0)
    # The long one takes 110 of 140 blocks: 100 are free, of which 14 are for newcomers.
    budget = BatchBudget(tokens=4_096, sequences=8, kv_blocks=100, block_tokens=16)
    for now_s, passes in ((59.0, True), (61.0, False)):
        made = plan(long, other, small, now_s=now_s, budget=budget)
        assert made.tokens_of == {"other": 1} | ({"small": 16} if passes else {})
    # Alone it begins, though it and the reserve are more than all there is.
    alone = BatchBudget(tokens=4_096, sequences=8, kv_blocks=115, block_tokens=16)
    assert plan(long, budget=alone).tokens_of == {"long": 190}


def test_the_longest_wait_is_that_of_those_which_do_not_run() -> None:
    table = queue_of(
        prefill("promised", 10),
        behind(decode("runs", arrival_s=1.0)),
        behind(prefill("waits", 10, arrival_s=4.0)),
        behind(prefill("evicted", 10, arrival_s=2.0)._replace(emitted_tokens=2, last_token_s=7.0)),
    ).table
    assert longest_wait_s(table, 10.0) == 6.0
    assert longest_wait_s(table[:2], 10.0) == 0.0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_wait_is_bounded_while_promises_fill_the_engine(name: str) -> None:
    patience_s, share = 3.0, 0.1
    policy = make_policy(name, {}, BestEffortOptions(patience_s=patience_s, aged_share=share))
    aged = [(behind(prefill(name, 90)), 20) for name in ("first", "second")]
    budget = ROOMY._replace(tokens=512)
    served = run(policy, [*aged, *OVERLOAD], MODEL, budget, until="second")
    assert not served.tokens_s["s699"]
    first_s, second_s = served.tokens_s["first"], served.tokens_s["second"]
    for start_s, entries in served.batches:
        answering = {n for n in ("first", "second") if _answers(served.tokens_s[n], start_s)}
        assert answering <= dict(entries).keys(), "an aged one that answers is in every batch"
    assert patience_s < first_s[0] < second_s[0]
    # The second waits for the first one's prompt and answer. A batch is 0.5 s.
    assert first_s[0] <= patience_s + 0.090 / share + 1.1
    assert second_s[0] <= patience_s + 2 * 0.090 / share + 20 * 0.53 + 1.1


def _answers(tokens_s: list[float], now_s: float) -> bool:
    return tokens_s[0] <= now_s < tokens_s[-1]


def of(tenant: int, view: RequestView, weight: float = 1.0) -> RequestView:
    return behind(view)._replace(tenant=tenant, weight=weight, expected_tokens=20.0)


def test_thousands_of_requests_of_one_tenant_do_not_stand_before_the_few_of_another() -> None:
    greedy = [of(1, prefill(f"a{n}", 16, arrival_s=-5.0)) for n in range(2_000)]
    later = [of(2, prefill(f"b{n}", 16, arrival_s=-1.0)) for n in range(2)]
    made = plan(*greedy, *later, budget=ROOMY._replace(tokens=80))
    assert order(made) == ["a0", "b0", "a1", "b1", "a2"]
    # What runs of a tenant is before its next one, too.
    begun = [of(1, decode(f"run{n}", context=80)) for n in range(2)]
    made = plan(*begun, *greedy, *later, budget=ROOMY._replace(tokens=66))
    assert order(made) == ["run0", "run1", "b0", "b1", "a0", "a1"]
    # One that has waited for long is before all that has not; of these, tenants take turns as well.
    aged = [view._replace(arrival_s=-1_000.0) for view in (*greedy, *later)]
    made = plan(*aged, budget=ROOMY._replace(tokens=48))
    assert order(made) == ["a0", "b0", "a1"]


def test_the_oldest_keeps_its_place_in_the_lane_whatever_runs_of_its_tenant() -> None:
    policy = make_policy("fcfs", {}, BestEffortOptions(patience_s=5.0))
    oldest = of(1, prefill("oldest", 4_000, arrival_s=0.0, computed=160))
    others = [of(1, decode(f"run{n}", context=1_600, arrival_s=19.0)) for n in range(3)]
    aged = [of(2, prefill(f"b{n}", 16, arrival_s=10.0)) for n in range(3)]
    urgent = prefill("urgent", 160, CHAT, arrival_s=20.0)
    budget = BatchBudget(tokens=512, sequences=99, kv_blocks=0, block_tokens=16)
    made = plan(oldest, *others, *aged, urgent, policy=policy, now_s=20.0, budget=budget)
    assert made.evicted_ids == ["run2"]


def test_a_prompt_that_has_begun_is_before_the_next_one_of_who_had_the_last_turn() -> None:
    greedy = [of(1, prefill(f"a{n}", 400, arrival_s=-5.0)) for n in range(9)]
    other = of(2, prefill("b", 400, arrival_s=-1.0, computed=16))
    made = plan(*greedy, other, budget=ROOMY._replace(tokens=200))
    assert order(made) == ["b"]


def test_the_turns_are_by_weight_and_keep_the_order_of_deadlines() -> None:
    heavy = [of(1, prefill(f"h{n}", 16), 3.0) for n in range(9)]
    light = [of(2, prefill(f"l{n}", 16)) for n in range(9)]
    made = plan(*heavy, *light, budget=ROOMY._replace(tokens=128))
    assert sorted(key[0] for key, _ in made.entries) == ["h"] * 6 + ["l"] * 2
    soon = SLO(ttft_s=5.0)
    urgent = of(1, prefill("soon", 16, soon), 3.0)
    made = plan(*heavy, urgent, *light, budget=ROOMY._replace(tokens=16))
    assert order(made) == ["soon"]


@settings(max_examples=examples(100))
@given(queue=queues(max_size=20), data=st.data())
def test_turns_change_no_tenant_s_own_order_and_stay_even(
    queue: QueueView, data: st.DataObject
) -> None:
    table = queue.table
    rows = data.draw(st.permutations(range(len(table))))
    order = np.array(rows[: data.draw(st.integers(0, len(rows)))], np.int64)
    turned = in_turns(table, order)
    assert sorted(turned.tolist()) == sorted(order.tolist())
    ahead = tokens_ahead(table, order) if len(order) else np.zeros(0)
    tag_of = dict(zip(order.tolist(), ahead.tolist(), strict=True))
    for tenant in {view.tenant for view in queue.requests}:
        own = [row for row in order.tolist() if queue.requests[row].tenant == tenant]
        taken = [row for row in turned.tolist() if queue.requests[row].tenant == tenant]
        if len({queue.requests[row].weight for row in own}) <= 1:
            assert taken == own
    assert [tag_of[row] for row in turned.tolist()] == sorted(tag_of.values()) or (
        len({table[row, TENANT] for row in order.tolist()}) <= 1
    )
