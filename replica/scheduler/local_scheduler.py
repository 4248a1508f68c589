"""What every engine's scheduler does around a batch: plan it by policy, learn from its real time,
and publish the state. The vLLM adapter and the simulated engine differ only in what they call.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from sluice.replica.scheduler.batch_log import BatchLog
from sluice.replica.scheduler.speculation import DraftCounts, DraftTime
from sluice.replica.scheduler.state_table import NO_SLOT, ChangedRows, StateTable, TableFullError
from sluice.replica.scheduler.step_times import StepTimes
from sluice.replica.scheduler.tracked_request import RunningStages, TrackedRequest
from sluice.replica.transfer.counts import TransferCounts
from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy
from sluice.scheduling.batching.best_effort import longest_wait_s
from sluice.scheduling.fleet.state import PLAN_BUCKETS_S, STEP_RATIO_BUCKETS
from sluice.scheduling.latency.model import LatencyModel, LinearLatency, StepSample
from sluice.scheduling.latency.step_correction import StepCorrection
from sluice.scheduling.placement.length import TaskLengths
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView
from sluice.scheduling.roles import Role

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
    ``next_start_s``, in a pipeline: see :func:`~sluice.replica.scheduler.step_times.next_start_s`.
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
