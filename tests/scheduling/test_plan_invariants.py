"""What every plan of every registered policy holds, over random queues and budgets."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.policies import LOCAL
from sluice.scheduling.batching import (
    BatchBudget,
    BatchBuilder,
    BatchPlan,
    BatchPolicy,
)
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import (
    LatencyModel,
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
    StepSample,
)
from sluice.scheduling.latency.speculation import MAX_LENGTH
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from tests.examples import examples
from tests.scheduling.views import (
    ROOMY,
    budgets,
    decode,
    latencies,
    prefill,
    queue_of,
    queues,
    rooflines,
)

# Where a policy divides by nothing or overflows, it compares what has no order.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

NOW_S = 100.0
MODEL = LinearLatency(a=0.005, b=1e-4, c=1e-7, d=1e-9)

VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("fcfs", {}),
    ("sarathi", {"token_budget": 64}),
    ("fairbatching", {}),
    ("fairbatching", {"anchor": "envelope"}),
    ("slidebatching", {}),
    ("slidebatching", {"boundary": "phi_c", "late": "include", "anchor": "envelope", "gamma": 3.0}),
    ("slidebatching", {"boundary": "phi_p", "prefill_share": 0.0}),
    ("slidebatching", {"latency_aware": False, "order": "density"}),
    ("fairbatching", {"anchor": "last_token", "prefill_share": 0.0}),
    ("sarathi_priority", {"token_budget": 64}),
    ("edf", {"token_budget": 64}),
    ("sjf", {"token_budget": 64}),
    ("d_edf", {"late": "in_order", "batch_tokens": 300}),
    ("s_edf", {"chunk_tokens": 100}),
    ("slos_serve", {}),
    ("slos_serve", {"anchor": "envelope", "expected_tokens": 16}),
    ("slos_serve", {"anchor": "first_token", "margin": 0.0}),
    ("deadline_triage", {}),
    ("annealing", {}),
    ("annealing", {"batch_size": 3, "admits": "in_order"}),
]

FREEST = {"prefill_share": 0.0, "eta_s": 1e-9}
CHAT = SLO(ttft_s=1.0, tpot_s=0.05)

# They run one task of prefills at a time.
ONE_TASK = {"d_edf", "s_edf"}


def test_every_registered_policy_is_covered() -> None:
    assert {name for name, _ in VARIANTS} == set(LOCAL)


class ContraryPolicy(BatchPolicy):
    """Asks for everything, twice, in reverse, with too many tokens, and for strangers."""

    name = "contrary"
    source = "a policy that breaks every rule it can"
    local_order = SLIDE

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        batch.add(len(queue))
        batch.add(-1)
        for row in reversed(range(len(queue))):
            batch.add(row, 7)
            batch.add(row, queue.requests[row].pending_tokens + 100)
            batch.add(row, -1)


def all_policies() -> list[BatchPolicy]:
    return [LOCAL.make(name, options) for name, options in VARIANTS] + [ContraryPolicy()]


def blocks_for(tokens: int, budget: BatchBudget) -> int:
    return -(-tokens // budget.block_tokens)


def run_as_engine(queue: QueueView, plan: BatchPlan, budget: BatchBudget) -> None:
    """Run the plan as the engine does, and fail if it cannot run exactly as planned.

    What it evicts is preempted before. Running requests come first, in order of the plan and those
    left out behind them; one that needs blocks takes them from the last of that list. Waiting
    requests are admitted only if nothing else was preempted, up to the limit of sequences.
    """
    views = {request.request_id: request for request in queue.requests}
    planned = {entry.request_id: entry.tokens for entry in plan.entries}
    gone = set(plan.evicted_ids)
    assert planned or not gone, "evicted for nothing"
    assert all(views[rid].running for rid in gone)
    # A stream is not interrupted, but for a promise to another one.
    assert all(views[rid].best_effort or not views[rid].emitted_tokens for rid in gone)
    assert not gone & planned.keys() and not gone & set(plan.kept_ids)
    active = [views[rid] for rid in planned if views[rid].running]
    active += [views[rid] for rid in plan.kept_ids]
    rest = {r.request_id: r for r in queue.requests if r.running}
    active += [r for rid, r in rest.items() if rid not in {*planned, *plan.kept_ids, *gone}]
    free = budget.kv_blocks + sum(views[rid].kv_blocks for rid in gone)
    preempted = False
    position = 0
    while position < len(active):
        request = active[position]
        tokens = planned.get(request.request_id, 0)
        if not tokens:
            break
        ahead = tokens + budget.lookahead_tokens
        need = blocks_for(request.computed_tokens + ahead, budget) - request.kv_blocks
        while need > free:
            victim = active.pop()
            assert victim is not request, "the engine would have to preempt a planned request"
            assert victim.request_id not in planned, "a planned request lost its blocks"
            assert not victim.best_effort, "it was not named, or nobody may draw on it"
            free += victim.kv_blocks
            preempted = True
        free -= max(0, need)
        position += 1
    for request_id, tokens in planned.items():
        request = views[request_id]
        if request.running:
            continue
        assert not preempted, "an engine admits nothing in a step that preempted"
        assert len(active) < budget.sequences, "too many sequences"
        ahead = request.computed_tokens + budget.lookahead_tokens
        whole = blocks_for(ahead + request.pending_tokens, budget)
        if budget.reserve_prompt:
            assert whole - request.kv_blocks <= free, "the whole prompt does not fit"
        need = blocks_for(ahead + tokens, budget) - request.kv_blocks
        assert need <= free, "no blocks for an admitted request"
        free -= max(0, need)
        active.append(request)


def fits_alone(request: RequestView, queue: QueueView, budget: BatchBudget) -> bool:
    """Whether a plan of one token of this request could run, the best-effort ones evicted."""
    ahead = request.computed_tokens + budget.lookahead_tokens
    running = [r for r in queue.requests if r.running and r is not request]
    gone = [r for r in running if r.best_effort]
    room = budget.kv_blocks + request.kv_blocks + sum(r.kv_blocks for r in gone)
    if request.running:
        others = sum(r.kv_blocks for r in running if not r.best_effort)
        if request.best_effort:
            others = 0
        return blocks_for(ahead + 1, budget) <= room + others
    if len(running) - len(gone) >= budget.sequences:
        return False
    tokens = request.pending_tokens if budget.reserve_prompt else 1
    return blocks_for(ahead + tokens, budget) <= room


@settings(max_examples=examples(120))
@given(data=st.data(), queue=queues(), latency=latencies | rooflines)
def test_every_plan_can_run_exactly_as_planned_and_is_not_empty_where_something_fits(
    data: st.DataObject, queue: QueueView, latency: LatencyModel
) -> None:
    budget = data.draw(budgets(queue))
    views = {request.request_id: request for request in queue.requests}
    fits = any(fits_alone(request, queue, budget) for request in queue.requests)
    for policy in all_policies():
        plan = policy.plan(queue, NOW_S, latency, budget)
        assert plan.entries or not fits, policy.name
        ids = [entry.request_id for entry in plan.entries]
        assert len(ids) == len(set(ids)), "planned twice"
        assert set(ids) <= set(views), "an unknown request"
        assert sum(entry.tokens for entry in plan.entries) <= budget.tokens
        for entry in plan.entries:
            view = views[entry.request_id]
            assert 1 <= entry.tokens <= view.pending_tokens + view.drafted_tokens
            if not view.is_prefill:
                assert entry.tokens <= MAX_LENGTH
        run_as_engine(queue, plan, budget)
        work = [(tokens, views[request_id].computed_tokens) for request_id, tokens in plan.entries]
        checked = [t - views[rid].pending_tokens for rid, t in plan.entries]
        predicted_s = latency.step_s(StepSample.of(work)) + budget.draft_s * max([0, *checked])
        assert plan.predicted_s == pytest.approx(predicted_s)


def test_what_policies_keep_does_not_grow_while_requests_come_and_go() -> None:
    def queue_at(step: int) -> QueueView:
        new = [prefill(f"p{step + n}", 40, CHAT, arrival_s=float(step)) for n in range(8)]
        old = [decode(f"p{step - n}", CHAT, arrival_s=step - 1.0) for n in range(1, 8)]
        return queue_of(*old, *new)

    for policy in all_policies():
        sizes = []
        for step in range(300):
            policy.plan(queue_at(step), float(step), MODEL, ROOMY)
            if step % 5 == 0:
                sizes.append(len(pickle.dumps(vars(policy))))
        assert max(sizes[20:]) <= max(sizes[:20]), policy.name


@settings(max_examples=examples(60))
@given(data=st.data(), queue=queues())
def test_plans_are_repeatable_and_change_nothing(data: st.DataObject, queue: QueueView) -> None:
    budget = data.draw(budgets(queue))
    before = copy.deepcopy(queue)
    for (name, options), policy in zip(VARIANTS, all_policies(), strict=False):
        plan = policy.plan(queue, NOW_S, MODEL, budget)
        assert policy.plan(queue, NOW_S, MODEL, budget) == plan
        assert LOCAL.make(name, options).plan(queue, NOW_S, MODEL, budget) == plan
    assert queue == before


# Only one term costs anything; or work takes next to no time, or more than any objective allows.
EXTREME_MODELS = (
    LinearLatency(a=0.0, b=1e-6),
    LinearLatency(a=0.01, b=0.0),
    LinearLatency(a=0.0, b=0.0, c=1e-9),
    LinearLatency(a=0.0, b=0.0, d=1e-12),
    LinearLatency(a=1e-300, b=1e-310),
    LinearLatency(a=50.0, b=3.0, c=2.0, d=1.0),
    PrefillDecodeLatency(0.0, 0.0, 0.0, 1e-7, 0.0, 0.004),
    PrefillDecodeLatency(0.0, 0.0, 1e-4, 0.0, 0.0, 0.004),
    PrefillDecodeLatency(0.0, 0.0, 0.0, 1e-7, 0.0, 0.0),
    PrefillDecodeLatency(0.0, 0.0, 1e-4, 0.0, 0.0, 0.0),
    RooflineLatency(0.0, 0.0, 0.02, 1e-4, 0.0, 0.0),
)
extreme_slos = st.builds(
    SLO,
    ttft_s=st.sampled_from([None, 1e-300, 0.5, 1e300]),
    tpot_s=st.sampled_from([None, 1e-300, 0.01, 0.05, 1e300]),
    e2e_s=st.sampled_from([None, 1e-300, 10.0, 1e300]),
    priority=st.sampled_from([1, 10]),
)


@settings(max_examples=examples(100))
@given(
    data=st.data(),
    queue=queues(),
    objectives=st.lists(extreme_slos, min_size=12, max_size=12),
    latency=st.sampled_from(EXTREME_MODELS),
)
def test_extreme_objectives_and_models_are_planned_like_any_other(
    data: st.DataObject, queue: QueueView, objectives: list[SLO], latency: LatencyModel
) -> None:
    views = [view._replace(slo=slo) for view, slo in zip(queue.requests, objectives, strict=False)]
    extreme = QueueView(views)
    budget = data.draw(budgets(extreme))
    fits = any(fits_alone(request, extreme, budget) for request in views)
    for policy in [*all_policies(), LOCAL.make("slidebatching", FREEST)]:
        plan = policy.plan(extreme, NOW_S, latency, budget)
        run_as_engine(extreme, plan, budget)
        assert plan.entries or not fits, policy.name


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_four_thousand_requests_are_planned(name: str) -> None:
    requests = [
        prefill(f"p{n}", 1 + n * 37 % 3_000, CHAT if n % 3 else SLO(), arrival_s=n / 100)
        if n % 2
        else decode(f"d{n}", CHAT, context=1 + n % 500, arrival_s=n / 100, first_token_s=50.0)
        for n in range(4_000)
    ]
    budget = BatchBudget(tokens=8_192, sequences=2_500, kv_blocks=20_000, block_tokens=16)
    plan = LOCAL.make(name).plan(QueueView(requests), NOW_S, MODEL, budget)
    run_as_engine(QueueView(requests), plan, budget)
    assert plan.entries


@settings(max_examples=examples(60))
@given(queue=queues())
def test_everything_runs_when_everything_fits_the_limits(queue: QueueView) -> None:
    # A model in which work is free puts no limit on time, so every request must be in the plan.
    free = LinearLatency(a=1e-6, b=0.0)
    for name in LOCAL.keys() - ONE_TASK:
        static = "token_budget" in LOCAL[name].Options.model_fields
        policy = LOCAL.make(name, {"token_budget": 100_000} if static else {})
        plan = policy.plan(queue, NOW_S, free, ROOMY)
        entries = dict(plan.entries)
        assert len(entries) == len(queue), name
        for request in queue.requests:
            beyond = entries[request.request_id] - request.pending_tokens
            assert 0 <= beyond <= request.drafted_tokens, name


def test_a_running_request_draws_on_those_left_out_and_then_nothing_is_admitted() -> None:
    first, second = decode("first", context=32), decode("second", context=160)
    waiting = prefill("waiting", 16)
    budget = BatchBudget(tokens=64, sequences=8, kv_blocks=0, block_tokens=16)
    batch = BatchBuilder(queue_of(first, second, waiting), budget, MODEL)
    assert batch.add(0) == 1, "it needs a third block, and takes one of the second's ten"
    assert batch.add(1) == 0, "the second is preempted"
    assert batch.add(2) == 0, "its freed blocks are not for new requests in this step"


def test_an_admission_ends_drawing_on_others() -> None:
    first, second = decode("first", context=32), decode("second", context=160)
    waiting = prefill("waiting", 16)
    budget = BatchBudget(tokens=64, sequences=8, kv_blocks=1, block_tokens=16)
    batch = BatchBuilder(queue_of(first, second, waiting), budget, MODEL)
    assert batch.add(2) == 16
    assert batch.add(0) == 0
    assert [entry.request_id for entry in batch.plan().entries] == ["waiting"]


def test_a_long_prompt_that_waits_for_blocks_is_not_passed_by_short_ones() -> None:
    running = decode("running", context=15)
    long, short = prefill("long", 1_000), prefill("short", 16)
    budget = BatchBudget(tokens=4_096, sequences=8, kv_blocks=10, block_tokens=16)
    batch = BatchBuilder(queue_of(running, long, short), budget, MODEL)
    assert [batch.add(row) for row in (1, 2, 0)] == [0, 0, 1]
    # With nothing running no block would ever come free: then the long one holds nobody up.
    idle = BatchBuilder(queue_of(long, short), budget, MODEL)
    assert [idle.add(0), idle.add(1)] == [0, 16]


def test_blocks_to_spare_are_left_free_while_anything_runs() -> None:
    running, waiting = decode("running", context=15), prefill("waiting", 32)
    budget = BatchBudget(tokens=4_096, sequences=8, kv_blocks=3, block_tokens=16)
    for spare, granted in ((1, 32), (2, 0)):
        batch = BatchBuilder(queue_of(running, waiting), budget, MODEL)
        batch.spare(spare)
        assert batch.add(1) == granted
    # Nothing that runs could grow into them.
    idle = BatchBuilder(queue_of(waiting), budget, MODEL)
    idle.spare(2)
    assert idle.add(0) == 32


def test_without_whole_prompt_reservation_a_waiting_prompt_is_cut_to_the_free_blocks() -> None:
    budget = BatchBudget(4_096, sequences=8, kv_blocks=3, block_tokens=16, reserve_prompt=False)
    batch = BatchBuilder(queue_of(prefill("long", 100)), budget, MODEL)
    assert batch.add(0) == 48


def test_a_prompt_of_which_no_token_fits_the_time_does_not_block_those_behind_it() -> None:
    deep = LinearLatency(a=0.010, b=0.001, c=0.000_01)
    begun, behind = prefill("begun", 5_000, computed=4_000), decode("behind")
    batch = BatchBuilder(queue_of(begun, behind), ROOMY, deep)
    batch.take(np.array([0, 1]), until_s=0.030)
    assert batch.plan().entries == (("behind", 1),)


def test_the_prefill_that_is_cut_to_the_time_ends_the_batch() -> None:
    # 1 ms a prefill token, 0.01 ms a decode: after the cut there would be time for the decode.
    model = PrefillDecodeLatency(0.0, 0.0, 0.001, 0.0, 0.000_01, 0.005)
    batch = BatchBuilder(queue_of(prefill("p", 100), decode("d")), ROOMY, model)
    assert batch.take(np.array([0, 1]), until_s=0.0255) == 20
    assert batch.plan().entries == (("p", 20),)


def test_unknown_policies_and_options_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(
        ValueError, match=r"unknown batching policy 'fifo'; known: .*fairbatching, fcfs.*"
    ):
        LOCAL.make("fifo")
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        LOCAL.make("fcfs", {"token_budget": 5})
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        LOCAL.make("sarathi", {"token_budget": 0})
    with pytest.raises(ValueError, match="'envelope', 'first_token' or 'last_token'"):
        LOCAL.make("fairbatching", {"anchor": "last"})
    with pytest.raises(ValueError, match="'phi_a', 'phi_c' or 'phi_p'"):
        LOCAL.make("slidebatching", {"boundary": "phi_x"})
