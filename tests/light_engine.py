"""A simulated engine that few requests saturate."""

from __future__ import annotations

from typing import Any, Final

LIGHT_ENGINE: Final[dict[str, Any]] = {
    "step_s": 0.05,
    "token_s": 0.0004,
    "context_token_s": 1e-7,
    "kv_blocks": 4096,
    "block_tokens": 16,
    "max_model_tokens": 4096,
    "max_batch_tokens": 1024,
    "max_sequences": 16,
}
"""Its steps are long compared with their delays."""
