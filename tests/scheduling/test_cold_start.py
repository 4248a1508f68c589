"""A model without a replica: what is predicted, who waits and who is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.cold_start import LATE_PART, MEASURED, ColdStart
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.job import NO_REPLICA, PLACED, UNATTAINABLE, RouteDecision, Tier
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import MODEL, fleet_of, report

STARTUP_S = 40.0
PROMISED = frozenset({Tier.GUARANTEED})
PROMPT_S = MODEL.a + MODEL.work_s(1_000, 0)


def placer(fleet: Fleet | None = None, admission: bool = True, settled_s: float = 0.0) -> Placer:
    made = make_admission("moore_hodgson") if admission else None
    cold = ColdStart(STARTUP_S, settled_s)
    return Placer(
        Fleet() if fleet is None else fleet, make_routing("least_tokens"), made, cold_start=cold
    )


def once_served() -> Fleet:
    """A fleet whose one replica has left."""
    fleet = fleet_of(report())
    fleet.leave("0")
    return fleet


def query(ttft_s: float | None, key: int = 1, waited_s: float = 0.0, **more: object) -> RouteQuery:
    fields = {"tiers": PROMISED, **more}
    return RouteQuery(key, SLO(ttft_s=ttft_s), 1_000, waited_s, **fields)  # type: ignore[arg-type]


def test_a_first_token_is_predicted_after_the_start_and_the_prompts_before_it() -> None:
    decides = placer(once_served())
    first = decides.place(query(60.0), 0.0)
    assert (first.reason, first.replica_id, first.tier) == (NO_REPLICA, None, None)
    assert first.starts_in_s == STARTUP_S
    assert first.predicted_ttft_s == pytest.approx(STARTUP_S + PROMPT_S)
    second = decides.place(query(60.0, key=2), 10.0)
    assert second.starts_in_s == 30.0
    assert second.predicted_ttft_s == pytest.approx(30.0 + 2 * PROMPT_S)
    # One that asks again keeps its place.
    again = decides.place(query(60.0, waited_s=20.0), 20.0)
    assert again.predicted_ttft_s == pytest.approx(20.0 + PROMPT_S)


def test_too_short_a_ttft_is_refused_with_when_to_retry_or_waits_as_best_effort() -> None:
    decides = placer()
    refused = decides.place(query(39.9), 0.0)
    assert refused.reason == UNATTAINABLE
    assert refused.retry_after_s == refused.room_s == refused.starts_in_s == STARTUP_S
    either = decides.place(query(39.9, key=2, tiers=frozenset(Tier)), 0.0)
    assert (either.reason, either.starts_in_s) == (NO_REPLICA, STARTUP_S)
    assert decides.place(query(40.1, key=3), 0.0).reason == NO_REPLICA
    # The time that it has waited counts, and so does that of the start.
    assert decides.place(query(39.9, key=4), 5.0).reason == NO_REPLICA
    assert decides.place(query(39.9, key=5, waited_s=5.0), 5.0).reason == UNATTAINABLE


def test_what_needs_no_promise_waits() -> None:
    assert placer().place(query(None), 0.0).reason == NO_REPLICA
    assert placer(admission=False).place(query(0.1), 0.0).reason == NO_REPLICA


def test_what_an_idle_replica_could_not_hold_is_not_asked_to_come_back() -> None:
    refused = placer(once_served()).place(query(PROMPT_S / 2), 0.0)
    assert (refused.reason, refused.retry_after_s) == (UNATTAINABLE, None)
    assert refused.starts_in_s == STARTUP_S


def test_the_longest_of_the_measured_starts_is_predicted() -> None:
    cold, fleet = ColdStart(STARTUP_S), Fleet()

    def start(took_s: float, now_s: float) -> None:
        cold.decide(query(None), fleet, now_s, 10.0, False)
        cold.served(now_s + took_s)

    start(12.0, 0.0)
    assert (cold.startup_s, cold.done) == (12.0, 1)
    start(20.0, 100.0)
    for number in range(MEASURED):
        assert cold.startup_s == 20.0
        start(15.0, 200.0 + 100 * number)
    assert cold.startup_s == 15.0
    # A replica that registers where none was awaited says nothing.
    cold.served(5_000.0)
    assert cold.done == 2 + MEASURED


def test_a_start_that_takes_longer_than_predicted_is_never_predicted_to_end_now() -> None:
    decides = placer()
    decides.place(query(None), 0.0)
    late = decides.place(query(None, key=2), 100.0)
    assert late.starts_in_s == LATE_PART * STARTUP_S


def test_replicas_that_may_be_there_are_no_cold_start() -> None:
    # A controller that has just been restarted has not heard of them.
    assert placer(settled_s=5.0).place(query(0.1), 4.9) == RouteDecision(None, NO_REPLICA)
    # One that is silent may be back in a moment; one that an operator has closed is there.
    fleet = fleet_of(report())
    assert placer(fleet).place(query(0.1), 10.0) == RouteDecision(None, NO_REPLICA)
    fleet.close("0")
    assert placer(fleet).place(query(0.1), 0.0) == RouteDecision(None, NO_REPLICA)


def test_with_the_replica_it_is_decided_as_ever() -> None:
    fleet = Fleet()
    decides = placer(fleet)
    assert decides.place(query(60.0), 0.0).starts_in_s == STARTUP_S
    fleet.report("a", report(made_s=41.0), 41.0)
    held = decides.place(query(60.0, waited_s=41.0), 41.0)
    assert (held.reason, held.tier, held.starts_in_s) == (PLACED, Tier.GUARANTEED, None)
    # One that is leaving counts for nothing.
    fleet.report("a", report(made_s=50.0, draining=True), 50.0)
    assert decides.place(query(60.0, key=2), 50.0).starts_in_s is not None


@settings(max_examples=examples(50))
@given(
    st.lists(
        st.tuples(st.floats(0.01, 200), st.floats(0, 30), st.floats(0, 20), st.booleans()),
        min_size=1,
        max_size=20,
    )
)
def test_who_waits_may_be_in_time_by_the_prediction_and_who_is_refused_may_not(
    asked: list[tuple[float, float, float, bool]],
) -> None:
    """Each: its TTFT, how long it has waited, when after the one before, and whether it may be
    served as best effort."""
    decides, now_s = placer(once_served()), 0.0
    for key, (ttft_s, waited_s, after_s, lenient) in enumerate(asked):
        now_s += after_s
        tiers = frozenset(Tier) if lenient else PROMISED
        found = decides.place(query(ttft_s, key, waited_s, tiers=tiers), now_s)
        assert found.starts_in_s is not None and found.predicted_ttft_s is not None
        assert 0 < found.starts_in_s < found.predicted_ttft_s
        in_time = waited_s + found.predicted_ttft_s <= ttft_s
        assert (found.reason == UNATTAINABLE) == (not in_time and not lenient)
