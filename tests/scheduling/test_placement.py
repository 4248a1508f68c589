"""Decisions: tiers, promises, what they take, and when to come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.calibration import PRIOR, Calibration
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.job import NO_REPLICA, PLACED, UNATTAINABLE, RouteDecision
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from sluice.scheduling.routing import RouteQuery, Tier, most_gain
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import MODEL, fleet_of, report, row

ADMISSIONS = ("moore_hodgson", "pab", "slos_serve")
PROMISED, BEST_EFFORT = frozenset({Tier.GUARANTEED}), frozenset({Tier.BEST_EFFORT})
EASY, HARD = SLO(ttft_s=1.0, tpot_s=0.1), SLO(ttft_s=0.001)


def placer(fleet: Fleet, admission: str | None = "moore_hodgson") -> Placer:
    made = make_admission(admission) if admission is not None else None
    return Placer(fleet, make_routing("least_tokens"), made)


def query(
    slo: SLO = EASY,
    key: int = 1,
    prompt: int = 1_000,
    tiers: frozenset[Tier] = PROMISED | BEST_EFFORT,
) -> RouteQuery:
    return RouteQuery(key, slo, prompt, tiers=tiers)


def full_fleet() -> Fleet:
    """A replica with more promised than it can hold."""
    return fleet_of(report(*[row(EASY, 4_000, key=key) for key in range(3)]))


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_what_can_be_promised_is_and_the_rest_is_best_effort_or_refused(admission: str) -> None:
    held = placer(fleet_of(report()), admission).place(query(), 0.0)
    assert (held.replica_id, held.reason, held.tier) == ("0", PLACED, Tier.GUARANTEED)
    # A step of 10 ms and 1,000 tokens of 101 us.
    assert held.predicted_ttft_s == pytest.approx(MODEL.a + MODEL.work_s(1_000, 0))
    late = placer(full_fleet(), admission).place(query(), 0.0)
    assert (late.reason, late.tier, late.predicted_ttft_s) == (PLACED, Tier.BEST_EFFORT, None)
    refused = placer(full_fleet(), admission).place(query(tiers=PROMISED), 0.0)
    assert (refused.replica_id, refused.reason) == (None, UNATTAINABLE)
    assert refused.retry_after_s is not None
    assert refused.retry_after_s > 0


@pytest.mark.parametrize("admission", ["moore_hodgson", "slos_serve"])
def test_what_could_never_be_held_is_not_asked_to_come_back(admission: str) -> None:
    refused = placer(fleet_of(report()), admission).place(query(HARD, tiers=PROMISED), 0.0)
    assert refused == RouteDecision(None, UNATTAINABLE)


def test_who_asks_for_no_promise_gets_none() -> None:
    for asked in (query(tiers=BEST_EFFORT), query(SLO()), query(SLO(), tiers=PROMISED)):
        fleet = fleet_of(report())
        assert placer(fleet).place(asked, 0.0).tier is Tier.BEST_EFFORT
        assert fleet.figures[0, figure.PROMISED] == 0
    # Without admission nothing is promised, and only who asks for best effort is served as such.
    fleet = fleet_of(report())
    assert placer(fleet, None).place(query(SLO()), 0.0) == RouteDecision("0", PLACED)
    assert placer(fleet, None).place(query(tiers=BEST_EFFORT, key=2), 0.0).tier is Tier.BEST_EFFORT


def test_slos_serve_tests_so_many_replicas_in_turn_and_no_others() -> None:
    full = report(*[row(EASY, 4_000, key=key) for key in range(3)])
    fleet = fleet_of(full, full, report(), full, full)

    def decide(
        hops: int, headroom: float = 0.05, requests: int = 5
    ) -> list[tuple[str | None, bool]]:
        routing = make_routing("slos_serve", {"hops": hops})
        admission = make_admission("slos_serve", {"headroom": headroom})
        decides = Placer(fleet, routing, admission)
        made = []
        for key in range(requests):
            made.append(decides.place(query(key=key, prompt=100), 0.0))
            assert decides.inputs is not None and len(decides.inputs.job.rows) == hops
        fleet.release(range(requests))
        return [(each.replica_id, each.tier is Tier.GUARANTEED) for each in made]

    # It hops to the third replica from the two before it, and from the others to none.
    held = decide(3)
    assert held[:3] == [("2", True)] * 3
    assert [promised for _, promised in held[3:]] == [False, False]
    assert [promised for _, promised in decide(1)] == [False, False, True, False, False]
    # By the options of admission the third replica declines, too.
    assert not any(promised for _, promised in decide(3, headroom=0.999))


def test_nobody_is_there() -> None:
    assert placer(Fleet()).place(query(), 0.0) == RouteDecision(None, NO_REPLICA)


def test_an_aged_replica_promises_nothing() -> None:
    fleet = fleet_of(report())
    aged_s = fleet.settings.aged_after_s
    assert placer(fleet).place(query(), aged_s).tier is Tier.BEST_EFFORT
    refused = placer(fleet).place(query(key=2, tiers=PROMISED), aged_s)
    assert refused.reason == UNATTAINABLE
    assert refused.retry_after_s is not None
    assert refused.retry_after_s > 0


def test_best_effort_goes_where_the_least_work_is_ahead_in_both_tiers() -> None:
    waiting = row(EASY, 500, best_effort=True)
    fleet = fleet_of(report(waiting, waiting), report(row(EASY, 800)), report(waiting))
    assert placer(fleet).place(query(tiers=BEST_EFFORT), 0.0).replica_id == "2"


asked = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.01, 0.2]),
        st.sampled_from([EASY, HARD, SLO(), SLO(ttft_s=0.3), SLO(tpot_s=0.05), SLO(e2e_s=20.0)]),
        st.integers(1, 4_000),
        st.sampled_from([PROMISED, BEST_EFFORT, PROMISED | BEST_EFFORT]),
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("admission", ADMISSIONS)
@settings(max_examples=examples(40))
@given(asked=asked)
def test_decisions_are_those_of_the_promised_alone_and_the_same_again(
    admission: str, asked: list[tuple[float, SLO, int, frozenset[Tier]]]
) -> None:
    """Best-effort requests take nothing from what can be promised, and nothing is drawn."""

    def decide(everybody: bool) -> list[RouteDecision | None]:
        fleet = fleet_of(report(row(EASY, 100, emitted=3, first_token_s=0.0)), report())
        decides, now_s = placer(fleet, admission), 0.0
        made: list[RouteDecision | None] = []
        for key, (after_s, slo, prompt, tiers) in enumerate(asked):
            now_s += after_s
            if now_s >= fleet.settings.aged_after_s:
                break
            decision = None
            if everybody or (tiers == PROMISED and slo != SLO()):
                tiers_ = PROMISED if tiers == PROMISED else BEST_EFFORT
                decision = decides.place(query(slo, key, prompt, tiers=tiers_), now_s)
            made.append(decision)
            if decision is None:
                continue
            assert (decision.replica_id is None) == (decision.reason == UNATTAINABLE)
            assert (decision.predicted_ttft_s is None) == (decision.tier is not Tier.GUARANTEED)
        fleet.release(range(len(asked)))
        assert len(fleet.ledger) == 0
        return made

    first = decide(everybody=True)
    assert decide(everybody=True) == first
    for alone, beside in zip(decide(everybody=False), first, strict=True):
        assert alone is None or alone == beside


def test_the_witness_sees_what_each_decision_is_made_from() -> None:
    fleet = fleet_of(report(), report(row(EASY, 60_000, key=9)))
    decider = Placer(fleet, make_routing("least_tokens"), make_admission("moore_hodgson"))
    assert decider.place(query(EASY), 0.0).replica_id == "0"
    first = decider.inputs
    assert first is not None
    assert first.promises is not None and first.promises.holds.tolist() == [True, False]
    assert first.ahead_s is None and first.known == 2
    assert [first.ids[at] for at in first.job.rows] == ["0", "1"]
    for asked, tier, promises, ahead in (
        (query(HARD, 2), Tier.BEST_EFFORT, True, True),
        (query(HARD, 3, tiers=PROMISED), None, True, False),
        (query(SLO(), 4), Tier.BEST_EFFORT, False, True),
    ):
        assert decider.place(asked, 0.0).tier is tier
        seen = decider.inputs
        assert seen is not None
        assert (seen.promises is not None, seen.ahead_s is not None) == (promises, ahead)


# Many replicas: the nearest are tested first.


def test_where_none_of_the_nearest_can_guarantee_the_others_are_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(most_gain, "NEAREST", 2)
    busy = row(EASY, 1_000, key=9)
    full, behind = report(free_blocks=0), report(busy)
    admission = make_admission("moore_hodgson")
    fleet = fleet_of(behind, full, report(), behind)
    decider = Placer(fleet, make_routing("most_gain"), admission)
    # An idle replica is among the nearest two; the next request finds both of these full.
    assert decider.place(query(), 0.0).replica_id == "2"
    assert decider.inputs is not None and len(decider.inputs.job.rows) == 2
    fleet.report("2", full, 0.0)
    fleet.release([1])
    placed = decider.place(query(key=2), 0.0)
    assert (placed.replica_id, placed.tier) == ("0", Tier.GUARANTEED)
    assert len(decider.inputs.job.rows) == 4


@given(
    queued=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=4, max_size=9),
    nearest=st.integers(1, 3),
    prompt=st.integers(1, 4_000),
    ttft_s=st.sampled_from([0.05, 0.2, 0.5, 1.0]),
)
def test_the_nearest_first_guarantees_what_a_test_of_all_does(
    queued: list[tuple[int, bool]], nearest: int, prompt: int, ttft_s: float
) -> None:
    def decide(first: int) -> RouteDecision:
        reports = (
            report(
                *[row(EASY, 900, key=10 * at + n, emitted=decodes) for n in range(count)],
                free_blocks=100 * count,
            )
            for at, (count, decodes) in enumerate(queued)
        )
        decider = Placer(
            fleet_of(*reports), make_routing("most_gain"), make_admission("moore_hodgson")
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(most_gain, "NEAREST", first)
            return decider.place(query(SLO(ttft_s=ttft_s, tpot_s=0.1), prompt=prompt), 0.0)

    near, of_all = decide(nearest), decide(len(queued))
    assert near.tier == of_all.tier
    if of_all.tier is Tier.BEST_EFFORT:
        assert near == of_all


# Replicas in quarantine, and replicas that have failed the request.


@pytest.mark.parametrize("asked", [query(), query(SLO()), query(tiers=BEST_EFFORT)])
@pytest.mark.parametrize("admission", ["moore_hodgson", None])
def test_one_to_be_tried_gets_the_next_request(asked: RouteQuery, admission: str | None) -> None:
    fleet = fleet_of(report(), report(row(prompt=4_000)), report())
    fleet.quarantine("1", untried=True)
    assert placer(fleet, admission).place(asked, 0.0).replica_id == "1"
    fleet.quarantine("1")
    assert placer(fleet, admission).place(asked._replace(key=2), 0.0).replica_id == "0"


def test_one_to_be_tried_gets_no_request_that_it_cannot_hold_or_that_failed_elsewhere() -> None:
    fleet = fleet_of(report(), report(*[row(EASY, 4_000, key=key) for key in range(3)]))
    fleet.quarantine("1", untried=True)
    placed = placer(fleet).place(query(), 0.0)
    assert (placed.replica_id, placed.tier) == ("0", Tier.GUARANTEED)
    fleet = fleet_of(report(), report(row(prompt=4_000)), report())
    fleet.quarantine("1", untried=True)
    assert placer(fleet).place(query()._replace(avoid=("0",)), 0.0).replica_id == "2"


def test_a_replica_that_has_failed_the_request_is_left_out_where_there_are_others() -> None:
    fleet = fleet_of(report(), report(row(prompt=4_000)))
    assert placer(fleet).place(query()._replace(avoid=("0",)), 0.0).replica_id == "1"
    assert placer(fleet).place(query(key=2)._replace(avoid=("who?",)), 0.0).replica_id == "0"
    tried = query(key=3)._replace(avoid=("1", "0"))
    assert placer(fleet).place(tried, 0.0).replica_id == "0", "once more is better than not at all"


def test_a_request_goes_to_no_other_replica_than_those_that_it_is_restricted_to() -> None:
    fleet = fleet_of(report(), report(row(prompt=4_000)), report())
    within = query()._replace(only=("1",))
    assert placer(fleet).place(within, 0.0).replica_id == "1"
    assert placer(fleet).place(within._replace(key=2, avoid=("1",)), 0.0).replica_id == "1"
    nowhere = placer(fleet).place(query(key=3)._replace(only=("who?",)), 0.0)
    assert (nowhere.replica_id, nowhere.reason) == (None, NO_REPLICA)
    pairs = fleet_of(*[report(role=each) for each in ("prefill", "prefill", "decode", "decode")])
    placed = placer(pairs).place(query()._replace(prefill_key=9, only=("1", "3")), 0.0)
    assert (placed.prefill_id, placed.replica_id) == ("1", "3")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_half_of_a_pair_is_tried_too(role: Role) -> None:
    roles: list[Role] = ["prefill", "prefill", "decode", "decode"]
    fleet = fleet_of(*[report(role=each) for each in roles])
    tried = {"prefill": "1", "decode": "3"}[role]
    fleet.quarantine(tried, untried=True)
    placed = placer(fleet).place(query()._replace(prefill_key=9), 0.0)
    assert placed.prefill_id == ("1" if role == "prefill" else "0")
    assert placed.replica_id == ("3" if role == "decode" else "2")


def test_a_role_that_is_quarantined_whole_is_as_if_it_were_not_there() -> None:
    fleet = fleet_of(report(role="prefill"), report(role="decode"))
    fleet.quarantine("1")
    placed = placer(fleet).place(query()._replace(prefill_key=9), 0.0)
    assert (placed.replica_id, placed.prefill_id) == ("0", None)


# Margins.


def calibrated(*late: float) -> tuple[Placer, Calibration]:
    """A placer of one idle replica, after promises of ``EASY``, made with the margin of the
    beginning, that took so many times their TTFT."""
    calibration = Calibration(0.99)
    planned = calibration.plan(EASY, 0.0)
    for number, factor in enumerate(late):
        calibration.promised(f"before-{number}", EASY, planned)
        calibration.ended(f"before-{number}", factor * 1.0, 0.09, None, 0.0)
    fleet = fleet_of(report())
    made = make_admission("moore_hodgson")
    return Placer(fleet, make_routing("least_tokens"), made, calibration), calibration


def test_a_promise_is_planned_by_so_much_earlier_as_those_before_it_were_late() -> None:
    decider, _ = calibrated()
    assert decider.place(query(), 0.0).planned == (1.0 - PRIOR, 0.1 * (1.0 - PRIOR), None)
    decider, _ = calibrated(*[1.04] * 20)
    made = decider.place(query(), 0.0)
    assert made.tier is Tier.GUARANTEED
    assert made.planned == (pytest.approx((1.0 - PRIOR) / 1.04), 0.1 * (1.0 - PRIOR), None)
    # What could be held by its objective, but not by the plan, is not promised: it would be late.
    tight = SLO(ttft_s=0.15)
    assert calibrated()[0].place(query(tight), 0.0).tier is Tier.GUARANTEED
    decider, calibration = calibrated()
    for number in range(20):
        calibration.promised(number, tight, calibration.plan(tight, 0.0))
        calibration.ended(number, 0.2, None, None, 0.0)
    assert decider.place(query(tight), 0.0).tier is Tier.BEST_EFFORT


def apart(replica_id: str, other: str) -> Calibration:
    """A replica has taken 1.25 times the TTFT that was planned, another one kept to it."""
    calibration = Calibration(0.99)
    for number in range(30):
        for name, late in ((replica_id, 1.25), (other, 0.9)):
            planned = calibration.plan(EASY, 0.0, name)
            assert planned.ttft_s is not None
            calibration.promised(number, EASY, planned, name)
            calibration.ended(number, late * planned.ttft_s, 0.09, None, 0.0)
    assert list(calibration.apart) == [replica_id]
    return calibration


@pytest.mark.parametrize("slow", ["0", "1"])
def test_a_replica_that_is_set_apart_promises_by_margins_of_its_own(slow: str) -> None:
    other = "1" if slow == "0" else "0"
    fleet = fleet_of(report(), report())
    made = make_admission("moore_hodgson")
    decider = Placer(fleet, make_routing("least_tokens"), made, apart(slow, other))
    planned = {}
    for key in range(1, 3):  # one each, as the second goes where there is less to do
        decision = decider.place(query(key=key), 0.0)
        assert decision.tier is Tier.GUARANTEED and decision.replica_id is not None
        planned[decision.replica_id] = decision.planned
    paces = (0.1 * (1.0 - PRIOR), None)
    assert planned == {other: (1.0 - PRIOR, *paces), slow: (pytest.approx(0.8), *paces)}
    # A prefill of 0.7 s: by the margin of the other each could hold one, so two could be promised.
    decider = Placer(
        fleet_of(report(), report()), make_routing("least_tokens"), made, apart(slow, other)
    )
    tight = SLO(ttft_s=0.95, tpot_s=0.1)
    found = [decider.place(query(tight, key=key, prompt=7_000), 0.0) for key in range(1, 3)]
    assert [each.tier for each in found] == [Tier.GUARANTEED, Tier.BEST_EFFORT]
    assert found[0].replica_id == other


def test_only_promises_teach_and_each_of_them_once() -> None:
    decider, calibration = calibrated()
    for key in range(20):
        decider.place(query(SLO(ttft_s=0.001), key=key + 1), 0.0)  # best effort
        calibration.ended(key + 1, 5.0, None, None, 0.0)
    assert calibration.margin("ttft", 0.001, 0.0) == PRIOR
    made = decider.place(query(key=99), 0.0)
    assert made.tier is Tier.GUARANTEED
    for _ in range(20):
        calibration.ended(99, 5.0, 5.0, None, 0.0)
    assert (calibration.margin("ttft", 1.0, 0.0), calibration.margin("tpot", 0.1, 0.0)) == (
        PRIOR,
        PRIOR,
    )
