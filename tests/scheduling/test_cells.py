"""Cells: who owns a replica, which cells a router asks, and what a declined question leaves."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.autoscaling.load import Load, sum_of
from sluice.scheduling.placement.cells import (
    ANSWER_KEPT_S,
    MAX_CELLS,
    MAX_PREFIXES,
    SPREAD_S,
    CellChoice,
    cell_of,
)
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.job import (
    DECLINED,
    NO_REPLICA,
    PLACED,
    STAYS,
    UNATTAINABLE,
    RouteDecision,
    RouteQuery,
    Tier,
)
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import make_policy as make_routing
from tests.scheduling.fleets import fleet_of, report, row

EASY = SLO(ttft_s=1.0, tpot_s=0.1)
KEPT = RouteDecision("r", PLACED, Tier.GUARANTEED, 0.1)
LENT = RouteDecision("r", PLACED, Tier.BEST_EFFORT)
UP = [True] * 8

queries = st.builds(
    RouteQuery,
    key=st.integers(0, 2**63 - 1),
    slo=st.just(EASY),
    prompt_tokens=st.just(100),
    session=st.one_of(st.just(0), st.integers(1, 2**63 - 1)),
    prefix=st.lists(st.integers(1, 50), max_size=3).map(tuple),
    moves_from=st.sampled_from(["", "replica-1"]),
)
answers = st.tuples(
    st.integers(0, MAX_CELLS - 1),
    queries,
    st.sampled_from(
        [None, KEPT, LENT, *(RouteDecision(None, why) for why in (DECLINED, NO_REPLICA))]
    ),
    st.one_of(st.none(), st.just(-inf), st.floats(-10, 10)),
    st.floats(0, 2),
)


def query(key: int = 1, **fields: object) -> RouteQuery:
    return RouteQuery(key, EASY, 100, **fields)  # type: ignore[arg-type]


def test_the_owner_of_a_replica_is_the_same_everywhere() -> None:
    assert [cell_of(f"replica-{n}", 4) for n in range(8)] == [2, 0, 3, 3, 2, 3, 3, 1]
    assert {cell_of(f"replica-{n}", 1) for n in range(8)} == {0}
    counts = np.bincount([cell_of(f"replica-{n}", 8) for n in range(1024)], minlength=8)
    assert counts.sum() == 1024 and counts.min() > 90 and counts.max() < 170


@given(
    cells=st.integers(2, MAX_CELLS),
    told=st.lists(answers, max_size=20),
    asked=queries,
    down=st.sets(st.integers(0, MAX_CELLS - 1)),
)
def test_at_most_two_cells_are_asked_and_only_those_that_are_up(
    cells: int, told: list[tuple[int, RouteQuery, RouteDecision, float, float]],
    asked: RouteQuery, down: set[int],
) -> None:  # fmt: skip
    choice = CellChoice(cells)
    for cell, about, decision, slack_s, now_s in told:
        if slack_s is not None:
            choice.heard(cell % cells, slack_s, now_s)
        choice.answered(cell % cells, about, decision, now_s)
    up = [cell not in down for cell in range(cells)]
    found = choice.asked(asked, 2.0, up)
    assert min(1, sum(up)) <= len(found) == len(set(found)) <= 2
    assert all(up[cell] for cell in found)


@given(asked=queries.filter(lambda made: bool(made.session or made.prefix)), key=st.integers(0, 9))
def test_routers_that_know_nothing_yet_ask_the_same_two_cells_about_a_session_or_prompt(
    asked: RouteQuery, key: int
) -> None:
    again = asked._replace(key=key)
    assert CellChoice(8).asked(asked, 0.0, UP) == CellChoice(8).asked(again, 5.0, UP)


def test_all_cells_get_their_part() -> None:
    choice = CellChoice(8)
    first = [choice.asked(query(key), 0.0, UP)[0] for key in range(8_000)]
    assert np.bincount(first).min() > 800 and np.bincount(first).max() < 1_200


def test_the_cell_with_more_slack_is_asked_first_and_an_old_answer_says_nothing() -> None:
    choice = CellChoice(2)
    first, second = choice.asked(query(), 0.0, UP[:2])
    choice.heard(first, 0.2, 0.0)
    choice.heard(second, 0.5, 0.0)
    assert choice.asked(query(), 0.5, UP[:2]) == [second, first]
    choice.heard(first, 0.6, 0.5)
    assert choice.asked(query(), 0.6, UP[:2]) == [first, second]
    # Of the second nothing is known any more, so it is asked.
    assert choice.asked(query(), ANSWER_KEPT_S + 0.1, UP[:2]) == [second, first]


def test_until_the_next_answers_a_little_more_slack_does_not_attract_every_request() -> None:
    choice = CellChoice(2)
    shares = []
    for lead_s in (0.0, 0.5 * SPREAD_S, SPREAD_S):
        choice.heard(0, 1.0 + lead_s, 0.0)
        choice.heard(1, 1.0, 0.0)
        first = [choice.asked(query(key), 0.1, UP[:2])[0] for key in range(4_000)]
        shares.append(first.count(0) / len(first))
    assert shares == pytest.approx([0.5, 0.75, 1.0], abs=0.03)


def test_the_second_cell_is_the_one_with_the_most_slack_of_the_others() -> None:
    choice = CellChoice(8)
    for cell in range(8):
        choice.heard(cell, 0.1 * cell, 0.0)
    asked = [choice.asked(query(key), 0.1, UP) for key in range(100)]
    assert {last for first, last in asked if first != 7} == {7}
    assert {last for first, last in asked if first == 7} == {6}


def test_a_request_that_moves_asks_the_cell_of_its_replica_first() -> None:
    choice = CellChoice(8)
    for key in range(50):
        owner, other = choice.asked(query(key, moves_from="replica-1"), 0.0, UP)
        assert owner == cell_of("replica-1", 8) != other


@pytest.mark.parametrize("refused", [LENT, RouteDecision(None, UNATTAINABLE)])
def test_where_nothing_can_be_guaranteed_the_cell_with_more_slack_is_asked_last(
    refused: RouteDecision,
) -> None:
    # Who is asked last serves the request as best effort.
    choice = CellChoice(2)
    for cell, slack_s in enumerate((0.5, 0.2)):
        choice.heard(cell, slack_s, 0.0)
        choice.answered(cell, query(), refused, 0.0)
    assert choice.asked(query(), 0.1, UP[:2]) == [1, 0]
    # What asks for no guarantee is served by the first one in any case.
    assert choice.asked(query()._replace(slo=SLO()), 0.1, UP[:2]) == [0, 1]
    choice.answered(0, query(), KEPT, 0.1)
    assert choice.asked(query(), 0.2, UP[:2]) == [0, 1]


NONE, STAYING = RouteDecision(None, NO_REPLICA), RouteDecision(None, STAYS)
REFUSED = RouteDecision(None, DECLINED)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([KEPT], "a"),
        ([REFUSED, LENT], "ab"),
        ([STAYING, KEPT], "ab"),
        ([REFUSED, NONE, LENT], "aba"),
        ([REFUSED, None, LENT], "aba"),
        # It has not answered before, so it is not asked again.
        ([None, NONE], "ab"),
    ],
)
def test_a_second_cell_is_asked_if_the_first_declines_and_the_first_again_if_that_cannot(
    answers: list[RouteDecision | None], asked: str
) -> None:
    first, second = CellChoice(2).asked(query(), 0.0, UP[:2])
    questions, seen = CellChoice(2).questions(query(), 0.0, UP[:2]), []
    question = next(questions)
    with pytest.raises(StopIteration) as ended:
        for answer in answers:
            seen.append(question)
            question = questions.send(answer)
    assert seen == [
        (first, query(elsewhere=place == 0)) if name == "a" else (second, query())
        for place, name in enumerate(asked)
    ]
    assert ended.value.value == answers[-1]


def test_a_cell_without_replicas_or_an_answer_is_asked_only_if_there_is_no_other() -> None:
    choice = CellChoice(3)
    choice.heard(0, -inf, 0.0)
    choice.answered(1, query(), None, 0.0)
    assert {tuple(choice.asked(query(key), 0.1, UP[:3])) for key in range(20)} == {(2,)}
    assert set(choice.asked(query(), 0.1, [True, True, False])) == {0, 1}
    choice.heard(0, 0.1, 0.2)
    assert {frozenset(choice.asked(query(key), 0.3, UP[:3])) for key in range(20)} == {
        frozenset({0, 2})
    }


def test_a_prompt_goes_where_its_prefix_is_while_there_is_slack() -> None:
    choice = CellChoice(8)
    home = 5
    choice.answered(home, query(prefix=(11, 12)), KEPT, 0.0)
    for cell in range(8):
        choice.heard(cell, 0.5 if cell == home else 9.0, 0.0)
    longer = query(3, prefix=(11, 12, 13))
    assert choice.asked(longer, 0.1, UP)[0] == home
    assert choice.asked(longer, 0.1, [cell != home for cell in range(8)])[0] != home
    choice.heard(home, -0.1, 0.1)
    assert choice.asked(longer, 0.2, UP)[0] != home
    # What is remembered is bounded, the oldest goes.
    for chunk in range(100, 100 + MAX_PREFIXES):
        choice.answered(0, query(prefix=(chunk,)), KEPT, 0.2)
    assert len(choice._prefixes) == MAX_PREFIXES and 12 not in choice._prefixes


@pytest.mark.parametrize("cells", [1, MAX_CELLS + 1])
def test_only_some_numbers_of_cells_are_possible(cells: int) -> None:
    with pytest.raises(ValueError, match="cells must be from 2 to 16"):
        CellChoice(cells)


@pytest.mark.parametrize("admission", ["moore_hodgson", "pab", "slos_serve"])
def test_a_declined_question_leaves_nothing(admission: str) -> None:
    fleet = fleet_of(report(*[row(EASY, 4_000, key=key) for key in range(3)]))
    placer = Placer(fleet, make_routing("least_tokens"), make_admission(admission))
    before, load = fleet.figures.copy(), placer.demand.load(fleet, 0.0)
    asked = RouteQuery(1, EASY, 1_000, tenant=3, elsewhere=True)
    assert placer.place(asked, 0.0) == RouteDecision(None, DECLINED)
    assert np.array_equal(fleet.figures, before) and len(fleet.ledger) == 0
    assert placer.demand.load(fleet, 0.0) == load
    # The same question to the last cell is answered as ever.
    assert placer.place(asked._replace(elsewhere=False), 0.0).tier is Tier.BEST_EFFORT


def test_a_cell_that_can_guarantee_does_so_and_one_without_replicas_declines() -> None:
    fleet = fleet_of(report())
    placer = Placer(fleet, make_routing("least_tokens"), make_admission("moore_hodgson"))
    asked = query(elsewhere=True)
    assert placer.place(asked, 0.0).tier is Tier.GUARANTEED
    assert placer.place(asked._replace(slo=SLO()), 0.0).tier is Tier.BEST_EFFORT
    fleet.leave("0")
    assert placer.place(asked, 0.0) == RouteDecision(None, DECLINED)
    assert fleet.slack_s(1.0) == -inf


def test_slack_falls_with_the_work_of_both_tiers() -> None:
    def slack_s(*rows: np.ndarray) -> float:
        return fleet_of(report(*rows), report()).slack_s(0.0)

    idle, busy = slack_s(), slack_s(row(EASY, 1_000))
    assert idle > busy > slack_s(row(EASY, 1_000), row(EASY, 1_000, key=2, best_effort=True))


@given(
    st.lists(
        st.builds(Load, *(st.integers(0, 100).map(float) for _ in Load._fields)), min_size=1,
        max_size=4,
    )
)  # fmt: skip
def test_the_load_of_cells_is_the_sum_and_the_mean_over_replicas(loads: list[Load]) -> None:
    found = sum_of(loads)
    assert found.asked == sum(load.asked for load in loads)
    assert found.ready == sum(load.ready for load in loads)
    if found.ready:
        weights = [load.ready for load in loads]
        assert found.head_room == pytest.approx(
            np.average([load.head_room for load in loads], weights=weights)
        )
    assert sum_of(loads[:1]) == loads[0] or not loads[0].ready
