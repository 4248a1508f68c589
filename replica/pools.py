"""The pools of a model's replicas: a pool for each role, with its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.placement import unplaceable
from sluice.replica.vllm_args import by_option
from sluice.scheduling.roles import ROLES, Role

_SAME_FIELDS = ("cache_dir", "kind", "model", "served_model_name", "transfer")
"""Engine settings that a pool cannot override: a request that begins in one pool ends in
another."""

_SAME_ARGUMENTS = (
    "block-size",
    "chat-template",
    "chat-template-content-format",
    "default-chat-template-kwargs",
    "dtype",
    "enable-auto-tool-choice",
    "enable-lora",
    "generation-config",
    "hf-overrides",
    "kv-cache-dtype",
    "logits-processors",
    "lora-modules",
    "max-logprobs",
    "max-model-len",
    "override-generation-config",
    "quantization",
    "reasoning-parser",
    "revision",
    "tensor-parallel-size",
    "tokenizer",
    "tokenizer-mode",
    "tokenizer-revision",
    "tool-call-parser",
    "trust-request-chat-template",
)
"""Arguments of vLLM that determine what a request may ask for, what its tokens are and how its KV
lies in memory: both engines of a P/D pair must agree on them."""

_SHOWN = 80
"""Max characters of a value in an error message."""

_SAME_SIMULATED = ("block_tokens", "max_model_tokens")


class Pool(NamedTuple):
    """One pool of a model, with the complete settings of its replicas.

    Attributes:
        role: which phases of a request its replicas serve.
        engine: settings of each engine. replica: number, placement and limits; without pools.
    """

    role: Role
    engine: EngineConfig
    replica: ReplicaConfig


def pools_of(engine: EngineConfig, replica: ReplicaConfig) -> tuple[Pool, ...]:
    """The pools that a model's two sections describe, in the order of :data:`ROLES`; one mixed pool
    if they name none.

    Raises:
        pydantic.ValidationError: a pool is invalid; the message says where and why.
    """
    if not replica.pools:
        if replica.elastic and engine.transfer is None:
            base = engine.model_dump(exclude_unset=True)
            engine = _validated({**base, "transfer": {}}, ("engine",))
        alone = Pool("mixed", engine, replica)
        _refuse(_preemption_where_kv_arrives(alone, ("engine",)))
        _refuse(unplaceable(engine, replica, ("replica",)))
        return (alone,)
    pools = tuple(
        Pool(role, _engine(engine, replica, role), _replica(replica, role))
        for role in ROLES
        if role in replica.pools
    )
    for pool in pools:
        place = ("replica", "pools", pool.role, "engine")
        _refuse(_preemption_where_kv_arrives(pool, place))
        _refuse(unplaceable(pool.engine, pool.replica, place[:-1]))
    _refuse(_differences(pools))
    return pools


def _engine(shared: EngineConfig, replica: ReplicaConfig, role: Role) -> EngineConfig:
    pool = replica.pools[role]
    place = ("replica", "pools", role, "engine")
    _refuse(
        ((*place, name), f"must be the same in all pools: set engine.{name}")
        for name in _SAME_FIELDS
        if name in pool.engine
    )
    base = shared.model_dump(exclude_unset=True)
    if "prefill" in replica.pools and base.get("transfer") is None:
        base["transfer"] = {}
    if pool.engine.get("policy", shared.policy) != shared.policy:
        base.pop("policy_options", None)  # they are options of the shared policy
    if "vllm_args" in base:
        base["vllm_args"] = by_option(base["vllm_args"])
    own = dict(pool.engine)
    if isinstance(own.get("vllm_args"), Mapping):
        own["vllm_args"] = by_option(own["vllm_args"])
    return _validated(_laid_over(base, own), place)


def _validated(values: Mapping[str, Any], place: tuple[str, ...]) -> EngineConfig:
    try:
        return EngineConfig.model_validate(values)
    except ValidationError as error:
        _refuse(
            ((*place, *entry["loc"]), entry["msg"])
            for entry in error.errors(include_input=False, include_url=False)
        )
        raise AssertionError("there was an error") from error


def _replica(shared: ReplicaConfig, role: Role) -> ReplicaConfig:
    pool = shared.pools[role]
    own: dict[str, Any] = {"count": pool.count, "autoscaling": pool.autoscaling, "pools": {}}
    for name in ("num_cpus", "num_gpus", "max_per_node"):
        if getattr(pool, name) is not None:
            own[name] = getattr(pool, name)
    if pool.node_labels:
        own["node_labels"] = pool.node_labels
    return shared.model_copy(update=own)


def _preemption_where_kv_arrives(
    pool: Pool, place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Preemption in a pool that may receive KV, with the reason against it."""
    engine = pool.engine
    if (
        pool.role != "prefill"
        and engine.transfer is not None
        and engine.preemption.granularity != "off"
    ):
        yield (
            (*place, "preemption", "granularity"),
            "must be off where an engine may receive KV: prefills can be preempted beside transfer "
            "in the pool prefill only (replica.pools.prefill.engine.preemption)",
        )


def _differences(pools: tuple[Pool, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings by which two pools could not serve the same requests, with the reason."""
    first = pools[0]
    for pool in pools[1:]:
        place: tuple[str, ...] = ("replica", "pools", pool.role, "engine")
        for name in _SAME_ARGUMENTS:
            here, there = (by_option(each.engine.vllm_args).get(name) for each in (pool, first))
            if here != there:
                yield (*place, "vllm_args", name), _unlike(here, there, first.role)
        for name in _SAME_SIMULATED:
            here, there = (getattr(each.engine.simulated, name) for each in (pool, first))
            if here != there:
                yield (*place, "simulated", name), _unlike(here, there, first.role)


def _unlike(here: Any, there: Any, role: Role) -> str:
    def shown(value: Any) -> str:
        return "not set" if value is None else repr(value)[:_SHOWN]

    return f"must be the same in all pools: it is {shown(here)}, and {shown(there)} in {role}"


def _refuse(problems: Iterable[tuple[tuple[Any, ...], str]]) -> None:
    """Raise if there are problems, given as pairs of location and message."""
    found = [
        InitErrorDetails(
            type=PydanticCustomError("pool", "{why}", {"why": why}), loc=place, input=None
        )
        for place, why in problems
    ]
    if found:
        raise ValidationError.from_exception_data("pools", found)


def _laid_over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    laid = dict(base)
    for name, value in own.items():
        below = laid.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = _laid_over(below, value)
        laid[name] = value
    return laid
