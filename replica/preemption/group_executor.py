"""vLLM's executor of several workers, each in a process of its own, which can take tasks while they
compute one together."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import contextlib
import logging
import pickle
import tempfile
import threading
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from sluice.replica.preemption.control_block import ControlWords
from sluice.replica.preemption.messages import Answer, Command, Died, Exit, Failed
from sluice.replica.preemption.task_executor import TaskExecutor
from sluice.replica.preemption.worker import TaskRunner
from sluice.replica.processes import end_with_parent
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.scheduling.preemption import PreemptionConfig

logger = logging.getLogger(__name__)


class PreemptiveGroupExecutor(TaskExecutor, MultiprocExecutor):
    """Several workers, for tensor parallelism.

    While tasks are in flight each worker is inside one call of vLLM's, :func:`_serve`, and gets its
    commands over its own connection. That call ends before any other call to the workers.
    """

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

    def _make_ready(self, settings: SchedulerSettings) -> int:
        with tempfile.TemporaryDirectory(prefix="sluice-tasks-", dir="/dev/shm") as name:
            path, address = Path(name) / "words", str(Path(name) / "workers")
            self.words = ControlWords.create(path)
            with Listener(address, "AF_UNIX", backlog=self.world_size) as listener:
                attached = self.collective_rpc(
                    _attach,
                    args=(path, address, settings.preemption, self.world_size),
                    non_block=True,
                )
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


def _attach(wrapper: Any, words: Path, address: str, options: PreemptionConfig, ranks: int) -> int:
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
            # Not every error can be sent.
            told = RuntimeError(f"worker {rank}: {given.error!r}")
            given = given._replace(error=told)
        elif rank != 0:
            return
        connection.send_bytes(pickle.dumps(given))

    runner = TaskRunner(ControlWords.open(words), receive, answer, rank=rank, ranks=ranks)
    checks = runner.make_ready(worker, options)
    worker.sluice_tasks = runner
    return checks


def _serve(wrapper: Any) -> None:
    """Carry out tasks until :class:`~sluice.replica.preemption.messages.Exit`."""
    wrapper.worker.sluice_tasks.serve()
