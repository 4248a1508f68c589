"""The compiled recurrence of ``selection``, with the readings stated there.

A state is a count per class of new requests, as one number in mixed radix. Its score is the most
prefill budget left at the current deadline, seconds, or, where decodes begin as prefills end, the
negated earliest time at which all its prefills have ended."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.request.kernels import Floats, Ints, compiled

SLIP_S = 1e-9
"""Rounding tolerance of sums of times, seconds."""


EVENT = np.dtype([("due_s", "<f8"), ("need_s", "<f8"), ("kind", "<i8"), ("tier", "<i8")])
"""A pending prefill: when it is due, its time, its class, or -1 where it is promised already, and
its TPOT tier."""

CLASS = np.dtype([("members", "<i8"), ("tier", "<i8"), ("value", "<f8"), ("blocks", "<f8")])
"""A class of new requests: how many they are, their TPOT tier, their value, and the KV blocks of
each; 0 where all of them fit."""

PIECE = np.dtype([("fixed_s", "<f8"), ("share", "<f8")])
"""A piece of the latency model, see
:class:`~sluice.scheduling.admission.slos_serve.selection.Supply`."""


class Tiers(NamedTuple):
    """The TPOT tiers, ascending, and behind them the requests without a TPOT.

    ``step_s`` is the time of a batch where each is the tightest tier present; ``pace[tier,
    tightest]`` is how often a decode of the tier runs, tokens per second."""

    step_s: Floats
    pace: Floats
    pieces: Any


class States(NamedTuple):
    """The states of the recurrence, one entry of each array per state, but for ``stride``: what one
    request more of each class adds to the number of a state.

    ``taken[state, tier, piece]`` is the share of each second that its decodes take, by the tightest
    tier of all; ``score`` is minus infinity where a state cannot be reached; ``rates`` are seconds
    of prefill per second."""

    stride: Ints
    tightest: Ints
    worth: Floats
    fits: NDArray[np.bool_]
    taken: Floats
    score: Floats
    alive: NDArray[np.bool_]
    rates: Floats


@compiled
def rate_of(pieces: Any, step_s: float, base: Floats, own: Floats) -> float:
    """Seconds of prefill per second beside decodes that take ``base + own`` of each second, by
    piece; below zero where the decodes alone exceed the capacity."""
    least = inf
    for piece in range(pieces.shape[0]):
        left = 1.0 - pieces[piece].fixed_s / step_s - base[piece] - own[piece]
        if left < 0.0:
            least = min(least, left)
        elif pieces[piece].share > 0.0:
            least = min(least, left / pieces[piece].share)
    return least


@compiled
def states_of(classes: Any, class_s: Floats, tiers: Tiers, room: tuple[int, float]) -> States:
    """The states, of which only the one without new requests is reached. ``room``: sequence slots
    and KV blocks."""
    places, free = room
    pace = tiers.pace
    most = pace.shape[0]
    stride = np.ones(classes.shape[0] + 1, np.int64)
    for kind in range(classes.shape[0]):
        stride[kind + 1] = stride[kind] * (classes[kind].members + 1)
    states = stride[-1]
    tightest = np.full(states, most - 1)
    count = np.zeros(states, np.int64)
    worth, blocks, fits = np.zeros(states), np.zeros(states), np.ones(states, np.bool_)
    taken = np.zeros((states, most, class_s.shape[1]))
    highest = 0
    for state in range(1, states):
        while state >= stride[highest + 1]:
            highest += 1
        # The state with one request less of its last class has been computed already.
        source, kind = state - stride[highest], classes[highest].tier
        tightest[state] = min(tightest[source], kind)
        count[state] = count[source] + 1
        worth[state] = worth[source] + classes[highest].value
        blocks[state] = blocks[source] + classes[highest].blocks
        fits[state] = count[state] <= places and blocks[state] <= free
        for tier in range(most):
            taken[state, tier] = taken[source, tier] + pace[kind, tier] * class_s[highest]
    score = np.full(states, -inf)
    score[0] = -tiers.pieces["fixed_s"].max()
    alive = np.zeros(states, np.bool_)
    alive[0] = True
    return States(stride, tightest, worth, fits, taken, score, alive, np.empty(states))


@compiled
def set_rates(states: States, tiers: Tiers, decoding_s: Floats, present: Ints, every: bool) -> None:
    """Set the rate of each live state, or of ``every`` one that fits, beside the promised decodes
    ``decoding_s[tier, piece]``; and end states whose decodes can no longer keep their TPOT."""
    step_s, pace, pieces = tiers
    tightest, taken, rates = states.tightest, states.taken, states.rates
    score, alive = states.score, states.alive
    most = decoding_s.shape[0]
    base = np.zeros(decoding_s.shape)
    first = most - 1
    for tier in range(most - 1, -1, -1):
        if present[tier] > 0:
            first = min(first, tier)
        for other in range(most - 1):
            for piece in range(pieces.shape[0]):
                base[tier, piece] += decoding_s[other, piece] * pace[other, tier]
    for state in range(rates.shape[0]):
        if not (alive[state] or (every and states.fits[state])):
            continue
        tier = min(first, tightest[state])
        rates[state] = rate_of(pieces, step_s[tier], base[tier], taken[state, tier])
        if rates[state] < min(0.0, rates[0]) - SLIP_S:
            score[state] = -inf
            alive[state] = False


@compiled
def force(states: States, need_s: float, limit: float, at_due: bool) -> None:
    """Let every state serve a promised prefill, and end the states in which new requests make it
    late. State 0, without new requests, continues even if the prefill is late."""
    score, alive, rates = states.score, states.alive, states.rates
    for state in range(score.shape[0]):
        if not alive[state]:
            continue
        price = need_s if at_due else (need_s / rates[state] if rates[state] > 0.0 else inf)
        score[state] -= price
        if state > 0 and score[state] < limit - SLIP_S:
            score[state] = -inf
            alive[state] = False


@compiled
def offer(
    states: States,
    mark: NDArray[np.bool_],
    event: Any,
    members: int,
    limit: float,
    at_due: bool,
) -> None:
    """Let every state take a new request, one of ``members`` of its class, or skip it; ``mark`` the
    states reached by taking it."""
    score, alive, rates = states.score, states.alive, states.rates
    stride, need_s = states.stride[event.kind], event.need_s
    # From the highest state down, so that none takes the same request twice.
    for state in range(score.shape[0] - 1, stride - 1, -1):
        if state // stride % (members + 1) == 0:
            continue
        source = state - stride
        if not (alive[source] and states.fits[state]):
            continue
        if rates[state] < -SLIP_S or (rates[source] <= 0.0 and not at_due):
            continue
        after = score[source] - (need_s if at_due else need_s / rates[source])
        if after >= limit - SLIP_S and after > score[state]:
            score[state] = after
            mark[state] = alive[state] = True


@compiled
def solve(
    events: Any,
    decode_s: Floats,
    tiers: Tiers,
    decoding: tuple[Floats, Ints],
    classes: Any,
    class_s: Floats,
    room: tuple[int, float],
    at_due: bool,
) -> NDArray[np.bool_]:
    """Which of the requests, ``events`` by deadline ascending, to take; promised ones are forced.
    Among sets of equal worth, the one with the best score at the last deadline is taken.

    ``decode_s`` and ``class_s`` have the time of a decode step by each piece. ``decoding``,
    overwritten, has of the promised decodes the time of a step by ``[tier, piece]``, and whether
    each tier has any. ``at_due``: decodes begin at the deadlines of their prefills."""
    decoding_s, present = decoding
    states = states_of(classes, class_s, tiers, room)
    score, alive, rates = states.score, states.alive, states.rates
    requests = events.shape[0]
    mark = np.zeros((classes["members"].sum(), score.shape[0]), np.bool_)
    offered = 0
    stale = True
    time_s = 0.0
    for index in range(requests + 1):
        own = events[index].kind if index < requests else -1
        if stale:
            # An offer also needs the rates of the states that it can reach.
            set_rates(states, tiers, decoding_s, present, own >= 0)
            stale = own < 0
        if index == requests:
            break
        event = events[index]
        limit = 0.0 if at_due else -event.due_s
        if at_due and event.due_s > time_s:
            for state in range(score.shape[0]):
                if alive[state]:
                    score[state] += (event.due_s - time_s) * rates[state]
            time_s = event.due_s
        if own >= 0:
            offer(states, mark[offered], event, classes[own].members, limit, at_due)
            offered += 1
            continue
        force(states, event.need_s, limit, at_due)
        if event.tier < present.shape[0] - 1:
            decoding_s[event.tier] += decode_s[index]
            present[event.tier] = 1
            stale = True
    return backtrack(states, mark, events)


@compiled
def backtrack(states: States, mark: NDArray[np.bool_], events: Any) -> NDArray[np.bool_]:
    """The requests on the path to the state of greatest worth, and among these of best score."""
    stride, worth, score = states.stride, states.worth, states.score
    state = 0
    for other in range(score.shape[0]):
        better = worth[other] > worth[state] or (
            worth[other] == worth[state] and score[other] > score[state]
        )
        if score[other] > -inf and better:
            state = other
    took = np.zeros(events.shape[0], np.bool_)
    offered = mark.shape[0]
    for index in range(events.shape[0] - 1, -1, -1):
        if events[index].kind < 0:
            continue
        offered -= 1
        if mark[offered, state]:
            took[index] = True
            state -= stride[events[index].kind]
    return took
