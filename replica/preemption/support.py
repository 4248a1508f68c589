"""Requirements of preemption on vLLM, beyond :mod:`sluice.replica.vllm.support`: what it uses of
vLLM, and a configuration in which a forward pass can be suspended and resumed."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.config import CompilationMode

from sluice.replica.preemption.control_block import MAX_RANKS
from sluice.replica.preemption.vllm_symbols import PARTS
from sluice.replica.vllm.contract import WITH_PREEMPTION
from sluice.replica.vllm.setup import KV_CONNECTOR_MODULE, SENDS_KV
from sluice.replica.vllm.support import UnsupportedVllmError, check, check_overrides


def executor(ranks: int) -> str:
    """vLLM's name of the executor for ``ranks`` workers."""
    if ranks == 1:
        return "sluice.replica.preemption.executor.PreemptiveExecutor"
    return "sluice.replica.preemption.group_executor.PreemptiveGroupExecutor"


def check_preemption(vllm_config: Any, version: str = vllm.__version__) -> None:
    """Check that running prefills can be preempted under ``vllm_config``.

    Raises:
        UnsupportedVllmError: they cannot; the message says why.
    """
    check("preemption", WITH_PREEMPTION, PARTS, version)
    # These are made of what was checked.
    from sluice.replica.preemption.executor import PreemptiveExecutor
    from sluice.replica.preemption.group_executor import PreemptiveGroupExecutor
    from sluice.replica.preemption.scheduler import PreemptiveScheduler

    check_overrides("preemption", PreemptiveScheduler, PreemptiveExecutor, PreemptiveGroupExecutor)
    for allowed, rule in _rules(vllm_config):
        if not allowed:
            raise UnsupportedVllmError(f"prefills cannot be preempted here: {rule}")


def _rules(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    offload = vllm_config.offload_config
    transfer = vllm_config.kv_transfer_config
    speculative = vllm_config.speculative_config
    backend = parallel.distributed_executor_backend
    if isinstance(backend, type):
        backend = f"{backend.__module__}.{backend.__qualname__}"
    return (
        (parallel.world_size == ranks, "the only parallelism may be that of tensors"),
        (ranks <= MAX_RANKS, f"tensor-parallel-size must be at most {MAX_RANKS}"),
        (parallel.nnodes == 1, "all workers must be on one node"),
        (parallel.decode_context_parallel_size == 1, "decode-context-parallel-size must be 1"),
        (not parallel.enable_expert_parallel, "expert parallelism must be off"),
        (not parallel.enable_dbo, "dual batch overlap must be off"),
        (not vllm_config.scheduler_config.async_scheduling, "async scheduling must be off"),
        (
            # The model is compiled as a whole and cannot be bypassed.
            vllm_config.compilation_config.mode != CompilationMode.STOCK_TORCH_COMPILE,
            "the compilation mode must not be STOCK_TORCH_COMPILE",
        ),
        (
            vllm_config.device_config.device_type in ("cpu", "cuda"),
            "the device must be a CPU, or a GPU that PyTorch calls cuda",
        ),
        (
            # Making a model runner sets an offloader that all others of the process then use.
            offload.uva.cpu_offload_gb == 0 and offload.prefetch.offload_group_size == 0,
            "weights must not be offloaded",
        ),
        (not model.is_multimodal_model, "multimodal models are not supported"),
        (not model.is_hybrid, "models with state-space layers are not supported"),
        (not model.is_attention_free, "models without attention are not supported"),
        (model.runner_type == "generate", "only models that generate are supported"),
        (
            vllm_config.lora_config is None or not model.is_moe,
            "LoRA with a model that has experts is not supported",
        ),
        (
            speculative is None or speculative.method == "ngram",
            f"speculative decoding by {speculative and speculative.method} is not supported, only "
            "by ngram: other drafters keep KV or tokens of the requests, and each suspended "
            "prefill has a model runner with a drafter of its own",
        ),
        (
            speculative is None or transfer is None,
            "speculative decoding must be off on a prefill replica, which decodes nothing",
        ),
        (
            # Others keep state of the running batch, which a nested one would overwrite.
            transfer is None or transfer.kv_connector_module_path == KV_CONNECTOR_MODULE,
            "the only KV connector may be Sluice's own (engine.transfer.connector: tcp), and none "
            "by kv-offloading-size or kv-transfer-config in vllm_args",
        ),
        (
            # KV that arrives is no event for the engine's loop, and only the first worker reports.
            transfer is None or transfer.kv_role == SENDS_KV,
            "only a prefill replica may transfer KV: this engine would also receive it",
        ),
        (vllm_config.ec_transfer_config is None, "encoder connectors must be off"),
        (backend == executor(ranks), f"distributed-executor-backend must be {executor(ranks)}"),
        (not getattr(vllm_config, "use_v2_model_runner", False), "VLLM_USE_V2_MODEL_RUNNER is set"),
    )
