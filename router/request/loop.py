"""The tool loop in a body's ``slo``: ``{"loop": {"id": "fix-42", "deadline_ms": 60000}}``.

The turns of one session share a deadline, which counts from the arrival of the first of them at any
router: see :mod:`sluice.router.dispatch.loop_deadlines`.
"""

from __future__ import annotations

import hashlib
from math import inf
from typing import Any, NamedTuple

from sluice.router import wire
from sluice.router.errors import invalid, shown
from sluice.router.request.session import MAX_SESSION_CHARACTERS
from sluice.router.wire import LOOP_DEADLINE, MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS

FIELD = f"{wire.SLO_FIELD}.{wire.LOOP}"
DEADLINE_FIELD = f"{FIELD}.{LOOP_DEADLINE}"


class StatedLoop(NamedTuple):
    """A loop as a client states it."""

    id: str
    deadline_ms: float


class Loop(NamedTuple):
    """A turn's loop.

    Attributes:
        key: 63-bit hash of its owner and id.
        deadline_s: from its first turn to the end of its last one, seconds.
        due_s: when that has passed, on the router's clock; infinite until the start is known.
    """

    key: int
    deadline_s: float
    due_s: float = inf


def read_loop(value: Any) -> StatedLoop | None:
    """The loop in ``value``; ``None`` if that is ``None``.

    Raises:
        ApiError: 400; the message names the error and the allowed values.
    """
    if value is None:
        return None
    keys = {"id", LOOP_DEADLINE}
    if not isinstance(value, dict) or value.keys() != keys:
        raise invalid(f"{FIELD} must be an object with id and {LOOP_DEADLINE}", FIELD)
    name, deadline_ms = value["id"], value[LOOP_DEADLINE]
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_SESSION_CHARACTERS:
        raise invalid(
            f"{FIELD}.id must be a string of 1 to {MAX_SESSION_CHARACTERS} characters, "
            f"got {shown(name)}",
            FIELD,
        )
    number = isinstance(deadline_ms, int | float) and not isinstance(deadline_ms, bool)
    if not number or not MIN_OBJECTIVE_MS <= deadline_ms <= MAX_OBJECTIVE_MS:
        raise invalid(
            f"{DEADLINE_FIELD} must be a number of milliseconds from {MIN_OBJECTIVE_MS:g} to "
            f"{MAX_OBJECTIVE_MS:.0f}, got {shown(deadline_ms)}",
            FIELD,
        )
    return StatedLoop(name, float(deadline_ms))


def loop_of(stated: StatedLoop | None, owner: str) -> Loop | None:
    """The loop of a request. Loops of different owners are distinct, even with the same id."""
    if stated is None:
        return None
    text = f"{owner}\n{stated.id}".encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, person=b"sluice-loop").digest()
    return Loop(int.from_bytes(digest, "big") >> 1, stated.deadline_ms / 1000)
