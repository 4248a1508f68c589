"""Room for what enters promised requests with their later stages."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from sluice.scheduling.admission import make_policy
from sluice.scheduling.admission.constraint import Constraint
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from sluice.scheduling.routing import RouteQuery
from sluice.scheduling.routing import make_policy as make_routing
from tests.scheduling.fleets import MODEL, fleet_of, job, report, row

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
    told = policy.promises(job(fleet, asked), fleet)
    assert (told.holds[0], told.binds[0] == Constraint.TTFT) == (holds, not holds)


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
