"""The greatest rate that a policy serves: a search by bisection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

LEAST_LOAD, MOST_LOAD = 0.05, 4.0
STEPS = 7
"""Halvings of the logarithm of that range: the result is within 2 % of where attainment crosses."""

CAPACITY_WORDS = (
    "bisection over loads from 0.05 to 4 in 7 halvings, within 2 %; each seed has its own; "
    "attainment is taken to fall with the load, which noise can break near the crossing"
)


class Loads(NamedTuple):
    """Where to search.

    Attributes:
        least, most: ends of the range, above 0.
        steps: halvings of its logarithm.
    """

    least: float = LEAST_LOAD
    most: float = MOST_LOAD
    steps: int = STEPS


ALL_LOADS = Loads()


def greatest_loads(
    attainment: Callable[[float], float], shares: Sequence[float], loads: Loads = ALL_LOADS
) -> Mapping[float, float]:
    """By share: the highest load at which at least that share attains; 0 if it is not reached at
    the lowest load. Every run serves all searches.

    Args:
        attainment: share of requests that attain at a load.
        shares: in (0, 1].
        loads: where to search.
    """
    known: dict[float, float] = {}

    def at(load: float) -> float:
        if load not in known:
            known[load] = attainment(load)
        return known[load]

    return {share: _search(at, share, loads) for share in shares}


def _search(attainment: Callable[[float], float], share: float, loads: Loads) -> float:
    low, high = loads.least, loads.most
    if attainment(high) >= share:
        return high
    if attainment(low) < share:
        return 0.0
    for _ in range(loads.steps):
        middle = sqrt(low * high)
        if attainment(middle) >= share:
            low = middle
        else:
            high = middle
    return low
