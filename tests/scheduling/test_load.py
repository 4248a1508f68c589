"""What a pool has to do, as counted from decisions and reports."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.admission.base import Constraint
from sluice.scheduling.autoscaling import Demand, Load
from sluice.scheduling.autoscaling.load import (
    EXCESS,
    MAX_UNPLACED,
    MEMORY,
    MIN_SPAN_S,
    RecentDemand,
)
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.job import UNATTAINABLE, RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import make_policy
from tests.examples import examples
from tests.scheduling.fleets import MODEL, PLAIN, fleet_of, job, report, row

PROMISED = frozenset({Tier.GUARANTEED})


def placer(fleet: Fleet, admission: bool = True) -> Placer:
    return Placer(
        fleet, make_policy("least_work"), make_admission("moore_hodgson") if admission else None
    )


def query(key: int, prompt: int = 1_000, slo: SLO = PLAIN, **fields: object) -> RouteQuery:
    return RouteQuery(key, slo, prompt, **fields)  # type: ignore[arg-type]


class TestDemand:
    def test_prefill_is_counted_when_it_is_asked_for(self) -> None:
        fleet = fleet_of(report(), report())
        place = placer(fleet)
        for key in range(3):
            place.place(query(key), 0.0)
        load = place.demand.load(fleet, 0.0)
        assert (load.asked, load.unpromised) == (3, 0)
        assert load.asked_s == pytest.approx(3 * MODEL.work_s(1_000, 0))
        assert load.ready == 2
        assert load.ongoing == 3

    def test_what_no_replica_can_promise_is_demand_and_is_told_apart(self) -> None:
        fleet = fleet_of(report())
        place = placer(fleet)
        for key in range(40):
            place.place(query(key), 0.0)
        load = place.demand.load(fleet, 0.0)
        assert load.asked == 40
        assert 0 < load.unpromised < 40
        assert load.unpromised_s == pytest.approx(load.unpromised * MODEL.work_s(1_000, 0))
        assert load.best_effort_s == pytest.approx(load.unpromised_s)

    def test_one_that_an_idle_replica_could_not_promise_either_asks_for_no_replica(self) -> None:
        fleet = fleet_of(report())
        place = placer(fleet)
        place.place(query(1, 100_000), 0.0)
        load = place.demand.load(fleet, 0.0)
        assert (load.asked, load.asked_s) == (1, MODEL.work_s(100_000, 0))
        assert (load.unpromised, load.unpromised_s) == (0, 0)

    def test_without_an_objective_or_the_wish_for_a_promise_nothing_is_counted(self) -> None:
        fleet = fleet_of(report())
        place = placer(fleet)
        place.place(query(1, slo=SLO()), 0.0)
        place.place(query(2, tiers=frozenset({Tier.BEST_EFFORT})), 0.0)
        load = place.demand.load(fleet, 0.0)
        assert (load.asked, load.asked_s) == (0, 0)
        assert load.best_effort_s > 0

    def test_one_that_asks_again_is_one(self) -> None:
        fleet = fleet_of(report())
        demand = Demand()
        waits = RouteDecision(None, UNATTAINABLE)
        asked = job(fleet, query(1, tiers=PROMISED))
        for _ in range(5):
            demand.count(asked, waits, fleet)
        demand.count(asked, RouteDecision("0", "placed", Tier.GUARANTEED), fleet)
        assert demand.load(fleet, 0.0)[2:7:4] == (1, 1)
        demand.count(asked, RouteDecision("0", "placed", Tier.GUARANTEED), fleet)
        assert demand.load(fleet, 0.0).asked == 2

    def test_the_memory_of_those_that_wait_is_bounded(self) -> None:
        fleet = fleet_of(report())
        demand = Demand()
        waits = RouteDecision(None, UNATTAINABLE)
        for key in range(MAX_UNPLACED + 1):
            demand.count(job(fleet, query(key)), waits, fleet)
        for key, more in ((MAX_UNPLACED, 1), (0, 2)):
            demand.count(job(fleet, query(key)), waits, fleet)
            assert demand.load(fleet, 0.0).asked == MAX_UNPLACED + more, "the first is forgotten"

    def test_without_admission_all_that_is_placed_is_served_as_if_promised(self) -> None:
        fleet = fleet_of(report())
        place = placer(fleet, admission=False)
        for key in range(40):
            place.place(query(key), 0.0)
        assert place.demand.load(fleet, 0.0)[2:7:4] == (40, 0)


class TestGauges:
    def test_an_idle_pool(self) -> None:
        load = Demand().load(fleet_of(report(), report()), 0.0)
        assert load.decode_share == 0
        assert load.capacity == 1
        assert load.head_room == pytest.approx(1, abs=0.01)
        assert load.kv_share == 0.5  # 10,000 of 20,000 blocks are free in these reports

    def test_decodes_take_their_part_of_the_steps(self) -> None:
        decodes = [
            row(key=key, emitted=5, first_token_s=-1.0, arrival_s=-1.5, expected=100)
            for key in range(20)
        ]
        idle = report()
        load = Demand().load(fleet_of(report(*decodes), idle), 0.0)
        step_s = 20 * MODEL.work_s(1, 104)
        assert load.decode_share == pytest.approx(step_s / (MODEL.fixed_s + step_s))
        # Their pace is 100 ms, the fixed time of a step 10 ms.
        assert load.capacity == pytest.approx(0.9)
        assert load.head_room < 1

    def test_a_pool_beyond_its_budget_has_no_head_room(self) -> None:
        prefills = [row(prompt=10_000, key=key) for key in range(5)]
        assert Demand().load(fleet_of(report(*prefills)), 0.0).head_room < 0

    def test_best_effort_requests_take_no_room(self) -> None:
        held = row(key=1, prompt=1_600, emitted=5, first_token_s=-1.0, best_effort=True)
        load = Demand().load(fleet_of(report(held, free_blocks=9_899)), 0.0)
        assert load.kv_share == pytest.approx(0.5, abs=1e-3)
        assert load.decode_share == 0

    def test_every_figure_is_a_finite_number(self) -> None:
        fleets = [
            fleet_of(),
            fleet_of(report()),
            fleet_of(report(*[row(prompt=100_000, key=key) for key in range(300)])),
        ]
        for fleet in fleets:
            load = Demand().load(fleet, 0.0)
            assert np.isfinite(load).all()
            assert all(type(value) is float for value in load)


def test_a_load_of_another_life_does_not_follow() -> None:
    before = Load(10.0, 2.0, asked=5.0)
    assert Load(11.0, 2.0, asked=5.0).follows(before)
    assert not Load(10.0, 2.0, asked=5.0).follows(before)
    assert not Load(11.0, 2.0, asked=4.0).follows(before)


class TestRoles:
    """Each role is a pool of its own."""

    def split(self, key: int) -> RouteQuery:
        return query(key, prefill_key=key + 10_000)

    def test_a_pair_asks_each_role_for_its_part(self) -> None:
        fleet = fleet_of(report(), report(role="prefill"), report(role="decode"))
        place = placer(fleet)
        for key in range(30):
            place.place(self.split(key), 0.0)
        prefill, decode, mixed = (
            place.demand.load(fleet, 0.0, role=role) for role in ("prefill", "decode", "mixed")
        )
        assert (prefill.ready, decode.ready, mixed.ready) == (1, 1, 1)
        assert prefill.asked == decode.asked > 0
        assert mixed.asked == 30 - prefill.asked > 0
        assert prefill.asked_s == pytest.approx(prefill.asked * MODEL.work_s(1_000, 0))
        assert decode.asked_s == pytest.approx(decode.asked * MODEL.work_s(1, 999))
        whole = place.demand.load(fleet, 0.0)
        assert (whole.asked, whole.ready) == (30, 3)
        assert whole.unpromised == prefill.unpromised + decode.unpromised + mixed.unpromised > 0
        assert prefill.head_room < decode.head_room

    def test_it_is_turned_down_by_the_role_that_could_not_promise_it(self) -> None:
        for lacks, free_blocks in (("prefill", 10_000), ("decode", 10)):
            fleet = fleet_of(report(role="prefill"), report(role="decode", free_blocks=free_blocks))
            place = placer(fleet)
            for key in range(30):
                place.place(self.split(key), 0.0)
            turned_down = {
                role: place.demand.load(fleet, 0.0, role=role).unpromised
                for role in ("prefill", "decode")
            }
            assert turned_down.pop(lacks) > 0
            assert list(turned_down.values()) == [0]

    def test_decode_load_and_kv_are_those_of_the_role(self) -> None:
        decodes = [row(key=key, emitted=5, first_token_s=0.0) for key in range(20)]
        fleet = fleet_of(report(role="prefill"), report(*decodes, role="decode", free_blocks=0))
        demand = Demand()
        prefill = demand.load(fleet, 0.0, role="prefill")
        decode = demand.load(fleet, 0.0, role="decode")
        assert (prefill.decode_share, prefill.kv_share) == (0, 0.5)
        assert decode.decode_share > 0
        assert decode.kv_share == 1
        assert demand.load(fleet, 0.0, role="mixed") == Load(0.0, 0.0)


# Capacity is kept for requests of more worth that are expected and due before.

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
    assert chats().overtaking_s(1.0, np.array([0.1]), 1.2, 1.0) == pytest.approx(2 * 0.9 * 0.4)
    # One that is due half a second earlier sees half of them.
    assert chats().overtaking_s(1.0, np.array([0.1]), 0.7, 1.0) == pytest.approx(2 * 0.9 * 0.2)


def test_only_the_latest_requests_count_and_they_fade_in_silence() -> None:
    recent = chats()
    fresh = recent.overtaking_s(1.0, np.array([0.1]), 1.2, 1.0)
    assert recent.overtaking_s(10.0, np.array([0.1]), 1.2, 1.0) == pytest.approx(fresh / 10)
    for number in range(MEMORY):
        recent.add(1.0 + number / MEMORY, 0.5, 5.0, 1.0)
    assert recent.overtaking_s(2.0, np.array([0.1]), 1.2, 1.0) == 0


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
    span_s = max(20.0 - min((each[0] for each in asked), default=0.0), MIN_SPAN_S)
    for _, other_s, due_s, weight in asked:
        other = weight / max(other_s, 1e-9)
        if other > worth and max(0.0, due_s) < slack_s < inf:
            rate = (slack_s - max(0.0, due_s)) / span_s
            expected += EXCESS * rate * other_s * (1 - worth / other)
    assert recent.overtaking_s(20.0, np.array([work_s]), slack_s, priority) == pytest.approx(
        expected
    )


def promised(first: list[RouteQuery], then: list[RouteQuery]) -> list[bool]:
    """Which of ``then`` an engine guarantees that serves a promised prompt, after ``first`` asked
    in the second before."""
    fleet = fleet_of(report(row(SLO(ttft_s=60.0), 1_000)))
    placer = Placer(fleet, make_policy("round_robin"), make_admission("moore_hodgson"))
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
        asked = job(fleet, query)._replace(overtaking_s=0.9)
        made = make_admission("moore_hodgson").promises(asked, fleet)
        assert made.holds.tolist() == [holds]
        assert made.binds.tolist() == [Constraint.NONE if holds else Constraint.OVERTAKING]
        assert make_admission("moore_hodgson").promises(job(fleet, query), fleet).holds.all()
