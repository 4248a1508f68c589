"""Validation of messages: malformed, impossible or out-of-range messages are refused.

A faulty or an older client must not be able to corrupt the mirror, so every message is checked
whole before any of it is applied. Each check raises ``ValueError`` with the bad value and what is
allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter
from typing import Any

import numpy as np

from sluice.controller.messages import (
    ReplicaDelta,
    ReplicaHello,
    RouteQuery,
    Trouble,
    TroubleNotice,
)
from sluice.controller.transport.report_rows import are_sound
from sluice.scheduling.fair_shares import MAX_WEIGHT
from sluice.scheduling.latency_profile import LatencyProfile
from sluice.scheduling.objective import SLO
from sluice.scheduling.prefix import HELD, HELD_SLOTS, MAX_CHUNKS
from sluice.scheduling.roles import ROLES
from sluice.scheduling.routing.base import Tier
from sluice.scheduling.stages import MOST_STAGES, Stage, check_stages
from sluice.scheduling.state import ROW, RUNNING, SUMMARY
from sluice.scheduling.step_correction import MAX_SPREAD
from sluice.scheduling.tpot import TPOTAnchor

MAX_TEXT = 256
"""Longest id or name, characters."""

MAX_CAPACITY = 1 << 18
"""Most request slots of one replica."""

MAX_FINISHED = 1 << 18
"""Most finished requests in one delta."""

MAX_KEYS = 1 << 16
"""Most keys or replica ids in one call."""

MAX_AVOIDED = 64
"""Most replicas that have failed one request."""

MAX_PROMPT_TOKENS = 1 << 31
MAX_KEY = (1 << 63) - 1

MAX_NUMBER = 1e15
"""Largest absolute value of a time or other number."""

MAX_CORRECTION = 1_000.0
"""Largest factor between predicted and real step time, and the inverse of the smallest."""

_TIERS = frozenset(Tier)

# The counts of a row are its last fields, all int32: one matrix view checks them all.
_COUNTS_FROM = ROW.fields["priority"][1] // 4 if ROW.fields else 0
_SUMMARY_COUNTS = ("steps", "waiting", "running", "free_kv_blocks", "total_kv_blocks")
_SUMMARY_CORRECTIONS = ("correction", "fixed_correction")
_SUMMARY_TIMES = (
    *("updated_s", "step_started_s", "last_step_s", "predicted_step_s"),
    *("step_spread", *_SUMMARY_CORRECTIONS),
)
_SUMMARY_SPREAD = _SUMMARY_TIMES.index("step_spread")
_SUMMARY_CHECKED = itemgetter(
    *((SUMMARY.names or ()).index(name) for name in (*_SUMMARY_TIMES, *_SUMMARY_COUNTS))
)
_SUMMARY_TRANSFERS = ("transfers", "transfer_seconds", "transfer_tokens")


def check_hello(hello: ReplicaHello) -> None:
    """Check a registration. ``O(rows)``.

    Raises:
        ValueError: it is no ``ReplicaHello``, or a field is out of range.
    """
    if not isinstance(hello, ReplicaHello):
        raise ValueError(f"expected a ReplicaHello, got {type(hello).__name__}")
    for name in ("replica_id", "node_id", "model", "policy"):
        check_text(name, getattr(hello, name), empty=name != "replica_id")
    check_role(hello.role)
    for name in ("max_batch_tokens", "max_sequences", "block_tokens"):
        _check_integer(name, getattr(hello, name), 1, MAX_PROMPT_TOKENS)
    _check_integer("capacity", hello.capacity, 1, MAX_CAPACITY)
    _check_integer("seq", hello.seq, 0, MAX_KEY)
    _check_number("now_s", hello.now_s)
    if not isinstance(hello.profile, LatencyProfile):
        raise ValueError(f"profile must be a LatencyProfile, got {type(hello.profile).__name__}")
    _ = hello.profile.model
    _check_flag("draining", hello.draining)
    _check_flag("closed", hello.closed)
    _check_flag("preempts", hello.preempts)
    _check_flag("hung", hello.hung)
    _check_rows(hello.slots, hello.rows, hello.capacity)
    _check_summary(hello.summary)
    _check_held(hello.held_slots, hello.held)


def check_delta_header(delta: ReplicaDelta) -> None:
    """Check the fields of a report that can be checked before its sender is looked up.

    Raises:
        ValueError: it is no delta, or its id, epoch, number or clock is impossible.
    """
    if not isinstance(delta, ReplicaDelta):
        raise ValueError(f"expected a ReplicaDelta, got {type(delta).__name__}")
    check_text("replica_id", delta.replica_id)
    _check_integer("epoch", delta.epoch, 0, MAX_KEY)
    _check_integer("seq", delta.seq, 0, MAX_KEY)
    _check_number("now_s", delta.now_s)


def check_delta_body(delta: ReplicaDelta, capacity: int) -> None:
    """Check the changes against the sender's table of ``capacity`` slots. ``O(rows)``.

    Raises:
        ValueError: slots, rows, summary, held chunks or finished keys are malformed or out of
            range.
    """
    _check_flag("draining", delta.draining)
    _check_flag("hung", delta.hung)
    _check_rows(delta.slots, delta.rows, capacity)
    _check_summary(delta.summary)
    _check_held(delta.held_slots, delta.held)
    check_keys("finished", delta.finished, MAX_FINISHED)


def check_query(query: RouteQuery) -> None:
    """Check a request to place.

    Raises:
        ValueError: it is no query, or a field is out of range.
    """
    if not isinstance(query, RouteQuery):
        raise ValueError(f"expected a RouteQuery, got {type(query).__name__}")
    _check_integer("key", query.key, 0, MAX_KEY)
    _check_objective(query.slo)
    _check_integer("prompt_tokens", query.prompt_tokens, 0, MAX_PROMPT_TOKENS)
    _check_number("waited_s", query.waited_s)
    if query.waited_s < 0:
        raise ValueError(f"waited_s must be at least 0, got {query.waited_s}")
    if not isinstance(query.tiers, frozenset) or not query.tiers or query.tiers - _TIERS:
        raise ValueError(f"tiers must be any of {short(_TIERS)}, got {short(query.tiers)}")
    _check_integer("output_tokens", query.output_tokens, 0, MAX_PROMPT_TOKENS)
    _check_integer("session", query.session, 0, MAX_KEY)
    _check_integer("prefill_key", query.prefill_key, 0, MAX_KEY)
    if query.prefill_key and query.prefill_key == query.key:
        raise ValueError("prefill_key must differ from key")
    check_text("request_id", query.request_id, empty=True)
    check_text("client_request_id", query.client_request_id, empty=True)
    check_text("moves_from", query.moves_from, empty=True)
    check_keys("prefix", query.prefix, MAX_CHUNKS)
    check_ids("avoid", query.avoid, MAX_AVOIDED)
    _check_integer("tenant", query.tenant, 0, MAX_KEY)
    _check_number("weight", query.weight)
    if not 1 / MAX_WEIGHT <= query.weight <= MAX_WEIGHT:
        raise ValueError(
            f"weight must be from {1 / MAX_WEIGHT} to {MAX_WEIGHT}, got {query.weight}"
        )


def _check_objective(slo: Any) -> None:
    """Unpickled objects skip the checks of their constructors."""
    if not isinstance(slo, SLO):
        raise ValueError(f"slo must be an SLO, got {type(slo).__name__}")
    try:
        columns = slo.columns
        anchor, stages = slo.tpot_anchor, slo.stages
        check_text("service_class", slo.service_class)
    except AttributeError as error:
        raise ValueError(f"slo is incomplete: {error}") from None
    if type(anchor) is not TPOTAnchor:
        raise ValueError(f"tpot_anchor must be a TPOTAnchor, got {short(anchor)}")
    sound = isinstance(columns, tuple) and len(columns) == 4
    if not sound or not all(type(value) is float and value > 0 for value in columns):
        raise ValueError(f"slo must be of positive times and a priority, got {short(columns)}")
    _check_stages(stages)


def _check_stages(stages: Any) -> None:
    if not isinstance(stages, tuple) or not all(type(stage) is Stage for stage in stages):
        raise ValueError(f"stages must be stages, got {short(stages)}")
    for stage in stages[:MOST_STAGES]:
        if not all(time_s is None or type(time_s) is float for time_s in stage.times_s):
            raise ValueError(f"a stage's times must be floats, got {short(stage)}")
    check_stages(stages)


def check_text(name: str, value: Any, empty: bool = False) -> None:
    """Check an id or a name.

    Raises:
        ValueError: it is no string, too long, or empty where that is not allowed.
    """
    least = 0 if empty else 1
    sound = isinstance(value, str) and least <= len(value) <= MAX_TEXT and has_bytes(value)
    if not sound:
        raise ValueError(
            f"{name} must be a string of {least} to {MAX_TEXT} characters, got {short(value)}"
        )


def check_ids(name: str, ids: Any, limit: int = MAX_KEYS) -> None:
    """Check a sequence of ids of replicas.

    Raises:
        ValueError: it is no sequence, too long, or holds something that is no id.
    """
    for each in listed(name, ids, "ids", limit):
        check_text(name, each)


def check_notices(notices: Any) -> None:
    """Check a router's notices about replicas.

    Raises:
        ValueError: it is no sequence of notices, too long, or one of them is malformed.
    """
    for notice in listed("notices", notices, "notices", MAX_KEYS):
        if not isinstance(notice, TroubleNotice):
            raise ValueError(f"expected a TroubleNotice, got {short(notice)}")
        check_text("replica_id", notice.replica_id)
        if not isinstance(notice.trouble, Trouble):
            raise ValueError(f"trouble must be any of {short(list(Trouble))}, got {short(notice)}")


def check_source(source: Any) -> None:
    """Check the number that identifies a router.

    Raises:
        ValueError: it is no integer from 0 to :data:`MAX_KEY`.
    """
    _check_integer("source", source, 0, MAX_KEY)


def check_serial(name: str, value: Any) -> None:
    """Check a serial number, such as that of a push.

    Raises:
        ValueError: it is no integer from 0 to :data:`MAX_KEY`.
    """
    _check_integer(name, value, 0, MAX_KEY)


def has_bytes(text: str) -> bool:
    """Whether ``text`` can be encoded: half of a surrogate pair cannot, and a metrics page that
    contained it could not be sent."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_role(role: Any) -> None:
    """Check the role of a replica.

    Raises:
        ValueError: there is no role of that name.
    """
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"role must be any of {', '.join(ROLES)}, got {short(role)}")


