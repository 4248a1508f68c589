"""What a pool has to do, as counted from decisions and reports."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.autoscaling import Demand, Load
from sluice.scheduling.autoscaling.load import MAX_UNPLACED
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.job import UNATTAINABLE, RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import make_policy
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

    def test_replicas_that_take_nothing_do_not_count(self) -> None:
        fleet = fleet_of(report(), report(draining=True))
        assert Demand().load(fleet, 0.0).ready == 1
        assert Demand().load(fleet, 100.0).ready == 0

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
