"""Plans with several batches in flight, under asynchronous scheduling and in a pipeline. CPUs do
not offer the first, so real vLLM schedulers are driven here with a model that knows which token
belongs at each position: one that loses, repeats or reorders work gets other tokens, or trips over
vLLM's own assertions."""

from __future__ import annotations

import copy
import gc
import random
import time
from collections import deque
from functools import cache
from types import SimpleNamespace

import pytest

from sluice.replica.config import TransferConfig
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, to_xargs
from sluice.replica.transfer import Handle, Offer, prompt_digest
from sluice.replica.vllm.contract import ASYNC_TRANSFER, WITH_PIPELINE, age
from sluice.replica.vllm.setup import transfer_argument
from sluice.scheduling.batching import POLICIES
from sluice.scheduling.fleet.prefix import NO_PREFIX
from sluice.scheduling.request.objective import SLO

from .in_process import OBJECTIVES, RandomDeferral
from .known_model import KnownModel

pytestmark = pytest.mark.vllm

BLOCK = 16
CALM = SLO(ttft_s=600.0, tpot_s=60.0)


def token_at(request_id, position):
    return random.Random(f"{request_id}/{position}").randrange(300, 1000)


@cache
def usual_configuration(model):
    """To be copied, as making it takes as long as a test."""
    return configuration(model)


def tier_of(name, extra, **more):
    """The configuration of a KV connector."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra, **more
    )


def configuration(model, **args):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        max_model_len=512,
        max_num_batched_tokens=128,
        max_num_seqs=16,
        block_size=BLOCK,
        **{"enable_prefix_caching": False, **args},
    ).create_engine_config()


def make(model, directory, policy, blocks, in_flight, stages=1, **args):
    import torch
    import vllm
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from sluice.replica.vllm.scheduler import make_scheduler

    if stages > 1 and age(vllm.__version__, WITH_PIPELINE) == "older":
        pytest.skip("pipelines are refused with this vLLM")
    path = directory / "state"
    table = StateTable.create(64, path)
    settings = SchedulerSettings(state_table=path, policy=policy)
    config = configuration(model, **args) if args else copy.deepcopy(usual_configuration(model))
    config.additional_config = settings.to_additional_config()
    config.parallel_config.pipeline_parallel_size = stages
    config.scheduler_config.async_scheduling = in_flight > stages
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
    chance = random.Random(3)
    made = []
    for index in range(count):
        length, output = chance.randrange(1, 300), chance.randrange(1, 30)
        objective = objectives[index % len(objectives)]
        shape = length, output, objective
        made.append(request_of(f"r{index}", *shape, arrival_s, index < best_effort))
    return made


@cache
def block_hasher():
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def request_of(
    request_id, length, output, slo, arrival_s=0.0, best_effort=False, prompt=None, prefix=NO_PREFIX
):
    """One with these numbers of tokens. Those of one ``prompt`` share it, and its blocks."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    args = RequestArgs(request_id, arrival_s, slo, best_effort, prefix)
    return Request(
        request_id=request_id,
        prompt_token_ids=[token_at(prompt or request_id, i) for i in range(length)],
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, extra_args=to_xargs(args)
        ),
        pooling_params=None,
        block_hasher=block_hasher() if prompt else None,
    )


def drive(scheduler, in_flight, arriving, abort=(), model=None):
    """Run until all is done, as the engine's loop does; a new request every second step."""
    try:
        return loop(scheduler, in_flight, arriving, abort, model or KnownModel(token_at))
    finally:
        assert not gc.isenabled()
        scheduler.shutdown()
        assert gc.isenabled()


def loop(scheduler, in_flight, arriving, abort, model):
    queue, received = deque(), {}
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


ONE = [("deadline_triage", 1), ("fcfs", 1)]
"""Policies with one batch in flight, as on CPUs: the other tests run all of them so."""


@pytest.fixture(autouse=True)
def no_full_collection(monkeypatch):
    """A scheduler collects garbage before its first batch: in this process, all of the tests'."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def check_whole(received, arriving, table):
    """Every request has had all of its tokens, once and in order. Returns the table's summary."""
    for request in arriving:
        assert received[request.request_id] == expected_of(request)
    state = table.read()
    assert len(state.rows) == 0
    assert state.summary["plan_mismatches"] == 0
    return state.summary


def expected_of(request):
    """All tokens of a request's output."""
    length, output = request.num_prompt_tokens, request.max_tokens
    return [token_at(request.request_id, length + i) for i in range(output)]


def check_idle(scheduler, blocks):
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1


@pytest.mark.parametrize(
    ("policy", "in_flight", "blocks"),
    [
        *((each, 2, 40) for each in POLICIES),
        *((*each, 1000) for each in ONE),
        *((*each, 40) for each in ONE),
    ],
)
def test_every_token_comes_once_and_in_order(model, tmp_path, policy, in_flight, blocks):
    scheduler, table = make(model, tmp_path, policy, blocks, in_flight)
    kind = type(scheduler).__name__
    assert kind == ("SloAsyncScheduler" if in_flight > 1 else "SloScheduler")
    arriving = requests(40)
    received = drive(scheduler, in_flight, arriving)
    summary = check_whole(received, arriving, table)
    if blocks < 100 and policy == "fcfs":
        assert summary["preemptions"] > 0


