"""The chunks that a replica says it holds: what is refused, and that the rules of order hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.controller.state.mirror import Mirror
from sluice.controller.transport.checks import check_changes, checked_delta, checked_hello
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.prefix import HELD, HELD_SLOTS

from .fleet import delta, hello

CHUNKS = np.array([(7, 128, 0), (0, 0, 0), (2**63 - 1, 4096, 2e-6)], HELD)
SLOTS = np.array([0, 5, HELD_SLOTS - 1], np.int32)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "slot out of range": (
        {"held_slots": np.array([0, 1, HELD_SLOTS])},
        f"held_slots must be from 0 to {HELD_SLOTS - 1}",
    ),
    "slot twice": ({"held_slots": np.array([4, 4, 5])}, "held_slots: a slot appears twice"),
    "slots a list": ({"held_slots": [0, 1, 2]}, "held_slots: expected `numpy.ndarray`"),
    "fewer chunks": ({"held": CHUNKS[:2]}, "one per slot"),
    "chunks of another type": ({"held": np.zeros(3, np.int32)}, "type of held chunks"),
    "no chunks": ({"held": None}, "held: expected `numpy.ndarray`, got None"),
    "negative hash": ({"held": np.array([(-1, 1, 0)] * 3, HELD)}, "hash of a held chunk"),
    "negative tokens": ({"held": np.array([(1, -1, 0)] * 3, HELD)}, "tokens of a held chunk"),
    "negative time": ({"held": np.array([(1, 1, -1)] * 3, HELD)}, "load_s of a held chunk"),
    "no time": ({"held": np.array([(1, 1, np.nan)] * 3, HELD)}, "load_s of a held chunk"),
    "endless time": ({"held": np.array([(1, 1, np.inf)] * 3, HELD)}, "load_s of a held chunk"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_chunks_are_refused(case: str) -> None:
    fields, message = BAD[case]
    good = {"held_slots": SLOTS, "held": CHUNKS}
    with pytest.raises(ValueError, match=message):
        checked_hello(hello("a")._replace(**{**good, **fields}))
    with pytest.raises(ValueError, match=message):
        check_changes(checked_delta(delta("a", 1, 1)._replace(**{**good, **fields})), 64)


def test_chunks_in_bounds_are_taken() -> None:
    checked_hello(hello("a")._replace(held_slots=SLOTS, held=CHUNKS))
    check_changes(delta("a", 1, 1)._replace(held_slots=SLOTS, held=CHUNKS), 64)
    checked_hello(hello("a"))
    check_changes(delta("a", 1, 1), 64)


EPOCH = 3
REPORTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.dictionaries(st.integers(0, 5), st.integers(0, 9), max_size=4),
        st.sampled_from(["comes", "comes", "is lost", "comes twice"]),
    ),
    max_size=25,
)


class Side:
    """A replica: its table, and which slots changed since the last report that it made."""

    def __init__(self) -> None:
        self.table: dict[int, int] = {}
        self.seq = 0

    def write(self, changes: dict[int, int]) -> dict[int, int]:
        """Chunk by slot, 0 for none; what differs afterwards. A chunk is in one slot only."""
        before = dict(self.table)
        for slot, chunk in changes.items():
            for other in [s for s, c in self.table.items() if c == chunk]:
                self.table[other] = 0
            self.table[slot] = chunk
        return {slot: c for slot, c in self.table.items() if before.get(slot, 0) != c}


def held_fields(chunks: dict[int, int]) -> dict[str, np.ndarray]:
    slots = np.array(list(chunks), np.int32)
    held = np.array([(chunk, 100 * chunk, 0) for chunk in chunks.values()], HELD)
    return {"held_slots": slots, "held": held}


@given(REPORTS)
def test_the_index_is_the_tables_whatever_is_lost_or_repeated(
    reports: list[tuple[str, dict[int, int], str]],
) -> None:
    fleet = Fleet()
    mirror = Mirror(EPOCH, fleet, forget_after_s=30)
    sides = {"a": Side(), "b": Side()}
    for name, side in sides.items():
        mirror.hello(hello(name), 0.0)
        assert fleet.row_of[name] >= 0
        assert not side.table
    for name, changes, fate in reports:
        side = sides[name]
        changed = side.write(changes)
        side.seq += 1
        message = delta(name, EPOCH, side.seq)._replace(**held_fields(changed))
        if fate == "is lost":
            continue
        known = mirror.delta(message, 0.0)
        if fate == "comes twice":
            assert not mirror.delta(message, 0.0)
        if not known:
            side.seq += 1
            whole = hello(name, seq=side.seq)._replace(**held_fields(side.table))
            mirror.hello(whole, 0.0)
        rows = np.array([fleet.row_of[name]])
        for chunk in range(1, 10):
            expected = 100.0 * chunk if chunk in side.table.values() else 0.0
            assert fleet.prefixes.cached_tokens((chunk,), rows).tolist() == [expected]
    for name in sides:
        mirror.forget(name)
    assert len(fleet.prefixes) == 0
