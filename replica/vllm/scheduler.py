"""Sluice's batch plans inside stock vLLM.

Around one call of vLLM's ``schedule()``, which allocates, preempts and builds, this sorts the
queues by the plan, takes out what the plan leaves out, and caps tokens through one small hook. So
outputs are stock vLLM's; only order and chunks differ. ``support`` checks the internals that it
uses."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc, has-type"

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request, RequestStatus

from sluice.protocol.requests import request_key
from sluice.replica.grammar.bound import bound_grammars
from sluice.replica.processes import end_with_parent, pin_thread
from sluice.replica.scheduler import row_counts
from sluice.replica.scheduler.local_scheduler import (
    GarbageCollector,
    LocalScheduler,
    Occupancy,
    StepInFlight,
    StepTimes,
    end_among,
    next_start_s,
    spare_tokens,
)
from sluice.replica.scheduler.speculation import PlannedDrafts
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, from_xargs
from sluice.replica.vllm.kept_kv import keep_sessions
from sluice.replica.vllm.loaded_kv import (
    ExternalKv,
    HostBlocks,
    IncomingKv,
    cut_to_cached,
    kv_of_request,
    wants_cached,
)
from sluice.replica.vllm.prefix_cache import HeldPrefixes, PrefixHits, on_removed_blocks
from sluice.replica.vllm.rows import RequestRows
from sluice.replica.vllm.support import (
    UnsupportedVllmError,
    check_config,
    check_overrides,
    check_vllm,
    hook_name,
    rank_of,
    second_queue_name,
)
from sluice.scheduling.batching import BatchBudget, BatchPlan
from sluice.scheduling.request.kernels import RUNNING
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView
from sluice.telemetry.phases import phase
from sluice.telemetry.records import RecordLog

logger = logging.getLogger(__name__)

_EMPTY = BatchPlan.empty()
_ENDED_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

# The mixin is typed as the class that it is mixed into; the type checker does not follow vLLM's
# types.
if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object

SWITCH_S: Final = 0.0005
"""After how long the engine's loop, which is busy for 10 to 20 ms of a step, gives Python's lock to
the threads that take requests and send tokens. Python's own 5 ms make both late."""


