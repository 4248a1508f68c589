"""What the controller tells of promises: by whom they were kept, and when a first token comes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.controller.config import ControllerConfig
from sluice.controller.observability.observer import promise_summary
from sluice.controller.observability.readings import reliable
from sluice.controller.state.promises import (
    CHECKED,
    FEW,
    PERIOD_S,
    PERIODS,
    QUANTILES,
    WINDOW,
    Curve,
    Forecast,
    PromiseLog,
    Reliability,
)
from sluice.protocol.messages import RequestEnding
from sluice.scheduling.placement.loops import LoopEnding
from sluice.scheduling.request.job import RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import Clock, ObservedController, hello, newer_push, query

# Forecasts of the first token hold what they say, and the curve tells when they do not.

SHARES = pytest.approx(QUANTILES, abs=0.05)


def feed(known: Reliability, replica: str, predicted_s: float, ratio: float) -> Forecast:
    """One promise: forecast, then observed."""
    forecast = known.forecast(replica, predicted_s)
    known.observe(replica, forecast, predicted_s * ratio)
    return forecast


@pytest.mark.parametrize(("middle", "spread"), [(0.6, 0.05), (1.0, 0.3), (3.0, 1.0)])
def test_half_lie_below_the_median_and_the_curve_on_the_diagonal(
    middle: float, spread: float
) -> None:
    rng, known = np.random.default_rng(7), Reliability()
    for ratio in middle * rng.lognormal(0.0, spread, 2_000):
        feed(known, "a", 0.5, float(ratio))
    assert known.forecast("a", 0.5).median_s == pytest.approx(0.5 * middle, rel=0.25 * spread)
    assert len(known.curve("a")) == len(known.curve()) == CHECKED
    assert known.curve("a").shares == SHARES and known.curve().shares == SHARES


def test_replicas_and_sizes_have_ratios_of_their_own() -> None:
    """One replica is twice as slow as predicted; and 20 ms on top are much of a short time only."""
    rng, known = np.random.default_rng(7), Reliability()
    for _ in range(2_000):
        for name, pace in (("sound", 1.0), ("slow", 2.0)):
            predicted_s = float(rng.choice((0.02, 2.0)))
            observed_s = predicted_s * pace * float(rng.normal(1.0, 0.05)) + 0.02
            known.observe(name, known.forecast(name, predicted_s), observed_s)
    medians = {
        (name, predicted_s): known.forecast(name, predicted_s).median_s
        for name in ("sound", "slow")
        for predicted_s in (0.02, 2.0)
    }
    expected = {
        ("sound", 0.02): 0.04,
        ("slow", 0.02): 0.06,
        ("sound", 2.0): 2.0,
        ("slow", 2.0): 4.0,
    }
    assert medians == pytest.approx(expected, rel=0.03)
    for name in ("sound", "slow", None):
        assert known.curve(name).shares == SHARES


def test_a_replica_of_which_little_is_known_takes_the_fleets_ratios() -> None:
    known = Reliability()
    for _ in range(FEW - 1):
        feed(known, "a", 1.0, 2.0)
    assert known.forecast("a", 1.0).ratios is None and known.forecast("a", 1.0).median_s == 1.0
    assert known.curve().shares == (), "nothing was said, so nothing can be judged"
    feed(known, "a", 1.0, 2.0)
    assert known.forecast("new", 1.0).median_s == known.forecast("a", 1.0).median_s == 2.0
    assert known.forecast("a", 100.0).median_s == 100.0, "of another size nothing is known"
    for _ in range(FEW):
        feed(known, "new", 1.0, 0.5)
    assert known.forecast("new", 1.0).median_s == 0.5 and known.forecast("a", 1.0).median_s == 2.0


def test_what_long_promises_take_says_nothing_of_short_ones() -> None:
    """An engine that schedules by deadlines uses the time that it has."""
    known = Reliability()
    for _ in range(2 * FEW):
        for bound_s, observed_s in ((30.0, 2.3), (0.9, 0.4)):
            known.observe("a", known.forecast("a", 0.3, bound_s), observed_s)
    assert known.forecast("a", 0.3, 0.9).median_s == pytest.approx(0.4)
    assert known.forecast("a", 0.3, 30.0).median_s == pytest.approx(2.3)
    # Of the same size, but a little tighter than what the others took.
    for _ in range(WINDOW):
        known.observe("a", known.forecast("a", 0.3, 1.0), 0.95)
    assert known.forecast("a", 0.3, 0.9).median_s == pytest.approx(0.9)
    assert known.forecast("a", 0.3).median_s == 0.3, "nothing was promised"


def test_the_median_follows_a_change_and_the_curve_shows_that_it_came() -> None:
    known = Reliability()
    for _ in range(2 * WINDOW):
        feed(known, "a", 1.0, 1.0)
    for _ in range(WINDOW // 2):
        assert feed(known, "a", 1.0, 1.5).median_s == 1.0
    assert known.forecast("a", 1.0).median_s == 1.5
    assert known.curve("a").shares[4] < 0.8, "of equal ratios all had kept the median"


def test_a_forecast_is_judged_as_it_was_made() -> None:
    known = Reliability()
    for _ in range(FEW):
        feed(known, "a", 1.0, 1.0)
    told = known.forecast("a", 1.0)
    for _ in range(WINDOW):
        feed(known, "a", 1.0, 9.0)
    before = known.curve("a").shares
    known.observe("a", told, 5.0)
    assert known.curve("a").shares < before, "late by what it was told, early by what is known now"


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.floats(0.0, 1e3) | st.just(float("inf")),
            st.floats(-1.0, 1e3),
            st.floats(1e-6, 1e3) | st.just(float("inf")),
        ),
        max_size=400,
    )
)
def test_any_history_keeps_quantiles_in_order_and_memory_bounded(
    history: list[tuple[str, float, float, float]],
) -> None:
    known = Reliability()
    for name, predicted_s, observed_s, bound_s in history:
        forecast = known.forecast(name, predicted_s, bound_s)
        assert forecast.median_s <= bound_s
        if forecast.ratios is not None:
            assert list(forecast.ratios) == sorted(forecast.ratios) and forecast.ratios[0] >= 0.0
        known.observe(name, forecast, observed_s)
    shares = known.curve().shares
    assert list(shares) == sorted(shares) and all(0.0 <= share <= 1.0 for share in shares)


def test_ratios_are_the_latest_ones_only() -> None:
    """Against the same by hand, over ties and over more than fit."""
    rng, known = np.random.default_rng(3), Reliability()
    ratios = rng.integers(1, 40, 3 * WINDOW).astype(float).tolist()
    for count, ratio in enumerate(ratios):
        latest = sorted(ratios[max(0, count - WINDOW) : count])
        found = known.forecast("a", 1.0).ratios
        assert (found is None) == (len(latest) < FEW)
        if found is not None:
            assert found[4] == latest[-(-(len(latest) + 1) // 2) - 1]
        feed(known, "a", 1.0, ratio)


def test_a_curve_forgets() -> None:
    curve = Curve()
    for place in (0, len(QUANTILES)):
        for _ in range(CHECKED):
            curve.note(place)
    assert (len(curve), curve.shares) == (CHECKED, (0.0,) * len(QUANTILES))


class Site:
    """A controller of one idle replica whose steps take 4 ms, and its router."""

    def __init__(self) -> None:
        self.controller = ObservedController(ControllerConfig(stale_after_s=60), Clock())
        self.keys = 0

    async def ask(
        self, e2e_s: float, name: str = "chat", tenant: int = 0, most: int = 0
    ) -> RouteDecision:
        self.keys += 1
        slo = SLO(e2e_s=e2e_s, service_class=name)
        asked = query(self.keys)._replace(slo=slo, tenant=tenant, output_tokens=most)
        (made,) = (await self.controller.route([asked])).decisions
        await self.controller.release([asked.key])
        return made

    async def end(
        self, *tokens: int, name: str = "chat", outcome: str = "ok", tenant: int = 0, most: int = 0
    ) -> None:
        endings = [
            RequestEnding(f"{self.keys}-{n}", outcome, (), each, 0.1, 0.01, 1.0, "", name, tenant,
                          most)
            for n, each in enumerate(tokens)
        ]  # fmt: skip
        await self.controller.push_metrics(newer_push("router-1", ()), endings)


async def site_of() -> Site:
    site = Site()
    await site.controller.hello(hello("a"))
    return site


async def test_lengths_of_outputs_that_ended_move_the_decision() -> None:
    site = await site_of()
    assert (await site.ask(1.0)).tier is Tier.BEST_EFFORT
    await site.end(*[50] * 100)
    assert (await site.ask(1.0)).tier is Tier.GUARANTEED
    assert (await site.ask(1.0, name="code")).tier is Tier.BEST_EFFORT
    # One tenant's outputs are longer.
    await site.end(*[600] * 30, tenant=7)
    assert (await site.ask(1.0, tenant=7)).tier is Tier.BEST_EFFORT
    await site.end(*[50] * 250)
    await site.end(*[50] * 50)
    assert (await site.ask(1.0, tenant=8)).tier is Tier.GUARANTEED
    assert (await site.ask(1.0, tenant=7)).tier is Tier.BEST_EFFORT
    assert (await site.ask(1.0, tenant=7, most=60)).tier is Tier.GUARANTEED


@pytest.mark.parametrize(
    ("outcome", "most"), [("ok", 16), ("cancelled", 0), ("failed", 0), ("client_error", 0)]
)
async def test_what_was_cut_off_does_not_teach_that_outputs_are_short(
    outcome: str, most: int
) -> None:
    site = await site_of()
    await site.end(*[16] * 200, outcome=outcome, most=most)
    assert (await site.ask(1.0)).tier is Tier.BEST_EFFORT
    await site.end(*[15] * 200, most=most)
    assert (await site.ask(1.0)).tier is Tier.GUARANTEED


async def test_what_a_router_leaves_out_teaches_nothing() -> None:
    site = await site_of()
    await site.end(*[16] * 200, name="")
    assert (await site.ask(1.0, name="")).tier is None  # no query: a class has a name


CHAT = SLO(1.0, service_class="chat")
OK = RequestEnding("", "ok", (), 9, 0.5, 0.05, 2.0)


def promise(log: PromiseLog, number: int, replica: str = "a", **more: Any) -> RouteDecision:
    query = RouteQuery(number, CHAT, 100, request_id=f"{number:032x}")
    decision = RouteDecision(replica, "placed", Tier.GUARANTEED, 0.2)
    return log.made(query._replace(**more), decision)


def end(log: PromiseLog, number: int, now_s: float = 0.0, **more: Any) -> None:
    log.ended(OK._replace(request_id=f"{number:032x}", **more), now_s)


LOOPS = {
    LoopEnding("code", promised=True, kept=True): 5,
    LoopEnding("chat", promised=True, kept=False): 1,
    LoopEnding("code", promised=False, kept=True): 3,
}


def told(log: PromiseLog, *known: str, now_s: float = 0.0) -> dict[str, Any]:
    found = promise_summary(
        0.99,
        {"ttft": 0.041234, "tpot": 0.0, "e2e": 0.0},
        log.ended_lately(now_s),
        reliable(log.curve()),
        {name: reliable(log.curve(name)) for name in known},
        LOOPS,
    )
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


def test_promises_are_told_by_class_and_replica() -> None:
    log = PromiseLog()
    for number in range(40):
        replica = "a" if number % 4 else "b"
        slo = SLO(1.0, service_class="code") if number % 2 else CHAT
        promise(log, number, replica, slo=slo)
        end(log, number, kept=number > 0, replica_id=replica)
    found = told(log, "b", "a", "new")
    assert (found["level"], found["margins"]["ttft"]) == (0.99, 0.0412)
    assert (found["promised"], found["kept"]) == (40, 39)
    assert found["classes"] == [
        {"class": "chat", "promised": 20, "kept": 19},
        {"class": "code", "promised": 20, "kept": 20},
    ]
    assert found["loops"] == {"ended": 9, "promised": 6, "kept": 5}
    rows = [(row["replica_id"], row["promised"], row["kept"]) for row in found["replicas"]]
    assert rows == [("a", 30, 30), ("b", 10, 9), ("new", 0, 0)]


def test_what_failed_before_an_answer_began_was_not_kept() -> None:
    log = PromiseLog()
    for number, outcome in enumerate(("failed", "cancelled", "refused", "ok")):
        promise(log, number)
        end(log, number, outcome=outcome, ttft_s=None)
    assert (told(log)["promised"], told(log)["kept"]) == (1, 0)
    end(log, 0, outcome="failed")
    end(log, 77, kept=True)
    assert told(log)["promised"] == 1, "told twice, or never promised by this controller"


def test_the_predicted_ttft_becomes_the_median_of_what_was_observed() -> None:
    log = PromiseLog()
    for number in range(FEW):
        made = promise(log, number, waited_s=0.1)
        assert (made.predicted_ttft_s, made.level) == (0.2, 0.99)
        # Half a second from the arrival, of which a tenth went by before the decision.
        end(log, number, replica_id="a", kept=True)
    assert promise(log, 99).predicted_ttft_s == pytest.approx(0.4)
    assert told(log, "a")["reliability"] == {"count": 0, "observed": []}
    end(log, 99, replica_id="a", kept=True, ttft_s=0.3)
    (row,) = told(log, "a")["replicas"]
    assert row["reliability"] == told(log)["reliability"]
    assert row["reliability"] == {"count": 1, "observed": [1.0] * len(QUANTILES)}


def test_no_request_is_predicted_beyond_its_promise_by_the_errors_of_others() -> None:
    log = PromiseLog()
    for number in range(2 * FEW):
        promise(log, number, slo=SLO(30.0))
        end(log, number, replica_id="a", kept=True, ttft_s=2.3)
    assert promise(log, 997, slo=SLO(30.0)).predicted_ttft_s == pytest.approx(2.3)
    assert promise(log, 998, slo=SLO(0.9)).predicted_ttft_s == 0.2
    # By what is left of it where the request has waited, and by its end where it states no more.
    late = SLO(30.0), SLO(e2e_s=30.0)
    left_s = [promise(log, 999, slo=slo, waited_s=29.0).predicted_ttft_s for slo in late]
    assert max(left_s) <= 1.0


def test_only_the_replica_that_answered_as_promised_teaches() -> None:
    log = PromiseLog()
    for number in range(4 * FEW):
        promise(log, number)
        end(log, number, replica_id=("b", "")[number % 2], ttft_s=9.0)
        promise(log, number)
        end(log, number, replica_id="a", ttft_s=None)
    assert promise(log, 999).predicted_ttft_s == 0.2


def test_a_later_promise_takes_the_place_of_the_first() -> None:
    log = PromiseLog()
    promise(log, 1, "a")
    promise(log, 1, "b")
    end(log, 1, replica_id="b", kept=True)
    assert [row["promised"] for row in told(log, "a", "b")["replicas"]] == [0, 1]


def test_what_is_not_promised_is_left_as_it_is() -> None:
    log = PromiseLog()
    for decision in (
        RouteDecision("a", "placed", Tier.BEST_EFFORT),
        RouteDecision("a", "placed"),
        RouteDecision(None, "unattainable", retry_after_s=1.0),
    ):
        assert log.made(RouteQuery(1, CHAT, 9, request_id=f"{1:032x}"), decision) is decision
    end(log, 1, kept=True)
    assert told(log)["promised"] == 0


def test_all_promises_of_the_last_minutes_are_told_of_and_no_others() -> None:
    log, window_s = PromiseLog(), PERIODS * PERIOD_S
    for number in range(3_000):
        promise(log, number)
        end(log, number, now_s=number / 5, kept=True, replica_id="a")
    found = told(log, "a", now_s=600.0)
    # The oldest period is left out once its beginning is too old.
    assert 5 * (window_s - PERIOD_S) <= found["promised"] <= 5 * window_s
    assert found["promised"] == found["kept"] == found["replicas"][0]["promised"]
    assert found["reliability"]["count"] == CHECKED
    assert told(log, now_s=600.0 + window_s)["promised"] == 0


async def test_the_snapshot_has_it_for_the_replicas_that_are_known() -> None:
    controller = ObservedController(ControllerConfig(promise_level=0.95), Clock())
    await controller.hello(hello("a"))
    name = f"{1:032x}"
    query = RouteQuery(1, CHAT, 100, request_id=name)
    (made,) = (await controller.route([query])).decisions
    assert made.tier is Tier.GUARANTEED
    ending = OK._replace(request_id=name, replica_id="a", kept=False)
    await controller.push_metrics(newer_push("router", ()), [ending])
    found = (await controller.snapshot())["calibration"]
    assert found["level"] == 0.95 and set(found["margins"]) == {"ttft", "tpot", "e2e"}
    assert found["classes"] == [{"class": "chat", "promised": 1, "kept": 0}]
    assert [row["replica_id"] for row in found["replicas"]] == ["a"]
