"""Short prompts are tokenized on the event loop.

vLLM has a thread for it. Beside a busy event loop that thread waits up to 5 ms for Python's lock,
before and after the millisecond that such a prompt takes, and the prompts of a burst one after
another."""

from __future__ import annotations

from typing import Any, Final

SHORT: Final = 8 << 10
"""Most characters of a prompt that is tokenized on the event loop, in some 2 ms."""


def tokenize_short_prompts(renderer: Any) -> None:
    """Do so with vLLM's ``renderer``, if it has a tokenizer that several threads may use."""
    try:
        from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
    except ImportError:  # vLLM is older
        return
    in_thread = getattr(renderer, "_tokenize_prompt_async", None)
    if in_thread is None or not isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin):
        return

    async def tokenize(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) <= SHORT:
            return renderer._tokenize_prompt(prompt, params)
        return await in_thread(prompt, params)

    renderer._tokenize_prompt_async = tokenize
