"""End-to-end times, shared out and promised."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.placement.calibration import PRIOR, Calibration
from sluice.scheduling.placement.placer import Placer, shared_out
from sluice.scheduling.request.job import UNATTAINABLE, RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import make_policy as make_routing
from tests.scheduling.fleets import MODEL, fleet_of, report, row

PROMISE_ONLY = frozenset({Tier.GUARANTEED})
STEP_S = MODEL.a + MODEL.work_s(1, 1_000)


def placer(
    fleet: Fleet,
    admission: str = "moore_hodgson",
    calibration: Calibration | None = None,
) -> Placer:
    made = make_admission(admission)
    return Placer(fleet, make_routing("least_tokens"), made, calibration)


def query(slo: SLO, key: int = 1, prompt: int = 1_000, most: int = 0) -> RouteQuery:
    return RouteQuery(key, slo, prompt, tiers=PROMISE_ONLY, output_tokens=most)


@pytest.mark.parametrize("admission", ["moore_hodgson", "pab", "slos_serve"])
def test_an_end_to_end_time_without_max_tokens_is_promised_on_an_idle_replica(
    admission: str,
) -> None:
    # 512 tokens are expected at most: 0.1 s of prefill, and then some 11 ms each.
    made = placer(fleet_of(report()), admission).place(query(SLO(e2e_s=10.0)), 0.0)
    assert made.tier is Tier.GUARANTEED
    assert made.planned is not None
    ttft_s, tpot_s, e2e_s = made.planned
    assert ttft_s is not None and tpot_s is not None and e2e_s is None
    assert ttft_s + 511 * tpot_s == pytest.approx(10.0)
    assert tpot_s > STEP_S


@pytest.mark.parametrize("admission", ["moore_hodgson", "slos_serve"])
@pytest.mark.parametrize("e2e_s", [0.001, 0.05, 3.0])
def test_one_that_no_replica_can_hold_is_not_promised(admission: str, e2e_s: float) -> None:
    made = placer(fleet_of(report()), admission).place(query(SLO(e2e_s=e2e_s)), 0.0)
    assert made == RouteDecision(None, UNATTAINABLE)
    # With so few tokens the last of them could be.
    short = placer(fleet_of(report()), admission).place(query(SLO(e2e_s=e2e_s), most=20), 0.0)
    assert (short.tier is Tier.GUARANTEED) == (e2e_s == 3.0)


def test_a_busy_replica_asks_to_come_back_where_an_idle_one_could_promise() -> None:
    busy = fleet_of(report(*[row(SLO(30.0, 0.1), 4_000, key=key) for key in range(40)]))
    made = placer(busy).place(query(SLO(e2e_s=8.0), key=99), 0.0)
    assert made.reason == UNATTAINABLE
    assert made.retry_after_s is not None and made.retry_after_s > 0


def test_the_promised_pace_is_reserved() -> None:
    decided = fleet_of(report())
    deciding, promised = placer(decided), 0
    for key in range(1, 40):
        promised += deciding.place(query(SLO(e2e_s=8.0), key=key), 0.0).tier is Tier.GUARANTEED
    # Each decodes some 5 s: an engine without an end to what it promises would promise all.
    assert 1 <= promised < 20
    assert decided.figures[0, figure.DECODE_SHARES] == 0.0  # nothing decodes yet
    assert decided.figures[0, figure.LOADS] == promised


def test_the_margin_of_the_end_to_end_time_is_learned_from_that_time() -> None:
    calibration = Calibration(0.99)
    asked = query(SLO(e2e_s=10.0))
    fleet = fleet_of(report())
    deciding = placer(fleet, calibration=calibration)
    before = deciding.place(asked, 0.0)
    fleet.release((asked.key,))
    assert before.planned is not None and before.planned[1] is not None
    for key in range(2, 9):
        calibration.promised(key, SLO(e2e_s=10.0), SLO(e2e_s=10.0 * (1.0 - PRIOR)))
        calibration.ended(key, 1.0, 0.02, 10.4, 0.0)
    calibration.ended(asked.key, 1.0, 0.02, 10.4, 0.0)
    assert calibration.margin("e2e", 10.0, 0.0) == pytest.approx(1.0 - (1.0 - PRIOR) * 10.0 / 10.4)
    assert calibration.margin("ttft", 1.0, 0.0) == PRIOR
    after = deciding.place(asked, 0.0)
    assert after.planned is not None and after.planned[1] is not None
    assert after.planned[1] == pytest.approx(before.planned[1] / 1.04)


def test_without_an_end_to_end_time_nothing_changes() -> None:
    fleet = fleet_of(report())
    for slo in (SLO(ttft_s=1.0, tpot_s=0.1), SLO(ttft_s=1.0), SLO(tpot_s=0.1)):
        assert shared_out(query(slo), 100, fleet, fleet.candidates(0.0)) is slo
        assert placer(fleet_of(report())).place(query(slo), 0.0).planned == slo.times_s


def test_of_unlike_replicas_the_shares_are_those_of_the_first_to_end() -> None:
    slow = report(latency=LinearLatency(a=0.05, b=0.001, c=0.00001))
    fleet = fleet_of(slow, report())
    made = placer(fleet).place(query(SLO(e2e_s=10.0)), 0.0)
    assert (made.tier, made.replica_id) == (Tier.GUARANTEED, "1")


def test_where_the_time_is_ample_a_busier_replica_may_serve_it_too() -> None:
    busy = report(row(SLO(30.0, 0.1), 4_000))
    fleet = fleet_of(busy, report())
    admission = make_admission("moore_hodgson")
    deciding = Placer(fleet, make_routing("least_tokens"), admission)
    deciding.place(query(SLO(e2e_s=60.0), prompt=100), 0.0)
    seen = deciding.inputs
    assert seen is not None and seen.promises is not None and seen.promises.holds.all()


TIMES = st.one_of(st.none(), st.floats(0.001, 100.0))


@settings(deadline=None)
@given(
    st.floats(0.01, 1_000.0),
    TIMES,
    TIMES,
    st.integers(1, 5_000),
    st.integers(1, 8_000),
    st.floats(0.0, 100.0),
    st.integers(0, 5),
)
def test_who_holds_the_shares_holds_the_whole_and_what_was_stated(
    e2e_s: float,
    ttft_s: float | None,
    tpot_s: float | None,
    tokens: int,
    prompt: int,
    waited_s: float,
    others: int,
) -> None:
    slo = SLO(ttft_s, tpot_s, e2e_s, priority=3, service_class="chat")
    busy = report(*[row(SLO(30.0, 0.1), 900, key=key) for key in range(others)])
    fleet = fleet_of(busy, report(latency=LinearLatency(a=0.02, b=0.000_2, c=0.000_001)))
    asked = query(slo, prompt=prompt)._replace(waited_s=waited_s)
    found = shared_out(asked, tokens, fleet, fleet.candidates(0.0))
    first_s, pace_s, end_s, priority = found.columns
    assert end_s == inf and (priority, found.service_class) == (3.0, "chat")
    assert first_s <= slo.columns[0] and pace_s <= slo.columns[1]
    assert first_s < inf
    later = tokens - 1
    if later:
        assert first_s + later * pace_s <= e2e_s * (1 + 1e-9)
    else:
        assert first_s <= e2e_s
