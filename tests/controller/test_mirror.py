from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.controller.state.mirror import Mirror
from sluice.controller.transport.checks import checked_delta
from sluice.scheduling.fleet import report as fleet_report
from sluice.scheduling.fleet import rows as fleet_rows
from sluice.scheduling.fleet.fleet import Fleet, FleetSettings
from sluice.scheduling.fleet.state import ROW
from tests.controller.fleet import decode_row, delta, free_row, hello, waiting_row

EPOCH = 7


def make_mirror() -> tuple[Mirror, Fleet]:
    fleet = Fleet(FleetSettings(aged_after_s=1, stale_after_s=2))
    return Mirror(EPOCH, fleet, forget_after_s=30), fleet


def live_keys(mirror: Mirror, replica_id: str) -> list[int]:
    table = mirror.replicas[replica_id].table
    return sorted(table["key"][table["phase"] > 0].tolist())


def figure(fleet: Fleet, replica_id: str, name: str) -> float:
    return float(fleet.figures[fleet.row_of[replica_id], getattr(fleet_rows, name)])


def test_a_hello_brings_the_whole_queue() -> None:
    mirror, fleet = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300), decode_row(2, 500)], now_s=50), now_s=80)
    names = ("WAITING", "RUNNING", "TOKENS", "CONTEXT", "FREE_BLOCKS", "TOTAL_BLOCKS")
    assert [figure(fleet, "a", name) for name in names] == [1, 1, 300, 500, 900, 1_000]
    assert mirror.replicas["a"].offset_s == 30


def test_a_time_in_whole_seconds_does_not_have_the_loops_compiled_anew() -> None:
    mirror, _ = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300)], now_s=50.0), now_s=80.0)
    known = len(fleet_report.fold.signatures)
    mirror.hello(hello("b", [waiting_row(1, 300)], now_s=50), now_s=80.0)
    mirror.delta(delta("b", EPOCH, 1, {0: waiting_row(2, 10)}, now_s=51), now_s=81.0)
    assert len(fleet_report.fold.signatures) == known


def test_the_clocks_differ_by_what_the_quickest_report_told() -> None:
    mirror, _ = make_mirror()
    mirror.hello(hello("a", now_s=50), now_s=80.2)
    mirror.delta(delta("a", EPOCH, 1, now_s=51), now_s=81)
    assert mirror.replicas["a"].offset_s == 30
    # A later one that took longer does not move it.
    mirror.delta(delta("a", EPOCH, 2, now_s=60), now_s=91)
    assert mirror.replicas["a"].offset_s == 30


def test_deadlines_are_on_the_controllers_clock() -> None:
    mirror, fleet = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300, arrival_s=49)], now_s=50), now_s=80)
    first = fleet.prefills[fleet.starts[fleet.row_of["a"]]]
    assert first[fleet_rows.PREFILL_DUE_S] == 49 + 1 + 30


def test_the_prefill_budget_is_that_of_the_model() -> None:
    mirror, fleet = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300)]), now_s=0)
    # No decode: one step's fixed time, the rest at b + c a token, less what is queued.
    assert fleet.budgets_s(np.array([fleet.row_of["a"]]), 0.0) == pytest.approx(
        0.996 - 300 * 0.000101
    )


def test_nothing_waits_for_the_step_of_a_replica_that_preempts() -> None:
    mirror, fleet = make_mirror()
    queue = [waiting_row(1, 300)]
    mirror.hello(hello("a", queue), now_s=1)
    mirror.hello(hello("b", queue, preempts=True), now_s=1)
    step_s = [figure(fleet, of, "STEP_ENDS_S") - figure(fleet, of, "BEGUN_S") for of in "ab"]
    assert step_s == [pytest.approx(0.004 + 0.000101 * 300), 0.0]


def test_the_batches_in_flight_end_before_the_queue_is_worked_on() -> None:
    """With asynchronous scheduling the next batch runs already when the end of one is reported."""
    mirror, fleet = make_mirror()
    queue = [waiting_row(1, 300)]
    for name, next_begins_s in (("a", 0.0), ("b", 1.2), ("c", 1e9)):
        made = hello(name, queue, now_s=1)
        made.summary["updated_s"], made.summary["next_begins_s"] = 1.0, next_begins_s
        mirror.hello(made, now_s=1)
    begun_s = [figure(fleet, of, "BEGUN_S") for of in "abc"]
    assert begun_s == pytest.approx([1.0, 1.2, 1.0 + fleet_report.MAX_STEP_S])
    rows = np.array([fleet.row_of[of] for of in "ab"])
    budget_s, later_s = fleet.budgets_s(rows, 1.0)
    assert budget_s - later_s == pytest.approx(0.2)


