"""How long the steps of an engine take, and what a step leaves to the next one in a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np

from sluice.scheduling.batching import BatchPlan
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import BEST_EFFORT, EMITTED, PENDING, TPOT, deadlines_s
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView

_BUSY = 0.9
"""From this share of a thread's time on the processor, it did not wait."""


class StepTimes:
    """Times of steps that overlap: the next one is scheduled before the last one has ended.

    In a pipeline each stage works on a different batch, so batches end about a stage's time apart.
    A step's time is that of its batch in all stages, as a request has its next token no sooner.

    With asynchronous scheduling and vLLM's executor in one process, the engine's loop launches the
    next batch, or computes it on CPUs, before it looks for the end of the one before. A launch can
    take longer than a short batch: that of a prefill of an 8B model on an H100 10 to 25 ms, and a
    batch of decodes 7. Then the end is seen late, and from end to end is the time of another batch.
    Where the loop did not wait for the end, that lies between the start of the next launch and the
    moment at which it is seen, and the prediction decides where. What it misses there is in the
    time of the next step, so that together they last as long as they do.

    Args:
        stages: of the pipeline. They count as equal, as vLLM divides the layers evenly.
        launches: the engine's loop launches batches itself, see above.
    """

    def __init__(self, stages: int = 1, launches: bool = False) -> None:
        self.stages = stages
        self._launches = launches
        self._launched = (0.0, 0.0)
        self._last_end_s = 0.0
        self._past_entry_s = 0.0

    def began(self, started_s: float, cpu_s: float) -> None:
        """A batch is scheduled, and will be launched now. ``cpu_s`` is the processor time of the
        loop's thread."""
        self._launched = started_s, cpu_s

    def ended(
        self,
        started_s: float,
        now_s: float,
        computed: bool = True,
        cpu_s: float = 0.0,
        predicted_s: float = 0.0,
    ) -> float:
        """A step ends now. Returns the seconds that its batch was computed, without its waits.

        A batch that never waits inside is computed from the moment when the batch before it has
        left the first stage; one that waits ends a stage's time after the batch before it. Each of
        the two times is too long in the other case.

        Args:
            started_s: when it was scheduled. Steps end in the order in which they are scheduled.
            computed: false of an empty batch.
            cpu_s: as in :meth:`began`.
            predicted_s: of the batch; 0 where no model is known yet.
        """
        if self._launches:
            return self._launched_s(started_s, now_s, cpu_s, predicted_s)
        entered_s = max(started_s, self._last_end_s - self._past_entry_s)
        seconds = min(now_s - entered_s, self.stages * (now_s - self._last_end_s))
        self._last_end_s = now_s
        if computed:
            self._past_entry_s = seconds * (1 - 1 / self.stages)
        return seconds

    def _launched_s(
        self, started_s: float, now_s: float, cpu_s: float, predicted_s: float
    ) -> float:
        next_s, spent_s = self._launched
        entered_s = max(started_s, self._last_end_s)
        seconds = now_s - entered_s
        seen_late = next_s > started_s and cpu_s - spent_s > _BUSY * (now_s - next_s)
        if seen_late:
            # Batches that are alike are launched as far apart as they last.
            believed_s = predicted_s or next_s - started_s
            seconds = min(max(believed_s, next_s - entered_s, 0.0), seconds)
        self._last_end_s = entered_s + seconds
        return seconds


class Occupancy:
    """When the batches in flight leave the engine, by their predictions and by the ends of others.

    Without the ends the errors of the predictions, and their head-room, would add up for as long as
    any batch is in flight.

    Args:
        stages: of the pipeline.

    Attributes:
        entry_free_s: when the newest one leaves the first stage: then the next one can begin.
        busy_until_s: when it leaves the last one.
    """

    def __init__(self, stages: int = 1) -> None:
        self._stages = stages
        self._newest_s = 0.0
        self.entry_free_s = 0.0
        self.busy_until_s = 0.0

    def began(self, start_s: float, predicted_s: float, behind: bool) -> None:
        """A batch begins at ``start_s``, ``behind`` others or not. It takes ``predicted_s`` in all
        stages."""
        stage_s = predicted_s / self._stages
        # At the earliest a stage's time after the batch before it.
        behind_s = self.busy_until_s + stage_s if behind else 0.0
        self._newest_s = predicted_s
        self.entry_free_s = start_s + stage_s
        self.busy_until_s = max(start_s + predicted_s, behind_s)

    def ended(self, now_s: float) -> None:
        """The oldest batch in flight has ended, so that each other one is in a stage or has left
        it."""
        self.entry_free_s = min(self.entry_free_s, now_s + self._newest_s / self._stages)
        self.busy_until_s = min(self.busy_until_s, now_s + self._newest_s)


def next_start_s(queue: QueueView, plan: BatchPlan, end_s: float) -> float:
    """When the batch after ``plan`` must begin for its guaranteed decodes to have their next token
    in time, too; infinite if none of them can, or none has a TPOT. ``O(batch)``.

    Args:
        queue: which was planned.
        end_s: when the batch ends: then these tokens leave, and no request of it runs before.
    """
    rows = queue.table[plan.rows]
    rows = rows[(rows[:, PENDING] <= plan.tokens) & (rows[:, BEST_EFFORT] == 0)]
    due_s = deadlines_s(rows, Anchor.FIRST_TOKEN.code)
    due_s = np.where(rows[:, EMITTED] == 0, np.minimum(due_s, end_s), due_s) + rows[:, TPOT]
    latest_s = due_s - plan.predicted_s
    return float(latest_s[latest_s >= end_s].min(initial=inf))


def spare_tokens(
    before: Iterable[tuple[float, float]], start_s: float, latency: LatencyModel, stages: int
) -> int:
    """Most tokens of a batch that begins at ``start_s`` behind others in a pipeline, if their
    decodes must keep their pace: the next batch of these waits until it has left the first stage.
    It may always be as long as the shortest of them. ``O(batches)``.

    Args:
        before: of each batch in flight :func:`next_start_s`, and the seconds that it takes.
    """
    longest_s = min(
        (max(stages * (next_s - start_s), seconds) for next_s, seconds in before), default=inf
    )
    return latency.tokens_within(longest_s - latency.fixed_s, 0)
