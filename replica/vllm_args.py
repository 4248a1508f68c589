"""vLLM's arguments as a configuration gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def by_option(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names of vLLM's command-line options, without the leading dashes; a
    configuration may also have them with ``_`` in place of ``-``."""
    return {name.replace("_", "-"): value for name, value in vllm_args.items()}
