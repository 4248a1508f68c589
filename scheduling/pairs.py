"""P/D pairs: one replica computes the prompt of a request, the other decodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission.base import Promises
from sluice.scheduling.request.job import Job

TRANSFER_STEPS = 2.0
"""Steps of the decode replica between the arrival of the KV and the first token, at most: the one
under way, and the first of its own."""


class DecodeChoice(NamedTuple):
    """The decode replica for a request whose prompt another replica computes.

    Attributes:
        job: the decode phase of the request on each decode replica.
        promises: what each of them can guarantee; ``None`` without admission.
        chosen: index in ``job.rows`` of the decode replica: one that can guarantee its part, if any
            can.
        kv_transfer_s: predicted time from the end of the prefill to the first token there.
    """

    job: Job
    promises: Promises | None
    chosen: int
    kv_transfer_s: float

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
        """Whether it can guarantee its part; always true without admission."""
        return self.promises is None or bool(self.promises.holds[self.chosen])

    @property
    def wait_s(self) -> float:
        """Predicted time until some decode replica can guarantee that part, if none can now."""
        return 0.0 if self.promises is None else float(self.promises.wait_s.min())

    @property
    def binds(self) -> np.int8:
        """The constraint that binds if no decode replica can guarantee that part: at the replica
        with the shortest wait."""
        if self.promises is None:
            return np.int8(0)
        return self.promises.binds[self.promises.wait_s.argmin()]  # type: ignore[no-any-return]


def together(job: Job, promises: Promises, second: DecodeChoice) -> Promises:
    """The guarantees to the client. ``promises`` are those of the replicas where the request
    starts; a P/D pair guarantees what both replicas can, with times up to the first token."""
    holds, wait_s, binds = promises.holds, promises.wait_s, promises.binds
    if not second.able:
        binds = np.where(holds & job.splits, second.binds, binds)
        holds = holds & ~job.splits
        wait_s = np.where(job.splits, np.maximum(wait_s, second.wait_s), wait_s)
    return Promises(holds, promises.ttft_s + job.lead_s, wait_s, binds)
