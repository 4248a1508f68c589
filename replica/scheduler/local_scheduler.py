"""What every engine's scheduler does around a batch: plan it by policy, learn from its real time,
and publish the state. vLLM's adapter and the simulated engine differ only in what they call."""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isnan, nan
from typing import Any, Final

import numpy as np

from sluice.replica.scheduler.plan_log import PlanRecords
from sluice.replica.scheduler.speculation import DraftCounts, DraftTime
from sluice.replica.scheduler.state_table import NO_SLOT, ChangedRows, StateTable, TableFullError
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy
from sluice.scheduling.batching.base import longest_wait_s
from sluice.scheduling.fleet.state import PLAN_BUCKETS_S, STEP_RATIO_BUCKETS
from sluice.scheduling.latency.model import LatencyModel, LinearLatency, StepCorrection, StepSample
from sluice.scheduling.placement.output_lengths import TaskLengths
from sluice.scheduling.request.kernels import (
    BEST_EFFORT,
    EMITTED,
    LEAST,
    PENDING,
    PROMISED,
    RUNNING,
    TPOT,
    Floats,
    Ints,
    deadlines_s,
    is_prefill,
)
from sluice.scheduling.request.lateness import Cause, StepTimeline
from sluice.scheduling.request.objective import SLO, Anchor, TPOTAnchor
from sluice.scheduling.request.queue import QueueView, row_of
from sluice.scheduling.request.stages import StagePosition, later_of
from sluice.scheduling.roles import Role
from sluice.scheduling.tenancy.usage import NO_SHARES, EngineUsage
from sluice.telemetry.records import RecordLog

DEFAULT_MODEL = LinearLatency(a=0.005, b=0.0002, c=0.000001)
"""Used for plans until a profile is known."""

_BUSY: Final = 0.9  # From this share of its time busy, a thread did not wait for a batch

_MIN_GROWTH: Final = 1 / 16
"""By which an outgrown expected length grows at least, so that not every token makes it grow."""

_MAX_UNLEARNED: Final = 64
"""Consecutive disturbed steps that are not learned from; more of them are normal here."""

logger = logging.getLogger(__name__)


class StepTimes:
    """Times of steps that overlap: the next one is scheduled before the last one has ended.

    In a pipeline batches end about a stage's time apart, but a step's time is that of all stages,
    as a request has its next token no sooner. The stages count as equal.

    With ``launches`` the engine's loop launches a batch before it looks for the end of the one
    before. A launch (8B model, H100: 10 to 25 ms for a prefill) can outlast a short batch, whose
    end is then seen late: between the next launch's start and that moment the prediction decides.
    What it misses is in the next step's time, so the sum is right. A launch lasts for as long as
    its call, as its thread may have to wait for a processor or for Python's lock; after it, what
    is no processor time is the wait for the batch."""

    def __init__(self, stages: int = 1, launches: bool = False) -> None:
        self.stages = stages
        self._launches = launches
        self._launched = (0.0, 0.0, 0.0)
        self._late = False
        self.guessed = False
        """Whether the last step's time is a guess: without a prediction, and its end or that of the
        one before was seen late."""
        self._last_end_s = 0.0
        self._past_entry_s = 0.0

    def began(self, started_s: float, cpu_s: float) -> None:
        """A batch will be launched now. ``cpu_s`` is the processor time of the loop's thread."""
        self._launched = started_s, 0.0, cpu_s

    def launched(self, now_s: float, cpu_s: float) -> None:
        """The engine's loop has launched that batch."""
        started_s, _, _ = self._launched
        self._launched = started_s, now_s - started_s, cpu_s

    def ended(
        self,
        started_s: float,
        now_s: float,
        computed: bool = True,
        cpu_s: float = 0.0,
        predicted_s: float = 0.0,
    ) -> float:
        """The oldest step ends now. Returns the seconds that its batch was computed, without waits.

        A batch that never waits begins when the one before has left the first stage; one that waits
        ends a stage's time after it. Each of the two times is too long in the other case.
        ``predicted_s``: 0 if no model is known."""
        if self._launches:
            if not computed:  # the device has nothing to do, whatever the loop did meanwhile
                return 0.0
            next_s, launch_s, spent_s = self._launched
            entered_s = max(started_s, self._last_end_s)
            seconds = now_s - entered_s
            busy_s = launch_s + cpu_s - spent_s
            before = self._late
            self._late = next_s > started_s and busy_s > _BUSY * (now_s - next_s)
            self.guessed = not predicted_s and (before or self._late)
            if self._late:
                # Batches that are alike are launched as far apart as they last.
                believed_s = predicted_s or next_s - started_s
                seconds = min(max(believed_s, next_s - entered_s, 0.0), seconds)
            self._last_end_s = entered_s + seconds
            return seconds
        entered_s = max(started_s, self._last_end_s - self._past_entry_s)
        seconds = min(now_s - entered_s, self.stages * (now_s - self._last_end_s))
        self._last_end_s = now_s
        if computed:
            self._past_entry_s = seconds * (1 - 1 / self.stages)
        return seconds


