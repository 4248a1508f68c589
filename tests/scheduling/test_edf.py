"""Earliest deadline first, by example: 10 ms a step, 1 ms a token, t = 10 s."""

import pytest

from sluice.scheduling.batching import BatchPlan, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView
from tests.scheduling.views import ROOMY, decode, prefill, queue_of

NOW_S = 10.0
MODEL = LinearLatency(a=0.010, b=0.001)


def prefill_due_in(request_id: str, slack_ms: float, tokens: int) -> RequestView:
    arrival_s = NOW_S + slack_ms / 1000 - 2.0
    return prefill(request_id, tokens, SLO(ttft_s=2.0, tpot_s=0.05), arrival_s=arrival_s)


def decode_due_in(request_id: str, slack_ms: float) -> RequestView:
    """A decode whose second token is due in ``slack_ms`` by the envelope; its first came early."""
    arrival_s = NOW_S + slack_ms / 1000 - 1.05
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    return decode(request_id, slo, arrival_s=arrival_s, first_token_s=arrival_s + 0.5)


def plan(policy: str, *requests: RequestView, **options: object) -> BatchPlan:
    return make_policy(policy, options).plan(queue_of(*requests), NOW_S, MODEL, ROOMY)


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
