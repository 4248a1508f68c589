"""How often drafts are right, and how many of them a batch checks: SLOs-Serve §3.2.3, appendix D.
More tokens per decode step let batches be longer, with more prefill, at the price of rejected
tokens."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.recent import used
from sluice.scheduling.request.kernels import (
    ACCEPTANCE,
    BEST_EFFORT,
    COMPUTED,
    DRAFTED,
    EMITTED,
    FIXED,
    LAST_TOKEN,
    PREFILL_TOKENS,
    RUNNING,
    TPOT,
    Floats,
    Ints,
    compiled,
    deadlines_s,
    is_prefill,
    most_work_s,
    work_s,
)
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView

MAX_LENGTH = 10
"""Longest length, as in appendix D."""

MIN_CHANCE = 0.05
"""A drafted token is not checked where it, and all before it, are right less often than this."""

STEPS = 40
"""Values of the least chance that are tried, from 1 to :data:`MIN_CHANCE`."""

_RATIO = MIN_CHANCE ** (1.0 / (STEPS - 1))

Mask = NDArray[np.bool_]


class Decodes(NamedTuple):
    """Running decodes, one entry of each array per decode.

    Attributes:
        tpot_s: infinite where it has none; then it takes the length that costs least.
        credit_s: longer batch for each drafted token expected to be accepted; in the paper the
            TPOT.
        alpha: probability that a drafted token is accepted if those before it are.
        most: longest length: one more than it has drafts.
        binds: whether the batch must be short enough for its TPOT."""

    left_s: Floats
    tpot_s: Floats
    credit_s: Floats
    alpha: Floats
    context: Floats
    most: Ints
    binds: Mask

    def of(self, places: Ints) -> Decodes:
        """Those at ``places``, in that order."""
        return Decodes._make(column[places] for column in self)


@compiled
def accepted_tokens(length: float, alpha: float) -> float:
    """``Acc(length) = (1 - alpha**length) / (1 - alpha)``: expected output of a decode's step."""
    return (1.0 - alpha**length) / (1.0 - alpha)


@compiled
def longest_lengths(alpha: Floats, drafted: Ints) -> Ints:
    """Per decode, the longest length that may be worth it: at most ``drafted``, likely enough."""
    most = np.ones(alpha.shape[0], np.int64)
    for row in range(alpha.shape[0]):
        chance = alpha[row]
        while most[row] < min(MAX_LENGTH, drafted[row]) and chance >= MIN_CHANCE:
            most[row] += 1
            chance *= alpha[row]
    return most


@compiled
def within_s(left_s: float, credit_s: float, alpha: float, length: int) -> float:
    """How long a batch may last so that a decode's output with this length keeps its TPOT."""
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
    """The lengths that leave most to prefill, and its tokens per second. ``O(decodes * lengths *
    log)``.

    Batches of ``T`` lose ``(fixed + draft_s * (longest - 1)) / T`` of each second, and a decode
    takes ``work(length) / (Acc(length) TPOT)``. ``T`` walks up from ``floor_s`` through the values
    at which a decode needs one token more, until one that binds can give no more."""
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
    events_s = np.empty(count * MAX_LENGTH)
    event_rows = np.empty(count * MAX_LENGTH, np.int64)
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
    order = np.argsort(events_s[:events], kind="mergesort")
    best = _prefill_rate(pieces, load, lowest_s, draft_s * (longest - 1))
    chosen = lengths.copy()
    for place in range(events + 1):
        # Just before a decode needs more, all keep their TPOT with what they have.
        at_s = highest_s if place == events else events_s[order[place]]
        rate = _prefill_rate(pieces, load, at_s, draft_s * (longest - 1))
        if rate > best:
            best = rate
            chosen = lengths.copy()
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
    """Prefill tokens per second beside batches of ``batch_s``; < 0: decodes do not fit."""
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
    """Where no prefill waits: the lengths that give most output per second, and that rate. A step
    checks each drafted token whose chance to count is at least the best of ``STEPS`` thresholds;
    decodes that bind and would fall behind check more. ``O(decodes)`` for each threshold."""
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
            chosen = lengths.copy()
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


PRIOR_ACCEPTANCE = 0.5
"""Taken for the acceptance of which nothing is known, so that something gets known."""

MAX_ALPHA = 0.99
"""Largest acceptance that is planned with."""

PRIOR_TRIALS = 8.0
"""As many drafted tokens that were right or wrong weigh as much as the prior."""

MEMORY_TRIALS = 256.0
"""About how many of the latest trials of a class count."""

FADING_STEPS = 1000
"""Unchecked steps until a class keeps ``exp(-1)`` of its evidence, so that it is tried again."""

MAX_CLASSES = 1024
"""Most service classes that are followed; the one heard of longest ago goes first."""