class Occupancy:
    """When the batches in flight leave the first stage and the last, by predictions and by real
    ends: without these, errors of predictions would add up."""

    def __init__(self, stages: int = 1) -> None:
        self._stages = stages
        self._newest_s = 0.0
        self.entry_free_s = 0.0
        self.busy_until_s = 0.0

    def began(self, start_s: float, predicted_s: float, behind: bool) -> None:
        """A batch of ``predicted_s`` in all stages begins, ``behind`` others or not."""
        stage_s = predicted_s / self._stages
        # At the earliest a stage's time after the batch before it.
        behind_s = self.busy_until_s + stage_s if behind else 0.0
        self._newest_s = predicted_s
        self.entry_free_s = start_s + stage_s
        self.busy_until_s = max(start_s + predicted_s, behind_s)

    def ended(self, now_s: float) -> None:
        """The oldest batch has ended, so that each other one is in a stage or has left it."""
        self.entry_free_s = min(self.entry_free_s, now_s + self._newest_s / self._stages)
        self.busy_until_s = min(self.busy_until_s, now_s + self._newest_s)


def next_start_s(queue: QueueView, plan: BatchPlan, end_s: float) -> float:
    """When the batch after ``plan``, which ends at ``end_s``, must begin for its promised decodes
    to have their next token in time; infinite if none can, or none has a TPOT. ``O(batch)``."""
    rows = queue.table[plan.rows]
    rows = rows[(rows[:, PENDING] <= plan.tokens) & (rows[:, BEST_EFFORT] == 0)]
    due_s = deadlines_s(rows, Anchor.FIRST_TOKEN.code)
    due_s = np.where(rows[:, EMITTED] == 0, np.minimum(due_s, end_s), due_s) + rows[:, TPOT]
    latest_s = due_s - plan.predicted_s
    return float(latest_s[latest_s >= end_s].min(initial=inf))


def spare_tokens(
    before: Iterable[tuple[float, float]], start_s: float, latency: LatencyModel, stages: int
) -> int:
    """Most tokens of a batch that begins at ``start_s`` in a pipeline without delaying others'
    TPOT, or for the shortest time in flight. ``before``: of each batch, ``next_start_s`` and its
    seconds."""
    longest_s = min(
        (max(stages * (next_s - start_s), seconds) for next_s, seconds in before), default=inf
    )
    return latency.tokens_within(longest_s - latency.fixed_s, 0)


@dataclass(slots=True)
class RunningStages:
    """A live request's stages: whole SLO, arrival (monotonic), ends of reasoning, progress."""

    slo: SLO
    arrival_s: float
    ends: frozenset[int]
    position: StagePosition
    emitted: int = 0
    first_s: float = nan


