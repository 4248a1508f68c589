"""Held chunks in real vLLM: shown after a prompt was computed, gone with its blocks."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from sluice.replica.scheduler.xargs import RequestArgs, to_xargs
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, NO_PREFIX, TOKEN_UNITS, PromptPrefix
from sluice.scheduling.request.objective import SLO

from .in_process import InProcess

pytestmark = pytest.mark.vllm

BLOCK = 32
CHUNK = CHUNK_ENDS[0] // TOKEN_UNITS
SMALL = {"num_gpu_blocks_override": 22, "max_model_len": 600}


@pytest.fixture
def start(model, tmp_path):
    engines = []

    def start(**args):
        engines.append(InProcess(model, tmp_path, "fcfs", **args))
        return engines[-1]

    before_s = sys.getswitchinterval()
    yield start
    for engine in reversed(engines):
        engine.close()
    assert sys.getswitchinterval() == before_s


def prefix_of_ids(first, tokens):
    """Chunk ``k`` of the prompts that begin with token ``first`` is ``100 * first + k``."""
    chunks = sum(end <= tokens * TOKEN_UNITS for end in CHUNK_ENDS)
    hashes = tuple(100 * first + 1 + chunk for chunk in range(chunks))
    return PromptPrefix(hashes, tokens * TOKEN_UNITS)


def serve(engine, first, tokens, named=True, resumed=0):
    """Generate after a prompt of one token, ``tokens`` times, of which the last ``resumed`` were
    its own output; tokens that the cache had of it."""
    from vllm import SamplingParams

    prefix = prefix_of_ids(first, tokens - resumed) if named else NO_PREFIX
    args = RequestArgs("r", time.monotonic(), SLO(), prefix=prefix, resumed=resumed)
    params = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, extra_args=to_xargs(args)
    )
    prompt = {"prompt_token_ids": [300 + first] * tokens}
    (output,) = engine.llm.generate([prompt], [params], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    return output.num_cached_tokens


def shown(engine):
    held = engine.table.read().held
    full = held[held["hash"] != 0]
    assert not full["load_s"].any(), "there is no other memory"
    return dict(zip(full["hash"].tolist(), full["tokens"].tolist(), strict=True))


def test_chunks_are_held_until_their_blocks_are_evicted_as_the_cache_says(start):
    engine = start(**SMALL)
    assert serve(engine, 1, 300) == 0
    assert shown(engine) == {101: CHUNK, 102: 2 * CHUNK}
    assert serve(engine, 1, 300) >= 2 * CHUNK
    # Nineteen of 21 blocks.
    serve(engine, 2, 580, named=False)
    assert shown(engine) == {}
    # What was evicted can be held again.
    assert serve(engine, 1, 150) < CHUNK
    assert shown(engine) == {101: CHUNK}
    engine.llm.llm_engine.reset_prefix_cache()
    assert shown(engine) == {}
    # What is shown of random prompts is what the cache has.
    chance, seen = random.Random(5), set()
    for _ in range(40):
        first, tokens = chance.randrange(1, 5), chance.randrange(60, 560)
        table = shown(engine)
        mine = [table[chunk] for chunk in prefix_of_ids(first, tokens).hashes if chunk in table]
        hit = serve(engine, first, tokens)
        # The last token is always computed; of a block that ends there nothing is used.
        most = (tokens - 1) // BLOCK * BLOCK
        assert min(max(mine, default=0), most) == min(hit // CHUNK * CHUNK, most)
        seen.add(len(mine))
    assert seen >= {0, 1, 2, 3}
    assert shown(engine)


def test_the_chunks_of_a_stream_that_came_from_elsewhere_are_held(start):
    engine = start(**SMALL)
    serve(engine, 1, 300, resumed=100)
    assert shown(engine) == {101: CHUNK}
    assert serve(engine, 1, 200) >= CHUNK


@pytest.mark.release
def test_an_engine_without_a_prefix_cache_holds_nothing(start):
    engine = start(enable_prefix_caching=False)
    serve(engine, 1, 300)
    assert shown(engine) == {}
    assert engine.scheduler.kv_cache_manager.take_events() == []


@pytest.mark.release
def test_an_operators_own_events_are_made_as_before(start):
    engine = start(**SMALL, kv_events_config={"enable_kv_cache_events": True, "publisher": "null"})
    told = []
    engine.scheduler.kv_event_publisher = SimpleNamespace(
        publish=lambda batch: told.extend(batch.events), shutdown=lambda: None
    )
    serve(engine, 1, 300)
    serve(engine, 2, 580)
    kinds = Counter(type(event).__name__ for event in told)
    assert kinds["BlockStored"] >= 2 and kinds["BlockRemoved"] > 0
    assert 101 not in shown(engine)
