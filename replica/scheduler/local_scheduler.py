"""What every engine's scheduler does around a batch: plan it by policy, learn from its real time,
and publish the state. The vLLM adapter and the simulated engine differ only in what they call.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from sluice.replica.scheduler.speculation import DraftCounts, DraftTime
from sluice.replica.scheduler.state_table import NO_SLOT, ChangedRows, StateTable, TableFullError
from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy
from sluice.scheduling.batching.base import longest_wait_s
from sluice.scheduling.fleet.state import PLAN_BUCKETS_S, STEP_RATIO_BUCKETS
from sluice.scheduling.latency.model import LatencyModel, LinearLatency, StepCorrection, StepSample
from sluice.scheduling.placement.length import TaskLengths
from sluice.scheduling.request.kernels import (
    BEST_EFFORT,
    EMITTED,
    PENDING,
    TPOT,
    deadlines_s,
    is_prefill,
)
from sluice.scheduling.request.objective import SLO, Anchor
from sluice.scheduling.request.queue import QueueView
from sluice.scheduling.request.stages import Later, StagePosition, later_of
from sluice.scheduling.roles import Role

# How long the steps of an engine take, and what a step leaves to the next one in a pipeline.

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


# What the local scheduler knows of a live request: its objective, its stages and its output.


class RunningStages:
    """The stages of a live request.

    Attributes:
        slo: of the whole request. arrival_s: its arrival, monotonic seconds.
        ends: the tokens that end the reasoning.
    """

    __slots__ = ("_position", "_tokens", "arrival_s", "ends", "slo")

    def __init__(self, slo: SLO, arrival_s: float, ends: frozenset[int]) -> None:
        self.slo = slo
        self.arrival_s = arrival_s
        self.ends = ends
        self._position = StagePosition(slo.stages)
        self._tokens = 0

    def emit(self, tokens: int, reasoned: int) -> bool:
        """Count tokens, see :meth:`StagePosition.emit`; whether another stage begins after them or
        one of them. ``O(1)``."""
        self._tokens += tokens
        return len(self._position.emit(tokens, reasoned)) > 1

    @property
    def tokens(self) -> int:
        """Tokens of the current stage that have left."""
        return self._position.tokens

    @property
    def begun(self) -> int:
        """Tokens of the output before the current stage."""
        return self._tokens - self._position.tokens

    @property
    def later(self) -> Later:
        """What the stages to come will take."""
        return later_of(self.slo.stages, self._position.number)

    def slo_at(self, now_s: float) -> SLO:
        """The objective of the current stage, if it begins now."""
        return self.slo.at_stage(self._position.number, now_s - self.arrival_s)


def end_among(token_ids: Sequence[int], ends: frozenset[int]) -> int:
    """The number of these tokens up to the end of the reasoning; 0: it does not end in them."""
    return next((place for place, token in enumerate(token_ids, 1) if token in ends), 0)


@dataclass(slots=True)
class TrackedRequest:
    """The local scheduler's record of a live request, beyond what its engine knows.

    ``name`` is the request's id in the fleet; engines have their own ids, and one API call can be
    several engine requests. ``slot`` is its row of the state table, negative if it has none.
    ``expected_tokens`` is the predicted length of its output, nan if unknown, and ``most_tokens``
    its max. ``tenant`` is the hash of its tenant, ``weight`` the weight of the tenant's share;
    ``promised``: its SLO was guaranteed.

    To a policy each of its ``stages`` is a request of its own, whose prompt includes the output
    before it: ``begun`` tokens. ``slo`` and ``arrival_s`` are those of the current stage, which
    begins with the last token of the one before; ``expected_tokens`` is of the whole output.
    """

    name: str
    slo: SLO
    arrival_s: float
    slot: int
    most_tokens: int
    expected_tokens: float
    best_effort: bool = False
    tenant: int = 0
    weight: float = 1.0
    promised: bool = False
    stages: RunningStages | None = None
    begun: int = 0


# Counters of KV transfers to an engine.


@dataclass(slots=True)
class TransferCounts:
    """Counters of the state table's summary, by its names; they only grow.

    Attributes:
        transfers: prompts whose KV arrived.
        transfer_seconds: time that these took, from the request for the KV to its arrival.
        transfer_tokens: their tokens whose KV was transferred.
        transfer_bytes: bytes of KV that were transferred.
        transfer_failures: prompts whose KV transfer failed; they were recomputed here.
    """

    transfers: int = 0
    transfer_seconds: float = 0.0
    transfer_tokens: int = 0
    transfer_bytes: int = 0
    transfer_failures: int = 0

    def arrived(self, seconds: float, tokens: int, nbytes: int) -> None:
        """The KV of a prompt has arrived."""
        self.transfers += 1
        self.transfer_seconds += seconds
        self.transfer_tokens += tokens
        self.transfer_bytes += nbytes

    def failed(self) -> None:
        """The KV transfer of a prompt failed."""
        self.transfer_failures += 1

    def summary(self) -> dict[str, float]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


# Planned and executed batches with their times as JSON lines, for tests and diagnosis.

MOST_LINES: Final = 100_000
"""Max batches that a log holds."""


class BatchLog:
    """A new log at ``path``, of :data:`MOST_LINES` batches at most."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = path.open("w", encoding="utf-8", buffering=1)
        self._lines = 0

    def write(self, record: Mapping[str, object]) -> None:
        """Append one batch; nothing more is written after the bound, or an error.

        The scheduler calls it, so a full disk must not end the engine.
        """
        if self._file is None:
            return
        line = json.dumps(record, separators=(",", ":")) + "\n"
        try:
            self._file.write(line)
            self._lines += 1
            if self._lines >= MOST_LINES:
                self._close()
        except OSError as error:
            logger.warning("the batch log ends after %d batches: %s", self._lines, error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # Closing writes what is left, and fails where writing did.
            with contextlib.suppress(OSError):
                file.close()


DEFAULT_MODEL = LinearLatency(a=0.005, b=0.0002, c=0.000001)
"""Used for plans until a profile is known."""

_LEAST_STEP = 1 / 16
_MOST_UNLEARNED = 64
"""Max consecutive disturbed steps that are not learned from. After more of them, they count as
normal for this engine."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepInFlight:
    """A batch that the engine is running. ``parts_s`` are the fixed part and the work of its
    uncorrected prediction, ``preempted`` lists the requests that lost their KV, ``record`` is its
    line in the batch log, ``checked`` the drafted tokens among its own, and
    ``drafted`` the most that a model drafts in it for one request, ``None`` where no model does.
    ``next_start_s``, in a pipeline: see :func:`next_start_s`.
    """

    started_s: float
    plan: BatchPlan
    work: StepSample
    parts_s: tuple[float, float]
    preempted: Sequence[str] = ()
    record: dict[str, object] | None = None
    checked: Mapping[str, int] = field(default_factory=dict)
    drafted: int | None = None
    next_start_s: float = inf


class LocalScheduler:
    """Policy, latency model with its correction, and state table of one engine.

    For each batch: :meth:`plan`, then :meth:`begin_step` with what the engine will really run, then
    :meth:`end_step`. Batches end in the order in which they began. Not thread-safe.

    ``times`` measures steps that overlap. ``of_role`` makes the policy for a role; ``policy`` is
    that for the table's role now.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        table: StateTable,
        model: LatencyModel = DEFAULT_MODEL,
        log: BatchLog | None = None,
        times: StepTimes | None = None,
        of_role: Callable[[Role], BatchPolicy] | None = None,
    ) -> None:
        self.requests: dict[str, TrackedRequest] = {}
        self.transfers = TransferCounts()
        """Counters of KV transfers from other engines."""
        self._policy = policy
        self._of_role = of_role
        self._role = table.role
        self._table = table
        self._base_model = model
        self._model = model
        self._correction = StepCorrection()
        self._draft_time = DraftTime()
        self.drafts = DraftCounts()
        """Counters of drafted tokens."""
        self._lengths = TaskLengths()
        self._log = log
        self._steps = 0
        self._mismatches = 0
        self._preemptions = 0
        self._evictions = 0
        self._evicted_tokens = 0
        self._best_effort_wait_s = 0.0
        self._plan_seconds = 0.0
        self._ratio_sum = 0.0
        self.times = StepTimes() if times is None else times
        self._rowless = 0
        self._unlearned = 0

    @property
    def model(self) -> LatencyModel:
        """The latency model in use, with its online correction and its headroom."""
        return self._model

    @property
    def draft_s(self) -> float:
        """Learned time of a draft model to draft one token for every decode of a batch."""
        return self._draft_time.seconds

    def track(
        self,
        engine_id: str,
        name: str,
        key: int,
        slo: SLO,
        arrival_s: float,
        prompt_tokens: int,
        most_tokens: int,
        best_effort: bool = False,
        tenant: int = 0,
        weight: float = 1.0,
        promised: bool = False,
        reasoning_ends: frozenset[int] = frozenset(),
    ) -> None:
        """Begin to follow a new request, whose output has ``most_tokens`` at most, and whose
        reasoning ends with one of ``reasoning_ends``.

        If the table is full the request is planned like any other but has no row, so readers do not
        see it: an accepted request must not fail because the table is full.
        """
        try:
            slot = self._table.allocate(key, slo, arrival_s, prompt_tokens, best_effort)
        except TableFullError as error:
            slot = NO_SLOT
            if self._rowless == 0:
                logger.warning("%s; some requests are not in the state table", error)
            self._rowless += 1
        # ``min`` of nan and a number is its first argument.
        expected = min(self._lengths.predict(slo.service_class, prompt_tokens), most_tokens)
        if most_tokens == 1:
            expected = 1.0
        stages = RunningStages(slo, arrival_s, reasoning_ends) if slo.stages else None
        slo = slo.at_stage(0, 0.0)
        self.requests[engine_id] = TrackedRequest(
            name,
            slo,
            arrival_s,
            slot,
            most_tokens,
            expected,
            best_effort,
            tenant,
            weight,
            promised,
            stages,
        )

    def follow_stages(
        self, tracked: TrackedRequest, tokens: int, now_s: float, reasoned: int = 0
    ) -> bool:
        """``tokens`` of a request of stages left the engine at ``now_s``, after ``reasoned`` of
        which its reasoning ended; 0: it did not. Returns whether it is in another stage now: then
        the next plan follows that stage's objective. ``O(1)``."""
        stages = tracked.stages
        assert stages is not None
        if not stages.emit(tokens, reasoned):
            return False
        before, tracked.begun = tracked.begun, stages.begun
        tracked.slo, tracked.arrival_s = stages.slo_at(now_s), now_s
        if tracked.slot != NO_SLOT:
            grown = tracked.begun - before
            self._table.begin_stage(tracked.slot, tracked.slo, now_s, grown, stages.later)
        return True

    def prolong(self, tracked: TrackedRequest, emitted_tokens: int) -> None:
        """Expect more tokens of a request that continues beyond its expected length."""
        lengths = self._lengths.distribution(tracked.slo.service_class)
        if lengths is not None:
            # At least by a min step, so that a request far beyond all others does not call this at
            # every token.
            longer = max(lengths.given(emitted_tokens), (1 + _LEAST_STEP) * emitted_tokens)
            tracked.expected_tokens = min(longer, tracked.most_tokens)

    def forget(self, engine_id: str, output_tokens: int | None = None) -> None:
        """Stop following a request; unknown ids are ignored.

        ``output_tokens`` is the length of its output where it ended by itself: predictions for its
        service class learn from it.
        """
        tracked = self.requests.pop(engine_id, None)
        if tracked is None:
            return
        if not self.requests:
            # There may be no further plan that would publish it.
            self._best_effort_wait_s = 0.0
        if output_tokens is not None:
            self._lengths.observe(tracked.slo.service_class, output_tokens)
        if tracked.slot == NO_SLOT:
            self._rowless -= 1
        else:
            self._table.free(tracked.slot)

    def refresh_model(self) -> None:
        """Adopt a model that was written to the table, and what was learned from the last step."""
        changed = self._table.model_change()
        if changed is not None:
            self._base_model = changed
            self._correction = StepCorrection()
        learned = self._correction
        self._model = self._base_model.corrected(learned.work, learned.fixed, learned.spread)

    def _follow_role(self) -> None:
        """Adopt a role that was written to the table. A policy whose options it does not change is
        kept, with its state."""
        role = self._table.role
        if role == self._role or self._of_role is None:
            return
        self._role = role
        policy = self._of_role(role)
        if policy.options != self._policy.options:
            self._policy = policy

    def plan(self, queue: QueueView, now_s: float, budget: BatchBudget) -> BatchPlan:
        """Plan the next batch by the policy, with the corrected latency model."""
        started = time.perf_counter()
        self.refresh_model()
        self._follow_role()
        plan = self._policy.plan(queue, now_s, self._model, budget)
        self._best_effort_wait_s = longest_wait_s(queue.table, now_s)
        elapsed = time.perf_counter() - started
        self._plan_seconds += elapsed
        self._table.count("plan_histogram", bisect_left(PLAN_BUCKETS_S, elapsed))
        return plan

    def update(self, changed: ChangedRows) -> None:
        """Write rows that changed outside a step."""
        self._table.write(changed)

    def publish(self, **summary: Any) -> None:
        """Write further fields of the state table's summary."""
        self._table.write(**summary)

    def count_evictions(self, plan: BatchPlan) -> None:
        """The engine has preempted what ``plan`` evicts, of which best-effort requests count."""
        self._evictions += len(plan.yielded)
        self._evicted_tokens += plan.evicted_tokens

    def begin_step(
        self,
        plan: BatchPlan,
        ran: Sequence[tuple[str, int, int]],
        now_s: float,
        preempted: Sequence[str] = (),
        checked: Mapping[str, int] | None = None,
        drafted: int | None = None,
        *,
        fetched: Collection[str] = (),
    ) -> StepInFlight:
        """The engine starts a batch. ``ran`` holds (engine id, new tokens, computed before),
        ``checked`` how many of the new tokens are drafted ones, for each request for which there
        were some; ``drafted`` is as in :class:`StepInFlight`. ``fetched`` are planned requests that
        run later, as the engine now fetches their KV.

        A batch that was planned empty and is empty is no step: it is neither counted nor logged.
        """
        self._preemptions += len(preempted)
        ids, tokens, computed = zip(*ran, strict=True) if ran else ((), (), ())
        work = StepSample.of_arrays(np.array(tokens), np.array(computed), drafted or 0)
        # Without headroom: the learned and published value is the accuracy of the model.
        parts_s = self._model.parts_s(work)
        planned: Mapping[str, int] = plan.tokens_of
        if fetched:
            planned = {each: count for each, count in planned.items() if each not in fetched}
        if not ran and not planned:
            return StepInFlight(now_s, plan, work, parts_s, preempted)
        self._steps += 1
        if planned != dict(zip(ids, tokens, strict=True)):
            self._mismatches += 1
        # Made now, as requests that end with the batch are forgotten before it is over.
        checked = {} if checked is None else checked
        record = None
        if self._log is not None:
            record = self._record(plan, ran, now_s, preempted, checked)
        return StepInFlight(now_s, plan, work, parts_s, preempted, record, checked, drafted)

    def end_step(
        self,
        step: StepInFlight,
        now_s: float,
        changed: ChangedRows,
        waiting: int,
        running: int,
        free_blocks: int,
        total_blocks: int,
        seconds: float | None = None,
        *,
        disturbed: bool = False,
        cpu_s: float = 0.0,
        next_begins_s: float = 0.0,
    ) -> None:
        """The engine finished ``step``: learn its time and publish the state.

        The time of a step that was ``disturbed`` by other work of the engine is not learned from.

        Its time is that of :class:`StepTimes`, unless the engine says how many ``seconds`` it took.
        ``cpu_s`` is the processor time of this thread. The batch after those in flight can begin
        at ``next_begins_s``, at the earliest now.
        """
        computed = step.work.new_tokens > 0
        drafting_s = self._draft_time.seconds * (step.drafted or 0)
        predicted_s = self._correction.predicted_s(*step.parts_s) + drafting_s
        # A profile must not learn what the default model believes.
        believed_s = 0.0 if self._base_model is DEFAULT_MODEL else predicted_s
        passed_s = self.times.ended(step.started_s, now_s, computed, cpu_s, believed_s)
        seconds = passed_s if seconds is None else seconds
        if self._log is not None and step.record is not None:
            self._log.write({**step.record, "seconds": seconds})
        if computed and seconds > 0:
            self._learn(step, seconds, predicted_s, drafting_s, disturbed)
        # An empty batch is not evidence of step times.
        times = {
            "step_started_s": step.started_s,
            "last_step_s": seconds,
            "predicted_step_s": predicted_s,
        }
        self._table.write(
            changed,
            updated_s=now_s,
            next_begins_s=max(now_s, next_begins_s),
            **(times if computed else {}),
            correction=self._correction.work,
            fixed_correction=self._correction.fixed,
            step_spread=self._correction.spread,
            steps=self._steps,
            waiting=waiting,
            running=running,
            free_kv_blocks=free_blocks,
            total_kv_blocks=total_blocks,
            preemptions=self._preemptions,
            evictions=self._evictions,
            evicted_tokens=self._evicted_tokens,
            best_effort_wait_s=self._best_effort_wait_s,
            patience_s=self._policy.best_effort.patience_s,
            plan_mismatches=self._mismatches,
            plan_seconds_sum=self._plan_seconds,
            step_ratio_sum=self._ratio_sum,
            draft_s=self._draft_time.seconds,
            **self.drafts.summary(),
            **self.transfers.summary(),
        )

    def _learn(
        self,
        step: StepInFlight,
        seconds: float,
        predicted_s: float,
        drafting_s: float,
        disturbed: bool,
    ) -> None:
        """Learn from the ``seconds`` that a step took. They were predicted as ``predicted_s``, of
        which ``drafting_s`` for its drafts."""
        ratio = seconds / predicted_s
        self._ratio_sum += ratio
        self._table.count("step_ratio_histogram", bisect_left(STEP_RATIO_BUCKETS, ratio))
        self._unlearned = self._unlearned + 1 if disturbed else 0
        if disturbed and self._unlearned <= _MOST_UNLEARNED:
            return
        self._table.add_sample(step.work._replace(seconds=seconds))
        self._correction.observe(*step.parts_s, seconds - drafting_s)
        if step.drafted is not None:
            self._draft_time.observe(predicted_s - drafting_s, step.drafted, seconds)

    def _record(
        self,
        plan: BatchPlan,
        ran: Sequence[tuple[str, int, int]],
        now_s: float,
        preempted: Sequence[str],
        checked: Mapping[str, int],
    ) -> dict[str, object]:
        def name(engine_id: str) -> str:
            tracked = self.requests.get(engine_id)
            return tracked.name if tracked is not None else engine_id

        return {
            "step": self._steps,
            "now_s": now_s,
            "predicted_s": plan.predicted_s,
            "plan": [[name(each), tokens] for each, tokens in plan.tokens_of.items()],
            "ran": [[name(engine_id), tokens, computed] for engine_id, tokens, computed in ran],
            "preempted": [name(engine_id) for engine_id in preempted],
            "checked": {name(engine_id): drafts for engine_id, drafts in checked.items()},
            "live": len(self.requests),
        }


