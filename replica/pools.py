"""The pools of a model's replicas, each with its role and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from sluice.replica import worker
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.vllm_args import KV_TIERS, by_option, devices, on_ray, ranks
from sluice.scheduling.roles import ROLES, Role

# What a replica reserves in Ray: an actor's resources, or a placement group for its workers.


def resources(engine: EngineConfig, replica: ReplicaConfig, gpus: float) -> dict[str, Any]:
    """Serve's options for replicas with ``gpus`` GPUs each. All are the actor's, except with vLLM's
    executor for Ray: then each worker has a bundle, and the replica is in the first."""
    actor: dict[str, Any] = {"num_cpus": replica.num_cpus, "num_gpus": gpus}
    if engine.kind == "vllm":
        actor["runtime_env"] = {"py_executable": worker.command()}
    labels = dict(replica.node_labels)
    if not (gpus and on_ray(engine.vllm_args)):
        if labels:
            actor["label_selector"] = labels
        return {"ray_actor_options": actor}
    bundles = [{"GPU": 1.0} for _ in range(int(gpus))]
    if replica.num_cpus:
        bundles[0]["CPU"] = replica.num_cpus
    options = {
        "ray_actor_options": {**actor, "num_gpus": 0},
        "placement_group_bundles": bundles,
        "placement_group_strategy": replica.placement_strategy,
    }
    if labels:
        options["placement_group_bundle_label_selector"] = [labels] * len(bundles)
    return options


def needs(engine: EngineConfig, replica: ReplicaConfig, gpus: float) -> str:
    """In words, what Ray must find to place a replica. ``gpus`` as in :func:`resources`."""
    amount = f"{gpus:g} GPUs" if gpus else f"{replica.num_cpus:g} CPUs"
    spans = gpus and on_ray(engine.vllm_args) and replica.placement_strategy == "PACK"
    where = "" if spans else " on one node"
    labels = ", ".join(f"{name}={value}" for name, value in replica.node_labels.items())
    return f"{amount}{where}{f' with the labels {labels}' if labels else ''}"


def unplaceable(
    engine: EngineConfig, replica: ReplicaConfig, place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings by which Ray could not place a replica, with the reason; ``place`` locates them."""
    try:
        needed = devices(engine.vllm_args)
    except ValueError as error:
        yield ("engine", "vllm_args"), str(error)
        return
    yield from _unranked(engine, replica, place)
    gpus = replica.num_gpus
    if on_ray(engine.vllm_args):
        if gpus not in (None, 0, needed):
            yield (
                (*place, "num_gpus"),
                f"must be {needed}: with distributed-executor-backend ray each worker has a GPU "
                "(tensor-parallel-size x pipeline-parallel-size)",
            )
        if replica.max_per_node is not None:
            yield (
                (*place, "max_per_node"),
                "cannot be set with distributed-executor-backend ray: Ray places such a replica by "
                "its placement group",
            )
    elif gpus is not None and 0 < gpus < needed and needed > 1:
        yield (
            (*place, "num_gpus"),
            f"must be at least {needed}, a GPU for each worker (tensor-parallel-size x "
            "pipeline-parallel-size x data-parallel-size)",
        )
    for name, value in replica.node_labels.items():
        if name.startswith("ray.io/tpu-") or (
            name == "ray.io/accelerator-type" and value.upper().startswith("TPU")
        ):
            yield (
                (*place, "node_labels"),
                f"{name} asks for TPUs: replicas run on GPUs and CPUs only, and no slice of TPU "
                "hosts is reserved as a whole",
            )


