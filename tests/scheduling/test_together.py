"""Requests that are decided together: the set of greatest value gets the guarantees."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.admission.slos_serve.policy import SLOsServeAdmission
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.placer import MAX_TOGETHER, Placer, Planned
from sluice.scheduling.request.job import RouteDecision
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery, Tier
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import fleet_of, job, report, row

GUARANTEED = frozenset({Tier.GUARANTEED})


def placer(fleet: Fleet, routing: str = "least_tokens", admission: str = "slos_serve") -> Placer:
    return Placer(fleet, make_routing(routing), make_admission(admission))


def together(
    decides: Placer, queries: Sequence[RouteQuery], now_s: float = 0.0
) -> list[RouteDecision]:
    """The decisions in the order of the queries."""
    made = {
        turn.number: decides.place(queries[turn.number], now_s, turn.row)
        for turn in decides.order(queries, now_s)
    }
    return [made[index] for index in range(len(queries))]


def alone(decides: Placer, queries: Sequence[RouteQuery], now_s: float = 0.0) -> float:
    return worth(queries, [decides.place(query, now_s) for query in queries])


def worth(queries: Sequence[RouteQuery], decisions: Sequence[RouteDecision]) -> float:
    return sum(
        query.slo.priority
        for query, decision in zip(queries, decisions, strict=True)
        if decision.tier is Tier.GUARANTEED
    )


def burst(*prompts: int, ttft_s: float = 1.0) -> list[RouteQuery]:
    return [RouteQuery(key, SLO(ttft_s, 0.1), prompt) for key, prompt in enumerate(prompts, 1)]


def test_two_short_prompts_get_the_guarantee_that_one_long_one_would_have_taken() -> None:
    # 8,000 tokens take 0.8 s of the one second, 4,000 take 0.4 s: the first leaves no room.
    queries = burst(8_000, 4_000, 4_000)
    one_by_one = placer(fleet_of(report()))
    assert [one_by_one.place(query, 0.0).tier for query in queries] == [
        Tier.GUARANTEED,
        Tier.BEST_EFFORT,
        Tier.BEST_EFFORT,
    ]
    made = together(placer(fleet_of(report())), queries)
    assert [each.tier for each in made] == [Tier.BEST_EFFORT, Tier.GUARANTEED, Tier.GUARANTEED]


def test_a_priority_of_three_is_worth_more_than_two_requests() -> None:
    queries = burst(8_000, 4_000, 4_000)
    queries[0] = queries[0]._replace(slo=SLO(1.0, 0.1, priority=3))
    made = together(placer(fleet_of(report())), queries)
    assert [each.tier is Tier.GUARANTEED for each in made] == [True, False, False]


def test_where_all_can_be_guaranteed_the_order_and_the_places_are_those_of_one_by_one() -> None:
    queries = burst(500, 100, 900, 200)
    fleet = fleet_of(report(), report())
    decides = placer(fleet)
    assert decides.order(queries, 0.0) == [Planned(index) for index in range(4)]
    assert not len(fleet.ledger)
    one_by_one = placer(fleet_of(report(), report()))
    expected = [one_by_one.place(query, 0.0) for query in queries]
    assert together(decides, queries) == expected


present = st.builds(
    lambda slo, prompt, emitted, begun: row(
        slo, prompt, emitted=emitted, computed=0 if emitted else min(begun, prompt - 1),
        first_token_s=0.0 if emitted else np.nan, running=True,
    ),
    st.sampled_from([SLO(1.0, 0.1), SLO(0.5, 0.05), SLO(2.0, 0.03), SLO(1.5)]),
    st.integers(2, 4_000),
    st.sampled_from([0, 0, 1, 40]),
    st.sampled_from([0, 0, 100]),
)  # fmt: skip
asked = st.builds(
    lambda ttft_s, tpot_s, priority, prompt, both: RouteQuery(
        0,
        SLO(ttft_s, tpot_s, priority=priority),
        prompt,
        tiers=frozenset(Tier) if both else GUARANTEED,
    ),
    st.sampled_from([0.2, 0.5, 1.0, 2.0]),
    st.sampled_from([None, 0.05, 0.1]),
    st.integers(1, 3),
    st.integers(1, 9_000),
    st.booleans(),
)


def keyed(queries: Sequence[RouteQuery]) -> list[RouteQuery]:
    return [query._replace(key=1_000 + index) for index, query in enumerate(queries)]


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(present, max_size=6),
    queries=st.lists(asked, min_size=2, max_size=5),
    blocks=st.sampled_from([10_000, 10_000, 400]),
    now_s=st.sampled_from([0.0, 0.3]),
)
def test_on_one_replica_no_set_is_worth_more(
    rows: list[np.ndarray], queries: list[RouteQuery], blocks: int, now_s: float
) -> None:
    queries = keyed(queries)

    def fleet() -> Fleet:
        return fleet_of(report(*rows, free_blocks=blocks), now_s=now_s)

    own = fleet()
    jobs, admission = [job(own, query, now_s) for query in queries], SLOsServeAdmission()
    # Not decided one after the other: then the ones before have a reservation, which counts up to
    # some milliseconds less than they did as new requests.
    most = max(
        sum(each.query.slo.priority for each in chosen)
        for count in range(len(queries) + 1)
        for chosen in combinations(jobs, count)
        if not chosen or all(admission.select(chosen, own))
    )
    made = together(placer(fleet()), queries, now_s)
    assert worth(queries, made) >= most


def test_a_plan_takes_no_turn() -> None:
    """Else the first request would be decided at another replica than the plan assumed."""
    queries = burst(1, 709, 1_061, 3_237, 1, 262, 1, 1, 1, 437, ttft_s=0.2)
    queries[1] = queries[1]._replace(slo=SLO(0.5, 0.1))
    for routing in ("slos_serve", "round_robin"):
        decides = placer(fleet_of(report(), report(), report()), routing)
        decides.order(queries, 0.0)
        assert decides.place(queries[0], 0.0).replica_id == "0"


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(st.lists(present, max_size=4), min_size=2, max_size=3),
    queries=st.lists(asked, min_size=2, max_size=MAX_TOGETHER),
    routing=st.sampled_from(["least_tokens", "most_gain", "slos_serve", "round_robin"]),
)
def test_on_several_replicas_the_set_is_worth_at_least_as_much_as_one_by_one(
    rows: list[list[np.ndarray]], queries: list[RouteQuery], routing: str
) -> None:
    queries = keyed(queries)
    fleets = [fleet_of(*[report(*own) for own in rows]) for _ in range(2)]
    one_by_one = alone(placer(fleets[0], routing), queries)
    decides = placer(fleets[1], routing)
    order = decides.order(queries, 0.0)
    assert sorted(turn.number for turn in order) == list(range(len(queries)))
    assert not len(fleets[1].ledger), "a plan reserves nothing"
    assert worth(queries, together(placer(fleets[1], routing), queries)) >= one_by_one


@settings(max_examples=examples(100), deadline=None)
@given(rows=st.lists(present, max_size=8), query=asked, now_s=st.sampled_from([0.0, 0.2]))
def test_the_program_for_one_request_answers_as_the_walk(
    rows: list[np.ndarray], query: RouteQuery, now_s: float
) -> None:
    fleet = fleet_of(report(*rows), now_s=now_s)
    admission, made = SLOsServeAdmission(), job(fleet, query, now_s)
    assert admission.select([made], fleet) == admission.promises(made, fleet).holds
