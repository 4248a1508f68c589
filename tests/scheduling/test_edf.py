"""Earliest deadline and shortest job first, by example: 10 ms a step, 1 ms a token, t = 10 s."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.batching import BatchPlan, make_policy
from sluice.scheduling.batching.sjf import later_work_s
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


def test_a_budget_of_no_tokens_is_refused() -> None:
    for name in ("edf", "sjf"):
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            make_policy(name, {"token_budget": 0})
