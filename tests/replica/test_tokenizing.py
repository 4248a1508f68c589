"""Which prompts are tokenized on the event loop."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.replica.vllm.tokenizing import SHORT, tokenize_short_prompts

pytestmark = pytest.mark.vllm


def renderer(safe: bool) -> Any:
    """Of vLLM's renderer what is used, with its way to a thread; it gives the thread's name."""
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
    from vllm.utils.async_utils import make_async

    def tokenize(prompt: dict[str, str], params: Any) -> str:
        if not prompt["prompt"]:
            raise ValueError("an empty prompt")
        return threading.current_thread().name

    made = SimpleNamespace(
        tokenizer=ThreadSafeHFTokenizerMixin() if safe else object(),
        _tokenize_prompt=tokenize,
        _tokenize_prompt_async=make_async(tokenize),
    )
    tokenize_short_prompts(made)
    return made


@pytest.mark.parametrize(
    ("safe", "characters", "here"),
    [(True, 1, True), (True, SHORT, True), (True, SHORT + 1, False), (False, 1, False)],
)
async def test_only_short_ones_by_a_tokenizer_for_several_threads(
    safe: bool, characters: int, here: bool
) -> None:
    name = await renderer(safe)._tokenize_prompt_async({"prompt": "a" * characters}, None)
    assert (name == threading.current_thread().name) == here


@pytest.mark.parametrize("safe", [False, True])
async def test_a_refused_prompt_raises_the_same(safe: bool) -> None:
    with pytest.raises(ValueError, match="an empty prompt"):
        await renderer(safe)._tokenize_prompt_async({"prompt": ""}, None)


def test_a_model_without_a_tokenizer_is_left_alone() -> None:
    tokenize_short_prompts(None)