class AcceptanceRates:
    """Probability that a drafted token is right if those before it are, by service class: the share
    of successes, beside a prior of ``PRIOR_ACCEPTANCE``; drafts behind a wrong one say nothing.
    Keeps at most ``MAX_CLASSES``. Not thread-safe."""

    def __init__(self) -> None:
        self._learned: OrderedDict[str, list[float]] = OrderedDict()

    def rate(self, service_class: str) -> float:
        """The rate, above 0 and below 1; :data:`PRIOR_ACCEPTANCE` for an unknown class."""
        accepted, trials = self._learned.get(service_class, (0.0, 0.0))
        return (PRIOR_ACCEPTANCE * PRIOR_TRIALS + accepted) / (PRIOR_TRIALS + trials)

    def observe(self, service_class: str, checked: int, accepted: int) -> None:
        """One step of a decode with drafts; with 0 ``checked`` what is known fades. Raises
        ValueError unless ``0 <= accepted <= checked``."""
        if not 0 <= accepted <= checked:
            raise ValueError(
                f"accepted must be from 0 to checked, got {accepted} and {checked} checked"
            )
        if not checked and service_class not in self._learned:
            return
        known = used(self._learned, service_class, lambda: [0.0, 0.0], MAX_CLASSES)
        trials = accepted + (accepted < checked) if checked else 0
        kept = 1 - (trials / MEMORY_TRIALS if trials else 1 / FADING_STEPS)
        known[0] = kept * known[0] + accepted
        known[1] = kept * known[1] + trials


CREDIT = 0.5
"""Share of a TPOT added to a batch per drafted token expected to be accepted. With all of it, as in
the paper, every second window of tokens falls behind."""


USABLE = 0.9
"""A batch is not made shorter than this share of the least TPOT, and ends about as early."""


class Lengths(NamedTuple):
    """How many drafted tokens a batch may check, by row of a queue.

    Attributes:
        output: tokens that the step is expected to give: 1 without drafts.
        credit_s: how much later than its next token a decode's step may end: ``CREDIT`` of the TPOT
            for each token beyond the first, less what a short window is behind.
        work_s: predicted marginal time of the step; 0 for a prefill."""

    drafts: Ints
    output: Floats
    credit_s: Floats
    work_s: Floats

    @classmethod
    def none(cls, rows: int) -> Lengths:
        """Those of a queue of ``rows`` without drafts and without work."""
        zeros = np.zeros(rows)
        return cls(np.zeros(rows, np.int64), np.ones(rows), zeros, zeros.copy())

    def of(self, rows: Ints) -> Lengths:
        """Those of ``rows``, in that order."""
        return Lengths(self.drafts[rows], self.output[rows], self.credit_s[rows], self.work_s[rows])

    def before(self, others: Lengths) -> Lengths:
        """These, in place of as many at the head of ``others``."""
        count = len(self.drafts)
        return Lengths(
            np.concatenate((self.drafts, others.drafts[count:])),
            np.concatenate((self.output, others.output[count:])),
            np.concatenate((self.credit_s, others.credit_s[count:])),
            np.concatenate((self.work_s, others.work_s[count:])),
        )


class Speculation(ABC):
    """Chooses lengths for the batches of one policy. It remembers how late decodes are."""

    def __init__(self) -> None:
        self._lateness = RecentLateness()

    def choose(
        self,
        queue: QueueView,
        now_s: float,
        latency: LatencyModel,
        tokens: int,
        draft_s: float,
        anchor: Anchor,
        useful_s: float = 0.0,
        held: Mask | None = None,
    ) -> Lengths:
        """Lengths for the next batch. Where prefill waits, drafts take at most half of the tokens
        left by decodes; best-effort ones come last. A TPOT below ``useful_s`` counts for nothing.
        ``draft_s``: seconds for each drafted token of the longest length; ``held``: rows whose TPOT
        bounds the batch."""
        table = queue.table
        prefill = is_prefill(table)
        rows = np.flatnonzero(~prefill & (table[:, RUNNING] > 0))
        decodes = table[rows]
        tpot_s = decodes[:, TPOT].copy()
        left_s = deadlines_s(decodes, anchor.code) - now_s
        behind_s = np.zeros(len(rows))
        if anchor is Anchor.LAST_TOKEN:
            behind_s = self._lateness.behind_s(queue.keys[rows], decodes)
            left_s -= behind_s
        alpha = np.clip(decodes[:, ACCEPTANCE], 0.0, MAX_ALPHA)
        alpha[np.isnan(alpha)] = PRIOR_ACCEPTANCE
        finite_s = np.where(np.isfinite(tpot_s), tpot_s, 0.0)
        if held is None:
            tpot_s[:] = inf
        else:
            tpot_s[~held[rows] | (decodes[:, BEST_EFFORT] > 0)] = inf
        # A late request gets no time credit for tokens that are only expected.
        credit_s = np.where(behind_s > 0, 0.0, CREDIT * finite_s)
        # Copied, as compiled loops know one layout.
        context, most = decodes[:, COMPUTED].copy(), 1 + decodes[:, DRAFTED].astype(np.int64)
        none = np.zeros(len(rows), np.bool_)
        work = Decodes(left_s, tpot_s, credit_s, alpha, context, most, none)
        lengths = np.ones(len(rows), np.int64)
        apart, waits = table[:, BEST_EFFORT] > 0, False
        # Guaranteed requests choose first, as if alone; best effort gets the remaining tokens.
        for tier in (~apart, apart):
            own = np.flatnonzero(tier[rows])
            waits = waits or bool((prefill & tier).any())
            if len(own):
                room = len(own) + max(0, tokens - len(own)) // (1 + waits)
                chosen = self._lengths(work.of(own), waits, latency, draft_s, useful_s)
                lengths[own] = _within(chosen, room)
                tokens -= int(lengths[own].sum())
        found = Lengths.none(len(table))
        found.drafts[rows] = lengths - 1
        found.output[rows] = output = accepted_all(lengths, alpha)
        found.credit_s[rows] = (output - 1) * credit_s - behind_s
        found.work_s[rows] = lengths_work_s(latency.pieces, lengths, work.context)
        return found

    @abstractmethod
    def _lengths(
        self,
        decodes: Decodes,
        waits: bool,
        latency: LatencyModel,
        draft_s: float,
        useful_s: float,
    ) -> Ints:
        """Tokens of each decode, at least 1; ``waits``: whether prefill does."""


