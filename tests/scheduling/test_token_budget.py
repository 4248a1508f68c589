"""FCFS, Sarathi and EDF, by example."""

import pytest

from sluice.scheduling.batching import BatchBudget, make_policy
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView
from tests.scheduling.views import NOW_S, ROOMY, decode, order, planned, prefill, prefill_due_in


def test_fcfs_takes_running_then_waiting_in_order_and_chunks_the_last() -> None:
    queue = (
        prefill("w1", 40),
        prefill("begun", 100, computed=32),
        decode("d1"),
        prefill("w2", 40, SLO(ttft_s=0.001)),
        decode("d2"),
    )
    plan = planned("fcfs", *queue, budget=ROOMY._replace(tokens=130))
    assert plan.entries == (("begun", 68), ("d1", 1), ("d2", 1), ("w1", 40), ("w2", 20))


def test_fcfs_lets_nothing_pass_a_waiting_request_that_does_not_fit() -> None:
    queue = decode("d", context=15), prefill("long", 500), prefill("short", 8)
    budget = BatchBudget(tokens=1_000, sequences=10, kv_blocks=8, block_tokens=16)
    assert planned("fcfs", *queue, budget=budget).entries == (("d", 1),)


def test_sarathi_takes_decodes_then_begun_then_waiting_prefills_within_its_budget() -> None:
    queue = prefill("w1", 40), prefill("begun", 100, computed=32), decode("d1"), decode("d2")
    plan = planned("sarathi", *queue, token_budget=80)
    assert plan.entries == (("d1", 1), ("d2", 1), ("begun", 68), ("w1", 10))
    small = planned("sarathi", *queue, token_budget=80, budget=ROOMY._replace(tokens=3))
    assert small.entries == (("d1", 1), ("d2", 1), ("begun", 1))
    assert planned("sarathi", prefill("p", 9), token_budget=1).entries == (("p", 1),)


def test_a_recomputing_request_is_a_prefill_for_sarathi() -> None:
    again = decode("again", emitted=4, context=36)._replace(
        computed_tokens=0, pending_tokens=37, kv_blocks=0, running=False
    )
    plan = planned("sarathi", again, decode("d"), token_budget=20)
    assert plan.entries == (("d", 1), ("again", 19))


def ahead_due_in(request_id: str, slack_ms: float) -> RequestView:
    """A decode whose second token is due in ``slack_ms`` by the envelope; its first came early."""
    arrival_s = NOW_S + slack_ms / 1000 - 1.05
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    return decode(request_id, slo, arrival_s=arrival_s, first_token_s=arrival_s + 0.5)


def test_edf_takes_decodes_and_prefills_by_deadline_within_its_token_budget() -> None:
    queue = (
        prefill("free", 10),
        prefill_due_in("late", -500, 30),
        ahead_due_in("ahead", 300),
        prefill_due_in("soon", 200, 40),
        ahead_due_in("tight", 20),
        prefill_due_in("far", 900, 50),
    )
    expected = (("late", 30), ("tight", 1), ("soon", 40), ("ahead", 1), ("far", 8))
    assert planned("edf", *queue, token_budget=80).entries == expected
    assert order(planned("edf", *queue, token_budget=1_000))[-1] == "free"


def test_edf_anchors_later_tokens_as_asked() -> None:
    # Since its first token, half a second early, `ahead` is late; by the envelope it has 300 ms.
    queue = ahead_due_in("ahead", 300), prefill_due_in("soon", 200, 40)
    assert planned("edf", *queue).entries[0] == ("soon", 40)
    assert planned("edf", *queue, anchor="first_token").entries[0] == ("ahead", 1)


def test_a_budget_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        make_policy("edf", {"token_budget": 0})
