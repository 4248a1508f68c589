"""vLLM's CPU build with the one thing that its executor for Ray lacks there: the name under which
Ray counts devices. A node states as many GPUs as it shall have workers; all else is vLLM's own. A
copy of this file is a plugin of vLLM."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


# vLLM's classes are untyped here, so their subclasses are, too.
class StatedGpus(CpuPlatform):  # type: ignore[misc]
    """Workers on CPUs, each in place of a GPU that a node states."""

    ray_device_key = "GPU"


def register() -> str:
    """What vLLM asks a plugin for: the platform's class."""
    return "stated_gpus.StatedGpus"
