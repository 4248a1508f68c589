"""Builds the batch of one task with vLLM's own scheduler, while other tasks are in flight."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc, has-type, no-any-return"

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from sluice.replica.preemption.messages import Timing
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.scheduler import SloScheduler
from sluice.scheduling.batching import BatchPlan
from sluice.scheduling.latency.model import StepSample
from sluice.scheduling.latency.speculation import AdaptiveLengths
from sluice.scheduling.preemption import (
    DECODE_GAP_S,
    AgedShare,
    DecodeTurns,
    InFlight,
    Prefill,
    decide,
    decode_step_due_s,
)
from sluice.scheduling.request.deadline import ENVELOPE
from sluice.scheduling.request.kernels import (
    ARRIVAL,
    BEST_EFFORT,
    COMPUTED,
    DRAFTED,
    EMITTED,
    EXPECTED,
    FIRST_TOKEN,
    KV_BLOCKS,
    LAST_TOKEN,
    PENDING,
    RUNNING,
    TPOT,
    deadlines_s,
    is_prefill,
)
from sluice.scheduling.request.objective import Anchor
from sluice.scheduling.request.queue import QueueView


@dataclass(slots=True)
class Task:
    """A batch of prefills, or a ``step`` of decodes; ``number``, ``batch`` and ``request_ids`` once
    it is in flight.

    ``checked`` depends on its requests alone, as compiled code, which has no checks, may round
    differently. ``suspended`` already holds before it sees the stop signal. ``discarded``: its
    discard was ordered."""

    plan: BatchPlan
    checked: bool = False
    preemptible: bool = False
    due_s: float = inf
    best_effort: bool = False
    step: bool = False
    number: int = 0
    batch: Any = None
    request_ids: tuple[str, ...] = ()
    signalled_s: list[float] = field(default_factory=list)
    suspended: bool = False
    discarded: bool = False

    @property
    def predicted_s(self) -> float:
        """Running alone."""
        return self.plan.predicted_s


class PreemptiveScheduler(SloScheduler):
    """Sluice's scheduler with several batches in flight, of which one at a time computes.

    Requests in flight are hidden while a batch is built, so vLLM cannot preempt a suspended
    prefill's requests. Hashes of blocks are published when the blocks are written: another prompt
    must not read empty ones. A request that ends keeps its blocks until its task ends, which may
    write them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = SchedulerSettings.from_additional_config(self.vllm_config.additional_config)
        assert settings.preemption is not None
        self.bounds = settings.preemption
        self._aged = AgedShare(settings.best_effort.patience_s, settings.best_effort.aged_share)
        self._lengths = AdaptiveLengths()
        self.in_flight: dict[str, int] = {}
        self.ending: dict[str, RequestStatus] = {}
        self.turns = DecodeTurns(0)
        """Replaced where prefills can stop."""
        self._stepped = False
        self._tasks = 0
        self._tasks_in_flight = 0
        self._given: tuple[QueueView, BatchPlan] | None = None
        self._seconds: float | None = None
        allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = _publishing_later(allocate)

    def publish(self, summary: dict[str, Any]) -> None:
        """Write fields of the state table's summary."""
        self._local.publish(**summary)

    def start(self, top: Task | None, left_s: float, full: bool) -> Task | None:
        """Build the next task, to run inside ``top``, which would end in ``left_s``, if there is
        one; None for none. ``full``: the new task could not be suspended."""
        if not super().has_requests():
            return None
        now_s = time.monotonic()
        queue = self._queue()
        self._local.refresh_model()
        task = self._build(queue, self._choose(queue, top, left_s, now_s, full))
        if task is not None or top is not None:
            return task
        # There is no KV for the chosen requests: the requests that hold KV continue. With no
        # request at all, vLLM checks whether those that wait for something else are ready.
        running = queue.select(np.flatnonzero(queue.table[:, RUNNING]))
        chosen = self._choose(running, None, 0.0, now_s, full)
        return self._build(running, chosen or Task(BatchPlan.empty()))

    def _build(self, queue: QueueView, task: Task | None) -> Task | None:
        """``task`` of requests in ``queue`` with vLLM's batch; None if it would be empty."""
        if task is None:
            return None
        held = [request for request in self.running if request.request_id in self.in_flight]
        if held:
            self.running = [each for each in self.running if each.request_id not in self.in_flight]
        self._given = queue, task.plan
        self._stalled = False
        try:
            batch = self.schedule()
        finally:
            self._given = None
            self.running = held + self.running
        if not batch.num_scheduled_tokens and (self.in_flight or not batch.finished_req_ids):
            self._take_back(batch)
            return None
        self._stepped = task.step
        self._tasks += 1
        self._tasks_in_flight += 1
        task.number, task.batch = self._tasks, batch
        task.request_ids = tuple(batch.num_scheduled_tokens)
        self.in_flight.update(dict.fromkeys(task.request_ids, task.number))
        return task

    def has_requests(self) -> bool:
        """Whether vLLM must run rounds, also to report ended requests to the worker."""
        return self._tasks_in_flight > 0 or super().has_requests()

    def decode_due_s(self, top: Task) -> float | None:
        """When the next decode step is due inside ``top``, if waiting decodes may stop it."""
        queue = self._queue()
        decodes = np.flatnonzero(~is_prefill(queue.table))
        if not len(decodes):
            return None
        step_s = self._decode_step(queue, decodes, time.monotonic()).predicted_s
        return self._due_s(queue, decodes, step_s, top)

    def completed(self, task: Task, output: Any, drafts: Any, timing: Timing) -> Any:
        """Take the result of a task, and the tokens drafted after it; vLLM's outputs by client."""
        self._end(task)
        for request_id in task.request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                # Those of drafts, which may be wrong, have no hashes yet.
                written = min(request.num_computed_tokens, request.num_tokens)
                self.kv_cache_manager.cache_blocks(request, written)
        self._seconds = timing.busy_s
        try:
            outputs = self.update_from_output(task.batch, output)
        finally:
            self._seconds = None
        if drafts is not None:
            self.update_draft_token_ids(drafts)
        return outputs

    def failed(self, task: Task) -> list[Any]:
        """A task ended without a result; returns the requests that end with an error for it."""
        self._end(task)
        self._in_flight.pop(id(task.batch), None)
        ended = super().finish_requests(task.request_ids, RequestStatus.FINISHED_ERROR)
        return list(ended)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        """End requests from outside; requests in flight end with their task."""
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        ids = list(self.requests if request_ids is None else request_ids)
        held = [each for each in ids if each in self.in_flight and each not in self.ending]
        now = [each for each in ids if each not in self.in_flight]
        self.ending.update(dict.fromkeys(held, finished_status))
        ended = list(super().finish_requests(now, finished_status))
        return ended + [self.requests[each] for each in held]

    def _end(self, task: Task) -> None:
        self._tasks_in_flight -= 1
        for request_id in task.request_ids:
            del self.in_flight[request_id]
            status = self.ending.pop(request_id, None)
            if status is not None:
                super().finish_requests(request_id, status)

    def _choose(
        self, queue: QueueView, top: Task | None, left_s: float, now_s: float, full: bool
    ) -> Task | None:
        if not len(queue):
            return None
        prefill = is_prefill(queue.table)
        decodes = np.flatnonzero(~prefill)
        waiting = np.flatnonzero(prefill)
        step, next_s = None, None
        if len(decodes):
            step = Task(self._decode_step(queue, decodes, now_s), due_s=now_s, step=True)
            next_s = self._due_s(queue, decodes, step.predicted_s, top)
            alone = top is None and not len(waiting)
            if alone or (next_s is not None and now_s >= next_s):
                return step
        step_s = 0.0 if step is None else step.predicted_s
        max_tokens = self._max_tokens(queue, waiting, step_s, now_s)
        if top is None and (turn := self._aged_chunk(queue, waiting, now_s, max_tokens)):
            return turn
        in_flight = None if top is None else InFlight(top.due_s, left_s, top.best_effort)
        chosen = self._prefills(queue, waiting, in_flight, now_s, max_tokens, full)
        if chosen is None or chosen.preemptible or next_s is None or self._stepped:
            return chosen
        # It cannot be stopped for a step that comes due in it.
        return step if now_s + chosen.predicted_s > next_s else chosen

    def _max_tokens(self, queue: QueueView, waiting: Any, step_s: float, now_s: float) -> int:
        """Most tokens of a task of prefills that has to stop for steps of decodes."""
        decoding = queue.table[~(queue.table[:, EXPECTED] <= 1)]
        model = self._local.model
        for_decodes = self.turns.max_tokens(
            decoding[decoding[:, BEST_EFFORT] == 0, TPOT],
            max(step_s, model.fixed_s),
            model,
            int(queue.table[waiting, COMPUTED].max(initial=0)),
            self.bounds.min_tokens,
            now_s,
            DECODE_GAP_S if len(decoding) else inf,
        )
        return min(self.max_num_scheduled_tokens, for_decodes)

    def _prefills(
        self,
        queue: QueueView,
        waiting: Any,
        top: InFlight | None,
        now_s: float,
        max_tokens: int,
        full: bool,
    ) -> Task | None:
        apart = queue.table[:, BEST_EFFORT] > 0
        due_s = np.where(apart, inf, deadlines_s(queue.table, ENVELOPE))
        pending, computed = queue.table[:, [PENDING, COMPUTED]].astype(np.int64).T.tolist()
        row_of = dict(zip(queue.request_ids(waiting), waiting.tolist(), strict=True))
        prefills = [
            Prefill(
                request_id,
                float(due_s[row]),
                pending[row],
                self._together_s([(pending[row], computed[row])]),
                bool(apart[row]),
                float(due_s[row] - queue.table[row, ARRIVAL]),
            )
            for request_id, row in row_of.items()
        ]

        def together_s(members: Sequence[Prefill]) -> float:
            rows = [row_of[each.request_id] for each in members]
            return self._together_s((pending[row], computed[row]) for row in rows)

        batch = decide(prefills, top, now_s, together_s, self.bounds, max_tokens, full)
        if batch is None:
            return None
        tokens = [tokens for _, tokens in batch.members]
        plan = self._plan_of(queue, [row_of[name] for name, _ in batch.members], tokens)
        checked = sum(tokens) >= self.bounds.min_tokens and not any(
            self._wants_prompt_logprobs(name) for name, _ in batch.members
        )
        return Task(plan, checked, checked and not full, batch.due_s, batch.best_effort)

    def _aged_chunk(
        self, queue: QueueView, waiting: Any, now_s: float, max_tokens: int
    ) -> Task | None:
        """A small chunk of the oldest prefill, if it has waited long enough to have its turn."""
        if not len(waiting):
            return None
        oldest = int(waiting[np.argmin(queue.table[waiting, ARRIVAL])])
        pending = int(queue.table[oldest, PENDING])
        tokens = min(pending, self.bounds.small_chunk_tokens, max_tokens)
        plan = self._plan_of(queue, [oldest], [tokens])
        arrival_s, apart = queue.table[oldest, [ARRIVAL, BEST_EFFORT]].tolist()
        if not self._aged.has_turn(arrival_s, plan.predicted_s, now_s):
            return None
        return Task(plan, best_effort=apart > 0)

    def _due_s(
        self, queue: QueueView, decodes: Any, step_s: float, top: Task | None
    ) -> float | None:
        """When a step of ``decodes`` has to begin, inside ``top`` if they may stop it."""
        table = queue.table[decodes]
        apart = table[:, BEST_EFFORT] > 0
        timed = ~np.isnan(table[:, LAST_TOKEN])
        if top is not None and not top.best_effort:
            timed &= ~apart
        return decode_step_due_s(
            np.where(apart, nan, table[:, FIRST_TOKEN])[timed],
            table[timed, EMITTED],
            table[timed, LAST_TOKEN],
            table[timed, TPOT],
            step_s,
            DECODE_GAP_S,
            0.0 if top is None else self.turns.stop_s(top.predicted_s),
        )

    def stop_s(self, tasks: Iterable[Task]) -> float:
        """The time to plan for the stop of one of ``tasks``, or of the shortest that can stop."""
        shortest_s = self._together_s([(self.bounds.min_tokens, 0)])
        longest_s = max((each.predicted_s for each in tasks if each.preemptible), default=0.0)
        return self.turns.stop_s(max(shortest_s, longest_s))

    def _decode_step(self, queue: QueueView, decodes: Any, now_s: float) -> BatchPlan:
        """The next token of each of ``decodes``, and the drafts for most tokens per second."""
        most = self.max_num_scheduled_tokens
        rows = decodes[: min(most, self.max_num_running_reqs)]
        tokens = np.ones(len(rows), np.int64)
        if queue.table[rows, DRAFTED].any():
            own = queue.select(rows)
            chosen = self._lengths.choose(own, now_s, self._local.model, most, 0.0, Anchor.ENVELOPE)
            tokens += chosen.drafts
            ends = own.table[:, COMPUTED].astype(np.int64) + tokens
            new = np.maximum(0, -(-ends // self.block_size) - own.table[:, KV_BLOCKS])
            if new.sum() * self._groups > self._pool.get_num_free_blocks():
                tokens[:] = 1  # no draft evicts a request
        return self._plan_of(queue, rows.tolist(), tokens.tolist())

    def _together_s(self, sequences: Iterable[tuple[int, int]]) -> float:
        return self._local.model.step_s(StepSample.of(sequences))

    def _plan_of(self, queue: QueueView, rows: list[int], tokens: list[int]) -> BatchPlan:
        computed = queue.table[rows, COMPUTED].astype(np.int64).tolist()
        predicted_s = self._together_s(zip(tokens, computed, strict=True))
        return BatchPlan(queue, np.array(rows, np.int64), np.array(tokens, np.int64), predicted_s)

    def _queue(self) -> QueueView:
        """Without requests in flight, as vLLM's scheduler may see it."""
        if self._given is not None:
            return self._given[0]
        queue = super()._queue()
        if not self.in_flight:
            return queue
        ids = queue.request_ids(np.arange(len(queue)))
        return queue.select(np.flatnonzero([each not in self.in_flight for each in ids]))

    def _plan(self, queue: QueueView, start_s: float) -> BatchPlan:
        assert self._given is not None
        return self._given[1]

    def _seconds_of(self, scheduler_output: Any) -> float | None:
        return self._seconds

    def _take_back(self, batch: Any) -> None:
        """An empty batch is not sent, so the next one reports the ended requests."""
        self.finished_req_ids |= batch.finished_req_ids
        self._in_flight.pop(id(batch), None)

    def _wants_prompt_logprobs(self, request_id: str) -> bool:
        params = self.requests[request_id].sampling_params
        return params is not None and params.prompt_logprobs is not None


def _publishing_later(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """``allocate_slots`` without the hashes of what it allocates."""

    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        return allocate(*args, **{**kwargs, "delay_cache_blocks": True})

    return allocate_slots
