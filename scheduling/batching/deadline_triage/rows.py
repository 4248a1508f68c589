"""Compiled per-row computations of :mod:`sluice.scheduling.batching.deadline_triage.policy`."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import ceil, inf, isnan

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.assumptions import UNKNOWN_OUTPUT_TOKENS
from sluice.scheduling.request.kernels import (
    ARRIVAL,
    COMPUTED,
    E2E,
    EMITTED,
    EXPECTED,
    FIRST_TOKEN,
    KV_BLOCKS,
    LAST_TOKEN,
    PENDING,
    PROMISED,
    PROMPT,
    TPOT,
    TTFT,
    Floats,
    Ints,
    compiled,
    deadline_s,
    most_work_s,
)

UNPACED_S = 1.0
"""A decode without TPOT is due its next token this long after the last one, so that it never stalls
indefinitely."""

LEAST_TIMELY = 0.01
"""Share of an output that counts as on time where none can be: late requests have some worth."""


@compiled
def expected_tokens(row: Floats) -> float:
    """The predicted length of a row's output, tokens: more than it has emitted."""
    expected = row[EXPECTED]
    if isnan(expected):
        expected = UNKNOWN_OUTPUT_TOKENS
    return max(expected, row[EMITTED] + 1.0)


@compiled
def time_left_s(
    table: Floats,
    prefill: NDArray[np.bool_],
    work_s: Floats,
    anchor: int,
    now_s: float,
    fixed_s: float,
) -> Floats:
    """Per row, the time until its next token is due. ``O(requests)``.

    An end-to-end deadline makes it earlier, with the expected output emitted at a step of all
    decodes or the minimum TPOT per token, whichever is longer. A decode without TPOT is due
    :data:`UNPACED_S` after its last token.
    """
    count = table.shape[0]
    left_s = np.empty(count)
    step_s, least_s, ends = fixed_s, inf, False
    for row in range(count):
        left_s[row] = deadline_s(table[row], anchor)
        ends |= table[row, E2E] < inf
        least_s = min(least_s, table[row, TPOT])
        if not prefill[row]:
            step_s += work_s[row]
    if ends:
        hold_ends(table, left_s, max(step_s, least_s if least_s < inf else 2.0 * step_s))
    for row in range(count):
        if left_s[row] == inf and not prefill[row]:
            last_s = table[row, LAST_TOKEN]
            if isnan(last_s):
                last_s = table[row, FIRST_TOKEN]
            left_s[row] = (now_s if isnan(last_s) else last_s) + UNPACED_S
        left_s[row] -= now_s
    return left_s


@compiled
def by_time_left(chosen: NDArray[np.bool_], left_s: Floats) -> Ints:
    """The chosen rows by the time that is left, ties as they are. ``O(n log n)``."""
    rows = np.flatnonzero(chosen)
    return rows[np.argsort(left_s[rows], kind="mergesort")]


@compiled
def can_catch_up(table: Floats, rows: Ints, left_s: Floats, alone_s: Floats) -> NDArray[np.bool_]:
    """Which of the decodes ``rows`` are guaranteed and can be on time again when their expected
    output ends, if they run at ``alone_s`` a token from now on.

    Args:
        left_s: per decode, time until its next token is due; negative where that has passed.
        alone_s: per decode, time of a step with it alone.
    """
    able = np.zeros(rows.shape[0], np.bool_)
    for place, row in enumerate(rows):
        if table[row, PROMISED] > 0.0:
            # An output longer than predicted may double its length.
            emitted = table[row, EMITTED]
            tokens = max(expected_tokens(table[row]) - emitted, emitted)
            gained_s = (tokens - 1.0) * (table[row, TPOT] - alone_s[place])
            able[place] = left_s[place] + gained_s >= alone_s[place]
    return able


@compiled
def paces_of(
    table: Floats,
    rows: Ints,
    left_s: Floats,
    work_s: Floats,
    output: Floats,
    fixed_s: float,
    holdable_s: float,
) -> tuple[Floats, Floats, Floats, NDArray[np.bool_], tuple[float, float, float]]:
    """Of the decodes ``rows``, by deadline: the time left, the work of one step, the time between
    tokens that each must keep, and which can still be on time; and over these, the minimum time
    left, TPOT and TPOT of a step that verifies drafts, infinite where there are none.

    Args:
        output: per row, the tokens that a step is expected to emit; empty where each emits one.
        holdable_s: minimum TPOT that a useful batch can meet: a shorter one is ignored unless
            admission has guaranteed it.
    """
    left_s, work_s = left_s[rows], work_s[rows]
    alone_s = fixed_s + work_s
    late = can_catch_up(table, rows, left_s, alone_s)
    pace_s = np.empty(rows.shape[0])
    live = np.zeros(rows.shape[0], np.bool_)
    first_s = least_s = least_step_s = inf
    for place, row in enumerate(rows):
        tpot_s = table[row, TPOT]
        step_s = tpot_s * output[row] if output.shape[0] else tpot_s
        pace_s[place] = max(step_s, alone_s[place])
        holdable = tpot_s < inf and (tpot_s >= holdable_s or table[row, PROMISED] > 0.0)
        if holdable and (left_s[place] >= alone_s[place] or late[place]):
            if first_s == inf:
                first_s = max(0.0, left_s[place])
            live[place] = True
            least_s, least_step_s = min(least_s, tpot_s), min(least_step_s, step_s)
    return left_s, work_s, pace_s, live, (first_s, least_s, least_step_s)


@compiled
def capacity_s(
    left_s: Floats,
    slack_s: Floats,
    pace_s: Floats,
    step_s: Floats,
    fixed_s: float,
    first_slack_s: float,
    least_pace_s: float,
) -> Floats:
    """Time for prefill within each of ``left_s`` if decodes are delayed until their slack is spent.

    FairBatching appendix A, steps 1 to 4, at several horizons at once: by ``t`` a decode with slack
    ``s`` and pace ``p`` runs ``(t - s) / p`` times, and each of the steps that the most urgent one
    forces costs the fixed time. A late decode counts as due now. ``O(horizons + decodes)``.

    Args:
        left_s: the horizons, ascending.
        slack_s: per decode, time until it is due, ascending.
        pace_s: per decode, time between its tokens.
        step_s: per decode, its work in one step.
        fixed_s: time of an empty step.
        first_slack_s: slack of the decode that forces the steps.
        least_pace_s: time between those steps; infinite for none.
    """
    capacity = np.empty(left_s.shape[0])
    decode = 0
    rate = 0.0
    offset_s = 0.0
    for item in range(left_s.shape[0]):
        horizon_s = left_s[item]
        while decode < slack_s.shape[0] and slack_s[decode] < horizon_s:
            share = step_s[decode] / pace_s[decode]
            rate += share
            offset_s += share * max(0.0, slack_s[decode])
            decode += 1
        steps = 1.0
        if least_pace_s < inf:
            steps += max(0.0, horizon_s - first_slack_s) / least_pace_s
        capacity[item] = horizon_s - fixed_s * steps - (rate * horizon_s - offset_s)
    return capacity


@compiled
def fit_beside(
    rows: Ints, left_s: Floats, work_s: Floats, step_s: float, pace_s: float, usable: float
) -> bool:
    """Whether the prefills ``rows``, by deadline, are on time with every decode in every batch.

    ``step_s`` is the time of a step with all decodes, ``pace_s`` the time between steps, and
    ``usable`` the share of the time to count on.
    """
    queued_s = 0.0
    for row in rows:
        queued_s += work_s[row]
        if queued_s > usable * (left_s[row] - step_s * (1.0 + left_s[row] / pace_s)):
            return False
    return True


@compiled
def blocks_needed(table: Floats, rows: Ints, block_tokens: int) -> Floats:
    """KV blocks that the whole sequence of each of ``rows`` needs beyond those it holds."""
    needed = np.empty(rows.shape[0])
    for place, row in enumerate(rows):
        upto = ceil((table[row, COMPUTED] + table[row, PENDING]) / block_tokens)
        needed[place] = max(0.0, upto - table[row, KV_BLOCKS])
    return needed


@compiled
def timely_share(table: Floats, rows: Ints, left_s: Floats, work_s: Floats) -> Floats:
    """The share of the expected output of each of the prefills ``rows``, served now, that can still
    be on time, if the output catches up after a late first token at twice the pace of the TPOT; at
    least :data:`LEAST_TIMELY`."""
    share = np.empty(rows.shape[0])
    for place, row in enumerate(rows):
        pace_s = table[row, TPOT] if table[row, TPOT] < inf else UNPACED_S
        late_s = max(0.0, work_s[row] - left_s[row])
        on_time = 1.0 - 2.0 * late_s / (pace_s * expected_tokens(table[row]))
        share[place] = max(LEAST_TIMELY, on_time)
    return share


@compiled
def hold_ends(table: Floats, due_s: Floats, pace_s: float) -> None:
    """Make the deadlines ``due_s`` earlier where an end-to-end deadline requires it, with the
    expected output emitted at ``pace_s`` per token."""
    for row in range(table.shape[0]):
        after = max(0.0, expected_tokens(table[row]) - table[row, EMITTED] - 1.0)
        end_s = table[row, ARRIVAL] + table[row, E2E]
        due_s[row] = min(due_s[row], end_s - after * pace_s)


@compiled
def mean_prompt_s(table: Floats, pieces: Floats) -> float:
    """Mean work of the whole prompts of all rows, seconds. ``O(requests)``."""
    total_s = 0.0
    for row in range(table.shape[0]):
        total_s += most_work_s(pieces, table[row, PROMPT], 0.0)
    return total_s / table.shape[0]


@compiled
def mean_ttft_s(table: Floats) -> float:
    """Mean TTFT of the rows that state one, seconds; infinite where none does."""
    total_s, stated = 0.0, 0
    for row in range(table.shape[0]):
        if table[row, TTFT] < inf:
            total_s += table[row, TTFT]
            stated += 1
    return total_s / stated if stated else inf