class AdaptiveLengths(Speculation):
    """The lengths of ``for_prefills`` while prefill waits, else of ``for_decodes``. A decode that
    is behind takes longer lengths; one that even its longest could not hold binds nothing; one
    whose TPOT does not count takes the length of least cost per expected token."""

    def _lengths(
        self,
        decodes: Decodes,
        waits: bool,
        latency: LatencyModel,
        draft_s: float,
        useful_s: float,
    ) -> Ints:
        left_s, tpot_s, credit_s, alpha, context, drafted, _ = decodes
        pieces = latency.pieces
        most = longest_lengths(alpha, drafted)
        stated = (tpot_s >= useful_s) & (tpot_s < inf)
        floor_s = USABLE * float(tpot_s[stated].min(initial=inf))
        alone_s = latency.fixed_s + lengths_work_s(pieces, np.ones_like(most), context)
        latest_s = left_s + (accepted_all(most, alpha) - 1) * credit_s
        binds = stated & (latest_s >= alone_s)
        tpot_s = np.where(stated, tpot_s, inf)
        left_s = np.where(binds, left_s, np.where(stated, np.maximum(left_s, 0.0), inf))
        if floor_s == inf:
            floor_s = useful_s
        best, chosen = -inf, np.ones_like(most)
        for cap in range(1, MAX_LENGTH + 1) if draft_s else (MAX_LENGTH,):
            capped = np.minimum(most, cap)
            own = Decodes(left_s, tpot_s, credit_s, alpha, context, capped, binds)
            if waits:
                rate, lengths = for_prefills(pieces, own, floor_s, draft_s)
            else:
                rate, lengths = for_decodes(pieces, own, draft_s)
            if rate > best:
                best, chosen = rate, lengths
        return chosen


class AllDrafts(Speculation):
    """Checks all that is drafted, as an engine does by itself: for comparison."""

    def _lengths(
        self,
        decodes: Decodes,
        waits: bool,
        latency: LatencyModel,
        draft_s: float,
        useful_s: float,
    ) -> Ints:
        return decodes.most


class RecentLateness:
    """How far decodes are behind their TPOT: the largest lateness of any run of tokens that ends
    with the latest one."""

    def __init__(self) -> None:
        self._keys: Ints = np.empty(0, np.int64)
        self._seen: Floats = np.empty((3, 0))

    def behind_s(self, keys: Ints, decodes: Floats) -> Floats:
        """Seconds of the decodes in these rows, 0 where nothing is late."""
        emitted, last_s = decodes[:, EMITTED], decodes[:, LAST_TOKEN]
        behind_s = np.zeros(len(keys))
        if len(self._keys):
            place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            before, at_s, owed_s = self._seen[:, place]
            tpot_s = np.where(np.isinf(decodes[:, TPOT]), 0.0, decodes[:, TPOT])
            late_s = np.maximum(0.0, owed_s + last_s - at_s - (emitted - before) * tpot_s)
            same = (self._keys[place] == keys) & (tpot_s > 0.0) & np.isfinite(late_s)
            behind_s[same] = late_s[same]
        order = np.argsort(keys)
        self._keys = keys[order]
        self._seen = np.stack((emitted, last_s, behind_s))[:, order]
        return behind_s


def _within(lengths: Ints, room: int) -> Ints:
    """``lengths``, cut to the longest common length with which their sum is within ``room``."""
    for cap in range(MAX_LENGTH, 1, -1):
        if lengths.sum() <= room:
            break
        lengths = np.minimum(lengths, cap - 1)
    return lengths