class PlanMixin(_Base):
    """Carries out batch plans in vLLM's scheduler; ``O(live requests)`` a step plus the policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(*args, **kwargs)
        settings = _settings(self.vllm_config)
        speculates = self.vllm_config.speculative_config is not None
        with phase("engine: policy"):
            row_counts.compile_now(settings.policy, settings.policy_options, speculates)
        log = RecordLog(settings.batch_log) if settings.batch_log is not None else None
        table = StateTable.open(settings.state_table)
        make = settings.make_policy
        times = _step_times(self.vllm_config)
        self._local = LocalScheduler(make(), table, log=log, times=times, of_role=make)
        bound_grammars(self.structured_output_manager)
        self._names: set[str] = set()
        self._caps: Mapping[str, int] | None = None
        self._in_flight: dict[int, StepInFlight] = {}
        self._occupancy = Occupancy(times.stages)
        self._stalled = False
        self._queues = (self.waiting, getattr(self, second_queue_name()))
        self._pool = self.kv_cache_manager.block_pool
        # With several groups of layers, each takes a block of its own for the same tokens.
        self._groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        hash_tokens = self._pool.hash_block_size
        self._host = HostBlocks(self.connector, hash_tokens)
        self._hits = PrefixHits(
            self.kv_cache_manager, self._groups, self.block_size, self._host.beyond
        )
        self._incoming = IncomingKv(self, self._local)
        own = hasattr(self.connector, "read_blocks_by")
        foreign = self.connector is not None and not (own or self._host.known)
        self._external = ExternalKv(self.connector, foreign)
        if own:
            self.connector.read_blocks_by(self.kv_cache_manager.get_block_ids)
        # vLLM keeps one block, the null block, for itself.
        self._total_blocks: int = self._pool.num_gpu_blocks - 1
        # Before the first step, or no request could ever run here, as it would seem.
        table.write(
            free_kv_blocks=self._pool.get_num_free_blocks(), total_kv_blocks=self._total_blocks
        )
        self._held = HeldPrefixes(
            table,
            # Of the first group of layers.
            lambda block_hash: self._pool.get_cached_block(block_hash, [0]) is not None,
            self.block_size,
            hash_tokens,
            load_s=self._host.load_s,
        )
        on_removed_blocks(self._pool, self._held.removed)
        self._kept = keep_sessions(self._pool, table.take_calls)
        self._host.on_removed = self._held.removed
        self._reserve_prompt = bool(getattr(self, "scheduler_reserve_full_isl", False))
        self._preempts = not self.vllm_config.model_config.is_encoder_decoder
        if not self._preempts:
            self._run_what_fits()
        most: int | None = getattr(self, "max_num_active_reqs", None)  # from 0.32
        self._most_running: int = self.max_num_running_reqs if most is None else most
        self._drafts = PlannedDrafts(self) if speculates else None
        self._rows = RequestRows(
            self, self._local, self._hits, self._incoming, self._external, self._drafts
        )
        self._in_stages: set[str] = set()
        self._garbage = GarbageCollector()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        if hook_name() == "_mamba_block_aligned_split":
            self._enable_old_hook()

    def _run_what_fits(self) -> None:
        """Run only as many requests as the KV cache holds at their longest: an encoder-decoder
        model continues a preempted one with wrong text, also in stock vLLM 0.32 on CPUs."""
        config = self.vllm_config.model_config.hf_config
        stated: Any = getattr(config, "max_source_positions", None)
        encoded = int(stated or self.max_num_encoder_input_tokens)
        each = sum(-(-tokens // self.block_size) for tokens in (int(self.max_model_len), encoded))
        fit = max(1, self._total_blocks // each)
        for name in ("max_num_running_reqs", "max_num_active_reqs"):
            if hasattr(self, name):
                setattr(self, name, min(fit, getattr(self, name)))

    # Called by vLLM.

    def add_request(self, request: Request) -> None:
        """Take a new request, and read its SLO."""
        if wants_cached(request):
            cut_to_cached(request, self._hits.now(request), self._pool.hash_block_size)
        super().add_request(request)
        request_id = request.request_id
        if request_id in self._local.requests:
            return
        args = _request_args(request)
        # The first sequence of an API call has the call's name, so that its key is known outside.
        name = args.request_id
        if name in self._names:
            name = f"{name}:{request_id}"
        self._names.add(name)
        tracked = self._local.track(
            request_id,
            args,
            request_key(name),
            request.num_prompt_tokens,
            request.max_tokens,
            name,
            time.monotonic(),
        )
        self._held.begin(request_id, args.prefix, request.num_prompt_tokens - args.resumed)
        self._rows.begin(request, tracked)
        if tracked.stages is not None:
            self._in_stages.add(request_id)
        if self._incoming.begin(request):
            self._local.publish(self._rows.awaited(request_id))
        self._external.begin(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        request_id = request.request_id
        tracked = self._local.requests.get(request_id)
        if tracked is not None:
            self._names.discard(tracked.name)
            ended = request.status in _ENDED_BY_ITSELF and not kv_of_request(request)
            self._local.forget(request_id, request.num_output_tokens if ended else None)
            self._rows.forget(request_id)
            self._in_stages.discard(request_id)
            self._held.forget(request_id)
            self._incoming.forget(request_id)
            self._external.forget(request_id)
            turn = tracked.args.turn
            if self._kept is not None and turn is not None and turn.session:
                blocks = self.kv_cache_manager.get_block_ids(request_id)
                self._kept.price(self._local.model, self.block_size)
                self._kept.end(turn, tracked.args.tenant, blocks)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the next batch, and have vLLM build it.

        If the plan is empty or could not run, stock scheduling decides the step, so that live
        requests make progress; not while a pipeline's batch is in flight, whose requests it would
        preempt."""
        now_s = time.monotonic()
        # The batch begins when those before it have ended, or left the pipeline's first stage.
        start_s = max(now_s, self._occupancy.entry_free_s) if self._in_flight else now_s
        queue = self._queue()
        plan = self._plan(queue, start_s) if len(queue) else _EMPTY
        self._garbage.before_batch(queue, plan.predicted_s)
        stages = self._local.times.stages
        waits = stages > 1 and any(step.work.new_tokens for step in self._in_flight.values())
        planned = (len(plan) > 0 or waits) and not self._stalled
        drafts = self._drafts
        if planned:
            if drafts is not None:
                drafts.planned(plan.entries)
            output = self._schedule_planned(plan, *args, **kwargs)
        else:
            output = super().schedule(*args, **kwargs)
        ran = [
            (request_id, tokens, self.requests[request_id].num_computed_tokens - tokens)
            for request_id, tokens in output.num_scheduled_tokens.items()
        ]
        for new in output.scheduled_new_reqs:
            tracked = self._local.requests[new.req_id]
            tracked.cached_tokens = new.num_computed_tokens
            if self._kept is not None and tracked.args.turn is not None:
                self._kept.begin(tracked.args.turn)
        fetched = [*self._incoming.note_started(now_s), *self._host.take_started()]
        if self.connector is not None:
            planned_ids = plan.tokens_of if planned else ()
            left_out = self._external.left_out(
                self.requests, planned_ids, output.num_scheduled_tokens
            )
            fetched += set(left_out).difference(fetched)
        if fetched:
            self._local.publish(self._rows.changed(fetched))
        # Where not even stock scheduling ran anything, an empty plan was right. An eviction that
        # freed fewer blocks than planned, as other requests share them, is followed by another.
        evicted = planned and len(plan.evicted) > 0
        self._stalled = len(plan) > 0 and not (ran or evicted or fetched or waits)
        # Includes the requests that were evicted before the call.
        preempted = tuple(output.preempted_req_ids or ())
        step = self._local.begin_step(
            plan,
            ran,
            time.monotonic(),
            preempted,
            None if drafts is None else drafts.checked(output),
            None if drafts is None else drafts.drafted,
            fetched=fetched,
        )
        self._local.times.began(step.started_s, time.thread_time())
        if ran:
            start_s = max(step.started_s, start_s)
            self._occupancy.began(start_s, plan.predicted_s, bool(self._in_flight))
        if ran and planned and stages > 1:
            step.next_start_s = next_start_s(queue, plan, self._occupancy.busy_until_s)
        self._in_flight[id(output)] = step
        return output

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Called by vLLM as soon as it has launched a batch, unless that has to wait for drafts."""
        self._local.times.launched(time.monotonic(), time.thread_time())
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take the result of a batch, learn its time, and publish the new state."""
        self._note_computed(scheduler_output)
        step = self._in_flight.pop(id(scheduler_output))
        if self._drafts is not None:
            self._drafts.learn(
                step.checked, model_runner_output, self._local.requests, self._local.drafts
            )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._held.publish()
        now_s = time.monotonic()
        if step.work.new_tokens:
            self._occupancy.ended(now_s)
        answers = [each for client in outputs.values() for each in client.outputs]
        self._rows.emitted([each.request_id for each in answers if each.new_token_ids], now_s)
        if self._in_stages:
            self._follow_stages(answers, now_s)
        kv = (self._incoming, self._host, self._external)
        disturbed = any(each.under_way for each in kv)
        loaded = self._incoming.note_ended(now_s)
        changed = [*scheduler_output.num_scheduled_tokens, *step.preempted, *loaded]
        running, waiting = self.get_request_counts()
        self._local.end_step(
            step,
            now_s,
            self._rows.changed(changed),
            waiting,
            running,
            self._pool.get_num_free_blocks(),
            self._total_blocks,
            self._seconds_of(scheduler_output),
            disturbed=disturbed,
            cpu_s=time.thread_time(),
            next_begins_s=self._occupancy.entry_free_s if self._in_flight else now_s,
        )
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Clear the prefix cache, unless it is in use."""
        cleared: bool = super().reset_prefix_cache(*args, **kwargs)
        if cleared and self._kept is not None:
            self._kept.clear()
        self._held.cleared()
        self._held.publish()
        return cleared

    def shutdown(self) -> None:
        """The engine ends."""
        self._garbage.stop()
        sys.setswitchinterval(self._switch_s)
        super().shutdown()

    def _reserve_prefill_lookahead(self, request: Request, computed: int, tokens: int) -> int:
        """Called by ``schedule()`` for every request: its new tokens (from vLLM 0.28)."""
        granted: int = super()._reserve_prefill_lookahead(request, computed, tokens)
        return self._capped(request, granted)

    def _mamba_block_aligned_split(
        self, request: Request, tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Called by ``schedule()`` for every request (up to vLLM 0.27, once switched on)."""
        if hook_name() == "_mamba_block_aligned_split":
            return self._capped(request, tokens)
        granted: int = super()._mamba_block_aligned_split(request, tokens, *args, **kwargs)
        return granted

    # Planning and execution of the plan.

    def _plan(self, queue: QueueView, start_s: float) -> BatchPlan:
        """The next batch, by the policy."""
        running = int(np.count_nonzero(queue.table[:, RUNNING]))
        budget, stages = self._budget(len(queue), running), self._local.times.stages
        if stages > 1:
            steps = self._in_flight.values()
            before = [(step.next_start_s, step.plan.predicted_s) for step in steps]
            spare = spare_tokens(before, start_s, self._local.model, stages)
            # Each running request may have a token in any case.
            budget = budget._replace(tokens=min(budget.tokens, max(1, spare, running)))
        plan = self._local.plan(queue, start_s, budget)
        if not self._preempts:
            plan.evicted = plan.evicted[:0]
        return plan

    def _seconds_of(self, scheduler_output: Any) -> float | None:
        """How long a batch took, if that is not the time between two calls."""
        return None

    def _enable_old_hook(self) -> None:
        """Up to 0.27 the only usable hook is that for models with state-space layers."""
        if self.need_mamba_block_aligned_split:
            raise UnsupportedVllmError(
                "models with aligned Mamba state need vLLM 0.28 or later: "
                f"{vllm.__version__} has no free hook for token caps"
            )
        self.need_mamba_block_aligned_split = True

    def _capped(self, request: Request, tokens: int) -> int:
        if self._caps is None:
            return tokens
        return min(tokens, self._caps.get(request.request_id, 0))

    def _queue(self) -> QueueView:
        """Every request that could run now, in order of arrival at the engine."""
        return self._rows.queue(self._occupancy.busy_until_s)

    def _budget(self, requests: int, running: int) -> BatchBudget:
        """The limits of a batch of a queue of ``requests``, of which some are ``running``."""
        unseen = len(self.running) - running
        tokens, drafts = self.max_num_scheduled_tokens, self._drafts
        if drafts is not None:
            tokens = drafts.tokens(tokens, min(requests, self._most_running))
        return BatchBudget(
            tokens=tokens,
            sequences=self._most_running - unseen,
            kv_blocks=self._pool.get_num_free_blocks() // self._groups,
            block_tokens=self.block_size,
            reserve_prompt=self._reserve_prompt,
            lookahead_tokens=0 if drafts is None else drafts.lookahead,
            draft_s=self._local.draft_s,
        )

    def _schedule_planned(self, plan: BatchPlan, *args: Any, **kwargs: Any) -> Any:
        """Call stock ``schedule()`` once, with the plan's requests first and capped.

        A cap of 0 makes vLLM skip a running request, but stop at a waiting one. So running requests
        that the plan leaves out stay at the end, where they can be preempted, and waiting ones are
        hidden. Those that wait for a grammar or remote KV stay visible: vLLM checks there whether
        they are ready."""
        self._evict(plan)
        tokens_of, kept = plan.tokens_of, frozenset(plan.kept_ids)
        pipelined = self._local.times.stages > 1

        def unplanned(request: Request) -> tuple[bool, float]:
            # Of the requests that the plan leaves out, those to keep are preempted last. It knows
            # nothing of a request whose batch is still in the pipeline.
            keep = request.request_id in kept or (pipelined and request.num_in_flight_tokens)
            return not keep, request.arrival_time

        def ordered(requests: Iterable[Request]) -> list[Request]:
            by_id = {request.request_id: request for request in requests}
            first = [by_id.pop(each) for each in tokens_of if each in by_id]
            return first + sorted(by_id.values(), key=unplanned)

        blocked = self._is_blocked_waiting_status
        hidden: list[tuple[Any, list[Request]]] = []
        self.running[:] = ordered(self.running)
        for queue in self._queues:
            if not queue:
                continue
            shown: list[Request] = []
            rest: list[Request] = []
            for request in queue:
                visible = request.request_id in tokens_of or (
                    blocked(request.status) and not self._incoming.arrived(request)
                )
                (shown if visible else rest).append(request)
            queue.clear()
            queue.extend(ordered(shown))
            hidden.append((queue, rest))
        self._caps = tokens_of
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._caps = None
            for queue, rest in hidden:
                queue.extend(rest)

    def _note_computed(self, scheduler_output: Any) -> None:
        """Called before a batch's requests may leave: their blocks are filled and cached by now."""
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None:
                self._held.computed(request_id, request.num_computed_tokens, request.block_hashes)

    def _evict(self, plan: BatchPlan) -> None:
        """Preempt the requests that the plan evicts as vLLM preempts within a step: output in
        flight is still delivered, and the request does not run again before that."""
        for request_id in plan.evicted_ids:
            request = self.requests[request_id]
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
        self._local.count_evictions(plan)

    def _follow_stages(self, answers: Iterable[Any], now_s: float) -> None:
        for answer in answers:
            request_id, tokens = answer.request_id, answer.new_token_ids
            if request_id not in self._in_stages or not tokens:
                continue
            tracked = self._local.requests[request_id]
            assert tracked.stages is not None
            before, reasoned = tracked.begun, end_among(tokens, tracked.stages.ends)
            if self._local.follow_stages(tracked, len(tokens), now_s, reasoned):
                self._rows.begin_stage(request_id, tracked, tracked.begun - before)


