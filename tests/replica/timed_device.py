"""A device that only takes time: what vLLM's loop does beside a GPU, on a machine without one.

``"distributed-executor-backend": "tests.replica.timed_device.TimedDevice"`` among vLLM's arguments
puts it under stock vLLM and Sluice alike. Each token is the same one. A batch takes the larger
of its launch, for which the engine's loop is busy, and of what the device needs for its tokens, one
batch after the other. ``SLUICE_TIMED_DEVICE`` holds fields of ``Times``, as JSON."""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from .known_model import KnownModel

TOKEN = 300


class Times(NamedTuple):
    """Seconds, by default those of an 8B model on an H100 (``docs/results/gpu.md``):
    of a batch and each of its tokens on the device, and of its launch, which is longer with a
    prefill, and longest with more than ``graph_tokens`` of it."""

    fixed_s: float = 6.5e-3
    token_s: float = 20e-6
    decode_launch_s: float = 2.5e-3
    launch_s: float = 9e-3
    long_launch_s: float = 20e-3
    graph_tokens: int = 511
    scale: float = 4.0
    asynchronous: bool = True

    def device_s(self, prefill: int, decodes: int) -> float:
        """What the device needs for a batch with so many tokens of prefill, and decodes."""
        return self.scale * (self.fixed_s + self.token_s * (prefill + decodes))

    def launched_s(self, prefill: int) -> float:
        """How long the loop is busy with its launch."""
        if not prefill:
            return self.scale * self.decode_launch_s
        long = prefill > self.graph_tokens
        return self.scale * (self.long_launch_s if long else self.launch_s)


class Result:
    """What the device returns, at a time."""

    def __init__(self, output: Any, at_s: float = 0.0) -> None:
        self._output = output
        self._at_s = at_s

    def result(self) -> Any:
        time.sleep(max(0.0, self._at_s - time.monotonic()))
        return self._output


class TimedDevice(UniProcExecutor):
    """See the module."""

    times = Times(**json.loads(os.environ.get("SLUICE_TIMED_DEVICE", "{}")))

    def _init_executor(self) -> None:
        super()._init_executor()
        # vLLM turns it off on CPUs, whose model runner cannot. The schedulers are made after this.
        self.vllm_config.scheduler_config.async_scheduling = self.times.asynchronous
        self._free_s = 0.0
        self._model = KnownModel(lambda *_: TOKEN)

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        began_s = time.monotonic()
        for name in output.finished_req_ids:
            self._model.forget(name)
        tokens = list(output.num_scheduled_tokens.values())
        self._ran = Result(self._model.run(output), self._launch(began_s, tokens))
        return Result(None) if tokens else self._ran

    def _launch(self, began_s: float, tokens: list[int]) -> float:
        """Be busy with the launch of a batch of sequences of ``tokens``. When it ends."""
        if tokens:
            decodes = tokens.count(1)
            prefill = sum(tokens) - decodes
            busy_s = time.thread_time() + self.times.launched_s(prefill)
            while time.thread_time() < busy_s:
                pass
            ends_s = max(began_s, self._free_s) + self.times.device_s(prefill, decodes)
            self._free_s = max(time.monotonic(), ends_s)
        return self._free_s

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self._ran if non_block else self._ran.result()
