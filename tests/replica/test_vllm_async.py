"""Plans under asynchronous scheduling, where a batch is scheduled before the one before it is
through. CPUs do not offer it, so real vLLM schedulers are driven here with two batches in flight
and a model that knows which token belongs at each position of each request: a scheduler that loses,
repeats or reorders work gets other tokens, or trips over vLLM's own assertions."""

from __future__ import annotations

import gc
import random
import time
from collections import deque

import pytest

from replica.local_model import local_model
from replica.state_table import StateTable
from replica.vllm_args import RequestArgs, SchedulerSettings, to_xargs
from scheduling.batching import POLICIES
from scheduling.objective import SLO

from .in_process import OBJECTIVES

pytestmark = pytest.mark.vllm

BLOCK = 16
CALM = SLO(ttft_s=600.0, tpot_s=60.0)


def token_at(request_id, position):
    return random.Random(f"{request_id}/{position}").randrange(300, 1000)


class KnownModel:
    """Runs batches as a worker does: it keeps the sampled tokens of requests to itself, so the
    next batch can be scheduled without them."""

    def __init__(self):
        self._length = {}

    def run(self, output):
        from vllm.v1.outputs import ModelRunnerOutput

        start = {}
        for new in output.scheduled_new_reqs:
            self._length.setdefault(new.req_id, len(new.prompt_token_ids))
            start[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        start.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            end = start[request_id] + tokens
            length = self._length[request_id]
            assert end <= length, "scheduled past the tokens that exist"
            sampled.append([token_at(request_id, length)] if end == length else [])
            self._length[request_id] += end == length
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )


def make(model, directory, policy, blocks, in_flight):
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from replica.vllm_scheduler import make_scheduler

    path = directory / "state"
    table = StateTable.create(64, path)
    settings = SchedulerSettings(state_table=path, policy=policy)
    config = EngineArgs(
        model=str(model),
        max_model_len=512,
        max_num_batched_tokens=128,
        max_num_seqs=16,
        block_size=BLOCK,
        enable_prefix_caching=False,
        additional_config=settings.to_additional_config(),
    ).create_engine_config()
    config.scheduler_config.async_scheduling = in_flight > 1
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    scheduler = make_scheduler(
        config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )
    return scheduler, table


def requests(count, objectives=OBJECTIVES, arrival_s=0.0, best_effort=0):
    """Random requests, the first ``best_effort`` of which nothing was promised."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    chance = random.Random(3)
    made = []
    for index in range(count):
        request_id = f"r{index}"
        length, output = chance.randrange(1, 300), chance.randrange(1, 30)
        objective = objectives[index % len(objectives)]
        args = RequestArgs(request_id, arrival_s, objective, index < best_effort)
        made.append(
            Request(
                request_id=request_id,
                prompt_token_ids=[token_at(request_id, i) for i in range(length)],
                sampling_params=SamplingParams(
                    temperature=0.0, max_tokens=output, ignore_eos=True, extra_args=to_xargs(args)
                ),
                pooling_params=None,
            )
        )
    return made


def drive(scheduler, in_flight, arriving, abort=()):
    """Run until all is done, as the engine's loop does, and end the scheduler as it does; a new
    request every second step."""
    try:
        return loop(scheduler, in_flight, arriving, abort)
    finally:
        assert not gc.isenabled()
        scheduler.shutdown()
        assert gc.isenabled()


def loop(scheduler, in_flight, arriving, abort):
    model, queue, received = KnownModel(), deque(), {}
    waiting = deque(arriving)
    for step in range(5000):
        if waiting and step % 2 == 0:
            request = waiting.popleft()
            received[request.request_id] = []
            scheduler.add_request(request)
        for request_id in abort if step == 30 else ():
            from vllm.v1.request import RequestStatus

            scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        if scheduler.has_requests():
            output = scheduler.schedule()
            queue.append((output, model.run(output)))
            if len(queue) < in_flight and output.total_num_scheduled_tokens:
                continue
        elif not queue and not waiting:
            return received
        if queue:
            for client in scheduler.update_from_output(*queue.popleft()).values():
                for result in client.outputs:
                    received[result.request_id] += result.new_token_ids
    raise AssertionError("no end in 5000 steps")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return local_model(tmp_path_factory.mktemp("models"), layers=2, hidden=128)


@pytest.mark.parametrize("blocks", [1000, 40], ids=["roomy", "low-kv"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_token_comes_once_and_in_order(model, tmp_path, policy, in_flight, blocks):
    scheduler, table = make(model, tmp_path, policy, blocks, in_flight)
    kind = type(scheduler).__name__
    assert kind == ("SloAsyncScheduler" if in_flight > 1 else "SloScheduler")
    arriving = requests(40)
    received = drive(scheduler, in_flight, arriving)
    for request in arriving:
        length, output = request.num_prompt_tokens, request.max_tokens
        expected = [token_at(request.request_id, length + i) for i in range(output)]
        assert received[request.request_id] == expected
    state = table.read()
    assert len(state.rows) == 0
    assert state.summary["plan_mismatches"] == 0
    if blocks < 100 and policy == "fcfs":
        assert state.summary["preemptions"] > 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_evicted_requests_go_on_with_the_next_token(model, tmp_path, policy, in_flight):
    """Best-effort requests hold the KV when promised ones come: those evict them, also while a
    batch with a token of theirs is in flight."""
    scheduler, table = make(model, tmp_path, policy, 40, in_flight)
    arriving = requests(50, [CALM], time.monotonic(), best_effort=25)
    received = drive(scheduler, in_flight, arriving)
    for request in arriving:
        length, output = request.num_prompt_tokens, request.max_tokens
        expected = [token_at(request.request_id, length + i) for i in range(output)]
        assert received[request.request_id] == expected
    summary = table.read().summary
    assert summary["plan_mismatches"] == 0
    assert summary["preemptions"] >= summary["evictions"] > 0
    assert summary["evicted_tokens"] > 0


def test_aborted_requests_leave_nothing_behind(model, tmp_path):
    scheduler, table = make(model, tmp_path, "slidebatching", 1000, 2)
    received = drive(scheduler, 2, requests(40), abort=[f"r{i}" for i in range(10)])
    assert len(table.read().rows) == 0
    assert not scheduler.requests
    assert received["r39"]
