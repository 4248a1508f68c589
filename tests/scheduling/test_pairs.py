"""Requests whose prompt one replica computes for another: which two, and what each gives."""

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
from sluice.scheduling.fleet.report import Report, Reservation
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.job import PLACED, UNATTAINABLE, RouteDecision
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import ROLES, Role
from sluice.scheduling.routing import POLICIES as ROUTERS
from sluice.scheduling.routing import RouteQuery, Tier
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import MODEL, fleet_of, report, row

PROMISED, BEST_EFFORT = frozenset({Tier.GUARANTEED}), frozenset({Tier.BEST_EFFORT})
EASY = SLO(ttft_s=1.0, tpot_s=0.1)
PROMPT = 1_000


def query(
    key: int = 1,
    slo: SLO = EASY,
    prompt: int = PROMPT,
    tiers: frozenset[Tier] = PROMISED | BEST_EFFORT,
    split: bool = True,
) -> RouteQuery:
    prefill_key = key + 1_000 if split else 0
    return RouteQuery(key, slo, prompt, tiers=tiers, prefill_key=prefill_key)


def placer(
    fleet: Fleet, admission: str | None = "moore_hodgson", router: str = "least_work"
) -> Placer:
    made = make_admission(admission) if admission is not None else None
    return Placer(fleet, make_routing(router), made)


def roles(*given: Role) -> Fleet:
    """A fleet of idle replicas with these roles."""
    return fleet_of(*[report(role=role) for role in given])


def busy(role: Role, prompts: int) -> Report:
    """A replica with so many long prompts to compute, each promised."""
    return report(*[row(EASY, 3_000, key=900 + key) for key in range(prompts)], role=role)


def kv_transfer_s(fleet: Fleet, prompt: int = PROMPT) -> float:
    """Of a prompt to an idle decode replica."""
    return fleet.transfer.seconds(prompt) + TRANSFER_STEPS * (MODEL.a + MODEL.work_s(1, prompt - 1))


