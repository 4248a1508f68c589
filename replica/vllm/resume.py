"""Resuming in vLLM a stream that another replica began.

vLLM's OpenAI layer serves the original body. The tokens that the client has received go through
vLLM's output processor again, in the same steps as before. This restores the state of text, stop
strings and the layer's parsers, and makes the same events. The engine itself gets the prompt
followed by those tokens and computes the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from copy import copy
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import IterationStats

from sluice.replica.engine import Resume
from sluice.replica.scheduler.xargs import KEY_PREFIX

AT_ONCE = 32
"""Outputs that are repeated before the event loop gets a turn: some milliseconds."""

_ZERO = ("presence_penalty", "frequency_penalty", "bad_words")
_UNSET = (
    "structured_outputs",
    "thinking_token_budget",
    "repetition_detection",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
)
"""Sampling parameters that depend on which tokens are output (resumed tokens would count as
prompt), or that ask for more than the id of an output token."""
_TRANSFER = ("kv_transfer_params", "ec_transfer_params")


def may_go_on(params: Any) -> bool:
    """Whether another engine could resume an output that is sampled with these parameters.

    The resumed output is as valid as the original one would have been. It is identical only at
    temperature 0, as the state of the random numbers is lost.
    """
    own = (key.startswith(KEY_PREFIX) or key in _TRANSFER for key in params.extra_args or ())
    return (
        params.n == 1
        and not any(getattr(params, name, None) for name in _ZERO)
        and all(getattr(params, name, None) is None for name in _UNSET)
        and all(own)
    )


async def repeat(
    processor: Any, request: Any, queue: Any, resume: Resume, max_model_tokens: int
) -> list[Any]:
    """Repeat the outputs in ``resume``, for a request that ``processor`` has just taken. If they
    are the whole output, or the request was aborted meanwhile, ``processor`` has forgotten it
    afterwards.

    It yields to the event loop in between: there may be thousands of outputs, for many requests at
    once.
    """
    outputs: list[Any] = []
    end = 0
    for number, tokens in enumerate(filter(None, resume.chunks), 1):
        start, end = end, end + tokens
        output = EngineCoreOutput(request.request_id, list(resume.token_ids[start:end]))
        stats = None
        if end == len(resume.token_ids):
            output.finish_reason, output.stop_reason = _end_of(
                request, resume.token_ids, max_model_tokens
            )
        state = processor.request_states[request.request_id]
        if output.finish_reason is not None and state.stats is not None:
            stats = IterationStats()
        processor.process_outputs([output], time.monotonic(), stats)
        made = queue.get_nowait()
        if made is not None:
            outputs.append(made)
        if request.request_id not in processor.request_states:
            return outputs
        # Its prompt is still to be computed.
        state.is_prefilling = True
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
            if request.request_id not in processor.request_states:
                return outputs
    return outputs


def rest_of(request: Any, token_ids: Sequence[int], prefill_only: bool) -> Any:
    """The request for an engine that resumes after ``token_ids``."""
    rest, params = copy(request), copy(request.sampling_params)
    rest.prompt_token_ids = [*request.prompt_token_ids, *token_ids]
    if not prefill_only:
        params.max_tokens -= len(token_ids)
        params.min_tokens = max(0, params.min_tokens - len(token_ids))
    rest.sampling_params = params
    return rest


def _end_of(
    request: Any, token_ids: Sequence[int], max_model_tokens: int
) -> tuple[FinishReason | None, int | None]:
    """Why the output ended with these tokens, if it did, as vLLM's scheduler decides it. Stop
    strings are the output processor's."""
    params, last = request.sampling_params, token_ids[-1]
    if last == params.eos_token_id:
        return FinishReason.STOP, None
    if last in (params.stop_token_ids or ()):
        return FinishReason.STOP, last
    tokens = len(request.prompt_token_ids) + len(token_ids)
    if len(token_ids) >= params.max_tokens or tokens >= max_model_tokens:
        return FinishReason.LENGTH, None
    return None, None
