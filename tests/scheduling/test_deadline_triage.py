"""What deadline triage keeps, what it sheds, and how long the shed wait."""

from functools import partial

import pytest

from sluice.scheduling.batching import BatchBudget, make_policy
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView
from tests.scheduling import views
from tests.scheduling.steps import OVERLOAD, run
from tests.scheduling.views import MODEL, ROOMY, decode, prefill, queue_of

plan = partial(views.planned, "deadline_triage", now_s=0.0, headroom=0.0)


def planned(*requests: RequestView, now_s: float = 0.0) -> dict[str, int]:
    return plan(*requests, now_s=now_s).tokens_of


def test_two_short_prompts_are_kept_and_the_long_one_that_would_cost_both_is_shed() -> None:
    slo = SLO(ttft_s=0.3)
    entries = planned(prefill("long", 250, slo), prefill("a", 120, slo), prefill("b", 130, slo))
    # Batches of 80 ms, so that a new request need not wait long.
    assert entries == {"a": 70}


def test_priority_outweighs_length() -> None:
    dear, cheap = SLO(ttft_s=0.3, priority=9), SLO(ttft_s=0.3)
    assert plan(prefill("short", 120, cheap), prefill("long", 250, dear)).entries[0][0] == "long"


def test_a_late_decode_does_not_shrink_the_time_budget() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    on_time = decode("on time", slo, arrival_s=9.5, first_token_s=10.0)
    late = decode("late", slo, emitted=50, first_token_s=0.0)
    entries = planned(
        on_time, late, prefill("new", 500, SLO(ttft_s=5.0), arrival_s=9.0), now_s=10.0
    )
    # 0.1 s of budget, less 10 ms a step and 1 ms for each decode: 88 tokens of prefill.
    assert entries == {"on time": 1, "late": 1, "new": 88}


@pytest.mark.parametrize(("spread", "tokens"), [(0.0, 79), (0.04, 79), (0.1, 69), (0.9, 54)])
def test_the_head_room_grows_with_the_errors_of_recent_steps(spread: float, tokens: int) -> None:
    slo = SLO(ttft_s=5.0, tpot_s=0.1)
    running = decode("a", slo, arrival_s=9.5, first_token_s=10.0)
    latency = MODEL.corrected(1.0, spread=spread)
    new = prefill("b", 500, slo, arrival_s=9.0)
    made = plan(running, new, now_s=10.0, headroom=0.1, latency=latency)
    # A tenth of 100 ms, or twice the spread, or 35 ms; less 10 ms a step and 1 ms for the decode.
    assert made.tokens_of == {"a": 1, "b": tokens}


def test_a_late_decode_that_was_promised_is_caught_up_with() -> None:
    late = decode("late", SLO(ttft_s=1.0, tpot_s=0.1), emitted=50, first_token_s=0.0)
    new = prefill("new", 500, SLO(ttft_s=5.0), arrival_s=9.0)
    # A quarter of the least TTFT, less 10 ms a step and 1 ms for the decode.
    assert planned(late, new, now_s=10.0) == {"late": 1, "new": 239}
    promised = late._replace(promised=True)
    # Its pace: 5 s are made good long before its 256 tokens end.
    assert planned(promised, new, now_s=10.0) == {"late": 1, "new": 89}
    # 35 s are not.
    lost = promised._replace(first_token_s=-30.0)
    assert planned(lost, new, now_s=10.0) == {"late": 1, "new": 239}


@pytest.mark.parametrize(("least", "tokens"), [(0, 89), (1, 89), (5, 139), (100, 239)])
def test_a_promised_mean_tpot_may_be_late_on_the_way_where_its_output_is_surely_long(
    least: float, tokens: int
) -> None:
    begun = decode("begun", SLO(ttft_s=1.0, tpot_s=0.1), arrival_s=9.5, first_token_s=10.0)
    begun = begun._replace(least_tokens=least)
    new = prefill("new", 500, SLO(ttft_s=5.0), arrival_s=9.0)
    # An eighth of the 4 tokens that surely come is half a token, 50 ms. At most a quarter of the
    # least TTFT, less 10 ms a step and 1 ms for the decode.
    assert planned(begun._replace(promised=True), new, now_s=10.0) == {"begun": 1, "new": tokens}
    assert planned(begun, new, now_s=10.0) == {"begun": 1, "new": 89}


