"""Priority mapping by simulated annealing (002), for continuous batching. Times are seconds.

A mapping is a sequence of batches, each of which starts when the longest request of the one before
ends. The search maximises ``G = met requests / sum of end-to-end latencies`` (Eq. 2 to 4). A move
is evaluated from the first batch that it changes, as each row has the state at its batch's start.
"""

from __future__ import annotations

from math import exp, inf, isnan
from typing import Literal, NamedTuple, Self

import numpy as np
from pydantic import Field

from sluice.scheduling.assumptions import UNKNOWN_OUTPUT_TOKENS
from sluice.scheduling.batching.base import BatchPolicy
from sluice.scheduling.batching.batch import BatchBuilder
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request import kernels
from sluice.scheduling.request.kernels import Floats, Ints, compiled
from sluice.scheduling.request.queue import QueueView

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"


LOSS_SCALE = 500.0
"""Temperature at which a loss of one request's share of G is accepted with probability 1/e."""

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
    """The requests to map.

    Attributes:
        exec_s, latest_s: ``float64[2, most, waiting]``: execution time and longest wait in the
            first batch, and in any other; one row per batch size.
        under_way: ``float64[most, 3]``: of the running requests, by batch size: how many meet their
            objective, the sum of their latencies, the longest."""

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
    """Fill in the rows of ``after`` behind the changed batches; return the last row filled, where
    later waits are as in ``before``. ``counts``: running requests, first and last changed batch,
    batches. The arrays of ``Problem`` are no tuple: its reference counts cost a tenth of a search.
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
    """Probability of accepting a mapping whose G differs by ``change``, relative to G."""
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
    """A random move: two indices to exchange, the first and last changed batch, and how many
    requests move. ``limits``: the largest batch, and the numbers of waiting and of running
    requests."""
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
    """Make the result of a move the current state; return the number of batches."""
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
    """Anneal ``current`` into ``best``; return its number of batches. ``O(steps * waiting)``."""
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


class Times(NamedTuple):
    """``float64[requests, most]`` by batch size - 1; a negative longest wait: cannot meet its
    objective."""

    exec_s: Floats
    latest_s: Floats


class Jobs(NamedTuple):
    """Times of the waiting requests, of the running ones, and of the waiting ones in the first
    batch (``joining``; None: as elsewhere). ``waited_s`` is the sum of all waits so far."""

    waiting: Times
    running: Times | None = None
    joining: Times | None = None
    waited_s: float = 0.0


class Schedule(NamedTuple):
    """The temperatures of a search, descending, and its random numbers ``float64[levels,
    iterations, 4]`` in [0, 1): for the move, its two requests and acceptance."""

    temperatures: Floats
    draws: Floats

    @classmethod
    def paper(cls, seed: int = 0) -> Self:
        """Algorithm 1's: from 500 by 0.95 down to 20, 100 iterations each. About a millisecond."""
        temperatures = 500.0 * 0.95 ** np.arange(63, dtype=np.float64)
        return cls(temperatures, np.random.default_rng(seed).random((63, 100, 4)))


class Mapping(NamedTuple):
    """Indices of the waiting requests in order, and how many of them are in each batch. ``met`` and
    ``latency_s`` (a sum) include the running requests, which are in the first batch."""

    order: Ints
    sizes: Ints
    met: int
    latency_s: float

    @property
    def g(self) -> float:
        """The objective, met requests per second of latency."""
        return self.met / self.latency_s if self.latency_s > 0 else inf


class Interaction(NamedTuple):
    """``alpha * b * l + beta * b + gamma * l + delta`` seconds for ``b`` sequences of ``l`` tokens
    each (Eq. 14 and 15; stated there for batches below 2,000)."""

    alpha: float
    beta: float
    gamma: float
    delta: float


def phases_of(latency: LatencyModel) -> Floats:
    """The :class:`Interaction` of a prefill and of a decode, ``float64[2, 4]``, in batches of equal
    sequences: the largest coefficients of all pieces, without the square term."""
    piece = latency.pieces.max(axis=0)
    fixed_s = piece[kernels.FIXED]
    prefill = piece[kernels.PREFILL_TOKENS], piece[kernels.PREFILL_SEQUENCE]
    decode = piece[kernels.DECODE_CONTEXT], piece[kernels.DECODE_SEQUENCE]
    return np.array([Interaction(*prefill, 0.0, fixed_s), Interaction(*decode, 0.0, fixed_s)])


