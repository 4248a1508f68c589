"""vLLM's arguments as a configuration gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
        "/metrics and `sluice status` show the load": "enable-server-load-tracking",
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
        if (instead := instead_of(plain)) is not None:
            problems.append(f"{plain} cannot be set: {instead}")
        elif "." in name:
            problems.append(f"{plain} must be a mapping: {plain}: {{...}} in place of {plain}.name")
        elif not _NAME.fullmatch(name):
            problems.append(f"no option of vLLM has such a name: {name[:40]!r}")
    if problems:
        raise ValueError("vllm_args: " + "; ".join(problems))


def instead_of(option: str) -> str | None:
    """What to do instead of setting ``option``, a name without dashes in front; ``None``: it can
    be set."""
    return _INSTEAD.get(option.removeprefix("no-"))


def by_option(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by command-line option, without dashes in front, and with ``-`` for ``_``."""
    return {_option(name): value for name, value in vllm_args.items()}


def _option(name: object) -> str:
    return str(name).replace("_", "-")  # YAML's names may be numbers


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


# vLLM's flags as a command line gives them. vLLM's own parser takes seconds to import, so which
# flags exist is left to the check of the arguments.

_SHORT: Mapping[str, str] = {
    "ac": "attention-config",
    "asc": "api-server-count",
    "cc": "compilation-config",
    "dc": "diffusion-config",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpm": "data-parallel-multi-port-external-lb",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "O": "optimization-level",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "r": "node-rank",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}

_SHORT_FLAG = re.compile(r"-(O(?=[=\d])|[A-Za-z]+)(?:=|(?=\.))?(.*)", re.DOTALL)


def long_flag(word: str) -> str:
    """``word``, or for a short flag of vLLM, ``-tp`` or ``-O3``, its long form."""
    found = _SHORT_FLAG.fullmatch(word)
    if found is None or found[1] not in _SHORT:
        return word
    name, rest = f"--{_SHORT[found[1]]}", found[2]
    return name + rest if not rest or rest.startswith(".") else f"{name}={rest}"


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """The flags in ``words`` by option, as ``vllm_args`` has them: ``--no-x`` is False, JSON a
    mapping, ``--x.y 1`` one with y. The last of several counts. Raises ValueError: a word belongs
    to no flag."""
    flags: list[tuple[str, list[str]]] = []
    for word in map(long_flag, words):
        if re.match(r"--?[A-Za-z]", word):
            name, separator, value = word.partition("=")
            flags.append((name.lstrip("-"), [value] if separator else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            raise ValueError(f"{word!r} belongs to no flag")
    plain: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    for name, values in flags:
        option, *path = name.split(".")
        option = _option(option)
        if path:
            _set_path(dotted.setdefault(option, {}), path, " ".join(values))
        elif not values:
            plain.pop(option.removeprefix("no-"), None)
            plain[option.removeprefix("no-")] = not option.startswith("no-")
        else:
            typed = [*map(_typed, values)]
            plain[option] = typed[0] if len(typed) == 1 else typed
    return plain | dotted


def _set_path(into: dict[str, Any], path: list[str], text: str) -> None:
    """Set what the rest of a dotted flag names; ``+`` at its end adds to a list."""
    *outer, last = path
    for name in outer:
        inner = into.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{name} is both a value and a mapping")
        into = inner
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if last.endswith("+"):
        known = into.get(last[:-1])
        into[last[:-1]] = [*(known if isinstance(known, list) else []), *text.split(",")]
    else:
        into[last] = value


def _typed(text: str) -> Any:
    """A mapping in JSON, or a number, where vLLM gets the same text from it; else ``text``."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    number = type(value) in (int, float) and json.dumps(value) == text
    return value if isinstance(value, dict) or number else text
