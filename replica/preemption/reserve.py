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

from sluice.replica.preemption.checks import Checks, Granularity, Immediate
from sluice.replica.preemption.messages import ControlWords
from sluice.replica.preemption.worker import new_runner, without_compiled_code
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.scheduling.preemption import BATCH_TOKENS, PreemptionConfig

logger = logging.getLogger(__name__)

_TOKENS = 256
"""Max tokens of the pass that is measured."""

_MIB = 1 << 20


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


def reserve_of(needs: list[Need], options: PreemptionConfig, most_tokens: int) -> Reserve:
    """The memory that every worker keeps free: the max of all workers' needs."""
    tokens = min(most_tokens, max(options.chunk_tokens, BATCH_TOKENS))
    return Reserve(
        options.depth,
        tokens,
        round(max(need.token for need in needs) * tokens),
        max(need.runner for need in needs),
    )


def left_for_cache(available: int, reserve: Reserve, free: int, stated: bool) -> int:
    """Bytes for the KV cache on one worker. A size that the user ``stated`` is not reduced. Raises
    NoMemoryError: nothing is left, or the stated size does not fit beside the reserve."""
    advice = "lower engine.preemption.depth or engine.preemption.chunk_tokens"
    if stated:
        if available + reserve.total > free:
            raise NoMemoryError(
                f"kv-cache-memory-bytes is {_mib(available)} and preemption needs {reserve}, but "
                f"only {_mib(free)} are free: {advice}, or the KV cache"
            )
        return available
    if reserve.total >= available:
        raise NoMemoryError(
            f"preemption needs {reserve}, but vLLM has only {_mib(available)} beside the model: "
            f"{advice}, or raise gpu-memory-utilization"
        )
    return available - reserve.total


def keep(executor: Any, available: list[int]) -> list[int]:
    """Bytes for the KV cache by worker; sets the executor's ``reserve``. Raises NoMemoryError."""
    config = executor.vllm_config
    options = SchedulerSettings.from_additional_config(config.additional_config).preemption
    if options.granularity == "off":
        return available
    needs = executor.collective_rpc(measure, args=(options.granularity,))
    reserve = reserve_of(needs, options, config.scheduler_config.max_num_batched_tokens)
    free = min(need.free for need in needs)
    stated = config.cache_config.kv_cache_memory_bytes is not None
    left = [left_for_cache(each, reserve, free, stated) for each in available]
    logger.info("preemption keeps %s free", reserve)
    executor.reserve = reserve
    return left


# Functions that run in the workers.


def measure(wrapper: Any, granularity: Granularity) -> Need:
    """The memory that a vLLM worker with a loaded model needs for one suspended prefill."""
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
            granularity,
            worker.device,
            lambda: runner._dummy_run(tokens, is_profile=True),
        )
    return Need(held / tokens, runner_bytes, _free_bytes(worker))


def held_bytes(
    model: Any, granularity: Granularity, device: Any, forward: Callable[[], object]
) -> int:
    """Max bytes on ``device`` that ``forward``, a pass of ``model``, holds at a check."""
    from torch import inference_mode

    from sluice.replica.preemption.live_memory import LiveMemory

    live = LiveMemory(device)
    most = 0

    class Meter(Immediate):
        def pace(self) -> None:
            nonlocal most
            most = max(most, live.bytes())

    checks = Checks(ControlWords.create(), lambda: None)
    checks.pacer = Meter()
    checks.install(model, granularity)
    compiled = model.forward
    model.forward = without_compiled_code(compiled)
    try:
        with checks.running(1), inference_mode(), live:
            forward()
    finally:
        del model.forward
        checks.remove()
    return most


def _free_bytes(worker: Any) -> int:
    if worker.device.type == "cpu":
        # The workers share it.
        return int(psutil.virtual_memory().available) // int(worker.parallel_config.world_size)
    import torch

    return int(torch.cuda.mem_get_info(worker.device)[0])


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
