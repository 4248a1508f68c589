"""SLOs-Serve: promise what can be held, hold it, and serve the others with what is left."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from scheduling import expected
from scheduling.admission.slos_serve import MOST_NEW, Demand, Supply, admissible
from scheduling.batching.base import BatchBudget, BatchBuilder, BatchPolicy
from scheduling.batching.prefill_share import least_useful_s
from scheduling.kernels import (
    COMPUTED,
    DECODE_CONTEXT,
    DECODE_SEQUENCE,
    E2E,
    EMITTED,
    EXPECTED,
    FIXED,
    KV_BLOCKS,
    PENDING,
    PRIORITY,
    PROMISED,
    PROMPT,
    RUNNING,
    TPOT,
    TTFT,
    Floats,
    Ints,
    by_deadline,
    deadlines_s,
    is_prefill,
    pending_work_s,
)
from scheduling.latency import LatencyModel
from scheduling.objective import Anchor
from scheduling.policy import PolicyOptions
from scheduling.request import QueueView

Mask = NDArray[np.bool_]

MOST_DECIDED = 2 * MOST_NEW
"""Most new requests on which one call decides, so that no burst holds up the engine. Two groups
take about a millisecond."""


class SLOsServeOptions(PolicyOptions):
    """Options of :class:`SLOsServe`."""

    anchor: Anchor = Field(
        default=Anchor.LAST_TOKEN,
        description="Where the deadlines of later tokens start. The paper measures TPOT every 10 "
        "tokens: `last_token` holds that in every window, as no token may use time that earlier "
        "ones have saved. `envelope` is the paper's own budget, in which a decode counts from its "
        "prefill deadline on (Fig. 5); it promises more, and holds TDG but no TPOT.",
    )
    margin: float = Field(
        default=0.05,
        ge=0,
        le=0.5,
        description="Share of each batch's time, and of each promise's, that is kept for errors "
        "of prediction, beside the latency model's own head-room.",
    )
    expected_tokens: int = Field(
        default=256,
        ge=1,
        le=1_048_576,
        description="Output length, tokens, taken for a request without a prediction. Admission "
        "counts its KV blocks. The default is about the paper's mean for chat (266).",
    )


class SLOsServe(BatchPolicy):
    """Soft admission by dynamic programming, batches as long as the tightest TPOT. ``O(n log n)``.

    Admission (§3.1, §3.2.1): when a request arrives, ends or changes its objectives, new requests
    get a promise or not (:mod:`scheduling.admission.slos_serve`). Between those moments nothing is
    decided again, and what has left the queue is forgotten. Of a burst of arrivals, a call decides
    on the :data:`MOST_DECIDED` earliest; the others are best effort until their turn comes.

    Batches (§3.2.2, Alg. 2), with ``t0`` the least TPOT of the promised decodes: each takes the
    time ``t0``; decodes enter by schedule deadline; the rest goes to promised prefills by deadline.

    Best effort (§4.1): requests without a promise get what time and memory that leaves, decodes
    before prefills, each in order of arrival. While promises take every batch whole, they wait:
    the paper has no rule against that, and neither has this policy.

    Speculation (§3.2.3, appendix D): where something is drafted, ``t0`` is the batch time of the
    solver (:class:`~scheduling.speculation.AdaptiveLengths`), and a decode is due when the last of
    the tokens that its step is expected to give is.

    Our readings:

    - Promises count decodes without speculation. Appendix D has its prefill budget in the dynamic
      program, too; but acceptance is a mean of the past, a promise holds until the request's end,
      and what speculation wins is for those that have none.
    - ``time2bs(t0)`` is ``t0`` itself: the builder fills a batch by predicted seconds. With tokens
      ``n`` that is the same batch, and the context counts.
    - A token is due for scheduling where, left out, it would come too late in the next batch:
      ``deadline < end of this batch + t0``, Alg. 2's line 9 with ``schDDL < (i + 1) t0``. The
      printed ``>=`` would schedule those that are not due.
    - A batch that ends a promised prefill is not padded beyond that prefill's deadline.
    - Alg. 1 forgets declined requests. Here one that is not answering yet is asked again when
      requests have come or gone, as long as its deadline is ahead: at most ten with the new ones,
      those of most worth per predicted second first.
    - The tightest stage of a request counts as long as its row says so; when the row's objective
      changes with the stage, that is decided anew. A promise is kept in the later stages.
    - A request whose TPOT no batch with a useful share of prefill could hold
      (:mod:`scheduling.batching.prefill_share`) gets no promise. One without any objective has
      nothing to be promised. An end-to-end objective becomes a TTFT and a pace, by
      the expected output (:func:`~scheduling.expected.paced`).
    - What the controller has promised is forced in, whatever this program would say, and its
      prefills go before those that only this policy has promised, where one of them might be late
      else. A pace of it that is too short for a useful batch counts as the shortest that is not.
    - A batch ends before a decode is late that was left out of the last one: when the tightest TPOT
      leaves, batches become longer than what such a decode has left.
    - The paper preempts best-effort requests when new ones arrive. An engine gives no blocks of a
      running request to a waiting one, so here they lose their KV to running promised requests
      only. And as evicting recomputes, it is bounded beforehand: a waiting best-effort request is
      let in only if its whole predicted length fits beside all that is promised or runs. A request
      that outgrows its prediction counts as twice as long as it is, so a prediction fails it
      ``log2(length)`` times at most.

    Each decision is ``O(n)`` beside the dynamic program.
    """

    name = "slos_serve"
    source = "SLOs-Serve §3.2, §4.1, Algorithms 1 and 2, appendix C"
    Options = SLOsServeOptions

    _budget: BatchBudget

    def __init__(self, options: SLOsServeOptions | None = None) -> None:
        options = options or SLOsServeOptions()
        super().__init__(options)
        self._anchor = options.anchor
        self._within = 1.0 - options.margin
        self._expected = options.expected_tokens
        self._keys: Ints = np.empty(0, dtype=np.int64)
        self._objectives: Floats = np.empty((0, PRIORITY - TTFT))
        self._promised: Mask = np.empty(0, dtype=np.bool_)
        self._decided: Mask = np.empty(0, dtype=np.bool_)

    @property
    def promised_keys(self) -> Ints:
        """``int64[n]``: keys of the requests in the queue that have a promise, as of the last
        plan."""
        return self._keys[self._promised]

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Promised decodes that are due, promised prefills, other promised decodes, best effort."""
        self._budget = batch.budget
        table, length = self._paced(queue.table)
        due_s = deadlines_s(table, self._anchor.code)
        there = self._budget.kv_blocks + float(table[:, KV_BLOCKS].sum())
        claims = expected.claims(table, length, float(self._budget.block_tokens), there)
        self._promise(queue, table, due_s - now_s, claims, latency)
        promised, prefill = self._promised, is_prefill(table)
        if batch.lengths is not None:
            batch.speculate(self.lengths(queue, now_s, latency, batch.budget, promised))

        decodes = by_deadline(np.flatnonzero(promised & ~prefill), due_s)
        prefills = by_deadline(np.flatnonzero(promised & prefill), due_s)
        tpot_s = np.maximum(table[decodes, TPOT], least_useful_s(latency.fixed_s, latency))
        tightest_s = float(tpot_s.min(initial=inf))
        if batch.lengths is not None:
            paced = decodes[tpot_s < inf]
            due_s = due_s + batch.lengths.credit_s[: len(table)]
            decodes = by_deadline(decodes, due_s)
            tightest_s = max(tightest_s, float(due_s[paced].min(initial=inf)) - now_s)
        left_s = due_s[decodes] - now_s
        alone_s = latency.fixed_s + pending_work_s(table[decodes], latency.pieces)
        least_s = float(left_s[left_s >= alone_s].min(initial=inf))
        until_s = min(tightest_s, least_s) * self._within
        urgent = int(np.searchsorted(due_s[decodes], now_s + until_s + tightest_s))
        growth = _blocks(table[:, COMPUTED] + table[:, PENDING], self._budget)
        growth = np.maximum(0.0, growth - table[:, KV_BLOCKS])
        if growth[decodes].sum() > batch.free_blocks:
            # An engine that runs out of blocks takes them from what is not in the plan.
            urgent = len(decodes)
        batch.take(decodes[:urgent])
        if len(prefills):
            work_s = pending_work_s(table[prefills], latency.pieces)
            left_s = due_s[prefills] - now_s
            bound = table[prefills, PROMISED] > 0
            front = self._front(bound, batch.cost_s, work_s, left_s, until_s)
            prefills, work_s, left_s = prefills[front], work_s[front], left_s[front]
            until_s = self._end_s(batch.cost_s, work_s, left_s, until_s)
        batch.take(prefills, until_s)
        batch.take(decodes[urgent:], until_s)

        others = np.flatnonzero(~promised)
        if len(others):
            others = others[np.argsort(prefill[others], kind="stable")]
            batch.take(self._let_in(table, others, claims, growth, batch.free_blocks), until_s)
        if batch.empty:
            batch.ensure_progress(np.concatenate((decodes, prefills, others)))

    def _paced(self, table: Floats) -> tuple[Floats, Floats]:
        """The rows with a TTFT and a TPOT wherever an objective is stated, and their lengths."""
        # Whole tokens, as reports have them.
        length = np.floor(table[:, EXPECTED])
        length = np.where(length >= 1.0, length, self._expected)
        if np.isfinite(table[:, E2E]).any():
            table = table.copy()
            expected.pace_rows(table, length)
        return table, length

    def _front(
        self, bound: Mask, taken_s: float, work_s: Floats, left_s: Floats, until_s: float
    ) -> Ints:
        """The order of the prefills, which are by deadline: as they are, or those ``bound`` by the
        controller's promise first, where else one of these might be late. Only this policy has
        promised the others anything."""
        order = np.arange(len(bound))
        if bound.all() or not bound.any():
            return order
        if taken_s < until_s:
            rate = 1.0 - taken_s / until_s
            # A batch may end with each of them.
            late = np.cumsum(taken_s + work_s) > self._within * rate * left_s
            if not late[bound].any():
                return order
        return np.concatenate((order[bound], order[~bound]))

    def _end_s(self, taken_s: float, work_s: Floats, left_s: Floats, until_s: float) -> float:
        """``until_s``, or the nearest deadline of the prefills that this batch can end in time."""
        end_s = taken_s + np.cumsum(work_s)
        left_s = left_s * self._within
        ending = (end_s <= until_s) & (end_s <= left_s)
        return min(until_s, float(left_s[ending].min(initial=inf)))

    def _let_in(
        self, table: Floats, rows: Ints, claims: Floats, growth: Floats, free_blocks: int
    ) -> Ints:
        """Those of the best-effort ``rows`` that can be served without taking blocks from others:
        the running ones, then the waiting ones whose whole predicted length fits."""
        running = table[rows, RUNNING] > 0
        begun, waiting = rows[running], rows[~running]
        needs = growth[begun]
        room = self._budget.kv_blocks - claims[self._promised].sum() - claims[begun].sum()
        begun = begun[(needs == 0) | (np.cumsum(needs) <= free_blocks)]
        return np.concatenate((begun, waiting[np.cumsum(claims[waiting]) <= room]))

    def _promise(
        self, queue: QueueView, table: Floats, left_s: Floats, claims: Floats, latency: LatencyModel
    ) -> None:
        """Decide on new requests, where the queue or its objectives have changed."""
        keys, objectives = queue.keys, queue.table[:, TTFT:PRIORITY]
        same = np.array_equal(keys, self._keys) and np.array_equal(objectives, self._objectives)
        if same and self._decided.all():
            return
        seen, promised, decided = self._known(keys)
        self._keys, self._objectives = keys.copy(), objectives.copy()
        promised |= table[:, PROMISED] > 0
        self._promised = promised
        tpot_s = table[:, TPOT]
        stated = np.isfinite(table[:, TTFT]) | np.isfinite(tpot_s)
        holdable = stated & (tpot_s >= least_useful_s(latency.fixed_s, latency))
        # One that runs without having been seen waiting was let in by another policy.
        promised |= ~seen & holdable & (table[:, RUNNING] > 0)
        pieces = latency.pieces / self._within
        work_s = pending_work_s(table, pieces)
        # One that begins here with a decode has no prefill to end in time.
        left_s = np.where(is_prefill(table), left_s, inf)
        begun = (table[:, EMITTED] > 0) & (table[:, RUNNING] > 0)
        asking = ~promised & holdable & ~(decided & begun)
        asking &= left_s >= work_s + pieces[:, FIXED].max()
        # One whose prompt fills all memory never runs.
        there = self._budget.kv_blocks + table[:, KV_BLOCKS].sum()
        asking &= _blocks(table[:, PROMPT], self._budget) < there
        new = np.flatnonzero(asking & ~decided)
        self._decided = np.ones(len(keys), dtype=np.bool_)
        self._decided[new[MOST_DECIDED:]] = False
        new = new[:MOST_DECIDED]
        again = np.flatnonzero(asking & decided)
        worth = work_s[again] / table[again, PRIORITY]
        again = again[np.argsort(worth, kind="stable")[: max(0, MOST_NEW - len(new))]]
        new = np.concatenate((new, again))
        if not len(new):
            return
        supply = self._supply(table, claims, pieces, latency)
        demand = _demand(table, left_s, work_s, claims, pieces)
        held = demand.of(promised)
        # A pace that its decode alone could not hold must not forbid all others.
        alone_s = self._within * (pieces[:, FIXED] + held.decode_s).max(axis=1)
        held = held._replace(tpot_s=np.maximum(held.tpot_s, alone_s))
        promised[new] = admissible(demand.of(new), held, supply)

    def _known(self, keys: Ints) -> tuple[Mask, Mask, Mask]:
        """Which requests were in the queue when it was looked at last, and of those, which have a
        promise, and on which it was decided."""
        if not len(self._keys):
            none = np.zeros(len(keys), dtype=np.bool_)
            return none, none.copy(), none
        order = np.argsort(self._keys)
        place = np.searchsorted(self._keys, keys, sorter=order)
        place = order[np.minimum(place, len(order) - 1)]
        seen = self._keys[place] == keys
        return seen, seen & self._promised[place], seen & self._decided[place]

    def _supply(
        self, table: Floats, claims: Floats, pieces: Floats, latency: LatencyModel
    ) -> Supply:
        """What promises may still take."""
        promised, prefill = self._promised, is_prefill(table)
        share = np.ones(len(pieces))
        if len(pieces) > 1 and prefill.any():
            rows = table[prefill]
            work_s = [
                float(pending_work_s(rows, pieces[i : i + 1]).sum()) for i in range(len(pieces))
            ]
            most_s = float(pending_work_s(rows, pieces).sum())
            if most_s > 0:
                share = np.array(work_s) / most_s
        longest_s = latency.fixed_s + latency.work_s(self._budget.tokens, 0)
        running = table[:, RUNNING] > 0
        return Supply(
            np.ascontiguousarray(pieces[:, FIXED]),
            share,
            longest_s / self._within,
            self._budget.kv_blocks - float(claims[promised].sum()),
            self._budget.sequences - int((running | promised).sum()),
            self._anchor,
        )


def _blocks(tokens: Floats, budget: BatchBudget) -> Floats:
    """KV blocks that so many tokens fill."""
    blocks: Floats = np.ceil(tokens / budget.block_tokens)
    return blocks


def _demand(
    table: Floats, left_s: Floats, work_s: Floats, claims: Floats, pieces: Floats
) -> Demand:
    """What each row needs; a decode is counted on the context of its next step, or its first."""
    prefill = is_prefill(table)
    context = table[:, COMPUTED] + np.where(prefill, table[:, PENDING], 0.0)
    decode_s = pieces[:, DECODE_SEQUENCE] + np.outer(context, pieces[:, DECODE_CONTEXT])
    prefill_s = np.where(prefill, work_s, 0.0)
    return Demand(left_s, prefill_s, table[:, TPOT], decode_s, claims, table[:, PRIORITY])
