from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.candidates import Candidates
from controller.ledger import Ledger
from controller.mirror import Mirror
from scheduling.state import ROW, WAITING
from tests.controller.fleet import decode_row, delta, free_row, hello, waiting_row

EPOCH = 7


def make_mirror(limit: int = 8) -> Mirror:
    return Mirror(
        EPOCH,
        stale_after_s=2,
        forget_after_s=30,
        reference_ttft_s=1,
        reference_tpot_s=0.1,
        limit=limit,
    )


def test_a_hello_brings_the_whole_queue() -> None:
    mirror = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300), decode_row(2, 500)], now_s=50), now_s=80)
    replica = mirror.replicas["a"]
    known = replica.aggregates
    assert (known.waiting, known.running) == (1, 1)
    assert (known.prefill_tokens, known.context_tokens) == (300, 500)
    assert (known.free_kv_blocks, known.total_kv_blocks) == (900, 1_000)
    assert replica.clock_offset_s == 30


def test_the_prefill_budget_is_that_of_the_model() -> None:
    mirror = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300)]), now_s=0)
    # No decode: one step's fixed time, the rest at b + c a token, less what is queued.
    assert mirror.replicas["a"].aggregates.pab_tokens == pytest.approx((1 - 0.004) / 0.000101 - 300)


def test_a_delta_changes_the_slots_it_names() -> None:
    mirror = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300), waiting_row(2, 100)]), now_s=0)
    assert mirror.delta(delta("a", EPOCH, 1, {0: free_row(), 5: waiting_row(3, 40)}), now_s=1)
    assert sorted(mirror.replicas["a"].live_rows()["key"]) == [2, 3]
    assert mirror.replicas["a"].aggregates.prefill_tokens == 140
    assert mirror.replicas["a"].received_s == 1


def test_a_request_that_lost_its_kv_is_prefill_again() -> None:
    row = decode_row(1, 500)
    row["pending_tokens"] = 501
    row["computed_tokens"] = 0
    mirror = make_mirror()
    mirror.hello(hello("a", [row]), now_s=0)
    assert mirror.replicas["a"].aggregates.prefill_tokens == 501
    assert mirror.replicas["a"].aggregates.context_tokens == 0


@pytest.mark.parametrize(
    ("replica_id", "epoch", "seq"),
    [("b", EPOCH, 1), ("a", EPOCH + 1, 1), ("a", EPOCH, 0), ("a", EPOCH, 2)],
    ids=["unknown replica", "other epoch", "repeated", "gap"],
)
def test_a_delta_out_of_order_changes_nothing(replica_id: str, epoch: int, seq: int) -> None:
    mirror = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300)]), now_s=0)
    assert not mirror.delta(delta(replica_id, epoch, seq, {0: free_row()}), now_s=1)
    assert mirror.replicas["a"].aggregates.prefill_tokens == 300
    assert mirror.replicas["a"].received_s == 0
    assert list(mirror.replicas) == ["a"]


def test_a_new_hello_forgets_the_old_table() -> None:
    mirror = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300)] * 1 + [waiting_row(2, 10)]), now_s=0)
    mirror.hello(hello("a", [waiting_row(9, 5)], seq=12, capacity=4), now_s=1)
    assert list(mirror.replicas["a"].live_rows()["key"]) == [9]
    assert mirror.delta(delta("a", EPOCH, 13), now_s=1)


def _bad_row(**fields: object) -> np.ndarray:
    row = waiting_row(1, 10)
    for name, value in fields.items():
        row[name] = value
    return row


