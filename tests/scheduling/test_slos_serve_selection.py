"""SLOs-Serve's admission against an exhaustive search, and the paper's examples."""

from itertools import chain, combinations
from math import floor, inf

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission.slos_serve.selection import (
    HORIZON_S,
    MAX_NEW,
    PlanDemand,
    Supply,
    admissible,
)
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import Anchor
from tests.examples import examples

SLIP_S = 1e-9


def demand(
    *requests: tuple[float, float, float, float], blocks: float = 0, value: float = 1
) -> PlanDemand:
    """Requests of (due, prefill, TPOT, decode step), seconds, on a model of one piece."""
    table = np.array(requests, dtype=np.float64).reshape(-1, 4)
    due_s, prefill_s, tpot_s, step_s = table.T
    more = np.ones(len(table))
    return PlanDemand(due_s, prefill_s, tpot_s, step_s[:, np.newaxis], more * blocks, more * value)


def supply(
    fixed_s: float = 0.0,
    longest_s: float = 1.0,
    blocks: float = 1e9,
    places: int = 1_000,
    anchor: Anchor = Anchor.LAST_TOKEN,
) -> Supply:
    # A float, as admission has it: for an integer the loops would be compiled once more.
    return Supply(np.array([fixed_s]), np.ones(1), longest_s, float(blocks), places, anchor)


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


def walk(
    new: PlanDemand, chosen: tuple[int, ...], promised: PlanDemand, given_: Supply
) -> list[float]:
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


def feasible(
    new: PlanDemand, chosen: tuple[int, ...], promised: PlanDemand, given_: Supply
) -> bool:
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


def demands(random: np.random.Generator, count: int, decoding: float, pieces: int) -> PlanDemand:
    """Requests whose decode step depends on their TPOT only, as the classes take its mean."""
    kinds = random.integers(0, len(TPOTS), count)
    step_s = np.array([[0.001, 0.002, 0.004, 0.008], [0.004, 0.003, 0.002, 0.001]]).T
    return PlanDemand(
        random.uniform(-0.1, 1.5, count),
        np.where(random.random(count) < decoding, 0.0, random.uniform(0.02, 0.4, count)),
        np.array(TPOTS)[kinds],
        np.ascontiguousarray(step_s[kinds, :pieces]),
        random.integers(0, 7, count).astype(float),
        random.choice([1.0, 1.0, 2.0, 5.0], count),
    )


def contended(seed: int) -> tuple[PlanDemand, PlanDemand, Supply]:
    """A case in which some but mostly not all can be admitted."""
    random = np.random.default_rng(seed)
    pieces = int(random.integers(1, 3))
    new = demands(random, int(random.integers(1, 8)), 0.0, pieces)
    promised = demands(random, int(random.integers(0, 9)), 0.8, pieces)
    fine = int(random.choice([1, 37]))  # hardly two need the same number of small blocks
    new = new._replace(blocks=new.blocks * fine + random.integers(0, fine, len(new.blocks)))
    given_ = Supply(
        random.choice([0.0, 0.005, 0.02]) * np.array([1.0, 2.0])[:pieces],
        np.array([1.0, random.choice([0.0, 0.4, 1.0])])[:pieces],
        float(random.choice([0.04, 0.3, 1.0])),
        float(fine * random.choice([8, 16, 1_000])),
        int(random.choice([2, 100])),
        list(Anchor)[random.integers(0, 3)],
    )
    return new, promised, given_


@settings(max_examples=examples(500))
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


@settings(max_examples=examples(150))
@example(seed=134217728)
@given(seed=st.integers(0, 2**32))
def test_more_time_blocks_or_places_never_admit_less(seed: int) -> None:
    new, promised, given_ = contended(seed)

    def worth(new: PlanDemand, promised: PlanDemand, given_: Supply) -> float:
        return float(new.value[admissible(new, promised, given_)].sum())

    def passed(due_s: np.ndarray) -> list[int]:
        return np.searchsorted(np.sort(promised.due_s), due_s).tolist()

    before = worth(new, promised, given_)
    for later_s in (new.due_s + 0.05, new.due_s + 0.2):
        # Behind a promised one, whose decodes have begun by then, it may be too much for them.
        if passed(later_s) == passed(new.due_s):
            assert worth(new._replace(due_s=later_s), promised, given_) >= before
    assert worth(new._replace(prefill_s=new.prefill_s * 0.8), promised, given_) >= before
    assert worth(new, promised, given_._replace(blocks=given_.blocks + 2)) >= before
    assert worth(new, promised, given_._replace(places=given_.places + 1)) >= before
    more = demands(np.random.default_rng(seed + 1), 1, 0.5, len(given_.fixed_s))
    assert worth(new, promised.beside(more), given_) <= before


