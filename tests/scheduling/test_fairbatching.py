"""FairBatching by hand: 10 ms a step, 1 ms a token, all at t = 10 s.

The examples follow FairBatching §3.2 and §3.3; the numbers are ours, as its figures give none.
"""

import pytest

from scheduling.batching import BatchPlan, make_policy
from scheduling.latency import LinearLatency
from scheduling.objective import SLO
from scheduling.request import RequestView
from tests.scheduling.views import ROOMY, decode, prefill, queue_of

NOW_S = 10.0
MODEL = LinearLatency(a=0.010, b=0.001)


def decode_due_in(request_id: str, slack_ms: float, tpot_ms: float) -> RequestView:
    """A decode whose second token is due in ``slack_ms``."""
    slo = SLO(ttft_s=1.0, tpot_s=tpot_ms / 1000)
    arrival_s = NOW_S + (slack_ms - tpot_ms) / 1000 - 1.0
    return decode(request_id, slo, arrival_s=arrival_s, first_token_s=arrival_s + 1.0)


def prefill_due_in(request_id: str, slack_ms: float, tokens: int) -> RequestView:
    """A waiting prompt whose first token is due in ``slack_ms``."""
    arrival_s = NOW_S + slack_ms / 1000 - 2.0
    return prefill(request_id, tokens, SLO(ttft_s=2.0, tpot_s=0.05), arrival_s=arrival_s)


def plan(*requests: RequestView, **options: object) -> BatchPlan:
    return make_policy("fairbatching", options).plan(queue_of(*requests), NOW_S, MODEL, ROOMY)


def test_the_least_slack_sets_the_budget_and_the_last_prefill_is_chunked() -> None:
    # Budget max(30, 20) = 30 ms. Urgent: slack < 30 + 20 ms, so only `tight`.
    # 10 + 1 + 5 = 16 ms are spent when `large` comes, so it gets 14 tokens; `ample` is left out.
    result = plan(
        decode_due_in("ample", 100, 50),
        decode_due_in("tight", 30, 20),
        prefill_due_in("large", 500, 100),
        prefill_due_in("small", 200, 5),
    )
    assert result.entries == (("tight", 1), ("small", 5), ("large", 14))
    assert result.predicted_s == pytest.approx(0.030)


def test_a_late_decode_leaves_the_least_tpot_as_budget() -> None:
    # max(-40, 20) = 20 ms: 10 for the step, 2 for the decodes, 8 tokens of prefill.
    # `next` is due before 20 + 20 ms from now, so it is urgent as well.
    result = plan(
        decode_due_in("late", -40, 20),
        decode_due_in("next", 35, 50),
        decode_due_in("ample", 45, 50),
        prefill_due_in("large", 10, 100),
    )
    assert result.entries == (("late", 1), ("next", 1), ("large", 8))


def test_urgent_decodes_are_taken_beyond_the_budget_and_leave_prefill_its_share() -> None:
    # Budget 15 ms; the decodes alone take 30. With a prompt's first token as three quarters of the
    # batch it may last 31 / 0.75 = 41.3 ms, so 11 tokens.
    decodes = [decode_due_in(f"d{index}", 5, 15) for index in range(20)]
    result = plan(*decodes, prefill_due_in("p", 1, 100))
    assert len(result.entries) == 21
    assert result.entries[-1] == ("p", 11)
    # A prompt without a deadline gets what is left, which is nothing.
    assert len(plan(*decodes, prefill("free", 100)).entries) == 20


def test_other_decodes_run_in_what_prefills_leave() -> None:
    # Budget 30.5 ms: 10 for the step, 1 for `tight`, 16 for `p`, 3 for decodes by slack.
    others = [decode_due_in(f"d{slack}", slack, 50) for slack in (90, 80, 70, 60)]
    result = plan(*others, decode_due_in("tight", 30.5, 20), prefill_due_in("p", 500, 16))
    assert result.entries == (("tight", 1), ("p", 16), ("d60", 1), ("d70", 1), ("d80", 1))


def test_without_a_decode_only_the_token_limit_binds() -> None:
    result = make_policy("fairbatching").plan(
        queue_of(prefill_due_in("b", 50, 600), prefill_due_in("a", 20, 600)),
        NOW_S,
        MODEL,
        ROOMY._replace(tokens=1_000),
    )
    assert result.entries == (("a", 600), ("b", 400))


def test_requests_without_objectives_come_last_and_set_no_budget() -> None:
    free_prefill, free_decode = prefill("free-prefill", 30), decode("free-decode")
    result = plan(free_prefill, free_decode, prefill_due_in("due", 500, 30))
    assert result.entries == (("due", 30), ("free-decode", 1), ("free-prefill", 30))
    result = plan(free_prefill, free_decode, decode_due_in("tight", 30, 20))
    assert result.entries == (("tight", 1), ("free-decode", 1), ("free-prefill", 18))


def test_a_tpot_that_no_step_can_hold_does_not_stop_prefill() -> None:
    # At 10 ms a step and 1 ms a token, a batch of which prefill has a quarter takes 14.7 ms.
    # 14 ms is hopeless: it is served always, but the budget is the other's.
    result = plan(
        decode_due_in("hopeless", -500, 14),
        decode_due_in("tight", 30, 20),
        prefill_due_in("p", 500, 100),
    )
    assert result.entries == (("hopeless", 1), ("tight", 1), ("p", 18))


def test_the_anchor_decides_whether_an_early_first_token_may_be_followed_by_a_stall() -> None:
    # The first token came 1 s early. By the envelope, the second is due in 1.02 s; since the first
    # token, in 20 ms.
    slo = SLO(ttft_s=2.0, tpot_s=0.02)
    early = decode("early", slo, arrival_s=NOW_S - 1.0, first_token_s=NOW_S)
    queue = (early, prefill_due_in("p", 100, 500))
    assert plan(*queue, anchor="first_token").entries == (("early", 1), ("p", 9))
    assert plan(*queue, anchor="envelope").entries == (("early", 1), ("p", 500))
    result = make_policy("fairbatching", {"anchor": "envelope"}).plan(
        queue_of(*queue, decode_due_in("tight", 30, 20)), NOW_S, MODEL, ROOMY
    )
    assert result.entries == (("tight", 1), ("p", 19)), "`early` stalls while it has slack"


def test_a_recomputing_request_is_a_prefill_with_its_next_tokens_deadline() -> None:
    again = decode_due_in("again", 100, 50)._replace(
        computed_tokens=0, pending_tokens=40, kv_blocks=0, running=False
    )
    result = plan(prefill_due_in("later", 101, 40), again, prefill_due_in("sooner", 99, 40))
    assert result.entries == (("sooner", 40), ("again", 40), ("later", 40))
