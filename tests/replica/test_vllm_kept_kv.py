"""KV of sessions in real vLLM with too little memory for all: which prefixes stay, who gets the
memory, and when it is released."""

from __future__ import annotations

import random
import time

import pytest

from sluice.protocol.requests import Turn, tool_key
from sluice.replica.scheduler.xargs import RequestArgs, to_xargs
from sluice.scheduling.request.objective import SLO

from .in_process import InProcess

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS = 32, 24
READ, TEST = tool_key(["read"]), tool_key(["test"])


class Clock:
    """Time that passes only with the tests' turns, not with what a busy machine takes for them."""

    def __init__(self):
        self.added_s = time.monotonic()

    def __call__(self):
        return self.added_s


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    """Room for 23 blocks."""
    engine = InProcess(
        model,
        tmp_path_factory.mktemp("kept"),
        "deadline_triage",
        num_gpu_blocks_override=BLOCKS,
        max_model_len=640,
    )
    yield engine
    engine.close()


@pytest.fixture
def kept(engine):
    """The queue of free blocks, with nothing in it; reads are known to be short, tests long."""
    queue = engine.scheduler._kept
    assert engine.scheduler._pool.free_block_queue is queue
    assert engine.llm.llm_engine.reset_prefix_cache()
    queue._clock = Clock()
    for _ in range(20):
        queue._kept.gaps.observe(1, READ, 0.01)
        queue._kept.gaps.observe(1, TEST, 50.0)
        queue._kept.gaps.observe(1, 0, 1e9)
    return queue


def serve(engine, session, blocks, tool=READ, called=None, slo=None, promised=False, final=False):
    """A turn whose prompt fills ``blocks`` blocks; the tokens of it that were cached."""
    from vllm import SamplingParams

    turn = Turn(session, session, tool, final=final) if session else None
    args = RequestArgs("r", time.monotonic(), slo or SLO(), tenant=1, promised=promised, turn=turn)
    params = SamplingParams(
        temperature=0.0, max_tokens=2, ignore_eos=True, extra_args=to_xargs(args)
    )
    prompt = {"prompt_token_ids": [300 + session] * (blocks * BLOCK + 1)}
    engine.scheduler._pool.free_block_queue._clock.added_s += 0.003
    (output,) = engine.llm.generate([prompt], [params], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    if called is not None:
        engine.table.add_call(session, called)
    return output.num_cached_tokens


def free(engine):
    return engine.scheduler._pool.get_num_free_blocks()


def cycle(engine, sessions, blocks=10, rounds=4):
    """Loops that take turns, all with one tool; the tokens that vLLM had cached in all."""
    for session in sessions:
        serve(engine, session, blocks, called=READ)
    turns = [session for _ in range(rounds) for session in sessions]
    return sum(serve(engine, session, blocks, called=READ) for session in turns)


def test_loops_that_take_turns_keep_prefixes_where_time_of_use_loses_all(engine, kept):
    # Three loops of ten blocks, and memory for two.
    found = cycle(engine, (1, 2, 3))
    assert free(engine) == BLOCKS - 1
    assert engine.llm.llm_engine.reset_prefix_cache()
    pool, queue = engine.scheduler._pool, engine.scheduler._kept
    engine.scheduler._kept = None
    try:
        lost = cycle(engine, (1, 2, 3))
    finally:
        engine.scheduler._kept = queue
    computed, before = (12 * (10 * BLOCK + 1) - each for each in (found, lost))
    assert computed < 0.7 * before
    assert pool.free_block_queue is queue


def test_the_loop_whose_tool_takes_longest_gives_its_memory(engine, kept):
    serve(engine, 1, 8, called=READ)
    serve(engine, 2, 8, called=TEST)
    # It takes what nobody has had, and then from the end of the second.
    serve(engine, 0, 12)
    assert serve(engine, 1, 8, called=READ) == 8 * BLOCK
    assert 0 < serve(engine, 2, 8, TEST, called=TEST) < 8 * BLOCK
    # A loop that has ended goes before both.
    assert engine.llm.llm_engine.reset_prefix_cache()
    for session, tool in ((1, READ), (2, TEST), (3, 0)):
        serve(engine, session, 7, called=tool)
    serve(engine, 0, 8)
    assert [serve(engine, session, 7) for session in (1, 2, 3)][:2] == [7 * BLOCK] * 2


def test_a_promise_takes_what_is_kept(engine, kept):
    serve(engine, 1, 10, called=READ)
    serve(engine, 2, 10, called=READ)
    assert free(engine) == BLOCKS - 1, "what is kept counts as free"
    serve(engine, 0, 19, slo=SLO(ttft_s=30.0), promised=True)
    assert serve(engine, 1, 10) + serve(engine, 2, 10) < 20 * BLOCK
    assert free(engine) == BLOCKS - 1


def test_a_minute_without_a_turn_releases(engine, kept):
    serve(engine, 1, 10, called=READ)
    kept._clock.added_s += 61.0
    serve(engine, 2, 1, called=READ)
    assert len(kept._kept) == 1
    # Now it goes by the time of use, before the second one.
    assert serve(engine, 1, 10) == 10 * BLOCK
    kept._clock.added_s += 61.0
    serve(engine, 3, 12, called=TEST)
    serve(engine, 0, 10)
    assert serve(engine, 3, 12) == 12 * BLOCK


def test_the_end_of_a_session_releases(engine, kept):
    serve(engine, 1, 10, called=READ)
    serve(engine, 2, 10, called=READ)
    assert serve(engine, 1, 10, final=True) == 10 * BLOCK
    assert len(kept._kept) == 10 and free(engine) == BLOCKS - 1
    # A request without a session takes the memory of the one that has ended.
    serve(engine, 0, 12)
    assert serve(engine, 2, 10, called=READ) == 10 * BLOCK
    assert serve(engine, 1, 10) == 0


def test_the_queue_is_vllms_for_random_traffic(engine, kept):
    chance = random.Random(7)
    for _ in range(60):
        session = chance.randrange(6)
        serve(
            engine,
            session,
            chance.randrange(1, 18),
            called=chance.choice([None, 0, READ, TEST]) if session else None,
            final=chance.random() < 0.2,
        )
        blocks = kept.get_all_free_blocks()
        assert (
            len(blocks) == len({block.block_id for block in blocks}) == BLOCKS - 1 == free(engine)
        )
        assert list(kept.iter_blocks_after(None)) == blocks
        place = chance.randrange(BLOCKS - 1)
        assert list(kept.iter_blocks_after(blocks[place])) == blocks[place + 1 :]
        kept._clock.added_s += chance.choice([0.0, 1.0, 20.0])
    assert engine.llm.llm_engine.reset_prefix_cache()
    assert len(kept._kept) == 0


def test_vllm_with_another_queue_keeps_its_own(engine, monkeypatch, caplog):
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    from sluice.replica.vllm.kept_kv import keep_sessions

    pool = engine.scheduler._pool
    before = pool.free_block_queue
    monkeypatch.delattr(FreeKVCacheBlockQueue, "append_n")
    assert keep_sessions(pool, list) is None
    assert pool.free_block_queue is before
    assert "lacks FreeKVCacheBlockQueue.append_n" in caplog.text
    monkeypatch.setattr(pool, "enable_caching", False)
    caplog.clear()
    assert keep_sessions(pool, list) is None and not caplog.text
