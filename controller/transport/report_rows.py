"""Compiled loops over the rows of a report: there is a report for nearly every request, with few
rows.

The arrays of a message may be read-only, in parts or of other integer types, and the loops are
compiled for each kind of array. So each function here converts them to one kind first.
"""

from __future__ import annotations

from math import isfinite, isinf
from typing import Any

import numpy as np

from sluice.scheduling.fleet.state import ROW, RUNNING, WAITING
from sluice.scheduling.request.kernels import Ints, compiled


def are_sound(slots: np.ndarray, rows: np.ndarray, capacity: int) -> bool:
    """Whether rows (one per slot, of the row type) may be written into a table of ``capacity``
    slots. ``O(n log n)``; The checks of :mod:`sluice.controller.transport.checks`
    report what is wrong with invalid rows."""
    return not len(slots) or bool(_sound(_integers(slots), _plain(rows), capacity))


def write(
    table: np.ndarray, slots: np.ndarray, rows: np.ndarray
) -> tuple[int, list[int], list[list[int]]]:
    """Write sound rows into a table.

    Returns:
        The highest slot plus one; the keys of the live rows; and for each request that ended with
        them, its key and its prompt plus output tokens as they were in the table.
    """
    if not len(slots):
        return 0, [], []
    used, live, ended = _write(table, _integers(slots), _plain(rows))
    return used, live.tolist(), ended.tolist()


def compile_now() -> None:
    """Call every loop once, on a toy message."""
    slots, rows = np.array([0], np.int32), np.zeros(1, ROW)
    are_sound(slots, rows, 1)
    write(np.zeros(1, ROW), slots, rows)


def _integers(slots: np.ndarray) -> Ints:
    # Unsigned integers that do not fit become negative, which is no valid slot.
    return np.array(slots, np.int64)


def _plain(rows: np.ndarray) -> np.ndarray:
    """A writable array of records without gaps, as those of a message from the wire are already: to
    copy 32 of them takes four times as long as a loop over them."""
    return rows if rows.flags.carray else np.array(rows)


@compiled
def _sound(slots: Ints, rows: np.ndarray, capacity: int) -> bool:
    ordered = np.sort(slots)
    if ordered[0] < 0 or ordered[-1] >= capacity:
        return False
    for place in range(1, len(ordered)):
        if ordered[place] == ordered[place - 1]:
            return False
    for place in range(len(rows)):
        row = rows[place]
        if row.phase != 0 and not _live_row_is_sound(row):
            return False
    return True


@compiled
def _live_row_is_sound(row: Any) -> bool:
    counts = min(
        row.priority,
        row.prompt_tokens,
        row.computed_tokens,
        row.pending_tokens,
        row.emitted_tokens,
        row.kv_blocks,
        row.expected_tokens,
        row.best_effort,
        row.later_stages,
        row.later_tokens,
        row.phase,
    )
    return (
        row.key >= 0
        and counts >= 0
        and row.phase <= RUNNING
        and row.best_effort <= 1
        and isfinite(row.arrival_s)
        and not isinf(row.first_token_s)
        and not isinf(row.last_token_s)
        and row.ttft_s > 0
        and row.tpot_s > 0
        and row.e2e_s > 0
    )


@compiled
def _write(table: np.ndarray, slots: Ints, rows: np.ndarray) -> tuple[int, Ints, Ints]:
    live = np.empty(len(rows), np.int64)
    ended = np.empty((len(rows), 2), np.int64)
    used = lives = ends = 0
    for place in range(len(rows)):
        slot, new = slots[place], rows[place]
        old = table[slot]
        if old.phase >= WAITING and (new.phase == 0 or new.key != old.key):
            ended[ends, 0] = old.key
            ended[ends, 1] = old.prompt_tokens + old.emitted_tokens
            ends += 1
        if new.phase >= WAITING:
            live[lives] = new.key
            lives += 1
        used = max(used, slot + 1)
        table[slot] = new
    return used, live[:lives], ended[:ends]