def _unranked(
    engine: EngineConfig, replica: ReplicaConfig, place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings that data parallelism does not go with, with the reason."""
    if ranks(engine.vllm_args) == 1:
        return
    rules = (
        (on_ray(engine.vllm_args), "distributed-executor-backend may not be ray"),
        (replica.autoscaling is not None, f"{'.'.join(place)}.autoscaling must be off"),
        (engine.preemption, "engine.preemption must be off"),
        (
            engine.transfer is not None,
            "KV transfer, and pools for prefill and decode, must be off: leave out engine.transfer "
            "and replica.elastic",
        ),
        *(
            (by_option(engine.vllm_args).get(tier) is not None, f"{tier} must be unset")
            for tier in KV_TIERS
        ),
        (engine.draft_method is not None, "speculative-config must be off"),
        (engine.adapters_dir is not None, "engine.adapters_dir must be unset"),
    )
    for broken, rule in rules:
        if broken:
            yield ("engine", "vllm_args"), f"with data-parallel-size above 1, {rule}"


_SAME_FIELDS = ("adapters_dir", "cache_dir", "kind", "model", "served_model_name", "transfer")
"""Engine settings that pools share: a request that begins in one pool ends in another."""

_SAME_ARGUMENTS = (
    "chat-template",
    "chat-template-content-format",
    "default-chat-template-kwargs",
    "enable-auto-tool-choice",
    "enable-lora",
    "generation-config",
    "hf-overrides",
    "logits-processors",
    "lora-modules",
    "max-logprobs",
    "max-model-len",
    "override-generation-config",
    "reasoning-parser",
    "revision",
    "tokenizer",
    "tokenizer-mode",
    "tokenizer-revision",
    "tool-call-parser",
    "trust-request-chat-template",
)
"""vLLM's arguments that decide what a request may ask for and its tokens: the same in all pools."""

_SAME_KV_ARGUMENTS = (
    "block-size",
    "dtype",
    "kv-cache-dtype",
    "quantization",
    "tensor-parallel-size",
)
"""vLLM's arguments that decide what KV is and its memory layout: the same in P/D pairs."""

_SHOWN = 80  # Max characters of a value in an error message

_SAME_SIMULATED, _SAME_KV_SIMULATED = ("max_model_tokens",), ("block_tokens",)


class Pool(NamedTuple):
    """One pool of a model, with the complete settings of its replicas."""

    name: str
    role: Role
    engine: EngineConfig
    replica: ReplicaConfig


def pools_of(engine: EngineConfig, replica: ReplicaConfig) -> tuple[Pool, ...]:
    """The pools by role in the order of ``ROLES``; one mixed pool if the sections name none. Raises
    pydantic.ValidationError: a pool is invalid; the message says where and why."""
    if not replica.pools:
        shared = engine
        if replica.elastic and engine.transfer is None:
            base = engine.model_dump(exclude_unset=True)
            engine = _validated({**base, "transfer": {}}, ("engine",))
        alone = Pool("mixed", "mixed", engine, replica)
        _refuse(_excluded(alone, replica, shared, ("engine",)))
        _refuse(unplaceable(engine, replica, ("replica",)))
        return (alone,)
    roles = {name: replica.role_of(name) for name in replica.pools}
    pairs = "prefill" in roles.values()
    pools = tuple(
        Pool(name, role, _engine(engine, replica, name, pairs), _replica(replica, name))
        for name, role in sorted(roles.items(), key=lambda each: ROLES.index(each[1]))
    )
    places = [("replica", "pools", pool.name) for pool in pools]
    _refuse(
        problem
        for pool, place in zip(pools, places, strict=True)
        for problem in (
            *_excluded(pool, replica, engine, (*place, "engine")),
            *unplaceable(pool.engine, pool.replica, place),
        )
    )
    _refuse(_differences(pools, pairs))
    return pools


def _engine(shared: EngineConfig, replica: ReplicaConfig, name: str, pairs: bool) -> EngineConfig:
    pool = replica.pools[name]
    place = ("replica", "pools", name, "engine")
    _refuse(
        ((*place, field), f"must be the same in all pools: set engine.{field}")
        for field in _SAME_FIELDS
        if field in pool.engine
    )
    base = shared.model_dump(exclude_unset=True)
    if pairs and base.get("transfer") is None:
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


def _replica(shared: ReplicaConfig, name: str) -> ReplicaConfig:
    pool = shared.pools[name]
    own: dict[str, Any] = {"count": pool.count, "autoscaling": pool.autoscaling, "pools": {}}
    if pool.num_gpus is not None:
        own["num_gpus"] = pool.num_gpus
    if pool.node_labels:
        own["node_labels"] = pool.node_labels
    return shared.model_copy(update=own)


def _excluded(
    pool: Pool, replica: ReplicaConfig, shared: EngineConfig, place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Features of a pool's engine that exclude each other, with the reason."""
    engine = pool.engine
    given = by_option(engine.vllm_args)
    tier = next((name for name in KV_TIERS if given.get(name) is not None), None)
    preempts = engine.preemption
    preemption, vllm_args = (*place, "preemption"), (*place, "vllm_args")
    transfers = engine.transfer is not None
    cause = "engine.transfer"
    if shared.transfer is None:
        cause = "replica.elastic" if replica.elastic else "pools of prefill and decode replicas"
    if transfers and tier is not None:
        # vLLM would put its own connector in the place of the one for transfers.
        yield vllm_args, f"{tier} excludes {cause}: an engine has one KV connector; leave one out"
    if preempts and transfers and pool.role != "prefill":
        yield (
            preemption,
            f"must be false, or {cause} left out: this engine may receive KV. Beside KV transfer "
            "only the pool prefill can preempt (replica.pools.prefill.engine.preemption), with "
            "engine.transfer.connector tcp",
        )
    elif preempts and engine.transfer is not None and engine.transfer.connector != "tcp":
        yield (
            preemption,
            f"must be false, or engine.transfer.connector tcp, not {engine.transfer.connector}: "
            "other connectors keep state of the running batch, which a preempting prefill would "
            "overwrite",
        )
    if preempts and tier is not None:
        yield (
            preemption,
            f"must be false with {tier} in vllm_args: its connector keeps state of the running "
            "batch, which a preempting prefill would overwrite",
        )
    if preempts and pool.role == "prefill" and engine.draft_method is not None:
        yield (
            preemption,
            "must be false in the pool prefill with speculative-config: leave that out there "
            "(speculative-config: null), as the pool decodes nothing",
        )
    stages, workers = (
        given.get("pipeline-parallel-size"),
        "pipeline-parallel-size above 1 excludes",
    )
    if str(stages or 1) == "1":
        return
    for wanted, feature, why in (
        (transfers, cause, "KV transfer was not shown to be right with several batches in flight"),
        (tier is not None, tier, "KV connectors were not shown to be right with several batches"),
        (engine.draft_method is not None, "speculative-config", "drafts go to one batch at a time"),
        (preempts, "preemption", "stages run in step"),
    ):
        if wanted:
            yield vllm_args, f"{workers} {feature}: {why}; leave one out"


def _differences(pools: tuple[Pool, ...], pairs: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings by which pools could not serve the same requests, or with ``pairs`` pass KV on."""
    first = pools[0]
    arguments = _SAME_ARGUMENTS + (_SAME_KV_ARGUMENTS if pairs else ())
    simulated = _SAME_SIMULATED + (_SAME_KV_SIMULATED if pairs else ())
    for pool in pools[1:]:
        place: tuple[str, ...] = ("replica", "pools", pool.name, "engine")
        for name in arguments:
            here, there = (by_option(each.engine.vllm_args).get(name) for each in (pool, first))
            if here != there:
                yield (*place, "vllm_args", name), _unlike(here, there, first.name)
        for name in simulated:
            here, there = (getattr(each.engine.simulated, name) for each in (pool, first))
            if here != there:
                yield (*place, "simulated", name), _unlike(here, there, first.name)


def _unlike(here: Any, there: Any, pool: str) -> str:
    def shown(value: Any) -> str:
        return "not set" if value is None else repr(value)[:_SHOWN]

    return f"must be the same in all pools: it is {shown(here)}, and {shown(there)} in {pool}"


def _refuse(problems: Iterable[tuple[tuple[Any, ...], str]]) -> None:
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
