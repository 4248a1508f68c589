"""The first use of each feature that clients can ask an engine for, before its replica is ready: it
may compile code, load a library or index the vocabulary, which would delay a step by seconds."""

from __future__ import annotations

import asyncio
import io
import logging
import time
import wave
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.protocol.requests import Endpoint, EngineDeadError, EngineRequest
from sluice.replica.engine import Engine, status_of
from sluice.scheduling.request.objective import SLO

logger = logging.getLogger(__name__)

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_SAMPLED = {"temperature": 0.8}

SAMPLING_FEATURES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": _SAMPLED,
    "top_k": _SAMPLED | {"top_k": 5},
    "top_p": _SAMPLED | {"top_p": 0.9},
    "top_k and top_p": _SAMPLED | {"top_k": 5, "top_p": 0.9},
    "min_p": _SAMPLED | {"min_p": 0.1},
    "seed": _SAMPLED | {"seed": 1},
    "seed, top_k and top_p": _SAMPLED | {"seed": 1, "top_k": 5, "top_p": 0.9},
    "n": _SAMPLED | {"n": 2},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "logprobs of sampled tokens": _SAMPLED | {"logprobs": 2},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "bad_words": {"bad_words": ["a"]},
    "logit_bias": {"logit_bias": {"16": 1}},
    "allowed_token_ids": {"allowed_token_ids": [16, 17, 18]},
    "min_tokens": {"min_tokens": 2, "ignore_eos": False},
    "stop": {"stop": ["stop"]},
}
"""Body fields of a completion, by the feature that they use first."""

STRUCTURED_FEATURES: Mapping[str, Mapping[str, Any]] = {
    "JSON schema": {"structured_outputs": {"json": _SCHEMA}},
    "JSON object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "[a-z]{8,16}"}},
    "choice": {"structured_outputs": {"choice": ["yes, of course", "not at all"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= [a-z] root | "."'}},
}
"""Body fields of a completion with structured output, by feature."""


def silence(seconds: float, rate: int = 16_000) -> bytes:
    """A silent WAV, of ``rate`` samples per second."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(rate)
        audio.writeframes(bytes(2 * round(seconds * rate)))
    return file.getvalue()


ENDPOINT_FEATURES: Mapping[Endpoint, Sequence[Mapping[str, Any]]] = {
    "chat": (
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "stream": True},
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "responses": ({"input": "Hello", "max_output_tokens": 2},),
    "embeddings": ({"input": [16, 17, 18, 19]}, {"input": "Hello"}),
    # Of a rate that hardly any model takes as it is.
    "transcriptions": ({"file": silence(0.5, 22_050), "max_completion_tokens": 2},),
    "tokenize": ({"prompt": "Hello"},),
}
"""Bodies of the endpoints other than completions. An engine offers some of them."""

_PROMPT = [16, 17, 18, 19] * 4
"""Token ids that every vocabulary has; they repeat, so that n-gram speculation drafts some."""

_PAIR_TOKENS = (4, 2)
"""Output tokens of two requests that are sent together, for steps of two sequences and of one."""

_SLO = SLO(service_class="profile")
"""A separate service class: these output lengths must not affect predictions for clients."""


async def warm_up(engine: Engine, model: str, adapters: Sequence[str] = ()) -> None:
    """Use each feature in a batch of its own, all in one, and each LoRA adapter; a refusal is
    logged. Raises EngineDeadError: the engine died at the first use of the feature in the message.
    """
    started_s = time.monotonic()
    used, refused = 0, set[str]()

    async def use(endpoint: Endpoint, body: Mapping[str, Any], name: str) -> bool:
        """Send one request and read its answer; whether the engine served it."""
        nonlocal used
        used += 1
        request = EngineRequest(f"warm-up-{used}", endpoint, {"model": model, **body}, _SLO)
        try:
            status, answer = await status_of(engine.generate(request))
        except EngineDeadError as error:
            raise EngineDeadError(f"the engine died at the first use of {name}: {error}") from error
        if status != 200:
            refused.add(name)
            level = logging.WARNING if status >= 500 else logging.DEBUG
            logger.log(level, "first use of %s: %d %s", name, status, answer[:500])
        return status == 200

    async def use_together(
        features: Mapping[str, Mapping[str, Any]], lengths: Sequence[int]
    ) -> None:
        """Send a completion for each feature and number of output tokens, all at once."""
        bodies = [
            (name, {"max_tokens": tokens, "ignore_eos": name not in STRUCTURED_FEATURES, **fields})
            for tokens in lengths
            for name, fields in features.items()
        ]
        await asyncio.gather(
            *(use("completions", {"prompt": _PROMPT, **body}, name) for name, body in bodies)
        )

    features = {**SAMPLING_FEATURES, **STRUCTURED_FEATURES}
    # A model that generates no text has no completions.
    if await use("completions", {"prompt": _PROMPT, "max_tokens": 1}, "completions"):
        for name, fields in features.items():
            await use_together({name: fields}, _PAIR_TOKENS)
        await use_together(features, _PAIR_TOKENS[:1])
        for adapter in adapters:
            short = {"model": adapter, "prompt": _PROMPT, "max_tokens": 2}
            await use("completions", short, f"the LoRA adapter {adapter}")
    for endpoint, bodies in ENDPOINT_FEATURES.items():
        for body in bodies:
            await use(endpoint, body, endpoint)
    logger.info(
        "first use of %d features in %.1f s; refused: %s",
        used,
        time.monotonic() - started_s,
        ", ".join(sorted(refused)) or "none",
    )
