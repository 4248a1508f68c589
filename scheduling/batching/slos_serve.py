"""SLOs-Serve: guarantee attainable SLOs, meet them, and serve the rest with the capacity left."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.admission.slos_serve.selection import (
    MAX_NEW,
    PlanDemand,
    Supply,
    admissible,
)
from sluice.scheduling.batching.base import BatchPolicy, least_useful_s
from sluice.scheduling.batching.batch import BatchBudget, BatchBuilder
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request import expected
from sluice.scheduling.request.kernels import (
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
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView

Mask = NDArray[np.bool_]

MAX_DECIDED = 2 * MAX_NEW
"""Maximum number of new requests that one call decides, in about a millisecond."""


class SLOsServeOptions(PolicyOptions):
    """Options of :class:`SLOsServe`."""

    anchor: Anchor = Field(
        default=Anchor.LAST_TOKEN,
        description="Where the deadlines of later tokens start. The paper measures TPOT every 10 "
        "tokens: `last_token` meets it in every window, as no token may use time that earlier "
        "ones have saved. `envelope` is the paper's own budget, in which a decode counts from its "
        "prefill deadline on (Fig. 5); it guarantees more requests, and meets TDG but no TPOT.",
    )
    margin: float = Field(
        default=0.05,
        ge=0,
        le=0.5,
        description="Share of each batch's and each guarantee's time that is reserved for "
        "prediction errors, in addition to the latency model's own head-room.",
    )
    expected_tokens: int = Field(
        default=256,
        ge=1,
        le=1_048_576,
        description="Output length, tokens, of a request without a prediction. Admission counts "
        "its KV blocks. The default is about the paper's mean for chat (266).",
    )


class SLOsServe(BatchPolicy):
    """Soft admission by dynamic programming (§3.1, §3.2.1), batches as long as the tightest TPOT
    (§3.2.2, Alg. 2). Requests without a promise get what is left (§4.1) and may starve, as in the
    paper. ``O(n log n)``.

    Our readings:

    - Promises count decodes without speculation, as acceptance is a mean over the past.
    - A decode is scheduled if, left out, it would be late in the next batch: Alg. 2's line 9 with
      ``schDDL < (i + 1) t0``, not the printed ``>=``.
    - Alg. 1 forgets declined requests; here one without output is decided again when requests
      arrive or leave, at most ten with the new ones.
    - Memory ``m_i`` grows with the output: a new request needs all of its memory beside the
      promised ones' peak (``expected.peak``).
    - No promise without an objective, or for a TPOT that no useful batch can meet
      (``least_useful_s``). End-to-end objectives become TTFT and TPOT (``deadline.paced``).
    - What the controller has promised is forced in; its prefills go first where one might be late.
    - Best-effort requests lose their KV to running promised ones only; the paper preempts them for
      new ones."""

    name = "slos_serve"
    source = "SLOs-Serve §3.2, §4.1, Algorithms 1 and 2, appendix C"
    local_order = SLIDE
    Options = SLOsServeOptions
    options: SLOsServeOptions

    _budget: BatchBudget

    def __init__(self, options: SLOsServeOptions | None = None) -> None:
        super().__init__(options)
        self._within = 1.0 - self.options.margin
        self._keys: Ints = np.empty(0, dtype=np.int64)
        self._objectives: Floats = np.empty((0, PRIORITY - TTFT))
        self._promised: Mask = np.empty(0, dtype=np.bool_)
        self._decided: Mask = np.empty(0, dtype=np.bool_)

    @property
    def promised_keys(self) -> Ints:
        """``int64[n]``: keys of the guaranteed requests in the queue, as of the last plan."""
        return self._keys[self._promised]

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Due promised decodes, promised prefills, other promised decodes, best effort."""
        self._budget = batch.budget
        table, length = self._paced(queue.table)
        due_s = deadlines_s(table, self.options.anchor.code)
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
            # An engine that runs out of blocks preempts requests outside the plan.
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
        """The rows, with end-to-end objectives as TTFT and TPOT, and their expected lengths."""
        # Whole tokens, as reports have them.
        length = np.floor(table[:, EXPECTED])
        length = np.where(length >= 1.0, length, self.options.expected_tokens)
        if np.isfinite(table[:, E2E]).any():
            table = table.copy()
            expected.pace_rows(table, length)
        return table, length

    def _front(
        self, bound: Mask, taken_s: float, work_s: Floats, left_s: Floats, until_s: float
    ) -> Ints:
        """The prefills by deadline, or the ``bound`` ones first where one might be late."""
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
        self, table: Floats, rows: Ints, claims: Any, growth: Floats, free_blocks: int
    ) -> Ints:
        """The best-effort ``rows`` that run, and waiting ones whose predicted length fits."""
        running = table[rows, RUNNING] > 0
        begun, waiting = rows[running], rows[~running]
        needs = growth[begun]
        blocks = claims["blocks"]
        room = self._room(claims) - blocks[begun].sum()
        begun = begun[(needs == 0) | (np.cumsum(needs) <= free_blocks)]
        return np.concatenate((begun, waiting[np.cumsum(blocks[waiting]) <= room]))

    def _room(self, claims: Any) -> float:
        """Free KV blocks beyond those that the guaranteed requests will need."""
        needed = expected.peak(claims[self._promised], float(self._budget.block_tokens))
        return float(self._budget.kv_blocks - needed)

    def _promise(
        self, queue: QueueView, table: Floats, left_s: Floats, claims: Any, latency: LatencyModel
    ) -> None:
        """Decide on new requests, if the queue or its objectives have changed."""
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
        # A running request that this policy never saw waiting was admitted by another policy.
        promised |= ~seen & holdable & (table[:, RUNNING] > 0)
        pieces = latency.pieces / self._within
        work_s = pending_work_s(table, pieces)
        # A request that starts here with its decode has no prefill deadline.
        left_s = np.where(is_prefill(table), left_s, inf)
        begun = (table[:, EMITTED] > 0) & (table[:, RUNNING] > 0)
        asking = ~promised & holdable & ~(decided & begun)
        asking &= left_s >= work_s + pieces[:, FIXED].max()
        # A request whose prompt fills all memory never runs.
        there = self._budget.kv_blocks + table[:, KV_BLOCKS].sum()
        asking &= _blocks(table[:, PROMPT], self._budget) < there
        new = np.flatnonzero(asking & ~decided)
        self._decided = np.ones(len(keys), dtype=np.bool_)
        self._decided[new[MAX_DECIDED:]] = False
        new = new[:MAX_DECIDED]
        again = np.flatnonzero(asking & decided)
        worth = work_s[again] / table[again, PRIORITY]
        again = again[np.argsort(worth, kind="stable")[: max(0, MAX_NEW - len(new))]]
        new = np.concatenate((new, again))
        if not len(new):
            return
        supply = self._supply(table, claims, pieces, latency)
        demand = _demand(table, left_s, work_s, claims["blocks"], pieces)
        held = demand.of(promised)
        # A TPOT shorter than a step with its decode alone must not block all other requests.
        alone_s = self._within * (pieces[:, FIXED] + held.decode_s).max(axis=1)
        held = held._replace(tpot_s=np.maximum(held.tpot_s, alone_s))
        promised[new] = admissible(demand.of(new), held, supply)

    def _known(self, keys: Ints) -> tuple[Mask, Mask, Mask]:
        if not len(self._keys):
            none = np.zeros(len(keys), dtype=np.bool_)
            return none, none.copy(), none
        order = np.argsort(self._keys)
        place = np.searchsorted(self._keys, keys, sorter=order)
        place = order[np.minimum(place, len(order) - 1)]
        seen = self._keys[place] == keys
        return seen, seen & self._promised[place], seen & self._decided[place]

    def _supply(self, table: Floats, claims: Any, pieces: Floats, latency: LatencyModel) -> Supply:
        """The capacity left for guarantees."""
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
            self._room(claims),
            self._budget.sequences - int((running | promised).sum()),
            self.options.anchor,
        )


def _blocks(tokens: Floats, budget: BatchBudget) -> Floats:
    """KV blocks that ``tokens`` fill."""
    blocks: Floats = np.ceil(tokens / budget.block_tokens)
    return blocks


def _demand(
    table: Floats, left_s: Floats, work_s: Floats, blocks: Floats, pieces: Floats
) -> PlanDemand:
    """The demand of each row; a decode counts with the context of its next or first step."""
    prefill = is_prefill(table)
    context = table[:, COMPUTED] + np.where(prefill, table[:, PENDING], 0.0)
    decode_s = pieces[:, DECODE_SEQUENCE] + np.outer(context, pieces[:, DECODE_CONTEXT])
    prefill_s = np.where(prefill, work_s, 0.0)
    return PlanDemand(left_s, prefill_s, table[:, TPOT], decode_s, blocks, table[:, PRIORITY])
