"""Requirements of Sluice on vLLM, a version and a configuration, and the differences between
versions. A version newer than all that were run is allowed, with a warning, if it has all names."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import vllm
from vllm.platforms import current_platform

from sluice.replica.engine import ConfigurationError
from sluice.replica.vllm.contract import (
    SUPPORTED,
    WITH_DATA_PARALLEL,
    WITH_PIPELINE,
    WITH_SPECULATION,
    Part,
    Versions,
    age,
    unfit,
    unmet,
)

logger = logging.getLogger(__name__)

_SCHED: Final = "vllm.v1.core.sched"
_SCHEDULER: Final = (f"{_SCHED}.scheduler:Scheduler",)
_REQUEST: Final = ("vllm.v1.request:Request",)
_OPENAI: Final = "vllm.entrypoints.openai"

_SCHEDULING: Final = (
    Part(
        _SCHEDULER,
        "add_request(_) get_request_counts() reset_prefix_cache() schedule() shutdown() "
        "update_from_output(_, _) _free_request(_) _is_blocked_waiting_status(_) "
        "_preempt_request(_, _)",
        "block_size kv_cache_config kv_cache_manager max_model_len max_num_running_reqs "
        "max_num_scheduled_tokens requests running structured_output_manager waiting",
    ),
    Part((f"{_SCHED}.async_scheduler:AsyncScheduler",)),
    Part((f"{_SCHED}.output:SchedulerOutput",), made="num_scheduled_tokens preempted_req_ids"),
    Part(
        ("vllm.v1.core.kv_cache_manager:KVCacheManager",),
        "get_block_ids(_)",
        "block_pool coordinator enable_caching",
    ),
    Part(("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",), "find_longest_cache_hit(_, _)"),
    Part(
        ("vllm.v1.core.block_pool:BlockPool",),
        "get_cached_block(_, _) get_num_free_blocks() _emit_block_removed_events(_)",
        "hash_block_size num_gpu_blocks",
    ),
    Part(("vllm.v1.core.kv_cache_utils",), "get_block_hash(_)"),
    Part(
        _REQUEST,
        made="arrival_time block_hashes kv_transfer_params max_tokens num_computed_tokens "
        "num_output_placeholders num_output_tokens num_prompt_tokens num_tokens pooling_params "
        "sampling_params skip_reading_prefix_cache status",
    ),
    Part(
        ("vllm.v1.request:RequestStatus",),
        "FINISHED_LENGTH_CAPPED FINISHED_STOPPED PREEMPTED RUNNING WAITING WAITING_FOR_REMOTE_KVS",
    ),
    Part(("vllm.v1.engine:EngineCoreOutput",), "new_token_ids request_id"),
    Part(("vllm.v1.engine:EngineCoreOutputs",), "outputs"),
    Part(("vllm.v1.executor.abstract:Executor",), "get_class(_)"),
    Part(("vllm.v1.executor.uniproc_executor",), "UniProcExecutor"),
    Part(
        ("vllm.v1.structured_output:StructuredOutputManager",),
        "_create_grammar(_)",
        "backend tokenizer vllm_config",
    ),
)
"""In the engine's process."""

ARGUMENTS: Final = (
    "vllm.entrypoints.common.cli_args",  # from 0.33
    "vllm.entrypoints.launchers.cli_args",  # from 0.29
    f"{_OPENAI}.cli_args",
)
"""Where the parser of vLLM's arguments is."""

APP_STATE: Final = (
    "vllm.entrypoints.launchers.api_server.app_state",  # from 0.29
    f"{_OPENAI}.api_server",
)
"""Where vLLM makes its serving layers."""