@pytest.mark.parametrize(
    ("e2e_s", "anchor"),
    # It would be late at its end; the time between tokens is bounded.
    [(30.0, "first_token"), (None, "last_token")],
)
def test_a_promised_mean_tpot_may_not_be_late_where_more_is_to_be_kept(
    e2e_s: float | None, anchor: str
) -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.1, e2e_s=e2e_s)
    begun = decode("begun", slo, arrival_s=9.5, first_token_s=10.0)
    begun = begun._replace(promised=True, least_tokens=100)
    new = prefill("new", 500, SLO(ttft_s=5.0), arrival_s=9.0)
    assert plan(begun, new, now_s=10.0, anchor=anchor).tokens_of == {"begun": 1, "new": 89}


def test_a_promised_mean_tpot_may_be_late_by_half_of_what_all_decodes_can_make_up() -> None:
    begun = decode("0", SLO(ttft_s=1.0, tpot_s=0.024), arrival_s=9.5, first_token_s=10.0)
    begun = begun._replace(promised=True, least_tokens=21)
    new = prefill("new", 300, SLO(ttft_s=5.0), arrival_s=9.0)
    others = [begun._replace(request_id=f"{number}") for number in range(1, 11)]
    # Each of 20 steps of 21 ms makes up for 3 ms: 24 ms, and 30 of 60.
    assert planned(begun, *others, new, now_s=10.0)["new"] == 33


def test_the_batch_ends_before_the_first_prefill_that_it_completes_is_due() -> None:
    urgent = prefill("urgent", 100, SLO(ttft_s=1.0), arrival_s=-0.8)
    # 10 + 100 ms complete the first one; 90 ms more are left until it is due.
    assert planned(urgent, prefill("next", 600, SLO(ttft_s=2.0))) == {"urgent": 100, "next": 90}


def test_a_batch_is_short_enough_for_those_that_come_while_it_runs() -> None:
    # A quarter of the least TTFT, though nothing here is due for a long time.
    calm, strict = prefill("calm", 5_000, SLO(ttft_s=60.0)), SLO(ttft_s=2.0)
    assert planned(calm, decode("answer", strict)) == {"answer": 1, "calm": 489}


@pytest.mark.parametrize(("left_s", "tokens"), [(0.1, 85), (0.106, 70)])
def test_a_batch_is_longer_where_another_one_would_make_its_prefill_late(
    left_s: float, tokens: int
) -> None:
    # Batches of 80 ms, and 95 ms for the whole prompt. A second batch takes 10 ms more.
    assert planned(prefill("a", 85, SLO(ttft_s=0.3), arrival_s=left_s - 0.3)) == {"a": tokens}


@pytest.mark.parametrize(("left_s", "tokens"), [(0.1, 85), (0.12, 79)])
def test_a_batch_takes_the_head_room_where_another_one_would_make_its_prefill_late(
    left_s: float, tokens: int
) -> None:
    answer = decode("answer", SLO(ttft_s=0.5, tpot_s=0.1), arrival_s=9.5, first_token_s=10.0)
    new = prefill("new", 85, SLO(ttft_s=0.5), arrival_s=10.0 + left_s - 0.5)
    # 90 ms of 100; the whole prompt takes 96, of which 11 again in a second batch.
    made = plan(answer, new, now_s=10.0, headroom=0.1)
    assert made.tokens_of == {"answer": 1, "new": tokens}


def test_a_strict_ttft_is_remembered_for_a_minute() -> None:
    policy = make_policy("deadline_triage", {"headroom": 0.0})
    calm = queue_of(prefill("calm", 5_000, SLO(ttft_s=600.0)))
    policy.plan(queue_of(prefill("strict", 10, SLO(ttft_s=2.0))), 0.0, MODEL, ROOMY)
    assert dict(policy.plan(calm, 1.0, MODEL, ROOMY).entries) == {"calm": 490}
    assert dict(policy.plan(calm, 61.0, MODEL, ROOMY).entries) == {"calm": 5_000}


def test_the_tail_begins_no_answer_that_would_take_the_room_of_new_prompts() -> None:
    slo, late = SLO(ttft_s=0.5, tpot_s=0.1), prefill("late", 100, SLO(ttft_s=0.1), arrival_s=8.0)
    answers = [
        decode(f"d{i}", slo, context=100, arrival_s=9.8, first_token_s=10.0) for i in range(75)
    ]
    assert "late" in planned(*answers[:5], late, now_s=10.0)
    assert "late" not in planned(*answers, late, now_s=10.0)