def test_what_is_admitted_fits_the_memory_to_the_block() -> None:
    new = demand(*[(10, 0.01, inf, 0)] * 8, blocks=125)
    assert admissible(new, NOBODY, supply(blocks=1_000)).all()
    assert admissible(new, NOBODY, supply(blocks=999)).sum() == 7
    assert not admissible(new, NOBODY, supply(blocks=124)).any()
    assert not admissible(new, NOBODY, supply(blocks=-5)).any()
    tenths = demand(*[(10, 0.01, inf, 0)] * 10, blocks=101)
    assert admissible(tenths, NOBODY, supply(blocks=1_010)).all()
    assert admissible(tenths, NOBODY, supply(blocks=1_009)).sum() == 9


def test_many_are_decided_in_groups_of_which_the_first_are_promised_to_the_next() -> None:
    count = 3 * MAX_NEW
    new = demand(*[(1.0, 0.07, inf, 0)] * count, blocks=1)
    assert admissible(new, NOBODY, supply()).nonzero()[0].tolist() == list(range(14))
    assert admissible(new, NOBODY, supply(blocks=12)).sum() == 12
    assert admissible(new, NOBODY, supply(places=11)).sum() == 11
    assert len(admissible(NOBODY, NOBODY, supply())) == 0


def test_more_objectives_than_are_told_apart_count_as_shorter_ones() -> None:
    tpots = np.linspace(0.05, 0.2, 40)
    decodes = demand(*[(0, 0, tpot_s, 0.001) for tpot_s in tpots])
    exact_s = 1 - float((0.001 / tpots).sum())
    anchored = supply(anchor=Anchor.FIRST_TOKEN)
    assert not admissible(demand((1.0, exact_s + 0.001, inf, 0)), decodes, anchored).any()
    assert admissible(demand((1.0, exact_s - 0.05, inf, 0)), decodes, anchored).all()


# The paper's worked examples.

TOKEN_S = 1 / 6


def test_figure_3_three_of_four_requests_are_admitted() -> None:
    """§2.3: six tokens per time unit, three ongoing decodes, a burst of four requests of six
    prefill tokens; TTFT is six units and TPOT one. Three of the four can be attained: by unit six
    the decodes leave 18 tokens."""
    ongoing = demand(*[(0, 0, 1.0, TOKEN_S)] * 3)
    burst = demand(*[(6.0, 6 * TOKEN_S, 1.0, TOKEN_S)] * 4)
    units = supply(longest_s=6.0, anchor=Anchor.ENVELOPE)
    assert admissible(burst, ongoing, units).sum() == 3
    # A decode that begins as soon as its prefill ends takes tokens from the others: then two, by
    # units 2 and 5, and the third would have one token per unit, until unit 11.
    assert admissible(burst, ongoing, units._replace(anchor=Anchor.LAST_TOKEN)).sum() == 2


def test_figure_5_dynamic_batches_admit_all_three_and_fixed_ones_two() -> None:
    """§3.2: with a fixed batch size only two of three requests fit, among others R1 and R3, as with
    all three the demand passes the budget before R3's prefill deadline; batches as long as those
    that run allow give a larger budget, and all three fit.

    The text has no numbers; these are ours. R1 writes code at 50 ms a token, R2 chats at 100 ms, R3
    is a summary with a long prompt. 20 ms of each batch are fixed."""
    coding, chat, summary = (1.2, 0.3, 0.05, 0.002), (0.8, 0.3, 0.1, 0.002), (2.0, 0.55, 0.2, 0.002)
    dynamic = supply(fixed_s=0.02, longest_s=0.4, anchor=Anchor.ENVELOPE)
    fixed = dynamic._replace(longest_s=0.05)
    everyone = demand(coding, chat, summary)
    assert admissible(everyone, NOBODY, dynamic).all()
    assert admissible(everyone, NOBODY, fixed).sum() == 2
    assert admissible(demand(coding, summary), NOBODY, fixed).all()
    assert admissible(demand(coding, chat), NOBODY, fixed).all()
    assert not admissible(demand(summary), demand(coding, chat), fixed).any()
