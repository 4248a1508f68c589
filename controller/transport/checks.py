"""Validation of messages: a faulty or older client must not corrupt the mirror, so every message
is checked whole before any of it is applied.

The types of ``sluice.protocol.messages`` have the bounds of plain fields; the content of arrays
is checked here. All of it raises ValueError with what is wrong and what is allowed."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from functools import lru_cache
from math import inf, isfinite, isinf
from operator import itemgetter
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from sluice.protocol.messages import (
    MAX_ENDINGS,
    MAX_KEYS,
    MAX_TURN_ENDS,
    MAX_USES,
    MAX_WAITS,
    FaultNotice,
    FirstTokenWait,
    LateNotice,
    QuotaUse,
    ReplicaDelta,
    ReplicaHello,
    RequestEnding,
    decode_query,
    encode,
    of_extension,
)
from sluice.scheduling.fleet.prefix import HELD, HELD_SLOTS
from sluice.scheduling.fleet.state import ROW, RUNNING, SUMMARY, WAITING
from sluice.scheduling.latency.model import MAX_SPREAD
from sluice.scheduling.placement.loops import LoopTurnEnd
from sluice.scheduling.request.job import MAX_NUMBER, Id, Key, RouteQuery
from sluice.scheduling.request.kernels import Ints, compiled

# Compiled loops over the rows of a report: there is a report for nearly every request, with few
# rows.
#
# The arrays of a message may be read-only, in parts or of other integer types, and the loops are
# compiled for each kind of array. So each function here converts them to one kind first.


def write(
    table: np.ndarray, slots: np.ndarray, rows: np.ndarray
) -> tuple[int, list[int], list[list[int]]]:
    """Write sound rows into a table. Returns the highest slot plus one; the keys of the live
    rows; and for each request that ended, its key and its prompt plus output tokens from the
    table."""
    if not len(slots):
        return 0, [], []
    used, live, ended = _write(table, _integers(slots), _plain(rows))
    return used, live.tolist(), ended.tolist()


def compile_now() -> None:
    """Call every loop once, on a toy message."""
    slots, rows = np.array([0], np.int32), np.zeros(1, ROW)
    _problem(_integers(slots), _plain(rows), 1)
    write(np.zeros(1, ROW), slots, rows)


def _integers(slots: np.ndarray) -> Ints:
    # Unsigned integers that do not fit become negative, which is no valid slot.
    return np.array(slots, np.int64)


def _plain(rows: np.ndarray) -> np.ndarray:
    """A writable array of records without gaps, as those of a message from the wire are already: to
    copy 32 of them takes four times as long as a loop over them."""
    return rows if rows.flags.carray else np.array(rows)


_PROBLEMS = (
    "",
    "slots must be from 0 to {}",
    "slots: a slot appears twice in one message",
    f"phase must be from 0 to {RUNNING}",
    "the key and the counts of a request (tokens, blocks, priority) must be at least 0",
    "a request's arrival must be a finite time",
    "first_token_s and last_token_s must be finite times, or nan for none",
    "best_effort must be 0 or 1",
    "ttft_s, tpot_s and e2e_s must be positive, or infinite for none",
)


@compiled
def _problem(slots: Ints, rows: np.ndarray, capacity: int) -> int:
    """What is wrong with rows (one per slot) for a table of ``capacity`` slots, as an index of
    ``_PROBLEMS``."""
    seen = np.zeros(capacity, np.bool_)
    for place in range(len(slots)):
        slot = slots[place]
        if slot < 0 or slot >= capacity:
            return 1
        if seen[slot]:
            return 2
        seen[slot] = True
    for place in range(len(rows)):
        row = rows[place]
        if row.phase != 0:
            problem = _problem_of_live_row(row)
            if problem:
                return problem
    return 0


@compiled
def _problem_of_live_row(row: Any) -> int:
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
    )
    if row.phase < 0 or row.phase > RUNNING:
        return 3
    if row.key < 0 or counts < 0:
        return 4
    if not isfinite(row.arrival_s):
        return 5
    if isinf(row.first_token_s) or isinf(row.last_token_s):
        return 6
    if row.best_effort > 1:
        return 7
    return 0 if row.ttft_s > 0 and row.tpot_s > 0 and row.e2e_s > 0 else 8


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


MAX_CORRECTION = 1_000.0
"""Largest factor between predicted and real step time, and the inverse of the smallest."""

Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_KEYS)]
Keys = Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)]
Notices = Annotated[tuple[FaultNotice, ...], msgspec.Meta(max_length=MAX_KEYS)]
RequestEndings = Annotated[tuple[RequestEnding, ...], msgspec.Meta(max_length=MAX_ENDINGS)]
LateNotices = Annotated[tuple[LateNotice, ...], msgspec.Meta(max_length=MAX_ENDINGS)]
Waits = Annotated[tuple[FirstTokenWait, ...], msgspec.Meta(max_length=MAX_WAITS)]
TurnEnds = Annotated[tuple[LoopTurnEnd, ...], msgspec.Meta(max_length=MAX_TURN_ENDS)]
Uses = Annotated[tuple[QuotaUse, ...], msgspec.Meta(max_length=MAX_USES)]
"""The arguments of actor calls."""

_SUMMARY_COUNTS = ("steps", "waiting", "running", "free_kv_blocks", "total_kv_blocks")
_SUMMARY_CORRECTIONS = ("correction", "fixed_correction")
_SUMMARY_TIMES = (
    *("updated_s", "step_started_s", "last_step_s", "predicted_step_s", "next_begins_s"),
    *("planned_stop_s", "kv_answer_s", "step_spread", *_SUMMARY_CORRECTIONS),
)
_SUMMARY_STOP = _SUMMARY_TIMES.index("planned_stop_s")
_SUMMARY_CHECKED = itemgetter(
    *((SUMMARY.names or ()).index(name) for name in (*_SUMMARY_TIMES, *_SUMMARY_COUNTS))
)
_SUMMARY_TRANSFERS = ("transfers", "transfer_seconds", "transfer_tokens")


def checked(name: str, value: Any, kind: Any) -> Any:
    """``value``, the argument ``name``, as ``kind``. Raises ValueError: another type, or out of
    range."""
    try:
        return _decoder(kind).decode(encode(value))
    except msgspec.ValidationError as error:
        raise ValueError(_named(name, value, kind, str(error))) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} is malformed: {error}") from None


def checked_query(query: Any) -> RouteQuery:
    """A query that came by an actor call. Raises ValueError: malformed, or out of range."""
    if not isinstance(query, RouteQuery):
        raise ValueError(f"expected a RouteQuery, got {type(query).__name__}")
    try:
        return decode_query(encode(query))
    except (AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a query is malformed: {error}") from None


def checked_hello(hello: Any) -> ReplicaHello:
    """A registration. ``O(rows)``. Raises ValueError: malformed, or out of range."""
    if not isinstance(hello, ReplicaHello):
        raise ValueError(f"expected a ReplicaHello, got {type(hello).__name__}")
    found: ReplicaHello = checked("hello", hello, ReplicaHello)
    _ = found.profile.model
    check_changes(found, found.capacity)
    return found


def checked_delta(delta: Any) -> ReplicaDelta:
    """A report that came by an actor call; ``check_changes`` checks its arrays. Raises
    ValueError: malformed, or out of range."""
    if not isinstance(delta, ReplicaDelta):
        raise ValueError(f"expected a ReplicaDelta, got {type(delta).__name__}")
    found: ReplicaDelta = checked("report", delta, ReplicaDelta)
    return found


def check_changes(message: ReplicaHello | ReplicaDelta, capacity: int) -> None:
    """Check a message's arrays against its sender's table of ``capacity`` slots. ``O(rows)``.
    Raises ValueError: malformed, or out of range."""
    _check_rows(message.slots, message.rows, capacity)
    _check_summary(message.summary)
    _check_held(message.held_slots, message.held)


def _check_number(name: str, value: float) -> None:
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ValueError(f"{name} must be a number within +-{MAX_NUMBER:g}, got {value}")


def _check_array(name: str, slots: Any) -> None:
    if not isinstance(slots, np.ndarray) or slots.ndim != 1 or slots.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a one-dimensional integer array, got {short(slots)}")


def _check_held(slots: Any, held: Any) -> None:
    _check_array("held_slots", slots)
    if len(slots) and (slots.min() < 0 or slots.max() >= HELD_SLOTS):
        raise ValueError(f"held_slots must be from 0 to {HELD_SLOTS - 1}, got {short(slots)}")
    if len(set(slots.tolist())) != len(slots):
        raise ValueError("held_slots: a slot appears twice in one message")
    if not isinstance(held, np.ndarray) or held.dtype != HELD or held.shape != slots.shape:
        raise ValueError(
            f"held must be an array of the type of held chunks, one per slot ({slots.shape}), "
            f"got {short(held)}"
        )
    if not len(held):
        return
    if held["hash"].min() < 0:
        raise ValueError("the hash of a held chunk must be at least 0")
    if held["tokens"].min() < 0:
        raise ValueError("the tokens of a held chunk must be at least 0")
    if not ((held["load_s"] >= 0) & (held["load_s"] < inf)).all():
        raise ValueError("the load_s of a held chunk must be finite and at least 0")


def _check_rows(slots: Any, rows: Any, capacity: int) -> None:
    _check_array("slots", slots)
    if not isinstance(rows, np.ndarray) or rows.dtype != ROW or rows.shape != slots.shape:
        raise ValueError(
            f"rows must be an array of the row type, one per slot ({slots.shape}), "
            f"got {short(rows)}"
        )
    if len(slots) and (problem := _problem(_integers(slots), _plain(rows), capacity)):
        raise ValueError(_PROBLEMS[problem].format(capacity - 1))


def _check_summary(summary: Any) -> None:
    if not isinstance(summary, np.void) or summary.dtype != SUMMARY:
        raise ValueError(f"summary must be one record of the summary type, got {short(summary)}")
    # All fields at once: reading them one by one takes longer than everything else here.
    values = _SUMMARY_CHECKED(summary.item())
    for name, value in zip(_SUMMARY_TIMES, values, strict=False):
        _check_number(name, value)
    for name, value in zip(_SUMMARY_COUNTS, values[len(_SUMMARY_TIMES) :], strict=True):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    for name in _SUMMARY_TRANSFERS if summary["transfers"] else ():  # else they are unused
        if not 0 <= summary[name].item() < inf:
            raise ValueError(f"{name} must be finite and at least 0, got {summary[name]}")
    stop_s, answer_s, spread, *corrections = values[_SUMMARY_STOP : len(_SUMMARY_TIMES)]
    for name, value in (("planned_stop_s", stop_s), ("kv_answer_s", answer_s)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    for name, correction in zip(_SUMMARY_CORRECTIONS, corrections, strict=True):
        if not 1 / MAX_CORRECTION <= correction <= MAX_CORRECTION:
            raise ValueError(
                f"{name} must be from {1 / MAX_CORRECTION} to {MAX_CORRECTION}, got {correction}"
            )
    if not 0 <= spread <= MAX_SPREAD:
        raise ValueError(f"step_spread must be from 0 to {MAX_SPREAD}, got {spread}")


@lru_cache(maxsize=32)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=of_extension)


def _named(name: str, value: Any, kind: Any, problem: str) -> str:
    """A decoding error with the names of fields in place of their positions in ``value``."""
    what, _, path = problem.partition(" - at ")
    hint = kind
    for place in map(int, re.findall(r"\[(\d+)\]", path)):
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            field = value._fields[place]
            hint = get_type_hints(type(value))[field]
            name = f"{name}.{field}"
        else:
            name = f"{name}[{place}]"
        value = value[place] if isinstance(value, Sequence) else None
    allowed = get_args(hint) if get_origin(hint) is Literal else ()
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        allowed = tuple(each.value for each in hint)
    if allowed:
        return f"{name} must be any of {', '.join(allowed)}, got {short(value)}"
    expected = what.partition(", got ")[0]
    return f"{name}: {expected[:1].lower()}{expected[1:]}, got {short(value)}"


def short(value: Any) -> str:
    """A value for an error message, shortened to at most 80 characters."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