def test_the_time_until_a_prefill_has_stopped_for_decodes_is_known() -> None:
    mirror, fleet = make_mirror()
    made = hello("a", preempts=True)
    made.summary["planned_stop_s"] = 0.012
    mirror.hello(made, now_s=1)
    assert figure(fleet, "a", "STOP_S") == 0.012


def test_what_an_idle_replica_has_learned_of_slow_steps_fades() -> None:
    mirror, fleet = make_mirror()
    slow = hello("a", now_s=0)
    slow.summary["correction"] = slow.summary["fixed_correction"] = 20.0
    mirror.hello(slow, now_s=0)
    assert figure(fleet, "a", "FIXED_S") == pytest.approx(0.004 * 20)
    for seq, now_s in ((1, 10), (2, 100)):
        later = delta("a", EPOCH, seq, now_s=now_s)
        later.summary["correction"] = later.summary["fixed_correction"] = 20.0
        mirror.delta(later, now_s=now_s)
        faded = 1 + 19 * np.exp(-now_s / 10)
        assert figure(fleet, "a", "FIXED_S") == pytest.approx(0.004 * faded)
    # While it works, its own figure counts.
    busy = delta("a", EPOCH, 3, {0: waiting_row(1, 100)}, now_s=101)
    busy.summary["correction"] = busy.summary["fixed_correction"] = 20.0
    mirror.delta(busy, now_s=101)
    assert figure(fleet, "a", "FIXED_S") == pytest.approx(0.004 * 20)


def test_a_replica_whose_steps_spread_beyond_what_is_tolerated_promises_less() -> None:
    mirror, fleet = make_mirror()
    mirror.hello(hello("a", now_s=0), now_s=0)
    decisive = ("FIXED_S", "PREFILL_S")
    found = []
    for seq, (spread, fixed) in enumerate(((0.0, 1.0), (0.25, 1.0), (0.45, 1.0), (0.0, 2.0)), 1):
        later = delta("a", EPOCH, seq, {0: waiting_row(1, 100)}, now_s=seq)
        later.summary["step_spread"], later.summary["fixed_correction"] = spread, fixed
        mirror.delta(later, now_s=seq)
        found.append([figure(fleet, "a", name) for name in decisive])
    exact, tolerated, careful, slow = found
    assert tolerated == exact
    assert careful == pytest.approx([1.2 * value for value in exact])
    assert slow == pytest.approx([2 * exact[0], exact[1]]), "the tokens cost as much as before"


def test_a_request_that_lost_its_kv_is_prefill_again() -> None:
    row = decode_row(1, 500)
    row["pending_tokens"] = 501
    row["computed_tokens"] = 0
    mirror, fleet = make_mirror()
    mirror.hello(hello("a", [row]), now_s=0)
    assert figure(fleet, "a", "TOKENS") == 501
    assert figure(fleet, "a", "CONTEXT") == 0


@pytest.mark.parametrize(
    ("replica_id", "epoch", "seq"),
    [("b", EPOCH, 1), ("a", EPOCH + 1, 1), ("a", EPOCH, 0), ("a", EPOCH, 2)],
    ids=["unknown replica", "other epoch", "repeated", "gap"],
)
def test_a_delta_out_of_order_changes_nothing(replica_id: str, epoch: int, seq: int) -> None:
    mirror, fleet = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300)]), now_s=0)
    assert not mirror.delta(delta(replica_id, epoch, seq, {0: free_row()}), now_s=1)
    assert figure(fleet, "a", "TOKENS") == 300
    assert mirror.replicas["a"].received_s == 0
    assert list(mirror.replicas) == ["a"]


def _bad_row(**fields: object) -> np.ndarray:
    row = waiting_row(1, 10)
    for name, value in fields.items():
        row[name] = value
    return row


