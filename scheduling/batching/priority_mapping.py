"""Priority mapping by simulated annealing: which requests run together, and in which order (002).

A mapping is a sequence of batches. A batch starts when the one before ends, that is, when the
longest request of that one ends. A request's times depend on its batch size. The search looks for
the mapping with the greatest ``G = met requests / sum of end-to-end latencies`` (Eq. 2 to 4), that
is, attainment over mean latency. All times are seconds.
"""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import floor, inf, isnan, log
from typing import NamedTuple

import numpy as np

from sluice.scheduling.batching.priority_search import (
    COLUMNS,
    LATENCY,
    MET,
    WAIT,
    Problem,
    evaluate,
    objective,
    search,
)
from sluice.scheduling.latency.request_model import InteractionLatency
from sluice.scheduling.request import kernels
from sluice.scheduling.request.kernels import Floats, Ints


class Times(NamedTuple):
    """Execution times and maximum waits of requests, for each batch size.

    Attributes:
        exec_s: ``float64[requests, most]``: time without waiting in a batch of ``column + 1``.
        latest_s: same shape: the longest wait with which the request still meets its objective,
            negative if it cannot.
    """

    exec_s: Floats
    latest_s: Floats


class Jobs(NamedTuple):
    """Requests to map.

    Attributes:
        waiting: times of the waiting requests, which can be in any batch.
        running: times of the running requests, which stay in the first batch; ``None`` if none.
        joining: times of the waiting requests in the first batch; ``None`` if they are the same as
            in any other batch.
        waited_s: sum of the waits of all requests so far.
    """

    waiting: Times
    running: Times | None = None
    joining: Times | None = None
    waited_s: float = 0.0


class Schedule(NamedTuple):
    """The annealing schedule and its random numbers; both bound the cost of a search.

    Attributes:
        temperatures: ``float64[levels]``, descending.
        draws: ``float64[levels, iterations, 4]`` in [0, 1): the move, its two requests, acceptance.
    """

    temperatures: Floats
    draws: Floats

    @classmethod
    def of(
        cls, initial: float, threshold: float, iterations: int, decay: float, seed: int
    ) -> Schedule:
        """Levels from ``initial``, each ``decay`` times the one before, until below ``threshold``.

        The random numbers are drawn once and used by every search: the result depends on the
        requests and the seed, not on earlier searches.
        """
        temperatures = initial * np.power(
            decay, np.arange(levels(initial, threshold, decay), dtype=np.float64)
        )
        draws = np.random.default_rng(seed).random((len(temperatures), iterations, 4))
        return cls(temperatures, draws)


def levels(initial: float, threshold: float, decay: float) -> int:
    """How many temperatures there are from ``initial`` down to ``threshold``, both above 0, each
    ``decay`` (between 0 and 1) times the one before."""
    return 0 if initial < threshold else floor(log(threshold / initial) / log(decay)) + 1


class Mapping(NamedTuple):
    """The result of a search.

    Attributes:
        order: ``int64[waiting]``: indices of the waiting requests, in order.
        sizes: ``int64[batches]``: how many waiting requests are in each batch. The first batch also
            has the running ones, and can have no waiting request.
        met: requests that meet their objective, running ones included.
        latency_s: sum of the end-to-end latencies, running ones included.
    """

    order: Ints
    sizes: Ints
    met: int
    latency_s: float

    @property
    def g(self) -> float:
        """The objective, met requests per second of latency."""
        return self.met / self.latency_s if self.latency_s > 0 else inf


