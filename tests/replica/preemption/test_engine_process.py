"""Preemption behind the engine contract: an engine process of its own, with two workers, as of a
prefill replica."""

import asyncio
import contextlib
import hashlib
import os
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import pytest_asyncio

from sluice.protocol.requests import EngineRequest, ResponseChunk, ResponseTail
from sluice.replica.config import EngineConfig, TransferConfig
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.transfer import Offer, fetch
from sluice.replica.vllm.contract import WITH_TRANSFER, age
from sluice.replica.vllm.engine import VllmEngine
from sluice.replica.vllm.local_model import local_model
from sluice.replica.vllm.setup import parse_arguments
from sluice.scheduling.preemption import TaskBounds
from sluice.scheduling.request.objective import SLO
from tests.known_profile import known_profile
from tests.replica.small_engine import check_killed_worker

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

LONG = list(range(300, 1000)) * 2
BLOCK = 32
LAYERS = 2
BLOCK_BYTES = 2 * BLOCK * 64 * 2
"""Of one layer on one worker: keys and values of a head of 64, in 16 bits."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("preemption")
    return EngineConfig(
        model=str(local_model(directory, layers=LAYERS, hidden=128)),
        served_model_name="small",
        cache_dir=directory,
        policy="slidebatching",
        preemption=True,
        transfer=TransferConfig(connector="tcp"),
        vllm_args={
            "max-model-len": 2048,
            "max-num-batched-tokens": 2048,
            "kv-cache-memory-bytes": 64 << 20,
            "block-size": BLOCK,
            "tensor-parallel-size": 2,
        },
        latency_profile=known_profile(directory),
        grammar_check_s=0,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(config):
    """The engine, and what it says of itself."""
    import vllm

    if age(vllm.__version__, WITH_TRANSFER) == "older":
        pytest.skip("KV transfer needs a newer vLLM")
    engine = VllmEngine(config, "replica-1", 32, role="prefill")
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        # By itself vLLM binds one worker to each NUMA node, and this machine may have but one.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        info = await engine.start()
    yield engine, info
    await engine.stop()


@pytest.fixture
def engine(started):
    return started[0]


def request(name, prompt, ttft_s, output=6):
    body = {
        "model": "small",
        "temperature": 0,
        "max_tokens": output,
        "ignore_eos": True,
        "prompt": prompt,
    }
    return EngineRequest(name, "completions", body, SLO(ttft_s=ttft_s))


async def text(engine, request):
    items = [item async for item in engine.generate(request)]
    assert isinstance(items[-1], ResponseTail)
    return b"".join(
        item.data.partition(b'"choices"')[2].partition(b'"logprobs"')[0]
        for item in items
        if isinstance(item, ResponseChunk)
    )


@pytest.mark.release
async def test_the_policy_knows_the_role_of_its_replica(started):
    _, info = started
    assert (info.policy, info.policy_options["boundary"]) == ("slidebatching", "phi_p")


@pytest.mark.release
async def test_long_and_short_prompts_together_have_the_tokens_of_runs_alone(engine):
    asked = [(f"long-{i}", LONG[i : i + 1000], 100.0) for i in range(3)]
    asked += [(f"short-{i}", LONG[500 + i : 560 + i], 10.0) for i in range(9)]
    alone = {name: await text(engine, request(name, *rest)) for name, *rest in asked}
    together = await asyncio.gather(
        *(text(engine, request(f"{name}-again", *rest)) for name, *rest in asked)
    )
    assert together == list(alone.values())


async def kv(engine, request):
    """The digest of the KV that each worker gives away for a prompt that fills its blocks."""
    _, tail = [item async for item in engine.generate(replace(request, prefill_only=True))]
    offer, blocks = Offer.of(tail.kv_handle.params), tail.prompt_tokens // BLOCK
    digests = []
    for rank in range(len(offer.addresses)):
        asked = offer.source(rank), 0, blocks, [BLOCK_BYTES] * LAYERS, time.monotonic() + 10
        layers = await asyncio.to_thread(fetch, *asked)
        digests.append(hashlib.sha256(b"".join(layers)).hexdigest())
    return digests


@pytest.mark.release
async def test_the_kv_of_a_suspended_prompt_is_that_of_a_run_alone_on_each_worker(engine):
    long, short = request("kv-long", LONG[: 40 * BLOCK], 100.0), request("kv-short", [7] * 64, 9.0)
    await engine._llm.reset_prefix_cache()
    expected = [await kv(engine, each) for each in (long, short)]
    assert expected[0] != expected[1]
    before = engine.state().summary["suspensions"]
    async with asyncio.timeout(120):
        while engine.state().summary["suspensions"] == before:
            await engine._llm.reset_prefix_cache()
            assert await asyncio.gather(kv(engine, long), kv(engine, short)) == expected


@pytest.mark.release
async def test_a_call_is_answered_when_no_request_is_left(engine):
    await text(engine, request("last", LONG[:64], 10.0, 1))
    async with asyncio.timeout(60):
        assert await engine._llm.reset_prefix_cache()


def all_free(summary):
    return summary["free_kv_blocks"] == summary["total_kv_blocks"]


@pytest.mark.release
async def test_disconnected_clients_leave_nothing_behind(engine):
    async def leave(index):
        pieces = engine.generate(request(f"left-{index}", LONG[index : index + 900], 50.0 / index))
        task = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pieces.aclose()

    await asyncio.gather(
        *(leave(index) for index in range(1, 9)),
        text(engine, request("stays", LONG[9:99], 10.0)),
    )
    async with asyncio.timeout(120):
        while not all_free(engine.state().summary):
            await text(engine, request("more", [400, 401], 10.0, 1))


@pytest.fixture
def vllm_config(config, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    settings = SchedulerSettings(
        state_table=tmp_path / "state", policy="s_edf", preemption=TaskBounds()
    )
    arguments = parse_arguments(
        config.vllm_args, config.model, "small", settings, False, config.transfer, "prefill"
    )
    return EngineArgs.from_cli_args(arguments).create_engine_config()


@pytest.fixture
def support():
    """Imported late, as vLLM then reads its environment."""
    from sluice.replica.preemption import support

    return support


REFUSED = [
    ("parallel_config.world_size", 3, "parallelism"),
    ("parallel_config.enable_expert_parallel", True, "expert parallelism"),
    ("scheduler_config.async_scheduling", True, "async scheduling"),
    ("compilation_config.mode", 1, "STOCK_TORCH_COMPILE"),
    ("speculative_config", SimpleNamespace(method="eagle3"), "by eagle3 is not supported, only by"),
    ("speculative_config", SimpleNamespace(method="ngram"), "which decodes nothing"),
    (
        "kv_transfer_config",
        SimpleNamespace(kv_connector_module_path=None, kv_role="kv_producer"),
        "KV connector",
    ),
    ("kv_transfer_config.kv_role", "kv_both", "only a prefill replica"),
    ("kv_transfer_config.kv_role", "kv_consumer", "only a prefill replica"),
    ("parallel_config.distributed_executor_backend", "uni", "executor-backend"),
]


@pytest.mark.parametrize(("path", "value", "reason"), REFUSED, ids=[each[2] for each in REFUSED])
async def test_what_is_not_supported_is_refused_at_start(support, vllm_config, path, value, reason):
    support.check_preemption(vllm_config)
    owner, _, name = path.rpartition(".")
    target = getattr(vllm_config, owner) if owner else vllm_config
    object.__setattr__(target, name, value)
    with pytest.raises(support.UnsupportedVllmError, match=reason):
        support.check_preemption(vllm_config)


async def test_older_versions_are_refused_and_newer_ones_warn(support, vllm_config, caplog):
    with pytest.raises(support.UnsupportedVllmError, match=r"supported are 0\.26 and newer"):
        support.check_preemption(vllm_config, "0.25.1")
    caplog.set_level("WARNING", logger="sluice")
    support.check_preemption(vllm_config, "0.99.0")
    assert "preemption was not run in vLLM 0.99.0" in caplog.text


async def test_what_is_missing_is_told(support, vllm_config, monkeypatch):
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "_model_forward")
    monkeypatch.setattr(KVCacheManager, "allocate_slots", lambda self, request, tokens: None)
    monkeypatch.setitem(sys.modules, "vllm.v1.cudagraph_dispatcher", None)
    with pytest.raises(support.UnsupportedVllmError) as refused:
        support.check_preemption(vllm_config)
    assert re.search(
        r"lacks KVCacheManager\.allocate_slots\(_, _, delay_cache_blocks=\): "
        r"it takes \(self, request, tokens\); .*GPUModelRunner\._model_forward; .*"
        r"vllm\.v1\.cudagraph_dispatcher:CudagraphDispatcher",
        str(refused.value),
    )


async def test_arguments_that_preemption_needs_cannot_be_others(config, tmp_path):
    settings = SchedulerSettings(
        state_table=tmp_path / "state", policy="s_edf", preemption=TaskBounds()
    )
    with pytest.raises(ValueError, match="async-scheduling must be False"):
        parse_arguments({"async-scheduling": True}, config.model, "small", settings)


@pytest.mark.release
async def test_a_dead_worker_ends_all_requests_with_an_error(engine):
    """Last in this file: the engine is gone afterwards."""
    asked = [request(f"lost-{i}", LONG[i : i + 900], 20.0 / i, 1000) for i in (1, 2, 3)]
    await check_killed_worker(engine, [text(engine, each) for each in asked])
