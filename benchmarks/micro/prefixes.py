"""The cost of the account of cached prefixes in a replica, in one process.

Run with ``python -m sluice.benchmarks.micro.prefixes``. vLLM's block pool reports evictions, here
with a full cache, where every new block replaces a cached one.
"""

from __future__ import annotations

from itertools import count

import click
from rich.table import Table

from sluice.benchmarks.micro.planning import BLOCK_TOKENS, measure
from sluice.benchmarks.options import as_json, number_option, show
from sluice.replica.scheduler.prefix_index import HeldPrefixes
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.vllm.kv_events import PooledBlocks
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, TOKEN_UNITS, PromptPrefix

PROMPT_TOKENS = 8192
BATCH_TOKENS = 2048
POOL_BLOCKS = 2000
PROMPTS = 2 * POOL_BLOCKS * BLOCK_TOKENS // PROMPT_TOKENS


def allocation_times(repeats: int) -> dict[str, dict[str, float]]:
    """The KV blocks of a prompt of 8192 tokens in vLLM, taken in batches of 2048 and freed."""
    ways = {
        "no account of the cache": (False, False),
        "Sluice's account": (False, True),
        "vLLM's queue of events": (True, False),
    }
    return {
        f"blocks of {PROMPT_TOKENS} tokens, {name}": measure([_Allocation(*way)], repeats)
        for name, way in ways.items()
    }


class _Allocation:
    """One more prompt through vLLM's KV cache manager with each call."""

    def __init__(self, events: bool, watched: bool) -> None:
        import torch
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        self._manager = KVCacheManager(
            KVCacheConfig(POOL_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=2 * PROMPT_TOKENS,
            max_in_flight_tokens=PROMPT_TOKENS,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            enable_kv_cache_events=events,
        )
        blocks = PooledBlocks(self._manager.block_pool)
        self._held: HeldPrefixes | None = None
        if watched:
            table = StateTable.create(1)
            self._held = HeldPrefixes(table, blocks.holds, BLOCK_TOKENS, BLOCK_TOKENS)
            blocks.tell_removed(self._held.removed)
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        # Hashing a prompt's blocks is the same in all ways, so it is not part of the measurement.
        self._prompts = [
            Request(
                request_id=str(number),
                prompt_token_ids=[number * PROMPT_TOKENS + each for each in range(PROMPT_TOKENS)],
                sampling_params=SamplingParams(max_tokens=2),
                pooling_params=None,
                block_hasher=hasher,
            )
            for number in range(PROMPTS)
        ]
        self._turn = count()
        for _ in self._prompts:
            self()

    def __call__(self) -> None:
        turn = next(self._turn)
        request = self._prompts[turn % len(self._prompts)]
        request.num_computed_tokens = 0
        name = request.request_id
        if self._held is not None:
            first = 1 + (turn % len(self._prompts)) * len(CHUNK_ENDS)
            chunks = sum(end <= PROMPT_TOKENS * TOKEN_UNITS for end in CHUNK_ENDS)
            hashes = tuple(range(first, first + chunks))
            self._held.begin(name, PromptPrefix(hashes, PROMPT_TOKENS * TOKEN_UNITS), PROMPT_TOKENS)
        for _ in range(0, PROMPT_TOKENS, BATCH_TOKENS):
            if self._manager.allocate_slots(request, BATCH_TOKENS) is None:
                raise RuntimeError("a prompt did not fit the pool")
            request.num_computed_tokens += BATCH_TOKENS
            if self._held is not None:
                self._held.computed(name, request.num_computed_tokens, request.block_hashes)
                self._held.publish()
        self._manager.free(request)
        self._manager.take_events()


@click.command()
@as_json
@number_option("--repeats", default=200, least=1, most=10_000)
def main(as_json: bool, repeats: int) -> None:
    """Time the allocation of blocks. The JSON maps what -> median_ms and p99_ms."""
    results = allocation_times(repeats)
    table = Table("what", "median ms", "p99 ms", title="KV blocks of a prompt, processor time")
    for name, row in results.items():
        table.add_row(name, f"{row['median_ms']:.4f}", f"{row['p99_ms']:.4f}")
    show(results, [table], as_json)


if __name__ == "__main__":
    main()
