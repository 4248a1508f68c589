"""vLLM's executors whose workers take tasks while they compute: on one thread, or in processes."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from sluice.replica.preemption.messages import (
    Answer,
    CallWorker,
    Command,
    ControlWords,
    Died,
    Exit,
    Failed,
)
from sluice.replica.preemption.reserve import Reserve, keep
from sluice.replica.preemption.worker import TaskRunner
from sluice.replica.processes import end_with_parent, pin_thread
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.setup import survive_module_scan

_WARMS_UP_APART: Final = hasattr(Executor, "compile_or_warm_up_model")
"""Whether vLLM compiles and warms up in a call of its own, after it has made the KV cache."""

# The mixin is typed as the class that it is mixed into; the type checker does not follow vLLM's
# types.
if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class TaskExecutor(_Base):
    """Keeps memory for suspended prefills, and takes the workers' answers in order for the engine's
    thread. ``checks``: how many the model has."""

    words: ControlWords
    reserve: Reserve

    def _init_answers(self) -> None:
        self.answers: deque[Answer] = deque()
        self.checks = 0
        self.wake: Callable[[], None] = lambda: None
        """Called on another thread after each answer."""

    def take_draft_token_ids(self) -> None:
        """Nothing: each task's answer has its drafts."""

    def determine_available_memory(self) -> list[int]:
        """Bytes available for the KV cache on each worker, without the reserve."""
        return keep(self, super().determine_available_memory())

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """Make the KV caches; up to vLLM 0.28 also complete the workers."""
        super().initialize_from_config(kv_cache_configs)
        if not _WARMS_UP_APART:
            self._take_tasks()

    def compile_or_warm_up_model(self) -> None:
        """Complete the workers, and make them ready for tasks (from vLLM 0.29)."""
        super().compile_or_warm_up_model()
        self._take_tasks()

    def _take_tasks(self) -> None:
        settings = SchedulerSettings.from_additional_config(self.vllm_config.additional_config)
        assert settings.preemption is not None
        self.checks = self._make_ready(settings.preemption.depth, settings.cpu_core)
        logger.info("a prefill can stop at %d points", self.checks)

    def _answered(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.wake()


class PreemptiveExecutor(TaskExecutor, UniProcExecutor):
    """One worker, on one thread for its life; tasks are messages, so one can arrive meanwhile."""

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

    def _make_ready(self, depth: int, cpu_core: int | None) -> int:
        if cpu_core is not None:
            # A thread inherits the pinning of the thread that starts it, which was not pinned yet.
            self._on_thread(partial(pin_thread, cpu_core))
        return self._on_thread(partial(self._tasks.make_ready, self.driver_worker.worker, depth))

    def tell(self, command: Command) -> None:
        """Send a command to the worker."""
        self._commands.put(command)

    def shutdown(self) -> None:
        """Discard all tasks, and end the worker."""
        if not self._thread.is_alive():
            return
        self.tell(Exit())
        self.words.stop_any()
        self._thread.join(10.0)
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


logger = logging.getLogger(__name__)


class PreemptiveGroupExecutor(TaskExecutor, MultiprocExecutor):
    """Several workers, for tensor parallelism. While tasks are in flight each is inside one call of
    ``_serve``, with commands over its own connection; the call ends before any other call to it."""

    def _init_executor(self) -> None:
        self._init_answers()
        self._serving: Future[Any] | None = None
        self._connections: list[Connection] = []
        self._ending = False
        super()._init_executor()

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """Call a method of all workers, when no task is in flight."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._send(Exit())
            serving.result()
        return super().collective_rpc(*args, **kwargs)

    def _make_ready(self, depth: int, _cpu_core: int | None) -> int:
        with tempfile.TemporaryDirectory(prefix="sluice-tasks-", dir="/dev/shm") as name:
            path, address = Path(name) / "words", str(Path(name) / "workers")
            self.words = ControlWords.create(path)
            with Listener(address, "AF_UNIX", backlog=self.world_size) as listener:
                args = path, address, depth, self.world_size
                attached = self.collective_rpc(_attach, args=args, non_block=True)
                self._connections = [listener.accept() for _ in range(self.world_size)]
                checks: int = attached.result()[0]
        threading.Thread(target=self._take_answers, name="answers", daemon=True).start()
        return checks

    def tell(self, command: Command) -> None:
        """Send a command to all workers."""
        if self._serving is None:
            self._serving = super().collective_rpc(_serve, non_block=True)
        self._send(command)

    def shutdown(self) -> None:
        """End the workers."""
        self._ending = True
        if self._serving is not None and not self.is_failed:
            self._serving = None
            with contextlib.suppress(OSError):
                self._send(Exit())
        super().shutdown()

    def _send(self, command: Command) -> None:
        data = pickle.dumps(command)
        for connection in self._connections:
            connection.send_bytes(data)

    def _take_answers(self) -> None:
        """Take the answers of the first worker; the others answer only if they fail."""
        try:
            while True:
                for ready in wait(self._connections):
                    assert isinstance(ready, Connection)
                    answer: Answer = pickle.loads(ready.recv_bytes())
                    if isinstance(answer, Failed):
                        raise answer.error
                    self._answered(answer)
        except Exception as error:
            if self._ending and not self.is_failed:
                return
            # After a worker has failed, others may wait for it indefinitely, in a loop that ignores
            # signals.
            for worker in self.workers:
                worker.proc.kill()
            self._answered(Died(error))


# Functions that run in the workers.


def _attach(wrapper: Any, words: Path, address: str, depth: int, ranks: int) -> int:
    """Make a worker ready for tasks; returns the number of checks in its model."""
    end_with_parent()
    connection = Client(address, "AF_UNIX")
    worker = wrapper.worker
    rank = worker.rank

    def receive() -> Command:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return Exit()  # the engine is gone

    def answer(given: Answer) -> None:
        if isinstance(given, Failed):
            logger.error("a task failed", exc_info=given.error)
            # Not every error can be pickled.
            given = given._replace(error=RuntimeError(f"worker {rank}: {given.error!r}"))
        elif rank != 0:
            return
        connection.send_bytes(pickle.dumps(given))

    runner = TaskRunner(ControlWords.open(words), receive, answer, rank=rank, ranks=ranks)
    checks = runner.make_ready(worker, depth)
    worker.sluice_tasks = runner
    return checks


def _serve(wrapper: Any) -> None:
    """Carry out tasks until :class:`~sluice.replica.preemption.messages.Exit`."""
    wrapper.worker.sluice_tasks.serve()
