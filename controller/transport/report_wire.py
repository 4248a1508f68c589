"""A replica's report as JSON, for the controller's plain connection.

Arrays are sent as their bytes in memory, in base64: their types are little-endian on every host.
The decoded report is checked like any other.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from sluice.controller.messages import ReplicaDelta
from sluice.scheduling.prefix import HELD
from sluice.scheduling.state import ROW, SUMMARY

MAX_BYTES = 512 << 10
"""Most bytes of arrays in one message; base64 adds a third."""

MAX_FINISHED = 8_192
"""Most finished keys in one message."""

_SLOT = np.dtype("<i4")


def fits(delta: ReplicaDelta) -> bool:
    """Whether a report is small enough for one message."""
    arrays = (delta.slots, delta.rows, delta.held_slots, delta.held)
    return (
        sum(array.nbytes for array in arrays) <= MAX_BYTES and len(delta.finished) <= MAX_FINISHED
    )


def to_json(delta: ReplicaDelta) -> list[Any]:
    """The report as JSON data; :func:`of_json` is the inverse."""
    return [
        delta.replica_id,
        delta.epoch,
        delta.seq,
        delta.now_s,
        _text(delta.slots.astype(_SLOT, copy=False)),
        _text(delta.rows),
        _text(delta.summary),
        delta.finished,
        delta.draining,
        _text(delta.held_slots.astype(_SLOT, copy=False)),
        _text(delta.held),
        delta.hung,
    ]


def of_json(row: Any) -> ReplicaDelta:
    """The report in ``row``.

    Raises:
        TypeError, ValueError: the row is malformed.
    """
    (replica_id, epoch, seq, now_s, slots, rows, summary, finished, draining, held_slots, held,
     hung) = row  # fmt: skip
    (record,) = _array(summary, SUMMARY)
    return ReplicaDelta(
        replica_id,
        epoch,
        seq,
        now_s,
        _array(slots, _SLOT),
        _array(rows, ROW),
        record,
        tuple(finished),
        draining,
        _array(held_slots, _SLOT),
        _array(held, HELD),
        hung,
    )


def _text(array: np.ndarray | np.void) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: np.dtype[Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)
