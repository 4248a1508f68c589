"""Tokens that come in groups, as speculation gives them, from one real vLLM engine process: each is
counted, and has its time."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from sluice.protocol.requests import EngineRequest
from sluice.replica.config import EngineConfig
from sluice.replica.vllm.engine import VllmEngine
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.request.objective import SLO, TokenClock
from sluice.simulation.metrics import TPOTMetric, stages
from sluice.simulation.requests import Requests
from sluice.simulation.workload import Arrival
from tests.known_profile import known_profile
from tests.simulation.loads import of

pytestmark = [pytest.mark.vllm, pytest.mark.release]

NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
TOKENS = 60


@pytest.fixture
async def served(tmp_path):
    """An engine as a replica has it, with n-grams."""
    config = EngineConfig(
        model=str(local_model(tmp_path, layers=2, hidden=128)),
        served_model_name="small",
        cache_dir=tmp_path,
        latency_profile=known_profile(tmp_path),
        grammar_check_s=0,
        vllm_args={
            "max-model-len": 1024,
            "max-num-batched-tokens": 128,
            "kv-cache-memory-bytes": 16 << 20,
            "block-size": 32,
            "dtype": "float32",
            "speculative-config": NGRAMS,
        },
    )
    engine = VllmEngine(config, "replica-1", 32)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def respond(engine, name, **body):
    """What an engine answers to a text of one token again and again, and the chunks' data."""
    fixed = {"model": "small", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    repeating = {"prompt": [500] * 20, "allowed_token_ids": [500]}
    request = EngineRequest(name, "completions", fixed | repeating | body, SLO(tpot_s=1.0))
    _, *chunks, tail = [item async for item in engine.generate(request)]
    return chunks, tail, b"".join(chunk.data for chunk in chunks).decode()


async def test_tokens_that_come_in_groups_are_counted_one_by_one(served):
    before = served.state().summary.copy()
    chunks, tail, data = await respond(served, "plain")
    plain = json.loads(data)
    assert chunks[0].tokens == tail.output_tokens == TOKENS
    assert plain["usage"]["completion_tokens"] == TOKENS
    offsets_s = list(tail.token_offsets_s)
    assert len(offsets_s) == TOKENS
    assert offsets_s == sorted(offsets_s)
    groups = Counter(offsets_s)
    assert len(groups) < TOKENS / 2, "most steps gave several tokens"

    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    chunks, tail, data = await respond(served, "streamed", **streaming)
    events = [json.loads(line.removeprefix("data: ")) for line in data.split("\n\n")[:-2]]
    assert sum(chunk.tokens for chunk in chunks) == tail.output_tokens == TOKENS
    assert sum(chunk.tokens > 0 for chunk in chunks) < TOKENS / 2
    assert events[-1]["usage"].items() <= plain["usage"].items()
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == plain["choices"][0]["text"]
    state = served.state().summary
    accepted, checked = (
        state[name] - before[name] for name in ("drafts_accepted", "drafts_checked")
    )
    assert accepted == checked > TOKENS

    # The edge counts the tokens of a plain response one by one, and those of a stream by chunk.
    slo = SLO(ttft_s=offsets_s[0], tpot_s=1.0)
    single, grouped = TokenClock(slo, 0.0), TokenClock(slo, 0.0)
    for offset_s in offsets_s:
        single.emit(1, offset_s)
    for offset_s, tokens in groups.items():
        grouped.emit(tokens, offset_s)
    mean_s = (offsets_s[-1] - offsets_s[0]) / (TOKENS - 1)
    assert single.tpot_s == grouped.tpot_s == pytest.approx(mean_s)
    assert (single.ttft_s, single.gain) == (grouped.ttft_s, grouped.gain)
    # A window of ten tokens is from group to group.
    requests = Requests(of([Arrival(0.0, 20, TOKENS, slo)]))
    requests.emitted_s[:] = offsets_s
    assert stages(requests).tpot_s[TPOTMetric.WINDOW][0] == pytest.approx(slowest_window(groups))


def slowest_window(groups):
    """The greatest mean time per token from one group to the nearest that is 10 tokens later, or
    more. ``groups`` are how many tokens left at each time."""
    times, ends = list(groups), np.cumsum(list(groups.values()))
    found = []
    for place, end in enumerate(ends):
        begins = [begin for begin in range(place) if end - ends[begin] >= 10]
        if begins:
            begin = begins[-1]
            found.append((times[place] - times[begin]) / (end - ends[begin]))
    return max(found)
