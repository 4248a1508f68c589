"""Compiled solver of speculation lengths: how many tokens of each decode a step runs.

Source: SLOs-Serve §3.2.3 and appendix D. There, decodes of one TPOT objective are a tier with one
length; here each decode is a tier of its own, as acceptance, what is drafted and how far it is
ahead differ. What was an enumeration of the binding tier with a closed form for the others is a
walk over the sorted times at which some decode needs one token more, so it is still exact.

A *length* is the tokens of a decode in a step: its own one, and the drafted ones that are checked.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.request.kernels import (
    FIXED,
    PREFILL_TOKENS,
    Floats,
    Ints,
    compiled,
    most_work_s,
    work_s,
)

MOST_LENGTH = 10
"""Longest length, as in appendix D."""

LEAST_CHANCE = 0.05
"""A drafted token is not checked where it, and all before it, are right less often than this."""

STEPS = 40
"""Values of the least chance that are tried, from 1 to :data:`LEAST_CHANCE`."""

_RATIO = LEAST_CHANCE ** (1.0 / (STEPS - 1))


class Decodes(NamedTuple):
    """Running decodes, one entry of each array per decode.

    Attributes:
        left_s: time until its next token is due.
        tpot_s: infinite where it has none; then it takes the length that costs least.
        credit_s: by how much a batch may be longer for each drafted token that is expected to be
            accepted; in the paper the TPOT.
        alpha: probability that a drafted token is accepted if those before it are.
        context: computed tokens.
        most: longest length.
        binds: whether the batch must be short enough for its pace.
    """

    left_s: Floats
    tpot_s: Floats
    credit_s: Floats
    alpha: Floats
    context: Floats
    most: Ints
    binds: NDArray[np.bool_]


@compiled
def accepted_tokens(length: float, alpha: float) -> float:
    """Expected output of a step that runs ``length`` tokens of a decode, ``Acc(length)``: the
    first is certain, and each later one counts with probability ``alpha`` if those before it did.
    ``(1 - alpha**length) / (1 - alpha)``."""
    return (1.0 - alpha**length) / (1.0 - alpha)


@compiled
def _longest(alpha: float, drafted: float) -> int:
    """The longest length that may be worth it."""
    length, chance = 1, alpha
    while length < MOST_LENGTH and length <= drafted and chance >= LEAST_CHANCE:
        length += 1
        chance *= alpha
    return length


@compiled
def longest_lengths(alpha: Floats, drafted: Floats) -> Ints:
    """Per decode, the longest length that may be worth it: what is drafted, and likely enough."""
    most = np.empty(alpha.shape[0], np.int64)
    for row in range(alpha.shape[0]):
        most[row] = _longest(alpha[row], drafted[row])
    return most


@compiled
def within_s(left_s: float, credit_s: float, alpha: float, length: int) -> float:
    """How long a batch may last so that a decode's output with this length keeps its pace: until
    its next token is due, and ``credit_s`` longer for each token that is expected beyond it."""
    return left_s + (accepted_tokens(length, alpha) - 1.0) * credit_s


@compiled
def _frugal(pieces: Floats, alpha: float, context: float, least: int, most: int) -> int:
    """The length from ``least`` to ``most`` with the least work per expected token."""
    best, least_s = least, inf
    for length in range(least, most + 1):
        per_token_s = most_work_s(pieces, float(length), context) / accepted_tokens(length, alpha)
        if per_token_s < least_s * (1.0 - 1e-9):
            best, least_s = length, per_token_s
    return best


@compiled
def accepted_all(lengths: Ints, alpha: Floats) -> Floats:
    """:func:`accepted_tokens` of each decode."""
    output = np.empty(lengths.shape[0])
    for row in range(lengths.shape[0]):
        output[row] = accepted_tokens(float(lengths[row]), alpha[row])
    return output


@compiled
def lengths_work_s(pieces: Floats, lengths: Ints, context: Floats) -> Floats:
    """Predicted marginal time of each decode's step, seconds, on ``context`` computed tokens."""
    work = np.empty(lengths.shape[0])
    for row in range(lengths.shape[0]):
        work[row] = most_work_s(pieces, float(lengths[row]), context[row])
    return work


