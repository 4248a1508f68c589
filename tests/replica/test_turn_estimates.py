"""What router and controller predict that a turn of an agent must compute, and what it is worth."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sluice.benchmarks.experiments.agents import CONTESTANTS, engine, run
from sluice.router.request.prompt import TokenEstimator, measure, prefix_of
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, TOKEN_UNITS, PrefixIndex
from sluice.scheduling.request.objective import SLO
from sluice.simulation.agents import HASHED_TOKENS, Loops, agents
from sluice.simulation.cluster import Cluster
from sluice.simulation.generators import Poisson
from sluice.simulation.metrics import TPOTMetric, attained, stages

ROOT = Path(__file__).parents[2]
ROW = np.array([0])
BLOCK = 16


def conversations(turns: int) -> list[list[dict[str, Any]]]:
    """Of parts of this project's files, of different kinds: system, question, calls and results."""
    kinds = [
        sorted(ROOT.glob(pattern)) for pattern in ("router/*.py", "docs/*.md", "helm/**/*.yaml")
    ]
    chance = random.Random(1)
    made = []
    for number in range(6):
        files = [path.read_text() for path in kinds[number % 3]]
        messages = [
            {"role": "system", "content": "".join(chance.sample(files, 3))[:20_000]},
            {"role": "user", "content": "Fix the bug. " * 10},
        ]
        for turn in range(turns):
            call = {"id": f"c{turn}", "function": {"arguments": chance.choice(files)[:300]}}
            text = chance.choice(files)
            begin = chance.randrange(max(1, len(text) - 6_000))
            found = text[begin : begin + round(chance.lognormvariate(8.0, 0.8))]
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": found})
        made.append(messages)
    return made


def rendered(messages: list[dict[str, Any]]) -> str:
    parts = []
    for each in messages:
        called = json.dumps(each["tool_calls"]) if "tool_calls" in each else ""
        parts.append(f"<|im_start|>{each['role']}\n{each['content'] or ''}{called}<|im_end|>\n")
    return "".join(parts)


@pytest.fixture(scope="module")
def counted(model: Path) -> list[list[tuple[dict[str, Any], int]]]:
    """The turns of each conversation, and the tokens of their prompts."""
    from tokenizers import Tokenizer

    count = Tokenizer.from_file(str(model / "tokenizer.json")).encode
    return [
        [
            ({"model": "m", "messages": own[:upto]}, len(count(rendered(own[:upto])).ids))
            for upto in range(2, len(own) + 1, 2)
        ]
        for own in conversations(12)
    ]


def predicted(counted: list[list[tuple[dict[str, Any], int]]], by_turn: bool) -> list[float]:
    """Tokens to compute that are predicted of each later turn, over those that are new."""
    estimator, index, found = TokenEstimator(), PrefixIndex(), []
    for number in range(len(counted[0])):
        for conversation, turns in enumerate(counted, 1):
            body, tokens = turns[number]
            prefix, size = prefix_of("chat", body), measure("chat", body)
            if by_turn:
                size = replace(size, conversation=conversation)
            else:
                prefix = prefix._replace(message_ends=())
            estimate = estimator.estimate(size)
            cached = max(
                float(index.cached_tokens(each, ROW, estimate)[0])
                for each in (prefix.hashes, prefix.message_ends)
            )
            if number:
                found.append(max(1.0, estimate - cached) / (tokens - turns[number - 1][1]))
            estimator.learn(size, tokens)
            held = prefix.chunk_tokens(tokens).items()
            index.hold(0, {chunk: upto // BLOCK * BLOCK for chunk, upto in held})
    return found


def test_a_turns_new_tokens_are_known_closely(counted):
    before, now = (np.array(predicted(counted, by_turn)) for by_turn in (False, True))
    for name, ratios in (("before", before), ("now", now)):
        print(name, len(ratios), np.percentile(ratios, [10, 50, 90]).round(2))
    assert np.percentile(now, 10) > 0.7 and np.percentile(now, 90) < 1.3
    assert np.abs(now - 1).mean() < 0.3 * np.abs(before - 1).mean()


class View(NamedTuple):
    """What the controller is told of a turn: by ``turns``, the one before and exact tokens."""

    turns: bool
    sigma: float = 0.1

    def of(self, query_of: Any) -> Any:
        ends = [end // TOKEN_UNITS // HASHED_TOKENS for end in CHUNK_ENDS]
        last: dict[int, int] = {}

        def query(cluster: Cluster, key: int) -> Any:
            asked, arrival = query_of(cluster, key), cluster._requests.arrivals[key]
            session, blocks = arrival.turn.session, arrival.block_hashes
            known = last.get(session, 0)
            before = blocks[known - 1 : known] if 0 < known <= len(blocks) else ()
            last[session] = arrival.prompt_tokens // HASHED_TOKENS
            tokens = asked.prompt_tokens
            if not (self.turns and arrival.turn.after):
                noise = np.random.default_rng(session).standard_normal()
                tokens = max(1, round(tokens * float(np.exp(self.sigma * noise))))
            return asked._replace(
                prompt_tokens=tokens,
                prefix=tuple([blocks[end - 1] for end in ends if end <= len(blocks)]),
                message_ends=before if self.turns else (),
            )

        return query


@pytest.mark.release
@pytest.mark.parametrize("seed", range(1000, 1004))
def test_more_turns_are_promised_where_they_are_known_closely(seed, monkeypatch):
    slo = SLO(ttft_s=0.3, tpot_s=0.1, service_class="agent")
    kind = Loops("agent", slo, least=15, most=60, gap_scale=0.3, scale=1 / 8)
    workload = agents("loops", [kind], Poisson(0.3), 12, seed)
    (sluice,) = [each for each in CONTESTANTS if each.label == "Sluice"]
    found, query_of = [], Cluster._query
    for turns in (False, True):
        monkeypatch.setattr(Cluster, "_query", View(turns).of(query_of))
        requests = run(workload, sluice, engine("8b", 400_000), 1, seed).requests
        promised = ~np.isnan(requests.promised_s)
        met = attained(requests, stages(requests), TPOTMetric.MEAN)
        found.append((float(promised.mean()), float(met[promised].mean())))
    print(seed, np.round(found, 3).tolist())
    (promised_before, _), (promised_now, kept_now) = found
    assert promised_now > promised_before + 0.05
    assert kept_now >= 0.99
