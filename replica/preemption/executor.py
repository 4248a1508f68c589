"""vLLM's executor with its worker on a thread of its own, which takes tasks while it computes."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from sluice.replica.preemption.control_block import ControlWords
from sluice.replica.preemption.messages import Answer, CallWorker, Command, Died, Exit
from sluice.replica.preemption.reserve import Reserve, keep
from sluice.replica.preemption.worker import TaskRunner
from sluice.replica.preemption_config import PreemptionConfig
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.cpu_cores import pin_thread
from sluice.replica.vllm.setup import survive_module_scan

logger = logging.getLogger(__name__)

WARMS_UP_APART: Final = hasattr(UniProcExecutor, "compile_or_warm_up_model")
"""Whether vLLM compiles and warms up in a call of its own, after it has made the KV cache."""

_EXIT_LIMIT_S = 10.0


class PreemptiveExecutor(UniProcExecutor):
    """One worker, on one thread for its whole life.

    All of vLLM's calls to the worker run on that thread. Tasks are sent as messages, so that one
    can arrive while another runs.

    Attributes:
        answers: the worker's answers, in order. Only the engine's thread reads them.
        words: the control words.
        checks: how many checks the model has.
        reserve: memory that is kept for suspended prefills.
    """

    reserve: Reserve

    def _init_executor(self) -> None:
        # This module has loaded compiled policies before the worker's modules are scanned.
        survive_module_scan()
        self.words = ControlWords.create()
        self.answers: deque[Answer] = deque()
        self.checks = 0
        self._wake: Callable[[], None] = nothing
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._tasks = TaskRunner(self.words, self._commands.get, self._answered)
        # A daemon, so that a process whose engine failed can end.
        self._thread = threading.Thread(target=self._serve, name="worker", daemon=True)
        self._thread.start()
        self._on_thread(super()._init_executor)

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker, when no task is in flight."""
        if threading.current_thread() is self._thread:
            return super().collective_rpc(*args, **kwargs)
        return self._on_thread(partial(super().collective_rpc, *args, **kwargs))

    def take_draft_token_ids(self) -> None:
        """Nothing: each task's answer has its drafts."""

    def determine_available_memory(self) -> list[int]:
        """Bytes available for the KV cache: without the reserve for suspended prefills."""
        return keep(self, super().determine_available_memory())

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """Make the KV cache; up to vLLM 0.28 also complete the worker."""
        super().initialize_from_config(kv_cache_configs)
        if not WARMS_UP_APART:
            self._make_ready()

    def compile_or_warm_up_model(self) -> None:
        """Complete the worker, and make it ready for tasks (from vLLM 0.29)."""
        super().compile_or_warm_up_model()
        self._make_ready()

    def _make_ready(self) -> None:
        settings = SchedulerSettings.from_additional_config(self.vllm_config.additional_config)
        options = settings.preemption
        if settings.cpu_core is not None:
            # A thread inherits the pinning of the thread that starts it, which was not pinned yet.
            self._on_thread(partial(pin_thread, settings.cpu_core))
        if options.granularity != "off":
            self._on_thread(partial(self._attach, options))

    def tell(self, command: Command) -> None:
        """Send a command to the worker."""
        self._commands.put(command)

    def on_answer(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on the worker's thread, after each answer."""
        self._wake = wake

    def shutdown(self) -> None:
        """Discard all tasks, and end the worker."""
        if not self._thread.is_alive():
            return
        self.tell(Exit())
        self.words.stop_any()
        self._thread.join(_EXIT_LIMIT_S)
        if not self._thread.is_alive():  # otherwise it hangs, and ends with the process
            super().shutdown()

    def _attach(self, options: PreemptionConfig) -> None:
        self.checks = self._tasks.make_ready(self.driver_worker.worker, options)
        logger.info("a prefill can stop at %d points", self.checks)

    def _serve(self) -> None:
        try:
            self._tasks.serve()
        except BaseException as error:
            self._answered(Died(error))

    def _answered(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._wake()

    def _on_thread(self, function: Callable[[], Any]) -> Any:
        result: Future[Any] = Future()
        self.tell(CallWorker(function, result))
        return result.result()


def nothing() -> None:
    """No callback for answers is registered yet."""