@compiled
def for_prefills(
    pieces: Floats, decodes: Decodes, floor_s: float, draft_s: float
) -> tuple[float, Ints]:
    """The lengths that leave most to prefill, and its tokens per second.

    Of each second, batches of ``T`` lose ``(fixed + draft_s * (longest - 1)) / T``, and a decode
    that keeps its pace takes ``work(length) / (Acc(length) TPOT)``, as one that is ahead can be
    left out of a batch. Some decode binds ``T``; each other one takes, of the lengths that keep its
    pace in batches of ``T``, the one that costs least per token. So ``T`` walks up through the
    values at which a decode needs one token more, up to where one that binds can give no more.
    ``O(decodes * lengths * log)``.

    Args:
        pieces: of the latency model.
        floor_s: ``T`` is not below it, whatever that means for paces.
        draft_s: time that a batch takes for each drafted token of its longest length.
    """
    left_s, tpot_s, credit_s, alpha, context, most, binds = decodes
    count = left_s.shape[0]
    highest_s = inf
    lowest_s = inf
    for row in range(count):
        if binds[row]:
            last_s = within_s(left_s[row], credit_s[row], alpha[row], most[row])
            lowest_s, highest_s = min(lowest_s, left_s[row]), min(highest_s, last_s)
    if highest_s == inf:
        lowest_s = highest_s = floor_s
    lowest_s, highest_s = max(floor_s, lowest_s), max(floor_s, highest_s)
    needed, lengths = np.ones(count, np.int64), np.ones(count, np.int64)
    load = np.zeros(pieces.shape[0])
    events_s = np.empty(count * MOST_LENGTH)
    event_rows = np.empty(count * MOST_LENGTH, np.int64)
    events, longest = 0, 1
    for row in range(count):
        while needed[row] < most[row] and (
            within_s(left_s[row], credit_s[row], alpha[row], needed[row]) < lowest_s
        ):
            # One without credit that is behind takes all it can, as drafts are how it catches up.
            needed[row] += 1
        for length in range(needed[row], most[row]):
            at_s = within_s(left_s[row], credit_s[row], alpha[row], length)
            if at_s < highest_s:
                events_s[events], event_rows[events] = at_s, row
                events += 1
        lengths[row] = _frugal(pieces, alpha[row], context[row], needed[row], most[row])
        longest = max(longest, lengths[row])
        _count_in(load, pieces, lengths[row], alpha[row], tpot_s[row], context[row], 1.0)
    order = np.argsort(events_s[:events])
    best = _prefill_rate(pieces, load, lowest_s, draft_s * (longest - 1))
    chosen = lengths.copy()
    for place in range(events + 1):
        # Just before a decode needs more, everybody keeps pace with what they have.
        at_s = highest_s if place == events else events_s[order[place]]
        rate = _prefill_rate(pieces, load, at_s, draft_s * (longest - 1))
        if rate > best:
            best = rate
            chosen[:] = lengths
        if place == events:
            break
        row = event_rows[order[place]]
        needed[row] += 1
        if lengths[row] < needed[row]:
            _count_in(load, pieces, lengths[row], alpha[row], tpot_s[row], context[row], -1.0)
            lengths[row] = _frugal(pieces, alpha[row], context[row], needed[row], most[row])
            longest = max(longest, lengths[row])
            _count_in(load, pieces, lengths[row], alpha[row], tpot_s[row], context[row], 1.0)
    return best, chosen


@compiled
def _count_in(
    load: Floats,
    pieces: Floats,
    length: int,
    alpha: float,
    tpot_s: float,
    context: float,
    sign: float,
) -> None:
    """Add to ``load`` the share of each second that a decode takes, by each piece of the model."""
    if tpot_s < inf:
        rate = sign / (accepted_tokens(length, alpha) * tpot_s)
        for piece in range(pieces.shape[0]):
            load[piece] += rate * work_s(pieces[piece], float(length), context)


@compiled
def _prefill_rate(pieces: Floats, load: Floats, batch_s: float, draft_s: float) -> float:
    """Prefill tokens per second that batches of ``batch_s`` leave; negative where decodes do not
    fit."""
    fewest = inf
    for piece in range(pieces.shape[0]):
        spare = 1.0 - load[piece]
        if batch_s > 0.0:
            spare -= (pieces[piece, FIXED] + draft_s) / batch_s
        per_token_s = pieces[piece, PREFILL_TOKENS]
        if per_token_s > 0.0:
            fewest = min(fewest, spare / per_token_s)
        elif spare < 0.0:
            fewest = -inf
    return fewest


@compiled
def for_decodes(pieces: Floats, decodes: Decodes, draft_s: float) -> tuple[float, Ints]:
    """Where no prefill waits: the lengths that give most output per second, and that rate.

    A step checks every drafted token whose chance of counting is at least some ``theta``, and the
    best of :data:`STEPS` values of it is taken; so nothing is checked where that costs more than it
    gives. A decode that binds and would fall behind in a step of that time takes the least length
    with which it does not. ``O(decodes)`` for each value; the arguments are those of
    :func:`for_prefills`.
    """
    left_s, _, credit_s, alpha, context, most, binds = decodes
    count = alpha.shape[0]
    best, best_s, chosen = -inf, 0.0, np.ones(count, np.int64)
    lengths = np.ones(count, np.int64)
    chance = alpha.copy()
    work = np.zeros(pieces.shape[0])
    theta, longest, output = 1.0, 1, float(count)
    for row in range(count):
        for piece in range(pieces.shape[0]):
            work[piece] += work_s(pieces[piece], 1.0, context[row])
    for _ in range(STEPS + 1):
        seconds = 0.0
        for piece in range(pieces.shape[0]):
            seconds = max(seconds, pieces[piece, FIXED] + work[piece] + draft_s * (longest - 1))
        rate = output / seconds if seconds > 0.0 else inf
        if rate > best * (1.0 + 1e-9) or best == -inf:
            best, best_s = rate, seconds
            chosen[:] = lengths
        for row in range(count):
            before = lengths[row]
            while lengths[row] < most[row] and chance[row] >= theta:
                output += chance[row]
                lengths[row] += 1
                chance[row] *= alpha[row]
            if lengths[row] > before:
                longest = max(longest, lengths[row])
                for piece in range(pieces.shape[0]):
                    work[piece] += work_s(pieces[piece], float(lengths[row]), context[row])
                    work[piece] -= work_s(pieces[piece], float(before), context[row])
        theta *= _RATIO
    for row in range(count):
        while (
            binds[row]
            and credit_s[row] > 0.0
            and chosen[row] < most[row]
            and within_s(left_s[row], credit_s[row], alpha[row], chosen[row]) < best_s
        ):
            chosen[row] += 1
    return best, chosen
