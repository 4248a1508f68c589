"""What preemption uses of vLLM, beyond :mod:`sluice.replica.vllm.support`."""

from __future__ import annotations

from typing import Final

from sluice.replica.preemption.runner_pool import SHARED_NAMES
from sluice.replica.vllm.contract import Part

_CORE: Final = "vllm.v1.engine.core"
_EXECUTOR: Final = "vllm.v1.executor"
_RUNNER: Final = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner",)
_LAYERS: Final = "vllm.model_executor.layers"

PARTS: Final = (
    Part((f"{_CORE}:EngineCore",), "step() _process_aborts_queue()"),
    Part((f"{_CORE}:EngineCoreProc",), "_handle_client_request(_, _)", "input_queue"),
    Part(
        ("vllm.v1.engine",),
        "EngineCoreOutput(_, _, finish_reason=) EngineCoreOutputs(outputs=, finished_requests=)",
    ),
    Part(("vllm.v1.engine:EngineCoreRequestType",), "UTILITY WAKEUP"),
    Part(("vllm.v1.engine:FinishReason",), "ERROR"),
    Part(("vllm.v1.request:RequestStatus",), "FINISHED_ERROR"),
    Part(
        ("vllm.v1.core.sched.scheduler:Scheduler",),
        "finish_requests(_, _) get_grammar_bitmask(_) has_requests() update_draft_token_ids(_)",
        "finished_req_ids",
    ),
    Part(
        ("vllm.v1.core.kv_cache_manager:KVCacheManager",),
        "allocate_slots(_, _, delay_cache_blocks=) cache_blocks(_, _)",
    ),
    Part(
        (f"{_EXECUTOR}.abstract:Executor",),
        "collective_rpc(_, args=) determine_available_memory() initialize_from_config(_) "
        "take_draft_token_ids()",
    ),
    Part(
        (f"{_EXECUTOR}.uniproc_executor:UniProcExecutor",),
        "_init_executor() shutdown()",
        called="driver_worker",
        by="_init_executor",
    ),
    Part(
        (f"{_EXECUTOR}.multiproc_executor:MultiprocExecutor",),
        "collective_rpc(_, args=, non_block=) _init_executor() shutdown()",
        called="is_failed workers",
        by="_init_executor",
    ),
    Part(
        ("vllm.v1.worker.gpu_worker:Worker",),
        "execute_model(_) sample_tokens(_) take_draft_token_ids()",
    ),
    Part(("vllm.lora.worker_manager:WorkerLoRAManager",), "set_active_adapters(_, _)"),
    Part(("vllm.v1.worker.gpu_model_runner",), "GPUModelRunner(_, _)"),
    Part(
        _RUNNER,
        "_dummy_run(_, is_profile=) _model_forward get_model() initialize_kv_cache(_) "
        "initialize_kv_cache_tensors",
        "attn_groups cudagraph_dispatcher execute_model_state input_batch "
        + " ".join(name for name in SHARED_NAMES if name != "model"),
    ),
    Part(_RUNNER, called="model", by="load_model"),
    Part(_RUNNER, called="lora_manager", by="load_lora_model"),
    Part(
        ("vllm.v1.worker.gpu_input_batch:InputBatch",),
        "condense() refresh_metadata() remove_request(_)",
        "req_id_to_index",
    ),
    Part(("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",), made="keys_initialized"),
    Part((f"{_LAYERS}.fused_moe:RoutedExperts",), "forward_modular forward_monolithic"),
    Part((f"{_LAYERS}.linear:LinearBase",)),
    Part((f"{_LAYERS}.linear:RowParallelLinear",), made="reduce_results"),
    Part((f"{_LAYERS}.attention_layer_base:AttentionLayerBase",)),
    Part(("vllm.forward_context:ForwardContext",), "skip_compiled"),
    Part(("vllm.forward_context",), "get_forward_context()"),
)
