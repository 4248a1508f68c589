"""A prefix in the memory of a replica's host counts as computed, after the time to load it."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.prefix import HELD
from sluice.scheduling.placement.placer import Placer, job_of
from sluice.scheduling.request.job import RouteDecision
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery, Tier
from sluice.scheduling.routing import make_policy as make_routing
from tests.scheduling.fleets import MODEL, fleet_of, report

PREFIX, HIT, PROMPT = (7, 8), 800, 1_000
FAST_S, SLOW_S = 20e-6, 200e-6
"""To load a token. To compute one takes 100 us, and more with the context."""

GPU = {7: (400, 0.0), 8: (HIT, 0.0)}
HOST = {7: (400, 0.0), 8: (HIT, FAST_S)}
"""The first half is on the GPU."""

ALL_IN_HOST = {7: (400, FAST_S), 8: (HIT, FAST_S)}


def fleet_with(*held: dict[int, tuple[int, float]]) -> Fleet:
    """A replica for each: the tokens of its chunks, and the time to load one."""
    fleet = fleet_of(*(report() for _ in held))
    for replica, chunks in enumerate(held):
        rows = np.array([(chunk, *rest) for chunk, rest in chunks.items()], HELD)
        fleet.hold(str(replica), np.arange(len(rows)), rows)
    return fleet


def query(ttft_s: float = 1.0) -> RouteQuery:
    tiers = frozenset({Tier.GUARANTEED, Tier.BEST_EFFORT})
    return RouteQuery(1, SLO(ttft_s=ttft_s, tpot_s=0.1), PROMPT, prefix=PREFIX, tiers=tiers)


def placed(fleet: Fleet, routing: str = "most_gain", ttft_s: float = 1.0) -> RouteDecision:
    admission = make_admission("moore_hodgson")
    return Placer(fleet, make_routing(routing), admission).place(query(ttft_s), 0.0)


def test_what_is_loaded_takes_time_and_no_compute() -> None:
    fleet = fleet_with({}, ALL_IN_HOST, HOST, GPU, {8: (HIT, SLOW_S)})
    made = job_of(fleet, query(), np.arange(5), 0.0, 1.0)
    assert made.cached_tokens.tolist() == [0, HIT, HIT, HIT, 0]
    assert made.lead_s == pytest.approx([0, HIT * FAST_S, (HIT - 400) * FAST_S, 0, 0])
    rest_s, all_s = MODEL.work_s(PROMPT - HIT, HIT), MODEL.work_s(PROMPT, 0)
    assert made.work_s == pytest.approx([all_s, rest_s, rest_s, rest_s, all_s])


@pytest.mark.parametrize("routing", ["most_gain", "least_work"])
def test_a_hit_in_the_host_is_better_than_none_and_worse_than_one_on_the_gpu(routing: str) -> None:
    assert placed(fleet_with({}, HOST), routing).replica_id == "1"
    assert placed(fleet_with({}, ALL_IN_HOST, GPU, HOST), routing).replica_id == "2"
    assert placed(fleet_with({}, ALL_IN_HOST, HOST), routing).replica_id == "2"
    assert placed(fleet_with({8: (HIT, SLOW_S)}, {7: (400, 0.0)}), routing).replica_id == "1"


@pytest.mark.parametrize("routing", ["most_gain", "least_work"])
def test_a_promise_counts_the_wait_for_what_a_connector_holds(routing: str) -> None:
    fleet = fleet_of(report()._replace(kv_answer_s=0.1), report()._replace(kv_answer_s=0.05))
    alone_s = MODEL.a + MODEL.work_s(PROMPT, 0)
    held = placed(fleet, routing)
    assert (held.replica_id, held.tier) == ("1", Tier.GUARANTEED)
    assert held.predicted_ttft_s == pytest.approx(0.05 + alone_s)
    assert placed(fleet, routing, 0.05 + alone_s - 0.01).tier is Tier.BEST_EFFORT


def test_a_promise_counts_the_load() -> None:
    load_s, rest_s = HIT * FAST_S, MODEL.a + MODEL.work_s(PROMPT - HIT, HIT)
    held = placed(fleet_with(ALL_IN_HOST))
    assert held.tier is Tier.GUARANTEED
    assert held.predicted_ttft_s == pytest.approx(load_s + rest_s)
    # An objective that only computing and no loading would keep, and one that both keep.
    margin_s = 2e-3
    for ttft_s, tier in (
        (rest_s + load_s - margin_s, Tier.BEST_EFFORT),
        (2 * (rest_s + load_s), Tier.GUARANTEED),
    ):
        assert placed(fleet_with(ALL_IN_HOST), ttft_s=ttft_s).tier is tier
        assert placed(fleet_with(GPU), ttft_s=2 * (rest_s + load_s)).tier is Tier.GUARANTEED
    assert placed(fleet_with({}), ttft_s=2 * (rest_s + load_s)).tier is Tier.BEST_EFFORT
