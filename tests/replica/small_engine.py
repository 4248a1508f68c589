"""The configuration of an engine that stock vLLM's tokens are known for, and its greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sluice.protocol.requests import EngineRequest, ResponseChunk, ResponseTail
from sluice.replica.config import EngineConfig
from sluice.replica.engine import Engine
from tests.known_profile import known_profile
from tests.replica.in_process import OBJECTIVES


def small_config(model: Path, directory: Path, **sizes: int) -> EngineConfig:
    """``directory`` gets its batch logs; ``sizes``: arguments of vLLM, with ``_`` for ``-``."""
    return EngineConfig(
        model=str(model),
        served_model_name="small",
        cache_dir=directory,
        batch_log=directory,
        vllm_args={
            "max-model-len": 1024,
            "max-num-batched-tokens": 512,
            "kv-cache-memory-bytes": 64 << 20,
            "block-size": 32,
            "dtype": "float32",
            **{name.replace("_", "-"): size for name, size in sizes.items()},
        },
        latency_profile=known_profile(directory),
        grammar_check_s=0,
    )


async def greedy_tokens(
    engine: Engine, name: str, prompt: Sequence[int], output: int, number: int
) -> tuple[int, ...]:
    """The ``output`` greedy tokens of a request with the objective of this number."""
    body = {
        "model": "small",
        "prompt": list(prompt),
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    asked = EngineRequest(name, "completions", body, OBJECTIVES[number % len(OBJECTIVES)])
    items = [item async for item in engine.generate(asked)]
    assert isinstance(items[-1], ResponseTail)
    answer = json.loads(b"".join(each.data for each in items if isinstance(each, ResponseChunk)))
    return tuple(answer["choices"][0]["token_ids"])
