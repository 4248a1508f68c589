"""Batch plans inside real vLLM, in this process: the same tokens as stock vLLM whatever a policy
defers or cuts, batches in the order of the deadlines, and what cannot run is refused."""

from __future__ import annotations

import random

import pytest

from sluice.scheduling.batching import POLICIES, BatchPolicy
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage

from .in_process import InProcess, RandomDeferral, Since, mixed_requests, random_prompt

pytestmark = pytest.mark.vllm

LOW_KV = {
    "num_gpu_blocks_override": 22,
    "max_model_len": 600,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 64,
}


class PlansNothing(BatchPolicy):
    """Breaks the contract: the engine must go on all the same."""

    name = "plans-nothing"
    source = "this test"
    local_order = SLIDE

    def fill(self, batch, queue, now_s, latency):
        pass


@pytest.fixture(scope="module")
def engines(model, tmp_path_factory):
    """Starts an engine with these arguments, unless it runs: one at a time."""
    running = {}

    def start(**args):
        if running.get("args") != args:
            close()
            engine = InProcess(model, tmp_path_factory.mktemp("engine"), "fcfs", **args)
            running.update(args=args, engine=engine)
        return running["engine"]

    def close():
        if running:
            running["engine"].close()
            running.clear()

    yield start
    close()


@pytest.fixture
def run(engines):
    """An engine with a policy, and what it does from now on."""

    def start(policy, **args):
        engine = engines(**args)
        engine.use(policy)
        return engine, Since(engine)

    return start


STAGES = Stage(9.0, 0.9, tokens=3), Stage(8.0, 0.8), Stage(7.0, 0.7)
"""Three tokens, then until the reasoning ends."""


def staged(requests):
    """Every fourth request has stages, and a class of its own."""
    return [
        (prompt, output, slo if i % 4 else SLO.of_stages(STAGES, service_class=str(i)))
        for i, (prompt, output, slo) in enumerate(requests)
    ]


def test_an_empty_plan_falls_back_to_stock_and_is_counted(run, stock, monkeypatch):
    monkeypatch.setitem(POLICIES.own, PlansNothing.name, PlansNothing)
    engine, since = run(PlansNothing.name)
    assert engine.generate(mixed_requests(24)) == stock
    assert since["plan_mismatches"] == since["steps"] > 0


def last_prefill_batches(batches, lengths):
    """For each request, the number of the batch that ends its prefill."""
    done = {}
    for number, batch in enumerate(batches):
        for name, tokens, computed in batch["ran"]:
            if computed + tokens >= lengths[name]:
                done.setdefault(name, number)
    return done


def test_a_tight_deadline_passes_long_prefills(run):
    """Six long prompts without an objective arrive before a short one with 2 s to its first token,
    on an engine that is believed to take 10 s for the long ones. All are there before the first
    batch, so the order of the batches decides alone."""
    chance = random.Random(1)
    lengths = {str(i): 900 for i in range(6)} | {"6": 40}
    objectives = [SLO()] * 6 + [SLO(ttft_s=2.0, tpot_s=0.5, priority=4)]
    shapes = zip(lengths.values(), objectives, strict=True)
    requests = [(random_prompt(chance, length), 8, slo) for length, slo in shapes]
    not_after = {}
    for policy in ("fcfs", "fairbatching", "slidebatching"):
        engine, since = run(policy)
        engine.table.set_model(LinearLatency(a=0.05, b=0.002))
        engine.generate(requests)
        done = last_prefill_batches(since.batches(), lengths)
        not_after[policy] = sum(done[name] <= done["6"] for name in lengths if name != "6")
        for batch in since.batches():
            assert sum(tokens for _, tokens, _ in batch["ran"]) <= 512
    assert not_after == {"fcfs": 6, "fairbatching": 0, "slidebatching": 0}


@pytest.mark.parametrize("args", [{}, LOW_KV], ids=["roomy", "low-kv"])
def test_greedy_output_equals_stock_under_random_deferral(run, stock, monkeypatch, args):
    """Each plan sees the objective of the stage that a request is in."""
    seen = set()

    class Watched(RandomDeferral):
        def fill(self, batch, queue, now_s, latency):
            seen.update(
                (each.slo.service_class, each.prompt_tokens + each.emitted_tokens, each.slo.times_s)
                for each in queue.requests
                if each.slo.service_class != "standard"
            )
            super().fill(batch, queue, now_s, latency)

    monkeypatch.setitem(POLICIES.own, Watched.name, Watched)
    engine, since = run(Watched.name, **args)
    requests = mixed_requests(24)
    last = stock[4][6]
    engine.reasoning_ends = frozenset({last})
    assert engine.generate(staged(requests)) == stock
    engine.reasoning_ends = frozenset()
    batches = since.batches()
    deferred = [batch for batch in batches if len(batch["ran"]) < batch["live"]]
    assert len(deferred) > len(batches) // 2

    expected = set()
    for number in range(0, 24, 4):
        (prompt, output, _), tokens = requests[number], stock[number]
        # The second stage has a token at least, also if the reasoning has ended by then.
        ended = max(tokens.index(last) + 1, 4) if last in tokens else output
        for emitted in range(output):
            stage = 0 if emitted < 3 else 1 if emitted < ended else 2
            expected.add((str(number), len(prompt) + emitted, STAGES[stage].times_s))
    assert seen == expected
    assert {times_s for _, _, times_s in seen} == {stage.times_s for stage in STAGES}
