"""One real vLLM engine in this process, in which requests arrive at given checks of a prefill."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.benchmarks.live.engines.base import OneEngine, Result, Work, result_of
from sluice.replica.preemption.checks import Granularity
from sluice.replica.preemption.words import MAX_CHECKS
from sluice.replica.preemption_config import PreemptionConfig
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, to_xargs
from sluice.replica.vllm.setup import survive_module_scan
from sluice.scheduling.preemption import Options
from sluice.scheduling.request.objective import SLO

_STOP_LIMIT_S = 60.0

_MOST_LIVE = 4096
"""Requests at once."""


class PreemptiveEngine(OneEngine):
    """An engine core with a queue of events, as in a process of its own; only this class fills it.

    Args:
        model: the model's directory.
        directory: its state table is made there.
        options: of :class:`~sluice.replica.preemption_config.PreemptionConfig`.
        ranks: how many workers compute it; with several, each has a process of its own.
        args: vLLM's engine arguments.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        options: Mapping[str, Any],
        ranks: int = 1,
        **args: Any,
    ) -> None:
        super().__init__()
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if ranks > 1:
            # vLLM itself binds only one worker to each NUMA node.
            cores = sorted(os.sched_getaffinity(0))
            each = [str(cores[rank % len(cores)]) for rank in range(ranks)]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(each)
        from vllm import LLM

        from sluice.replica.preemption.support import executor
        from sluice.replica.preemption.variant import FACTORY

        survive_module_scan()
        path = directory / "state"
        self.table = StateTable.create(_MOST_LIVE, path)
        settings = SchedulerSettings(
            state_table=path, policy="s_edf", preemption=PreemptionConfig(**options)
        )
        defaults: dict[str, Any] = {
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 16 << 20,
            "block_size": 32,
            "enforce_eager": True,
        }
        self._llm: Any = LLM(
            model=str(model),
            async_scheduling=False,
            tensor_parallel_size=ranks,
            distributed_executor_backend=executor(ranks),
            disable_log_stats=True,
            scheduler_cls=FACTORY,
            additional_config=settings.to_additional_config(),
            **(defaults | args),
        )
        self.core: Any = self._llm.llm_engine.engine_core.engine_core
        self.core.input_queue = queue.Queue()
        self.core._handle_client_request = self._handle
        self.scheduler: Any = self.core.scheduler
        self.executor: Any = self.core.model_executor
        self._checks: Any = self.executor._tasks.checks if ranks == 1 else None
        self.stops = 0

    # Requests.

    def add(self, work: Work, arrived_s: float | None = None) -> None:
        """A request arrives now, or arrived some time ago; on the engine's thread."""
        from vllm import SamplingParams

        now_s = time.monotonic() if arrived_s is None else arrived_s
        self._arrived_s[work.name] = now_s
        params = SamplingParams(
            temperature=0.0,
            max_tokens=work.output,
            ignore_eos=True,
            logprobs=0,
            extra_args=self.extra_args(work, now_s),
        )
        prompt = {"prompt_token_ids": list(work.prompt)}
        self._llm.llm_engine.add_request(work.name, prompt, params)

    def extra_args(self, work: Work, arrived_s: float) -> dict[str, Any]:
        """vLLM's extra arguments of a request, in which Sluice's scheduler reads its objective."""
        slo = SLO(ttft_s=work.ttft_s, tpot_s=work.tpot_s)
        return to_xargs(RequestArgs(work.name, arrived_s, slo, work.best_effort))

    def abort(self, names: Sequence[str]) -> None:
        """Stop requests; on the engine's thread."""
        self._llm.llm_engine.abort_request(list(names))

    def post(self, action: Callable[[], None]) -> None:
        """Have the engine's thread run ``action`` when it next reads events; from any thread."""
        from vllm.v1.engine import EngineCoreRequestType

        self.core.input_queue.put_nowait((EngineCoreRequestType.ADD, action))

    def at_checks(
        self, actions: Mapping[int, Callable[[], None]], waits: Collection[int] | None = None
    ) -> None:
        """Run each of ``actions`` on the engine's thread when preemptible prefills have passed its
        number of checks in total, counted from now. Ends with the next :meth:`run`.

        Args:
            actions: by number of checks.
            waits: the checks that wait until their task receives the stop signal, so that it stops
                exactly there; default: all.
        """
        checks, words = self._checks, self.executor.words
        check = type(checks).check
        waits = actions.keys() if waits is None else waits
        passed = 0

        def checked() -> None:
            nonlocal passed
            passed += 1
            here = passed
            if here in actions:
                self.post(actions[here])
            if here in waits:
                limit_s = time.monotonic() + _STOP_LIMIT_S
                while not words.stops(checks.task):
                    if time.monotonic() > limit_s:
                        raise TimeoutError(f"the task at check {here} received no stop signal")
                    time.sleep(0)
                self.stops += 1
            check(checks)

        checks.check = checked

    def after_checks(self, actions: Sequence[tuple[int, Callable[[], None]]]) -> threading.Thread:
        """The same where the checks are in other processes: run each of ``actions`` soon after the
        running prefill has passed its number of checks since the action before.

        Returns:
            the watching thread, to be joined.
        """
        words = self.executor.words
        begun = self.scheduler._tasks

        def watch() -> None:
            nonlocal begun
            for checks, action in actions:
                limit_s = time.monotonic() + _STOP_LIMIT_S
                while time.monotonic() < limit_s:
                    task, passed = divmod(words.reached(), MAX_CHECKS)
                    if task > begun and passed >= checks:
                        begun = task
                        break
                    time.sleep(0)
                self.post(action)

        watcher = threading.Thread(target=watch)
        watcher.start()
        return watcher

    def run(self) -> dict[str, Result]:
        """Run until no request is left and no event waits."""
        engine = self._llm.llm_engine
        results: dict[str, Result] = {}
        while not self.core.input_queue.empty():
            self._handle(*self.core.input_queue.get_nowait())
        while engine.has_unfinished_requests() or self.stack:
            for item in engine.step():
                output = item.outputs[0]
                if output.token_ids:
                    self._first_s.setdefault(item.request_id, time.monotonic())
                if item.finished:
                    results[item.request_id] = self._result(item)
        self._arrived_s.clear()
        self._first_s.clear()
        vars(self._checks or self).pop("check", None)
        return results

    def _result(self, item: Any) -> Result:
        name = item.request_id
        first_s = self._first_s.get(name, float("inf"))
        return result_of(item.outputs[0], first_s - self._arrived_s[name])

    # Settings.

    def use(self, granularity: Granularity | None, **bounds: int) -> int:
        """Set other checks and bounds of tasks; returns the number of checks. Nothing may be live.
        Without checks, a task that receives the stop signal continues to its end."""
        model = self.executor.driver_worker.worker.model_runner.get_model()
        self._checks.remove()
        if granularity is None:
            self.executor.checks = 1
        else:
            self.executor.checks = self._checks.install(model, granularity)
        self.bound(**bounds)
        return int(self.executor.checks)

    def bound(self, **bounds: int) -> None:
        """Set other bounds of tasks, see :class:`~sluice.scheduling.preemption.Options`."""
        given = {"chunk": 8192, "late_chunk": 512, "together": 0, "most": 1024}
        self.scheduler.options = Options(**(given | bounds))

    @property
    def free_blocks(self) -> int:
        """Number of unused KV blocks."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def stack(self) -> Any:
        """Tasks in flight, as the engine sees them."""
        loop = self.core.__dict__.get("_preemption")
        return () if loop is None else tuple(loop._stack)

    @property
    def stats(self) -> Any:
        """Counts of its preemptions."""
        return self.core._preemption.stats

    def _handle(self, kind: Any, action: Callable[[], None]) -> None:
        """Replaces a core's handling of a client's requests."""
        from vllm.v1.engine import EngineCoreRequestType

        if kind == EngineCoreRequestType.ADD:
            action()
