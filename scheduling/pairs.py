"""Two replicas for one request: one computes its prompt, the other one decodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduling.admission.base import Promises
from scheduling.job import Job

HANDOVER_STEPS = 2.0
"""Steps of the decode replica between the arrival of the KV and the first token, at most: the one
under way, and the first of its own."""


class DecodeChoice(NamedTuple):
    """The replica that would continue a request whose prompt another one computes.

    Attributes:
        job: the request, and what it would be on each replica that may continue.
        promises: what each of them could promise; ``None`` where nothing was asked.
        chosen: place in ``job.rows`` of the one that would: of those that can promise, if any.
        handover_s: predicted time from the end of the prefill to the first token there.
    """

    job: Job
    promises: Promises | None
    chosen: int
    handover_s: float

    @property
    def row(self) -> int:
        """Row of the chosen one."""
        return int(self.job.rows[self.chosen])

    @property
    def work_s(self) -> float:
        """Predicted time of its first step's work."""
        return float(self.job.work_s[self.chosen])

    @property
    def able(self) -> bool:
        """Whether it can promise its part, as far as that was asked."""
        return self.promises is None or bool(self.promises.holds[self.chosen])

    @property
    def wait_s(self) -> float:
        """Predicted time until some replica could promise that part, where none can."""
        return 0.0 if self.promises is None else float(self.promises.wait_s.min())

    @property
    def binds(self) -> np.int8:
        """Which constraint forbids that part where none can promise it: at the replica that could
        soonest."""
        if self.promises is None:
            return np.int8(0)
        return self.promises.binds[self.promises.wait_s.argmin()]  # type: ignore[no-any-return]


def together(job: Job, promises: Promises, second: DecodeChoice) -> Promises:
    """What is promised to the client, where ``promises`` are those of the replicas that begin: of a
    pair what both can, and times up to the first token."""
    holds, wait_s, binds = promises.holds, promises.wait_s, promises.binds
    if not second.able:
        binds = np.where(holds & job.splits, second.binds, binds)
        holds = holds & ~job.splits
        wait_s = np.where(job.splits, np.maximum(wait_s, second.wait_s), wait_s)
    return Promises(holds, promises.ttft_s + job.lead_s, wait_s, binds)
