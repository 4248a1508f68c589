"""Turns of sessions that are placed elsewhere than their prefix, and fetch its KV from there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import POLICIES as ADMISSIONS
from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.admission.base import TRANSFER_STEPS
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.job import MAX_TOKENS, RouteDecision
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import POLICIES as ROUTERS
from sluice.scheduling.routing import RouteQuery, Tier
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import MODEL, fleet_of, report, row

PROMPT, CACHED = 8_000, 7_500
EASY = SLO(ttft_s=2.0, tpot_s=0.1)
CHUNKS = (11, 12, 13)


def turn(**more: object) -> RouteQuery:
    plain = RouteQuery(1, EASY, PROMPT, session=5, prefix=CHUNKS, fetches_kv=MAX_TOKENS)
    return plain._replace(**more)  # type: ignore[arg-type]


def fleet_with(*reports: Report, cached: int = CACHED) -> Fleet:
    """The turn's prefix lies at the first replica."""
    fleet = fleet_of(*reports)
    fleet.prefixes.hold(0, {11: cached // 2, 12: cached})
    return fleet


def full(prompts: int, best_effort: bool = False) -> Report:
    """A replica with so many long prompts to compute, and a decode whose TPOT bounds its steps."""
    rows = [row(EASY, 6_000, key=900 + key, best_effort=best_effort) for key in range(prompts)]
    decode = row(EASY, 100, key=800, emitted=1, first_token_s=0.0)
    return report(decode, *rows)


def place(fleet: Fleet, query: RouteQuery, router: str = "most_gain") -> RouteDecision:
    placer = Placer(fleet, make_routing(router), make_admission("moore_hodgson"))
    return placer.place(query, 0.0)


def own_s(cached: int) -> float:
    return MODEL.work_s(PROMPT - cached, cached)


def test_it_stays_where_its_prefix_is_while_that_is_no_later() -> None:
    made = place(fleet_with(report(), report()), turn())
    assert (made.replica_id, made.kv_from) == ("0", None)
    assert made.own_s == pytest.approx(own_s(CACHED))


@pytest.mark.parametrize("best_effort", [False, True])
def test_it_moves_with_its_kv_where_that_is_sooner_and_the_promise_counts_all_of_it(
    best_effort: bool,
) -> None:
    objective = SLO() if best_effort else EASY
    fleet = fleet_with(full(2, best_effort), report())
    made = place(fleet, turn(slo=objective))
    assert (made.replica_id, made.kv_from, made.prefill_id) == ("1", "0", None)
    # The step under way where the KV is, and that which gives it; the transfer of what is cached.
    figures = fleet.figures[0]
    ahead_s = figures[figure.PREFILL_S] + figures[figure.BEST_EFFORT_S]
    steps_s = TRANSFER_STEPS * min(MODEL.a + ahead_s, figures[figure.BATCH_S])
    assert made.kv_transfer_s == pytest.approx(fleet.transfer.seconds(CACHED) + steps_s)
    assert fleet.figures[1, figure.RESERVED] == 1
    if not best_effort:
        assert made.own_s == pytest.approx(own_s(CACHED))
        late_s = made.kv_transfer_s + made.own_s + MODEL.a
        assert made.predicted_ttft_s == pytest.approx(late_s)
        assert fleet.figures[1, figure.TOKENS] == PROMPT - CACHED
    assert made.kv_tokens == CACHED
    assert len(fleet.ledger) == 1, "nothing is reserved where the KV comes from"
    fleet.release((1,))
    assert len(fleet.ledger) == 0 and fleet.figures[1, figure.RESERVED] == 0


@pytest.mark.parametrize(
    "plain",
    [
        {"fetches_kv": 0},
        {"prefix": (21, 22)},
        {"avoid": ("0",)},
    ],
    ids=str,
)
def test_else_all_is_computed_elsewhere(plain: dict[str, object]) -> None:
    made = place(fleet_with(full(3), report()), turn(**plain))
    assert (made.replica_id, made.kv_from, made.kv_transfer_s) == ("1", None, 0.0)
    assert made.own_s == pytest.approx(own_s(0))


def test_a_slow_network_or_a_short_prefix_is_not_worth_it() -> None:
    slow = fleet_with(full(3), report())
    for _ in range(20):
        slow.transfer.see(10, 100.0, 10 * CACHED)
    short = fleet_with(full(3), report(), cached=200)
    for fleet in (slow, short):
        made = place(fleet, turn())
        assert (made.replica_id, made.kv_from) == ("1", None)


def test_no_more_is_counted_on_than_can_be_given() -> None:
    made = place(fleet_with(full(3), report()), turn(fetches_kv=4_000))
    assert (made.kv_from, made.kv_tokens) == ("0", 4_000)
    assert made.own_s == pytest.approx(own_s(4_000))


@pytest.mark.parametrize("why", ["gone", "draining", "silent", "quarantined"])
def test_nothing_is_fetched_from_a_replica_that_may_not_be_chosen(why: str) -> None:
    fleet = fleet_with(full(3), report())
    now_s = 0.0
    if why == "gone":
        fleet.leave("0")
    elif why == "draining":
        fleet.report("0", report(draining=True), 0.0)
    elif why == "quarantined":
        fleet.quarantine("0")
    else:
        now_s = fleet.settings.stale_after_s + 1.0
        fleet.report("1", report(made_s=now_s), now_s)
    made = Placer(fleet, make_routing("most_gain"), make_admission("moore_hodgson")).place(
        turn(), now_s
    )
    assert (made.replica_id, made.kv_from) == ("1", None)


def test_one_that_would_be_late_at_its_prefix_moves_with_it() -> None:
    tight = SLO(ttft_s=1.0, tpot_s=0.1)
    late = turn(slo=tight, moves_from="0", waited_s=0.3, tiers=frozenset({Tier.GUARANTEED}))
    assert own_s(0) > 0.7
    assert place(fleet_with(full(2), report()), late._replace(fetches_kv=0)).replica_id is None
    made = place(fleet_with(full(2), report()), late)
    assert (made.replica_id, made.kv_from, made.tier) == ("1", "0", Tier.GUARANTEED)


def test_prefill_replicas_fetch_nothing() -> None:
    fleet = fleet_with(full(3))
    fleet.report("1", report(role="prefill"), 0.0)
    fleet.report("0", report(role="prefill"), 0.0)
    made = place(fleet, turn(tiers=frozenset({Tier.BEST_EFFORT})))
    assert made.kv_from is None


@given(
    prompts=st.lists(st.integers(0, 4), min_size=2, max_size=5),
    cached=st.lists(st.integers(0, PROMPT), min_size=5, max_size=5),
    ttft_s=st.sampled_from([0.4, 1.0, 2.0, 8.0]),
    router=st.sampled_from(sorted(ROUTERS)),
    admission=st.sampled_from(sorted(ADMISSIONS)),
)
@settings(max_examples=examples(60), deadline=None)
def test_it_is_never_worse_than_without_and_all_that_it_takes_ends(
    prompts: list[int], cached: list[int], ttft_s: float, router: str, admission: str
) -> None:
    def decided(fetches: bool) -> tuple[RouteDecision, Placer, Fleet]:
        fleet = fleet_of(*map(full, prompts))
        for number, tokens in enumerate(cached[: len(prompts)]):
            fleet.prefixes.hold(number, {100 + number: tokens})
        prefix = tuple(range(100, 100 + len(prompts)))
        placer = Placer(fleet, make_routing(router), make_admission(admission))
        asked = turn(
            slo=SLO(ttft_s=ttft_s, tpot_s=0.1), prefix=prefix, fetches_kv=MAX_TOKENS * fetches
        )
        return placer.place(asked, 0.0), placer, fleet

    (without, before, _), (made, placer, fleet) = decided(False), decided(True)
    assert before.inputs is not None and placer.inputs is not None
    one, other = before.inputs.job, placer.inputs.job
    assert (other.work_s + other.lead_s <= one.work_s + one.lead_s + 1e-12).all()
    if without.tier is Tier.GUARANTEED:
        assert made.tier is Tier.GUARANTEED
    if made.kv_from is not None:
        giver, row_ = fleet.row_of[made.kv_from], fleet.row_of[made.replica_id or ""]
        assert giver != row_ and cached[giver] > cached[row_]
        assert cached[giver] == max(cached[: len(prompts)])
        assert made.kv_transfer_s > fleet.transfer.seconds(0)
    fleet.release((1,))
    assert len(fleet.ledger) == 0
    assert not np.any(fleet.figures[: len(prompts), figure.RESERVED])