def test_few_answers_that_would_all_be_late_begin_while_new_prompts_have_little_room() -> None:
    slo, now_s = SLO(ttft_s=0.5, tpot_s=0.1), 100.0
    hopeless = [prefill(f"h{i}", 20, SLO(ttft_s=0.1, tpot_s=0.1)) for i in range(2)]
    timely = prefill("timely", 20, SLO(ttft_s=0.1, tpot_s=0.1), arrival_s=99.8)

    def begun(context: int, *others: RequestView) -> set[str]:
        answers = [
            decode(f"d{i}", slo, context=context, arrival_s=99.8, first_token_s=now_s)
            for i in range(5)
        ]
        taken = planned(*answers, *others, now_s=now_s)
        return {name for name in taken if not name.startswith("d")}

    # Prompts of 20 to 150 tokens, and 320 ms for them until a mean TTFT has passed.
    assert begun(150, *hopeless) == {"h0"}
    assert begun(150, *hopeless, timely) == {"h0", "timely"}
    late = decode("late", slo, emitted=50, context=150, first_token_s=80.0)
    assert begun(150, late, *hopeless) == {"late"}
    assert begun(20, *hopeless) == {"h0", "h1"}


def test_programs_beyond_the_memory_begin_long_prompts_in_a_share_of_the_time_only() -> None:
    """Else programs would take each other's KV in turn."""
    policy = make_policy("deadline_triage")
    memory = ROOMY._replace(kv_blocks=200)

    def turn(program: int, missing: int = 1_700) -> RequestView:
        waiting = prefill(str(program), 1_700, SLO(), arrival_s=9.0)
        cached = 1_700 - missing
        return waiting._replace(program=program, computed_tokens=cached, pending_tokens=missing)

    def begun(*waiting: RequestView, now_s: float, busy: bool = True) -> list[str]:
        others = [decode("d", SLO())] if busy else []
        made = views.planned(policy, *others, *waiting, budget=memory, now_s=now_s)
        return [name for name in made.tokens_of if name != "d"]

    for now_s in (0.0, 1.0, 10.0):
        assert begun(turn(1), now_s=now_s) == ["1"], "the memory is large enough for one"
    assert begun(turn(1), turn(2), now_s=10.1) == ["1"], "which goes before the other"
    assert begun(turn(2), now_s=10.2) == ["2"], "nobody else waits"
    # 1.7 s of work are 0.15 of 11.3 s.
    assert begun(turn(3), now_s=21.5) == []
    assert begun(turn(3), turn(0), now_s=21.5) == ["0"], "a request without a program goes"
    assert begun(turn(3, missing=90), now_s=21.5) == ["3"], "what is cached need not be computed"
    assert begun(turn(3), now_s=21.5, busy=False) == ["3"], "the engine would be idle"
    assert begun(turn(3), now_s=21.6) == ["3"]


def test_what_the_tail_has_begun_goes_before_what_waits() -> None:
    running = decode("running", SLO(ttft_s=1.0, tpot_s=0.2), arrival_s=9.5, first_token_s=10.0)
    begun = prefill("begun", 100, SLO(ttft_s=0.1, tpot_s=0.2), arrival_s=-10.0, computed=50)
    dear = prefill("dear", 100, SLO(ttft_s=0.1, tpot_s=0.2, priority=9), arrival_s=9.8)
    assert list(planned(running, dear, begun, now_s=10.0)) == ["running", "begun", "dear"]


def test_a_decode_with_slack_waits_only_where_that_holds_a_prefill() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    near = decode("near", slo, emitted=9, arrival_s=9.5, first_token_s=9.6)
    far = decode("far", slo, emitted=13, arrival_s=9.5, first_token_s=9.6)
    calm = prefill("calm", 20, SLO(ttft_s=10.0), arrival_s=9.9)
    assert list(planned(near, far, calm, now_s=10.0)) == ["near", "far", "calm"]
    # 370 ms are left for 350 tokens: enough if decodes wait, not with two in each of four batches.
    pressed = prefill("pressed", 350, SLO(ttft_s=0.47), arrival_s=9.9)
    assert list(planned(near, far, pressed, now_s=10.0)) == ["near", "pressed"]
    # So it does one that was promised and is late.
    late = prefill("late", 500, SLO(ttft_s=0.47), arrival_s=9.9)._replace(promised=True)
    assert list(planned(near, far, late, now_s=10.0)) == ["near", "late"]