BAD_DELTAS: dict[str, tuple[dict[str, Any], str]] = {
    "slot out of range": ({"slots": np.array([64])}, "slots must be from 0 to 63"),
    "negative slot": ({"slots": np.array([-1])}, "slots must be from 0 to 63"),
    "slots a list": ({"slots": [0]}, r"report.slots: expected `numpy.ndarray`, got \[0\]"),
    "fewer rows": ({"slots": np.array([0, 1])}, "one per slot"),
    "slot twice": (
        {"slots": np.array([3, 3]), "rows": np.zeros(2, ROW)},
        "appears twice",
    ),
    "rows of another type": ({"rows": np.zeros(1, np.int32)}, "row type"),
    "unknown phase": ({"rows": np.array([_bad_row(phase=3)])}, "phase must be"),
    "negative pending": ({"rows": np.array([_bad_row(pending_tokens=-1)])}, "at least 0"),
    "negative key": ({"rows": np.array([_bad_row(key=-1)])}, "key"),
    "arrival nan": ({"rows": np.array([_bad_row(arrival_s=np.nan)])}, "arrival"),
    "first token inf": ({"rows": np.array([_bad_row(first_token_s=np.inf)])}, "first_token_s"),
    "last token inf": ({"rows": np.array([_bad_row(last_token_s=-np.inf)])}, "last_token_s"),
    "tier 2": ({"rows": np.array([_bad_row(best_effort=2)])}, "best_effort"),
    "e2e negative": ({"rows": np.array([_bad_row(e2e_s=-1)])}, "e2e_s"),
    "ttft zero": ({"rows": np.array([_bad_row(ttft_s=0)])}, "ttft_s"),
    "tpot nan": ({"rows": np.array([_bad_row(tpot_s=np.nan)])}, "tpot_s"),
}


@pytest.mark.parametrize("case", BAD_DELTAS)
def test_a_malformed_delta_is_refused_and_changes_nothing(case: str) -> None:
    fields, message = BAD_DELTAS[case]
    mirror, _ = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300)]), now_s=0)
    before = mirror.replicas["a"].table.copy()
    with pytest.raises(ValueError, match=message):
        bad = delta("a", EPOCH, 1, {0: waiting_row(5, 9)})._replace(**fields)
        mirror.delta(checked_delta(bad), now_s=1)
    assert np.array_equal(mirror.replicas["a"].table.tobytes(), before.tobytes())
    assert mirror.replicas["a"].seq == 0
    assert mirror.replicas["a"].received_s == 0
    assert mirror.delta(delta("a", EPOCH, 1), now_s=1)


def test_a_summary_with_impossible_numbers_is_refused() -> None:
    mirror, _ = make_mirror()
    for name, value in (
        ("correction", 0),
        ("correction", np.nan),
        ("fixed_correction", 0),
        ("fixed_correction", np.inf),
        ("step_spread", -0.1),
        ("step_spread", 1.1),
        ("step_spread", np.nan),
        ("planned_stop_s", -0.1),
        ("planned_stop_s", np.nan),
        ("kv_answer_s", -0.1),
        ("kv_answer_s", np.inf),
        ("waiting", -1),
    ):
        message = hello("a")
        message.summary[name] = value
        with pytest.raises(ValueError, match=name):
            mirror.hello(message, now_s=0)