_SERVING: Final = (
    Part(ARGUMENTS, "make_arg_parser(_) validate_parsed_serve_args(_)"),
    Part(APP_STATE, "init_app_state(_, _, _, supported_tasks=)"),
    Part(
        ("vllm.engine.arg_utils:AsyncEngineArgs",),
        "from_cli_args(_) create_engine_config(usage_context=)",
    ),
    Part(
        ("vllm.v1.engine.async_llm:AsyncLLM",),
        "from_vllm_config(vllm_config=, usage_context=, disable_log_stats=) "
        "generate(_, _, _, trace_headers=) encode(_, _, _) _add_request(_, _, _, _, _) abort(_) "
        "errored get_supported_tasks() get_tokenizer() is_sleeping() shutdown() add_lora(_) "
        "remove_lora(_)",
        "engine_core input_processor observability_config output_processor vllm_config",
    ),
    Part(("vllm.v1.engine.input_processor:InputProcessor",), made="structured_outputs_config"),
    Part(("vllm.sampling_params:SamplingParams",), "_validate_structured_outputs(_, _, _)"),
    Part(("vllm.v1.engine.core_client:EngineCoreClient",), "add_request_async(_)"),
    Part(
        ("vllm.v1.engine.output_processor:OutputProcessor",),
        "add_request(_, _, _, _, _) process_outputs(_, _, _) propagate_error(_)",
        "request_states",
    ),
    Part(
        ("vllm.v1.engine.output_processor:RequestOutputCollector",), "get_nowait() put(_)", "output"
    ),
    Part(
        ("vllm.v1.engine.output_processor:RequestState",),
        "make_request_output(new_token_ids=, pooling_output=, finish_reason=, stop_reason=)",
        "detokenizer is_prefilling queue stats stream_interval",
    ),
    Part(
        ("vllm.v1.engine.detokenizer:FastIncrementalDetokenizer",),
        "get_next_output_text(_, _) num_output_tokens()",
        "skip_special_tokens stream tokenizer",
    ),
    Part(("vllm.v1.engine",), "EngineCoreOutput(_, _)"),
    Part(("vllm.v1.engine:FinishReason",), "LENGTH STOP"),
    Part(("vllm.v1.engine.exceptions",), "EngineDeadError()"),
    Part(("vllm.v1.engine.utils",), "get_mp_context()"),
    Part(("vllm.v1.metrics.stats",), "IterationStats()"),
    Part(("vllm.sampling_params",), "RequestOutputKind SamplingParams StructuredOutputsParams"),
    Part((f"{_OPENAI}.chat_completion.protocol",), "ChatCompletionRequest"),
    Part((f"{_OPENAI}.completion.protocol",), "CompletionRequest"),
    Part(
        (f"{_OPENAI}.chat_completion.serving:OpenAIServingChat",),
        "create_chat_completion(_, _) create_error_response(_)",
    ),
    Part((f"{_OPENAI}.completion.serving:OpenAIServingCompletion",), "create_completion(_, _)"),
    Part(
        (f"{_OPENAI}.models.serving:OpenAIServingModels",),
        "show_available_models()",
        "lora_id_counter lora_requests",
    ),
    Part(("vllm.lora.request",), "LoRARequest(_, _, _)"),
)
"""In the replica's process."""

TRANSFER: Final = (
    Part(
        ("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",),
        "bind_connector_metadata(_) clear_connector_metadata() _get_connector_metadata()",
    ),
    Part(_SCHEDULER, made="connector failed_recving_kv_req_ids finished_recving_kv_req_ids"),
    Part(_REQUEST, made="_all_token_ids prompt_token_ids"),
    Part(("vllm.distributed.parallel_state",), "get_tensor_model_parallel_rank()"),
    Part(("vllm.utils.network_utils",), "get_ip()"),
)
"""For Sluice's KV connector."""

SPECULATION: Final = (
    Part(
        _SCHEDULER,
        "update_draft_token_ids(_)",
        "dynamic_sd_lookup num_lookahead_tokens num_spec_tokens",
    ),
    Part(_SCHEDULER, called="dynamic_sd_lookup", by="schedule"),
    Part(_REQUEST, made="spec_token_ids"),
    Part((f"{_SCHED}.output:SchedulerOutput",), made="scheduled_spec_decode_tokens"),
)
"""For speculative decoding by the plan."""

PIPELINE: Final = (Part(_REQUEST, made="num_in_flight_tokens"),)
"""For several batches in a pipeline."""

