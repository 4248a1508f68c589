"""The cost of the account of cached prefixes is measured on what production runs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from sluice.benchmarks.micro import prefixes

pytestmark = pytest.mark.vllm


def test_every_account_is_timed() -> None:
    result = CliRunner().invoke(prefixes.main, ["--json", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    times = json.loads(result.stdout)
    assert len(times) == 3
    for row in times.values():
        assert 0 < row["median_ms"] <= row["p99_ms"]


def test_the_timed_allocations_evict_and_are_accounted_for() -> None:
    call = prefixes._Allocation(events=False, watched=True)
    assert call._held is not None
    table = call._held._table
    pool = call._manager.block_pool
    for _ in range(20):
        call()
        held = table.read().held
        shown = held["hash"][held["hash"] != 0]
        assert len(shown) > 0
    # No more prompts are held than fit the pool.
    assert len(shown) * 128 <= pool.num_gpu_blocks * prefixes.BLOCK_TOKENS
