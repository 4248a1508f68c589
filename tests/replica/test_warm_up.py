"""Nothing is compiled when clients first use a feature: that happens before the engine is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sluice.protocol.requests import (
    EngineDeadError,
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
)
from sluice.replica.vllm.warm_up import SAMPLING_FEATURES, STRUCTURED_FEATURES, warm_up
from tests.replica.small_engine import batches_of, greedy, items_of

MESSAGES = [{"role": "user", "content": "Please write a short story"}]
CHAT_FEATURES = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 5},
    "top_logprobs of sampled tokens": {"logprobs": True, "top_logprobs": 1, "temperature": 1.0},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "penalties and min_p": {"frequency_penalty": 1, "min_p": 0.3, "temperature": 1.0},
    "seed and n": {"seed": 7, "n": 3, "temperature": 1.0, "top_k": 9},
    "JSON mode": {"response_format": {"type": "json_object"}, "ignore_eos": False},
    "stream": {"stream": True, "logprobs": True},
}


async def use(engine, endpoint, name, fields, tokens):
    prompt = {"messages": MESSAGES} if endpoint == "chat" else {"prompt": "The river was quiet"}
    body = {"max_tokens": tokens} | prompt | fields
    head, *rest = await items_of(engine, greedy(f"{endpoint} {name} {tokens}", endpoint, **body))
    assert head.status == 200, (name, rest)


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_the_first_use_of_no_feature_compiles_anything(vllm):
    engine, before = vllm.engine, [vllm.compiled]
    # The ranks of log probabilities, which only their first use compiles.
    assert before[0][0] >= 1
    uses = [("chat", name, fields) for name, fields in CHAT_FEATURES.items()]
    for features in (SAMPLING_FEATURES, STRUCTURED_FEATURES):
        uses += [("completions", name, fields) for name, fields in features.items()]
    for endpoint, name, fields in uses:
        await use(engine, endpoint, name, fields, 5)
        together = (use(engine, endpoint, name, fields, tokens) for tokens in range(6, 11))
        await asyncio.gather(*together)
        after = await engine._llm.collective_rpc("compilations")
        assert after == before, f"{name} was compiled at its first use"
    await asyncio.gather(*(use(engine, *each, 11) for each in uses))
    assert await engine._llm.collective_rpc("compilations") == before


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_the_steps_of_the_first_uses_teach_the_latency_model_nothing(vllm):
    names = [[name for name, _, _ in batch["ran"]] for batch in batches_of(vllm.engine)]
    used = [names_ for names_ in names if any(name.startswith("warm-up-") for name in names_)]
    both = {len(set(names_)) for names_ in used}
    # Batches of one request, of two, and of all features at once.
    assert {1, 2} <= both
    assert max(both) > len(STRUCTURED_FEATURES)
    profiled = next(at for at, batch in enumerate(names) if batch[0].startswith("profile-"))
    assert all(name.startswith("warm-up-") for batch in names[:profiled] for name in batch)
    assert len(vllm.engine._table.samples()) <= len(names) - len(used)


@pytest.mark.vllm
def test_ranks_are_those_of_stock_vllm_without_a_compiler():
    import torch
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    from sluice.replica.vllm.cpu_worker import mend_token_ranks

    mend_token_ranks()
    ranks = sampler.batched_count_greater_than
    assert not hasattr(ranks, "_torchdynamo_orig_callable")
    stock = batched_count_greater_than._torchdynamo_orig_callable
    logprobs = torch.randn(7, 1000).round(decimals=1)  # with equal values
    values = logprobs[:, 5:6]
    assert torch.equal(ranks(logprobs, values), stock(logprobs, values))
    assert ranks(logprobs, values).dtype == stock(logprobs, values).dtype


@pytest.mark.vllm
def test_tokens_without_a_lora_adapter_are_computed_without_one():
    import torch
    from vllm.lora.ops.torch_ops.lora_ops import bgmv_expand, bgmv_shrink

    from sluice.replica.vllm.cpu_worker import without_adapter_as_is

    a, b = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 8, 4)
    inputs, outputs = torch.randn(3, 8), torch.randn(3, 8)
    between, found = torch.empty(3, 4), outputs.clone()
    adapters = torch.tensor([0, -1, 1])
    without_adapter_as_is(bgmv_shrink)(inputs, a, between, adapters, 1.0)
    without_adapter_as_is(bgmv_expand)(between, b, found, adapters, add_inputs=True)
    for row, adapter in enumerate(adapters.tolist()):
        more = b[adapter, 0] @ a[adapter, 0] @ inputs[row] if adapter >= 0 else 0
        assert torch.allclose(found[row], outputs[row] + more, atol=1e-5)


@pytest.mark.vllm
def test_drafts_are_checked_by_what_vllm_has_put_into_its_module(monkeypatch):
    from types import SimpleNamespace

    from vllm.v1.sample import rejection_sampler

    from sluice.replica.vllm.cpu_worker import mend_sampling_kernels

    for_cpus, caller = object(), SimpleNamespace(kernel=object())
    monkeypatch.setattr(rejection_sampler, "rejection_greedy_sample_kernel", for_cpus)
    monkeypatch.setattr(rejection_sampler, "_rejection_greedy_sample", caller, raising=False)
    # Before 0.30 a function of vLLM's calls those of its module.
    monkeypatch.delattr(rejection_sampler, "_rejection_random_sample", raising=False)
    mend_sampling_kernels()
    assert caller.kernel is for_cpus


class Refusing:
    """An engine that refuses each request with this status, or dies at the one of this number."""

    def __init__(self, status: int, dies_at: int = 0) -> None:
        self.status = status
        self.requests: list[EngineRequest] = []
        self._dies_at = dies_at

    async def generate(self, request: EngineRequest) -> AsyncIterator[ResponseItem]:
        self.requests.append(request)
        if len(self.requests) == self._dies_at:
            raise EngineDeadError("it is gone")
        yield ResponseHead(self.status, "application/json")
        yield ResponseChunk(b"why")


async def test_a_model_without_completions_gets_none_of_their_features():
    engine = Refusing(404)
    await warm_up(engine, "m", ("adapter",))
    endpoints = [request.endpoint for request in engine.requests]
    assert endpoints.count("completions") == 1
    assert "embeddings" in endpoints


async def test_each_adapter_is_used():
    engine = Refusing(200)
    await warm_up(engine, "m", ("one", "two"))
    assert {request.body["model"] for request in engine.requests} == {"m", "one", "two"}


async def test_an_engine_that_dies_names_the_feature():
    engine = Refusing(200, dies_at=2)
    with pytest.raises(EngineDeadError, match="first use of greedy: it is gone"):
        await warm_up(engine, "m")
