from __future__ import annotations

import re
from typing import Any

import pytest
from ray.serve.schema import RayActorOptionsSchema

from sluice.deploy.app import OTHER_POOL_WAIT_S, build, check_ray
from sluice.deploy.config import parse_config


def deployments(data: dict[str, Any]) -> dict[str, Any]:
    """The deployments of replicas by name."""
    router = build(parse_config(data))._bound_deployment
    pools = [pool for pools in router.init_args[0].values() for pool in pools.values()]
    return {pool._bound_deployment.name: pool._bound_deployment for pool in pools}


def waits_s(deployment: Any) -> float | None:
    """How long a request waits for the first replica, where that is told."""
    config = deployment._deployment_config.request_router_config
    wait_s: float | None = config.request_router_kwargs.get("no_replica_wait_s")
    return wait_s


def test_without_pools_an_update_replaces_one_deployment_where_there_is_room() -> None:
    (name, one), *others = deployments({"replica": {"count": 3, "surge_percent": 50}}).items()
    assert (name, one.num_replicas, others) == ("Replica", 3, [])
    assert "label_selector" not in one.ray_actor_options
    assert waits_s(one) is None
    assert one._deployment_config.max_surge_percent == 50


def test_an_update_starts_a_router_before_it_stops_one_where_its_labels_say() -> None:
    labels = {"sluice/worker-group": "routers"}
    router = build({"router": {"node_labels": labels}})._bound_deployment
    assert router._deployment_config.max_surge_percent == 1, "rounded up to one"
    assert RayActorOptionsSchema(**router.ray_actor_options).label_selector == labels
    assert "label_selector" not in build({})._bound_deployment.ray_actor_options


ON_RAY = {
    "tensor-parallel-size": 2,
    "pipeline-parallel-size": 2,
    "distributed-executor-backend": "ray",
}


def test_workers_on_one_node_are_in_the_actor_that_has_their_gpus() -> None:
    engine = {"vllm_args": {**ON_RAY, "distributed-executor-backend": "mp"}}
    (one,) = deployments({"engine": engine, "replica": {"num_gpus": 4}}).values()
    assert one.ray_actor_options["num_gpus"] == 4
    assert one._replica_config.placement_group_bundles is None


def test_workers_that_are_actors_have_a_placement_group() -> None:
    replica = {
        "num_cpus": 3,
        "num_gpus": 4,
        "placement_strategy": "STRICT_PACK",
        "node_labels": {"ray.io/accelerator-type": "H100"},
    }
    (one,) = deployments({"engine": {"vllm_args": ON_RAY}, "replica": replica}).values()
    options, group = one.ray_actor_options, one._replica_config
    assert (options["num_cpus"], options["num_gpus"]) == (3, 0)
    assert "label_selector" not in options
    assert group.placement_group_bundles == [{"CPU": 3, "GPU": 1}] + [{"GPU": 1}] * 3
    assert group.placement_group_strategy == "STRICT_PACK"
    assert group.placement_group_bundle_label_selector == [replica["node_labels"]] * 4


def test_by_default_each_worker_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.deploy.app.has_cuda_vllm", lambda: True)
    data: dict[str, Any] = {"engine": {"vllm_args": {"tensor_parallel_size": 2}}}
    assert deployments(data)["Replica"].ray_actor_options["num_gpus"] == 2
    data["engine"]["vllm_args"]["data-parallel-size"] = 3
    assert deployments(data)["Replica"].ray_actor_options["num_gpus"] == 6
    data["engine"]["vllm_args"] = ON_RAY
    assert len(deployments(data)["Replica"]._replica_config.placement_group_bundles) == 4
    data["engine"]["kind"] = "simulated"
    assert deployments(data)["Replica"]._replica_config.placement_group_bundles is None


