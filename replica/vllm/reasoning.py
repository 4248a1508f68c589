"""The tokens that end a model's reasoning, from the engine's reasoning parser in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def reasoning_ends(llm: Any) -> frozenset[int]:
    """The ids of these tokens; none if the engine has no reasoning parser, or one that does not
    detect the end by a token.

    Args:
        llm: vLLM's engine client.
    """
    name = llm.vllm_config.structured_outputs_config.reasoning_parser
    if not name:
        return frozenset()
    from vllm.reasoning import ReasoningParserManager

    parser = ReasoningParserManager.get_reasoning_parser(name)(llm.get_tokenizer())
    found = getattr(parser, "reasoning_end_token_ids", None) or [
        getattr(parser, "end_token_id", None)
    ]
    return frozenset(token for token in found if token is not None)


def end_among(token_ids: Sequence[int], ends: frozenset[int]) -> int:
    """The number of these tokens up to the end of the reasoning; 0: it does not end in them."""
    return next((place for place, token in enumerate(token_ids, 1) if token in ends), 0)
