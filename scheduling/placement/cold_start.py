"""Requests for a model that has no replica: how long its first one takes to start.

Nothing can be promised, but the first token is predicted: the rest of the start, the prompts that
wait, and the prompt itself, by the last replica's latency model. A request whose objective is
shorter and that may not be best effort is refused at once; any other one waits. Both make it start.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

import numpy as np

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import FIXED_S, work_on
from sluice.scheduling.request.job import (
    NO_REPLICA,
    UNATTAINABLE,
    RouteDecision,
    RouteQuery,
    Tier,
    first_due_s,
)

MEASURED: Final = 8
"""Number of latest starts that are remembered; a start is predicted to take as long as the longest
of them: a request that was let wait and is then late has lost more than one that was refused."""

LATE_PART: Final = 0.1
"""A start that takes longer than predicted is predicted to end after this share of the prediction,
whenever it is asked for."""

MAX_WAITING: Final = 4_096
"""Maximum number of waiting requests whose prompts are counted."""


class ColdStart:
    """Predicts the start of the first replica, and decides while there is none. ``O(1)`` each.

    ``startup_s`` is assumed until a start was measured, seconds. Before ``settled_s``, of the
    caller's monotonic clock, nothing is decided: after a restart of the controller, replicas have
    yet to register."""

    def __init__(self, startup_s: float, settled_s: float = -inf) -> None:
        self.done = 0
        self._configured_s = startup_s
        self._settled_s = settled_s
        self._measured_s: deque[float] = deque(maxlen=MEASURED)
        self._begun_s: float | None = None
        # By request: the predicted time of the prompts that asked before it.
        self._ahead_s: dict[int, float] = {}
        self._work_s = 0.0

    @property
    def startup_s(self) -> float:
        """Predicted time of a whole start, seconds."""
        return max(self._measured_s, default=self._configured_s)

    def served(self, now_s: float) -> None:
        """A replica serves: a start that is under way has ended."""
        if self._begun_s is None:
            return
        self._measured_s.append(now_s - self._begun_s)
        self.done += 1
        self._begun_s = None
        self._ahead_s.clear()
        self._work_s = 0.0

    def decide(
        self, query: RouteQuery, fleet: Fleet, now_s: float, output_tokens: float, wanted: bool
    ) -> RouteDecision:
        """The decision on a request, which may ask repeatedly, when no replica takes requests.
        Without a latency model of a last replica in ``fleet``, prompts take no time."""
        if now_s < self._settled_s or not fleet.is_empty(now_s):
            return RouteDecision(None, NO_REPLICA)
        if self._begun_s is None:
            self._begun_s = now_s
        left_s = max(self._begun_s + self.startup_s - now_s, LATE_PART * self.startup_s)
        own_s = self._own_s(query, fleet)
        ttft_s = left_s + self._queued_s(query.key, own_s) + own_s
        waits = RouteDecision(None, NO_REPLICA, predicted_ttft_s=ttft_s, starts_in_s=left_s)
        due_in_s = first_due_s(query, now_s, output_tokens) - now_s
        if not wanted or Tier.BEST_EFFORT in query.tiers or ttft_s <= due_in_s:
            return waits
        retry_s = left_s if own_s <= due_in_s + query.waited_s else None
        return waits._replace(reason=UNATTAINABLE, retry_after_s=retry_s, room_s=retry_s)

    def _own_s(self, query: RouteQuery, fleet: Fleet) -> float:
        rows = fleet.last_row
        if not len(rows):
            return 0.0
        work_s = work_on(fleet.pieces, rows, float(query.prompt_tokens), np.zeros(1))
        return float(work_s[0] + fleet.figures[rows[0], FIXED_S])

    def _queued_s(self, key: int, own_s: float) -> float:
        """Predicted time of the prompts that asked before this one in the same start."""
        ahead_s = self._ahead_s.get(key)
        if ahead_s is None:
            ahead_s = self._work_s
            if len(self._ahead_s) < MAX_WAITING:
                self._ahead_s[key] = ahead_s
                self._work_s += own_s
        return ahead_s
