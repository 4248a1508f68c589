"""The policies that only experiments compare with, by example: 10 ms a step, 0.1 ms a token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.benchmarks.experiments.policies import LOCAL, ROUTERS, later_work_s
from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView
from tests.scheduling.fleets import figures_of, job
from tests.scheduling.views import ROOMY, decode, prefill, queue_of

MODEL = LinearLatency(a=0.010, b=0.0001)


def asks(request_id: str, priority: int, prompt: int = 100, arrival_s: float = 0.0) -> RequestView:
    return prefill(request_id, prompt, SLO(priority=priority), arrival_s=arrival_s)


def order(policy: BatchPolicy, *requests: RequestView, budget: BatchBudget = ROOMY) -> list[str]:
    plan = policy.plan(queue_of(*requests), 0.0, MODEL, budget)
    return [entry.request_id for entry in plan.entries]


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
