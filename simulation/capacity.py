"""How many replicas a service needs: the search, and where it starts."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from scheduling.latency import LatencyModel
from simulation.workload import Workload

MOST_REPLICAS = 4096
"""Most replicas of a simulated cluster, see :class:`~simulation.config.ClusterConfig`."""


class Search(NamedTuple):
    """What a search found.

    Attributes:
        replicas: the count that reaches the target while one fewer does not (or none are left);
            ``None`` if even the most that were allowed do not.
        attainment: of every count that was tried, in the order of trying.
    """

    replicas: int | None
    attainment: dict[int, float]


def search(attainment: Callable[[int], float], target: float, start: int, most: int) -> Search:
    """Search for the smallest count of replicas whose attainment reaches ``target``.

    It gallops away from ``start`` in steps that begin with an eighth of it and double, until the
    answer is between two counts, and halves what lies between. It tries ``O(log(start + answer))``
    counts, none of them twice. Attainment is taken to grow with the replicas. Where it does not
    everywhere, the answer is a count at which it crosses the target; a smaller one that also
    reaches it is not looked for.

    Args:
        attainment: share of requests that meet their objectives with so many replicas; nan counts
            as below any target. Called once per count.
        target: share that is wanted, above 0 and at most 1.
        start: where to begin; it is moved into the range. The closer to the answer, the faster, and
            one below the answer costs a run under overload.
        most: largest count that may be tried, >= 1.

    Raises:
        ValueError: a target or bound that is not allowed. What ``attainment`` raises passes
            through.
    """
    if not 0 < target <= 1:
        raise ValueError(f"target must be above 0 and at most 1, got {target}")
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    tried: dict[int, float] = {}

    def holds(count: int) -> bool:
        tried[count] = attainment(count)
        return tried[count] >= target

    start = min(max(start, 1), most)
    if holds(start):
        low, high = _below(holds, start, max(start // 8, 1))
    else:
        low, high = _above(holds, start, max(start // 8, 1), most)
    if high > most:
        return Search(None, tried)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return Search(high, tried)


def _below(holds: Callable[[int], bool], high: int, step: int) -> tuple[int, int]:
    """A count that does not hold (0 if every one does), and one above it that does."""
    while high > 1:
        count = max(high - step, 1)
        if not holds(count):
            return count, high
        high, step = count, 2 * step
    return 0, high


def _above(holds: Callable[[int], bool], low: int, step: int, most: int) -> tuple[int, int]:
    """A count that does not hold, and one above it that does (``most + 1`` if none does)."""
    while low < most:
        count = min(low + step, most)
        if holds(count):
            return low, count
        low, step = count, 2 * step
    return low, most + 1


def least_busy(workload: Workload, model: LatencyModel) -> int:
    """How many engines the work of all requests fills while they arrive: a start for
    :func:`search`.

    Counted are the prompts and tokens as if each came alone, without the fixed part of steps and
    without cached prefixes: with fewer engines, work is left over when the last request comes,
    unless prefixes are cached. ``O(requests)``; at least 1, at most :data:`MOST_REPLICAS`.
    """
    between_s = workload.duration_s - (workload.arrivals[0].arrival_s if len(workload) else 0.0)
    if between_s <= 0:
        return 1
    work_s = 0.0
    for arrival in workload.arrivals:
        # Decodes cost a line over the context, so their mean is that of the middle one.
        middle = arrival.prompt_tokens + arrival.output_tokens // 2
        work_s += model.work_s(arrival.prompt_tokens, 0)
        work_s += (arrival.output_tokens - 1) * model.work_s(1, middle)
    return min(max(ceil(work_s / between_s), 1), MOST_REPLICAS)
