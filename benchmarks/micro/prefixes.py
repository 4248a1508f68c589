"""The cost of prefix affinity (how much of a prompt each replica has cached), in one process.

Run with ``python -m sluice.benchmarks.micro.prefixes``. It has three parts: the router hashes a
prompt's prefix; the controller looks it up; and vLLM's block pool reports evictions, here of vLLM
0.32 with a full cache, where every new block replaces a cached one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import click
import numpy as np
from rich.table import Table

from sluice.benchmarks.micro.planning import BLOCK_TOKENS, measure
from sluice.benchmarks.options import as_json, number_option, show
from sluice.replica.scheduler.prefix_index import HeldPrefixes
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.vllm.kv_events import PooledBlocks
from sluice.router.request.prompt_prefix import prefix_of
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, TOKEN_UNITS, PrefixIndex, PromptPrefix

CHARACTERS = (1_000, 10_000, 100_000, 1_000_000)
REPLICAS = (64, 512)
PROMPT_TOKENS = 8192
BATCH_TOKENS = 2048
POOL_BLOCKS = 2000

Figures = dict[str, dict[str, float]]


def naming_times(repeats: int) -> Figures:
    """Naming the beginning of a conversation of one message, by its length."""
    results = {}
    for characters in CHARACTERS:
        message = {"role": "user", "content": "word " * (characters // 5)}
        body = {"model": "local", "messages": [message]}
        call: Callable[[], object] = partial(prefix_of, "chat", body)
        results[f"naming {characters} characters"] = measure([call], repeats)
    return results


def lookup_times(repeats: int) -> Figures:
    """Looking up a prompt of 64 chunks of which each replica holds the first few, or none."""
    results = {}
    prefix = tuple(range(1, len(CHUNK_ENDS) + 1))
    for replicas in REPLICAS:
        chance = random.Random(replicas)
        index = PrefixIndex()
        for row in range(replicas):
            held = chance.choice((0, 0, 0, 8, 20, 40))
            index.hold(row, {chunk: 128 * chunk for chunk in prefix[:held]})
        call: Callable[[], object] = partial(index.cached_tokens, prefix, np.arange(replicas))
        results[f"lookup among {replicas} replicas"] = measure([call], repeats)
    return results


def allocation_times(repeats: int) -> Figures:
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
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

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
        self._prompts = [_request(number, hasher) for number in range(2 * POOL_BLOCKS * 16 // 8192)]
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


def _request(number: int, hasher: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=str(number),
        prompt_token_ids=[number * PROMPT_TOKENS + place for place in range(PROMPT_TOKENS)],
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=hasher,
    )


@click.command()
@as_json
@number_option("--repeats", default=200, least=1, most=10_000)
def main(as_json: bool, repeats: int) -> None:
    """Time the parts of prefix affinity. The JSON maps what -> median_ms and p99_ms."""
    results = naming_times(repeats) | lookup_times(repeats) | allocation_times(repeats)
    table = Table("what", "median ms", "p99 ms", title="Prefix affinity, processor time")
    for name, row in results.items():
        table.add_row(name, f"{row['median_ms']:.4f}", f"{row['p99_ms']:.4f}")
    show(results, [table], as_json)


if __name__ == "__main__":
    main()