DATA_PARALLEL: Final = (
    Part(("vllm.v1.engine:EngineCoreRequest",), "data_parallel_rank"),
    Part(("vllm.config:ParallelConfig",), called="data_parallel_index", by="__post_init__"),
)
"""For several ranks in an engine."""


class UnsupportedVllmError(ConfigurationError):
    """This vLLM, or its configuration, cannot execute batch plans."""


@cache
def hook_name() -> str:
    """The method that ``schedule()`` calls with every request's number of new tokens."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "_reserve_prefill_lookahead"):  # from 0.28
        return "_reserve_prefill_lookahead"
    return "_mamba_block_aligned_split"


def second_queue_name() -> str:
    """The waiting queue that ``schedule()`` drains before ``waiting``."""
    from vllm.v1.core.sched.scheduler import Scheduler

    names = Scheduler.__init__.__code__.co_names
    return "kv_holding_waiting" if "kv_holding_waiting" in names else "skipped_waiting"


def check(
    user: str, versions: Versions, parts: Iterable[Part], version: str = vllm.__version__
) -> None:
    """Check that ``user`` runs in this version; one newer than ``versions`` or without a number
    gets a warning. Raises UnsupportedVllmError: it is older or lacks one of ``parts``."""
    oldest, newest = (".".join(map(str, each)) for each in versions)
    found = age(version, versions)
    if found == "older":
        raise UnsupportedVllmError(
            f"{user} does not support vLLM {version}; supported are {oldest} and newer"
        )
    lacking = unmet(parts)
    if lacking:
        raise UnsupportedVllmError(
            f"{user} cannot run in vLLM {version}, which lacks {'; '.join(lacking)}. "
            f"It was run in {oldest} to {newest}."
        )
    if found == "unknown":
        _warn(user, version, oldest, newest)


@cache  # once for each user of it
def _warn(user: str, version: str, oldest: str, newest: str) -> None:
    logger.warning(
        "%s was not run in vLLM %s, only in %s to %s: all names and arguments that it uses are "
        "there, so it starts",
        user,
        version,
        oldest,
        newest,
    )


def check_overrides(user: str, *kinds: type) -> None:
    """Check overridden methods. Raises UnsupportedVllmError: arguments or a method do not fit."""
    found = unfit(kinds)
    if found:
        raise UnsupportedVllmError(
            f"{user} cannot run in vLLM {vllm.__version__}, which calls {'; '.join(found)}"
        )


def check_vllm(serving: bool = False, version: str = vllm.__version__) -> None:
    """Check the version and what Sluice uses of it, with ``serving`` also what the replica's
    process uses beside the engine's. Raises UnsupportedVllmError: what is missing, or too old."""
    parts = [*_SCHEDULING, *(_SERVING if serving else ())]
    if not unmet([Part(_SCHEDULER)]):
        parts += _versioned()
    check("Sluice", SUPPORTED, parts, version)


def _versioned() -> list[Part]:
    """What has other names in other versions."""
    hook = hook_name()
    arguments = "_, _, _" if hook == "_reserve_prefill_lookahead" else "_, _"
    return [
        Part(_SCHEDULER, f"{hook}({arguments})", second_queue_name()),
        Part(_SCHEDULER, called=hook, by="schedule"),
    ]