@compiled
def predict(table: Floats, phases: Floats, now_s: float, most: int, decoding: int) -> Times:
    """The times of the requests at ``now_s`` (Eq. 5 to 9, 14 to 19), with their remaining work.
    After the first token, the mean TPOT since it and the end-to-end time decide. ``decoding``
    requests take no part in a prefill. ``O(requests * most)``."""
    exec_s = np.empty((table.shape[0], most))
    latest_s = np.empty((table.shape[0], most))
    for index in range(table.shape[0]):
        row = table[index]
        emitted, pending, tpot_s = row[kernels.EMITTED], row[kernels.PENDING], row[kernels.TPOT]
        expected = row[kernels.EXPECTED]
        left = max((UNKNOWN_OUTPUT_TOKENS if isnan(expected) else expected) - emitted, 1.0)
        # Eq. 16 sums over the growing context, for which its mean stands.
        context = row[kernels.COMPUTED] + pending + (left + 1.0) / 2.0
        first_due_s = row[kernels.ARRIVAL] + row[kernels.TTFT]
        end_s = row[kernels.ARRIVAL] + row[kernels.E2E]
        first_s = row[kernels.FIRST_TOKEN]
        for place in range(most):
            prefill_s = 0.0
            if kernels.needs_prefill(emitted, pending):
                joining = max(place + 1.0 - decoding, 0.0)
                prefill_s = interaction_s(phases[0], joining, pending)
            decode_s = left * interaction_s(phases[1], place + 1.0, context)
            seconds = prefill_s + decode_s
            if emitted == 0.0:
                until_s = first_due_s - prefill_s
                missed = decode_s > left * tpot_s
            elif isnan(first_s):
                until_s, missed = inf, False
            else:
                until_s = first_s + (emitted + left - 1.0) * tpot_s - seconds
                missed = first_s > first_due_s
            exec_s[index, place] = seconds
            latest_s[index, place] = -inf if missed else min(until_s, end_s - seconds) - now_s
    return Times(exec_s, latest_s)


@compiled
def interaction_s(phase: Floats, batch: float, length: float) -> float:
    """The time of an :class:`Interaction`."""
    return (phase[0] * length + phase[1]) * batch + (phase[2] * length + phase[3])


def anneal(jobs: Jobs, schedule: Schedule) -> Mapping:
    """Search the mapping with the greatest G (002 §4.3, Algorithm 1), at most ``O(levels *
    iterations * waiting)``. Raises ValueError if more requests run than the largest batch may have.

    Our readings: pushing out of the last batch opens a new one (Fig. 4 needs it), and a pull or
    push into a full batch is a swap. A worse mapping is accepted with ``exp(LOSS_SCALE * change /
    T)``, of the relative change of G times the number of requests: the paper's ``exp(change of G /
    T)`` accepts nearly everything. While no request meets its objective, lower latency is better.
    """
    problem = _problem(jobs)
    exec_s, latest_s, under_way, running = problem
    _, most, waiting = exec_s.shape
    sizes, batches = _full_batches(waiting, most, running)
    whole = (running, 0, batches, batches)
    before = np.zeros((2, waiting + 3, COLUMNS))
    before[:, 0, LATENCY] = jobs.waited_s
    starts = (np.arange(waiting), np.argsort(exec_s[1, -1], kind="stable"))
    for order, rows in zip(starts, before, strict=True):
        evaluate(exec_s, latest_s, under_way, order, sizes, whole, rows, rows)
    ends = before[:, batches]
    all_met = bool(ends[1, MET] == waiting + running)
    best = int(all_met or objective(*ends[1, :2]) > objective(*ends[0, :2]))
    order, rows = starts[best], before[best]
    if waiting and not all_met:
        found = order.copy(), sizes.copy()
        other = before[1 - best]
        batches = search(problem, found, (order, sizes), batches, rows, other, schedule)
        order, sizes = found
        whole = (running, 0, batches, batches)
        evaluate(exec_s, latest_s, under_way, order, sizes, whole, rows, rows)
    return Mapping(order, sizes[:batches], int(rows[batches, MET]), float(rows[batches, LATENCY]))


def _problem(jobs: Jobs) -> Problem:
    most = jobs.waiting.exec_s.shape[1]
    running = 0 if jobs.running is None else len(jobs.running.exec_s)
    if running > most:
        raise ValueError(f"at most {most} requests can run in a batch, {running} run already")
    under_way = np.zeros((most, 3))
    if jobs.running is not None:
        under_way[:, MET] = (jobs.running.latest_s >= 0).sum(axis=0)
        under_way[:, LATENCY] = jobs.running.exec_s.sum(axis=0)
        under_way[:, WAIT] = jobs.running.exec_s.max(axis=0, initial=0.0)
    first = jobs.joining or jobs.waiting
    return Problem(
        np.array((first.exec_s.T, jobs.waiting.exec_s.T)),
        np.array((first.latest_s.T, jobs.waiting.latest_s.T)),
        under_way,
        running,
    )


