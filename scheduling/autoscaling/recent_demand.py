"""How much prefill work is expected soon, judged by recent requests."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import inf

import numpy as np

from sluice.scheduling.request.kernels import Floats, compiled

MEMORY = 256
"""Requests that are remembered: the rate of their work is then known to a tenth or so."""

LEAST_SPAN_S = 1.0
"""Minimum time over which a rate is taken, seconds."""

EXCESS = 2.0
"""Expected work counts this many times, as requests come in bursts and decode afterwards. Measured
beside 1 and 3, see docs/results/promises.md."""


class RecentDemand:
    """The last :data:`MEMORY` requests that asked for a guarantee, of all replicas."""

    def __init__(self) -> None:
        self._asked = np.empty((MEMORY, 4))
        self._count = 0

    def add(self, now_s: float, work_s: float, slack_s: float, priority: float) -> None:
        """A request asked at ``now_s`` for a prefill of ``work_s`` within ``slack_s``. ``O(1)``."""
        self._asked[self._count % MEMORY] = now_s, work_s, slack_s, priority
        self._count += 1

    def worthier_s(self, now_s: float, work_s: float, slack_s: float, priority: float) -> float:
        """Prefill work, seconds over all replicas, for which a request like those of :meth:`add`
        should leave capacity: of the requests that are expected to come later, be due before it,
        and have more priority per second of work.

        A request ``j`` of the past that is due within ``s_j`` stands for ``(slack - s_j) / span``
        such requests, where ``span`` is the time since the oldest one. It counts with the share of
        its worth that the capacity would lose if this request had it, so that equals do not make
        way for each other. ``O(MEMORY)``, compiled.
        """
        if not self._count or slack_s == inf:
            return 0.0
        oldest_s = self._asked[self._count % MEMORY if self._count > MEMORY else 0, 0]
        span_s = max(now_s - float(oldest_s), LEAST_SPAN_S)
        asked = self._asked[: min(self._count, MEMORY)]
        return EXCESS * float(_worthier_s(asked, priority / max(work_s, 1e-9), slack_s)) / span_s


@compiled
def _worthier_s(asked: Floats, worth: float, slack_s: float) -> float:
    total = 0.0
    for row in range(asked.shape[0]):
        work_s, before_s = asked[row, 1], slack_s - max(0.0, asked[row, 2])
        other = asked[row, 3] / max(work_s, 1e-9)
        if before_s > 0.0 and other > worth:
            total += work_s * before_s * (1.0 - worth / other)
    return total
