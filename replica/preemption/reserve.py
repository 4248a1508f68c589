"""Memory reserve for suspended prefills, which vLLM's profile of one batch does not contain.

A suspended prefill keeps the tensors of its call stack: in a layer of vLLM's Llama ``4h + I``
elements of each token (width ``h``, intermediate size ``I``), in Qwen2 ``4h + 3I``. As this depends
on the model's code it is measured in a pass of dummy tokens, at each check; it is proportional to
tokens. Each prefill also has a model runner with its buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from sluice.replica.preemption.checks import Checks, Immediate
from sluice.replica.preemption.messages import ControlWords
from sluice.replica.preemption.worker import new_runner, without_compiled_code
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.scheduling.preemption import TaskBounds

logger = logging.getLogger(__name__)

_TOKENS = 256
"""Max tokens of the pass that is measured."""

_ADVICE = "lower max-num-batched-tokens in engine.vllm_args"


class NoMemoryError(ValueError):
    """Suspended prefills leave too little memory for the KV cache."""


class Need(NamedTuple):
    """The measured need of one worker: activations that a suspended prefill holds per token,
    buffers of one model runner, and unused memory before there is a KV cache. Bytes."""

    token: float
    runner: int
    free: int


class Reserve(NamedTuple):
    """The memory that one worker keeps free: for ``prefills`` suspended ones of ``tokens`` tokens,
    of ``prefill`` bytes each, and one model runner more than these, of ``runner`` bytes each."""

    prefills: int
    tokens: int
    prefill: int
    runner: int

    @classmethod
    def of(cls, needs: list[Need], bounds: TaskBounds, max_tokens: int) -> Reserve:
        """What every worker keeps free: the max of all workers' needs."""
        tokens = min(max_tokens, bounds.chunk_tokens)
        prefill = round(max(need.token for need in needs) * tokens)
        return cls(bounds.depth, tokens, prefill, max(need.runner for need in needs))

    @property
    def total(self) -> int:
        """All of it."""
        return self.prefills * self.prefill + (self.prefills + 1) * self.runner

    def __str__(self) -> str:
        return (
            f"{_mib(self.total)} for {self.prefills} suspended prefills of {self.tokens} tokens "
            f"({_mib(self.prefill)} each) and {self.prefills + 1} model runners "
            f"({_mib(self.runner)} each)"
        )

    def left(self, available: int, free: int, stated: bool) -> int:
        """Bytes for the KV cache on one worker. A size that the user ``stated`` is not reduced.
        Raises NoMemoryError: nothing is left, or the stated size does not fit beside it."""
        if stated and available + self.total > free:
            raise NoMemoryError(
                f"kv-cache-memory-bytes is {_mib(available)} and preemption needs {self}, but only "
                f"{_mib(free)} are free: {_ADVICE}, or the KV cache"
            )
        if not stated and self.total >= available:
            raise NoMemoryError(
                f"preemption needs {self}, but vLLM has only {_mib(available)} beside the model: "
                f"{_ADVICE}, or raise gpu-memory-utilization"
            )
        return available if stated else available - self.total


def keep(executor: Any, available: list[int]) -> list[int]:
    """Bytes for the KV cache by worker; sets the executor's ``reserve``. Raises NoMemoryError."""
    config = executor.vllm_config
    bounds = SchedulerSettings.from_additional_config(config.additional_config).preemption
    assert bounds is not None
    needs = executor.collective_rpc(measure)
    reserve = Reserve.of(needs, bounds, config.scheduler_config.max_num_batched_tokens)
    free = min(need.free for need in needs)
    stated = config.cache_config.kv_cache_memory_bytes is not None
    left = [reserve.left(each, free, stated) for each in available]
    logger.info("preemption keeps %s free", reserve)
    executor.reserve = reserve
    return left


# Functions that run in the workers.


def measure(wrapper: Any) -> Need:
    """The memory that a vLLM worker with a loaded model needs for one suspended prefill."""
    import torch
    from vllm.config import set_current_vllm_config

    from sluice.replica.preemption.live_memory import LiveMemory

    worker = wrapper.worker
    runner = worker.model_runner
    buffers = LiveMemory(worker.device)
    with buffers:
        another = new_runner(worker)
    runner_bytes = buffers.bytes()
    del another
    tokens = min(_TOKENS, runner.max_num_tokens)
    with set_current_vllm_config(worker.vllm_config):
        held = held_bytes(
            runner.get_model(),
            worker.device,
            lambda: runner._dummy_run(tokens, is_profile=True),
        )
    if worker.device.type == "cpu":
        # The workers share it.
        free = int(psutil.virtual_memory().available) // int(worker.parallel_config.world_size)
    else:
        free = int(torch.cuda.mem_get_info(worker.device)[0])
    return Need(held / tokens, runner_bytes, free)


def held_bytes(model: Any, device: Any, forward: Callable[[], object]) -> int:
    """Max bytes on ``device`` that ``forward``, a pass of ``model``, holds at a check."""
    from torch import inference_mode

    from sluice.replica.preemption.live_memory import LiveMemory

    live = LiveMemory(device)
    held = 0

    class Meter(Immediate):
        def pace(self) -> None:
            nonlocal held
            held = max(held, live.bytes())

    checks = Checks(ControlWords.create(), lambda: None)
    checks.pacer = Meter()
    checks.install(model)
    compiled = model.forward
    model.forward = without_compiled_code(compiled)
    try:
        with checks.running(1), inference_mode(), live:
            forward()
    finally:
        del model.forward
        checks.remove()
    return held


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