class GarbageCollector:
    """Replaces Python's garbage collection in an engine's process, until :meth:`stop`.

    Python's collector stops the process at an arbitrary moment; FairBatching §4 saw pauses of
    hundreds of milliseconds. As there, objects from start-up are never examined again, and a
    collection waits until no prefill is queued, the decodes have slack, and the last one is long
    past. The paper gives no bound; here garbage cannot pile up for more than a minute.

    Args:
        clock: monotonic seconds, the clock of the queue's times.
    """

    MIN_INTERVAL_S = 5.0
    MAX_INTERVAL_S = 60.0
    SLACK_FACTOR = 4.0
    """Slack that is enough, in durations of the last collection."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._pause_s = 0.02

    def before_batch(self, queue: QueueView, step_s: float) -> None:
        """Collect if it is time, before a batch of ``queue`` that takes ``step_s``. The first call
        ends the process's start-up. ``O(requests)``, within the minimum interval ``O(1)``."""
        now_s = self._clock()
        if self._last_s is None:
            gc.disable()
            gc.collect()
            gc.freeze()
        else:
            since_s = now_s - self._last_s
            if since_s < self.MIN_INTERVAL_S:
                return
            if since_s < self.MAX_INTERVAL_S and not self._has_slack(now_s + step_s, queue):
                return
            gc.collect()
            self._pause_s = self._clock() - now_s
            logger.debug("collected garbage in %.1f ms", 1e3 * self._pause_s)
        self._last_s = self._clock()

    def _has_slack(self, end_s: float, queue: QueueView) -> bool:
        if is_prefill(queue.table).any():
            return False
        due_s = deadlines_s(queue.table, Anchor.FIRST_TOKEN.code).min(initial=inf)
        return bool(due_s - end_s >= self.SLACK_FACTOR * self._pause_s)

    def stop(self) -> None:
        """Turn Python's automatic collection on again. Idempotent."""
        if self._last_s is not None:
            self._last_s = None
            gc.unfreeze()
            gc.enable()