def test_the_shed_share_the_rest_of_the_batch_by_worth_per_work() -> None:
    slo, now_s = SLO(ttft_s=0.1, tpot_s=0.2), 10.0
    running = decode("running", SLO(ttft_s=1.0, tpot_s=0.2), arrival_s=9.5, first_token_s=now_s)
    old = prefill("old", 100, slo, arrival_s=-10.0)
    fresh = prefill("fresh", 100, slo, arrival_s=9.8)
    dear = prefill("dear", 100, SLO(ttft_s=0.1, tpot_s=0.2, priority=3), arrival_s=9.8)
    entries = plan(running, old, fresh, dear, now_s=now_s).entries
    assert [entry.request_id for entry in entries[:2]] == ["running", "dear"]
    # At most 0.8 of the least TPOT goes to them.
    assert sum(entry.tokens for entry in entries[1:]) <= 160
    assert "old" not in dict(entries)


def test_what_was_promised_is_late_by_as_little_as_costs_nobody_a_deadline() -> None:
    """600 tokens take 600 ms: neither order holds both."""
    slo, now_s = SLO(ttft_s=1.0, tpot_s=0.2), 10.0
    running = decode("running", SLO(ttft_s=1.0, tpot_s=0.2), arrival_s=9.5, first_token_s=now_s)
    late = prefill("late", 600, slo, arrival_s=9.3)
    calm = prefill("calm", 600, SLO(ttft_s=4.0, tpot_s=0.2), arrival_s=9.8)
    # What nobody promised goes behind those that can be held.
    assert list(planned(running, late, calm, now_s=now_s))[:2] == ["running", "calm"]
    owed = late._replace(promised=True)
    assert list(planned(running, owed, calm, now_s=now_s)) == ["running", "late"]
    # Not where that makes another one late.
    tight = prefill("tight", 600, SLO(ttft_s=1.2, tpot_s=0.2), arrival_s=9.8)
    assert list(planned(running, owed, tight, now_s=now_s))[:2] == ["running", "tight"]
    # But in front of all that nobody promised and that is late, whatever that is worth.
    short = prefill("short", 60, SLO(ttft_s=0.25, tpot_s=0.2), arrival_s=9.85)
    dear = prefill("dear", 20, SLO(ttft_s=0.5, tpot_s=0.2, priority=9), arrival_s=9.5)
    entries = planned(running, owed, short, dear, now_s=now_s)
    assert list(entries) == ["running", "short", "late"]


def test_without_any_deadline_batches_are_full() -> None:
    assert planned(prefill("a", 3_000), prefill("b", 2_000)) == {"a": 3_000, "b": 2_000}


def test_an_end_to_end_deadline_leaves_time_for_the_expected_output() -> None:
    answer = SLO(e2e_s=2.0)
    long = prefill("long", 50, answer)._replace(expected_tokens=90.0)
    short = prefill("short", 50, answer)._replace(expected_tokens=2.0)
    assert [entry.request_id for entry in plan(short, long).entries] == ["long", "short"]


def test_a_kept_prompt_without_room_holds_nobody_up() -> None:
    budget = BatchBudget(tokens=4_096, sequences=8, kv_blocks=10, block_tokens=16)
    slo = SLO(ttft_s=5.0)
    running = decode("running", SLO(ttft_s=1.0, tpot_s=0.5), context=15)
    made = plan(running, prefill("long", 1_000, slo), prefill("short", 64, slo), budget=budget)
    assert made.tokens_of == {"running": 1, "short": 64}


# 1,600 tokens: "late" has computed 960 of its 1,200, and "chat" needs 1,000.
TIGHT = BatchBudget(tokens=4_096, sequences=8, kv_blocks=40, block_tokens=16)
LATE = prefill("late", 1_200, SLO(ttft_s=0.1), arrival_s=5.0, computed=960)
CHAT = prefill("chat", 1_000, SLO(ttft_s=4.0), arrival_s=10.0)


def evicted(*requests: RequestView, now_s: float = 10.0) -> tuple[list[str], dict[str, int]]:
    made = plan(*requests, now_s=now_s, budget=TIGHT)
    return made.evicted_ids, made.tokens_of


def test_a_late_prompt_gives_its_memory_to_the_first_one_that_can_be_on_time() -> None:
    gone, taken = evicted(LATE, CHAT)
    assert gone == ["late"]
    assert taken == {"chat": 70}
    # The one that is due first decides, and the others wait for the next batch.
    later = CHAT._replace(request_id="later", slo=SLO(ttft_s=9.0))
    assert evicted(LATE, later, CHAT)[1] == {"chat": 70}
    # It fits as it is.
    assert evicted(LATE, prefill("short", 100, SLO(ttft_s=4.0), arrival_s=10.0))[0] == []
    # It does not fit then either.
    assert evicted(LATE, prefill("long", 1_590, SLO(ttft_s=4.0), arrival_s=10.0))[0] == []


