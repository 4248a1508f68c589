"""Compiled loops of :mod:`sluice.scheduling.batching.priority_mapping`: objective, moves and
annealing.

A mapping is the order of the waiting requests and the sizes of the batches. A further array has one
row per batch with the state at its start. So a move is evaluated from the first batch that it
changes to the last, and beyond only where it changes the waits of later batches.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import exp
from typing import NamedTuple

import numpy as np

from sluice.scheduling.request.kernels import Floats, Ints, compiled

LOSS_SCALE = 500.0
"""Temperature at which a loss of one request's share of G is accepted with probability 1/e. It is
the paper's initial one; at its last, 20, the probability is e**-25."""

_NONE_MET = 1e-9
"""Counted as met requests, so that less latency is better where no request is met."""

_SAME_S = 1e-9
"""Waits that differ by no more are the same: sums in another order differ in their last digits."""

# Columns of the state at the start of each batch: the met requests and the latency of all requests
# before it, its wait, and its first index in the order. The first three are also the columns of
# ``under_way``, where the longest time takes the place of the wait.
MET = 0
LATENCY = 1
WAIT = 2
PLACE = 3
COLUMNS = 4


class Problem(NamedTuple):
    """The requests to map, see :class:`sluice.scheduling.batching.priority_mapping.Jobs`.

    Attributes:
        exec_s: ``float64[2, most, waiting]``: execution time in the first batch, and in any other;
            one row per batch size, so that a batch reads consecutive memory.
        latest_s: longest wait, in the same shape.
        under_way: ``float64[most, 3]``: of the running requests in a batch of each size, how many
            meet their objective, the sum of their latencies, and the longest.
        running: number of running requests.
    """

    exec_s: Floats
    latest_s: Floats
    under_way: Floats
    running: int


@compiled
def evaluate(
    exec_s: Floats,
    latest_s: Floats,
    under_way: Floats,
    order: Ints,
    sizes: Ints,
    counts: tuple[int, int, int, int],
    before: Floats,
    after: Floats,
) -> int:
    """Fill in the rows of ``after`` behind the changed batches; return the last row filled.

    ``before`` is the state before a move. Where the wait of a later batch is unchanged, the rest is
    unchanged, and the evaluation ends.

    Args:
        exec_s, latest_s, under_way: see :class:`Problem`. They are no tuple, as the reference
            counts of its arrays would cost a tenth of a search.
        order, sizes: the mapping after the move.
        counts: running requests, the first and the last batch that the move changed, and how many
            batches there are.
    """
    running, first, last, batches = counts
    met, latency = before[first, MET], before[first, LATENCY]
    wait_s, place = before[first, WAIT], int(before[first, PLACE])
    for batch in range(first, batches):
        size = sizes[batch]
        end = place + size
        latency += size * wait_s
        longest_s = 0.0
        if batch == 0 and running > 0:
            size += running
            met += under_way[size - 1, MET]
            latency += under_way[size - 1, LATENCY]
            longest_s = under_way[size - 1, WAIT]
        later = int(batch > 0)
        times_s, waits_s = exec_s[later, size - 1], latest_s[later, size - 1]
        for index in range(place, end):
            # Without a sign, numba does not look for indices from the end: a tenth of a search.
            request = np.uint64(order[index])
            latency += times_s[request]
            longest_s = max(longest_s, times_s[request])
            met += wait_s <= waits_s[request]
        place = end
        wait_s += longest_s
        after[batch + 1, MET] = met
        after[batch + 1, LATENCY] = latency
        after[batch + 1, WAIT] = wait_s
        after[batch + 1, PLACE] = place
        if batch >= last and abs(wait_s - before[batch + 1, WAIT]) <= _SAME_S:
            return batch + 1
    return batches


@compiled
def objective(met: float, latency_s: float) -> float:
    """G, defined also where nothing is met or nothing takes time."""
    return (met + _NONE_MET) / max(latency_s, 1e-12)


@compiled
def acceptance(change: float, waiting: int, temperature: float) -> float:
    """Probability of accepting a mapping whose G differs by ``change``, relative to G, with
    ``waiting`` requests to map. 1 where it is no worse."""
    if change >= 0.0:
        return 1.0
    exponent = LOSS_SCALE * waiting * change / temperature
    # At low temperature most moves are rejected, and exp() costs as much as ten requests.
    return exp(exponent) if exponent > -40.0 else 0.0


@compiled
def batch_at(before: Floats, batches: int, place: int) -> int:
    """The batch of the request at ``place`` in the order."""
    batch = 0
    while batch + 1 < batches and before[batch + 1, PLACE] <= place:
        batch += 1
    return batch


