"""Policies that balance one figure over the replicas."""

from __future__ import annotations

import random
from math import inf

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import (
    BEGUN_S,
    BLOCK_TOKENS,
    CONTEXT,
    DECODE_S,
    EXPECTED_BLOCKS,
    FIXED_S,
    FREE_BLOCKS,
    MIN_RATE,
    PACE_S,
    PREFILL_S,
    RUNNING,
    TOKENS,
    TOTAL_BLOCKS,
    WAITING,
    requests_at,
    spare_after_s,
)
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.routing.base import Job, RoutingPolicy

# PAB load balancing: the replica that can take the most additional prefill and meet its SLOs.


class PABBalancing(RoutingPolicy):
    """Takes the replica with the largest prefill admission budget. ``O(replicas log n)``, with
    ``n`` requests at a replica.

    The paper takes "a suitable node with sufficient budget" and says neither which nor what happens
    without one. We take the one with the most time left after the request's own prefill, so its
    cached tokens and the replica's speed count; the horizon is its own TTFT, or 1 s. Ties go to
    fewer requests, then to the first. The caller counts the prompt there at once."""

    name = "pab"
    source = "FairBatching §3.4 (PAB-LB)"
    passed_over = "its prefill budget is smaller"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the largest prefill admission budget."""
        due_s = job.due_s if job.due_s < inf else job.now_s + fleet.settings.reference_ttft_s
        left_s = spare_after_s(fleet.arrays, job.rows, job.now_s, due_s, job.lead_s, job.work_s)
        most = np.flatnonzero(left_s == left_s.max())
        if len(most) == 1:
            return int(most[0])
        return int(most[np.argmin(requests_at(fleet.figures[job.rows[most]]))])


# Round robin: every replica in turn, whatever its load.


class RoundRobin(RoutingPolicy):
    """Takes the replicas in turn, in the order of their rows: the next eligible one after the last
    choice. ``O(log replicas)``."""

    name = "round_robin"
    source = "folklore; the first hop of SLOs-Serve §4.2"
    passed_over = "it was not its turn"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica whose turn it is."""
        return self.take_turn(job.rows)


# Power of two choices: the less busy one of two replicas drawn at random.


class PowerOfTwoOptions(PolicyOptions):
    """Options of :class:`PowerOfTwo`."""

    seed: int | None = Field(
        default=None, description="Seed of the draws; default: from the operating system."
    )


class PowerOfTwo(RoutingPolicy):
    """Draws two different replicas and takes the one with fewer requests, waiting, running and on
    their way; on a tie the first one drawn. ``O(1)``."""

    name = "power_of_two"
    source = "Mitzenmacher, The power of two choices in randomized load balancing (TPDS 2001)"
    passed_over = "it was not drawn, or has more requests"
    Options = PowerOfTwoOptions

    def __init__(self, options: PowerOfTwoOptions | None = None) -> None:
        options = options or PowerOfTwoOptions()
        super().__init__(options)
        # Spreads load; not used for secrets.
        self._random = random.Random(options.seed)

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The less busy one of two random replicas."""
        count = len(job.rows)
        if count == 1:
            return 0
        first = self._random.randrange(count)
        second = self._random.randrange(count - 1)
        if second >= first:
            second += 1
        at_first, at_second = requests_at(fleet.figures[job.rows[[first, second]]])
        return second if at_second < at_first else first


# Least work: the replica with the least predicted prefill time ahead, given its prefix cache.


class LeastWork(RoutingPolicy):
    """Takes the replica where this prompt's prefill is done first in order of arrival, the KV
    transfer to a decode replica included; ties go to fewer requests, then to the first.
    ``O(replicas)``.

    The score is predicted time over the share that the decodes leave, not tokens, so faster
    replicas take more. A replica with the prompt's prefix is chosen while its queue is longer by at
    most what the cache saves."""

    name = "least_work"
    source = "join the shortest queue, in predicted seconds; ours"
    passed_over = "more work is ahead there"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica where the prefill is done first."""
        figures = fleet.figures[job.rows]
        left_s = np.maximum(0.0, figures[:, PREFILL_S] - done_s(figures, job.now_s)) + job.work_s
        ahead_s = left_s / prefill_share(figures) + job.lead_s
        least = np.flatnonzero(ahead_s == ahead_s.min())
        return int(least[np.argmin(requests_at(figures[least]))])


