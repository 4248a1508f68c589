"""Shared prefixes: what is not computed again, what is evicted, and that no block is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.batching import make_policy
from sluice.simulation.config import EngineConfig
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival, Workload
from tests.examples import examples
from tests.simulation.loads import EXACT, HASHED, OBJECTIVE, families


def hashed(*arrivals: tuple[float, int, tuple[int, ...]], output: int = 1) -> Workload:
    """Requests of ``(arrival_s, prompt_tokens, block_hashes)``, 32 tokens a hash."""
    made = [
        Arrival(when, prompt, output, OBJECTIVE, block_hashes=blocks)
        for when, prompt, blocks in arrivals
    ]
    return Workload("prefixes", tuple(made), block_tokens=HASHED)


def computed_tokens(load: Workload, **limits: int) -> int:
    return simulate(load, make_policy("fcfs"), EXACT, config=EngineConfig(**limits)).computed_tokens


def test_a_prompt_that_begins_like_an_earlier_one_computes_only_the_rest() -> None:
    load = hashed((0.0, 100, (1, 2, 3)), (1.0, 100, (1, 2, 4)), (2.0, 64, (1, 2)))
    # 100, then all but two blocks of 32; of a prompt that is cached whole, its last block.
    assert computed_tokens(load) == 100 + 36 + 32
    config = EngineConfig(prefix_cache=False)
    without = simulate(load, make_policy("fcfs"), EXACT, config=config)
    assert without.computed_tokens == 100 + 100 + 64
    cached = simulate(load, make_policy("fcfs"), EXACT)
    assert cached.requests.emitted_s[1] < without.requests.emitted_s[1]


def test_a_prefix_is_shared_while_its_first_user_still_runs() -> None:
    # The second arrives when the first is in decode.
    load = hashed((0.0, 64, (1, 2)), (0.02, 96, (1, 2, 3)), output=30)
    assert computed_tokens(load) == 64 + 29 + 32 + 29


def test_two_prompts_of_one_step_do_not_share_what_neither_has() -> None:
    load = hashed((0.0, 64, (1, 2)), (0.0, 64, (1, 2)), (1.0, 65, (1, 2)))
    assert computed_tokens(load) == 64 + 64 + 1


def test_the_prefix_that_was_released_first_is_evicted_first() -> None:
    # Room for 8 hashed blocks of 32 tokens, 2 KV blocks each; a prompt of 90 takes 6 KV blocks,
    # of which 4 stay cached.
    first, second = (0.0, 90, (1, 2)), (1.0, 90, (11, 12))
    third, fourth = (2.0, 90, (21, 22)), (3.0, 90, (31, 32))
    fifth = (4.0, 64, (1, 2, 3))
    sixth = (5.0, 90, (21, 22))
    load = hashed(first, second, third, fourth, fifth, sixth)
    # The fourth prompt needs 6 of 16 blocks while 12 are cached: the end of the first prefix goes.
    assert computed_tokens(load, kv_blocks=16) == 4 * 90 + 32 + (90 - 64)


def test_hashed_blocks_must_be_whole_blocks_of_the_engine() -> None:
    load = hashed((0.0, 64, (1, 2)))
    with pytest.raises(ValueError, match=r"blocks of 32 tokens.*block_tokens \(24\)"):
        computed_tokens(load, block_tokens=24)


class Pool:
    """vLLM's free queue of KV blocks, in plain Python, for requests that run one after another: the
    head is taken first, and blocks come back from the end of a request to its beginning, those
    without a hash to the head and the others to the tail."""

    def __init__(self, blocks: int) -> None:
        self._free: list[int | None] = [None] * blocks

    def run(self, arrival: Arrival) -> int:
        """Run one request; return the tokens that were cached."""
        whole = arrival.prompt_tokens // HASHED
        prefix = arrival.block_hashes[:whole]
        hits = 0
        while hits < min(len(prefix), (arrival.prompt_tokens - 1) // HASHED):
            if prefix[hits] not in self._free:
                break
            self._free.remove(prefix[hits])
            hits += 1
        # The last token that leaves has no KV.
        blocks = -(-(arrival.prompt_tokens + arrival.output_tokens - 1) // HASHED)
        del self._free[: blocks - hits]
        self._free[:0] = [None] * (blocks - len(prefix))
        self._free.extend(reversed(prefix))
        return hits * HASHED


@settings(max_examples=examples(100))
@given(load=families(), kv_blocks=st.integers(12, 24), tokens=st.integers(32, 300))
def test_requests_in_turn_find_what_vllms_queue_of_free_blocks_would_keep(
    load: Workload, kv_blocks: int, tokens: int
) -> None:
    config = EngineConfig(kv_blocks=kv_blocks, block_tokens=HASHED, max_batch_tokens=tokens)
    pool, expected = Pool(kv_blocks), 0
    in_turn = []
    for index, arrival in enumerate(load.arrivals):
        # Of a prompt that ends with its last block, vLLM keeps a second copy of that.
        prompt = arrival.prompt_tokens + (arrival.prompt_tokens % HASHED == 0)
        in_turn.append(arrival._replace(arrival_s=10.0 * index, prompt_tokens=prompt))
        expected += pool.run(in_turn[-1])
    load = Workload("in turn", tuple(in_turn), block_tokens=HASHED)
    assert simulate(load, make_policy("fcfs"), EXACT, config=config).hit_tokens == expected
