"""FCFS and Sarathi, by example."""

from sluice.scheduling.batching import BatchBudget, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from tests.scheduling.views import ROOMY, decode, prefill, queue_of

MODEL = LinearLatency(a=0.01, b=0.001)


def test_fcfs_takes_running_then_waiting_in_order_and_chunks_the_last() -> None:
    queue = queue_of(
        prefill("w1", 40),
        prefill("begun", 100, computed=32),
        decode("d1"),
        prefill("w2", 40, SLO(ttft_s=0.001)),
        decode("d2"),
    )
    plan = make_policy("fcfs").plan(queue, 0.0, MODEL, ROOMY._replace(tokens=130))
    assert plan.entries == (("begun", 68), ("d1", 1), ("d2", 1), ("w1", 40), ("w2", 20))


def test_fcfs_lets_nothing_pass_a_waiting_request_that_does_not_fit() -> None:
    queue = queue_of(decode("d", context=15), prefill("long", 500), prefill("short", 8))
    budget = BatchBudget(tokens=1_000, sequences=10, kv_blocks=8, block_tokens=16)
    assert make_policy("fcfs").plan(queue, 0.0, MODEL, budget).entries == (("d", 1),)


def test_sarathi_takes_decodes_then_begun_then_waiting_prefills_within_its_budget() -> None:
    queue = queue_of(
        prefill("w1", 40), prefill("begun", 100, computed=32), decode("d1"), decode("d2")
    )
    policy = make_policy("sarathi", {"token_budget": 80})
    assert policy.plan(queue, 0.0, MODEL, ROOMY).entries == (
        ("d1", 1),
        ("d2", 1),
        ("begun", 68),
        ("w1", 10),
    )
    small = ROOMY._replace(tokens=3)
    assert policy.plan(queue, 0.0, MODEL, small).entries == (("d1", 1), ("d2", 1), ("begun", 1))


def test_sarathi_budget_of_one_still_moves() -> None:
    policy = make_policy("sarathi", {"token_budget": 1})
    assert policy.plan(queue_of(prefill("p", 9)), 0.0, MODEL, ROOMY).entries == (("p", 1),)


def test_a_recomputing_request_is_a_prefill_for_sarathi() -> None:
    again = decode("again", emitted=4, context=36)._replace(
        computed_tokens=0, pending_tokens=37, kv_blocks=0, running=False
    )
    plan = make_policy("sarathi", {"token_budget": 20}).plan(
        queue_of(again, decode("d")), 0.0, MODEL, ROOMY
    )
    assert plan.entries == (("d", 1), ("again", 19))
