"""A best-effort request inside real vLLM, in this process: promised work takes its KV, and its
stream goes on as if nothing had happened."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import pytest

from sluice.replica.scheduler.xargs import RequestArgs, to_xargs
from sluice.scheduling.request.objective import SLO

from .in_process import InProcess, Since, random_prompt

pytestmark = pytest.mark.vllm

# 21 blocks of 32 tokens can be used: the long answer below takes 13, each promised request 14.
ARGS = {
    "num_gpu_blocks_override": 22,
    "max_model_len": 600,
    "max_num_batched_tokens": 256,
    # A sampled token may hang on less than 16 bits tell.
    "dtype": "float32",
    "worker_cls": "sluice.replica.vllm.cpu_worker.PatchedCpuWorker",
}
CHAT = SLO(ttft_s=30.0, tpot_s=5.0, priority=2)


class Asked(NamedTuple):
    """A best-effort request, unless it has an objective."""

    name: str
    prompt: list[int]
    output: int
    slo: SLO | None = None


def prompt(seed, length):
    return random_prompt(random.Random(seed), length)


LONG = Asked("long", prompt(1, 340), 70)
PROMISED = [Asked(f"chat{n}", prompt(10 + n, 425), 8, CHAT) for n in range(2)]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-cache", "no-cache"])
def engine(request, model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    started = InProcess(model, directory, "fcfs", enable_prefix_caching=request.param, **ARGS)
    yield started
    started.close()


def serve(engine, arrivals, **sampling):
    """The tokens of requests that arrive before steps, by number, as they streamed: each item of a
    stream must continue the one before it. They are greedy without ``sampling``."""
    from vllm import SamplingParams

    vllm = engine.llm.llm_engine
    streams: dict[str, list[int]] = {}
    pending = list(arrivals)
    step = 0
    while pending or vllm.has_unfinished_requests():
        for at, each in [item for item in pending if item[0] <= step]:
            args = RequestArgs(each.name, time.monotonic(), each.slo or SLO(), each.slo is None)
            given = {"max_tokens": each.output, "extra_args": to_xargs(args)}
            params = SamplingParams(ignore_eos=True, **given, **(sampling or {"temperature": 0.0}))
            vllm.add_request(each.name, {"prompt_token_ids": each.prompt}, params)
            streams[each.name] = []
            pending.remove((at, each))
        for result in vllm.step():
            tokens = list(result.outputs[0].token_ids)
            before = streams[result.request_id]
            assert tokens[: len(before)] == before, "the stream changed what it had sent"
            assert len(tokens) <= len(before) + 1, "tokens came late, several at once"
            streams[result.request_id] = tokens
        step += 1
        assert step < 3_000
    return streams


def serve_alone(engine, requests, **sampling):
    streams = {}
    for each in requests:
        streams |= serve(engine, [(0, each)], **sampling)
    return streams


@pytest.fixture(scope="module")
def alone(engine):
    """The streams of undisturbed runs, one request after the other."""
    engine.use("fcfs")
    return serve_alone(engine, (LONG, *PROMISED))


# Evictions are planned before any policy fills a batch: with any of them they are the same.
@pytest.mark.parametrize(
    "policy", ["deadline_triage", pytest.param("fcfs", marks=pytest.mark.release)]
)
def test_a_preempted_stream_is_that_of_an_undisturbed_run(engine, alone, policy):
    engine.use(policy)
    since = Since(engine)
    arrivals = [(0, LONG), *((20 + 30 * n, each) for n, each in enumerate(PROMISED))]
    assert serve(engine, arrivals) == alone
    assert since["evictions"] >= 1 and since["evicted_tokens"] > 0
    log = since.batches()
    lost = [batch for batch in log if "long" in batch["preempted"]]
    assert len(lost) == since["evictions"]
    # In the very step, the promised request has the memory.
    for batch in lost:
        assert any(name.startswith("chat") for name, _, _ in batch["ran"])
    assert not any(name.startswith("chat") for batch in log for name in batch["preempted"])
    state = engine.table.read()
    assert len(state.rows) == 0
    assert engine.scheduler._pool.get_num_free_blocks() == state.summary["total_kv_blocks"]


def test_a_preempted_stream_goes_on_with_its_own_random_numbers(engine):
    """Though what it had is computed again, without a prefix cache all of it."""
    engine.use("fcfs")
    seeded, chat = {"temperature": 1.0, "seed": 5}, PROMISED[0]
    alone = serve_alone(engine, (LONG, chat), **seeded)
    assert alone["long"] != serve(engine, [(0, LONG)], temperature=1.0, seed=6)["long"]
    since = Since(engine)
    assert serve(engine, [(0, LONG), (40, chat)], **seeded) == alone
    log = since.batches()
    (lost,) = [number for number, batch in enumerate(log) if "long" in batch["preempted"]]
    ran = [(number, *part) for number, batch in enumerate(log) for part in batch["ran"]]
    of_long = [(number, tokens, at) for number, name, tokens, at in ran if name == "long"]
    had = max(at for number, _, at in of_long if number < lost)
    again = sum(tokens for number, tokens, at in of_long if number >= lost and at < had)
    assert (again >= had) != engine.scheduler.kv_cache_manager.enable_caching


def test_evictions_that_free_less_than_was_counted_go_on_until_the_promised_prompt_fits(
    model, tmp_path
):
    engine = InProcess(model, tmp_path, "fcfs", async_scheduling=False, **ARGS)
    # Each holds eight blocks when the chat comes, of which six are the same: one frees but two.
    shared = prompt(2, 192)
    twins = [Asked(f"twin{n}", shared + prompt(20 + n, 8), 100) for n in range(2)]
    chat = Asked("chat", prompt(30, 520), 5, CHAT)
    alone = serve_alone(engine, (*twins, chat))
    engine.use("fcfs")
    since = Since(engine)
    assert serve(engine, [(0, twins[0]), (2, twins[1]), (40, chat)]) == alone
    log = since.batches()
    engine.close()
    ran = [[name for name, _, _ in batch["ran"]] for batch in log]
    assert ["twin0", "twin1"] in ran
    lost = [name for batch in log for name in batch["preempted"]]
    assert lost == ["twin1", "twin0"], "each once"
    assert ran[40:42] == [[], ["chat"]], "nobody runs in its place"
