"""KV that vLLM's ``OffloadingConnector`` has in the host's memory counts with the time to load it.
The copies, which need a GPU, are left out."""

from __future__ import annotations

import time

import pytest

from sluice.scheduling.fleet.prefix import CHUNK_ENDS, TOKEN_UNITS, PromptPrefix

from .known_model import KnownModel
from .test_vllm_async import (
    BLOCK,
    CALM,
    expected_of,
    loop,
    make,
    no_full_collection,
    request_of,
    tier_of,
    token_at,
)

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS, IN_HOST = 300, 40, 100
"""Of a prompt; blocks of the GPU, which hold two prompts, and of the host."""

WHOLE = TOKENS // BLOCK * BLOCK
STEP_S = 0.01
CHUNKS = sum(end <= TOKENS * TOKEN_UNITS for end in CHUNK_ENDS)

__all__ = ["no_full_collection"]


class ModelWithHost(KnownModel):
    """Also copies KV to the memory of the host, in the time of a batch, and back, in that of two. A
    batch that reads KV that is not there trips."""

    def __init__(self):
        super().__init__(token_at)
        self._valid = set()
        self._under_way = []
        self.loaded = 0
        self.ran = 0
        self.now_s = 0.0

    def run(self, output):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput

        self.now_s += STEP_S
        done = [each for each, left in self._under_way if left == 0]
        self._under_way = [(each, left - 1) for each, left in self._under_way if left]
        meta, arrived = OffloadingWorkerMetadata(), set()
        for job, load in done:
            meta.mark_completed(job)
            if load is not None:
                arrived.add(load.req_id)
                self._valid.add(load.req_id)
        jobs = output.kv_connector_metadata
        self._under_way += [((job, None), 0) for job in jobs.store_jobs]
        self._under_way += [((job, load), 1) for job, load in jobs.load_jobs.items()]
        self.loaded += len(jobs.load_jobs)
        for new in output.scheduled_new_reqs:
            cached = self.on_gpu if new.req_id not in self._valid else TOKENS
            assert new.num_computed_tokens <= cached, "KV that is not there"
        self.ran += output.total_num_scheduled_tokens
        ran = super().run(output)
        ran.kv_connector_output = KVConnectorOutput(
            finished_recving=arrived, kv_connector_worker_meta=meta
        )
        return ran


class Bench:
    """One scheduler, and prompts by number."""

    def __init__(self, model, directory, in_flight=1):
        tier = tier_of("OffloadingConnector", {"cpu_bytes_to_use": IN_HOST * 4096})
        args = {"kv_transfer_config": tier, "enable_prefix_caching": True}
        self._in_flight = in_flight
        self.scheduler, self.table = make(
            model, directory, "deadline_triage", BLOCKS, in_flight, **args
        )
        self.worker = ModelWithHost()
        self.scheduler._host._clock = lambda: self.worker.now_s
        self._served = 0

    def request(self, prompt):
        self._served += 1
        chunks = tuple(100 * prompt + 1 + chunk for chunk in range(CHUNKS))
        prefix = PromptPrefix(chunks, TOKENS * TOKEN_UNITS)
        name, told = f"{prompt}-{self._served}", {"prompt": f"prompt {prompt}", "prefix": prefix}
        return request_of(name, TOKENS, 4, CALM, time.monotonic(), **told)

    def serve(self, prompt):
        """Generate after a prompt; the tokens that were computed."""
        request, before = self.request(prompt), self.worker.ran
        self.worker.on_gpu = self.scheduler._hits._look_up(request).tokens
        received = loop(self.scheduler, self._in_flight, [request], (), self.worker)
        assert received[request.request_id] == expected_of(request)
        return self.worker.ran - before

    def shown(self):
        """Tokens of each chunk, and whether it is in the memory of the host only."""
        held = self.table.read().held
        full = held[held["hash"] != 0]
        return {int(row["hash"]): (int(row["tokens"]), bool(row["load_s"] > 0)) for row in full}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_prefix_that_left_the_gpu_is_shown_and_planned_as_loaded(model, tmp_path, in_flight):
    bench = Bench(model, tmp_path, in_flight)
    whole, rest = TOKENS + 3, TOKENS + 3 - WHOLE
    try:
        assert bench.serve(1) == whole
        on_gpu = {101: (128, False), 102: (256, False)}
        assert bench.shown() == on_gpu
        for other in (2, 3, 4):
            bench.serve(other)
        # No load has been timed yet, so what one costs is unknown.
        assert not bench.shown().keys() & on_gpu.keys()
        assert bench.serve(1) == rest and bench.worker.loaded == 1
        for other in (2, 3, 4):
            bench.serve(other)
        shown, in_host = bench.shown(), {101: (128, True), 102: (256, True)}
        assert {chunk: shown[chunk] for chunk in in_host} == in_host
        # From the batch that began the load to the one that ended it.
        load_s = bench.table.read().held["load_s"].max() * WHOLE
        assert 2 * STEP_S <= load_s <= 4.1 * STEP_S
        loads = bench.worker.loaded
        waiting = bench.request(1)
        assert bench.scheduler._hits._look_up(waiting).tokens == WHOLE
        assert bench.serve(1) == rest and bench.worker.loaded == loads + 1
        assert bench.shown().items() >= on_gpu.items()
        summary = bench.table.read().summary
        assert summary["plan_mismatches"] == 0
        # The host evicts it for others; and a reset of the connector forgets all.
        for other in range(5, 15):
            bench.serve(other)
        assert 101 not in bench.shown() and bench.serve(1) == whole
        assert bench.scheduler.reset_prefix_cache(reset_connector=True)
        assert not bench.shown()
        assert bench.scheduler._hits._look_up(bench.request(1)).tokens == 0
    finally:
        bench.scheduler.shutdown()
