"""Every policy inside real vLLM, in this process: the same tokens as stock vLLM, and what it plans
is what runs. The policies use one engine in turn, as starting one takes seconds."""

from __future__ import annotations

import random

import pytest

from sluice.scheduling.batching import POLICIES
from sluice.scheduling.request.objective import SLO

from .in_process import (
    InProcess,
    Since,
    mixed_requests,
    outputs_of_stock,
    params_of,
    random_prompt,
)

pytestmark = pytest.mark.vllm

CONFIGURATIONS = {
    "low-kv": {
        "num_gpu_blocks_override": 22,
        "max_model_len": 600,
        "enable_prefix_caching": False,
    },
    "chunks": {"max_num_batched_tokens": 48, "max_num_seqs": 12},
    "shared-prefix": {
        "num_gpu_blocks_override": 40,
        "max_model_len": 1000,
        "max_num_batched_tokens": 1024,
    },
}

DIFFERENT = [pytest.param("annealing", marks=pytest.mark.release), "deadline_triage", "fcfs"]
"""By a search, by deadlines, and in the order of arrival."""


CHANCE = random.Random(5)
SHARED = random_prompt(CHANCE, 640)
SIBLINGS = [(SHARED + random_prompt(CHANCE, 8), 30, SLO()) for _ in range(8)]
"""The KV of ``shared-prefix`` holds one of them whole, not two, but all eight where they share."""

LATE = (random_prompt(CHANCE, 590), 8, SLO(ttft_s=0.001, tpot_s=5.0))
PUNCTUAL = (random_prompt(CHANCE, 540), 8, SLO(ttft_s=600.0, tpot_s=60.0))
"""The KV of ``low-kv`` holds either of them."""


@pytest.fixture(scope="module")
def by_stock(model, tmp_path_factory):
    """What stock vLLM generates for :data:`SIBLINGS`, :data:`LATE` and :data:`PUNCTUAL`."""
    requests = [*SIBLINGS, LATE, PUNCTUAL]
    directory = tmp_path_factory.mktemp("by_stock")
    return outputs_of_stock(model, directory, requests, **CONFIGURATIONS["shared-prefix"])


@pytest.fixture(scope="module")
def engine(request, model, stock, by_stock, tmp_path_factory):
    """One engine at a time: those of stock vLLM must be gone, and so must the one before."""
    directory = tmp_path_factory.mktemp("engine")
    started = InProcess(model, directory, "fcfs", **CONFIGURATIONS[request.param])
    yield started
    started.close()


def configured(*names):
    return pytest.mark.parametrize("engine", names, indirect=True, scope="module")


@configured("low-kv", "chunks")
@pytest.mark.parametrize("policy", DIFFERENT)
def test_greedy_output_equals_stock(engine, stock, policy):
    engine.use(policy)
    since = Since(engine)
    assert engine.generate(mixed_requests(24)) == stock
    assert len(engine.table.read().rows) == 0
    assert since["steps"] == len(since.batches()) > 0
    if not engine.scheduler.kv_cache_manager.enable_caching:  # in low-kv
        assert policy != "fcfs" or since["preemptions"] > 0
        assert since["plan_mismatches"] == 0


@configured("low-kv")
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_mixed_load_is_served_as_planned_and_as_by_stock(engine, stock, policy):
    """Requests of every kind arrive while others wait, prefill and decode; some are aborted."""
    engine.use(policy)
    since = Since(engine)
    aborted = {3, 8, 13, 18}
    outputs = engine.serve(mixed_requests(24), every=2, aborted=aborted)
    assert set(range(24)) - aborted <= set(outputs)
    for number, tokens in outputs.items():
        assert tokens == stock[number][: len(tokens)]
        assert number in aborted or len(tokens) == len(stock[number])
    state = engine.table.read()
    assert len(state.rows) == 0
    # An idle engine uses no block: vLLM's null block is in neither number.
    summary = state.summary
    assert summary["free_kv_blocks"] == summary["total_kv_blocks"]
    assert engine.scheduler._pool.get_num_free_blocks() == summary["total_kv_blocks"]
    assert since["plan_mismatches"] == 0


@configured("low-kv")
def test_a_late_prompt_that_has_begun_is_preempted_for_one_that_can_be_on_time(engine, by_stock):
    """Both end with the text that stock vLLM gives them."""
    engine.use("deadline_triage")
    since = Since(engine)
    vllm = engine.llm.llm_engine
    outputs = {}

    def arrive(name, request):
        vllm.add_request(name, {"prompt_token_ids": request[0]}, params_of(name, *request[1:]))

    def step():
        for result in vllm.step():
            if result.finished:
                outputs[result.request_id] = tuple(result.outputs[0].token_ids)

    arrive("late", LATE)
    # With four blocks of the late one, 17 of the other one do not fit into 21.
    while sum(tokens for batch in since.batches() for _, tokens, _ in batch["ran"]) < 128:
        step()
    (row,) = engine.table.read().rows
    assert row["emitted_tokens"] == 0
    arrive("punctual", PUNCTUAL)
    while vllm.has_unfinished_requests():
        step()
    assert [outputs["late"], outputs["punctual"]] == by_stock[8:]
    (lost,) = [batch for batch in since.batches() if batch["preempted"]]
    assert lost["preempted"] == ["late"]
    assert [name for name, _, _ in lost["ran"]] == ["punctual"], "in the very step"
    assert since["plan_mismatches"] == 0


@configured("shared-prefix")
@pytest.mark.parametrize("policy", DIFFERENT)
def test_requests_that_share_a_prefix_run_together_with_little_kv(engine, by_stock, policy):
    # A first chunk that ends in the prefix would let siblings hit more in the very step that
    # completes it than was known when it was planned.
    options = POLICIES[policy].Options.model_fields
    engine.use(policy, {"token_budget": 1024} if "token_budget" in options else None)
    since = Since(engine)
    assert engine.generate(SIBLINGS) == by_stock[:8]
    batches = since.batches()
    assert max(len(batch["ran"]) for batch in batches) == 8
    # One after another they would take 240.
    assert len(batches) < 60
    # The first step computes the prefix, the others find it: they are planned without it.
    assert sum(tokens for batch in batches for _, tokens, _ in batch["ran"]) < 640 + 8 * 60
    assert since["plan_mismatches"] == 0
