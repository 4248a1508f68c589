"""The state of one replica as plain arrays: what its scheduler exports and the controller mirrors.
A message carries ``now_s`` of the replica's monotonic clock, so hosts need no common clock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sluice.scheduling.fleet.prefix import NO_HELD
from sluice.scheduling.request.kernels import LIVE, Floats
from sluice.scheduling.tenancy.usage import NO_ACCOUNTS

WAITING = 1
RUNNING = 2

ROW = np.dtype(
    [
        ("key", "<i8"),  # the request's 63-bit key
        ("arrival_s", "<f8"),
        ("ttft_s", "<f4"),  # objectives: inf where none is stated
        ("tpot_s", "<f4"),  # the tightest of its stage and of those that follow
        ("e2e_s", "<f4"),
        ("priority", "<i4"),
        ("prompt_tokens", "<i4"),
        ("computed_tokens", "<i4"),
        ("pending_tokens", "<i4"),  # tokens that could be scheduled now; 1 in decode
        ("emitted_tokens", "<i4"),
        ("kv_blocks", "<i4"),
        ("phase", "<i4"),  # 0: free slot, else WAITING or RUNNING
        ("expected_tokens", "<i4"),  # predicted length of its whole output; 0: nothing is known
        ("best_effort", "<i4"),  # 1: nothing was guaranteed to it
        ("first_token_s", "<f8"),  # nan before the first token
        ("last_token_s", "<f8"),  # the latest one
        ("later_stages", "<i4"),  # that follow the one that it is in
        ("later_tokens", "<i4"),  # of prompt, that enter before the next of them that has any
    ]
)
"""A live request; ``phase == 0`` marks a free slot. From the key to the later stages its fields are
those of ``request.kernels.LIVE``, with ``phase`` in the place of ``running``."""

_SAME = [name for name in LIVE.names or () if name in (ROW.names or ())]
_SAME.remove("expected_tokens")

PLAN_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01)
"""Upper bounds of the plan-latency histogram; one more bucket counts the rest."""

STEP_RATIO_BUCKETS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0)
"""Upper bounds of the histogram of real over predicted step time; one more counts the rest."""

STOP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the histogram of times until a prefill has stopped; one more counts the rest."""

DRAFT_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10)
"""Upper bounds of the histogram of drafted tokens that a decode's step checks; one more counts the
rest."""

SUMMARY = np.dtype(
    [
        ("updated_s", "<f8"),  # when this summary was written
        ("step_started_s", "<f8"),
        ("last_step_s", "<f8"),
        ("predicted_step_s", "<f8"),
        ("next_begins_s", "<f8"),  # when the batch after those in flight can begin
        ("correction", "<f8"),  # learned factor on the work of a step's sequences
        ("fixed_correction", "<f8"),  # the same on what a step costs without any
        ("step_spread", "<f8"),  # relative error of corrected predictions, root mean square
        ("steps", "<i8"),
        ("busy_s", "<f8"),  # time in which a batch ran
        ("waiting", "<i4"),
        ("running", "<i4"),
        ("free_kv_blocks", "<i4"),
        ("total_kv_blocks", "<i4"),
        ("preemptions", "<i8"),
        ("evictions", "<i8"),  # of best-effort requests for guaranteed ones
        ("evicted_tokens", "<i8"),  # computed tokens that these lost
        ("best_effort_wait_s", "<f8"),  # longest of a best-effort request that does not run
        ("patience_s", "<f8"),  # after which such a wait gives a share of the engine
        ("plan_mismatches", "<i8"),  # steps in which the engine ran other tokens than planned
        ("plan_seconds_sum", "<f8"),
        ("step_ratio_sum", "<f8"),
        ("plan_histogram", "<i8", (len(PLAN_BUCKETS_S) + 1,)),
        ("step_ratio_histogram", "<i8", (len(STEP_RATIO_BUCKETS) + 1,)),
        # Of engines that decode speculatively:
        ("drafts_checked", "<i8"),  # drafted tokens
        ("drafts_accepted", "<i8"),  # those that were right
        ("draft_s", "<f8"),  # learned time to draft one token for every decode; 0 where it is free
        ("draft_lengths", "<i8", (len(DRAFT_LENGTHS) + 1,)),  # decode steps, by drafts checked
        # Of engines that suspend running prefills for more urgent ones:
        ("rounds", "<i8"),  # of the engine's loop
        ("suspended", "<i8"),  # prefills, now
        ("suspensions", "<i8"),
        ("late_stops", "<i8"),  # prefills that had ended before they saw that they should stop
        ("resumes", "<i8"),
        ("discards", "<i8"),  # prefills given up, as no request waits for them any more
        ("suspended_s", "<f8"),  # time that prefills were suspended
        ("decide_s", "<f8"),  # time that decisions took
        ("reserved_bytes", "<i8"),  # memory kept for suspended prefills, on one worker
        ("stop_s", "<f8"),  # time from the signals to the stops
        ("stop_histogram", "<i8", (len(STOP_BUCKETS_S) + 1,)),
        ("planned_stop_s", "<f8"),  # time that is planned for a stop before a step of decodes
        ("kv_answer_s", "<f8"),  # mean time until a connector says what it holds of a prompt
        # Of engines that take over the KV of prompts that other replicas have computed:
        ("transfers", "<i8"),  # that arrived
        ("transfer_seconds", "<f8"),  # that those took, from the wish for the KV to its arrival
        ("transfer_tokens", "<i8"),  # of the prompts, that were moved
        ("transfer_bytes", "<i8"),
        ("transfer_failures", "<i8"),  # failed KV transfers: their prompts were computed here
    ]
)
"""Counters and gauges of an engine's scheduler; counters only grow."""


class EngineState(NamedTuple):
    """A consistent copy of a scheduler's state, made at ``now_s`` of the replica's monotonic clock.
    ``slots`` is ``int32[n]``, which a request keeps while it lives; ``rows`` ``ROW[n]``;
    ``summary`` a ``SUMMARY`` scalar; ``held`` the chunks whose KV it holds by slot, empty if
    unknown; ``accounts`` who has used the engine, ``ACCOUNT[n]``."""

    now_s: float
    slots: np.ndarray
    rows: np.ndarray
    summary: np.void
    held: np.ndarray = NO_HELD
    accounts: np.ndarray = NO_ACCOUNTS


def rows_of(table: Floats, later: Floats | None = None) -> np.ndarray:
    """The rows of an engine's queue as a replica reports them, ``ROW[n]``, without keys. ``table``
    is ``float64[n, FIELDS]`` of a ``QueueView``; ``later`` has the fields of ``stages.later_of`` or
    ``None``."""
    live = table.view(LIVE)[:, 0]
    rows = np.zeros(len(table), ROW)
    for name in _SAME:
        rows[name] = live[name]
    rows["expected_tokens"] = np.fmax(live["expected_tokens"], 0)
    rows["phase"] = np.where(live["running"] > 0, RUNNING, WAITING)
    if later is not None:
        rows["tpot_s"] = np.minimum(rows["tpot_s"], later[:, 0])
        rows["later_stages"], rows["later_tokens"] = later[:, 1], later[:, 2]
    return rows
