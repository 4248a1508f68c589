"""vLLM's arguments as a configuration gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_INSTEAD: Mapping[str, str] = {
    name: instead
    for instead, names in {
        "Sluice sets it": "additional-config disable-log-stats",
        "set router.cors_origins": (
            "allow-credentials allowed-headers allowed-methods allowed-origins"
        ),
        "set router.api_keys or router.api_keys_file": "api-key",
        "set router.replicas": "api-server-count",
        "Sluice does not serve it": (
            "cohere-is-reasoning-model enable-scale-out enable-tokenizer-info-endpoint grpc "
            "grpc-port sse-keep-alive-interval tokens-only"
        ),
        "write its arguments into vllm_args": "config",
        "the ranks of a replica are on its node; data-parallel-size is how many": (
            "data-parallel-address data-parallel-backend data-parallel-external-lb "
            "data-parallel-hybrid-lb data-parallel-multi-port-external-lb data-parallel-rank "
            "data-parallel-rpc-port data-parallel-size-local data-parallel-start-rank "
            "data-parallel-supervisor-port dp-supervisor-probe-failure-threshold "
            "dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s headless"
        ),
        "set telemetry.logs": (
            "disable-access-log-for-endpoints disable-uvicorn-access-log uvicorn-log-level"
        ),
        "Sluice serves its own OpenAPI document": "disable-fastapi-docs enable-offline-docs",
        "answers have their times in x-sluice headers and in the usage": (
            "enable-per-request-metrics"
        ),
        "every answer has x-request-id": "enable-request-id-headers",
        "/metrics and `sluice top` show the load": "enable-server-load-tracking",
        "set router.tls": (
            "enable-ssl-refresh ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile"
        ),
        "the router has its own bounds": "h11-max-header-count",
        "set router.max_body_bytes": "h11-max-incomplete-event-size",
        "set router.host": "host",
        "put a proxy before Sluice": "middleware",
        "set engine.model": "model model-tag",
        "distributed-executor-backend: ray spreads workers over nodes": "nnodes node-rank",
        "set router.port": "port",
        "have the proxy in front of Sluice remove the prefix": "root-path",
        "set engine.policy": "scheduler-cls scheduling-policy",
        "set engine.served_model_name": "served-model-name",
        "set replica.drain_timeout_s": "shutdown-timeout",
        "use speculative-config": "spec-method spec-model spec-tokens",
        "set router.host and router.port": "uds",
    }.items()
    for name in names.split()
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
