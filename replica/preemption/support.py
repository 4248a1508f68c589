"""What preemption requires of vLLM: names, and a configuration in which a pass can be suspended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.config import CompilationMode

from sluice.replica.preemption.worker import SHARED_NAMES
from sluice.replica.vllm.contract import WITH_PREEMPTION, Part
from sluice.replica.vllm.scheduler import prepare
from sluice.replica.vllm.setup import KV_CONNECTOR_MODULE, SENDS_KV, preemption_arguments
from sluice.replica.vllm.support import UnsupportedVllmError, check, check_overrides

if TYPE_CHECKING:
    from sluice.replica.preemption.scheduler import PreemptiveScheduler

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


def check_preemption(vllm_config: Any, version: str = vllm.__version__) -> None:
    """Raises UnsupportedVllmError: running prefills cannot be preempted; the message says why."""
    check("preemption", WITH_PREEMPTION, PARTS, version)
    # These are made of what was checked.
    from sluice.replica.preemption.executor import PreemptiveExecutor, PreemptiveGroupExecutor
    from sluice.replica.preemption.scheduler import PreemptiveScheduler

    check_overrides("preemption", PreemptiveScheduler, PreemptiveExecutor, PreemptiveGroupExecutor)
    for allowed, rule in _rules(vllm_config):
        if not allowed:
            raise UnsupportedVllmError(f"prefills cannot be preempted here: {rule}")


def make_scheduler(vllm_config: Any, **kwargs: Any) -> PreemptiveScheduler:
    """The scheduler, in an engine core that runs rounds from now on. Raises UnsupportedVllmError.
    Raises ValueError: ``additional_config["sluice"]`` is missing or wrong."""
    prepare(vllm_config)
    check_preemption(vllm_config)
    # These rely on names of vLLM that were checked above.
    from sluice.replica.preemption import engine_loop
    from sluice.replica.preemption.scheduler import PreemptiveScheduler

    engine_loop.install()
    return PreemptiveScheduler(vllm_config=vllm_config, **kwargs)


def _rules(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    offload = vllm_config.offload_config
    transfer = vllm_config.kv_transfer_config
    speculative = vllm_config.speculative_config
    backend = parallel.distributed_executor_backend
    executor = preemption_arguments(ranks)["distributed-executor-backend"]
    if isinstance(backend, type):
        backend = f"{backend.__module__}.{backend.__qualname__}"
    return (
        (parallel.world_size == ranks, "the only parallelism may be that of tensors"),
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
        (backend == executor, f"distributed-executor-backend must be {executor}"),
        (not getattr(vllm_config, "use_v2_model_runner", False), "VLLM_USE_V2_MODEL_RUNNER is set"),
    )