@dataclass(slots=True)
class TrackedRequest:
    """A live request, beyond what its engine knows of it; one API call can be several. To a policy
    each stage is a request, whose prompt includes the ``begun`` tokens of output before it; ``slo``
    and ``arrival_s`` are its. ``expected_tokens`` is for the whole output, nan if unknown;
    ``least_tokens``: see :class:`~sluice.scheduling.request.queue.RequestView`.
    ``cached_tokens``: of the prompt, when it first ran; ``apart``: from when to when it could not
    run, and why."""

    name: str
    args: RequestArgs
    slo: SLO
    arrival_s: float
    slot: int
    max_tokens: int
    expected_tokens: float
    stages: RunningStages | None = None
    begun: int = 0
    cached_tokens: int = 0
    apart: tuple[tuple[float, float, Cause], ...] = ()
    least_tokens: float = 0.0

    def row(self, prompt_tokens: int) -> list[float]:
        """Its row in the queue, as it has just arrived."""
        args = self.args
        row = row_of(
            self.slo,
            self.arrival_s,
            prompt_tokens,
            self.expected_tokens,
            args.best_effort,
            args.tenant,
            args.weight,
            args.turn.program if args.turn else 0,
        )
        row[PROMISED], row[LEAST] = args.promised, self.least_tokens
        return row


def end_among(token_ids: Sequence[int], ends: frozenset[int]) -> int:
    """The number of these tokens up to the end of the reasoning; 0: it does not end in them."""
    return next((place for place, token in enumerate(token_ids, 1) if token in ends), 0)


def task_of(args: RequestArgs) -> str:
    """Which outputs are as long as its: those of its class, and where its client expects a length,
    those of its tenant expected to be as long, within a factor of two."""
    expected = 0 if args.turn is None else args.turn.expected_tokens
    name = args.slo.service_class
    return f"{name} {args.tenant} {expected.bit_length()}" if expected else name


@dataclass(slots=True)
class StepInFlight:
    """A batch that the engine is running. ``parts_s``: fixed part and work of its uncorrected
    prediction. ``checked``: drafted tokens among its own, by request; ``drafted``: most of one
    request. ``shares``: see ``tenancy.usage``."""

    started_s: float
    plan: BatchPlan
    work: StepSample
    parts_s: tuple[float, float]
    preempted: Sequence[str] = ()
    record: dict[str, object] | None = None
    checked: Mapping[str, int] = field(default_factory=dict)
    drafted: int | None = None
    next_start_s: float = inf
    shares: Floats = field(default_factory=lambda: NO_SHARES)
    free_blocks: int = 0


