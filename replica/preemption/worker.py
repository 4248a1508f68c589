"""The worker's side: runs tasks, and nested ones from inside a check of a suspended task.

Input buffers, batch and attention metadata belong to one forward pass. So every depth of the stack
has a model runner of its own (a lane); all share the model, the KV cache and the requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sluice.replica.preemption.checks import Checks, Immediate, pacer_for
from sluice.replica.preemption.messages import (
    Answer,
    CallWorker,
    Command,
    ControlWords,
    Discarded,
    DiscardTask,
    Done,
    Exit,
    Failed,
    ResumeTask,
    RunTask,
    Timing,
)

SHARED_NAMES = ("model", "kv_caches", "requests", "num_prompt_logprobs", "encoder_cache")
"""Attributes that lanes share with vLLM's own runner."""


class Lanes:
    """vLLM's own runner for work without checks, and ``depth + 1`` private ones for tasks."""

    def __init__(self, worker: Any, depth: int) -> None:
        self.stock: Any = worker.model_runner
        self._connector = _kv_connector()
        self._adapters = _Adapters(self.stock) if hasattr(self.stock, "lora_manager") else None
        self.private = [_private_lane(worker, self._connector) for _ in range(depth + 1)]

    @contextmanager
    def nested(self) -> Iterator[None]:
        """In this context other tasks run inside the one that computes; after it that one has its
        commands of the KV connector and its LoRA adapters back."""
        with ExitStack() as kept:
            if self._connector is not None:
                kept.enter_context(self._connector.step_suspended())
            if self._adapters is not None:
                kept.enter_context(self._adapters.kept())
            yield

    def enter(self, lane: Any, batch: Any) -> None:
        """Called before ``lane`` computes ``batch``: removes old state of its requests from vLLM's
        own lane, which keeps its batch between steps. Private lanes are emptied at once."""
        if lane is self.stock:
            return
        ids = (*batch.finished_req_ids, *batch.num_scheduled_tokens)
        _remove(self.stock.input_batch, ids)

    def leave(self, lane: Any) -> None:
        """Called after a task in ``lane``, however it ended."""
        lane.execute_model_state = None
        if lane is self.stock:
            return
        _remove(lane.input_batch, tuple(lane.input_batch.req_id_to_index))


class _Adapters:
    """The LoRA adapter of each token, which vLLM sets in the model before each batch."""

    def __init__(self, runner: Any) -> None:
        self._set = runner.lora_manager.set_active_adapters
        self._latest: tuple[Any, Any] = (set(), None)
        runner.lora_manager.set_active_adapters = self._activate

    def _activate(self, requests: Any, mapping: Any) -> None:
        self._latest = requests, mapping
        self._set(requests, mapping)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """After this context the adapters are those of before."""
        latest = self._latest
        try:
            yield
        finally:
            self._activate(*latest)


def _remove(batch: Any, request_ids: Iterable[str]) -> None:
    """Remove requests from the batch that a lane last saw."""
    for request_id in request_ids:
        batch.remove_request(request_id)
    batch.condense()
    batch.refresh_metadata()


def new_runner(worker: Any) -> Any:
    """One more model runner for ``worker``, without a model and a KV cache."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        return type(worker.model_runner)(worker.vllm_config, worker.device)


def _kv_connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


def _private_lane(worker: Any, connector: Any) -> Any:
    from vllm.config import set_current_vllm_config

    stock = worker.model_runner
    lane = new_runner(worker)
    with set_current_vllm_config(worker.vllm_config):
        for name in SHARED_NAMES:
            setattr(lane, name, getattr(stock, name))
        if hasattr(stock, "lora_manager"):
            lane.lora_manager = stock.lora_manager
        # Everything but the cache itself, which exists and is bound to the model's layers.
        lane.initialize_kv_cache_tensors = lambda *args, **kwargs: {}
        lane.initialize_kv_cache(stock.kv_cache_config)
        del lane.initialize_kv_cache_tensors
        lane.kv_caches = stock.kv_caches
        share_workspace(stock, lane)
    # Its batches are not replayed from CUDA graphs, either.
    lane.cudagraph_dispatcher.keys_initialized = False
    lane._model_forward = without_compiled_code(lane._model_forward)
    if connector is not None:
        lane._model_forward = saving_complete_kv(lane._model_forward, connector)
    return lane


def share_workspace(stock: Any, lane: Any) -> None:
    """Share FlashInfer's workspace (hundreds of megabytes), empty between two operators."""
    shared = None
    for builder in _builders(stock):
        if shared is None and hasattr(builder, "_get_workspace_buffer"):
            shared = builder._get_workspace_buffer()
    for builder in _builders(lane):
        if shared is not None and hasattr(builder, "set_workspace_buffer"):
            builder.set_workspace_buffer(shared)


def _builders(runner: Any) -> list[Any]:
    return [
        builder
        for groups in runner.attn_groups
        for group in groups
        for builder in group.metadata_builders
    ]