def prefill_share(figures: Floats) -> Floats:
    """The share of each replica's time that is left for prefill if all promised decodes run one
    step per shortest TPOT; ``figures`` is ``float64[n, FIGURES]``."""
    step_s = figures[:, FIXED_S] + figures[:, DECODE_S]
    # An infinite pace: no decode limits the share.
    return np.clip(1.0 - step_s / figures[:, PACE_S], MIN_RATE, 1.0)


def done_s(figures: Floats, now_s: float) -> Floats:
    """Prefill work done since the report. A replica that reported no requests has done none: the
    requests on their way to it count in full."""
    busy: NDArray[np.bool_] = figures[:, WAITING] + figures[:, RUNNING] > 0
    since_s = np.maximum(0.0, now_s - figures[:, BEGUN_S])
    done: Floats = np.where(busy, since_s * prefill_share(figures), 0.0)
    return done


# Instance assignment by predicted memory.


class LeastMemory(RoutingPolicy):
    """Takes the replica with the most KV memory left, in tokens (Eq. 20), after the expected need
    of its requests: their whole prompts and outputs. Ties go to the first. ``O(replicas)``.

    The paper assigns a pool at once and resets the remaining memory of all instances when the next
    request fits none. Our reading for single arrivals: when a request fits no replica, a round
    begins in which every replica counts as empty, minus its expected need added since then. It ends
    when that memory is used up as well, or when a request fits the real memory again."""

    name = "least_memory"
    source = "SLO-Aware Scheduling for LLM Inferences §4.4 (instance assignment), Eq. 20"
    passed_over = "it has less KV memory left"

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        # Tokens left at each replica when the round began.
        self._round: dict[str, float] = {}

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the most memory left."""
        figures = fleet.figures[job.rows]
        block = figures[:, BLOCK_TOKENS]
        left = (figures[:, FREE_BLOCKS] - figures[:, EXPECTED_BLOCKS]) * block
        output = np.where(job.splits, 0.0, job.output_tokens)
        needed = job.query.prompt_tokens + output - job.cached_tokens
        if (left >= needed).any():
            self._round.clear()
            return int(np.argmax(left))
        total = figures[:, TOTAL_BLOCKS] * block
        now = {fleet.ids[row]: own for row, own in zip(job.rows, left.tolist(), strict=True)}
        if self._round:
            taken = [self._round.get(name, own) - own for name, own in now.items()]
            counted = total - np.array(taken)
            if (counted >= needed).any():
                return int(np.argmax(counted))
        self._round = now
        return int(np.argmax(total))


# Least tokens: the replica with the least prefill work ahead.


class LeastTokens(RoutingPolicy):
    """Takes the replica with the fewest tokens to prefill, uncached ones of this prompt included;
    ties go to fewer running requests, then to less decode context, then to the first.
    ``O(replicas)``."""

    name = "least_tokens"
    source = "join the shortest queue, in units of prefill tokens"
    passed_over = "more tokens are ahead there"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the least prefill work ahead."""
        figures = fleet.figures[job.rows]
        tokens = figures[:, TOKENS] - job.cached_tokens
        least = np.flatnonzero(tokens == tokens.min())
        if len(least) == 1:
            return int(least[0])
        return int(least[np.lexsort((figures[least, CONTEXT], figures[least, RUNNING]))[0]])


# Min-load: the replica with the fewest requests.


class MinLoad(RoutingPolicy):
    """Takes the replica with the fewest requests: waiting, running and on their way. Ties go to the
    first in the list. ``O(replicas)``."""

    name = "min_load"
    source = "join the shortest queue, in requests; the baseline of ProServe §5.2"
    passed_over = "it has more requests"

    def choose(self, job: Job, fleet: Fleet) -> int:
        """The replica with the fewest requests."""
        return int(np.argmin(requests_at(fleet.figures[job.rows])))
