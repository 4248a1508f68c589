"""vLLM's executor with its worker on a thread of its own, which takes tasks while it computes."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from sluice.replica.preemption.control_block import ControlWords
from sluice.replica.preemption.messages import CallWorker, Command, Died, Exit
from sluice.replica.preemption.task_executor import TaskExecutor
from sluice.replica.preemption.worker import TaskRunner
from sluice.replica.processes import pin_thread
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.setup import survive_module_scan

_EXIT_LIMIT_S = 10.0


class PreemptiveExecutor(TaskExecutor, UniProcExecutor):
    """One worker, on one thread for its whole life.

    All of vLLM's calls to the worker run on that thread. Tasks are sent as messages, so that one
    can arrive while another runs.
    """

    def _init_executor(self) -> None:
        # This module has loaded compiled policies before the worker's modules are scanned.
        survive_module_scan()
        self._init_answers()
        self.words = ControlWords.create()
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

    def _make_ready(self, settings: SchedulerSettings) -> int:
        if settings.cpu_core is not None:
            # A thread inherits the pinning of the thread that starts it, which was not pinned yet.
            self._on_thread(partial(pin_thread, settings.cpu_core))
        attach = partial(self._tasks.make_ready, self.driver_worker.worker, settings.preemption)
        return self._on_thread(attach)

    def tell(self, command: Command) -> None:
        """Send a command to the worker."""
        self._commands.put(command)

    def shutdown(self) -> None:
        """Discard all tasks, and end the worker."""
        if not self._thread.is_alive():
            return
        self.tell(Exit())
        self.words.stop_any()
        self._thread.join(_EXIT_LIMIT_S)
        if not self._thread.is_alive():  # otherwise it hangs, and ends with the process
            super().shutdown()

    def _serve(self) -> None:
        try:
            self._tasks.serve()
        except BaseException as error:
            self._answered(Died(error))

    def _on_thread(self, function: Callable[[], Any]) -> Any:
        result: Future[Any] = Future()
        self.tell(CallWorker(function, result))
        return result.result()
