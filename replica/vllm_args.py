"""vLLM's arguments as a configuration gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NOT_SERVED = "Sluice does not serve it"
_ONE_NODE = "the ranks of a replica are on its node; data-parallel-size is how many"
_TLS = "set router.tls"

_INSTEAD: Mapping[str, str] = {
    "additional-config": "Sluice sets it",
    "allow-credentials": "set router.cors_origins",
    "allowed-headers": "set router.cors_origins",
    "allowed-methods": "set router.cors_origins",
    "allowed-origins": "set router.cors_origins",
    "api-key": "set router.api_keys or router.api_keys_file",
    "api-server-count": "set router.replicas",
    "cohere-is-reasoning-model": _NOT_SERVED,
    "config": "write its arguments into vllm_args",
    "data-parallel-address": _ONE_NODE,
    "data-parallel-backend": _ONE_NODE,
    "data-parallel-external-lb": _ONE_NODE,
    "data-parallel-hybrid-lb": _ONE_NODE,
    "data-parallel-multi-port-external-lb": _ONE_NODE,
    "data-parallel-rank": _ONE_NODE,
    "data-parallel-rpc-port": _ONE_NODE,
    "data-parallel-size-local": _ONE_NODE,
    "data-parallel-start-rank": _ONE_NODE,
    "data-parallel-supervisor-port": _ONE_NODE,
    "disable-access-log-for-endpoints": "set telemetry.logs",
    "disable-fastapi-docs": "Sluice serves its own OpenAPI document",
    "disable-log-stats": "Sluice sets it",
    "disable-uvicorn-access-log": "set telemetry.logs",
    "dp-supervisor-probe-failure-threshold": _ONE_NODE,
    "dp-supervisor-probe-interval-s": _ONE_NODE,
    "dp-supervisor-probe-timeout-s": _ONE_NODE,
    "enable-offline-docs": "Sluice serves its own OpenAPI document",
    "enable-per-request-metrics": "answers have their times in x-sluice headers and in the usage",
    "enable-request-id-headers": "every answer has x-request-id",
    "enable-scale-out": _NOT_SERVED,
    "enable-server-load-tracking": "/metrics and `sluice top` show the load",
    "enable-ssl-refresh": _TLS,
    "enable-tokenizer-info-endpoint": _NOT_SERVED,
    "grpc": _NOT_SERVED,
    "grpc-port": _NOT_SERVED,
    "h11-max-header-count": "the router has its own bounds",
    "h11-max-incomplete-event-size": "set router.max_body_bytes",
    "headless": _ONE_NODE,
    "host": "set router.host",
    "middleware": "put a proxy before Sluice",
    "model": "set engine.model",
    "model-tag": "set engine.model",
    "nnodes": "distributed-executor-backend: ray spreads workers over nodes",
    "node-rank": "distributed-executor-backend: ray spreads workers over nodes",
    "port": "set router.port",
    "root-path": "have the proxy in front of Sluice remove the prefix",
    "scheduler-cls": "set engine.policy",
    "scheduling-policy": "set engine.policy",
    "served-model-name": "set engine.served_model_name",
    "shutdown-timeout": "set replica.drain_timeout_s",
    "spec-method": "use speculative-config",
    "spec-model": "use speculative-config",
    "spec-tokens": "use speculative-config",
    "sse-keep-alive-interval": _NOT_SERVED,
    "ssl-ca-certs": _TLS,
    "ssl-cert-reqs": _TLS,
    "ssl-certfile": _TLS,
    "ssl-ciphers": _TLS,
    "ssl-keyfile": _TLS,
    "tokens-only": _NOT_SERVED,
    "uds": "set router.host and router.port",
    "uvicorn-log-level": "set telemetry.logs",
}
"""vLLM's arguments that Sluice sets or does not run, and what to do instead."""

KV_TIERS = ("kv-offloading-size", "kv-transfer-config")  # Arguments that choose a KV connector

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def check_names(vllm_args: Mapping[str, Any]) -> None:
    """Raises ValueError: names that are no long option of vLLM, or in ``_INSTEAD``; what to set."""
    given = [*map(_option, vllm_args)]
    problems = [f"{name} is given twice" for name in sorted({*given}) if given.count(name) > 1]
    for name in given:
        plain = name.partition(".")[0].partition("=")[0].lstrip("-").removeprefix("no-")
        if plain in _INSTEAD:
            problems.append(f"{plain} cannot be set: {_INSTEAD[plain]}")
        elif "." in name:
            problems.append(f"{plain} must be a mapping: {plain}: {{...}} in place of {plain}.name")
        elif not _NAME.fullmatch(name):
            problems.append(f"no option of vLLM has such a name: {name[:40]!r}")
    if problems:
        raise ValueError("vllm_args: " + "; ".join(problems))


def by_option(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by command-line option, without dashes in front, and with ``-`` for ``_``."""
    return {_option(name): value for name, value in vllm_args.items()}


def _option(name: str) -> str:
    return name.replace("_", "-")


def workers(vllm_args: Mapping[str, Any]) -> int:
    """Workers of an engine or of one rank, a device each. Raises ValueError: a size is invalid."""
    given, product = by_option(vllm_args), 1
    for name in ("tensor-parallel-size", "pipeline-parallel-size"):
        product *= _size(given, name)
    return product


def ranks(vllm_args: Mapping[str, Any]) -> int:
    """Engines of a replica with queues of their own. Raises ValueError: the size is invalid."""
    return _size(by_option(vllm_args), "data-parallel-size")


def devices(vllm_args: Mapping[str, Any]) -> int:
    """Workers of a replica in all. Raises ValueError: a size is invalid."""
    return workers(vllm_args) * ranks(vllm_args)


def _size(given: Mapping[str, Any], name: str) -> int:
    size = str(given.get(name) or 1)
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"vllm_args: {name} must be a whole number of at least 1, not {size}")
    return int(size)


def on_ray(vllm_args: Mapping[str, Any]) -> bool:
    """Whether the workers are actors of Ray, which may be on several nodes."""
    return by_option(vllm_args).get("distributed-executor-backend") == "ray"
