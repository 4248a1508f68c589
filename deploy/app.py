"""The Serve application, from one configuration: ``import_path: sluice.deploy.app:build`` with
the configuration as ``args``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from sluice.deploy.autoscaling import serve_autoscaling
from sluice.deploy.config import (
    ROUTER_DEPLOYMENT,
    ModelFleet,
    SluiceConfig,
    parse_config,
)
from sluice.replica.deployment import ReplicaServer
from sluice.replica.pools import Pool, resources
from sluice.replica.processes import has_cuda_vllm
from sluice.replica.vllm_args import devices
from sluice.router.app import Router, ServedModel
from sluice.router.ingress.http_server import STOP_S
from sluice.router.serve.hint import START_WAIT_S
from sluice.scheduling.roles import ROLES, Role

REPLICA_DEPLOYMENTS: dict[Role, str] = {
    "mixed": "Replica",
    "prefill": "Prefill",
    "decode": "Decode",
}

SUPPORTED_RAY: Final = "2.60"
"""The minor version of Ray whose request router Sluice uses."""

HEALTH_CHECK_PERIOD_S = 1.0
"""Interval of Serve's health checks: a check costs little, and what is dead is replaced so much
later."""

OTHER_POOL_WAIT_S = 0.25
"""How long a request waits for the first replica of a pool if it may use another pool, seconds."""

_LOGGING = LoggingConfig(enable_access_log=False)
"""Serve's access log is off: Sluice logs each request."""

_ADMITTED_BY_CONTROLLER = 1_000_000
"""Serve must not queue: the router and the replica limit their requests and refuse the rest."""


def build(args: Mapping[str, Any] | SluiceConfig) -> Application:
    """The application for ``args``, a configuration or its mapping. Raises ValueError: a field
    is not allowed, the admin API would be open to everyone, or this Ray is not supported."""
    check_ray()
    config = args if isinstance(args, SluiceConfig) else parse_config(args)
    if config.router.admin.access == "open" and not isinstance(args, SluiceConfig):
        raise ValueError("router.admin.access: open is for `sluice serve` only; configure keys")
    drain_s = max(fleet.config.replica.drain_timeout_s for fleet in config.fleets)
    place: dict[str, Any] = {"num_cpus": 0.1}
    if config.router.node_labels:
        place["label_selector"] = config.router.node_labels
    router = serve.deployment(Router).options(
        name=ROUTER_DEPLOYMENT,
        logging_config=_LOGGING,
        num_replicas=config.router.replicas,
        ray_actor_options=place,
        max_ongoing_requests=_ADMITTED_BY_CONTROLLER,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        # Serve ends a router that misses three in a row: its connections have no other end.
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=drain_s + 2 * STOP_S,
        graceful_shutdown_wait_loop_s=0.1,
        # An update starts a new router before it stops any, so that a single router causes no gap.
        max_surge_percent=1,
    )
    models = tuple(
        ServedModel(
            fleet.model,
            fleet.controller,
            _roles(fleet),
            fleet.config.engine.adapters,
            fleet.key,
            fleet.config.engine.adapters_dir is not None,
            transfers_kv=fleet.pools[0].engine.transfer is not None,
        )
        for fleet in config.fleets
    )
    return router.bind(
        {fleet.model: _pools(fleet, config) for fleet in config.fleets},
        models,
        config.router,
        config.telemetry,
        drain_s,
        *(_shadow(fleet, config) for fleet in config.fleets if fleet.controller.shadow is not None),
    )


def _shadow(fleet: ModelFleet, config: SluiceConfig) -> Application:
    """The process of a model's shadow policies."""
    from sluice.deploy.shadow import Shadow  # with the simulator, which nothing else here needs

    shadow = serve.deployment(Shadow).options(
        name="Shadow" if fleet.key is None else f"Shadow-{fleet.key}",
        logging_config=_LOGGING,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=2.0,
        graceful_shutdown_wait_loop_s=0.1,
    )
    when = {name: entry.when_unattainable for name, entry in config.router.classes.items()}
    return shadow.bind(fleet, when, config.telemetry)


def check_ray(version: str = ray.__version__) -> None:
    """Raises ValueError: Sluice does not support this version of Ray; the message says which it
    does."""
    if not version.startswith(f"{SUPPORTED_RAY}."):
        raise ValueError(f"Sluice does not support Ray {version}; supported is {SUPPORTED_RAY}")


def deployment_name(key: str | None, role: Role = "mixed", pool: str = "") -> str:
    """Name of the deployment of a pool; a pool that is named as its role adds nothing."""
    name = REPLICA_DEPLOYMENTS[role] + (f".{pool}" if pool not in ("", role) else "")
    return name if key is None else f"{name}-{key}"


def _roles(fleet: ModelFleet) -> dict[str, Role]:
    """Role by pool of one model. Replicas that change their roles are in a pool of each."""
    if fleet.config.replica.elastic:
        return {role: role for role in ROLES}
    return {pool.name: pool.role for pool in fleet.pools}


def _pools(fleet: ModelFleet, config: SluiceConfig) -> dict[str, Application]:
    """Deployment by pool of one model. Replicas that change their roles are all in one."""
    if fleet.config.replica.elastic:
        return dict.fromkeys(ROLES, _replicas(fleet, fleet.pools[0], config))
    return {pool.name: _replicas(fleet, pool, config) for pool in fleet.pools}


def _replicas(fleet: ModelFleet, pool: Pool, config: SluiceConfig) -> Application:
    """One pool of one model's replicas."""
    controller, replica = fleet.controller, pool.replica
    size: dict[str, Any] = {"num_replicas": replica.count}
    if replica.autoscaling is not None:
        size = {"autoscaling_config": serve_autoscaling(replica.autoscaling)}
    if replica.max_per_node is not None:
        size["max_replicas_per_node"] = replica.max_per_node
    hints: dict[str, Any] = {"controller": controller.model_dump(mode="json"), "key": fleet.key}
    if len(fleet.pools) > 1:
        hints |= {"other_pools": True, "no_replica_wait_s": OTHER_POOL_WAIT_S}
    if controller.startup_s is not None:
        hints |= {"scales_to_zero": True, "no_replica_wait_s": START_WAIT_S}
    replicas = serve.deployment(ReplicaServer).options(
        name=deployment_name(fleet.key, pool.role, pool.name),
        logging_config=_LOGGING,
        **size,
        **resources(pool.engine, replica, gpus_per_replica(pool)),
        max_ongoing_requests=_ADMITTED_BY_CONTROLLER,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=replica.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        max_surge_percent=replica.surge_percent,
        request_router_config=RequestRouterConfig(
            request_router_class="sluice.router.serve.request_router:HintRouter",
            request_router_kwargs=hints,
        ),
    )
    return replicas.bind(pool.engine, replica, controller, fleet.key, config.telemetry, pool.role)


def gpus_per_replica(pool: Pool) -> float:
    """As configured, else one for each worker of the CUDA build of vLLM, and 0 otherwise."""
    if pool.replica.num_gpus is not None:
        return pool.replica.num_gpus
    on_gpus = pool.engine.kind == "vllm" and has_cuda_vllm()
    return float(devices(pool.engine.vllm_args)) if on_gpus else 0.0
