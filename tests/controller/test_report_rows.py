"""The compiled look at a report's rows, against the plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.controller.transport import checks
from sluice.controller.transport.checks import _check_live_rows, _check_slots
from sluice.scheduling.fleet.state import ROW, WAITING

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
