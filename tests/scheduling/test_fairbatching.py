"""FairBatching by hand: 10 ms a step, 1 ms a token, all at t = 10 s.

The examples follow FairBatching §3.2 and §3.3; the numbers are ours, as its figures give none.
"""

from functools import partial
from itertools import pairwise

import pytest

from sluice.scheduling.batching import make_policy
from sluice.scheduling.request.objective import SLO, Anchor, TokenClock
from tests.scheduling.steps import Run, run
from tests.scheduling.views import (
    MODEL,
    NOW_S,
    ROOMY,
    decode,
    decode_due_in,
    planned,
    prefill,
    prefill_due_in,
)

plan = partial(planned, "fairbatching")


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
    queue = prefill_due_in("b", 50, 600), prefill_due_in("a", 20, 600)
    result = plan(*queue, budget=ROOMY._replace(tokens=1_000))
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
    result = plan(*queue, decode_due_in("tight", 30, 20), anchor="envelope")
    assert result.entries == (("tight", 1), ("p", 19)), "`early` stalls while it has slack"


def test_a_recomputing_request_is_a_prefill_with_its_next_tokens_deadline() -> None:
    again = decode_due_in("again", 100, 50)._replace(
        computed_tokens=0, pending_tokens=40, kv_blocks=0, running=False
    )
    result = plan(prefill_due_in("later", 101, 40), again, prefill_due_in("sooner", 99, 40))
    assert result.entries == (("sooner", 40), ("again", 40), ("later", 40))


def test_the_last_token_as_anchor_spends_no_slack() -> None:
    # One token a second early, the last of them now: the next is due in 20 ms all the same.
    slo = SLO(ttft_s=2.0, tpot_s=0.02)
    early = decode("early", slo, emitted=50, arrival_s=NOW_S - 1.0, first_token_s=NOW_S - 0.5)
    queue = (early._replace(last_token_s=NOW_S), prefill_due_in("p", 100, 500))
    assert plan(*queue, anchor="last_token").entries == (("early", 1), ("p", 9))
    # Since the first token: 0.5 s behind it, 50 tokens at 20 ms each are due, so 500 ms are left.
    assert plan(*queue, anchor="first_token").entries == (("early", 1), ("p", 489))


def test_a_prefill_share_of_zero_is_the_literal_paper() -> None:
    # The budget is 15 ms and the urgent decodes take 30: nothing is left for the prefill.
    decodes = [decode_due_in(f"d{index}", 5, 15) for index in range(20)]
    result = plan(*decodes, prefill_due_in("p", 1, 100), prefill_share=0.0)
    assert len(result.entries) == 20
    # A TPOT that no batch with prefill can hold sets the budget: max(-500, 12) ms.
    queue = (decode_due_in("hopeless", -500, 12), prefill_due_in("p", 500, 100))
    assert plan(*queue, prefill_share=0.0).entries == (("hopeless", 1), ("p", 1))
    assert plan(*queue).entries == (("hopeless", 1), ("p", 100))
    with pytest.raises(ValueError, match=r"less than or equal to 0\.9"):
        plan(*queue, prefill_share=1.0)


# FairBatching Fig. 2. The drawing is lost; by the text of §2.4, in (e) D2 and D3 come earlier than
# in the ideal case and D4 as in it, so the gap before D4 misses the TBT objective though no token
# is late; and in (d) the prefill misses its TTFT because the decode goes on beside it in spite of
# its slack. The numbers are ours: 50 ms a token.


def met(emitted_ms: tuple[float, ...], anchor: Anchor) -> int:
    """How many tokens come by their deadline: the first within 100 ms, then 50 ms a token."""
    clock = TokenClock(SLO(ttft_s=0.1, tpot_s=0.05), 0.0, anchor=anchor)
    for at_ms in emitted_ms:
        clock.emit(1, at_ms / 1000)
    return round(clock.gain)


def test_an_early_token_can_miss_the_time_between_tokens_but_never_the_envelope() -> None:
    ideal, early = (90.0, 139.0, 188.0, 237.0), (90.0, 110.0, 130.0, 237.0)
    assert all(sooner <= later for sooner, later in zip(early, ideal, strict=True))
    assert (met(ideal, Anchor.LAST_TOKEN), met(early, Anchor.LAST_TOKEN)) == (4, 3)
    assert (met(ideal, Anchor.ENVELOPE), met(early, Anchor.ENVELOPE)) == (4, 4)


def burst(policy: str, **options: object) -> Run:
    """D has run ahead, its third token is out 22 ms after its first and its fourth due in 128; now
    a prompt P of 110 tokens arrives, due in 130 ms."""
    d = decode("D", SLO(ttft_s=1.0, tpot_s=0.05), emitted=3, arrival_s=-0.5, first_token_s=0.0)
    p = prefill("P", 110, SLO(ttft_s=0.130, tpot_s=0.05), arrival_s=0.022)
    return run(make_policy(policy, options), [(d, 4), (p, 1)], MODEL, start_s=0.022)


def test_a_burst_of_prefill_is_served_from_the_decodes_slack() -> None:
    fair = burst("fairbatching")
    assert [entries for _, entries in fair.batches] == [(("D", 1), ("P", 110))]
    assert fair.tokens_s["P"] == [pytest.approx(0.022 + 0.121)]
    assert fair.tokens_s["D"] == [pytest.approx(0.143)], "due at 150 ms"
    # Sarathi's budget is what fits the TPOT: 39 tokens take 49 ms.
    sarathi = burst("sarathi", token_budget=39)
    assert [entries[-1] for _, entries in sarathi.batches] == [("P", 38), ("P", 39), ("P", 33)]
    assert max(sarathi.tokens_s["D"]) < 0.150
    assert sarathi.tokens_s["P"][0] - 0.022 > 0.130, "its TTFT is missed"
    assert all(later - sooner < 0.05 for (sooner, _), (later, _) in pairwise(sarathi.batches))