def test_a_pair_is_chosen_and_reserved_on_both_sides() -> None:
    fleet = roles("prefill", "decode")
    made = placer(fleet).place(query(), 0.0)
    assert (made.prefill_id, made.replica_id, made.role) == ("0", "1", "decode")
    assert (made.reason, made.tier) == (PLACED, Tier.GUARANTEED)
    assert made.kv_transfer_s == pytest.approx(kv_transfer_s(fleet))
    prefill_s = MODEL.a + MODEL.work_s(PROMPT, 0)
    assert made.predicted_ttft_s == pytest.approx(prefill_s + made.kv_transfer_s)
    # The prompt's work is at the first, without a decode later; the KV and the decode at the other.
    first, second = fleet.figures[0], fleet.figures[1]
    assert (first[figure.TOKENS], first[figure.LOADS]) == (PROMPT, 0)
    assert (second[figure.TOKENS], second[figure.LOADS]) == (1, 1)
    assert second[figure.NEEDED_BLOCKS] == -(-PROMPT // 16)
    (due_s,) = fleet.prefills[fleet.starts[0] : fleet.starts[0] + 1, figure.PREFILL_DUE_S]
    assert due_s == pytest.approx(1.0 - made.kv_transfer_s)
    assert 1 in fleet.ledger
    assert 1_001 in fleet.ledger


def test_a_prompt_that_another_replica_goes_on_with_brings_no_decode_later() -> None:
    # What a prefill replica reports of it: one token is all that it will make.
    fleet = fleet_of(report(row(EASY, PROMPT, expected=1), role="prefill"), report(row(EASY)))
    assert fleet.figures[:2, figure.LOADS].tolist() == [0, 1]
    assert fleet.figures[:2, figure.QUEUED].tolist() == [1, 1]


@pytest.mark.parametrize("reported", [True, False])
def test_the_decode_of_a_prompt_that_is_late_begins_no_earlier_than_now(reported: bool) -> None:
    # Ten seconds of a decode that has not begun are no work that was done.
    now_s, slo = 10.0, SLO(ttft_s=0.5, tpot_s=0.05)
    late = row(slo, 1, arrival_s=0.0)
    fleet = fleet_of(report(*([late] if reported else []), made_s=now_s, role="decode"))
    if not reported:
        made = Reservation("0", 0.0, True, 1.0, 0.0, 1.0, 0.5, 0.05, 1.0, 100.0, now_s)
        fleet.reserve(5, made)
        fleet.report("0", report(made_s=now_s, role="decode"), now_s)
    loads = fleet.loads[fleet.starts[0] :][:1]
    assert loads[0, figure.LOAD_DUE_S] == now_s
    assert figure.capacity_s(fleet.figures[0], loads, now_s + 1.0) > 0.5


def test_the_decode_side_is_kept_until_the_prompt_is_due() -> None:
    fleet = roles("prefill", "decode")
    slow = SLO(ttft_s=60.0, tpot_s=0.1)
    placer(fleet).place(query(slo=slow), 0.0)
    ttl_s = fleet.settings.reservation_ttl_s
    fleet.expire(ttl_s)
    assert 1_001 not in fleet.ledger
    assert 1 in fleet.ledger
    fleet.expire(60.0 + ttl_s)
    assert len(fleet.ledger) == 0
    assert fleet.figures[1, figure.RESERVED] == 0


@pytest.mark.parametrize(
    ("there", "split", "serves"),
    [
        (("mixed", "prefill", "decode"), False, "mixed"),
        (("prefill", "decode"), False, "decode"),
        (("prefill", "prefill"), False, "prefill"),
        (("prefill", "prefill"), True, "prefill"),
        (("decode", "decode"), True, "decode"),
        (("decode", "mixed"), True, "mixed"),
        (("mixed", "prefill"), True, "mixed"),
    ],
)
def test_what_cannot_be_split_is_served_whole(
    there: tuple[Role, ...], split: bool, serves: Role
) -> None:
    fleet = roles(*there)
    made = placer(fleet).place(query(split=split), 0.0)
    assert made.prefill_id is None
    assert made.role == serves == there[int(made.replica_id or 0)]
    assert (made.kv_transfer_s, len(fleet.ledger)) == (0.0, 1)


@pytest.mark.parametrize("admission", [*ADMISSIONS, None])
def test_it_goes_where_its_objective_is_met(admission: str | None) -> None:
    # The mixed replica is behind: the pair.
    fleet = fleet_of(busy("mixed", 3), report(role="prefill"), report(role="decode"))
    assert placer(fleet, admission).place(query(), 0.0).prefill_id == "1"
    # The prefill replica is behind: the mixed one.
    fleet = fleet_of(report(), busy("prefill", 3), report(role="decode"))
    made = placer(fleet, admission).place(query(), 0.0)
    assert (made.replica_id, made.prefill_id) == ("0", None)


def test_a_pair_promises_only_what_its_decode_side_can_hold_too() -> None:
    full = report(role="decode", free_blocks=10)
    fleet = fleet_of(report(role="prefill"), full)
    refused = placer(fleet).place(query(tiers=PROMISED), 0.0)
    assert refused.reason == UNATTAINABLE
    assert refused.retry_after_s is not None
    assert placer(fleet).place(query(), 0.0).tier is Tier.BEST_EFFORT
    # One that has the room is chosen, whoever has more of it by the policy's own measure.
    fleet = fleet_of(report(role="prefill"), full, report(role="decode", free_blocks=500))
    assert placer(fleet).place(query(), 0.0).replica_id == "2"
    # And a mixed replica, where no decode one has.
    fleet = fleet_of(busy("mixed", 1), report(role="prefill"), full)
    made = placer(fleet).place(query(tiers=PROMISED), 0.0)
    assert (made.replica_id, made.prefill_id) == ("0", None)


def test_the_transfer_counts_in_the_promise() -> None:
    prefill_s = MODEL.a + MODEL.work_s(PROMPT, 0)
    fleet = roles("prefill", "decode")
    enough_s = (prefill_s + kv_transfer_s(fleet)) / 0.9
    for ttft_s, can in ((enough_s * 1.05, True), (enough_s * 0.95, False)):
        fleet = roles("prefill", "decode")
        made = placer(fleet).place(query(slo=SLO(ttft_s=ttft_s), tiers=PROMISED), 0.0)
        assert (made.replica_id is not None) == can
    # Whole on a mixed replica it is early enough.
    fleet = roles("mixed", "prefill", "decode")
    made = placer(fleet).place(query(slo=SLO(ttft_s=enough_s * 0.95), tiers=PROMISED), 0.0)
    assert made.role == "mixed"


def test_one_that_asks_again_and_goes_elsewhere_leaves_nothing_behind() -> None:
    fleet = roles("prefill", "decode")
    placer(fleet).place(query(), 0.0)
    fleet.close("0")
    made = placer(fleet).place(query(), 0.0)
    assert (made.replica_id, made.prefill_id) == ("1", None)
    assert len(fleet.ledger) == 1
    assert fleet.figures[0, figure.RESERVED] == 0


def test_the_witness_sees_both_sides() -> None:
    fleet = roles("mixed", "prefill", "decode", "decode")
    decides = Placer(fleet, make_routing("least_work"), make_admission("pab"))
    decides.place(query(), 0.0)
    weighed = decides.inputs
    assert weighed is not None
    assert [weighed.ids[at] for at in weighed.job.rows] == ["0", "1"]
    assert weighed.job.splits.tolist() == [False, True]
    assert weighed.second is not None
    assert [weighed.ids[at] for at in weighed.second.job.rows] == ["2", "3"]


some_row = st.builds(
    lambda prompt, emitted, best_effort: row(
        EASY, prompt, emitted=emitted, first_token_s=0.0 if emitted else float("nan"),
        best_effort=best_effort,
    ),
    st.integers(10, 3_000), st.sampled_from([0, 0, 5]), st.booleans(),
)  # fmt: skip
some_report = st.builds(
    lambda rows, role, free: report(*rows, role=role, free_blocks=free),
    st.lists(some_row, max_size=4), st.sampled_from(ROLES), st.sampled_from([20, 500, 10_000]),
)  # fmt: skip
some_query = st.tuples(
    st.sampled_from([EASY, SLO(), SLO(ttft_s=0.25), SLO(tpot_s=0.05), SLO(e2e_s=20.0)]),
    st.integers(0, 4_000),
    st.sampled_from([PROMISED, BEST_EFFORT, PROMISED | BEST_EFFORT]),
    st.booleans(),
)


def check(fleet: Fleet, made: RouteDecision, asked: RouteQuery, there: list[Report]) -> None:
    """What holds of every decision."""
    if made.replica_id is None:
        assert made.prefill_id is None
        return
    assert made.role == there[int(made.replica_id)].role
    assert asked.key in fleet.ledger
    held = {report.role for report in there}
    if made.prefill_id is None:
        first: Role = next(role for role in ("mixed", "decode", "prefill") if role in held)
        assert made.role == first
        assert made.kv_transfer_s == 0
        assert asked.prefill_key not in fleet.ledger
        return
    assert made.prefill_id != made.replica_id
    assert (there[int(made.prefill_id)].role, made.role) == ("prefill", "decode")
    assert asked.prefill_key in fleet.ledger
    assert made.kv_transfer_s > 0
    if made.tier is Tier.GUARANTEED:
        assert made.predicted_ttft_s is not None
        assert made.predicted_ttft_s > made.kv_transfer_s


@pytest.mark.parametrize("admission", [*ADMISSIONS, None])
@settings(max_examples=examples(60))
@given(
    there=st.lists(some_report, min_size=1, max_size=5),
    asked=st.lists(some_query, min_size=1, max_size=6),
    router=st.sampled_from(sorted(ROUTERS)),
)
def test_every_decision_is_a_pair_or_a_replica_and_all_that_it_takes_ends(
    admission: str | None,
    there: list[Report],
    asked: list[tuple[SLO, int, frozenset[Tier], bool]],
    router: str,
) -> None:
    fleet = fleet_of(*there)
    before = fleet.figures.copy()
    decides = placer(fleet, admission, router)
    for key, (slo, prompt, tiers, split) in enumerate(asked, start=1):
        wanted = query(key, slo, prompt, tiers, split)
        made = decides.place(wanted, 0.01 * key)
        check(fleet, made, wanted, there)
        if made.prefill_id is not None:
            assert split
    reserved = fleet.figures[:, figure.RESERVED].sum()
    assert reserved == len(fleet.ledger)
    keys = range(1, len(asked) + 1)
    fleet.release(keys)
    fleet.release(key + 1_000 for key in keys)
    assert len(fleet.ledger) == 0
    np.testing.assert_array_equal(fleet.figures, before)


@settings(max_examples=examples(60))
@given(there=st.lists(some_report, min_size=2, max_size=5), asked=some_query)
def test_a_pair_that_promises_is_one_of_which_both_can(
    there: list[Report], asked: tuple[SLO, int, frozenset[Tier], bool]
) -> None:
    slo, prompt, _, _ = asked
    fleet = fleet_of(*there)
    admission = make_admission("moore_hodgson")
    decides = Placer(fleet, make_routing("most_gain"), admission)
    made = decides.place(query(1, slo, prompt), 0.0)
    if made.prefill_id is None or made.tier is not Tier.GUARANTEED:
        return
    weighed = decides.inputs
    assert weighed is not None
    second = weighed.second
    assert second is not None
    assert second.promises is not None
    assert weighed.promises is not None
    places = {weighed.ids[at]: place for place, at in enumerate(weighed.job.rows)}
    assert weighed.promises.holds[places[made.prefill_id]]
    assert second.promises.holds[second.chosen]
