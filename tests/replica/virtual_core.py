"""Stock vLLM's core with the timed device in virtual time. To import it imports vLLM."""

from __future__ import annotations

import random
import tempfile
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from sluice.replica.vllm.local_model import local_model
from sluice.simulation.workload import Arrival

from . import in_process  # noqa: F401  # isort: skip  # it sets what vLLM reads on import
from sluice.benchmarks.live.step_rates import Core  # isort: skip

from .in_process import params_of, random_prompt
from .recorded import ARGS, FrontEnd, seen, workload
from .timed_device import TimedDevice, Times, VirtualClock


class VirtualDevice(TimedDevice):
    """Takes its times, of no one's clock."""

    times = Times(scale=1.0)


class VirtualCore:
    """vLLM's core with its own scheduler, and two batches in flight; they take no time."""

    def __init__(self) -> None:
        VirtualDevice.clock = self._clock = VirtualClock()
        with tempfile.TemporaryDirectory() as name:
            model = local_model(Path(name) / "model", layers=1, hidden=64)
            self._core = Core(model, Path(name), VirtualDevice, "fcfs", _ARGS)
        self._runs = 0

    def run(self, load: float) -> dict[str, float]:
        """The figures of a load, behind :class:`FrontEnd`."""
        arrivals, core, clock = workload(load).arrivals, self._core.core, self._clock
        core.scheduler = self._core.schedulers["stock"]
        self._runs += 1
        start_s, front = clock.now_s(), FrontEnd([each.arrival_s for each in arrivals])
        tokens = [each.output_tokens for each in arrivals]
        following: list[int] = (np.cumsum(tokens) - tokens).tolist()
        while True:
            for key in front.arrived(clock.now_s() - start_s):
                core.scheduler.add_request(self._request(key, arrivals[key]))
            if core.scheduler.has_requests() or core.batch_queue:
                outputs, executed = core.step_fn()
                core.post_step(executed)
                emitted = []
                for client in (outputs or {}).values():
                    for key in (int(each.request_id.split("-")[1]) for each in client.outputs):
                        emitted.append(following[key])
                        following[key] += 1
                front.emitted(emitted, clock.now_s() - start_s)
            elif (next_s := front.next_s()) < inf:
                clock.wait_until(start_s + next_s + 1e-6)  # not before it, by rounding
            else:
                return seen(front, arrivals)

    def _request(self, key: int, arrival: Arrival) -> Any:
        from vllm.v1.request import Request

        prompt: list[int] = []
        for block in arrival.block_hashes:
            prompt += random_prompt(random.Random(f"{self._runs} {block}"), 128)
        chance = random.Random(f"{self._runs}-{key}")
        prompt += random_prompt(chance, arrival.prompt_tokens - len(prompt))
        name, params = f"{self._runs}-{key}", params_of("", arrival.output_tokens, None)
        hasher = self._core.core.request_block_hasher
        return Request(name, prompt, params, None, block_hasher=hasher)

    def close(self) -> None:
        """End it."""
        self._core.core.shutdown()


_ARGS = {name: each for name, each in ARGS.items() if name != "distributed-executor-backend"}
