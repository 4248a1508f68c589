"""A simulated engine that few requests saturate."""

from __future__ import annotations

from typing import Any, Final

from sluice.benchmarks.live.systems import ENGINE

LIGHT_ENGINE: Final[dict[str, Any]] = {
    **ENGINE,
    "step_s": 0.05,
    "token_s": 0.0004,
    "max_model_tokens": 4096,
    "max_batch_tokens": 1024,
    "max_sequences": 16,
}
"""Its steps are long compared with their delays."""