def _request_args(request: Request) -> RequestArgs:
    if request.pooling_params is not None:
        extra = request.pooling_params.extra_kwargs
    else:
        extra = request.sampling_params.extra_args if request.sampling_params else None
    now_s = time.monotonic()
    try:
        return from_xargs(extra, request.request_id, now_s)
    except ValueError as error:
        # Reached only by direct use of the engine. An exception would end the whole engine.
        logger.warning("request %s runs without an SLO: %s", request.request_id, error)
        return RequestArgs(request.request_id, now_s, SLO())


class SloScheduler(PlanMixin, Scheduler):
    """For engines that wait for each batch."""


class SloAsyncScheduler(PlanMixin, AsyncScheduler):
    """For engines that schedule a batch while the one before it runs."""


def prepare(vllm_config: Any) -> None:
    """Check vLLM and its configuration, and pin this thread if configured. Raises
    UnsupportedVllmError. Raises ValueError: ``additional_config["sluice"]`` is missing or wrong."""
    check_vllm()
    check_overrides("Sluice", SloScheduler, SloAsyncScheduler)
    check_config(vllm_config)
    settings = _settings(vllm_config)
    if settings.cpu_core is not None:
        # On CPUs this thread also runs the model.
        pin_thread(settings.cpu_core, rank_of(vllm_config))


def _step_times(vllm_config: Any) -> StepTimes:
    """The loop launches batches itself where the executor is in its process."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    own = issubclass(Executor.get_class(vllm_config), UniProcExecutor)
    return StepTimes(stages, launches=stages == 1 and own)


def _settings(vllm_config: Any) -> SchedulerSettings:
    settings = SchedulerSettings.from_additional_config(vllm_config.additional_config)
    return settings.of_rank(rank_of(vllm_config))


def make_scheduler(vllm_config: Any, **kwargs: Any) -> SloScheduler | SloAsyncScheduler:
    """The scheduler, for vLLM's ``scheduler_cls``. Raises as ``prepare``."""
    prepare(vllm_config)
    kind = SloAsyncScheduler if vllm_config.scheduler_config.async_scheduling else SloScheduler
    return kind(vllm_config=vllm_config, **kwargs)
