"""SLOs-Serve's admission: which new requests can be promised their objectives.

A dynamic program over the requests by prefill deadline (SLOs-Serve §3.2.1 and appendix C). Promised
requests are forced in; of the new ones it takes the set with the greatest worth. Our readings:

- The prefill budget is in seconds of predicted work, as a token of a long prompt takes more time.
  It starts negative by one step's fixed time, as a last batch that a deadline cuts short yields
  less than the fluid limit of ``PB*``.
- The maximum over the last accepted request ``j`` is the choice, one by one, to skip or to take.
- The counts ``n`` are of new requests only: running requests add a factor ``N`` and no states.
- Requests of one TPOT tier and one value are one class, so a state knows its worth: the paper's
  ``v_i`` without a budget axis.
- In place of an axis of memory, the requests of a class also need the same number of KV blocks
  where the new requests do not all fit.
- The paper counts a decode from its prefill deadline on (Fig. 5), which holds for
  ``Anchor.ENVELOPE``. With other anchors it begins when its prefill ends and takes budget from
  those behind it: there the program keeps the earliest end of the accepted prefills.
- A promised request that is late by a prediction error blocks nothing, but no new request may make
  it later."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.admission.slos_serve.dynamic_program import CLASS, EVENT, PIECE, Tiers, solve
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import Anchor

MAX_NEW = 10
"""Maximum number of new requests decided together, the paper's "zero to ten": more are decided in
groups of this size, in the order given. It bounds the states to ``2**10``."""

MAX_TIERS = 12
"""Maximum number of TPOT tiers. With more distinct TPOTs, a TPOT counts as the next shorter
tier."""

HORIZON_S = 3_600.0
"""Deadlines farther away than this, seconds, count as this far."""

MIN_STEP_S = 1e-6
"""Steps and TPOT objectives shorter than this, seconds, count as this long: by some models, a step
takes no time."""


class PlanDemand(NamedTuple):
    """The demand of requests, one entry per request; times are predicted and in seconds.

    Attributes:
        due_s: time until its first token (after a preemption: its next); may be negative or
            infinite.
        prefill_s: marginal time of its pending prefill; 0 for a decode.
        tpot_s: infinite where none is promised.
        decode_s: ``float64[n, pieces]``, marginal time of one decode step of it.
        blocks: KV blocks that it will need beyond its current ones.
        value: worth of a promise; ignored for requests that have one."""

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
        fixed_s: ``float64[pieces]``, time of a step before any token, seconds.
        share: ``float64[pieces]``, share of ``prefill_s`` that counts in that piece, 0 to 1.
        longest_s: time of a batch that fills the engine's token limit, seconds.
        blocks: free KV blocks that promises may use.
        places: sequence slots that can still be promised.
        anchor: where the deadlines of later tokens start."""

    fixed_s: Floats
    share: Floats
    longest_s: float
    blocks: float
    places: int
    anchor: Anchor


def admissible(new: PlanDemand, promised: PlanDemand, supply: Supply) -> NDArray[np.bool_]:
    """Which ``new`` requests can be promised beside the ``promised`` ones.

    ``O(groups * prefills * states)``: ``states`` is the product of (class size + 1) over the
    classes of a group; for a single new request 2, a feasibility test."""
    count = len(new.due_s)
    admitted = np.zeros(count, dtype=np.bool_)
    for start in range(0, count, MAX_NEW):
        rows = np.arange(start, min(start + MAX_NEW, count))
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
    """The same for at most :data:`MAX_NEW`."""
    ready = promised.prefill_s <= 0
    pending, decodes = promised.of(~ready), promised.of(ready)
    events = pending.beside(new)
    decode_pace_s, pace_s = (np.maximum(each.tpot_s, MIN_STEP_S) for each in (decodes, events))
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
    step_s = np.minimum(np.append(tiers, inf), max(MIN_STEP_S, supply.longest_s))
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
    if len(tiers) > MAX_TIERS:
        tiers = tiers[np.linspace(0, len(tiers) - 1, MAX_TIERS).astype(np.int64)]
    return tiers


def _tier_of(tiers: Floats, tpot_s: Floats) -> NDArray[np.int64]:
    """Each one's tier; the number of tiers where it has no TPOT."""
    tier = np.searchsorted(tiers, tpot_s, side="right") - 1
    tier[np.isinf(tpot_s)] = len(tiers)
    return tier.astype(np.int64)


def _pace(tiers: Floats, step_s: Floats, anchor: Anchor) -> Floats:
    """``[tier, tightest tier present]``: how often a decode of the tier runs, tokens per second: in
    the mean once per TPOT (Alg. 2), with ``Anchor.LAST_TOKEN`` in every ``floor(TPOT / t0)``-th
    batch, as an early token buys nothing there."""
    pace = np.zeros((len(tiers) + 1, len(tiers) + 1))
    if anchor is Anchor.LAST_TOKEN:
        whole = np.maximum(1.0, np.floor(np.divide.outer(tiers, step_s) + 1e-9))
        pace[:-1] = 1.0 / (whole * step_s)
    else:
        pace[:-1] = 1.0 / tiers[:, np.newaxis]
    return pace
