"""The policies that only experiments compare with, by example: 10 ms a step, 0.1 ms a token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.policies import LOCAL, ROUTERS, later_work_s
from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView
from tests.examples import examples
from tests.scheduling.fleets import figures_of, job
from tests.scheduling.steps import run
from tests.scheduling.views import ROOMY, decode, prefill, queue_of

MODEL = LinearLatency(a=0.010, b=0.0001)


def asks(request_id: str, priority: int, prompt: int = 100, arrival_s: float = 0.0) -> RequestView:
    return prefill(request_id, prompt, SLO(priority=priority), arrival_s=arrival_s)


def order(policy: BatchPolicy, *requests: RequestView, budget: BatchBudget = ROOMY) -> list[str]:
    plan = policy.plan(queue_of(*requests), 0.0, MODEL, budget)
    return [entry.request_id for entry in plan.entries]


def test_waiting_requests_are_admitted_by_weighted_counters() -> None:
    # Counters before each admission: low 0, 100, 200; high 0, 50, 100, 150. Ties by arrival.
    low = [asks(f"low{index}", 1) for index in range(3)]
    high = [asks(f"high{index}", 2) for index in range(4)]
    policy = LOCAL.make("weighted_vtc")
    expected = ["low0", "high0", "high1", "low1", "high2", "high3", "low2"]
    assert order(policy, *low, *high) == expected
    assert order(policy, *low, *high) == expected, "what was only planned has not been served"


def test_running_requests_come_first_whatever_their_client_has_had() -> None:
    running = prefill("begun", 500, SLO(priority=1), computed=100)
    assert order(LOCAL.make("weighted_vtc"), asks("high", 5), running, decode("d")) == [
        "begun",
        "d",
        "high",
    ]


def test_outputs_count_by_their_own_cost() -> None:
    policy = LOCAL.make("weighted_vtc")
    waiting = (asks("one", 1), asks("three", 3))
    full = ROOMY._replace(sequences=1)
    assert order(policy, decode("talks", emitted=1, context=100), *waiting, budget=full) == [
        "talks"
    ]
    # Both clients stood level; since then client 1 has had 30 output tokens of 2 each.
    talks = decode("talks", emitted=31, context=130)
    assert order(policy, talks, *waiting) == ["talks", "three", "one"]


def after(view: RequestView, emitted: int) -> RequestView:
    """``view`` with its prompt computed and ``emitted`` tokens out."""
    return decode(
        view.request_id, view.slo, emitted=emitted, context=view.prompt_tokens + emitted - 1
    )


def test_a_client_that_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    # Client 1 has had 1,000 tokens while client 2 asked for nothing.
    policy = LOCAL.make("weighted_vtc")
    one_at_a_time = ROOMY._replace(sequences=1)
    first, second = asks("first", 1, 1_000), asks("second", 1, 100)
    assert order(policy, first, second, budget=one_at_a_time) == ["first"]
    third, fourth = asks("third", 2, 100), asks("fourth", 2, 100)
    queue = (after(first, 1), second, third, fourth)
    # Counters: client 1 1,002, client 2 lifted to the same; after `third`, 1,052.
    assert order(policy, *queue) == ["first", "second", "third", "fourth"]


def test_with_nobody_waiting_it_is_lifted_to_the_client_that_left_last() -> None:
    policy = LOCAL.make("weighted_vtc")
    first = asks("first", 1, 1_000)
    assert order(policy, first) == ["first"]
    # Without the lift all four of client 2 would go before `second`: 0, 50, 100, 150 < 1,000.
    comers = [asks(f"c{index}", 2, 100) for index in range(4)]
    second = asks("second", 1, 100)
    assert order(policy, after(first, 1), comers[0], second, *comers[1:]) == [
        "first",
        "c0",
        "second",
        "c1",
        "c2",
        "c3",
    ]


def test_a_request_that_ended_unseen_is_counted_by_its_last_plan() -> None:
    policy = LOCAL.make("weighted_vtc")
    one_at_a_time = ROOMY._replace(sequences=1)
    gone, waits = asks("gone", 1, 300), asks("waits", 1, 100)
    other = asks("other", 2, 100)
    assert order(policy, gone, waits, other, budget=one_at_a_time) == ["gone"]
    # `gone` cost 300 and one token; `waits` is from the same client.
    assert order(policy, waits, other) == ["other", "waits"]


def test_a_key_that_comes_back_is_another_request() -> None:
    policy = LOCAL.make("weighted_vtc")
    two_at_a_time = ROOMY._replace(sequences=2)
    other, waits = asks("other", 2, 1_000), asks("waits", 2, 100)
    gone = after(asks("again", 1, 100), 500)
    assert order(policy, gone, other, waits, budget=two_at_a_time) == ["again", "other"]
    # Counters: client 1 1,102, client 2 501. The 500 tokens that the new one lacks are no credit.
    queue = (after(other, 1), waits, asks("again", 1, 100))
    assert order(policy, *queue) == ["other", "waits", "again"]


@settings(max_examples=examples(12))
@given(
    data=st.data(),
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=3, unique=True),
)
def test_backlogged_clients_are_served_in_proportion(
    data: st.DataObject, weights: list[int]
) -> None:
    """VTC's Theorem: while two clients are backlogged, their services over their weights differ by
    a bound that does not grow with time. With one sequence at a time, a request is the unit."""
    requests = []
    for weight in weights:
        for index in range(12):
            prompt, output = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 20))
            requests.append((asks(f"{weight}-{index}", weight, prompt), output))
    largest = 60 + 2 * 20
    result = run(
        LOCAL.make("weighted_vtc"), requests, MODEL, ROOMY._replace(tokens=32, sequences=1)
    )
    service = dict.fromkeys(weights, 0.0)
    cost = {view.request_id: view.prompt_tokens + 2 * output for view, output in requests}
    left = dict.fromkeys(weights, 12)
    done: set[str] = set()
    for _, entries in result.batches:
        for request_id, _tokens in entries:
            weight = int(request_id.split("-")[0])
            if request_id in done:
                continue
            done.add(request_id)
            service[weight] += cost[request_id] / weight
            left[weight] -= 1
        if min(left.values()) == 0:
            break
        assert max(service.values()) - min(service.values()) <= 2 * largest


def plan(name: str, *requests: RequestView, **options: object) -> BatchPlan:
    return LOCAL.make(name, options).plan(queue_of(*requests), 10.0, MODEL, ROOMY)


def test_sjf_takes_the_shortest_first_and_what_is_left_of_a_prefill_is_its_length() -> None:
    queue = (
        prefill("long", 300),
        prefill("nearly", 400, computed=360),
        prefill("short", 50),
        decode("d"),
    )
    assert plan("sjf", *queue, token_budget=120).entries == (
        ("d", 1),
        ("nearly", 40),
        ("short", 50),
        ("long", 29),
    )


def test_sjf_counts_the_output_that_is_predicted() -> None:
    # 50 + 399 tokens of work against 300: the prompt alone would put `talks` first. One more
    # output token than predicted, and `outlived` counts as about to end.
    talks = prefill("talks", 50)._replace(expected_tokens=400.0)
    outlived = decode("outlived", emitted=9)._replace(expected_tokens=8.0)
    begun = decode("begun", emitted=9)._replace(expected_tokens=409.0)
    result = plan("sjf", talks, prefill("quiet", 300), begun, outlived, token_budget=1_000)
    order = [entry.request_id for entry in result.entries]
    # `begun` has 400 tokens left, its next one included.
    assert order == ["outlived", "quiet", "begun", "talks"]


@given(
    prompt=st.integers(1, 500),
    emitted=st.integers(1, 30),
    expected=st.integers(1, 80),
)
def test_later_work_is_the_sum_of_the_decode_steps(
    prompt: int, emitted: int, expected: int
) -> None:
    model = LinearLatency(a=0.01, b=1e-4, c=1e-6, d=1e-8)
    computed = prompt + emitted - 1
    view = decode("d", emitted=emitted, context=computed)._replace(expected_tokens=float(expected))
    # The next token is pending; those after it run on one token of context more each.
    steps = range(1, expected - emitted)
    by_step = sum(model.work_s(1, computed + step) for step in steps)
    result = later_work_s(queue_of(view).table, model.pieces)
    assert result == pytest.approx(np.array([by_step]), abs=1e-12)


def test_sarathi_priority_takes_decodes_then_prefills_each_by_priority_then_arrival() -> None:
    low, high = SLO(priority=1), SLO(priority=3)
    queue = (
        prefill("low-begun", 100, low, computed=32),
        decode("low-d", low),
        prefill("high-1", 40, high),
        decode("high-d", high),
        prefill("high-2", 40, high),
    )
    assert plan("sarathi_priority", *queue, token_budget=100).entries == (
        ("high-d", 1),
        ("low-d", 1),
        ("high-1", 40),
        ("high-2", 40),
        ("low-begun", 18),
    )


def due_in(request_id: str, slack_ms: float, tokens: int) -> RequestView:
    """A prompt whose first token is due in ``slack_ms`` at t = 10 s."""
    slo = SLO(ttft_s=5.0)
    return prefill(request_id, tokens, slo, arrival_s=5.0 + slack_ms / 1000)


def ranking(*requests: RequestView, **options: object) -> list[str]:
    """The order in which D-EDF decides on tasks of one request each."""
    left, order = list(requests), []
    while left:
        one = {"chunk_tokens": 1_000, "batch_tokens": 0, **options}
        order.append(plan("d_edf", *left, **one).entries[0].request_id)
        left = [request for request in left if request.request_id != order[-1]]
    return order


def test_d_edf_looks_at_deadlines_only_and_naive_edf_not_even_at_whether_they_have_passed() -> None:
    queue = (
        prefill("free", 100),
        due_in("past", -100, 100),
        due_in("long-past", -900, 100),
        due_in("later", 900, 100),
        due_in("hopeless", 200, 2_000),
        due_in("sooner", 300, 100),
    )
    assert ranking(*queue) == ["hopeless", "sooner", "later", "free", "past", "long-past"]
    naive = ranking(*queue, late="in_order")
    assert naive == ["long-past", "past", "hopeless", "sooner", "later", "free"]


def chosen(fleet: Fleet) -> int:
    return ROUTERS.make("vllm").choose(job(fleet), fleet)


def test_vllm_counts_a_waiting_request_four_times() -> None:
    running = {"RUNNING": 4}
    assert chosen(figures_of(running, {"WAITING": 1})) == 0
    assert chosen(figures_of({"RUNNING": 5}, {"WAITING": 1})) == 1
    assert chosen(figures_of({"RUNNING": 5}, {"RESERVED": 1})) == 1
    assert chosen(figures_of({"RESERVED": 1, "RUNNING": 1}, running)) == 1


def test_lmetric_takes_the_least_product_of_prefill_tokens_and_requests() -> None:
    choose = ROUTERS.make("lmetric").choose
    one, many = {"TOKENS": 1e3, "RUNNING": 1.0}, {"TOKENS": 100.0, "RUNNING": 90.0}
    fleet = figures_of(many, one)
    assert choose(job(fleet), fleet) == 1
    fleet = figures_of({"TOKENS": 100_000, "RUNNING": 1}, {"RUNNING": 3})
    assert choose(job(fleet), fleet) == 1
    # What a replica has cached of the prompt is not prefilled there.
    fleet = figures_of(many, many)
    asked = job(fleet)
    asked.cached_tokens[1] = asked.prompt_tokens - 1
    assert choose(asked, fleet) == 1
