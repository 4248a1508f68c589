"""One real vLLM engine in this process whose prefills can be preempted."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sluice.benchmarks.live.engines import OneEngine, Result, Work
from sluice.replica.preemption.checks import Granularity
from sluice.replica.preemption_config import PreemptionConfig
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, to_xargs
from sluice.scheduling.preemption import Options
from sluice.scheduling.request.objective import SLO

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
        self, model: Path, directory: Path, options: Mapping[str, Any], ranks: int = 1, **args: Any
    ) -> None:
        super().__init__()
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        from sluice.replica.preemption.support import executor
        from sluice.replica.preemption.variant import FACTORY

        path = directory / "state"
        self.table = StateTable.create(_MOST_LIVE, path)
        preemption = PreemptionConfig(**options)
        settings = SchedulerSettings(state_table=path, policy="s_edf", preemption=preemption)
        self._start(
            model,
            async_scheduling=False,
            tensor_parallel_size=ranks,
            distributed_executor_backend=executor(ranks),
            scheduler_cls=FACTORY,
            additional_config=settings.to_additional_config(),
            block_size=32,
            max_num_seqs=16,
            **args,
        )
        self.core: Any = self._llm.llm_engine.engine_core.engine_core
        self.core.input_queue = queue.Queue()
        self.core._handle_client_request = self._handle
        self.scheduler: Any = self.core.scheduler
        self.executor: Any = self.core.model_executor
        self._checks: Any = self.executor._tasks.checks if ranks == 1 else None

    def add(self, work: Work, arrived_s: float | None = None) -> None:
        """A request arrives now, or arrived some time ago; on the engine's thread."""
        now_s = time.monotonic() if arrived_s is None else arrived_s
        args = RequestArgs(work.name, now_s, SLO(ttft_s=work.ttft_s), work.best_effort)
        request = self._request(work, now_s, extra_args=to_xargs(args))
        self._llm.llm_engine.add_request(*request)

    def post(self, action: Callable[[], None]) -> None:
        """Have the engine's thread run ``action`` when it next reads events; from any thread."""
        from vllm.v1.engine import EngineCoreRequestType

        self.core.input_queue.put_nowait((EngineCoreRequestType.ADD, action))

    def run(self) -> dict[str, Result]:
        """Run until no request is left and no event waits."""
        results: dict[str, Result] = {}
        while not self.core.input_queue.empty():
            self._handle(*self.core.input_queue.get_nowait())
        while self._llm.llm_engine.has_unfinished_requests() or self.stack:
            self._step(results)
        self._arrived_s.clear()
        self._first_s.clear()
        return results

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
    def stack(self) -> tuple[Any, ...]:
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