def predict(
    table: Floats,
    now_s: float,
    model: InteractionLatency,
    most: int,
    expected_tokens: float,
    decoding: int = 0,
) -> Times:
    """The times of the requests of ``table`` at ``now_s``. ``O(requests * most)``.

    Eq. 14 to 19 with the remaining work of a request: its pending prefill, and the predicted output
    not yet emitted (at least one token). Before the first token, the TTFT, TPOT and end-to-end time
    that are stated are judged as in the paper (Eq. 5 to 9); the time since arrival counts as
    waiting. Afterwards TTFT is known, and the mean TPOT since the first token and the end-to-end
    time decide.

    Args:
        table: rows of :mod:`sluice.scheduling.request.kernels`.
        model: predictor of prefill and decode time.
        most: largest batch size.
        expected_tokens: output length of a request without a prediction.
        decoding: number of requests in the batch that decode already and take no part in a prefill.
    """
    return Times(
        *times_of(table, model.coefficients, now_s, most, float(expected_tokens), decoding)
    )


@kernels.compiled
def times_of(
    table: Floats,
    coefficients: Floats,
    now_s: float,
    most: int,
    expected_tokens: float,
    decoding: int,
) -> tuple[Floats, Floats]:
    """The compiled loop of :func:`predict`: both arrays of its result."""
    exec_s = np.empty((table.shape[0], most))
    latest_s = np.empty((table.shape[0], most))
    for index in range(table.shape[0]):
        row = table[index]
        emitted, pending, tpot_s = row[kernels.EMITTED], row[kernels.PENDING], row[kernels.TPOT]
        expected = row[kernels.EXPECTED]
        left = max((expected_tokens if isnan(expected) else expected) - emitted, 1.0)
        context = row[kernels.COMPUTED] + pending + (left + 1.0) / 2.0
        first_due_s = row[kernels.ARRIVAL] + row[kernels.TTFT]
        end_s = row[kernels.ARRIVAL] + row[kernels.E2E]
        first_s = row[kernels.FIRST_TOKEN]
        for place in range(most):
            prefill_s = 0.0
            if kernels.needs_prefill(emitted, pending):
                joining = max(place + 1.0 - decoding, 0.0)
                prefill_s = interaction_s(coefficients[0], joining, pending)
            decode_s = left * interaction_s(coefficients[1], place + 1.0, context)
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
    return exec_s, latest_s


@kernels.compiled
def interaction_s(coefficients: Floats, batch: float, length: float) -> float:
    """:meth:`~sluice.scheduling.latency.request_model.Interaction.seconds` of ``float64[4]``
    coefficients."""
    return (coefficients[0] * length + coefficients[1]) * batch + (
        coefficients[2] * length + coefficients[3]
    )


def anneal(jobs: Jobs, schedule: Schedule) -> Mapping:
    """Search the mapping with the greatest G (002 §4.3, Algorithm 1).

    The two start mappings are the given order and the order of ascending execution time, both in
    full batches. If the second meets every objective it is returned at once, although smaller
    batches could still improve G, as the paper accepts. Otherwise the better one is annealed and
    the best mapping seen is returned. Each step makes a random move: it pulls a request into the
    batch before, pushes it into the next one, or swaps two.

    ``O(levels * iterations * waiting)`` at most: a step evaluates the batches from the first one
    that it changed.

    Our readings:

    - Pushing out of the last batch opens a new one, else the number of batches could never grow
      (Fig. 4 needs it). A pull or push into a full batch becomes a swap.
    - A worse mapping is accepted with ``exp(LOSS_SCALE * change / T)``, where ``change`` is the
      relative change of G times the number of requests, so that it is -1 where one request's share
      of G is lost. The paper's ``exp(change of G / T)``, with temperatures of 500 to 20 and a G far
      below 1, accepts nearly every move to the end, which is a random walk.
    - While no request meets its objective, lower latency is better.

    Raises:
        ValueError: more requests run already than the largest batch may have.
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
    """Sizes of batches filled one by one, padded to the maximum number of batches, and the number
    of batches in use."""
    ends = np.minimum(max(most - running, 0) + most * np.arange(waiting + 2), waiting)
    return np.diff(ends, prepend=0), int(np.count_nonzero(ends < waiting)) + 1
