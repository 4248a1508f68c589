"""Prompts are tokenized without what vLLM does not use of it, and short ones on the event loop.

Transformers' call has the library find out where in the text each token is, which takes a third of
the time. vLLM has a thread for the call. Beside a busy event loop that thread waits up to 5 ms for
Python's lock, before and after the millisecond that a short prompt takes, and the prompts of a
burst one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

SHORT: Final = 8 << 10
"""Most characters of a prompt that is tokenized on the event loop, in some 2 ms."""


def tokenize_lightly(renderer: Any) -> None:
    """Do so with vLLM's ``renderer``, if it has a tokenizer that several threads may use."""
    try:
        from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
        from vllm.utils.async_utils import make_async
    except ImportError:  # vLLM is older
        return
    in_thread = getattr(renderer, "_tokenize_prompt_async", None)
    if in_thread is None or not isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin):
        return
    tokenize_prompt = renderer._tokenize_prompt
    if hasattr(renderer, "_build_tokens_prompt") and hasattr(renderer, "_wants_offsets"):
        token_ids = _token_ids_of(renderer.tokenizer)
        if token_ids is not None:
            tokenize_prompt = _without_places(renderer, token_ids)
            in_thread = make_async(tokenize_prompt, renderer._executor)

    async def tokenize(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) <= SHORT:
            return tokenize_prompt(prompt, params)
        return await in_thread(prompt, params)

    renderer._tokenize_prompt_async = tokenize


def _without_places(
    renderer: Any, token_ids: Callable[[str, bool], list[int]]
) -> Callable[[Any, Any], Any]:
    """``renderer._tokenize_prompt``, by ``token_ids`` where the places are not asked for."""
    whole = renderer._tokenize_prompt

    def tokenize(prompt: Any, params: Any) -> Any:
        if params.truncate_prompt_tokens is not None or renderer._wants_offsets(prompt, params):
            return whole(prompt, params)
        ids = token_ids(prompt["prompt"], params.add_special_tokens)
        return renderer._build_tokens_prompt(ids, prompt)

    return tokenize


def _token_ids_of(tokenizer: Any) -> Callable[[str, bool], list[int]] | None:
    """The tokens of a text, with or without special tokens around them, as Transformers' call of
    ``tokenizer`` has them, for several threads; ``None``: it does more than call its library."""
    from transformers import TokenizersBackend

    encoders = (each for each in type(tokenizer).__mro__ if "_encode_plus" in vars(each))
    if next(encoders, None) is not TokenizersBackend or tokenizer.split_special_tokens:
        return None
    # Its own, which nothing changes: calls of Transformers set truncation and padding.
    library = copy.deepcopy(tokenizer._tokenizer)
    library.no_truncation()
    library.no_padding()
    if not hasattr(library, "encode_batch_fast"):
        return None

    def token_ids(text: str, special: bool) -> list[int]:
        (found,) = library.encode_batch_fast([text], add_special_tokens=special)
        return list(found.ids)

    return token_ids