@pytest.mark.parametrize(
    ("args", "replica", "fault"),
    [
        (ON_RAY, {"num_gpus": 2}, "replica.num_gpus: must be 4"),
        (ON_RAY, {"placement_strategy": "SPREAD"}, "'PACK' or 'STRICT_PACK'"),
        ({"tensor-parallel-size": 4}, {"num_gpus": 2}, "replica.num_gpus: must be at least 4"),
        ({"pipeline-parallel-size": "x"}, {}, "pipeline-parallel-size must be a whole number"),
        ({"data-parallel-size": 0.5}, {}, "data-parallel-size must be a whole number"),
        ({"data-parallel-size": 2}, {"num_gpus": 1}, "replica.num_gpus: must be at least 2"),
        ({}, {"node_labels": {"ray.io/tpu-topology": "4x4"}}, "ray.io/tpu-topology asks for TPUs"),
        (
            {},
            {"pools": {"mixed": {"node_labels": {"ray.io/accelerator-type": "TPU-V5P"}}}},
            "replica.pools.mixed.node_labels: ray.io/accelerator-type asks for TPUs",
        ),
    ],
)
def test_what_ray_could_not_place_is_refused(
    args: dict[str, Any], replica: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_config({"engine": {"vllm_args": args}, "replica": replica})


def test_each_pool_is_a_deployment_of_its_own() -> None:
    pools = {
        "prefill": {"count": 2, "num_gpus": 4, "node_labels": {"sluice/role": "prefill"}},
        "decode": {"autoscaling": {"min_replicas": 1, "max_replicas": 3, "initial_replicas": 2}},
        "mixed": {},
    }
    found = deployments({"replica": {"num_cpus": 3, "pools": pools}})
    assert set(found) == {"Prefill", "Decode", "Replica"}
    prefill, decode, mixed = (found[name] for name in ("Prefill", "Decode", "Replica"))
    options = prefill.ray_actor_options
    assert (prefill.num_replicas, options["num_cpus"], options["num_gpus"]) == (2, 3, 4)
    assert RayActorOptionsSchema(**options).label_selector == {"sluice/role": "prefill"}
    scaled = decode._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.initial_replicas, scaled.max_replicas) == (1, 2, 3)
    assert mixed.ray_actor_options["num_cpus"] == 3
    # A request may go to another pool, so it does not wait for long for a replica of this one.
    assert {waits_s(each) for each in found.values()} == {OTHER_POOL_WAIT_S}
    roles = {name: each.init_args[5] for name, each in found.items()}
    assert roles == {"Prefill": "prefill", "Decode": "decode", "Replica": "mixed"}


def test_elastic_replicas_are_one_deployment_for_every_role() -> None:
    data = {"replica": {"elastic": True, "count": 4}}
    ((_, pools),) = build(parse_config(data))._bound_deployment.init_args[0].items()
    assert set(pools) == {"mixed", "prefill", "decode"}
    assert len(set(map(id, pools.values()))) == 1
    (one,) = deployments(data).values()
    assert (one.num_replicas, one.init_args[5], waits_s(one)) == (4, "mixed", None)


def test_a_role_has_replicas_of_several_kinds() -> None:
    """As on GPUs of two kinds, with as many workers as the model needs there."""
    large = {"vllm_args": {"tensor-parallel-size": 4, "kv-cache-dtype": "fp8"}}
    pools = {
        "mixed": {"count": 2, "node_labels": {"ray.io/accelerator-type": "H100"}},
        "l4": {"role": "mixed", "count": 3, "num_gpus": 4, "engine": large},
    }
    data = {"replica": {"num_gpus": 1, "pools": pools}}
    found = deployments(data)
    assert set(found) == {"Replica", "Replica.l4"}
    assert [each.ray_actor_options["num_gpus"] for each in found.values()] == [1, 4]
    assert [each.init_args[0].vllm_args for each in found.values()] == [{}, large["vllm_args"]]
    assert {each.init_args[5] for each in found.values()} == {"mixed"}
    assert {waits_s(each) for each in found.values()} == {OTHER_POOL_WAIT_S}
    (model,) = build(parse_config(data))._bound_deployment.init_args[1]
    assert model.roles == {"mixed": "mixed", "l4": "mixed"}
    split = {"replica": {"pools": {"prefill": {}, "decode": {}}}}
    assert set(deployments({"models": {"a-b": data, "b": None, "c": split}})) == {
        *("Replica-a-b", "Replica.l4-a-b", "Replica-b", "Prefill-c", "Decode-c")
    }


def test_another_minor_version_of_ray_is_refused() -> None:
    check_ray()
    check_ray("2.60.7")
    for version in ("2.59.1", "2.61.0", "2.6.0", "3.0.0.dev0"):
        with pytest.raises(ValueError, match=rf"not support Ray {version}; supported is 2\.60"):
            check_ray(version)
