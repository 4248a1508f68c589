"""Why a promise was missed: the lateness of a request, in seconds by cause.

The time of a request is counted by cause, and each cause is allowed what the controller had counted
on when it promised; waiting before the promise (router, queue, start, failed attempts) is allowed
nothing, as it used up the slack. What exceeds that is scaled to sum to the lateness, for an excess
in one place is made up for in part by time saved in another one.

An engine keeps one row a step (:class:`StepTimeline`). Only for a late request are these read: the
step that was running tells what it waited for, so no request costs anything while it runs."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final

import numpy as np

from sluice.scheduling.request.kernels import DECODE_SEQUENCE, PREFILL_TOKENS, Floats


class Cause(enum.StrEnum):
    """What a late request's time went to."""

    EDGE = "edge"  # router and replica, before the engine got it
    DECISION = "decision"  # the controller's answer
    ADMISSION_QUEUE = "admission_queue"
    PREFILLS = "prefills"  # of other requests
    OWN_PREFILL = "own_prefill"
    DECODES = "decodes"
    KV_MEMORY = "kv_memory"  # it was preempted, or waited for blocks
    KV_TRANSFER = "kv_transfer"
    ENGINE_STALL = "engine_stall"  # a step took far longer than predicted, or none was made
    FAILURE = "failure"  # attempts that failed, or the answer did
    REPLICA_START = "replica_start"
    WAY_BACK = "way_back"  # between the engine and the client's connection
    UNKNOWN = "unknown"  # the client left before the engine reported


Parts = Mapping[Cause, float]
"""Seconds, >= 0."""

ENGINE: Final = (
    *(Cause.EDGE, Cause.PREFILLS, Cause.OWN_PREFILL, Cause.DECODES),
    *(Cause.KV_MEMORY, Cause.KV_TRANSFER, Cause.ENGINE_STALL),
)
"""The causes that an engine reports, in this order."""

_PREDICTED_WAITS: Final = (Cause.PREFILLS, Cause.DECODES, Cause.KV_MEMORY)

_ROUNDING_S: Final = 1e-9

_STALL_RATIO, _STALL_S = 2.0, 0.01
"""A step is stalled if it takes longer than this many times its prediction and this much more."""


def split(observed: Parts, allowed: Parts, lateness_s: float) -> dict[Cause, float]:
    """``lateness_s`` by cause, the largest part first; parts of 0 are left out."""
    excess = {cause: s - allowed.get(cause, 0.0) for cause, s in observed.items()}
    excess = {cause: s for cause, s in excess.items() if s > _ROUNDING_S}
    excess = excess or {cause: s for cause, s in observed.items() if s > _ROUNDING_S}
    whole_s = sum(excess.values())
    found = {cause: lateness_s * (s / whole_s) for cause, s in excess.items()}
    return dict(sorted(found.items(), key=lambda part: -part[1])) or {Cause.UNKNOWN: lateness_s}


def allowance(
    observed: Parts, predicted_s: float, own_s: float, transfer_s: float
) -> dict[Cause, float]:
    """What was predicted of the time from a decision to the first token: the request's own prefill
    and KV transfer, and else waits for others, whichever they were."""
    own_s = min(own_s, predicted_s)
    transfer_s = min(transfer_s, predicted_s - own_s)
    waits = {cause: observed.get(cause, 0.0) for cause in _PREDICTED_WAITS}
    share = (predicted_s - own_s - transfer_s) / (sum(waits.values()) or inf)
    found = {cause: wait_s * share for cause, wait_s in waits.items()}
    return found | {Cause.OWN_PREFILL: own_s, Cause.KV_TRANSFER: transfer_s}


# Columns of a step's row: when it ended, its predicted seconds, the KV blocks that were free when
# it was planned, and its work as in a ``StepSample``.

_END, _PREDICTED, _FREE, _WORK, _COLUMNS = 0, 1, 2, 3, 10
_DECODES = _WORK + DECODE_SEQUENCE - PREFILL_TOKENS


