"""SLOs-Serve's admission against an exhaustive search, and the paper's examples."""

from itertools import chain, combinations
from math import floor, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.admission.slos_serve import (
    HORIZON_S,
    MEMORY_LEVELS,
    Demand,
    Supply,
    admissible,
)
from scheduling.kernels import Floats
from scheduling.objective import Anchor

SLIP_S = 1e-9


def demand(
    *requests: tuple[float, float, float, float], blocks: float = 0, value: float = 1
) -> Demand:
    """Requests of (due, prefill, TPOT, decode step), seconds, on a model of one piece."""
    table = np.array(requests, dtype=np.float64).reshape(-1, 4)
    due_s, prefill_s, tpot_s, step_s = table.T
    more = np.ones(len(table))
    return Demand(due_s, prefill_s, tpot_s, step_s[:, np.newaxis], more * blocks, more * value)


def supply(
    fixed_s: float = 0.0,
    longest_s: float = 1.0,
    blocks: float = 1e9,
    places: int = 1_000,
    anchor: Anchor = Anchor.LAST_TOKEN,
) -> Supply:
    return Supply(np.array([fixed_s]), np.ones(1), longest_s, blocks, places, anchor)


NOBODY = demand()


# The exhaustive reference: a set of new requests, walked through in order of deadline.


def rate(decodes: list[tuple[float, Floats]], given_: Supply) -> float:
    """Seconds of prefill per second beside decodes of (TPOT, step by piece)."""
    paced = [(tpot_s, step_s) for tpot_s, step_s in decodes if tpot_s < inf]
    batch_s = min([given_.longest_s, *(tpot_s for tpot_s, _ in paced)])
    left = 1 - given_.fixed_s / batch_s
    for tpot_s, step_s in paced:
        every_s = tpot_s
        if given_.anchor is Anchor.LAST_TOKEN:
            every_s = max(1, floor(tpot_s / batch_s + SLIP_S)) * batch_s
        left = left - step_s / every_s
    parts = [x if x < 0 else x / s for x, s in zip(left, given_.share, strict=True) if s or x < 0]
    return float(min(parts))


def walk(new: Demand, chosen: tuple[int, ...], promised: Demand, given_: Supply) -> list[float]:
    """By how much each promised prefill is late, and infinity at once if a new one is, or if the
    decodes cannot be held."""
    decodes, queue = [], []
    for row, (due_s, prefill_s, tpot_s, step_s, _, _) in enumerate(zip(*promised, strict=True)):
        if prefill_s <= 0:
            decodes.append((tpot_s, step_s))
        else:
            queue.append((min(max(due_s, 0), HORIZON_S), 0, row, prefill_s, (tpot_s, step_s)))
    for row in chosen:
        due_s, prefill_s, tpot_s, step_s, _, _ = (column[row] for column in new)
        queue.append((min(max(due_s, 0), HORIZON_S), 1, row, prefill_s, (tpot_s, step_s)))
    at_due = given_.anchor is Anchor.ENVELOPE
    late, time_s, budget_s = [], float(given_.fixed_s.max()), -float(given_.fixed_s.max())
    last_s = 0.0
    for due_s, is_new, _, prefill_s, decode in sorted(queue, key=lambda item: item[:3]):
        now = rate(decodes, given_)
        budget_s += (due_s - last_s) * now - prefill_s
        last_s = due_s
        time_s += prefill_s / now if now > 0 else inf
        over_s = -budget_s if at_due else time_s - due_s
        decodes.append(decode)
        if is_new and (over_s > SLIP_S or rate(decodes, given_) < -SLIP_S):
            return [inf]
        if not is_new:
            late += [max(0.0, over_s), max(0.0, -rate(decodes, given_))]
    return late


def feasible(new: Demand, chosen: tuple[int, ...], promised: Demand, given_: Supply) -> bool:
    rows = list(chosen)
    if len(rows) > given_.places or new.blocks[rows].sum() > max(0.0, given_.blocks):
        return False
    alone = walk(new, (), promised, given_)
    beside = walk(new, chosen, promised, given_)
    if not chosen:
        return True
    if inf in beside or len(alone) != len(beside):
        return False
    return all(b <= a + 2 * SLIP_S for a, b in zip(alone, beside, strict=True))


def subsets(count: int) -> chain[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(count), size) for size in range(count + 1))


TPOTS = [0.05, 0.08, 0.1, inf]


def demands(random: np.random.Generator, count: int, decoding: float, pieces: int) -> Demand:
    """Requests whose decode step depends on their TPOT only, as the classes take its mean."""
    kinds = random.integers(0, len(TPOTS), count)
    step_s = np.array([[0.001, 0.002, 0.004, 0.008], [0.004, 0.003, 0.002, 0.001]]).T
    return Demand(
        random.uniform(-0.1, 1.5, count),
        np.where(random.random(count) < decoding, 0.0, random.uniform(0.02, 0.4, count)),
        np.array(TPOTS)[kinds],
        np.ascontiguousarray(step_s[kinds, :pieces]),
        random.integers(0, 7, count).astype(float),
        random.choice([1.0, 1.0, 2.0, 5.0], count),
    )


def contended(seed: int) -> tuple[Demand, Demand, Supply]:
    """A case in which some but mostly not all can be admitted."""
    random = np.random.default_rng(seed)
    pieces = int(random.integers(1, 3))
    new = demands(random, int(random.integers(1, 8)), 0.0, pieces)
    promised = demands(random, int(random.integers(0, 9)), 0.8, pieces)
    given_ = Supply(
        random.choice([0.0, 0.005, 0.02]) * np.array([1.0, 2.0])[:pieces],
        np.array([1.0, random.choice([0.0, 0.4, 1.0])])[:pieces],
        float(random.choice([0.04, 0.3, 1.0])),
        float(random.choice([MEMORY_LEVELS // 2, MEMORY_LEVELS, 1_000])),
        int(random.choice([2, 100])),
        list(Anchor)[random.integers(0, 3)],
    )
    return new, promised, given_


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_it_admits_what_an_exhaustive_search_finds_best(seed: int) -> None:
    case = contended(seed)
    new, promised, given_ = case
    chosen = tuple(np.flatnonzero(admissible(*case)).tolist())
    assert feasible(new, chosen, promised, given_)
    best = max(
        new.value[list(subset)].sum()
        for subset in subsets(len(new.due_s))
        if feasible(new, subset, promised, given_)
    )
    assert new.value[list(chosen)].sum() == best
