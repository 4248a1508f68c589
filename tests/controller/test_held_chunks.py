"""What the controller refuses of the chunks that a replica says it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.checks import check_delta_body, check_hello
from scheduling.prefix import HELD, HELD_SLOTS

from .fleet import delta, hello

CHUNKS = np.array([(7, 128), (0, 0), (2**63 - 1, 4096)], HELD)
SLOTS = np.array([0, 5, HELD_SLOTS - 1], np.int32)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "slot out of range": (
        {"held_slots": np.array([0, 1, HELD_SLOTS])},
        f"held_slots must be from 0 to {HELD_SLOTS - 1}",
    ),
    "slot twice": ({"held_slots": np.array([4, 4, 5])}, "held_slots: a slot appears twice"),
    "slots a list": ({"held_slots": [0, 1, 2]}, "held_slots must be a one-dimensional"),
    "fewer chunks": ({"held": CHUNKS[:2]}, "one per slot"),
    "chunks of another type": ({"held": np.zeros(3)}, "type of held chunks"),
    "no chunks": ({"held": None}, "type of held chunks"),
    "negative hash": ({"held": np.array([(-1, 1)] * 3, HELD)}, "hash of a held chunk"),
    "negative tokens": ({"held": np.array([(1, -1)] * 3, HELD)}, "tokens of a held chunk"),
    "too many tokens": ({"held": np.array([(1, 2**40)] * 3, HELD)}, "tokens of a held chunk"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_chunks_are_refused(case: str) -> None:
    fields, message = BAD[case]
    good = {"held_slots": SLOTS, "held": CHUNKS}
    with pytest.raises(ValueError, match=message):
        check_hello(hello("a")._replace(**{**good, **fields}))
    with pytest.raises(ValueError, match=message):
        check_delta_body(delta("a", 1, 1)._replace(**{**good, **fields}), 64)


def test_chunks_in_bounds_are_taken() -> None:
    check_hello(hello("a")._replace(held_slots=SLOTS, held=CHUNKS))
    check_delta_body(delta("a", 1, 1)._replace(held_slots=SLOTS, held=CHUNKS), 64)
    check_hello(hello("a"))
    check_delta_body(delta("a", 1, 1), 64)