@pytest.fixture
def second_runner(model, monkeypatch):
    """vLLM's second model runner, the only one with a pipeline and asynchronous scheduling."""
    from vllm.config import VllmConfig

    usual_configuration(model)  # is made for the first one: the second one wants a GPU
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)


PIPELINE = [(2, 2), (3, 2), (3, 3)]
"""Batches in flight and stages; more batches than stages: with asynchronous scheduling."""


PIPELINED = [
    pytest.param(each, marks=() if each in ("deadline_triage", "fcfs") else pytest.mark.release)
    for each in POLICIES
]


@pytest.mark.parametrize(("in_flight", "stages"), PIPELINE)
@pytest.mark.parametrize("policy", PIPELINED)
def test_in_a_pipeline_every_token_comes_once_and_in_order(
    model, tmp_path, policy, in_flight, stages, second_runner
):
    """Also of requests that are preempted while a batch with a token of theirs is in flight."""
    scheduler, table = make(model, tmp_path, policy, 40, in_flight, stages)
    arriving = requests(40)
    received = drive(scheduler, in_flight, arriving)
    summary = check_whole(received, arriving, table)
    if policy == "fcfs":
        assert summary["preemptions"] > 0


@pytest.mark.parametrize(("tpot_s", "expected"), [(0.012, 128), (0.008, 57), (0.004, 128)])
def test_a_batch_beside_a_decode_in_a_pipeline_keeps_its_tpot(
    model, tmp_path, monkeypatch, tpot_s, expected
):
    """A step takes 5 ms, and 0.2 ms for each token. The decode begins at 7 ms and ends at 12.2 ms;
    its next token is due two TPOT after 7 ms. Until it must begin, the long prompt has the first
    stage of two from 9.6 ms on: with a TPOT of 8 ms for 8.2 ms, a batch of 16.4 ms, or 57 tokens.
    With 4 ms the decode is late in any case."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(
        "sluice.replica.vllm.scheduler.time",
        SimpleNamespace(monotonic=lambda: clock.now_s, thread_time=lambda: 0.0),
    )
    scheduler, _ = make(model, tmp_path, "fcfs", 1000, 2, 2)
    worker = KnownModel(token_at)
    scheduler.add_request(request_of("short", 10, 30, SLO(ttft_s=1.0, tpot_s=tpot_s)))
    first = scheduler.schedule()
    ran = worker.run(first)
    clock.now_s = 0.007
    scheduler.update_from_output(first, ran)
    assert scheduler.schedule().num_scheduled_tokens == {"short": 1}
    scheduler.add_request(request_of("long", 300, 1, SLO()))
    tokens = scheduler.schedule().num_scheduled_tokens
    scheduler.shutdown()
    assert tokens == {"long": pytest.approx(expected, abs=1)}


@pytest.mark.parametrize(("in_flight", "stages"), [(1, 1), (2, 1), *PIPELINE])
@pytest.mark.parametrize("policy", ["deadline_triage", "fcfs"])
def test_evicted_requests_go_on_with_the_next_token(
    model, tmp_path, policy, in_flight, stages, second_runner
):
    """Also those that promised ones evict while a batch with a token of theirs is in flight."""
    scheduler, table = make(model, tmp_path, policy, 40, in_flight, stages)
    arriving = requests(50, [CALM], time.monotonic(), best_effort=25)
    received = drive(scheduler, in_flight, arriving)
    summary = check_whole(received, arriving, table)
    assert summary["preemptions"] >= summary["evictions"] > 0
    assert summary["evicted_tokens"] > 0


def test_aborted_requests_leave_nothing_behind(model, tmp_path):
    scheduler, table = make(model, tmp_path, "slidebatching", 1000, 2)
    received = drive(scheduler, 2, requests(40), abort=[f"r{i}" for i in range(10)])
    assert len(table.read().rows) == 0
    assert not scheduler.requests
    assert received["r39"]


class ModelWithKv(KnownModel):
    """Knows what KV there is of each request, so a batch that reads more of it trips."""

    def __init__(self):
        super().__init__(token_at)
        self._valid = {}

    def run(self, output):
        for request_id, start, tokens in self.parts(output):
            assert start <= self._valid.get(request_id, 0), "KV is read that is not there"
            self._valid[request_id] = start + tokens
        return super().run(output)


class ModelWithTransfers(ModelWithKv):
    """Also fetches KV, as a worker does: it takes some batches, and fails now and then."""

    def __init__(self):
        super().__init__()
        self._chance = random.Random(5)
        self._loads = []

    def run(self, output):
        from vllm.v1.outputs import KVConnectorOutput

        ran = super().run(output)
        for load in output.kv_connector_metadata.loads:
            self._loads.append([load, self._chance.randrange(6)])
        done = [load for load, left in self._loads if left == 0]
        self._loads = [[load, left - 1] for load, left in self._loads if left]
        failed = [load for load in done if self._chance.random() < 0.3]
        for load in done:
            if load not in failed:
                self._valid[load.request_id] = load.offer.prompt_tokens - 1
        ran.kv_connector_output = KVConnectorOutput(
            finished_recving={load.request_id for load in done},
            invalid_block_ids={block for load in failed for block in load.block_ids},
        )
        return ran


def skip_where_tokens_are_lost(in_flight):
    import vllm

    if in_flight > 1 and age(vllm.__version__, ASYNC_TRANSFER) == "older":
        pytest.skip("asynchronous scheduling is off beside connectors with this vLLM")


@pytest.mark.parametrize("blocks", [1000, 40], ids=["roomy", "low-kv"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", ["deadline_triage", "fcfs", RandomDeferral.name])
def test_kv_of_other_engines_is_read_when_it_is_there(
    model, tmp_path, monkeypatch, policy, in_flight, blocks
):
    from vllm.config import KVTransferConfig

    from sluice.replica.vllm.kv_connector import WorkerAddress

    skip_where_tokens_are_lost(in_flight)
    monkeypatch.setitem(POLICIES.own, RandomDeferral.name, RandomDeferral)
    transfer = KVTransferConfig(**transfer_argument(TransferConfig(connector="tcp")))
    scheduler, table = make(model, tmp_path, policy, blocks, in_flight, kv_transfer_config=transfer)
    assert scheduler.defer_block_free == (in_flight > 1)
    layout = bytes(16)
    scheduler.connector.set_xfer_handshake_metadata({0: WorkerAddress("10.0.0.1", 9, layout)})
    arriving = requests(40, best_effort=10)
    offered = 0
    for index, request in enumerate(arriving):
        if index % 3:
            tokens, digest = request.num_prompt_tokens, prompt_digest(request)
            offer = Offer((("10.0.0.2", 9),), layout, Handle.new(), tokens, digest)
            request.kv_transfer_params = offer.to_params()
            offered += tokens > 1
    aborted = [f"r{index}" for index in range(10, 16)]
    received = drive(scheduler, in_flight, arriving, aborted, ModelWithTransfers())
    for request in arriving:
        if request.request_id not in aborted:
            assert received[request.request_id] == expected_of(request)
    check_idle(scheduler, blocks)
    state = table.read()
    assert len(state.rows) == 0
    transfers, failures = state.summary["transfers"], state.summary["transfer_failures"]
    assert transfers > 0 and failures > 0
    assert offered - len(aborted) <= transfers + failures


class ModelWithTier(ModelWithKv):
    """Also loads the KV that :class:`~tests.replica.host_tier.HostTier` has: before the batch, or
    in the time of three."""

    def __init__(self, in_background):
        super().__init__()
        self._in_background = in_background
        self._loads = deque([{}, {}])
        self.loaded = 0

    def run(self, output):
        from vllm.v1.outputs import KVConnectorOutput

        begun = output.kv_connector_metadata.tokens
        if self._in_background:
            self._loads.append(begun)
            begun = self._loads.popleft()
        self.loaded += len(begun)
        self._valid |= begun
        ran = super().run(output)
        if self._in_background:
            ran.kv_connector_output = KVConnectorOutput(finished_recving=set(begun))
        return ran


@pytest.mark.parametrize(("policy", "blocks"), [("deadline_triage", 1000), ("fcfs", 40)])
@pytest.mark.parametrize(("in_background", "in_flight"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("later", [0, 3])
def test_kv_of_a_tier_in_host_memory_is_read_when_it_is_there(
    model, tmp_path, policy, in_background, in_flight, blocks, later
):
    """A connector that an operator has configured, for prompts that no router knows of."""
    skip_where_tokens_are_lost(in_flight)
    extra = {"held": 128, "in_background": in_background, "later": later}
    tier = tier_of("HostTier", extra, kv_connector_module_path="tests.replica.host_tier")
    scheduler, table = make(model, tmp_path, policy, blocks, in_flight, kv_transfer_config=tier)
    arriving, worker = requests(40, best_effort=10), ModelWithTier(in_background)
    received = drive(scheduler, in_flight, arriving, model=worker)
    assert [received[each.request_id] for each in arriving] == list(map(expected_of, arriving))
    assert worker.loaded >= sum(request.num_prompt_tokens > BLOCK for request in arriving)
    summary = table.read().summary
    if blocks == 1000:
        assert summary["plan_mismatches"] == 0
        # Each answer once, where it is one of a connector that locks what it holds.
        assert not later or set(scheduler.connector.asked.values()) == {later + 1}
    assert (summary["kv_answer_s"] > 0) == (later > 0)
    assert len(table.read().rows) == 0
    check_idle(scheduler, blocks)
