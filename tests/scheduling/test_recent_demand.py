"""Capacity is kept for requests of more worth that are expected and due before."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy
from sluice.scheduling.admission.base import Constraint
from sluice.scheduling.autoscaling.load import (
    EXCESS,
    LEAST_SPAN_S,
    MEMORY,
    RecentDemand,
)
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery, Tier
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import fleet_of, job, report, row

CHAT, DOCUMENT = SLO(ttft_s=0.2), SLO(ttft_s=1.2)


def chats(per_s: int = 40) -> RecentDemand:
    """A second of chats, each with 10 ms of work within 0.2 s."""
    recent = RecentDemand()
    for number in range(per_s):
        recent.add(number / per_s, 0.01, 0.2, 1.0)
    return recent


def test_what_is_expected_before_a_document_is_kept_for_chats() -> None:
    # In the second until 0.2 s before it is due come 40 chats of 10 ms. Its own 0.1 s of work are
    # worth a tenth of theirs, so nine tenths of the 0.4 s count, twice.
    assert chats().worthier_s(1.0, 0.1, 1.2, 1.0) == pytest.approx(2 * 0.9 * 0.4)
    # One that is due half a second earlier sees half of them.
    assert chats().worthier_s(1.0, 0.1, 0.7, 1.0) == pytest.approx(2 * 0.9 * 0.2)


def test_nothing_is_kept_for_what_is_due_later_or_is_worth_no_more() -> None:
    recent = chats()
    assert recent.worthier_s(1.0, 0.1, 0.2, 1.0) == 0
    assert recent.worthier_s(1.0, 0.1, 1.2, 10.0) == 0
    assert recent.worthier_s(1.0, 0.01, 1.2, 1.0) == 0
    assert recent.worthier_s(1.0, 0.1, inf, 1.0) == 0
    assert RecentDemand().worthier_s(1.0, 0.1, 1.2, 1.0) == 0


def test_only_the_latest_requests_count_and_they_fade_in_silence() -> None:
    recent = chats()
    fresh = recent.worthier_s(1.0, 0.1, 1.2, 1.0)
    assert recent.worthier_s(10.0, 0.1, 1.2, 1.0) == pytest.approx(fresh / 10)
    for number in range(MEMORY):
        recent.add(1.0 + number / MEMORY, 0.5, 5.0, 1.0)
    assert recent.worthier_s(2.0, 0.1, 1.2, 1.0) == 0


asks = st.tuples(
    st.floats(0, 20),
    st.floats(0, 2),
    st.one_of(st.floats(-1, 10), st.just(inf)),
    st.floats(0.1, 10),
)


@settings(max_examples=examples(100))
@given(asked=st.lists(asks, max_size=30), own=asks)
def test_it_is_the_sum_of_its_definition(
    asked: list[tuple[float, float, float, float]], own: tuple[float, float, float, float]
) -> None:
    recent = RecentDemand()
    for each in sorted(asked):
        recent.add(*each)
    _, work_s, slack_s, priority = own
    worth, expected = priority / max(work_s, 1e-9), 0.0
    span_s = max(20.0 - min((each[0] for each in asked), default=0.0), LEAST_SPAN_S)
    for _, other_s, due_s, weight in asked:
        other = weight / max(other_s, 1e-9)
        if other > worth and max(0.0, due_s) < slack_s < inf:
            rate = (slack_s - max(0.0, due_s)) / span_s
            expected += EXCESS * rate * other_s * (1 - worth / other)
    assert recent.worthier_s(20.0, work_s, slack_s, priority) == pytest.approx(expected)


def promised(first: list[RouteQuery], then: list[RouteQuery]) -> list[bool]:
    """Which of ``then`` an engine guarantees that serves a promised prompt, after ``first`` asked
    in the second before."""
    fleet = fleet_of(report(row(SLO(ttft_s=60.0), 1_000)))
    placer = Placer(fleet, make_routing("round_robin"), make_policy("moore_hodgson"))
    for number, query in enumerate(first):
        placer.place(query, number / len(first))
    fleet.report("0", report(row(SLO(ttft_s=60.0), 1_000, arrival_s=1.0), made_s=1.0), 1.0)
    fleet.release(range(1, 1_000))
    return [placer.place(query, 1.0).tier is Tier.GUARANTEED for query in then]


def test_documents_that_come_first_leave_room_for_the_chats_behind_them() -> None:
    """A step takes 10 ms, a chat 20 ms and a document 0.2 s. By 1.2 s, of which a tenth stays
    unused, there is time for five documents and two chats."""
    seen = [RouteQuery(key, CHAT, 200) for key in range(1, 11)]
    documents = [RouteQuery(key, DOCUMENT, 2_000) for key in range(1_001, 1_006)]
    late = [RouteQuery(key, CHAT, 200) for key in range(2_001, 2_007)]
    unwarned = promised([], [*documents, *late])
    warned = promised(seen, [*documents, *late])
    assert unwarned == [True] * 5 + [True] * 2 + [False] * 4
    assert warned == [True] * 3 + [False] * 2 + [True] * 6
    # Of the same priority per second of work they leave none, nor for chats that could never be
    # on time.
    worthy = [query._replace(slo=SLO(ttft_s=1.2, priority=10)) for query in documents]
    assert all(promised(seen, worthy))
    hopeless = [query._replace(slo=SLO(ttft_s=0.02)) for query in seen]
    assert promised(hopeless, [*documents, *late]) == unwarned


def test_an_idle_replica_keeps_nothing_and_the_constraint_has_a_name() -> None:
    query = RouteQuery(9, DOCUMENT, 2_000)
    idle, busy = fleet_of(report()), fleet_of(report(row(DOCUMENT, 2_000)))
    for fleet, holds in ((idle, True), (busy, False)):
        asked = job(fleet, query)._replace(worthier_s=0.9)
        made = make_policy("moore_hodgson").promises(asked, fleet)
        assert made.holds.tolist() == [holds]
        assert made.binds.tolist() == [Constraint.NONE if holds else Constraint.WORTHIER]
        assert make_policy("moore_hodgson").promises(job(fleet, query), fleet).holds.all()
