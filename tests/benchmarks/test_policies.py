"""Weighted VTC: proportional service, counters lifted, nothing counted twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.batching import BatchBudget, BatchPolicy, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView
from tests.examples import examples
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
    policy = make_policy("weighted_vtc")
    expected = ["low0", "high0", "high1", "low1", "high2", "high3", "low2"]
    assert order(policy, *low, *high) == expected
    assert order(policy, *low, *high) == expected, "what was only planned has not been served"


def test_running_requests_come_first_whatever_their_client_has_had() -> None:
    running = prefill("begun", 500, SLO(priority=1), computed=100)
    assert order(make_policy("weighted_vtc"), asks("high", 5), running, decode("d")) == [
        "begun",
        "d",
        "high",
    ]


def test_outputs_count_by_their_own_cost() -> None:
    policy = make_policy("weighted_vtc")
    waiting = (asks("one", 1), asks("three", 3))
    full = ROOMY._replace(sequences=1)
    assert order(policy, decode("talks", emitted=1, context=100), *waiting, budget=full) == [
        "talks"
    ]
    # Both clients stood level; since then client 1 has had 30 output tokens of 2 each.
    talks = decode("talks", emitted=31, context=130)
    assert order(policy, talks, *waiting) == ["talks", "three", "one"]


def test_the_first_that_does_not_fit_ends_admission() -> None:
    budget = BatchBudget(tokens=1_000, sequences=10, kv_blocks=8, block_tokens=16)
    policy = make_policy("weighted_vtc")
    assert order(policy, decode("d", context=15), asks("big", 1, 500), asks("small", 1, 8),
                 budget=budget) == ["d"]  # fmt: skip


def after(view: RequestView, emitted: int) -> RequestView:
    """``view`` with its prompt computed and ``emitted`` tokens out."""
    return decode(
        view.request_id, view.slo, emitted=emitted, context=view.prompt_tokens + emitted - 1
    )


def test_a_client_that_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    # Client 1 has had 1,000 tokens while client 2 asked for nothing.
    policy = make_policy("weighted_vtc")
    one_at_a_time = ROOMY._replace(sequences=1)
    first, second = asks("first", 1, 1_000), asks("second", 1, 100)
    assert order(policy, first, second, budget=one_at_a_time) == ["first"]
    third, fourth = asks("third", 2, 100), asks("fourth", 2, 100)
    queue = (after(first, 1), second, third, fourth)
    # Counters: client 1 1,002, client 2 lifted to the same; after `third`, 1,052.
    assert order(policy, *queue) == ["first", "second", "third", "fourth"]


def test_with_nobody_waiting_it_is_lifted_to_the_client_that_left_last() -> None:
    policy = make_policy("weighted_vtc")
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
    policy = make_policy("weighted_vtc")
    one_at_a_time = ROOMY._replace(sequences=1)
    gone, waits = asks("gone", 1, 300), asks("waits", 1, 100)
    other = asks("other", 2, 100)
    assert order(policy, gone, waits, other, budget=one_at_a_time) == ["gone"]
    # `gone` cost 300 and one token; `waits` is from the same client.
    assert order(policy, waits, other) == ["other", "waits"]


def test_a_key_that_comes_back_is_another_request() -> None:
    policy = make_policy("weighted_vtc")
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
        make_policy("weighted_vtc"), requests, MODEL, ROOMY._replace(tokens=32, sequences=1)
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


def test_impossible_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        make_policy("weighted_vtc", {"output_cost": 0})
