"""LMCache as the tier of an engine's KV, with its server of its own: CPU builds have copies for
``LMCacheMPConnector``. Run where the package ``lmcache`` is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from sluice.deploy.ray_start import free_port
from sluice.replica.vllm.engine import VllmEngine

from .attentive import attentive_model
from .in_process import InProcess, mixed_requests, outputs_of_stock
from .small_engine import data_of, greedy, items_of, small_config
from .test_vllm_async import (
    CALM,
    no_full_collection,
    token_at,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("lmcache") is None, reason="lmcache is not installed"
    ),
]

CHUNK = 32
"""Tokens that LMCache stores together."""

PROMPTS, TOKENS, OUTPUT = 6, 300, 6
"""Prompts, and tokens of each and of its answer, where both are not mixed."""

__all__ = ["no_full_collection"]


@pytest.fixture(scope="module")
def tier(tmp_path_factory):
    """The connector's configuration, to a server that runs."""
    port = free_port()
    options = {
        "port": port,
        "http-port": free_port(),
        "chunk-size": CHUNK,
        "l1-size-gb": 0.25,
        "eviction-policy": "LRU",
        "supported-transfer-mode": "auto",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "LMCACHE_TRACK_USAGE": "false"}
    log = tmp_path_factory.mktemp("lmcache") / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "lmcache.cli.main", "server", *words, "--no-l1-use-lazy"],
            env={**os.environ, **own},
            stdout=output,
            stderr=output,
        )
    own_config = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
    yield {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**own_config, "lmcache.mp.mq_timeout": 60},
    }
    server.terminate()
    server.wait(30)


def settle(engine):
    """Have LMCache store what is left, and forget all KV of the engine itself."""
    end_s = time.monotonic() + 30
    while engine.scheduler.has_requests():
        assert time.monotonic() < end_s
        engine.llm.llm_engine.step()
    assert engine.llm.llm_engine.reset_prefix_cache()


@pytest.mark.parametrize("blocks", [1000, 34])
def test_text_after_loads_is_that_of_stock_vllm(tier, tmp_path, blocks):
    """Also where blocks are short and requests preempted."""
    model, requests = attentive_model(tmp_path), mixed_requests(24)
    expected = outputs_of_stock(model, tmp_path, requests)
    args = {"kv_transfer_config": tier, "num_gpu_blocks_override": blocks}
    engine = InProcess(model, tmp_path, "deadline_triage", **args)
    try:
        assert engine.generate(requests) == expected
        settle(engine)
        for policy in ("deadline_triage", "fcfs"):
            engine.use(policy)
            outputs = engine.run(requests)
            assert [tuple(each.outputs[0].token_ids) for each in outputs] == expected
            # All whole chunks are loaded, but for the last token.
            held = [(len(prompt) - 1) // CHUNK * CHUNK for prompt, _, _ in requests]
            assert [each.num_cached_tokens for each in outputs] == held
            settle(engine)
        free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == blocks - 1 and not engine.scheduler.requests
    finally:
        engine.close()


async def test_a_replicas_engine_loads_what_has_left_its_own_cache(tier, tmp_path):
    """Which holds three of six prompts."""
    args = {
        "kv_cache_memory_bytes": 40 << 15,
        "kv_offloading_size": 1,
        "kv_offloading_backend": "lmcache",
        "kv_transfer_config": {**tier, "kv_connector": None},
        "enable_prompt_tokens_details": True,
    }
    config = small_config(attentive_model(tmp_path), tmp_path, **args)
    engine = VllmEngine(config, "lmcache", 32)
    prompts = [[token_at(f"engine {i}", at) for at in range(TOKENS)] for i in range(PROMPTS)]
    await engine.start()
    try:
        first, second = [
            await asyncio.gather(
                *(answer(engine, f"{number}-{i}", prompt) for i, prompt in enumerate(prompts))
            )
            for number in range(2)
        ]
        assert {cached for _, cached in first} == {0}
        held = (TOKENS - 1) // CHUNK * CHUNK
        assert [(tokens, held) for tokens, _ in first] == second
        assert len(engine.state().rows) == 0
    finally:
        await engine.stop()


async def answer(engine, name, prompt):
    """An answer's greedy tokens, and how many of its prompt's tokens were not computed."""
    body = {"prompt": prompt, "max_tokens": OUTPUT, "return_token_ids": True}
    told = json.loads(data_of(await items_of(engine, greedy(name, slo=CALM, **body))))
    details = told["usage"]["prompt_tokens_details"] or {}
    return told["choices"][0]["token_ids"], details.get("cached_tokens", 0)


def test_lmcache_in_the_process_of_the_engine_has_no_copies_for_cpus():
    """So ``LMCacheConnectorV1`` is refused there."""
    from lmcache.utils import EngineType
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector import CreateGPUConnector

    config, worker = LMCacheEngineConfig.from_defaults(), SimpleNamespace(local_worker_id=0)
    with pytest.raises(RuntimeError, match="No supported cpu connector"):
        CreateGPUConnector(config, worker, EngineType.VLLM)
