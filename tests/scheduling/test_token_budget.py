"""FCFS, Sarathi and EDF, by example."""

import pytest

from sluice.scheduling.batching import BatchBudget, BatchPlan, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView
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


NOW_S = 10.0
LINEAR = LinearLatency(a=0.010, b=0.001)


def prefill_due_in(request_id: str, slack_ms: float, tokens: int) -> RequestView:
    arrival_s = NOW_S + slack_ms / 1000 - 2.0
    return prefill(request_id, tokens, SLO(ttft_s=2.0, tpot_s=0.05), arrival_s=arrival_s)


def decode_due_in(request_id: str, slack_ms: float) -> RequestView:
    """A decode whose second token is due in ``slack_ms`` by the envelope; its first came early."""
    arrival_s = NOW_S + slack_ms / 1000 - 1.05
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    return decode(request_id, slo, arrival_s=arrival_s, first_token_s=arrival_s + 0.5)


def plan(policy: str, *requests: RequestView, **options: object) -> BatchPlan:
    return make_policy(policy, options).plan(queue_of(*requests), NOW_S, LINEAR, ROOMY)


def test_edf_takes_decodes_and_prefills_by_deadline_within_its_token_budget() -> None:
    queue = (
        prefill("free", 10),
        prefill_due_in("late", -500, 30),
        decode_due_in("ahead", 300),
        prefill_due_in("soon", 200, 40),
        decode_due_in("tight", 20),
        prefill_due_in("far", 900, 50),
    )
    assert plan("edf", *queue, token_budget=80).entries == (
        ("late", 30),
        ("tight", 1),
        ("soon", 40),
        ("ahead", 1),
        ("far", 8),
    )
    whole = plan("edf", *queue, token_budget=1_000)
    assert [entry.request_id for entry in whole.entries][-1] == "free"


def test_edf_anchors_later_tokens_as_asked() -> None:
    # Since its first token, half a second early, `ahead` is late; by the envelope it has 300 ms.
    queue = (decode_due_in("ahead", 300), prefill_due_in("soon", 200, 40))
    assert plan("edf", *queue).entries[0] == ("soon", 40)
    assert plan("edf", *queue, anchor="first_token").entries[0] == ("ahead", 1)


def test_a_budget_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        make_policy("edf", {"token_budget": 0})
