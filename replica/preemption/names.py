"""Names of vLLM that preemption uses, beyond those in :mod:`sluice.replica.vllm.support`. Versions
that it does not support may lack even the modules that are imported here."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature, unwrap
from typing import Any

from vllm.forward_context import ForwardContext
from vllm.lora.worker_manager import WorkerLoRAManager
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

from sluice.replica.preemption.lanes import SHARED_NAMES

_NAMES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (EngineCore, ("step", "_process_aborts_queue")),
    (EngineCoreProc, ("_handle_client_request",)),
    (Scheduler, ("finish_requests", "get_grammar_bitmask", "has_requests", "update_from_output")),
    (Scheduler, ("update_draft_token_ids",)),
    (KVCacheManager, ("allocate_slots", "cache_blocks")),
    (Executor, ("collective_rpc", "compile_or_warm_up_model", "determine_available_memory")),
    (Executor, ("take_draft_token_ids",)),
    (UniProcExecutor, ("_init_executor", "shutdown")),
    (MultiprocExecutor, ("_init_executor", "shutdown")),
    (Worker, ("execute_model", "sample_tokens", "take_draft_token_ids")),
    (WorkerLoRAManager, ("set_active_adapters",)),
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
    (GPUModelRunner.load_lora_model, ("lora_manager",)),
    (InputBatch.__init__, ("req_id_to_index",)),
    (CudagraphDispatcher.__init__, ("keys_initialized",)),
    (RowParallelLinear.__init__, ("reduce_results",)),
)
"""Attributes, by the method that makes them."""


def missing_names() -> list[str]:
    """The names that this version of vLLM does not have."""
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
    return missing


def _names_in(method: Any) -> set[str]:
    """Attributes that a method uses, ignoring decorators."""
    return set(unwrap(method).__code__.co_names)
