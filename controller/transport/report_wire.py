"""Messages with arrays as MessagePack: a replica's registration and reports.

An array travels as its bytes in memory, and the number of its type: the types are little-endian on
every host. What is decoded has the types and bounds of :mod:`sluice.protocol.messages`; the
content of arrays is checked by :func:`sluice.controller.transport.checks.check_changes`.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from sluice.protocol.messages import ReplicaDelta
from sluice.scheduling.fleet.prefix import HELD
from sluice.scheduling.fleet.state import ROW, SUMMARY

MAX_BYTES: Final = 512 << 10
"""Most bytes of arrays in one message."""

MAX_FINISHED: Final = 8_192
"""Most finished keys in one message."""

_ARRAYS: Final = (np.dtype("<i4"), ROW, HELD, np.dtype("<i8"))
_RECORD: Final = len(_ARRAYS)
"""Number of one record of the summary type; before it, those of the arrays."""


def fits(delta: ReplicaDelta) -> bool:
    """Whether a report is small enough for one message."""
    arrays = (delta.slots, delta.rows, delta.held_slots, delta.held)
    return (
        sum(array.nbytes for array in arrays) <= MAX_BYTES and len(delta.finished) <= MAX_FINISHED
    )


def of_extension(code: int, data: memoryview) -> Any:
    """The array or the record of an extension.

    Raises:
        ValueError: there is no such type, or the bytes are not a number of its items.
    """
    if code == _RECORD:
        (record,) = np.frombuffer(data, SUMMARY)
        return record
    if not 0 <= code < _RECORD:
        raise ValueError(f"there is no array type {code}")
    # A copy of the bytes, for compiled loops: numpy copies records field by field.
    return np.frombuffer(bytearray(data), _ARRAYS[code])


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        for code, dtype in enumerate(_ARRAYS):
            if value.dtype == dtype and value.ndim == 1:
                return Ext(code, value.tobytes())
        raise TypeError(f"no message has an array of {value.dtype!s:.60} and shape {value.shape}")
    if isinstance(value, np.void) and value.dtype == SUMMARY:
        return Ext(_RECORD, value.tobytes())
    if isinstance(value, np.integer | np.floating):
        return value.item()
    raise TypeError(f"no message has a {type(value).__name__}")


encode: Final = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
"""The bytes of a message; raises ``TypeError`` for values that no message has."""

_decode: Final = msgspec.msgpack.Decoder(ReplicaDelta, ext_hook=of_extension).decode


def decode(data: bytes | msgspec.Raw) -> ReplicaDelta:
    """The report in the bytes.

    Raises:
        ValueError: it is malformed, or a field is out of range.
    """
    try:
        return _decode(data)
    except msgspec.ValidationError as error:
        place = re.search(r"\$\[(\d+)\]", str(error))
        field = ReplicaDelta._fields[int(place[1])] if place else "all of it"
        raise ValueError(f"a report is malformed in {field}: {error}") from None
