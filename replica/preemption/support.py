"""What preemption needs of vLLM, beyond :mod:`replica.vllm_support`: names, and a configuration in
which a forward pass can be left and entered again."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature, unwrap
from typing import Any

import vllm
from vllm.config import CompilationMode
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from replica.preemption.lanes import SHARED_NAMES
from replica.preemption.words import MAX_RANKS
from replica.vllm_args import SchedulerSettings
from replica.vllm_support import UnsupportedVllmError

SUPPORTED = ((0, 29), (0, 32))
"""First and last minor version of vLLM with which preemption was tested."""

_NAMES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (EngineCore, ("step", "_process_aborts_queue")),
    (EngineCoreProc, ("_handle_client_request",)),
    (Scheduler, ("finish_requests", "get_grammar_bitmask", "has_requests", "update_from_output")),
    (KVCacheManager, ("allocate_slots", "cache_blocks")),
    (Executor, ("collective_rpc", "compile_or_warm_up_model", "determine_available_memory")),
    (UniProcExecutor, ("_init_executor", "shutdown")),
    (MultiprocExecutor, ("_init_executor", "shutdown")),
    (Worker, ("execute_model", "sample_tokens")),
    (
        GPUModelRunner,
        (
            "_dummy_run",
            "_model_forward",
            "get_model",
            "initialize_kv_cache",
            "initialize_kv_cache_tensors",
        ),
    ),
    (InputBatch, ("condense", "refresh_metadata", "remove_request")),
    (RoutedExperts, ("forward_modular", "forward_monolithic")),
    (ForwardContext, ("skip_compiled",)),
    (FinishReason, ("ERROR",)),
    (RequestStatus, ("FINISHED_ERROR",)),
)
"""Methods, and members, by class."""

_MADE: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (EngineCoreProc.__init__, ("input_queue",)),
    (Scheduler.__init__, ("finished_req_ids", "requests", "running")),
    (UniProcExecutor._init_executor, ("driver_worker",)),
    (MultiprocExecutor._init_executor, ("is_failed", "workers")),
    (
        GPUModelRunner.__init__,
        (
            "attn_groups",
            "cudagraph_dispatcher",
            "execute_model_state",
            "input_batch",
            *(name for name in SHARED_NAMES if name != "model"),
        ),
    ),
    (GPUModelRunner.load_model, ("model",)),
    (InputBatch.__init__, ("req_id_to_index",)),
    (CudagraphDispatcher.__init__, ("keys_initialized",)),
    (RowParallelLinear.__init__, ("reduce_results",)),
)
"""Attributes, by the method that makes them."""


def preempts(vllm_config: Any) -> bool:
    """Whether ``vllm_config`` asks for preemption."""
    settings = SchedulerSettings.from_additional_config(vllm_config.additional_config)
    return settings.preemption.granularity != "off"


def executor(ranks: int) -> str:
    """vLLM's name of the executor for so many workers."""
    if ranks == 1:
        return "replica.preemption.executor.PreemptiveExecutor"
    return "replica.preemption.group_executor.PreemptiveGroupExecutor"


def check_preemption(vllm_config: Any, version: str = vllm.__version__) -> None:
    """Check that running prefills can be preempted under ``vllm_config``.

    Raises:
        UnsupportedVllmError: why not.
    """
    low, high = SUPPORTED
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not low <= (int(match[1]), int(match[2])) <= high:
        raise UnsupportedVllmError(
            f"preemption does not support vLLM {version}; supported are "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        )
    missing = [
        *(f"{kind.__name__}.{n}" for kind, names in _NAMES for n in names if not hasattr(kind, n)),
        *(
            f"an attribute {name} of {method.__qualname__.partition('.')[0]}"
            for method, names in _MADE
            for name in names
            if name not in _names_in(method)
        ),
    ]
    if "delay_cache_blocks" not in signature(KVCacheManager.allocate_slots).parameters:
        missing.append("KVCacheManager.allocate_slots(delay_cache_blocks)")
    if missing:
        raise UnsupportedVllmError(f"vLLM {version} lacks {', '.join(missing)}")
    for allowed, rule in _rules(vllm_config):
        if not allowed:
            raise UnsupportedVllmError(f"prefills cannot be preempted here: {rule}")


def _names_in(method: Any) -> set[str]:
    """Attributes that a method uses, whatever decorates it."""
    return set(unwrap(method).__code__.co_names)


def _rules(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    offload = vllm_config.offload_config
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
            # Its model is compiled as a whole, with no way around.
            vllm_config.compilation_config.mode != CompilationMode.STOCK_TORCH_COMPILE,
            "the compilation mode must not be STOCK_TORCH_COMPILE",
        ),
        (
            vllm_config.device_config.device_type in ("cpu", "cuda"),
            "the device must be a CPU, or a GPU that PyTorch calls cuda",
        ),
        (
            # A model runner is made with an offloader that all others of the process use from then.
            offload.uva.cpu_offload_gb == 0 and offload.prefetch.offload_group_size == 0,
            "weights must not be offloaded",
        ),
        (not model.is_multimodal_model, "multimodal models are not supported"),
        (not model.is_hybrid, "models with state-space layers are not supported"),
        (not model.is_attention_free, "models without attention are not supported"),
        (model.runner_type == "generate", "only models that generate are supported"),
        (vllm_config.lora_config is None, "LoRA must be off"),
        (vllm_config.kv_transfer_config is None, "KV connectors must be off"),
        (vllm_config.ec_transfer_config is None, "encoder connectors must be off"),
        (backend == executor(ranks), f"distributed-executor-backend must be {executor(ranks)}"),
        (not getattr(vllm_config, "use_v2_model_runner", False), "VLLM_USE_V2_MODEL_RUNNER is set"),
    )