BAD_DELTAS: dict[str, tuple[dict[str, Any], str]] = {
    "slot out of range": ({"slots": np.array([64])}, "slots must be from 0 to 63"),
    "negative slot": ({"slots": np.array([-1])}, "slots must be from 0 to 63"),
    "slots no integers": ({"slots": np.array([0.5])}, "integer array"),
    "slots a matrix": ({"slots": np.zeros((1, 1), int)}, "one-dimensional"),
    "slots a list": ({"slots": [0]}, "integer array"),
    "fewer rows": ({"slots": np.array([0, 1])}, "one per slot"),
    "slot twice": (
        {"slots": np.array([3, 3]), "rows": np.zeros(2, ROW)},
        "appears twice",
    ),
    "rows of another type": ({"rows": np.zeros(1, np.float64)}, "row type"),
    "unknown phase": ({"rows": np.array([_bad_row(phase=3)])}, "phase must be"),
    "negative pending": ({"rows": np.array([_bad_row(pending_tokens=-1)])}, "at least 0"),
    "negative key": ({"rows": np.array([_bad_row(key=-1)])}, "key"),
    "arrival nan": ({"rows": np.array([_bad_row(arrival_s=np.nan)])}, "arrival"),
    "first token inf": ({"rows": np.array([_bad_row(first_token_s=np.inf)])}, "first_token_s"),
    "ttft zero": ({"rows": np.array([_bad_row(ttft_s=0)])}, "ttft_s"),
    "tpot nan": ({"rows": np.array([_bad_row(tpot_s=np.nan)])}, "tpot_s"),
    "summary missing": ({"summary": None}, "summary"),
    "finished no keys": ({"finished": ("x",)}, "finished"),
    "finished no tuple": ({"finished": 5}, "finished"),
    "draining no flag": ({"draining": "no"}, "draining"),
    "clock nan": ({"now_s": float("nan")}, "now_s"),
    "seq negative": ({"seq": -1}, "seq"),
    "seq text": ({"seq": "1"}, "seq"),
    "id empty": ({"replica_id": ""}, "replica_id"),
    "id too long": ({"replica_id": "x" * 257}, "replica_id"),
}


@pytest.mark.parametrize("case", BAD_DELTAS)
def test_a_malformed_delta_is_refused_and_changes_nothing(case: str) -> None:
    fields, message = BAD_DELTAS[case]
    mirror = make_mirror()
    mirror.hello(hello("a", [waiting_row(1, 300)]), now_s=0)
    before = mirror.replicas["a"].table.copy()
    with pytest.raises(ValueError, match=message):
        mirror.delta(delta("a", EPOCH, 1, {0: waiting_row(5, 9)})._replace(**fields), now_s=1)
    assert np.array_equal(mirror.replicas["a"].table.tobytes(), before.tobytes())
    assert mirror.replicas["a"].seq == 0
    assert mirror.replicas["a"].received_s == 0
    assert mirror.delta(delta("a", EPOCH, 1), now_s=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity", 0),
        ("capacity", 1 << 19),
        ("capacity", True),
        ("block_tokens", -1),
        ("profile", None),
        ("model", None),
        ("replica_id", 5),
        ("draining", 1),
    ],
)
def test_a_malformed_hello_is_refused(field: str, value: object) -> None:
    mirror = make_mirror()
    with pytest.raises(ValueError, match=field):
        mirror.hello(hello("a")._replace(**{field: value}), now_s=0)
    assert not mirror.replicas


def test_a_summary_with_impossible_numbers_is_refused() -> None:
    mirror = make_mirror()
    for name, value in (("correction", 0), ("correction", np.nan), ("waiting", -1)):
        message = hello("a")
        message.summary[name] = value
        with pytest.raises(ValueError, match=name):
            mirror.hello(message, now_s=0)