class LocalScheduler:
    """Policy, corrected latency model and state table of one engine. Not thread-safe. For each
    batch: ``plan``, ``begin_step`` with what the engine will really run, ``end_step``, in this
    order."""

    def __init__(
        self,
        policy: BatchPolicy,
        table: StateTable,
        model: LatencyModel = DEFAULT_MODEL,
        log: RecordLog | None = None,
        times: StepTimes | None = None,
        of_role: Callable[[Role], BatchPolicy] | None = None,
    ) -> None:
        self.requests: dict[str, TrackedRequest] = {}
        self.counts: dict[str, float] = dict.fromkeys(
            (
                *("steps", "plan_mismatches", "preemptions", "evictions", "evicted_tokens"),
                *("plan_seconds_sum", "step_ratio_sum", "transfers", "transfer_seconds"),
                *("transfer_tokens", "transfer_bytes", "transfer_failures", "busy_s"),
            ),
            0,
        )
        self.model = model
        self.usage = EngineUsage(table.accounts, table.capacity)
        self.drafts = DraftCounts()
        self.times = StepTimes() if times is None else times
        self._policy = policy
        self._of_role = of_role
        self._role = table.role
        self._table = table
        self._base_model = model
        self._correction = StepCorrection()
        self._draft_time = DraftTime()
        self._lengths = TaskLengths()
        self._log = log
        self._planned = PlanRecords()
        self._best_effort_wait_s = 0.0
        self._rowless = 0
        self._unlearned = 0
        self._budget = BatchBudget(1, 1, 0, 1)
        self._timeline = StepTimeline()
        # Preempted requests by slot, since when; and promised ones that end with this step.
        self._preempted: dict[int, tuple[TrackedRequest, float]] = {}
        self._ended: list[tuple[TrackedRequest, np.void]] = []

    @property
    def draft_s(self) -> float:
        """Learned time of a draft model to draft one token for every decode of a batch."""
        return self._draft_time.seconds

    def track(
        self,
        engine_id: str,
        args: RequestArgs,
        key: int,
        prompt_tokens: int,
        max_tokens: int,
        name: str | None = None,
        now_s: float | None = None,
    ) -> TrackedRequest:
        """Begin to follow a new request. If the table is full it is planned but has no row: an
        accepted request must not fail because of that. ``now_s``: if other work of the replica may
        have come before."""
        slo, arrival_s = args.slo, args.arrival_s
        try:
            slot = self._table.allocate(key, slo, arrival_s, prompt_tokens, args.best_effort)
        except TableFullError as error:
            slot = NO_SLOT
            if self._rowless == 0:
                logger.warning("%s; some requests are not in the state table", error)
            self._rowless += 1
        # ``min`` and ``max`` of nan and a number are their first argument.
        expected = min(max(self._expected_tokens(args) - args.resumed, 1.0), max_tokens)
        if max_tokens == 1:
            expected = 1.0
        self.usage.begin(slot, args.client, slo.service_class)
        stages = None
        if slo.stages:
            position = StagePosition(slo.stages)
            stages = RunningStages(slo, arrival_s, args.reasoning_ends, position)
            slo = slo.at_stage(0, 0.0)
        tracked = TrackedRequest(
            name or args.request_id, args, slo, arrival_s, slot, max_tokens, expected, stages
        )
        if stages is None and slo.tpot_anchor is TPOTAnchor.MEAN:
            least = self._lengths.least(task_of(args)) - args.resumed
            tracked.least_tokens = max(0.0, min(least, max_tokens))
        if now_s is not None and args.promised:
            # The replica's work, unless it was done while a step ran.
            since_s = max(arrival_s + args.waited_s, self._timeline.last_end_s)
            tracked.apart = ((since_s, now_s, Cause.EDGE),)
        self.requests[engine_id] = tracked
        return tracked

    def _expected_tokens(self, args: RequestArgs) -> float:
        """The length of its output, as learned from those like it; else as its client expects."""
        learned = self._lengths.predict(task_of(args))
        if isnan(learned) and args.turn is not None and args.turn.expected_tokens:
            return float(args.turn.expected_tokens)
        return learned

    def follow_stages(
        self, tracked: TrackedRequest, tokens: int, now_s: float, reasoned: int = 0
    ) -> bool:
        """``tokens`` left the engine, after ``reasoned`` of which the reasoning ended (0: not).
        Whether it is in another stage now, whose objective the next plan follows. ``O(1)``."""
        stages = tracked.stages
        assert stages is not None
        if not stages.emitted:
            stages.first_s = now_s
        stages.emitted += tokens
        if len(stages.position.emit(tokens, reasoned)) < 2:
            return False
        number, before = stages.position.number, tracked.begun
        tracked.begun = stages.emitted - stages.position.tokens
        tracked.slo = stages.slo.at_stage(number, now_s - stages.arrival_s)
        tracked.arrival_s = now_s
        if tracked.slot != NO_SLOT:
            later = later_of(stages.slo.stages, number)
            self._table.begin_stage(tracked.slot, tracked.slo, now_s, tracked.begun - before, later)
        return True

    def prolong(self, tracked: TrackedRequest, emitted_tokens: int) -> None:
        """Expect more tokens of a request that continues beyond its expected length."""
        lengths = self._lengths.distribution(task_of(tracked.args))
        if lengths is not None:
            resumed = tracked.args.resumed
            longer = lengths.given(resumed + emitted_tokens) - resumed
            longer = max(longer, (1 + _MIN_GROWTH) * emitted_tokens)
            tracked.expected_tokens = min(longer, tracked.max_tokens)

    def forget(self, engine_id: str, output_tokens: int | None = None) -> None:
        """Stop following a request, if known; predictions learn from a finished output's length."""
        tracked = self.requests.pop(engine_id, None)
        if tracked is None:
            return
        if not self.requests:
            # There may be no further plan that would publish it.
            self._best_effort_wait_s = 0.0
        if output_tokens is not None:
            for task in {tracked.slo.service_class, task_of(tracked.args)}:
                self._lengths.observe(task, tracked.args.resumed + output_tokens)
        self.usage.release(tracked.slot)
        if tracked.slot == NO_SLOT:
            self._rowless -= 1
            return
        _, since_s = self._preempted.pop(tracked.slot, (None, inf))
        if tracked.args.promised and tracked.name == tracked.args.request_id:
            tracked.apart += ((since_s, inf, Cause.KV_MEMORY),)
            self._ended.append((tracked, self._table.row(tracked.slot)))
        self._table.free(tracked.slot)

    def _explain_late(self, end_s: float) -> None:
        """Publish what the time of promised requests went to that have ended late, or for which
        only the router can tell."""
        pieces, block_tokens = self.model.pieces, self._budget.block_tokens
        for tracked, row in self._ended:
            args, stages = tracked.args, tracked.stages
            ttft_s, tpot_s, e2e_s, _ = args.slo.columns
            first_s = float(row["first_token_s"]) if stages is None else stages.first_s
            first_s = end_s if isnan(first_s) else first_s
            token_s = (end_s - first_s) / max(1, int(row["emitted_tokens"]))
            late = first_s > args.arrival_s + ttft_s or end_s > args.arrival_s + e2e_s
            by_mean = stages is None and args.slo.tpot_anchor is TPOTAnchor.MEAN
            if not late and by_mean and token_s <= tpot_s:
                continue
            prompt, cached = int(row["prompt_tokens"]) - tracked.begun, tracked.cached_tokens
            own = max(1, prompt - cached)
            before = self._timeline.parts(
                args.arrival_s + args.waited_s,
                first_s,
                pieces,
                self.model.work_s(own, cached),
                ceil(own / block_tokens),
                tracked.apart,
            )
            after = self._timeline.parts(first_s, end_s, pieces, apart=tracked.apart)
            self._table.add_late(int(row["key"]), before + after)
        self._ended.clear()

    def _note_resumed(self, changed: ChangedRows, now_s: float) -> None:
        """Of preempted requests, those that have computed again what they had lost."""
        for slot, row in zip(changed.slots.tolist(), changed.table, strict=True):
            if slot in self._preempted and row[RUNNING] and row[PENDING] <= 1:
                tracked, since_s = self._preempted.pop(slot)
                tracked.apart += ((since_s, now_s, Cause.KV_MEMORY),)

    def refresh_model(self) -> None:
        """Adopt the table's model and role; a policy with unchanged options keeps its state."""
        model, role = self._table.orders()
        if model is not None:
            self._base_model = model
            self._correction = StepCorrection()
        learned = self._correction
        self.model = self._base_model.corrected(learned.work, learned.fixed, learned.spread)
        if role != self._role and self._of_role is not None:
            self._role = role
            policy = self._of_role(role)
            if policy.options != self._policy.options:
                self._policy = policy

    def plan(self, queue: QueueView, now_s: float, budget: BatchBudget) -> BatchPlan:
        """Plan the next batch by the policy, with the corrected latency model."""
        started = time.perf_counter()
        self._budget = budget
        self.refresh_model()
        if self._log is not None:
            self._planned.note(self._policy, queue, now_s, self.model, budget)
        plan = self._policy.plan(queue, now_s, self.model, budget)
        self._best_effort_wait_s = longest_wait_s(queue.table, now_s)
        elapsed = time.perf_counter() - started
        self.counts["plan_seconds_sum"] += elapsed
        self._table.summary["plan_histogram"][0, bisect_left(PLAN_BUCKETS_S, elapsed)] += 1
        return plan

    def publish(self, changed: ChangedRows | None = None, **summary: Any) -> None:
        """Write rows that changed outside a step, or further fields of the table's summary."""
        self._table.write(changed, **summary)

    def count_evictions(self, plan: BatchPlan) -> None:
        """The engine has preempted what ``plan`` evicts, of which best-effort requests count."""
        if len(plan.evicted):
            self.counts["evictions"] += len(plan.yielded)
            self.counts["evicted_tokens"] += plan.evicted_tokens

    def kv_arrived(
        self, engine_id: str, asked_s: float, now_s: float, tokens: int, nbytes: int
    ) -> None:
        """The KV of a request's prompt has arrived, which was requested at ``asked_s``."""
        counts, tracked = self.counts, self.requests.get(engine_id)
        if tracked is not None:
            tracked.apart += ((asked_s, now_s, Cause.KV_TRANSFER),)
        counts["transfers"] += 1
        counts["transfer_seconds"] += now_s - asked_s
        counts["transfer_tokens"] += tokens
        counts["transfer_bytes"] += nbytes

    def kv_failed(self) -> None:
        """The KV transfer of a prompt failed; the prompt is recomputed here."""
        self.counts["transfer_failures"] += 1

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
        """The engine starts a batch; one planned empty that is empty is no step. ``ran``: id, new
        tokens, computed tokens before; ``fetched``: planned requests whose KV is fetched first."""
        self.counts["preemptions"] += len(preempted)
        for engine_id in preempted:
            tracked = self.requests.get(engine_id)
            if tracked is None or tracked.slot == NO_SLOT:
                continue
            self.usage.release(tracked.slot)
            if tracked.args.promised:
                self._preempted.setdefault(tracked.slot, (tracked, now_s))
        ids, tokens, computed = zip(*ran, strict=True) if ran else ((), (), ())
        new, before = np.array(tokens), np.array(computed)
        work = StepSample.of_arrays(new, before, drafted or 0)
        # Without headroom: the learned and published value is the accuracy of the model.
        parts_s = self.model.parts_s(work)
        planned: Mapping[str, int] = plan.tokens_of
        if fetched:
            planned = {each: count for each, count in planned.items() if each not in fetched}
        if not ran and not planned:
            return StepInFlight(now_s, plan, work, parts_s, preempted)
        self.counts["steps"] += 1
        shares = self._shares(ids, new, before) if ran else NO_SHARES
        if planned != dict(zip(ids, tokens, strict=True)):
            self.counts["plan_mismatches"] += 1
        checked = {} if checked is None else checked
        # Made now, as requests that end with the batch are forgotten before it is over.
        record = None
        if self._log is not None:
            record = self._record(plan, ran, now_s, preempted, checked)
        free = self._budget.kv_blocks
        return StepInFlight(
            *(now_s, plan, work, parts_s, preempted, record, checked, drafted),
            shares=shares,
            free_blocks=free,
        )

    def _shares(self, ids: Sequence[str], tokens: Ints, computed: Ints) -> Floats:
        """Whose a batch is."""
        ran = map(self.requests.get, ids)
        slots = np.array([NO_SLOT if each is None else each.slot for each in ran])
        block_tokens = self._budget.block_tokens
        return self.usage.shares(self.model.pieces, slots, tokens, computed, block_tokens)

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
        """The engine finished ``step``: publish the state, and learn its time, unless other work of
        the engine ``disturbed`` it. ``cpu_s``: of this thread; ``next_begins_s``: at the earliest
        now."""
        computed = step.work.new_tokens > 0
        drafting_s = self._draft_time.seconds * (step.drafted or 0)
        predicted_s = self._correction.predicted_s(*step.parts_s) + drafting_s
        # A profile must not learn what the default model believes.
        believed_s = 0.0 if self._base_model is DEFAULT_MODEL else predicted_s
        passed_s = self.times.ended(step.started_s, now_s, computed, cpu_s, believed_s)
        seconds = passed_s if seconds is None else seconds
        if self._log is not None and step.record is not None:
            self._log.write({**step.record, "end_s": now_s, "seconds": seconds})
        if computed:
            busy_s = seconds
            if self.times.stages > 1:  # batches overlap
                busy_s = now_s - max(step.started_s, self._timeline.last_end_s)
            self.counts["busy_s"] += busy_s
            self.usage.charge(step.shares, busy_s)
        self._timeline.add(now_s, predicted_s, step.free_blocks, step.work[:7])
        if self._preempted:
            self._note_resumed(changed, now_s)
        if self._ended:
            self._explain_late(now_s)
        if computed and seconds > 0:
            self._learn(step, seconds, predicted_s, drafting_s, disturbed or self.times.guessed)
        summary: dict[str, Any] = {
            "updated_s": now_s,
            "next_begins_s": max(now_s, next_begins_s),
            "correction": self._correction.work,
            "fixed_correction": self._correction.fixed,
            "step_spread": self._correction.spread,
            "waiting": waiting,
            "running": running,
            "free_kv_blocks": free_blocks,
            "total_kv_blocks": total_blocks,
            "best_effort_wait_s": self._best_effort_wait_s,
            "patience_s": self._policy.best_effort.patience_s,
            "draft_s": self._draft_time.seconds,
            **self.counts,
        }
        if computed:  # an empty batch is not evidence of step times
            summary["step_started_s"] = step.started_s
            summary["last_step_s"] = seconds
            summary["predicted_step_s"] = predicted_s
        if self.drafts.checked:
            summary |= self.drafts.summary()
        self._table.write(changed, **summary)

    def _learn(
        self,
        step: StepInFlight,
        seconds: float,
        predicted_s: float,
        drafting_s: float,
        disturbed: bool,
    ) -> None:
        """Learn a step's ``seconds`` against ``predicted_s``, with ``drafting_s`` of it."""
        ratio = seconds / predicted_s
        self.counts["step_ratio_sum"] += ratio
        self._table.summary["step_ratio_histogram"][0, bisect_left(STEP_RATIO_BUCKETS, ratio)] += 1
        self._unlearned = self._unlearned + 1 if disturbed else 0
        if disturbed and self._unlearned <= _MAX_UNLEARNED:
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
            "step": self.counts["steps"],
            "now_s": now_s,
            "predicted_s": plan.predicted_s,
            "plan": [[name(each), tokens] for each, tokens in plan.tokens_of.items()],
            "ran": [[name(engine_id), tokens, computed] for engine_id, tokens, computed in ran],
            "preempted": [name(engine_id) for engine_id in preempted],
            "checked": {name(engine_id): drafts for engine_id, drafts in checked.items()},
            "live": len(self.requests),
            "cpu_s": time.thread_time(),
            **self._planned.take(plan, name),
        }


class GarbageCollector:
    """Replaces Python's garbage collection in an engine's process, until ``stop``.

    A collection at an arbitrary moment pauses for hundreds of milliseconds (FairBatching §4). As
    there, objects from start-up are never examined again, and a collection waits for decodes with
    slack and no queued prefill; unlike there, for one minute at most."""

    MIN_INTERVAL_S = 5.0
    MAX_INTERVAL_S = 60.0
    SLACK_FACTOR = 4.0  # Slack that is enough, in durations of the last collection

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._pause_s = 0.02

    def before_batch(self, queue: QueueView, step_s: float) -> None:
        """Collect if it is time. The first call ends start-up. ``O(requests)``, mostly ``O(1)``."""
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
