"""A device that only takes time: what vLLM's loop does beside a GPU, on a machine without one.

``"distributed-executor-backend": "tests.replica.timed_device.TimedDevice"`` among vLLM's arguments
puts it under stock vLLM and Sluice alike. Each token is the same one. A batch takes the larger
of its launch, for which the engine's loop is busy, and of what the device needs for it, one
batch after the other. ``SLUICE_TIMED_DEVICE`` holds ``scale`` and ``asynchronous`` as JSON."""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from sluice.replica.vllm.setup import survive_module_scan
from sluice.scheduling.latency.model import StepSample

from .gpu_device import H100, Device
from .known_model import KnownModel

TOKEN = 300


class Times(NamedTuple):
    """A device with times ``scale`` as long, and whether vLLM prepares a batch while one runs."""

    device: Device = H100
    scale: float = 4.0
    asynchronous: bool = True


class Clock:
    """That of this machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def busy_until(self, at_s: float) -> None:
        # Not in processor time: a GPU machine has a core for it, whatever else runs on this one.
        while time.monotonic() < at_s:
            pass

    def wait_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - time.monotonic()))


class VirtualClock(Clock):
    """Moves only by what the device takes."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def wait_until(self, at_s: float) -> None:
        self.at_s = max(self.at_s, at_s)

    busy_until = wait_until


class Result:
    """What the device returns, at a time."""

    def __init__(self, output: Any, clock: Clock, at_s: float = 0.0) -> None:
        self._output = output
        self._clock = clock
        self._at_s = at_s

    def result(self) -> Any:
        self._clock.wait_until(self._at_s)
        return self._output


class TimedDevice(UniProcExecutor):
    """See the module."""

    clock = Clock()
    times = Times(**json.loads(os.environ.get("SLUICE_TIMED_DEVICE", "{}")))

    def _init_executor(self) -> None:
        survive_module_scan()
        super()._init_executor()
        # vLLM turns it off on CPUs, whose model runner cannot. The schedulers are made after this.
        self.vllm_config.scheduler_config.async_scheduling = self.times.asynchronous
        self._free_s = 0.0
        self._model = KnownModel(lambda *_: TOKEN)

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        began_s = self.clock.now_s()
        for name in output.finished_req_ids:
            self._model.forget(name)
        step = StepSample.of((new, start) for _, start, new in self._model.parts(output))
        ends_s = self._launch(began_s, step)
        self._ran = Result(self._model.run(output), self.clock, ends_s)
        return Result(None, self.clock) if step.new_tokens else self._ran

    def _launch(self, began_s: float, step: StepSample) -> float:
        """Be busy with the launch of a batch. When it ends."""
        if step.new_tokens:
            device, scale = self.times.device, self.times.scale
            launch_s = device.launches.launch_s(step.new_tokens, step.prefill_tokens)
            self.clock.busy_until(began_s + scale * launch_s)
            ends_s = max(began_s, self._free_s) + scale * device.model.step_s(step)
            self._free_s = max(self.clock.now_s(), ends_s)
        return self._free_s

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self._ran if non_block else self._ran.result()