def test_something_else_than_a_message_is_refused() -> None:
    mirror = make_mirror()
    with pytest.raises(ValueError, match="ReplicaHello"):
        mirror.hello(None, now_s=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ReplicaDelta"):
        mirror.delta(hello("a"), now_s=0)  # type: ignore[arg-type]


def test_replicas_are_bounded() -> None:
    mirror = make_mirror(limit=2)
    mirror.hello(hello("a"), now_s=0)
    mirror.hello(hello("b"), now_s=0)
    with pytest.raises(ValueError, match="2 replicas are known"):
        mirror.hello(hello("c"), now_s=0)
    mirror.hello(hello("a", seq=5), now_s=1)


def test_the_mirror_keeps_no_reference_to_a_message() -> None:
    mirror = make_mirror()
    message = hello("a", [waiting_row(1, 300)])
    mirror.hello(message, now_s=0)
    message.rows["pending_tokens"] = 7
    message.summary["free_kv_blocks"] = 0
    assert mirror.replicas["a"].live_rows()["pending_tokens"][0] == 300
    assert mirror.replicas["a"].summary["free_kv_blocks"] == 900


# Membership, as decisions see it.


def make_candidates(*names: str) -> tuple[Mirror, Ledger, Candidates]:
    mirror, ledger = make_mirror(), Ledger(ttl_s=5)
    candidates = Candidates(mirror, ledger)
    for name in names:
        mirror.hello(hello(name), now_s=0)
        candidates.touch((name,), 0)
    return mirror, ledger, candidates


def names_at(candidates: Candidates, now_s: float) -> list[str]:
    return [view.replica_id for view in candidates.at(now_s)]


def test_a_silent_replica_is_left_out_then_forgotten() -> None:
    mirror, _, candidates = make_candidates("a", "b")
    mirror.delta(delta("b", EPOCH, 1), now_s=1.5)
    candidates.touch(("b",), 1.5)
    assert names_at(candidates, 1.9) == ["a", "b"]
    assert names_at(candidates, 2.0) == ["b"]
    assert mirror.condition(mirror.replicas["a"], 2.0) == "stale"
    assert mirror.forget_silent(29) == []
    assert mirror.forget_silent(30) == ["a"]
    assert names_at(candidates, 30) == []


def test_a_stale_replica_returns_with_its_next_report() -> None:
    mirror, _, candidates = make_candidates("a")
    assert names_at(candidates, 5) == []
    assert mirror.delta(delta("a", EPOCH, 1), now_s=6)
    candidates.touch(("a",), 6)
    assert names_at(candidates, 6) == ["a"]


def test_a_draining_replica_is_left_out_at_once() -> None:
    mirror, _, candidates = make_candidates("a", "b")
    assert names_at(candidates, 0) == ["a", "b"]
    mirror.delta(delta("a", EPOCH, 1, draining=True), now_s=0.1)
    candidates.touch(("a",), 0.1)
    assert names_at(candidates, 0.1) == ["b"]
    # A controller that restarts meanwhile learns it from the hello.
    mirror.hello(hello("c", draining=True), now_s=0.1)
    candidates.touch(("c",), 0.1)
    assert names_at(candidates, 0.1) == ["b"]


def test_a_replica_that_left_stays_out_whatever_it_reports() -> None:
    mirror, _, candidates = make_candidates("a", "b")
    assert mirror.mark_gone(["a", "x"], now_s=1) == ["a"]
    candidates.touch(("a",), 1)
    assert names_at(candidates, 1) == ["b"]
    mirror.hello(hello("a", seq=9), now_s=1.2)
    candidates.touch(("a",), 1.2)
    assert names_at(candidates, 1.2) == ["b"]
    # One that was marked by mistake and goes on reporting returns after forget_after_s.
    for name in "ab":
        mirror.hello(hello(name, seq=9), now_s=31)
        candidates.touch((name,), 31)
    assert names_at(candidates, 30.9) == ["b"]
    assert names_at(candidates, 31) == ["a", "b"]


class _Replica:
    """A replica's own truth, to compare the mirror with."""

    def __init__(self) -> None:
        self.seq = 0
        self.live: dict[int, np.ndarray] = {}


@given(st.data())
def test_views_equal_a_recount_after_any_history(data: st.DataObject) -> None:
    """Whatever is lost or repeated: a replica that is in step is mirrored exactly, and the cached
    views are those that a fresh computation gives."""
    mirror, ledger, candidates = make_candidates()
    replicas = {name: _Replica() for name in "abc"}
    now_s, key = 0.0, 0
    for _ in range(data.draw(st.integers(1, 25))):
        now_s += data.draw(st.sampled_from([0.0, 0.1, 0.7, 2.5]))
        name = data.draw(st.sampled_from("abc"))
        replica = replicas[name]
        action = data.draw(st.sampled_from(["hello", "delta", "lost", "gone", "reserve", "drain"]))
        if action == "hello":
            rows = list(replica.live.values())
            replica.live = dict(enumerate(rows))
            mirror.hello(hello(name, rows, seq=replica.seq), now_s)
        elif action == "gone":
            mirror.mark_gone([name], now_s)
        elif action == "reserve":
            candidates.touch(ledger.reserve(key, name, key % 7, now_s), now_s)
            key += 1
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
            if action != "lost" and mirror.delta(message, now_s):
                mirrored = mirror.replicas[name].live_rows()
                assert sorted(mirrored["key"]) == sorted(
                    row["key"] for row in replica.live.values()
                )
        candidates.touch((name,), now_s)
        views = candidates.at(now_s)
        fresh = Candidates(mirror, ledger).at(now_s)
        assert views == fresh
        for view in views:
            rows_now = mirror.replicas[view.replica_id].live_rows()
            load = ledger.load(view.replica_id)
            assert view.waiting == int((rows_now["phase"] == WAITING).sum())
            assert view.prefill_tokens == int(rows_now["pending_tokens"].sum()) + load.tokens
            assert view.reserved == load.requests
