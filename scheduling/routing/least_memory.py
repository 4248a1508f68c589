"""Instance assignment by predicted memory."""

from __future__ import annotations

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import BLOCK_TOKENS, EXPECTED_BLOCKS, FREE_BLOCKS, TOTAL_BLOCKS
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.routing.base import Job, RoutingPolicy


class LeastMemory(RoutingPolicy):
    """Takes the replica with the most KV memory left after the expected need of its requests, that
    is, their whole prompts and outputs. ``O(replicas)``.

    The paper assigns a pool of requests at once: each goes to the instance with the largest
    remaining memory. Once that instance has too little for the next request, the remaining memory
    of all instances is reset, as later requests run after the ones assigned before. Our reading for
    requests that arrive one by one: the remaining memory may be negative, and is relative to a
    reference. While the request fits some replica, the reference is the real memory. When it fits
    none, a round begins: every replica counts as empty, minus its expected need added since then.
    The round ends when that memory is used up as well and the next round begins, or when a request
    fits the real memory again. A replica that joins during a round counts as empty. Memory is
    counted in tokens (Eq. 20), as blocks may differ in size. Ties go to the first in the list.
    """

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