@compiled
def propose(
    limits: tuple[int, int, int],
    sizes: Ints,
    before: Floats,
    batches: int,
    draws: tuple[float, float, float],
) -> tuple[int, int, int, int, int]:
    """A random move: two indices to exchange, the first and the last batch that it changes, and how
    many requests move from the first to the last batch.

    ``limits`` are the largest batch, and the numbers of waiting and of running requests. The
    ``draws`` are for the kind of the move and its two requests.
    """
    most, waiting, running = limits
    u_kind, u_place, u_other = draws
    kind = int(u_kind * 3.0)
    place = int(u_place * waiting)
    batch = batch_at(before, batches, place)
    if kind == 0 and batch > 0:
        if sizes[batch - 1] + (running if batch == 1 else 0) < most:
            return place, int(before[batch, PLACE]), batch - 1, batch, -1
    elif kind == 1:
        if batch + 1 < batches:
            room = sizes[batch + 1] < most
        else:
            room = sizes[batch] > 1 or (batch == 0 and running > 0)
        if room:
            return place, int(before[batch + 1, PLACE]) - 1, batch, batch + 1, 1
    other = int(u_other * waiting)
    other_batch = batch_at(before, batches, other)
    return place, other, min(batch, other_batch), max(batch, other_batch), 0


@compiled
def adopt(
    running: int, sizes: Ints, before: Floats, after: Floats, first: int, reached: int, batches: int
) -> int:
    """Make the result of a move the current state; return the number of batches.

    The rows behind ``reached`` shift by the same amounts. A batch that a move empties is removed,
    except the first one while requests run in it.
    """
    met = after[reached, MET] - before[reached, MET]
    latency = after[reached, LATENCY] - before[reached, LATENCY]
    kept = first
    for batch in range(first, batches):
        if sizes[batch] > 0 or (batch == 0 and running > 0):
            sizes[kept] = sizes[batch]
            kept += 1
            if batch < reached:
                for column in range(COLUMNS):
                    before[kept, column] = after[batch + 1, column]
            else:
                before[kept, MET] = before[batch + 1, MET] + met
                before[kept, LATENCY] = before[batch + 1, LATENCY] + latency
                before[kept, WAIT] = before[batch + 1, WAIT]
                before[kept, PLACE] = before[batch + 1, PLACE]
    for batch in range(kept, batches):
        sizes[batch] = 0
    return kept


@compiled
def search(
    problem: Problem,
    best: tuple[Ints, Ints],
    current: tuple[Ints, Ints],
    batches: int,
    before: Floats,
    after: Floats,
    schedule: tuple[Floats, Floats],
) -> int:
    """Anneal from ``current``, order and sizes of ``batches`` batches, whose rows are in
    ``before``; leave the best mapping in ``best`` and return its number of batches. The schedule
    is that of :class:`~sluice.scheduling.batching.priority_mapping.Schedule`.
    ``O(steps * waiting)``."""
    order, sizes = current
    best_order, best_sizes = best
    temperatures, draws = schedule
    exec_s, latest_s, under_way, running = problem
    _, most, waiting = exec_s.shape
    limits = (most, waiting, running)
    score = objective(before[batches, MET], before[batches, LATENCY])
    highest, best_batches = score, batches
    for level in range(temperatures.shape[0]):
        for step in range(draws.shape[1]):
            own = (draws[level, step, 0], draws[level, step, 1], draws[level, step, 2])
            a, b, first, last, moved = propose(limits, sizes, before, batches, own)
            if first == last:
                continue
            order[a], order[b] = order[b], order[a]
            sizes[first] -= moved
            sizes[last] += moved
            count = max(batches, last + 1)
            counts = (running, first, last, count)
            reached = evaluate(exec_s, latest_s, under_way, order, sizes, counts, before, after)
            met, latency_s = after[reached, MET], after[reached, LATENCY]
            if reached < count:
                met += before[count, MET] - before[reached, MET]
                latency_s += before[count, LATENCY] - before[reached, LATENCY]
            then = objective(met, latency_s)
            accepted = acceptance(then / score - 1.0, waiting, temperatures[level])
            if draws[level, step, 3] < accepted:
                batches = adopt(running, sizes, before, after, first, reached, count)
                score = then
                if score > highest:
                    highest, best_batches = score, batches
                    for place in range(order.shape[0]):
                        best_order[place] = order[place]
                    for batch in range(sizes.shape[0]):
                        best_sizes[batch] = sizes[batch]
            else:
                order[a], order[b] = order[b], order[a]
                sizes[first] += moved
                sizes[last] -= moved
    return best_batches
