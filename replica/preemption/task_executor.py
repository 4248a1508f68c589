"""What vLLM's executors that take tasks have in common, with one worker or several."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.executor.abstract import Executor

from sluice.replica.preemption.control_block import ControlWords
from sluice.replica.preemption.messages import Answer
from sluice.replica.preemption.reserve import Reserve, keep
from sluice.replica.scheduler.xargs import SchedulerSettings

logger = logging.getLogger(__name__)

_WARMS_UP_APART: Final = hasattr(Executor, "compile_or_warm_up_model")
"""Whether vLLM compiles and warms up in a call of its own, after it has made the KV cache."""

# The mixin is typed as the class that it is mixed into; the type checker does not follow vLLM's
# types.
if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class TaskExecutor(_Base):
    """Keeps memory for suspended prefills, makes workers ready for tasks when vLLM has completed
    them, and takes their answers.

    Attributes:
        answers: the workers' answers, in order. Only the engine's thread reads them.
        words: the control words.
        checks: how many checks the model has.
        reserve: memory that each worker keeps for suspended prefills.
    """

    words: ControlWords
    reserve: Reserve

    def _init_answers(self) -> None:
        self.answers: deque[Answer] = deque()
        self.checks = 0
        self._wake: Callable[[], None] = _nothing

    def _make_ready(self, settings: SchedulerSettings) -> int:
        """Make the workers ready for tasks; returns the number of checks in their model."""
        raise NotImplementedError

    def take_draft_token_ids(self) -> None:
        """Nothing: each task's answer has its drafts."""

    def determine_available_memory(self) -> list[int]:
        """Bytes available for the KV cache on each worker: without the reserve for suspended
        prefills."""
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
        config = self.vllm_config.additional_config
        self.checks = self._make_ready(SchedulerSettings.from_additional_config(config))
        logger.info("a prefill can stop at %d points", self.checks)

    def on_answer(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on another thread, after each answer."""
        self._wake = wake

    def _answered(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._wake()


def _nothing() -> None:
    """No callback for answers is registered yet."""
