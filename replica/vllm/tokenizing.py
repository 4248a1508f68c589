"""Prompts are tokenized without what vLLM does not use of it, by the faster of two libraries, and
short ones on the event loop.

Transformers' call has the library find out where in the text each token is, which takes a third of
the time. ``fastokens`` finds the ids of a long text in a tenth of it, where it knows the kind of
tokenizer. vLLM has a thread for the call. Beside a busy event loop that thread waits up to 5 ms for
Python's lock, before and after the millisecond that a short prompt takes, and the prompts of a
burst one after another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

SHORT: Final = 8 << 10
"""Most characters of a prompt that is tokenized on the event loop, in some 2 ms."""

COMPARED: Final = 100
"""The first prompts, up to this number, and each whose number is a multiple of it are tokenized by
both libraries."""


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
    has_parts = hasattr(renderer, "_build_tokens_prompt") and hasattr(renderer, "_wants_offsets")
    if has_parts and _only_calls_library(renderer.tokenizer):
        tokenize_prompt = _without_places(renderer)
        in_thread = make_async(tokenize_prompt, renderer._executor)

    async def tokenize(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) <= SHORT:
            return tokenize_prompt(prompt, params)
        return await in_thread(prompt, params)

    renderer._tokenize_prompt_async = tokenize


def _only_calls_library(tokenizer: Any) -> bool:
    """Whether Transformers' call does no more than call the library ``tokenizers``."""
    from transformers import TokenizersBackend

    encoders = (each for each in type(tokenizer).__mro__ if "_encode_plus" in vars(each))
    return (
        next(encoders, None) is TokenizersBackend
        and not tokenizer.split_special_tokens
        and hasattr(tokenizer._tokenizer, "encode_batch_fast")
    )


def _without_places(renderer: Any) -> Callable[[Any, Any], Any]:
    """``renderer._tokenize_prompt``, for several threads, by the library where the places are not
    asked for."""
    whole = renderer._tokenize_prompt
    # vLLM's calls of Transformers set truncation and padding, but in copies of this one.
    library = renderer.tokenizer._tokenizer
    library.no_truncation()
    library.no_padding()
    ids = _Ids(library)

    def tokenize(prompt: Any, params: Any) -> Any:
        if (
            params.truncate_prompt_tokens is not None
            or renderer._wants_offsets(prompt, params)
            or library.truncation is not None
            or library.padding is not None
            or library.encode_special_tokens
        ):
            return whole(prompt, params)
        found = ids.of(prompt["prompt"], params.add_special_tokens)
        return renderer._build_tokens_prompt(found, prompt)

    return tokenize


class _Ids:
    """Token ids by ``fastokens`` as soon as it has read the vocabulary, which takes seconds of a
    thread, and as long as they are those of ``library``, Transformers' own."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._fast: Any = None
        self._count = 0
        threading.Thread(target=self._read, name="fastokens", daemon=True).start()

    def _read(self) -> None:
        try:
            from fastokens import Tokenizer

            self._fast = Tokenizer.from_json_str(self._library.to_str())
        except (ImportError, ValueError) as error:  # missing, or another kind of tokenizer
            logger.info("Prompts are tokenized by the library tokenizers alone: %s", error)

    def of(self, text: str, special: bool) -> list[int]:
        """Of a text; ``special``: with the tokens that its model expects around it. Raises what
        the library does."""
        fast = self._fast
        if fast is None:
            return self._by_library(text, special)
        try:
            found: list[int] = fast.encode(text, add_special_tokens=special).ids
        except ValueError:
            return self._by_library(text, special)
        self._count += 1
        if self._count > COMPARED and self._count % COMPARED:
            return found
        if found != (own := self._by_library(text, special)):
            self._fast = None
            logger.error("fastokens has other token ids than the library tokenizers: not used.")
        return own

    def _by_library(self, text: str, special: bool) -> list[int]:
        (found,) = self._library.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids
