"""The compiled recurrence of :mod:`sluice.scheduling.admission.slos_serve_selection`, with the
readings stated there.

A state is a count per class of new requests, as one number in mixed radix, and a level of memory.
Its score is the best value over the sets with these counts: the prefill budget left at the current
deadline, seconds, or, where decodes begin as prefills end, the negated earliest time at which all
its prefills have ended.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.kernels import Floats, Ints, compiled

SLIP_S = 1e-9
"""Rounding tolerance of sums of times, seconds."""


@compiled
def rate_of(fixed_s: Floats, share: Floats, step_s: float, base: Floats, own: Floats) -> float:
    """Seconds of prefill per second beside decodes that take ``base + own`` of each second, by
    piece; below zero where the decodes alone exceed the capacity."""
    least = inf
    for piece in range(fixed_s.shape[0]):
        left = 1.0 - fixed_s[piece] / step_s - base[piece] - own[piece]
        if left < 0.0:
            least = min(least, left)
        elif share[piece] > 0.0:
            least = min(least, left / share[piece])
    return least


@compiled
def states_of(
    sizes: Ints, class_tier: Ints, class_s: Floats, value: Floats, pace: Floats
) -> tuple[Ints, Ints, Ints, Floats, Floats]:
    """The states: the stride of each class; per state its tightest tier, its number of requests,
    its worth, and, by tightest tier of all, the share of each second that its decodes take."""
    classes, tiers = sizes.shape[0], pace.shape[0]
    stride = np.ones(classes + 1, np.int64)
    for kind in range(classes):
        stride[kind + 1] = stride[kind] * (sizes[kind] + 1)
    states = stride[classes]
    tightest = np.full(states, tiers - 1)
    count = np.zeros(states, np.int64)
    worth = np.zeros(states)
    taken = np.zeros((states, tiers, class_s.shape[1]))
    highest = 0
    for state in range(1, states):
        while state >= stride[highest + 1]:
            highest += 1
        # The state with one request less of its last class has been computed already.
        source, kind = state - stride[highest], class_tier[highest]
        tightest[state] = min(tightest[source], kind)
        count[state] = count[source] + 1
        worth[state] = worth[source] + value[highest]
        for tier in range(tiers):
            taken[state, tier] = taken[source, tier] + pace[kind, tier] * class_s[highest]
    return stride, tightest, count, worth, taken


@compiled
def set_rates(
    rates: Floats,
    score: Floats,
    alive: NDArray[np.bool_],
    every: bool,
    decoding_s: Floats,
    present: Ints,
    pace: Floats,
    step_s: Floats,
    fixed_s: Floats,
    share: Floats,
    tightest: Ints,
    taken: Floats,
) -> None:
    """Set the rate of each live state, or of ``every`` state, beside the guaranteed decodes
    ``decoding_s[tier, piece]``; and end states whose decodes can no longer keep their pace."""
    tiers, pieces = decoding_s.shape
    base = np.zeros((tiers, pieces))
    first = tiers - 1
    for tier in range(tiers - 1, -1, -1):
        if present[tier] > 0:
            first = min(first, tier)
        for other in range(tiers - 1):
            for piece in range(pieces):
                base[tier, piece] += decoding_s[other, piece] * pace[other, tier]
    for state in range(rates.shape[0]):
        if not (every or alive[state]):
            continue
        tier = min(first, tightest[state])
        rates[state] = rate_of(fixed_s, share, step_s[tier], base[tier], taken[state, tier])
        if rates[state] < min(0.0, rates[0]) - SLIP_S:
            score[state] = -inf
            alive[state] = False


@compiled
def force(
    score: Floats,
    alive: NDArray[np.bool_],
    rates: Floats,
    need_s: float,
    limit: float,
    at_due: bool,
) -> None:
    """Let every state serve a guaranteed prefill, and end the states in which new requests make it
    late.

    State 0, without new requests, continues even if the prefill is late. Any other state in which
    it is late ends.
    """
    for state in range(score.shape[0]):
        if not alive[state]:
            continue
        price = need_s if at_due else (need_s / rates[state] if rates[state] > 0.0 else inf)
        score[state] -= price
        if state > 0:
            alive[state] = False
            for level in range(score.shape[1]):
                if score[state, level] < limit - SLIP_S:
                    score[state, level] = -inf
                else:
                    alive[state] = True


@compiled
def offer(
    score: Floats,
    alive: NDArray[np.bool_],
    rates: Floats,
    mark: NDArray[np.bool_],
    count: Ints,
    stride: int,
    size: int,
    memory: int,
    places: int,
    need_s: float,
    limit: float,
    at_due: bool,
) -> None:
    """Let every state take a new request or skip it; ``mark`` the states reached by taking it."""
    levels = score.shape[1]
    # From the highest state down, so that none takes the same request twice.
    for state in range(score.shape[0] - 1, stride - 1, -1):
        if state // stride % (size + 1) == 0:
            continue
        source = state - stride
        if not alive[source] or count[state] > places or rates[state] < -SLIP_S:
            continue
        if rates[source] <= 0.0 and not at_due:
            continue
        price = need_s if at_due else need_s / rates[source]
        for level in range(levels - 1, memory - 1, -1):
            after = score[source, level - memory] - price
            if after >= limit - SLIP_S and after > score[state, level]:
                score[state, level] = after
                mark[state, level] = alive[state] = True


@compiled
def solve(
    due_s: Floats,
    need_s: Floats,
    memory: Ints,
    kind: Ints,
    tier: Ints,
    decode_s: Floats,
    decoding_s: Floats,
    present: Ints,
    step_s: Floats,
    pace: Floats,
    fixed_s: Floats,
    share: Floats,
    sizes: Ints,
    class_tier: Ints,
    class_s: Floats,
    value: Floats,
    levels: int,
    places: int,
    at_due: bool,
) -> NDArray[np.bool_]:
    """Which of the requests, by deadline ascending, to take; requests of ``kind`` -1 are forced.

    ``decoding_s`` and ``present`` are overwritten. Among sets of equal worth, the one with the best
    score at the last deadline is taken.
    """
    stride, tightest, count, worth, taken = states_of(sizes, class_tier, class_s, value, pace)
    states, requests = worth.shape[0], due_s.shape[0]
    mark = np.zeros((sizes.sum(), states, levels + 1), np.bool_)
    offered = 0
    score = np.full((states, levels + 1), -inf)
    score[0, 0] = -fixed_s.max()
    alive = np.zeros(states, np.bool_)
    alive[0] = True
    rates = np.empty(states)
    stale = True
    time_s = 0.0
    for index in range(requests + 1):
        own = kind[index] if index < requests else -1
        if stale:
            # An offer also needs the rates of the states that it can reach.
            set_rates(
                rates, score, alive, own >= 0, decoding_s, present, pace, step_s, fixed_s, share,
                tightest, taken,
            )  # fmt: skip
            stale = own < 0
        if index == requests:
            break
        limit = 0.0 if at_due else -due_s[index]
        if at_due and due_s[index] > time_s:
            for state in range(states):
                if alive[state]:
                    score[state] += (due_s[index] - time_s) * rates[state]
            time_s = due_s[index]
        if own >= 0:
            offer(
                score, alive, rates, mark[offered], count, stride[own], sizes[own],
                memory[index], places, need_s[index], limit, at_due,
            )  # fmt: skip
            offered += 1
            continue
        force(score, alive, rates, need_s[index], limit, at_due)
        if tier[index] < step_s.shape[0] - 1:
            decoding_s[tier[index]] += decode_s[index]
            present[tier[index]] = 1
            stale = True
    return backtrack(score, mark, worth, kind, stride, memory)


@compiled
def backtrack(
    score: Floats,
    mark: NDArray[np.bool_],
    worth: Floats,
    kind: Ints,
    stride: Ints,
    memory: Ints,
) -> NDArray[np.bool_]:
    """The requests on the path to the state of greatest worth, and among these of best score."""
    state, level = 0, 0
    for other in range(score.shape[0]):
        for at in range(score.shape[1]):
            better = worth[other] > worth[state] or (
                worth[other] == worth[state] and score[other, at] > score[state, level]
            )
            if score[other, at] > -inf and better:
                state, level = other, at
    took = np.zeros(kind.shape[0], np.bool_)
    offered = mark.shape[0]
    for index in range(kind.shape[0] - 1, -1, -1):
        if kind[index] < 0:
            continue
        offered -= 1
        if mark[offered, state, level]:
            took[index] = True
            state -= stride[kind[index]]
            level -= memory[index]
    return took