def check_keys(name: str, keys: Any, limit: int = MAX_KEYS) -> None:
    """Check a sequence of request keys.

    Raises:
        ValueError: it is no sequence, too long, or holds something that is no key.
    """
    for key in listed(name, keys, "keys", limit):
        _check_integer(name, key, 0, MAX_KEY)


def listed(name: str, values: Any, what: str, limit: int) -> Sequence[Any]:
    """``values``, the argument ``name``, if it is a sequence of at most ``limit`` of ``what``.

    Raises:
        ValueError: it is no sequence, or too long.
    """
    if not isinstance(values, list | tuple) or len(values) > limit:
        raise ValueError(f"{name} must be a list of at most {limit} {what}, got {short(values)}")
    return values


def _check_integer(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is int and least <= value <= most:
        return
    if (
        not isinstance(value, int | np.integer)
        or isinstance(value, bool)
        or not least <= value <= most
    ):
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {short(value)}")


def _check_number(name: str, value: Any) -> None:
    if type(value) is float and -MAX_NUMBER <= value <= MAX_NUMBER:
        return
    if (
        not isinstance(value, float | int | np.floating)
        or isinstance(value, bool)
        or not -MAX_NUMBER <= value <= MAX_NUMBER
    ):
        raise ValueError(f"{name} must be a number within +-{MAX_NUMBER:g}, got {short(value)}")


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {short(value)}")


def _check_array(name: str, slots: Any) -> None:
    if not isinstance(slots, np.ndarray) or slots.ndim != 1 or slots.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a one-dimensional integer array, got {short(slots)}")


def _check_slots(name: str, slots: Any, capacity: int) -> None:
    _check_array(name, slots)
    if not len(slots):
        return
    if slots.min() < 0 or slots.max() >= capacity:
        raise ValueError(f"{name} must be from 0 to {capacity - 1}, got {short(slots)}")
    if len(set(slots.tolist())) != len(slots):
        raise ValueError(f"{name}: a slot appears twice in one message")


def _check_held(slots: Any, held: Any) -> None:
    _check_slots("held_slots", slots, HELD_SLOTS)
    if not isinstance(held, np.ndarray) or held.dtype != HELD or held.shape != slots.shape:
        raise ValueError(
            f"held must be an array of the type of held chunks, one per slot ({slots.shape}), "
            f"got {short(held)}"
        )
    if not len(held):
        return
    if held["hash"].min() < 0:
        raise ValueError("the hash of a held chunk must be at least 0")
    if held["tokens"].min() < 0 or held["tokens"].max() > MAX_PROMPT_TOKENS:
        raise ValueError(f"the tokens of a held chunk must be from 0 to {MAX_PROMPT_TOKENS}")


def _check_rows(slots: Any, rows: Any, capacity: int) -> None:
    _check_array("slots", slots)
    if not isinstance(rows, np.ndarray) or rows.dtype != ROW or rows.shape != slots.shape:
        raise ValueError(
            f"rows must be an array of the row type, one per slot ({slots.shape}), "
            f"got {short(rows)}"
        )
    if are_sound(slots, rows, capacity):
        return
    _check_slots("slots", slots, capacity)
    phase = rows["phase"]
    if phase.min() < 0 or phase.max() > RUNNING:
        raise ValueError(f"phase must be from 0 to {RUNNING}, got {short(phase)}")
    _check_live_rows(rows[phase != 0])


def _check_live_rows(rows: np.ndarray) -> None:
    if not len(rows):
        return
    if rows["key"].min() < 0:
        raise ValueError("a request's key must be at least 0")
    if rows.view("<i4").reshape(len(rows), -1)[:, _COUNTS_FROM:].min() < 0:
        raise ValueError("the counts of a request (tokens, blocks, priority) must be at least 0")
    if not np.isfinite(rows["arrival_s"]).all():
        raise ValueError("a request's arrival must be a finite time")
    for name in ("first_token_s", "last_token_s"):
        if np.isinf(rows[name]).any():
            raise ValueError(f"{name} must be a finite time, or nan for none")
    if rows["best_effort"].max() > 1:
        raise ValueError("best_effort must be 0 or 1")
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        if not (rows[name] > 0).all():
            raise ValueError(f"{name} must be positive, or infinite for none")


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
    if summary["transfers"]:
        _check_transfers(summary)
    spread, *corrections = values[_SUMMARY_SPREAD : len(_SUMMARY_TIMES)]
    for name, correction in zip(_SUMMARY_CORRECTIONS, corrections, strict=True):
        if not 1 / MAX_CORRECTION <= correction <= MAX_CORRECTION:
            raise ValueError(
                f"{name} must be from {1 / MAX_CORRECTION} to {MAX_CORRECTION}, got {correction}"
            )
    if not 0 <= spread <= MAX_SPREAD:
        raise ValueError(f"step_spread must be from 0 to {MAX_SPREAD}, got {spread}")


def _check_transfers(summary: np.void) -> None:
    """Check the sums over KV transfers; they are unused while ``transfers`` is 0."""
    for name in _SUMMARY_TRANSFERS:
        if not 0 <= summary[name].item() < inf:
            raise ValueError(f"{name} must be finite and at least 0, got {summary[name]}")


def short(value: Any) -> str:
    """A value for an error message, shortened to at most 80 characters."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
