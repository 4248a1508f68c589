"""Reports over the plain connection: the same report arrives, or none does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.controller.messages import ReplicaDelta
from sluice.controller.transport import report_wire
from sluice.controller.transport.checks import check_delta_body, check_delta_header
from sluice.scheduling.prefix import HELD
from sluice.scheduling.state import ROW
from tests.controller.fleet import decode_row, delta, waiting_row


def carried(sent: ReplicaDelta) -> ReplicaDelta:
    return report_wire.of_json(json.loads(json.dumps(report_wire.to_json(sent))))


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
    held = np.array([(key + 1, context) for key in keys], HELD)
    sent = delta("a", 1, 7, rows, finished=tuple(keys))._replace(
        draining=draining, held_slots=np.arange(len(keys), dtype=np.int32), held=held, hung=hung
    )
    got = carried(sent)
    assert same(got, sent)
    check_delta_header(got)
    check_delta_body(got, capacity=64)


def test_a_report_that_is_too_large_for_a_message_is_told_apart() -> None:
    small = delta("a", 1, 7, {0: waiting_row(1, 10)})
    assert report_wire.fits(small)
    rows = report_wire.MAX_BYTES // ROW.itemsize + 1
    assert not report_wire.fits(small._replace(rows=np.zeros(rows, ROW)))
    assert not report_wire.fits(small._replace(finished=(1,) * (report_wire.MAX_FINISHED + 1)))


def test_the_largest_report_that_fits_fits_a_line() -> None:
    from sluice.controller.transport.channel import MAX_LINE

    rows = report_wire.MAX_BYTES // (ROW.itemsize + 4)
    largest = delta("a" * 256, 2**63 - 1, 2**63 - 1, {})._replace(
        rows=np.zeros(rows, ROW),
        slots=np.arange(rows, dtype=np.int32),
        finished=(2**63 - 1,) * report_wire.MAX_FINISHED,
    )
    assert report_wire.fits(largest)
    assert len(json.dumps([2**31, {"report": report_wire.to_json(largest)}])) <= MAX_LINE


GOOD = report_wire.to_json(delta("a", 1, 7, {0: waiting_row(1, 10)}))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (4, "not base64"),
        (4, "AAA="),  # two bytes, and a slot has four
        (5, "AAAA"),
        (6, ""),
        (6, GOOD[6] * 2),
        (7, 5),
        (9, None),
        (10, "AAAA"),
    ],
)
def test_what_is_no_report_is_refused(place: int, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        report_wire.of_json([*GOOD[:place], value, *GOOD[place + 1 :]])


@pytest.mark.parametrize("row", [[], {}, None, 5, GOOD[:-1], [*GOOD, 1]])
def test_a_report_of_another_shape_is_refused(row: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        report_wire.of_json(row)
