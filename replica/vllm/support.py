"""Requirements of Sluice's scheduler on vLLM: a version with the names that it uses, and a
configuration in which plans can be executed. The differences between the supported versions are
here, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from sluice.replica.engine import ConfigurationError

Versions = tuple[tuple[int, int], tuple[int, int]]
"""First and last minor version of vLLM."""

SUPPORTED: Versions = ((0, 26), (0, 32))
"""Versions in which batch plans can be executed."""

WITH_PREEMPTION: Versions = ((0, 29), (0, 32))
"""Versions in which running prefills can be preempted."""

WITH_TRANSFER: Versions = ((0, 29), (0, 32))
"""Versions in which Sluice's connector can transfer KV."""

WITH_PIPELINE: Versions = ((0, 29), (0, 32))
"""Versions in which several batches can be in a pipeline: a request that is preempted while one of
its tokens is on the way waits for that token."""

WITH_SPECULATION: Versions = ((0, 29), (0, 32))
"""Versions in which the plan can choose how many drafted tokens are checked."""

_SCHEDULER_NAMES = (
    "add_request",
    "get_request_counts",
    "reset_prefix_cache",
    "schedule",
    "shutdown",
    "update_from_output",
    "_free_request",
    "_is_blocked_waiting_status",
    "_preempt_request",
)
_INSTANCE_NAMES = (
    "block_size",
    "kv_cache_config",
    "kv_cache_manager",
    "max_model_len",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "requests",
    "running",
    "waiting",
)
_SPECULATION_NAMES = ("dynamic_sd_lookup", "num_lookahead_tokens", "num_spec_tokens")
_LOOKUP_NAMES = ("find_longest_cache_hit",)
_POOL_NAMES = ("get_cached_block", "_emit_block_removed_events")
_MANAGER_NAMES = ("block_pool", "coordinator", "enable_caching")
_REQUEST_NAMES = (
    "arrival_time",
    "block_hashes",
    "max_tokens",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_output_tokens",
    "num_prompt_tokens",
    "num_tokens",
    "pooling_params",
    "sampling_params",
    "skip_reading_prefix_cache",
    "status",
)


class UnsupportedVllmError(ConfigurationError):
    """This vLLM, or its configuration, cannot execute batch plans."""


def hook_name() -> str:
    """The method that ``schedule()`` calls with every request's number of new tokens."""
    if hasattr(Scheduler, "_reserve_prefill_lookahead"):  # from 0.28
        return "_reserve_prefill_lookahead"
    return "_mamba_block_aligned_split"


def second_queue_name() -> str:
    """The waiting queue that ``schedule()`` drains before ``waiting``."""
    names = Scheduler.__init__.__code__.co_names
    return "kv_holding_waiting" if "kv_holding_waiting" in names else "skipped_waiting"


def check_version(version: str, supported: Versions, user: str) -> None:
    """Check that ``user``, which supports these versions, runs in this one.

    Raises:
        UnsupportedVllmError: it does not run in it; the message lists the supported versions.
    """
    low, high = supported
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not low <= (int(match[1]), int(match[2])) <= high:
        raise UnsupportedVllmError(f"{user} does not support vLLM {version}; {_range(supported)}")


def _range(supported: Versions) -> str:
    (low, high) = (".".join(map(str, each)) for each in supported)
    return f"supported are {low} to {high}"


def check_vllm(version: str = vllm.__version__) -> None:
    """Check the version, and that every internal name in use exists.

    Raises:
        UnsupportedVllmError: what is missing, and which versions are supported.
    """
    check_version(version, SUPPORTED, "Sluice")
    made = _made_by_scheduler()
    request = set(Request.__init__.__code__.co_names)
    pool = set(BlockPool.__init__.__code__.co_names)
    manager = set(KVCacheManager.__init__.__code__.co_names)
    missing = [
        *(f"KVCacheManager.{n}" for n in _MANAGER_NAMES if n not in manager),
        *(f"KVCacheCoordinator.{n}" for n in _LOOKUP_NAMES if not hasattr(KVCacheCoordinator, n)),
        *(f"BlockPool.{n}" for n in ("hash_block_size",) if n not in pool),
        *(f"BlockPool.{n}" for n in _POOL_NAMES if not hasattr(BlockPool, n)),
        *(f"Scheduler.{n}" for n in (*_SCHEDULER_NAMES, hook_name()) if not hasattr(Scheduler, n)),
        *(f"Scheduler.{n}" for n in (*_INSTANCE_NAMES, second_queue_name()) if n not in made),
        *(f"Request.{n}" for n in _REQUEST_NAMES if n not in request and not hasattr(Request, n)),
    ]
    if missing:
        raise UnsupportedVllmError(
            f"vLLM {version} lacks {', '.join(missing)}; {_range(SUPPORTED)}"
        )


def _made_by_scheduler() -> frozenset[str]:
    """The names in the scheduler's constructor: its attributes are among them."""
    return frozenset(Scheduler.__init__.__code__.co_names)


def check_config(vllm_config: Any) -> None:
    """Check that plans can be executed with the engine's configuration.

    Raises:
        UnsupportedVllmError: the setting, and what is allowed.
    """
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
        (
            # Every engine process of one client would write the same state table.
            parallel.data_parallel_size == 1,
            "data-parallel-size must be 1: for more engines of a model set replica.count",
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
    if parallel.pipeline_parallel_size > 1:
        _check_pipeline(vllm_config)
    if vllm_config.speculative_config is not None:
        _check_speculation(vllm_config)


def _check_rules(user: str, rules: Iterable[tuple[bool, str]]) -> None:
    for kept, rule in rules:
        if not kept:
            raise UnsupportedVllmError(f"{user} cannot run here: {rule}")


def _check_pipeline(vllm_config: Any) -> None:
    """Check that several batches can be in flight.

    Raises:
        UnsupportedVllmError: the setting, and what is allowed.
    """
    check_version(vllm.__version__, WITH_PIPELINE, "pipeline parallelism")
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
    """Check that drafted tokens can be checked by the plan.

    Raises:
        UnsupportedVllmError: the setting, and what is allowed.
    """
    check_version(vllm.__version__, WITH_SPECULATION, "speculative decoding by the plan")
    made = _made_by_scheduler()
    missing = [f"Scheduler.{name}" for name in _SPECULATION_NAMES if name not in made]
    if missing:
        raise UnsupportedVllmError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}; {_range(WITH_SPECULATION)}"
        )
    config = vllm_config.speculative_config
    rules = (
        # It would schedule placeholders before the number of drafts is known.
        (not vllm_config.scheduler_config.async_scheduling, "async-scheduling must be off"),
        (
            config.uses_dynamic_speculative_decoding(),
            "it must be configured by `speculative-config` in `vllm_args`",
        ),
        # A chunk of the plan could end where such a drafter still needs the tokens behind it.
        (not config.use_multi_module_mtp(), "a drafter of several MTP layers may draft one token"),
        (config.method != "extract_hidden_states", "extract_hidden_states drafts nothing"),
        (not config.enable_adaptive_verification, "enable_adaptive_verification must be off"),
    )
    _check_rules("speculative decoding", rules)
