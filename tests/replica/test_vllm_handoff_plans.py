"""Prompts whose KV is handed over, under any plan: one engine in this process takes over what it
gave away. Its prefix cache is emptied in between."""

from __future__ import annotations

import random

import pytest

from sluice.replica.config import TransferConfig
from sluice.replica.vllm.setup import transfer_argument
from sluice.scheduling.batching import POLICIES

from .attentive import attentive_model
from .in_process import InProcess, RandomDeferral, mixed_requests

pytestmark = [pytest.mark.vllm, pytest.mark.release]

REQUESTS = mixed_requests(24, longest=300)
FEW_BLOCKS = 22
"""Of 32 tokens: a few prompts."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from vllm.config import KVTransferConfig

    directory = tmp_path_factory.mktemp("engine")
    transfer = transfer_argument(TransferConfig(connector="tcp"))
    engine = InProcess(
        attentive_model(directory),
        directory,
        "fcfs",
        kv_transfer_config=KVTransferConfig(**transfer),
        num_gpu_blocks_override=FEW_BLOCKS,
        max_model_len=512,
        dtype="float32",
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def whole(engine):
    """What the engine says where nothing is handed over."""
    outputs = engine.generate(REQUESTS)
    assert len(set(outputs)) > 20
    return outputs


def hand_over(engine):
    """Have every prompt computed and kept, and say how each is had."""
    prompts = [(prompt, 1, slo) for prompt, _, slo in REQUESTS]
    asked = [{"do_remote_decode": True} for _ in prompts]
    return [output.kv_transfer_params for output in engine.run(prompts, asked)]


@pytest.mark.parametrize("policy", ["fcfs", "deadline_triage", "slidebatching", "random-deferral"])
def test_the_same_tokens_under_any_plan(engine, whole, policy, monkeypatch):
    monkeypatch.setitem(POLICIES.own, RandomDeferral.name, RandomDeferral)
    chance = random.Random(policy)
    engine.use(policy)
    offers = hand_over(engine)
    # Some come whole, and some of those on offer are gone.
    kinds = [chance.choice(("offer", "offer", "offer", "whole", "gone")) for _ in REQUESTS]
    params = []
    for kind, offer in zip(kinds, offers, strict=True):
        gone = {**offer, "handle": "00" * 24} if offer else None
        params.append({"offer": offer, "whole": None, "gone": gone}[kind])
    engine.use(policy)
    before = engine.table.read().summary.copy()
    outputs = [tuple(each.outputs[0].token_ids) for each in engine.run(REQUESTS, params)]
    assert outputs == whole
    after = engine.table.read().summary
    offered = [kind for kind, offer in zip(kinds, offers, strict=True) if offer]
    assert after["transfers"] - before["transfers"] == offered.count("offer") > 8
    failed = after["transfer_failures"] - before["transfer_failures"]
    assert failed == offered.count("gone")
    scheduler = engine.scheduler
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == FEW_BLOCKS - 1