def test_memory_is_not_taken_from_what_can_be_on_time_was_promised_or_streams() -> None:
    for kept in (
        LATE._replace(slo=SLO(ttft_s=9.0)),
        LATE._replace(promised=True),
        LATE._replace(emitted_tokens=3, first_token_s=5.05),
        # Only two can be on time. The third one could be, alone.
        LATE._replace(slo=SLO(ttft_s=5.3)),
    ):
        assert evicted(kept, CHAT)[0] == []


def test_the_least_work_is_lost_that_makes_room() -> None:
    small = LATE._replace(request_id="small", computed_tokens=400, pending_tokens=800, kv_blocks=25)
    large = LATE._replace(computed_tokens=560, pending_tokens=640, kv_blocks=35)
    # 63 blocks are needed and one is spare for those that run: 25 more than there are.
    assert evicted(large, small, CHAT)[0] == ["small"]
    tiny = small._replace(request_id="tiny", computed_tokens=160, kv_blocks=10)
    assert evicted(large, tiny, CHAT)[0] == ["late"]


def test_a_late_prompt_of_all_blocks_is_not_computed_block_by_block_on_an_idle_engine() -> None:
    # The tail's reserve would be two of the 40 blocks.
    whole = prefill("whole", 630, SLO(ttft_s=0.1), arrival_s=5.0)
    assert evicted(whole) == ([], {"whole": 70})
    beside = decode("beside", SLO(ttft_s=1.0, tpot_s=0.1), arrival_s=9.0, first_token_s=9.9)
    assert evicted(whole, beside) == ([], {"beside": 1})


def test_scarce_blocks_go_to_decodes_first() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    ahead = decode("ahead", slo, emitted=40, context=32, first_token_s=9.9)
    begun = prefill("begun", 64, SLO(ttft_s=0.2), computed=32, arrival_s=9.95)
    budget = BatchBudget(tokens=4_096, sequences=8, kv_blocks=1, block_tokens=16)
    assert plan(begun, ahead, now_s=10.0, budget=budget).entries[0] == ("ahead", 1)


def test_an_answer_without_a_pace_goes_on_at_a_token_a_second() -> None:
    silent = decode("silent", SLO(ttft_s=1.0), first_token_s=9.0)._replace(last_token_s=9.0)
    pressing = [prefill(f"p{i}", 180, SLO(ttft_s=0.2), arrival_s=10.0) for i in range(3)]
    assert "silent" in planned(silent, *pressing, now_s=10.0)


@pytest.mark.parametrize(("share", "promised"), [(0.02, False), (0.1, False), (0.02, True)])
def test_the_wait_of_a_late_request_is_bounded_while_others_keep_the_engine_full(
    share: float, promised: bool
) -> None:
    patience_s = 3.0
    policy = make_policy("deadline_triage", {"patience_s": patience_s, "aged_share": share})
    shed = prefill("shed", 90, SLO(ttft_s=0.05))._replace(promised=promised)
    (first_s,) = run(policy, [(shed, 1), *OVERLOAD], MODEL, until="shed").tokens_s["shed"]
    assert first_s <= patience_s + 0.090 / share + 1.0
    assert promised or first_s > patience_s


def test_outputs_that_would_all_be_late_begin_once_nothing_else_comes() -> None:
    slo, strict, now_s = SLO(ttft_s=0.5, tpot_s=0.1), SLO(ttft_s=0.1, tpot_s=0.1), 100.0
    hopeless = [prefill(f"h{i}", 20, strict, arrival_s=60.0) for i in range(3)]

    def begun(arrival_s: float) -> int:
        answers = [
            decode(f"d{i}", slo, context=150, arrival_s=arrival_s, first_token_s=now_s)
            for i in range(5)
        ]
        return len(planned(*answers, *hopeless, now_s=now_s)) - len(answers)

    # All took 11 s to come and nothing has come for 29 s, then 9 s and 31 s.
    assert begun(71.0) == 0
    assert begun(69.0) == 3


def test_decodes_gain_time_beside_the_tail() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.02)
    late = prefill("late", 100, SLO(ttft_s=0.1, tpot_s=0.2), arrival_s=9.0)

    def tokens(answers: int) -> int:
        running = [decode(f"d{i}", slo, arrival_s=9.5, first_token_s=10.0) for i in range(answers)]
        return planned(*running, late, now_s=10.0).get("late", 0)

    # 20 ms, less 7 of them for the decodes to gain, a step's 10 ms, and 1 ms for each decode.
    assert tokens(1) == 2
    assert tokens(3) == 0
