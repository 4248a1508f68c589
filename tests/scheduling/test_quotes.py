"""Quotes: what they say, that they count nothing, and that what is held or offered is kept."""

import random
from math import inf
from typing import Any

import pytest

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.placement.quotes import (
    LEVELS,
    MAX_HELD_BY_TENANT,
    MAX_OPEN,
    SPACING_S,
    VALID_S,
    Held,
    Offer,
    Prediction,
    Quotes,
)
from sluice.scheduling.request.job import DECLINED, UNATTAINABLE
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery, Tier
from tests.scheduling.fleets import fleet_of, report, row
from tests.scheduling.test_placement import EASY, HARD, PROMISED, full_fleet, placer, query

CHAT = Prediction("chat", True, 0.0, (0.2, 0.02, 2.2), 101.0)


def covered(draw: random.Random, drift: float, requests: int = 8_000) -> list[list[float]]:
    """By objective, the share of requests within each quoted time; answers come 50 later."""
    quotes, made = Quotes(), []
    below = [[0] * len(LEVELS) for _ in range(3)]
    for number in range(requests):
        swing = 1.0 + drift * ((number // 1_000) % 2)
        quotes.predicted(number, CHAT)
        base = swing * draw.lognormvariate(0.0, 0.5)
        made.append((quotes.times_s(CHAT), (0.2 * base, 0.02 * base, 2.2 * base)))
        if number >= 50:
            quoted, seen = made[number - 50]
            quotes.ended(number - 50, seen)
            for own, times_s, seen_s in zip(below, quoted, seen, strict=True):
                for place, time_s in enumerate(times_s):
                    own[place] += seen_s <= time_s and number > 1_000
    return [[each / (requests - 1_001) for each in own] for own in below]


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_quoted_times_cover_their_levels_also_where_ratios_drift(drift: float) -> None:
    for median, most, tail in covered(random.Random(1), drift):
        assert 0.48 <= median <= 0.52
        assert 0.88 <= most <= 0.92
        assert tail >= 0.985


@pytest.mark.parametrize("later", [50, 1_000])
def test_quoted_times_cover_their_levels_at_any_time_however_late_answers_come(later: int) -> None:
    """Requests are quoted for long before the first of them has ended."""
    draw, quotes, made = random.Random(1), Quotes(), list[tuple[float, float]]()
    for number in range(8_000):
        quotes.predicted(number, CHAT)
        made.append((quotes.times_s(CHAT)[2][0], 2.2 * draw.lognormvariate(0.0, 0.5)))
        if number >= later:
            quotes.ended(number - later, (None, None, made[number - later][1]))
    within = [seen_s <= quoted_s for quoted_s, seen_s in made]
    for first in range(2_000, 8_000, 500):
        assert 0.4 <= sum(within[first : first + 500]) / 500 <= 0.6


def test_a_failed_request_teaches_nothing_and_a_cancelled_one_its_first_token() -> None:
    quotes = Quotes()
    before = quotes.times_s(CHAT)
    quotes.predicted("failed", CHAT)
    quotes.ended("failed", None)
    assert quotes.times_s(CHAT) == before
    for number in range(20):
        quotes.predicted(number, CHAT)
        quotes.ended(number, (0.6, None, None))
    after = quotes.times_s(CHAT)
    assert after[0][0] == pytest.approx(0.6)
    assert after[1:] == before[1:]


def test_what_waited_is_quoted_from_its_arrival() -> None:
    quotes = Quotes()
    waited = quotes.times_s(CHAT._replace(waited_s=3.0))
    for place, since_s in ((0, 3.0), (1, 0.0), (2, 3.0)):
        fresh = quotes.times_s(CHAT)[place]
        assert waited[place] == pytest.approx([since_s + each for each in fresh])


def test_a_class_has_quantiles_of_its_own() -> None:
    quotes, slow = Quotes(), CHAT._replace(service_class="slow")
    for number in range(100):
        quotes.predicted(number, slow)
        quotes.ended(number, (0.6, None, None))
    assert quotes.times_s(slow)[0][0] == pytest.approx(0.6)
    assert quotes.times_s(CHAT)[0][0] == pytest.approx(0.2)


def test_requests_that_come_together_teach_as_those_between_bursts_do() -> None:
    """The last of each three, two milliseconds later, takes ten times as long."""
    deciding = placer(fleet_of(report()))
    for number in range(150):
        at_s = 0.03 * (number // 3) + 0.001 * (number % 3)
        deciding.place(query(EASY, key=number), at_s)
        deciding.quotes.ended(number, (0.1 if number % 3 == 2 else 0.01, None, None))
        deciding._fleet.release((number,))
    quoted_s = deciding.quote(query(EASY, key=1_000), 1.5).times_s[0]
    assert quoted_s[1] > 5.0 * quoted_s[0]


def test_few_decisions_of_many_a_second_teach() -> None:
    deciding, every = placer(fleet_of(report())), 0.001
    for number in range(3_000):
        deciding.place(query(EASY, key=number), every * number)
        deciding._fleet.release((number,))
    assert len(deciding.quotes._open) == pytest.approx(3.0 / SPACING_S, rel=0.5)


def test_nothing_grows_without_bound() -> None:
    quotes = Quotes()
    for number in range(2 * MAX_OPEN):
        quotes.predicted(number, CHAT)
    before = quotes.times_s(CHAT)
    quotes.ended(0, (9.0, 9.0, 9.0))
    assert quotes.times_s(CHAT) == before, "the oldest are forgotten"
    one = Held(1, 1.0, 5.0, ())
    held = [quotes.hold(key, one) for key in range(MAX_HELD_BY_TENANT + 1)]
    assert held == [True] * MAX_HELD_BY_TENANT + [False]
    assert quotes.hold(10_000, one._replace(tenant=2)), "another tenant may"


@pytest.mark.parametrize("slo", [EASY, SLO()])
def test_a_quote_says_what_is_decided_next_and_changes_nothing(slo: SLO) -> None:
    fleet = fleet_of(report(row(EASY, 1_000, key=7)), report())
    deciding = placer(fleet)
    figures = fleet.figures.copy()
    quote = deciding.quote(query(slo, key=2), 0.0)
    assert (fleet.figures == figures).all()
    assert len(fleet.ledger) == 0
    assert deciding.demand.arrived == 0
    placed = deciding.place(query(slo, key=3), 0.0)
    assert (quote.decision.replica_id, quote.decision.tier) == (placed.replica_id, placed.tier)
    assert quote.decision.predicted_ttft_s == placed.predicted_ttft_s
    assert [list(times) for times in quote.times_s] == [sorted(each) for each in quote.times_s]
    assert len(quote.times_s) == 3
    assert not quote.held


def held_placer() -> tuple[Fleet, Placer]:
    """A replica on which the promise of one of these requests leaves no room for another."""
    fleet = fleet_of(report())
    deciding = placer(fleet)
    quote = deciding.quote(long(1, tenant=5), 0.0, hold_s=1.0)
    assert quote.held
    assert 1 in fleet.ledger
    return fleet, deciding


def long(key: int, takes: int = 0, tenant: int = 0) -> RouteQuery:
    asked = query(EASY, key, prompt=6_000, tiers=PROMISED)
    return asked._replace(takes=takes, tenant=tenant)


def test_what_is_held_goes_to_who_has_the_quote_and_to_no_other() -> None:
    fleet, deciding = held_placer()
    fleet.report("0", report(made_s=0.5), 0.5)
    assert deciding.place(long(2), 0.5).reason == UNATTAINABLE
    forged = long(2, takes=9, tenant=5)._replace(elsewhere=True)
    assert deciding.place(forged, 0.5).reason == DECLINED, "not even asked about"
    assert deciding.place(long(3, takes=1), 0.5).reason == UNATTAINABLE, "another tenant's"
    taken = deciding.place(long(4, takes=1, tenant=5), 0.5)
    assert taken.tier is Tier.GUARANTEED
    assert 1 not in fleet.ledger
    assert deciding.place(long(5, takes=1, tenant=5), 0.5).reason == UNATTAINABLE, "once"


def test_a_quote_of_a_short_prompt_is_worth_nothing_to_a_long_one() -> None:
    deciding = placer(full_fleet())
    assert deciding.quote(query(HARD, key=1, tiers=PROMISED), 0.0).offer is not None
    longer = query(SLO(ttft_s=60.0), key=2, prompt=2_000, tiers=PROMISED)._replace(takes=1)
    before = deciding.quotes.margin
    deciding.place(longer, 0.0)
    assert deciding.quotes.margin == before, "it has taken up no offer"


def test_an_offer_is_worth_nothing_to_a_request_that_asks_for_more() -> None:
    deciding = placer(full_fleet())
    assert deciding.quote(query(HARD, key=1, tiers=PROMISED), 0.0).offer is not None
    before = deciding.quotes.margin
    deciding.place(query(HARD, key=2, tiers=PROMISED)._replace(takes=1), 0.0)
    assert deciding.quotes.margin == before

    held = Held(0, 1.0, 9_000.0, (((None, 0.5, 3.0), inf), ((None, 0.5, 1.5), 40)))
    offered, stated, tighter = [SLO(tpot_s=0.5, e2e_s=e2e_s) for e2e_s in (2.99, 1.5, 1.4)]
    for slo, tokens, allowed in [
        (offered, 0, True),
        (offered, 400, True),
        (stated, 40, True),
        (stated, 41, False),
        (stated, 0, False),
        (tighter, 40, False),
        (SLO(ttft_s=9.0, e2e_s=3.0), 0, False),
    ]:
        assert held.allows(query(slo)._replace(output_tokens=tokens)) == allowed


def test_a_flood_of_refusals_is_tested_for_no_more_offers_than_may_be_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deciding, tested = placer(full_fleet()), 0
    as_offered = deciding._as_offered

    def counted(*given: Any) -> Any:
        nonlocal tested
        tested += 1
        return as_offered(*given)

    monkeypatch.setattr(deciding, "_as_offered", counted)
    for key in range(1, MAX_HELD_BY_TENANT + 1):
        assert deciding.quote(query(HARD, key=key, tiers=PROMISED), 0.0).offer is not None
    before = tested
    assert before > 0
    assert deciding.quote(query(HARD, key=1_000, tiers=PROMISED), 0.0).offer is None
    assert tested == before
    deciding.place(query(key=1_001), 1.1 * VALID_S)
    assert deciding.quotes.has_room(0)


def test_what_is_held_ends_in_time() -> None:
    fleet, deciding = held_placer()
    fleet.report("0", report(made_s=1.0), 1.0)
    assert deciding.place(long(2), 1.0).tier is Tier.GUARANTEED
    assert 1 not in fleet.ledger
    assert deciding.quotes.ends_s == inf


@pytest.mark.parametrize("stated", [EASY, HARD, SLO(ttft_s=1.0), SLO(e2e_s=1.5), SLO(tpot_s=0.001)])
def test_an_offer_is_promised_to_who_takes_it_up_within_its_time(stated: SLO) -> None:
    fleet = full_fleet()
    deciding = placer(fleet)
    asked = query(stated, tiers=PROMISED)._replace(client_request_id="quote")
    assert deciding.place(query(stated, key=1, tiers=PROMISED), 0.0).reason == UNATTAINABLE
    offer = deciding.quote(asked._replace(key=2), 0.0).offer
    assert isinstance(offer, Offer)
    assert offer.times_s != stated.times_s
    for offered_s, stated_s in zip(offer.times_s, stated.times_s, strict=True):
        assert (offered_s is None) == (stated_s is None)
        assert offered_s is None or stated_s is None or offered_s >= stated_s
    fleet.report("0", report(*[row(EASY, 4_000, key=key) for key in range(3)]), 0.9 * VALID_S)
    took = query(stated.with_times(offer.times_s), key=3, tiers=PROMISED)._replace(takes=2)
    assert deciding.place(took, 0.9 * VALID_S).tier is Tier.GUARANTEED


def test_offers_take_a_bounded_part_of_what_is_promised() -> None:
    fleet = fleet_of(report())
    deciding = placer(fleet)
    taken = query(SLO(ttft_s=60.0), key=1, tiers=PROMISED)._replace(takes=9)
    deciding.quotes.hold(9, Held(0, 1.0, 1_000.0, (((60.0, None, None), inf),)))
    assert deciding.place(taken, 0.0).tier is Tier.GUARANTEED
    refused = deciding.quote(query(HARD, key=2, tiers=PROMISED), 0.0)
    assert refused.decision.reason == UNATTAINABLE
    assert refused.offer is None, "all that was promised lately is an offer"


def test_the_margin_of_offers_grows_with_broken_ones_and_shrinks_slowly() -> None:
    quotes = Quotes()
    quotes.was_accepted(promised=False)
    grown = quotes.margin
    assert grown > 1.5
    quotes.was_accepted(promised=True)
    assert 0.99 * grown < quotes.margin < grown


def test_offers_that_nobody_takes_up_are_forgotten_and_count_less_and_less() -> None:
    quotes, offer = Quotes(), Held(1, 1.0, 100.0, ())
    for key in range(40):
        assert quotes.hold(key, offer)
    before = quotes.offered_tokens()
    assert quotes.ended_by(1.0) == []
    assert (quotes.ends_s, quotes.offered_tokens()) == (inf, 0.0)
    for key in range(40):
        assert quotes.hold(key, offer)
    assert 0.0 < quotes.offered_tokens() < 0.2 * before