def _full_batches(waiting: int, most: int, running: int) -> tuple[Ints, int]:
    """Sizes of batches filled one by one, padded, and the number of batches in use."""
    ends = np.minimum(max(most - running, 0) + most * np.arange(waiting + 2), waiting)
    return np.diff(ends, prepend=0), int(np.count_nonzero(ends < waiting)) + 1


MAX_MAPPED = 40
"""Waiting requests that one search maps, the earliest arrivals; the others wait behind them."""


class AnnealingOptions(PolicyOptions):
    """Options of :class:`Annealing`."""

    batch_size: int = Field(
        default=32,
        ge=1,
        le=256,
        description="Maximum number of requests that run at once. Waiting requests are admitted up "
        "to it; running ones continue. The engine's own sequence limit also applies.",
    )
    admits: Literal["first_batch", "in_order"] = Field(
        default="first_batch",
        description="Which waiting requests run. `first_batch`: those of the first batch, even if "
        "more would fit `batch_size`. `in_order`: the next ones in the whole order, whichever "
        "batch they are in, as an FCFS engine runs what it gets in that order.",
    )


class Annealing(BatchPolicy):
    """Admits waiting requests by a priority mapping that maximises attainment over mean latency.

    Our readings for continuous batching: running requests continue and belong to the first batch;
    later batches wait, except with ``admits: in_order`` (FCFS dispatch, §5.1); each arrival, end or
    preemption maps again. Like the paper, without ageing and preemption. ``O(n)`` while the last
    mapping is valid, else ``O((batch_size + steps) * MAX_MAPPED)``."""

    name = "annealing"
    source = "SLO-Aware Scheduling for LLM Inferences (arXiv 2504.14966) §4.2, §4.3, Algorithm 1"
    local_order = SLIDE
    Options = AnnealingOptions
    options: AnnealingOptions

    def __init__(self, options: AnnealingOptions | None = None) -> None:
        super().__init__(options)
        self._schedule = Schedule.paper()
        self._keys: Ints = np.empty(0, np.int64)
        self._waiting = np.empty(0, np.bool_)
        self._first: Ints = np.empty(0, np.int64)
        self._later: Ints = np.empty(0, np.int64)

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Take the running requests, then those of the mapping that are admitted."""
        table = queue.table
        waiting = table[:, kernels.RUNNING] == 0
        running = np.flatnonzero(~waiting)
        prefill = kernels.is_prefill(table)[running]
        decodes, prefills = running[~prefill], running[prefill]
        batch.take(decodes)
        batch.take(prefills)
        # Rows keep their indices while the keys are the same.
        same = np.array_equal(queue.keys, self._keys) and not (waiting & ~self._waiting).any()
        self._keys, self._waiting = queue.keys.copy(), waiting
        if len(running) == len(table):
            return
        if not same:
            rows = np.flatnonzero(waiting)
            free = self.options.batch_size - len(running)
            mapped = rows[: MAX_MAPPED if free > 0 else 0]
            order, admitted = self._map(table, decodes, prefills, mapped, now_s, latency)
            if self.options.admits == "in_order":
                admitted = max(free, 0)
            self._first = order[:admitted]
            self._later = np.concatenate((order[admitted:], rows[len(mapped) :]))
        batch.take(self._first)
        batch.ensure_progress(self._later)

    def _map(
        self,
        table: Floats,
        decodes: Ints,
        prefills: Ints,
        waiting: Ints,
        now_s: float,
        latency: LatencyModel,
    ) -> tuple[Ints, int]:
        """The rows of ``waiting`` in order, and how many of them the first batch has."""
        if not len(waiting):
            return waiting, 0
        phases, most = phases_of(latency), self.options.batch_size
        rows = np.concatenate((decodes, prefills, waiting))
        jobs = Jobs(
            predict(table[waiting], phases, now_s, most, 0),
            waited_s=float(np.sum(now_s - table[rows, kernels.ARRIVAL])),
        )
        running = len(rows) - len(waiting)
        if running:
            exec_s, latest_s = predict(table[rows], phases, now_s, most, len(decodes))
            jobs = jobs._replace(
                running=Times(exec_s[:running], latest_s[:running]),
                joining=Times(exec_s[running:], latest_s[running:]),
            )
        found = anneal(jobs, self._schedule)
        return waiting[found.order], int(found.sizes[0])