def test_something_else_than_a_message_is_refused() -> None:
    mirror, _ = make_mirror()
    with pytest.raises(ValueError, match="ReplicaHello"):
        mirror.hello(None, now_s=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ReplicaDelta"):
        checked_delta(hello("a"))


def test_replicas_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.controller.state.mirror.MAX_REPLICAS", 2)
    mirror, _ = make_mirror()
    mirror.hello(hello("a"), now_s=0)
    mirror.hello(hello("b"), now_s=0)
    with pytest.raises(ValueError, match="2 replicas are known"):
        mirror.hello(hello("c"), now_s=0)
    mirror.hello(hello("a", seq=5), now_s=1)


def test_the_mirror_keeps_no_reference_to_a_message() -> None:
    mirror, _ = make_mirror()
    message = hello("a", [waiting_row(1, 300)])
    mirror.hello(message, now_s=0)
    message.rows["pending_tokens"] = 7
    message.summary["free_kv_blocks"] = 0
    assert mirror.replicas["a"].table["pending_tokens"][0] == 300
    assert mirror.replicas["a"].summary["free_kv_blocks"] == 900


# Membership, as decisions see it.


def known(*names: str) -> tuple[Mirror, Fleet]:
    mirror, fleet = make_mirror()
    for name in names:
        mirror.hello(hello(name), now_s=0)
    return mirror, fleet


def names_at(fleet: Fleet, now_s: float) -> list[str]:
    return [fleet.ids[row] for row in fleet.candidates(now_s)]


def condition(fleet: Fleet, replica_id: str, now_s: float) -> str:
    return fleet.condition(fleet.row_of[replica_id], now_s)


def test_a_silent_replica_ages_is_left_out_and_is_forgotten() -> None:
    mirror, fleet = known("a", "b")
    mirror.delta(delta("b", EPOCH, 1), now_s=0.5)
    assert names_at(fleet, 0.9) == ["a", "b"]
    assert condition(fleet, "a", 1.0) == "aged"
    assert names_at(fleet, 1.0) == ["b"]
    # Where no other is left, the aged ones have to do.
    assert names_at(fleet, 1.6) == ["a", "b"]
    assert names_at(fleet, 2.0) == ["b"]
    assert condition(fleet, "a", 2.0) == "stale"
    mirror.forget_silent(29)
    assert list(mirror.replicas) == ["a", "b"]
    mirror.forget_silent(30)
    assert list(mirror.replicas) == list(fleet.row_of) == ["b"]


def test_a_draining_replica_is_left_out_at_once() -> None:
    mirror, fleet = known("a", "b")
    assert names_at(fleet, 0) == ["a", "b"]
    mirror.delta(delta("a", EPOCH, 1, draining=True), now_s=0.1)
    assert names_at(fleet, 0.1) == ["b"]
    # A controller that restarts meanwhile learns it from the hello.
    mirror.hello(hello("c", draining=True), now_s=0.1)
    assert names_at(fleet, 0.1) == ["b"]


def test_a_replica_that_left_stays_out_whatever_it_reports() -> None:
    mirror, fleet = known("a", "b")
    mirror.mark_gone(["a", "x"], now_s=0.5)
    assert names_at(fleet, 0.5) == ["b"]
    mirror.hello(hello("a", seq=9), now_s=0.6)
    assert names_at(fleet, 0.6) == ["b"]
    assert condition(fleet, "a", 0.6) == "gone"
    # One that was marked by mistake and goes on reporting returns after forget_after_s.
    for name in "ab":
        mirror.hello(hello(name, seq=9), now_s=30)
    assert names_at(fleet, 30.4) == ["b"]
    assert names_at(fleet, 30.5) == ["a", "b"]


def test_a_replica_leaves_with_all_its_ranks() -> None:
    mirror, fleet = known("a:0", "a:1", "b:0", "ab")
    mirror.mark_gone(["a"], now_s=0.5)
    assert names_at(fleet, 0.5) == ["b:0", "ab"]
    mirror.mark_gone(["b:0"], now_s=0.5)
    assert names_at(fleet, 0.5) == ["ab"]


def test_the_row_of_a_replica_that_left_is_given_again_and_nothing_of_it_stays() -> None:
    mirror, fleet = known("a", "b")
    mirror.hello(hello("a", [waiting_row(1, 300)] * 5, seq=1), now_s=0.1)
    row = fleet.row_of["a"]
    mirror.mark_gone(["a"], now_s=0.1)
    mirror.forget("a")
    mirror.hello(hello("c"), now_s=0.2)
    assert fleet.row_of["c"] == row
    assert figure(fleet, "c", "TOKENS") == 0
    assert names_at(fleet, 0.2) == [fleet.ids[index] for index in sorted((row, fleet.row_of["b"]))]


class _Replica:
    """A replica's own truth, to compare the mirror with."""

    def __init__(self) -> None:
        self.seq = 0
        self.live: dict[int, np.ndarray] = {}


@given(st.data())
def test_what_is_known_equals_a_recount_after_any_history(data: st.DataObject) -> None:
    """Whatever is lost or repeated: a replica that is in step is mirrored exactly, and the figures
    are those that a fleet has which saw only its last state."""
    mirror, fleet = make_mirror()
    replicas = {name: _Replica() for name in "abc"}
    now_s, key = 0.0, 0
    for _ in range(data.draw(st.integers(1, 25))):
        now_s += data.draw(st.sampled_from([0.0, 0.1, 0.7, 2.5]))
        name = data.draw(st.sampled_from("abc"))
        replica = replicas[name]
        action = data.draw(st.sampled_from(["hello", "delta", "lost", "gone", "drain"]))
        if action == "hello":
            rows = list(replica.live.values())
            replica.live = dict(enumerate(rows))
            mirror.hello(hello(name, rows, seq=replica.seq), now_s)
        elif action == "gone":
            mirror.mark_gone([name], now_s)
        else:
            slot = data.draw(st.integers(0, 5))
            if slot in replica.live:
                del replica.live[slot]
                change = free_row()
            else:
                key += 1
                replica.live[slot] = change = waiting_row(key, data.draw(st.integers(1, 99)))
            replica.seq += 1
            message = delta(name, EPOCH, replica.seq, {slot: change}, draining=action == "drain")
            if action == "lost" or not mirror.delta(message, now_s):
                continue
            rows = list(replica.live.values())
            assert live_keys(mirror, name) == sorted(int(row["key"]) for row in rows)
            anew, known_anew = make_mirror()
            anew.hello(hello(name, rows, seq=1), now_s)
            for what in ("WAITING", "TOKENS", "PREFILL_S", "NEEDED_BLOCKS"):
                assert figure(fleet, name, what) == pytest.approx(figure(known_anew, name, what))
