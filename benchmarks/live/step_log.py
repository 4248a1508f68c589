"""The steps of stock vLLM, whose scheduler notes them here. To import it imports vLLM."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sluice.scheduling.latency.model import StepSample
from sluice.telemetry.records import RecordLog

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _Noting(_Base):
    """Notes each step, and changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps = RecordLog(Path(os.environ["SLUICE_STEP_LOG"]))
        self._launched: dict[int, dict[str, Any]] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        tokens = output.num_scheduled_tokens
        if tokens:
            new = np.array(list(tokens.values()))
            after = np.array([self.requests[each].num_computed_tokens for each in tokens])
            work = StepSample.of_arrays(new, after - new)
            times = {"now_s": time.monotonic(), "cpu_s": time.thread_time()}
            self._launched[id(output)] = {**times, "work": work}
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().update_from_output(scheduler_output, *args, **kwargs)
        step = self._launched.pop(id(scheduler_output), None)
        if step is not None:
            self._steps.write({**step, "end_s": time.monotonic()})
        return found


class NotingScheduler(_Noting, Scheduler):
    """vLLM's, where it waits for each batch."""


class NotingAsyncScheduler(_Noting, AsyncScheduler):
    """vLLM's, where it schedules a batch while the one before it runs."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> NotingScheduler | NotingAsyncScheduler:
    """The scheduler, for vLLM's ``scheduler_cls``."""
    own = vllm_config.scheduler_config.async_scheduling
    return (NotingAsyncScheduler if own else NotingScheduler)(vllm_config=vllm_config, **kwargs)
