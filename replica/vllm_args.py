"""vLLM's arguments as a configuration gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def by_option(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names of vLLM's command-line options, without the leading dashes; a
    configuration may also have them with ``_`` in place of ``-``."""
    return {name.replace("_", "-"): value for name, value in vllm_args.items()}


def workers(vllm_args: Mapping[str, Any]) -> int:
    """How many workers an engine with these arguments has, each with a device of its own; with
    data parallelism one of its ranks.

    Raises:
        ValueError: a size is not a positive whole number.
    """
    given, product = by_option(vllm_args), 1
    for name in ("tensor-parallel-size", "pipeline-parallel-size"):
        product *= _size(given, name)
    return product


def ranks(vllm_args: Mapping[str, Any]) -> int:
    """How many engines with queues of their own a replica has, each with all :func:`workers`.

    Raises:
        ValueError: the size is not a positive whole number.
    """
    return _size(by_option(vllm_args), "data-parallel-size")


def devices(vllm_args: Mapping[str, Any]) -> int:
    """How many workers a replica has in all.

    Raises:
        ValueError: a size is not a positive whole number.
    """
    return workers(vllm_args) * ranks(vllm_args)


def _size(given: Mapping[str, Any], name: str) -> int:
    size = str(given.get(name) or 1)
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"vllm_args: {name} must be a whole number of at least 1, not {size}")
    return int(size)


def on_ray(vllm_args: Mapping[str, Any]) -> bool:
    """Whether the workers are actors of Ray, which may be on several nodes."""
    return by_option(vllm_args).get("distributed-executor-backend") == "ray"
