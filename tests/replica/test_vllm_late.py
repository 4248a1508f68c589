"""Where a real engine says that the time of late requests went."""

from __future__ import annotations

import random
import time
from unittest.mock import patch

import pytest

from sluice.protocol.requests import request_key
from sluice.replica.scheduler.xargs import RequestArgs, to_xargs
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.lateness import ENGINE, Cause
from sluice.scheduling.request.objective import SLO

from .in_process import InProcess, random_prompt

pytestmark = pytest.mark.vllm

TTFT, TPOT = SLO(ttft_s=1e-4), SLO(tpot_s=1e-4)
BLOCKS = 40


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    started = InProcess(
        *(model, tmp_path_factory.mktemp("engine"), "fcfs"),
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=False,
    )
    # Any step of a busy machine is shorter than this, but for one that waits.
    started.table.set_model(LinearLatency(0.2, 0.0005))
    started.scheduler._local._learn = lambda *_: None
    warm_up = Served(started, "warm-up")
    warm_up.add("holder", 800, 60)
    warm_up.add("x", 600, 3, TTFT)
    warm_up.late()
    yield started
    started.close()


class Served:
    """Requests that are added to an engine, and served with the next one that is late."""

    def __init__(self, engine, number):
        self.engine, self.vllm = engine, engine.llm.llm_engine
        self.number, self.chance = number, random.Random(number)

    def add(self, name, length, output, slo=None, came_s=0.0, waited_s=0.0):
        from vllm import SamplingParams

        name = f"{name}-{self.number}"
        at_s = time.monotonic() - came_s
        args = RequestArgs(
            name, at_s - waited_s, slo or SLO(), promised=slo is not None, waited_s=waited_s
        )
        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, extra_args=to_xargs(args)
        )
        prompt = {"prompt_token_ids": random_prompt(self.chance, length)}
        self.vllm.add_request(name, prompt, params)

    def late(self):
        """The parts until the first token and after it, of the request ``x``."""
        while self.vllm.has_unfinished_requests():
            self.vllm.step()
        parts = self.engine.table.late_parts(request_key(f"x-{self.number}"))
        half = len(ENGINE)
        return [dict(zip(ENGINE, each, strict=True)) for each in (parts[:half], parts[half:])]


def largest(parts):
    return max(parts, key=parts.get)


SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_others_prefills(engine, seed):
    served = Served(engine, f"prefills-{seed}")
    for number in range(2):
        served.add(f"other{number}", 500, 1)
    served.add("x", 20, 2, TTFT)
    until, _ = served.late()
    assert largest(until) is Cause.PREFILLS


@pytest.mark.parametrize("seed", SEEDS)
def test_its_own_prefill(engine, seed):
    served = Served(engine, f"own-{seed}")
    served.add("x", 500, 2, TTFT)
    until, _ = served.late()
    assert largest(until) is Cause.OWN_PREFILL


@pytest.mark.parametrize("seed", SEEDS)
def test_decodes(engine, seed):
    served = Served(engine, f"decodes-{seed}")
    served.add("x", 20, 12, TPOT)
    _, after = served.late()
    assert largest(after) is Cause.DECODES


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_for_memory(engine, seed):
    served = Served(engine, f"memory-{seed}")
    served.add("holder", 800, 60)
    for _ in range(3):
        served.vllm.step()
    served.add("x", 600, 1, TTFT)
    until, _ = served.late()
    assert largest(until) is Cause.KV_MEMORY


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stalled_step(engine, seed):
    served = Served(engine, f"stall-{seed}")
    served.add("x", 40, 2, TTFT)
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    run, waits = executor.execute_model, [1.5]

    def slowly(*args, **kwargs):
        time.sleep(waits.pop() if waits else 0.0)
        return run(*args, **kwargs)

    with patch.object(executor, "execute_model", slowly):
        until, _ = served.late()
    assert largest(until) is Cause.ENGINE_STALL


@pytest.mark.parametrize("seed", SEEDS)
def test_work_of_the_replica_before_the_engine(engine, seed):
    # Nothing ran while it was, say, tokenized.
    served = Served(engine, f"edge-{seed}")
    time.sleep(0.5)
    served.add("x", 20, 2, TTFT, came_s=0.5, waited_s=3.0)
    until, _ = served.late()
    assert largest(until) is Cause.EDGE


def test_a_request_in_time_reports_nothing(engine):
    served = Served(engine, "in-time")
    served.add("x", 20, 4, SLO(ttft_s=60.0, tpot_s=10.0, e2e_s=600.0))
    while served.vllm.has_unfinished_requests():
        served.vllm.step()
    assert engine.table.late_parts(request_key("x-in-time")) == ()
