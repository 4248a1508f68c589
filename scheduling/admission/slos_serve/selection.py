"""SLOs-Serve's admission: which new requests can be guaranteed their objectives.

A dynamic program over the requests by prefill deadline (SLOs-Serve §3.2.1 and appendix C).
Guaranteed requests are forced in; of the new requests it takes the set with the greatest worth.
With equal values that is the largest number of requests.

Our readings:

- The prefill budget is in seconds of predicted work, not in tokens. ``time2bs(TPOT)`` is
  the batch size for that time, and a token of a long prompt takes more time than one of a
  short prompt.
- The recurrence's maximum over the last accepted request ``j`` is the choice, request by request,
  to skip or to take: both visit the same sets.
- The counts ``n`` are of new requests only. The guaranteed requests are the same in each state, so
  they are one sum: the running requests add a factor ``N`` and no states.
- Requests of one TPOT tier and one value are one class, and the counts are by class. So the state
  knows its worth, and priorities enter as values: the paper's ``v_i``, without a budget axis.
- The paper has an axis of memory. Here, only where the new requests do not all fit, those of one
  class also need the same number of KV blocks: then the counts say what a state takes.
- ``PB*`` is its fluid limit: in batches of ``t0``, the budget gets the part of each second that the
  fixed time and the due decodes leave. A last batch that a deadline cuts short yields less, by
  one step's fixed time at most; so the budget starts negative by that amount.
- The paper counts a request's decode from its prefill deadline on (the lines of Fig. 5), which
  holds if the deadlines of its tokens start there (:attr:`Anchor.ENVELOPE`). With the other anchors
  its decode begins when its prefill ends, early or not, and takes budget from the prefills behind
  it: there the program keeps the earliest time by which the accepted prefills can all have ended,
  which is the same recurrence with time in place of budget.
- A guaranteed request that is already late, by a prediction error, blocks no admission by itself,
  but no new request may make it later.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.admission.slos_serve.dynamic_program import CLASS, EVENT, PIECE, Tiers, solve
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import Anchor

MOST_NEW = 10
"""Maximum number of new requests decided together, the paper's "zero to ten": more are decided in
groups of this size, in the order given. It bounds the states to ``2**10``."""

MOST_TIERS = 12
"""Maximum number of TPOT tiers. With more distinct TPOTs, a TPOT counts as the next shorter
tier."""

HORIZON_S = 3_600.0
"""Deadlines farther away than this, seconds, count as this far."""

LEAST_STEP_S = 1e-6
"""Steps and TPOT objectives shorter than this, seconds, count as this long: by some models, a step
takes no time."""


class PlanDemand(NamedTuple):
    """The demand of requests, one entry per request.

    Attributes:
        due_s: time until its first token (after a preemption: its next) is due, seconds. May be
            negative or infinite. Of no effect where ``prefill_s`` is 0.
        prefill_s: predicted marginal time of its pending prefill, seconds; 0 for a decode.
        tpot_s: time per output token, seconds; infinite where no pace is guaranteed.
        decode_s: ``float64[n, pieces]``, predicted marginal time of one decode step of it by each
            piece of the latency model, seconds.
        blocks: KV blocks that it will need beyond its current ones.
        value: worth of guaranteeing it; ignored for requests that are guaranteed already.
    """

    due_s: Floats
    prefill_s: Floats
    tpot_s: Floats
    decode_s: Floats
    blocks: Floats
    value: Floats

    def of(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> PlanDemand:
        """The demand of some of them."""
        return PlanDemand(*(column[rows] for column in self))

    def beside(self, other: PlanDemand) -> PlanDemand:
        """The demand of both."""
        return PlanDemand(*map(np.concatenate, zip(self, other, strict=True)))


class Supply(NamedTuple):
    """The capacity of the replica.

    Attributes:
        fixed_s: ``float64[pieces]``, time of a step before any token, seconds, by each piece of the
            latency model.
        share: ``float64[pieces]``, share of ``prefill_s`` that counts in that piece, 0 to 1. With
            a model of one piece it is 1.
        longest_s: time of a batch that fills the engine's token limit, seconds: the batch where no
            decode limits it.
        blocks: free KV blocks that guarantees may use.
        places: sequence slots that can still be guaranteed.
        anchor: where the deadlines of later tokens start.
    """

    fixed_s: Floats
    share: Floats
    longest_s: float
    blocks: float
    places: int
    anchor: Anchor


def admissible(new: PlanDemand, promised: PlanDemand, supply: Supply) -> NDArray[np.bool_]:
    """Which of the ``new`` requests can be guaranteed in addition to the ``promised`` ones.

    ``O(groups * prefills * states)``: ``prefills`` is the number of pending prefills of both kinds,
    and ``states`` is the product of (class size + 1) over the classes of a group. A single new
    request has two states: the program is then a feasibility test.
    """
    count = len(new.due_s)
    admitted = np.zeros(count, dtype=np.bool_)
    for start in range(0, count, MOST_NEW):
        rows = np.arange(start, min(start + MOST_NEW, count))
        if supply.places <= 0:
            break
        group = new.of(rows)
        taken = _weigh(group, promised, supply)
        admitted[rows] = taken
        if rows[-1] + 1 < count:
            accepted = group.of(taken)
            promised = promised.beside(accepted)
            supply = supply._replace(
                blocks=supply.blocks - float(accepted.blocks.sum()),
                places=supply.places - len(accepted.due_s),
            )
    return admitted


def _weigh(new: PlanDemand, promised: PlanDemand, supply: Supply) -> NDArray[np.bool_]:
    """The same for at most :data:`MOST_NEW`."""
    ready = promised.prefill_s <= 0
    pending, decodes = promised.of(~ready), promised.of(ready)
    events = pending.beside(new)
    decode_pace_s, pace_s = (np.maximum(each.tpot_s, LEAST_STEP_S) for each in (decodes, events))
    tiers = _tiers(np.concatenate((decode_pace_s, pace_s)))
    decode_tier, tier = _tier_of(tiers, decode_pace_s), _tier_of(tiers, pace_s)
    pieces = np.empty(len(supply.fixed_s), PIECE)
    pieces["fixed_s"], pieces["share"] = supply.fixed_s, supply.share
    decoding_s = np.zeros((len(tiers) + 1, len(pieces)))
    np.add.at(decoding_s, decode_tier, decodes.decode_s)
    present = np.zeros(len(tiers) + 1, dtype=np.int64)
    present[decode_tier] = 1

    # A request's class, or -1 where it is guaranteed already.
    kind = np.full(len(events.due_s), -1, dtype=np.int64)
    own = np.arange(len(pending.due_s), len(events.due_s))
    blocks = new.blocks if new.blocks.sum() > supply.blocks else np.zeros(len(own))
    alike = list(zip(tier[own].tolist(), new.value.tolist(), blocks.tolist(), strict=True))
    number = {each: place for place, each in enumerate(sorted(set(alike)))}
    kind[own] = [number[each] for each in alike]
    members = np.bincount(kind[own], minlength=len(number)).tolist()
    classes = np.array([(n, *each) for n, each in zip(members, number, strict=True)], CLASS)
    class_s = np.zeros((len(classes), len(pieces)))
    np.add.at(class_s, kind[own], new.decode_s)
    class_s /= classes["members"][:, np.newaxis]

    table = np.zeros(len(kind), EVENT)
    table["due_s"] = np.clip(events.due_s, 0.0, HORIZON_S)
    table["need_s"], table["kind"], table["tier"] = events.prefill_s, kind, tier
    # On equal deadlines, guaranteed requests come first: they do not depend on the new ones.
    order = np.lexsort((kind >= 0, table["due_s"]))
    step_s = np.minimum(np.append(tiers, inf), max(LEAST_STEP_S, supply.longest_s))
    taken = solve(
        table[order],
        np.ascontiguousarray(events.decode_s[order]),
        Tiers(step_s, _pace(tiers, step_s, supply.anchor), pieces),
        (decoding_s, present),
        classes,
        class_s,
        (supply.places, max(0.0, supply.blocks)),
        supply.anchor is Anchor.ENVELOPE,
    )
    admitted = np.zeros(len(kind), dtype=np.bool_)
    admitted[order] = taken
    chosen: NDArray[np.bool_] = admitted[own]
    return chosen


def _tiers(tpot_s: Floats) -> Floats:
    """The distinct TPOT tiers, ascending."""
    tiers: Floats = np.unique(tpot_s)
    tiers = tiers[tiers < inf]
    if len(tiers) > MOST_TIERS:
        tiers = tiers[np.linspace(0, len(tiers) - 1, MOST_TIERS).astype(np.int64)]
    return tiers


def _tier_of(tiers: Floats, tpot_s: Floats) -> NDArray[np.int64]:
    """Each one's tier; the number of tiers where it has no pace."""
    tier = np.searchsorted(tiers, tpot_s, side="right") - 1
    tier[np.isinf(tpot_s)] = len(tiers)
    return tier.astype(np.int64)


def _pace(tiers: Floats, step_s: Floats, anchor: Anchor) -> Floats:
    """``[tier, tightest tier present]``: how often a decode of the tier runs, tokens per second.

    In the mean once per TPOT (Alg. 2's schedule deadlines). With :attr:`Anchor.LAST_TOKEN` an early
    token buys nothing: then it runs in every ``floor(TPOT / t0)``-th batch, which is more often.
    """
    pace = np.zeros((len(tiers) + 1, len(tiers) + 1))
    if anchor is Anchor.LAST_TOKEN:
        whole = np.maximum(1.0, np.floor(np.divide.outer(tiers, step_s) + 1e-9))
        pace[:-1] = 1.0 / (whole * step_s)
    else:
        pace[:-1] = 1.0 / tiers[:, np.newaxis]
    return pace
