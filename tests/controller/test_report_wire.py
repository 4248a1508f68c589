"""Reports over the plain connection: the same report arrives, or none does."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.controller.transport import checks
from sluice.controller.transport.checks import check_changes
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
