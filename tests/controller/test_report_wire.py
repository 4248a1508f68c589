"""Reports over the plain connection: the same report arrives, or none does."""

from __future__ import annotations

from math import nan
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from sluice.controller.transport import checks
from sluice.controller.transport.checks import _check_live_rows, _check_slots, check_changes
from sluice.protocol.messages import (
    MAX_BYTES,
    MAX_FRAME,
    MAX_SENT_FINISHED,
    ReplicaDelta,
    Report,
    decode_report,
    encode,
    fits,
)
from sluice.scheduling.fleet.prefix import HELD
from sluice.scheduling.fleet.state import ROW, WAITING
from tests.controller.fleet import decode_row, delta, waiting_row

_CAPACITY = 5
_COUNTS = st.sampled_from((-1, 0, 1, 2, 3))
_TIMES = st.sampled_from((-np.inf, -1.0, 0.0, 1.0, np.inf, np.nan))


def _row(changes: dict[str, Any]) -> tuple[Any, ...]:
    sound = np.ones(1, ROW)[0]
    for name, value in changes.items():
        sound[name] = value
    return sound.item()


_ROWS = st.fixed_dictionaries(
    {},
    optional={
        name: _TIMES if ROW.fields[name][0].kind == "f" else _COUNTS for name in ROW.names or ()
    },
).map(_row)


@example(changes=[(0, _row({"last_token_s": -1.0}))], integers=np.int32)  # a time, not a count
@given(
    st.lists(st.tuples(st.integers(-1, _CAPACITY), _ROWS), max_size=4),
    st.sampled_from((np.int32, np.int64)),
)
def test_it_takes_what_the_checks_take(
    changes: list[tuple[int, tuple[Any, ...]]], integers: Any
) -> None:
    slots = np.array([slot for slot, _ in changes], integers)
    rows = np.frombuffer(np.array([row for _, row in changes], ROW).tobytes(), ROW)
    try:
        _check_slots("slots", slots, _CAPACITY)
        if not set(rows["phase"].tolist()) <= {0, 1, 2}:
            raise ValueError("phase")
        _check_live_rows(rows[rows["phase"] != 0])
    except ValueError:
        assert not checks.are_sound(slots, rows, _CAPACITY)
    else:
        assert checks.are_sound(slots, rows, _CAPACITY)


def test_writing_tells_what_lives_and_what_has_ended() -> None:
    table = np.zeros(4, ROW)
    rows = np.zeros(3, ROW)
    rows["key"], rows["phase"] = (5, 6, 7), WAITING
    rows["prompt_tokens"], rows["emitted_tokens"] = 10, 3
    assert checks.write(table, np.array([0, 1, 2], np.int32), rows) == (3, [5, 6, 7], [])
    changed = rows.copy()
    changed["key"], changed["phase"] = (5, 8, 0), (WAITING, WAITING, 0)
    told = checks.write(table, np.array([0, 1, 2], np.int32), changed)
    assert told == (3, [5, 8], [[6, 13], [7, 13]])
    assert table[:3].tobytes() == changed.tobytes()
    assert checks.write(table, np.array([], np.int32), rows[:0]) == (0, [], [])


@pytest.mark.parametrize("slot", [2**63, 2**64 - 1])
def test_a_slot_beyond_all_numbers_is_not_sound(slot: int) -> None:
    assert not checks.are_sound(np.array([slot], np.uint64), np.ones(1, ROW), 4)


def carried(sent: ReplicaDelta) -> ReplicaDelta:
    return decode_report(encode(sent))


def same(one: ReplicaDelta, other: ReplicaDelta) -> bool:
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        if isinstance(a, np.ndarray | np.void)
        else a == b and type(a) is type(b)
        for a, b in zip(one, other, strict=True)
    )


@given(
    st.lists(st.integers(0, 2**62), max_size=20, unique=True),
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
)
def test_a_report_arrives_as_it_was_sent(
    keys: list[int], context: int, draining: bool, hung: bool
) -> None:
    rows = {
        slot: waiting_row(key, 10) if slot % 2 else decode_row(key, context + 1)
        for slot, key in enumerate(keys)
    }
    held = np.array([(key + 1, context, 0) for key in keys], HELD)
    sent = delta("a", 1, 7, rows, finished=tuple(keys))._replace(
        draining=draining, held_slots=np.arange(len(keys), dtype=np.int32), held=held, hung=hung
    )
    got = carried(sent)
    assert same(got, sent)
    check_changes(got, capacity=64)


def test_a_report_that_is_too_large_for_a_message_is_told_apart() -> None:
    small = delta("a", 1, 7, {0: waiting_row(1, 10)})
    assert fits(small)
    rows = MAX_BYTES // ROW.itemsize + 1
    assert not fits(small._replace(rows=np.zeros(rows, ROW)))
    assert not fits(small._replace(finished=(1,) * (MAX_SENT_FINISHED + 1)))


def test_the_largest_report_that_fits_fits_a_frame() -> None:
    rows = MAX_BYTES // (ROW.itemsize + 4)
    largest = delta("a" * 256, 2**63 - 1, 2**63 - 1, {})._replace(
        rows=np.zeros(rows, ROW),
        slots=np.arange(rows, dtype=np.int32),
        finished=(2**63 - 1,) * MAX_SENT_FINISHED,
    )
    assert fits(largest)
    data = msgspec.Raw(encode(largest))
    assert len(encode(Report(2**63 - 1, 0.0, 1.0, data))) <= MAX_FRAME


GOOD = delta("a", 1, 7, {0: waiting_row(1, 10)})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replica_id", ""),
        ("replica_id", "x" * 257),
        ("epoch", -1),
        ("seq", "1"),
        ("now_s", nan),
        ("slots", "text"),
        ("slots", Ext(0, b"\0\0")),  # two bytes, and a slot has four
        ("rows", GOOD.summary),
        ("rows", Ext(99, b"")),
        ("summary", GOOD.rows),
        ("summary", Ext(4, b"")),
        ("summary", Ext(4, GOOD.summary.tobytes() * 2)),
        ("finished", 5),
        ("finished", (-1,)),
        ("draining", "no"),
        ("held", None),
    ],
)
def test_what_is_no_report_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError):
        carried(GOOD._replace(**{field: value}))


@pytest.mark.parametrize("row", [[], {}, None, 5, GOOD[:-4], [*GOOD, 1]])
def test_a_report_of_another_shape_is_refused(row: Any) -> None:
    with pytest.raises(ValueError):
        carried(row)


def test_an_error_names_the_field() -> None:
    with pytest.raises(ValueError, match="malformed in seq: Expected `int` >= 0"):
        carried(GOOD._replace(seq=-1))


def test_a_report_without_the_latest_fields_has_their_defaults() -> None:
    assert same(carried(GOOD[:9]), GOOD)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), np.int32), np.zeros(2, np.uint16), np.array([{}])]
)
def test_no_array_of_another_type_is_sent(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="no message has an array"):
        encode(GOOD._replace(slots=array))
