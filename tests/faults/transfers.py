"""A used KV handle is presented again: by a late router, and by an attacker on the network."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ray import serve
from ray.serve.context import _get_global_client

from sluice.deploy.app import REPLICA_DEPLOYMENTS
from sluice.protocol.requests import (
    EngineRequest,
    KVHandle,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
)
from sluice.replica.transfer import Offer, TransferError, fetch
from sluice.router.serve.replicas import ServeReplicas
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from tests.e2e.conftest import wait_until
from tests.faults.engines import ENGINES, STREAMS
from tests.faults.scenario import Scenario, Setting, Trial

_ENGINE = ENGINES.fields["engine"]
# Without a prefix cache the decode replica needs the KV of each prompt.
_VLLM_ARGS = {**_ENGINE["vllm_args"], "enable-prefix-caching": False}
_ROLES: tuple[Role, ...] = ("prefill", "decode")
_FETCH_S = 10.0

PAIR = Setting(
    {
        **ENGINES.fields,
        "name": "transfer-faults",
        # Without a prefix cache the decode replica needs the KV of each prompt.
        "engine": {
            **_ENGINE,
            "vllm_args": {**_ENGINE["vllm_args"], "enable-prefix-caching": False},
        },
        "replica": {"num_cpus": 0.1, "pools": {role: {"count": 1} for role in _ROLES}},
    },
    exact=False,
)
"""A prefill replica and a decode replica."""


def handle_replayed(trial: Trial) -> Callable[[], bool]:
    """Its handle gets nothing a second time: neither over the network, nor in a request."""

    def failures() -> float:
        return trial.metrics().get("sluice_kv_transfer_failures_total", 0.0)

    trial.busiest(1)
    before = failures()
    asyncio.run(_replay(trial))
    wait_until(lambda: failures() == before + 1, "the failed transfer is counted", every_s=0.2)
    return lambda: True


async def _replay(trial: Trial) -> None:
    names = {role: REPLICA_DEPLOYMENTS[role] for role in _ROLES}
    handles = {role: [serve.get_deployment_handle(names[role], trial.app)] for role in _ROLES}
    try:
        await _present_twice(ServeReplicas(handles), trial.model)
    finally:
        # They belong to this loop.
        await _get_global_client().shutdown_cached_handles_async()


async def _present_twice(replicas: ServeReplicas, model: str) -> None:
    body = {
        "model": model,
        "prompt": "A used handle is presented again. " * 20,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    asked = EngineRequest("handed over", "completions", body, SLO(ttft_s=60.0, tpot_s=5.0))
    kv_handle = await _prefill(replicas, asked)
    text = await _answer(replicas, replace(asked, kv_handle=kv_handle))
    with pytest.raises(TransferError, match="no such KV"):
        await asyncio.to_thread(_fetch, kv_handle)
    late = replace(asked, request_id="handed over again", kv_handle=kv_handle)
    assert await _answer(replicas, late) == text


async def _prefill(replicas: ServeReplicas, asked: EngineRequest) -> KVHandle:
    prompt = replace(asked, request_id=f"{asked.request_id}.prefill", prefill_only=True)
    tail = (await _items(replicas, prompt, "prefill"))[-1]
    assert isinstance(tail, ResponseTail) and tail.kv_handle is not None
    return tail.kv_handle


async def _answer(replicas: ServeReplicas, asked: EngineRequest) -> str:
    items = await _items(replicas, asked, "decode")
    heads = [item for item in items if isinstance(item, ResponseHead)]
    assert [head.status for head in heads] == [200]
    data = b"".join(item.data for item in items if isinstance(item, ResponseChunk))
    return str(json.loads(data)["choices"][0]["text"])


async def _items(replicas: ServeReplicas, asked: EngineRequest, role: Role) -> list[Any]:
    return [item async for items in replicas.generate(asked, None, (), role) for item in items]


def _fetch(kv_handle: KVHandle) -> None:
    fetch(Offer.of(kv_handle.params).source(0), 0, 1, [1], time.monotonic() + _FETCH_S)


SCENARIOS = (Scenario("vLLM: KV handle replayed", PAIR, handle_replayed, STREAMS, quick=False),)
