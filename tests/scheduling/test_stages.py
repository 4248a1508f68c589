"""Objectives of stages: what a request counts with, and how it is judged."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy
from sluice.scheduling.admission.base import Constraint
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.objective import SLO, StageClock, TokenClock, clock_of
from sluice.scheduling.request.stages import (
    MAX_STAGES,
    Stage,
    StagePosition,
    later_of,
)
from sluice.scheduling.routing import RouteQuery
from sluice.scheduling.routing import make_policy as make_routing
from tests.scheduling.fleets import MODEL, fleet_of, job, report, row

THINK_AND_ANSWER = SLO.of_stages((Stage(1.0, 0.1), Stage(0.5, 0.05)))
COUNTED = SLO.of_stages((Stage(1.0, 0.1, tokens=3), Stage(0.5, 0.05)))


def test_a_request_counts_with_its_first_ttft_and_its_tightest_pace() -> None:
    slo = SLO.of_stages((Stage(2.0, 0.1), Stage(0.5, 0.04), Stage(0.1, 0.2)), 9.0, 3, "chat")
    assert (slo.times_s, slo.priority, slo.service_class) == ((2.0, 0.04, 9.0), 3, "chat")
    assert [later_of(slo.stages, number).tpot_s for number in range(3)] == [0.04, 0.2, inf]
    assert slo.of_stage(1) == SLO(0.5, 0.04, None, 3, "chat")


def test_the_time_of_a_stage_of_known_length_is_a_pace() -> None:
    slo = SLO.of_stages((Stage(e2e_s=3.0, tokens=11), Stage(tpot_s=0.2)))
    assert slo.times_s == (1.5, pytest.approx(0.15), None)
    # Its first token has what the others do not need at the stated pace.
    quick = SLO.of_stages((Stage(tpot_s=0.1, e2e_s=3.0, tokens=11), Stage()))
    assert quick.times_s == (pytest.approx(2.0), 0.1, None)
    one = SLO.of_stages((Stage(2.0, e2e_s=1.0, tokens=1), Stage()))
    assert one.times_s == (1.0, None, None)


def test_stages_that_all_state_their_end_state_that_of_the_request() -> None:
    stages = Stage(e2e_s=3.0), Stage(e2e_s=4.0)
    assert SLO.of_stages(stages).e2e_s == 7.0
    assert SLO.of_stages(stages, 5.0).e2e_s == 5.0
    assert SLO.of_stages((*stages, Stage())).e2e_s is None


def test_what_is_planned_of_the_whole_is_planned_of_each_stage() -> None:
    planned = THINK_AND_ANSWER.with_times((0.9, 0.04, None))
    assert planned.stages == (Stage(0.9, pytest.approx(0.08)), Stage(0.45, pytest.approx(0.04)))
    assert THINK_AND_ANSWER.with_times(THINK_AND_ANSWER.times_s) is THINK_AND_ANSWER


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((Stage(0.0),), "times must be positive"),
        ((Stage(tpot_s=float("inf")),), "times must be positive"),
        ((Stage(tokens=-1), Stage()), "an integer from 0 on"),
        ((Stage(tokens=1.5), Stage()), "an integer from 0 on"),  # type: ignore[arg-type]
        ((Stage(tokens=3),), "ends with the request"),
        ((Stage(),) * (MAX_STAGES + 1), "at most 8 stages"),
    ],
)
def test_stages_that_are_none_are_refused(stages: tuple[Stage, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SLO(stages=stages)


def followed(slo: SLO, *groups: tuple[int, float]) -> TokenClock:
    """A request that came at 0, and whose tokens left in these groups."""
    clock = clock_of(slo, 0.0)
    for tokens, at_s in groups:
        clock.emit(tokens, at_s)
    return clock


def test_each_stage_is_judged_by_its_own_objective() -> None:
    # Three tokens within a second and at 0.1 s, then the others from 1.2 s on.
    begun = (1, 1.0), (2, 1.2)
    assert followed(COUNTED, *begun, (1, 1.69), (1, 1.73)).missed(1.73) == ()
    assert followed(COUNTED, *begun, (1, 1.71), (1, 1.75)).missed(1.75) == ("ttft",)
    assert followed(COUNTED, *begun, (1, 1.69), (1, 1.76)).missed(1.76) == ("tpot",)
    assert followed(COUNTED, (1, 1.1), (2, 1.4), (1, 1.5)).missed(1.5) == ("ttft", "tpot")


def test_tokens_that_leave_together_are_of_their_own_stages() -> None:
    clock = followed(COUNTED, (5, 1.0))
    assert isinstance(clock, StageClock)
    assert (clock.stage, clock.tokens, clock.attained(1.0)) == (1, 5, True)


def test_the_whole_request_has_an_end_to_end_time_too() -> None:
    slo = SLO.of_stages((Stage(1.0, tokens=1), Stage(0.5)), 1.2)
    assert followed(slo, (1, 0.9), (1, 1.2)).missed(1.2) == ()
    assert followed(slo, (1, 0.9), (1, 1.3)).missed(1.3) == ("e2e",)


def test_a_stage_that_does_not_begin_is_not_judged() -> None:
    assert followed(COUNTED, (1, 1.0), (2, 1.2)).missed(99.0) == ()
    assert followed(COUNTED, (1, 1.0)).missed(99.0) == ()
    assert followed(COUNTED).missed(0.1) == ("ttft", "tpot")


def test_a_stage_ends_with_the_reasoning() -> None:
    for answered_s, missed in ((1.59, ()), (1.7, ("ttft",))):
        clock = followed(THINK_AND_ANSWER, (1, 1.0))
        clock.emit(1, 1.09, reasoned=1)
        clock.emit(1, answered_s)
        assert clock.missed(answered_s) == missed


def test_reasoning_and_answer_in_one_chunk_are_of_their_own_stages() -> None:
    clock = clock_of(THINK_AND_ANSWER, 0.0)
    clock.emit(5, 1.0, reasoned=2)
    clock.emit(1, 1.1)
    assert clock.missed(1.1) == ()
    clock.emit(1, 1.3)
    assert clock.missed(1.3) == ("tpot",)


def test_reasoning_that_ended_before_its_stage_ends_that_with_its_first_token() -> None:
    clock = clock_of(SLO.of_stages((Stage(tokens=2), Stage(), Stage())), 0.0)
    assert isinstance(clock, StageClock)
    seen = []
    for number in range(4):
        clock.emit(1, float(number), reasoned=1 if number == 0 else 0)
        seen.append(clock.stage)
    assert seen == [0, 1, 2, 2]


def test_margins_learn_from_the_worst_stage_as_a_share_of_the_whole() -> None:
    # The second stage's first token took 0.9 of its time, its pace all of it.
    clock = followed(COUNTED, (1, 0.5), (2, 0.6), (1, 1.05), (1, 1.1))
    ttft_s, tpot_s, e2e_s = clock.judged_s(1.1)
    assert (ttft_s, tpot_s, e2e_s) == (pytest.approx(0.9), pytest.approx(0.05), None)
    assert followed(COUNTED).judged_s(1.0)[0] is None


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.0, 2.0)), min_size=1, max_size=12))
def test_one_stage_is_judged_as_a_request_without_stages(groups: list[tuple[int, float]]) -> None:
    at_s, timed = 0.0, []
    for tokens, gap_s in groups:
        at_s += gap_s
        timed.append((tokens, at_s))
    plain = SLO(1.0, 0.5, 6.0)
    one = followed(SLO.of_stages((Stage(1.0, 0.5, 6.0),)), *timed)
    whole = followed(plain, *timed)
    assert one.missed(at_s) == whole.missed(at_s)
    assert one.earned == whole.earned
    seen = [time_s or 0.0 for time_s in whole.judged_s(at_s)]
    assert [time_s or 0.0 for time_s in one.judged_s(at_s)] == pytest.approx(seen)


def test_the_rest_of_a_request_begins_in_the_stage_that_it_is_in() -> None:
    stages = Stage(1.0, 0.1, tokens=3), Stage(0.5, 0.05), Stage(e2e_s=4.0)
    slo = SLO.of_stages(stages, 9.0, 3, "chat")
    clock = clock_of(slo, 0.0)
    clock.emit(2, 1.0)
    # The third token is due at 1.2 s; an engine that fails at 0.5 s leaves the next one 1 s.
    rest = clock.rest(2, 0.1)
    first = Stage(rest.ttft_s, 0.1, tokens=1)
    assert rest == SLO.of_stages((first, *stages[1:]), 9.0, 3, "chat")
    assert rest.ttft_s == pytest.approx(1.2)
    assert clock.rest(2, 0.5).ttft_s == 1.5
    clock.emit(1, 1.1)
    clock.emit(1, 1.5, reasoned=1)
    # The last stage began at 1.5 s, and has 4 s.
    assert clock.rest(4, 2.0) == SLO.of_stages((Stage(None, None, 5.5),), 9.0, 3, "chat")


def test_reasoning_that_has_ended_leaves_its_stage_one_token() -> None:
    clock = clock_of(SLO.of_stages((Stage(1.0, tokens=2), Stage(), Stage())), 0.0)
    clock.emit(1, 0.5, reasoned=1)
    assert [stage.tokens for stage in clock.rest(1, 1.0).stages] == [1, 1, 0]
    # One token more has reached the client than was reported.
    assert [stage.tokens for stage in clock.rest(2, 1.0).stages] == [1, 0]


_some_stages = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(
    lambda tokens: tuple(Stage(tpot_s=0.1, tokens=each) for each in (*tokens, 0))
)


@given(_some_stages, st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=8), st.data())
def test_a_request_that_continues_elsewhere_is_always_in_the_same_stage(
    stages: tuple[Stage, ...], groups: list[tuple[int, bool]], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(groups)))
    whole = StageClock(SLO.of_stages(stages), 0.0)
    for tokens, reasoned in groups[:place]:
        whole.emit(tokens, 0.0, int(reasoned))
    rest = StagePosition(whole.rest(whole.tokens, 0.0).stages)
    over = whole.stage
    for tokens, reasoned in groups[place:]:
        whole.emit(tokens, 0.0, int(reasoned))
        rest.emit(tokens, int(reasoned))
        assert over + rest.number == whole.stage


DECODE = {"emitted": 1, "first_token_s": 0.0, "expected": 101}


def staged(tokens: int, stages: int = 1, *, best_effort: bool = False) -> np.ndarray:
    """A decode of a hundred tokens more, in so many stages beside its own."""
    made = row(prompt=1_000, best_effort=best_effort, **DECODE)
    made["later_stages"], made["later_tokens"] = stages, tokens
    return made


def expected_s(fleet: Fleet) -> float:
    return float(fleet.figures[0, figure.LATER_S])


def test_a_part_of_the_output_lasts_until_the_next_stage() -> None:
    work_s = MODEL.work_s(700, 1_000)
    fleet = fleet_of(report(staged(700)))
    assert expected_s(fleet) == pytest.approx(work_s / (100 / 2 * 0.1))
    assert expected_s(fleet_of(report(staged(700, 4)))) == pytest.approx(work_s / (100 / 5 * 0.1))
    twice = fleet_of(report(staged(700), staged(700)))
    assert expected_s(twice) == pytest.approx(2 * expected_s(fleet))
    blocks = [float(each.figures[0, figure.NEEDED_BLOCKS]) for each in (fleet, twice)]
    assert blocks == [pytest.approx(700 / 16), pytest.approx(2 * 700 / 16)]


def test_nothing_is_kept_for_stages_without_prompts_or_without_a_promise() -> None:
    fleet = fleet_of(report(staged(0, 3), staged(700, best_effort=True)))
    assert expected_s(fleet) == 0.0


def test_a_request_on_its_way_counts_as_one_that_is_reported() -> None:
    fleet = fleet_of(report())
    placer = Placer(fleet, make_routing("least_work"), make_policy("moore_hodgson"))
    slo = SLO.of_stages((Stage(1.0, 0.1), Stage(1.0, 0.1, prompt_tokens=700)))
    assert placer.place(RouteQuery(7, slo, 1_000, output_tokens=100), 0.0).planned is not None
    assert expected_s(fleet) == pytest.approx(MODEL.work_s(700, 1_000) / (100 / 2 * 0.1))
    fleet.release([7])
    assert expected_s(fleet) == 0.0


@pytest.mark.parametrize(("decodes", "holds"), [(0, True), (4, True), (20, False)])
def test_a_new_request_leaves_room_for_the_stages_of_others(decodes: int, holds: bool) -> None:
    # Its own prompt takes 0.6 of 1 s.
    fleet = fleet_of(report(*[staged(400) for _ in range(decodes)]))
    asked = RouteQuery(7, SLO(ttft_s=1.0), 6_000, output_tokens=1)
    plain = fleet_of(report(*[staged(0) for _ in range(decodes)]))
    policy = make_policy("moore_hodgson")
    assert policy.promises(job(plain, asked), plain).holds[0]
    made = policy.promises(job(fleet, asked), fleet)
    assert (made.holds[0], made.binds[0] == Constraint.TTFT) == (holds, not holds)


@pytest.mark.parametrize(("ttft_s", "holds"), [(0.2, True), (0.08, False), (None, True)])
def test_each_stage_of_a_new_request_must_be_held(ttft_s: float | None, holds: bool) -> None:
    stages = Stage(1.0, 0.1), Stage(1.0, 0.1), Stage(ttft_s, 0.1, prompt_tokens=700)
    asked = RouteQuery(7, SLO.of_stages(stages), 100, output_tokens=300)
    fleet = fleet_of(report())
    assert make_policy("moore_hodgson").promises(job(fleet, asked), fleet).holds[0] == holds


def test_a_job_tells_what_enters_with_later_stages() -> None:
    fleet = fleet_of(report())
    stages = Stage(1.0), Stage(0.5), Stage(0.4, prompt_tokens=30), Stage(None, prompt_tokens=5)
    asked = RouteQuery(7, SLO.of_stages(stages), 100)
    assert job(fleet, asked).later.tolist() == [[30.0, 0.4], [5.0, inf]]
    assert job(fleet).later.shape == (0, 2)
