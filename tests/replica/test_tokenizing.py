"""How prompts are tokenized, and where."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.vllm.local_model import local_model
from sluice.replica.vllm.tokenizing import SHORT, tokenize_lightly

pytestmark = pytest.mark.vllm

CACHE = Path("~/.cache/sluice").expanduser()


def renderer(safe: bool = True, **changes: Any) -> Any:
    """Of vLLM's renderer what is used, with a real tokenizer, for several threads if ``safe``;
    ``threads`` are those in which vLLM's own tokenizing ran."""
    from transformers import AutoTokenizer
    from vllm.renderers.base import BaseRenderer
    from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool
    from vllm.utils.async_utils import make_async

    tokenizer = get_cached_tokenizer(AutoTokenizer.from_pretrained(local_model(CACHE)))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    made = SimpleNamespace(
        tokenizer=maybe_make_thread_pool(tokenizer) if safe else tokenizer,
        _executor=ThreadPoolExecutor(1, thread_name_prefix="own"),
        _can_produce_offsets=lambda: True,
        _build_tokens_prompt=BaseRenderer._build_tokens_prompt,
        threads=[],
    )
    made.get_tokenizer = lambda: made.tokenizer
    made._wants_offsets = partial(BaseRenderer._wants_offsets, made)

    def tokenize(prompt: Any, params: Any) -> Any:
        made.threads.append(threading.current_thread().name)
        return BaseRenderer._tokenize_prompt(made, prompt, params)

    made._tokenize_prompt = tokenize
    made._tokenize_prompt_async = make_async(tokenize, made._executor)
    return made


def parameters(**given: Any) -> Any:
    from vllm.renderers.params import TokenizeParams

    return TokenizeParams(max_total_tokens=100_000, **given)


def lightened(made: Any) -> Any:
    """With ``fastokens``, if it knows this kind of tokenizer."""
    tokenize_lightly(made)
    for thread in threading.enumerate():
        if thread.name == "fastokens":
            thread.join()
    return made


@cache
def both() -> tuple[Any, Any]:
    return lightened(renderer()), renderer()


@given(
    st.lists(st.sampled_from(["<|end|>", "<|begin|>", " ", "\n", "a"]) | st.text()).map("".join),
    st.booleans(),
)
async def test_the_tokens_are_those_of_transformers(text: str, special: bool) -> None:
    light, whole = both()
    prompt, params = {"prompt": text}, parameters(add_special_tokens=special)
    got = await light._tokenize_prompt_async(dict(prompt), params)
    assert light.threads == []
    assert got == await whole._tokenize_prompt_async(dict(prompt), params)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"truncate_prompt_tokens": 3}, {}),
        ({"return_token_offsets": True}, {}),
        ({}, {"split_special_tokens": True}),
    ],
)
async def test_what_needs_more_of_transformers_is_left_to_it(
    given: dict[str, Any], changes: dict[str, Any]
) -> None:
    light, whole = renderer(**changes), renderer(**changes)
    tokenize_lightly(light)
    prompt, params = {"prompt": "Some <|end|> text of several words."}, parameters(**given)
    got = await light._tokenize_prompt_async(dict(prompt), params)
    assert len(light.threads) == 1
    assert got == await whole._tokenize_prompt_async(dict(prompt), params)


async def test_so_it_is_while_the_library_truncates() -> None:
    light, whole = renderer(), renderer()
    tokenize_lightly(light)
    light.tokenizer._tokenizer.enable_truncation(3)
    prompt = {"prompt": "Some text of several words."}
    got = await light._tokenize_prompt_async(dict(prompt), parameters())
    assert len(light.threads) == 1
    assert got == await whole._tokenize_prompt_async(dict(prompt), parameters())


async def test_so_is_a_tokenizer_with_a_way_of_its_own() -> None:
    light = renderer()

    class Own(type(light.tokenizer)):  # type: ignore[misc]
        def _encode_plus(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    light.tokenizer.__class__ = Own
    tokenize_lightly(light)
    await light._tokenize_prompt_async({"prompt": "text"}, parameters())
    assert len(light.threads) == 1


@pytest.mark.parametrize(
    ("safe", "characters", "here"),
    [(True, 1, True), (True, SHORT, True), (True, SHORT + 1, False), (False, 1, False)],
)
@pytest.mark.parametrize("changes", [{}, {"split_special_tokens": True}])
async def test_only_short_ones_by_a_tokenizer_for_several_threads_on_the_event_loop(
    safe: bool, characters: int, here: bool, changes: dict[str, Any]
) -> None:
    made = renderer(safe, **changes)
    build = made._build_tokens_prompt

    def noted(*args: Any, **more: Any) -> Any:
        made.threads.append(threading.current_thread().name)
        return build(*args, **more)

    made._build_tokens_prompt = noted
    tokenize_lightly(made)
    await made._tokenize_prompt_async({"prompt": "a" * characters}, parameters())
    assert (made.threads[-1] == threading.current_thread().name) == here


async def test_what_the_faster_library_finds_otherwise_is_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    light = lightened(renderer())
    library, text = light.tokenizer._tokenizer, "Some text of several words."
    library.add_tokens(["of several"])
    for _ in range(2):
        got = await light._tokenize_prompt_async({"prompt": text}, parameters())
        assert got["prompt_token_ids"] == library.encode(text).ids
    (said,) = [each for each in caplog.messages if "fastokens" in each]
    assert "other token ids" in said


async def test_a_kind_of_tokenizer_that_the_faster_library_does_not_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"?": 0, "some": 1, "words": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    made = renderer()
    made.tokenizer._tokenizer = words
    caplog.set_level(logging.INFO)
    got = await lightened(made)._tokenize_prompt_async({"prompt": "some words"}, parameters())
    assert got["prompt_token_ids"] == [1, 2]
    assert "alone" in caplog.text


async def test_threads_may_tokenize_at_once() -> None:
    light, whole = renderer(), renderer()
    light._executor = ThreadPoolExecutor(4)
    tokenize_lightly(light)
    texts = [f"text {number} " * 2_000 for number in range(8)]

    async def ids(of: Any, text: str) -> Any:
        return (await of._tokenize_prompt_async({"prompt": text}, parameters()))["prompt_token_ids"]

    wanted = [await ids(whole, text) for text in texts]
    assert await asyncio.gather(*(ids(light, text) for text in texts)) == wanted


async def test_a_text_that_is_no_unicode_raises_the_same() -> None:
    raised = []
    for made in both():
        with pytest.raises((TypeError, UnicodeError)) as error:
            await made._tokenize_prompt_async({"prompt": "\ud800"}, parameters())
        raised.append(error.type)
    assert raised[0] == raised[1]


def test_a_model_without_a_tokenizer_is_left_alone() -> None:
    tokenize_lightly(None)