def saving_complete_kv(forward: Callable[..., Any], connector: Any) -> Callable[..., Any]:
    """``forward``, after which ``connector`` saves KV only if it ends; vLLM always saves."""

    def saved(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except BaseException:
            connector.drop_saves()
            raise

    return saved


def without_compiled_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The original, uncompiled ``forward``: there are no checks in compiled code."""
    from vllm.forward_context import get_forward_context

    def eager(*args: Any, **kwargs: Any) -> Any:
        get_forward_context().skip_compiled = True
        return forward(*args, **kwargs)

    return eager


class _GivenUpError(BaseException):
    """Unwinds a suspended task. Not an ``Exception``, so that no code on the way catches it."""


@dataclass(slots=True)
class _Running:
    """A task on the worker's stack; ``stops`` has, for each suspension, a function that returns
    when the device reached the stop, and the time of the resumption."""

    task: int
    started_s: float
    stops: list[tuple[Callable[[], float], float]] = field(default_factory=list)

    def timing(self, ended_s: float) -> Timing:
        """When it ran."""
        stops = [(stopped_s(), resumed_s) for stopped_s, resumed_s in self.stops]
        return Timing(
            self.started_s,
            ended_s,
            sum(max(0.0, resumed_s - stopped_s) for stopped_s, resumed_s in stops),
            tuple(stopped_s for stopped_s, _ in stops),
        )


class TaskRunner:
    """Runs tasks on the thread that calls ``serve``; all workers get the same commands."""

    def __init__(
        self,
        words: ControlWords,
        receive: Callable[[], Command],
        answer: Callable[[Answer], None],
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._receive = receive
        self._answer = answer
        self._clock = clock
        self._worker: Any = None
        self._lanes: Any = None
        self._stack: list[_Running] = []
        self._exiting = False
        self.checks = Checks(words, self._suspended, rank, ranks)
        self.checks.pacer = Immediate(clock)

    def make_ready(self, worker: Any, depth: int) -> int:
        """Put checks into the model of vLLM's worker with its KV cache; returns their number."""
        self.checks.pacer = pacer_for(worker.device)
        checks = self.checks.install(worker.model_runner.get_model())
        self.attach(worker, Lanes(worker, depth))
        return checks

    def attach(self, worker: Any, lanes: Any) -> None:
        """Take vLLM's worker, complete with its KV cache, and its :class:`Lanes`."""
        self._worker = worker
        self._lanes = lanes

    def serve(self) -> None:
        """Carry out commands until :class:`Exit`."""
        self._exiting = False
        self._serve(None)

    def _serve(self, suspended: int | None) -> None:
        """Carry out commands until the ``suspended`` task resumes. Raises _GivenUpError."""
        while not self._exiting:
            command = self._receive()
            match command:
                case RunTask():
                    self._run(command)
                case ResumeTask(task) if task == suspended:
                    return
                case DiscardTask(task) if task == suspended:
                    raise _GivenUpError
                case CallWorker():
                    _call(command, suspended)
                case Exit():
                    self._exiting = True
        if suspended is not None:
            raise _GivenUpError

    def _run(self, run: RunTask) -> None:
        import torch  # takes seconds, and an engine has done it

        lanes = self._lanes
        lane = lanes.private[len(self._stack)] if run.checked else lanes.stock
        if run.checked and not self._stack:
            self.checks.pacer.start()
        running = _Running(run.task, self._clock())
        self._stack.append(running)
        answer: Answer
        try:
            # vLLM makes a batch in inference mode, and its mask of allowed tokens can be changed in
            # that mode only.
            with torch.inference_mode(), self.checks.running(run.task if run.checked else 0):
                lanes.enter(lane, run.batch)
                try:
                    output, drafts = self._compute(lane, run)
                finally:
                    lanes.leave(lane)
            answer = Done(run.task, output, drafts, running.timing(self._clock()))
        except _GivenUpError:
            answer = Discarded(run.task, running.timing(self._clock()))
        except Exception as error:
            answer = Failed(run.task, error, running.timing(self._clock()))
        finally:
            self._stack.pop()
        self._answer(answer)

    def _compute(self, lane: Any, run: RunTask) -> tuple[Any, Any]:
        """Compute one batch on ``lane``; the output and the drafts."""
        import torch

        worker = self._worker
        outer, threads = worker.model_runner, torch.get_num_threads()
        worker.model_runner = lane
        try:
            output = worker.execute_model(run.batch)
            if output is not None:
                return output, None
            output = worker.sample_tokens(run.grammar)
            drafts = worker.take_draft_token_ids()
            if drafts is not None:
                # vLLM returns the list of the lane's batch, which is emptied after the task.
                drafts.req_ids = list(drafts.req_ids)
                # numba, which finds n-grams, sets OpenMP's number of threads in this thread. The
                # attention of a suspended task was prepared for the former one. On CPUs vLLM has
                # made torch.set_num_threads do nothing.
                torch._C.set_num_threads(threads)
            return output, drafts
        finally:
            worker.model_runner = outer

    def _suspended(self) -> None:
        running = self._stack[-1]
        stopped_s = self.checks.pacer.stop()
        try:
            with self._lanes.nested():
                self._serve(running.task)
        finally:
            running.stops.append((stopped_s, self._clock()))


def _call(call: CallWorker, suspended: int | None) -> None:
    if suspended is not None:
        call.result.set_exception(RuntimeError("the worker is busy with a preempted task"))
        return
    try:
        call.result.set_result(call.function())
    except BaseException as error:
        call.result.set_exception(error)