class StepTimeline:
    """The last ``most`` steps of an engine, or up to twice as many. ``O(1)`` a step, amortized."""

    def __init__(self, most: int = 4_096) -> None:
        self._rows = np.empty((2 * most, _COLUMNS))
        self._count = 0
        self.last_end_s = -inf

    def add(
        self, end_s: float, predicted_s: float, free_blocks: float, work: Sequence[float]
    ) -> None:
        """A step has ended. ``work``: the first seven sums of its ``StepSample``."""
        if self._count == len(self._rows):
            self._count //= 2
            self._rows[: self._count] = self._rows[self._count :]
        self._rows[self._count] = end_s, predicted_s, free_blocks, *work
        self._count += 1
        self.last_end_s = end_s

    def parts(
        self,
        start_s: float,
        end_s: float,
        pieces: Floats,
        own_s: float = 0.0,
        blocks: float = 0.0,
        apart: Iterable[tuple[float, float, Cause]] = (),
    ) -> tuple[float, ...]:
        """What a request waited for between two moments, seconds in the order of :data:`ENGINE`.
        ``own_s``: its own prefill's work by the latency model of ``pieces``; ``blocks``: that this
        needs; ``apart``: times in which it could not run, and why. ``O(steps between)``."""
        rows = self._rows[: self._count]
        first, last = np.searchsorted(rows[:, _END], (start_s, end_s))
        rows = rows[first : last + 1]
        found = dict.fromkeys(ENGINE, 0.0)
        if end_s <= start_s or not len(rows):
            return tuple(found.values())
        ends = np.minimum(rows[:, _END], end_s)
        begins = np.concatenate(((start_s,), ends[:-1]))
        if first == 0 and self._count > len(self._rows) // 2:
            begins[0] = max(start_s, ends[0] - rows[0, _PREDICTED])  # earlier steps are forgotten
        spans = ends - begins
        for from_s, to_s, cause in apart:
            cut = np.minimum(ends, to_s) - np.maximum(begins, from_s)
            cut = np.clip(cut, 0.0, spans)
            spans = spans - cut
            found[cause] += float(cut.sum())

        # What each step was made for; the rest of a stalled one, or the time before it, for none.
        predicted, work = rows[:, _PREDICTED], rows[:, _WORK:]
        costs = pieces[:, PREFILL_TOKENS:]
        prefill_s = (work[:, : _DECODES - _WORK] @ costs[:, : _DECODES - _WORK].T).max(axis=1)
        decode_s = (work[:, _DECODES - _WORK :] @ costs[:, _DECODES - _WORK :].T).max(axis=1)
        empty = prefill_s + decode_s <= 0.0
        stalled = empty | (spans > _STALL_RATIO * predicted + _STALL_S)
        usual = np.where(stalled, np.where(empty, 0.0, np.minimum(predicted, spans)), spans)
        found[Cause.ENGINE_STALL] += float((spans - usual).sum())
        prefilling = usual * (prefill_s / np.where(empty, 1.0, prefill_s + decode_s))
        waits = (prefill_s <= 0.0) & (rows[:, _FREE] < blocks)
        found[Cause.KV_MEMORY] += float(usual[waits].sum())
        found[Cause.DECODES] += float((usual - prefilling)[~waits].sum())

        # Its own prefill's share of all prefills'; of the first step only a part was after its
        # arrival.
        prefill_s[0] *= min(1.0, spans[0] / (predicted[0] or inf))
        all_s = float(prefill_s.sum())
        share = min(1.0, own_s / all_s) if all_s > 0.0 else 0.0
        found[Cause.OWN_PREFILL] += share * float(prefilling.sum())
        found[Cause.PREFILLS] += (1.0 - share) * float(prefilling.sum())
        scale = (end_s - start_s) / (sum(found.values()) or inf)
        return tuple([scale * part_s for part_s in found.values()])