def check_config(vllm_config: Any) -> None:
    """Check that plans can be executed. Raises UnsupportedVllmError: what is allowed."""
    scheduler = vllm_config.scheduler_config
    parallel = vllm_config.parallel_config
    rules = (
        (scheduler.policy == "fcfs", "scheduling-policy must be fcfs"),
        (
            # vLLM turns it off for these, whose prompts are a few tokens.
            scheduler.enable_chunked_prefill or vllm_config.model_config.is_encoder_decoder,
            "chunked prefill must be on",
        ),
        (scheduler.long_prefill_token_threshold == 0, "long-prefill-token-threshold must be 0"),
        # From 0.33 the scheduler itself holds prefills back by it, planned or not.
        (
            getattr(scheduler, "prefill_schedule_interval", 1) == 1,
            "prefill-schedule-interval must be 1",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) == 1,
            "prefill-context-parallel-size must be 1",
        ),
        (
            parallel.distributed_executor_backend != "ray" or bool(current_platform.ray_device_key),
            "distributed-executor-backend may not be ray on CPUs, which vLLM's executor for Ray "
            "does not support; mp runs all workers on the replica's node",
        ),
    )
    _check_rules("Sluice's scheduler", rules)
    if parallel.data_parallel_size > 1:
        _check_data_parallel(vllm_config)
    if parallel.pipeline_parallel_size > 1:
        _check_pipeline(vllm_config)
    if vllm_config.speculative_config is not None:
        _check_speculation(vllm_config)


def _check_rules(user: str, rules: Iterable[tuple[bool, str]]) -> None:
    for kept, rule in rules:
        if not kept:
            raise UnsupportedVllmError(f"{user} cannot run here: {rule}")


def rank_of(vllm_config: Any) -> int:
    """Which rank of data parallelism has this configuration; 0 without."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))


def _check_data_parallel(vllm_config: Any) -> None:
    """Check that an engine can have several ranks. Raises UnsupportedVllmError: it cannot."""
    check("data parallelism", WITH_DATA_PARALLEL, DATA_PARALLEL)
    parallel = vllm_config.parallel_config
    rules = (
        # The replica's own process must have the client of every rank.
        (
            parallel.data_parallel_size_local == parallel.data_parallel_size,
            "all ranks must be on the replica's node",
        ),
        (vllm_config.kv_transfer_config is None, "KV transfer must be off"),
        (vllm_config.speculative_config is None, "speculative decoding must be off"),
        (
            # The engine would start, and end with its first batch.
            not (current_platform.is_cpu() and vllm_config.model_config.is_moe),
            "on CPUs the model may not have experts, whose inputs vLLM cannot exchange between "
            "ranks there",
        ),
    )
    _check_rules("data parallelism", rules)


def _check_pipeline(vllm_config: Any) -> None:
    """Check that several batches can be in flight. Raises UnsupportedVllmError: they cannot."""
    check("pipeline parallelism", WITH_PIPELINE, PIPELINE)
    rules = (
        # What is not shown to be right with several batches in flight.
        (vllm_config.speculative_config is None, "speculative decoding must be off"),
        (vllm_config.kv_transfer_config is None, "KV transfer must be off"),
        (
            # Such a model must never be preempted, and stock scheduling may preempt it here.
            not vllm_config.model_config.is_encoder_decoder,
            "the model may not be an encoder-decoder model",
        ),
    )
    _check_rules("pipeline parallelism", rules)


def _check_speculation(vllm_config: Any) -> None:
    """Check that the plan can check drafted tokens. Raises UnsupportedVllmError: it cannot."""
    check("speculative decoding by the plan", WITH_SPECULATION, SPECULATION)
    config = vllm_config.speculative_config
    rules = (
        # It would schedule placeholders before the number of drafts is known.
        (not vllm_config.scheduler_config.async_scheduling, "async-scheduling must be off"),
        (
            config.uses_dynamic_speculative_decoding(),
            "it must be configured by `speculative-config` in `vllm_args`",
        ),
        # A chunk of the plan could end where such a drafter still needs the tokens behind it.
        # 0.26 has no such drafter, and no such verification.
        (
            not getattr(config, "use_multi_module_mtp", bool)(),
            "a drafter of several MTP layers may draft one token",
        ),
        (config.method != "extract_hidden_states", "extract_hidden_states drafts nothing"),
        (
            not getattr(config, "enable_adaptive_verification", False),
            "enable_adaptive_verification must be off",
        ),
        (
            # Its function for CPUs takes other arguments than its drafting models give.
            config.method == "ngram"
            or not (current_platform.is_cpu() and vllm.__version__.startswith("0.30.")),
            "on CPUs vLLM 0.30 drafts by ngram only",
        ),
    )
    _check_rules("speculative decoding", rules)
