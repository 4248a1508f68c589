"""A plugin of vLLM's CPU build: the name of its device for Ray."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


# vLLM's classes are untyped here, so their subclasses are, too.
class StatedGpus(CpuPlatform):  # type: ignore[misc]
    """Workers on CPUs, each in place of a GPU that a node states."""

    ray_device_key = "GPU"


def register() -> str:
    """What vLLM asks a plugin for: the platform's class."""
    return "stated_gpus.StatedGpus"
