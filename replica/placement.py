"""What a replica reserves in Ray: an actor's resources, or a placement group for its workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.vllm_args import KV_TIERS, by_option, devices, on_ray, ranks

_TPU_LABELS = "ray.io/tpu-"
_ACCELERATOR = "ray.io/accelerator-type"


def resources(engine: EngineConfig, replica: ReplicaConfig, gpus: float) -> dict[str, Any]:
    """Serve's options for a deployment whose replicas have ``gpus`` GPUs each.

    Without vLLM's executor for Ray all GPUs are the actor's, so they are on its node. With it each
    worker is an actor, for which Serve reserves a bundle before it starts the replica; the replica
    itself is in the first one.
    """
    actor: dict[str, Any] = {"num_cpus": replica.num_cpus, "num_gpus": gpus}
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
    """Settings by which Ray could not place a replica, with the reason. ``place`` is where those of
    ``replica`` are in the configuration."""
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
        if name.startswith(_TPU_LABELS) or (
            name == _ACCELERATOR and value.upper().startswith("TPU")
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
        (engine.preemption.granularity != "off", "engine.preemption must be off"),
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
