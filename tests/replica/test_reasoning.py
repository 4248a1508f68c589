"""The end of a model's reasoning, found in its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sluice.protocol.requests import ResponseChunk
from sluice.replica.scheduler.local_scheduler import end_among
from sluice.replica.vllm.engine import reasoning_ends
from tests.controller.fleet import Clock

THINK, END = 7, 9


class Tokenizer:
    """One that has the tokens of reasoning."""

    def get_vocab(self) -> dict[str, int]:
        return {"<think>": THINK, "</think>": END}


def engine(parser: str) -> Any:
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(reasoning_parser=parser))
    return SimpleNamespace(vllm_config=config, get_tokenizer=Tokenizer)


@pytest.mark.vllm
def test_the_parser_of_the_engine_says_with_which_tokens_reasoning_ends() -> None:
    assert reasoning_ends(engine("deepseek_r1")) == {END}
    assert reasoning_ends(engine("")) == frozenset()


def test_the_end_is_the_first_such_token() -> None:
    assert end_among((1, END, 2, END), frozenset({END})) == 2
    assert end_among((1, 2), frozenset({END})) == 0
    assert end_among((1, 2), frozenset()) == 0


def outputs(*groups: tuple[int, ...], plain: bool) -> list[Any]:
    """What an engine gives of one choice; of a plain response all tokens so far, each time."""
    given: list[Any] = []
    every: tuple[int, ...] = ()
    for group in groups:
        every += group
        choice = SimpleNamespace(index=0, token_ids=every if plain else group)
        given.append(
            SimpleNamespace(
                outputs=[choice],
                prompt_token_ids=(1,),
                num_cached_tokens=0,
                metrics=None,
                kv_transfer_params=None,
            )
        )
    return given


def call_of(
    resumable: bool = False, ends: frozenset[int] = frozenset({END}), staged: bool = False
) -> Any:
    from sluice.replica.vllm.client import ApiCall

    return ApiCall(0.0, resumable=resumable, ends=ends, staged=staged)


@pytest.mark.vllm
@pytest.mark.parametrize("resumable", [False, True])
def test_a_chunk_says_with_which_of_its_tokens_reasoning_ended(resumable: bool) -> None:
    from sluice.replica.vllm.client import _count

    call, counted = call_of(resumable), dict[int, int]()
    chunks: list[ResponseChunk] = []
    # The second event has what two outputs of the engine made.
    for event in ([(1, 2)], [(3,), (4, END, 5)], [(END,)]):
        for output in outputs(*event, plain=False):
            _count(output, call, False, True, counted)
        chunks += call.chunks(b"event")
    assert [(chunk.tokens, chunk.reasoned) for chunk in chunks] == (
        [(2, 0), (1, 0), (3, 2), (1, 0)] if resumable else [(2, 0), (4, 3), (1, 0)]
    )


@pytest.mark.vllm
@pytest.mark.parametrize("resumable", [False, True])
def test_chunks_of_a_request_of_stages_have_the_times_of_their_tokens(
    resumable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a token that makes no event, as the one that ends the reasoning."""
    from sluice.replica.vllm import client

    call, counted, clock = call_of(resumable, staged=True), dict[int, int](), Clock(0.0)
    monkeypatch.setattr(client.time, "monotonic", clock)
    for output in outputs((1, 2), (END,), (3,), plain=False):
        clock.advance(0.5)
        client._count(output, call, False, True, counted)
    clock.advance(0.5)
    assert call.chunks(b"event") == [
        ResponseChunk(b"", 2, (1, 2) if resumable else (), 0, 0.5),
        ResponseChunk(b"", 1, (END,) if resumable else (), 1, 1.0),
        ResponseChunk(b"event", 1, (3,) if resumable else (), 0, 1.5),
    ]
    assert call.chunks(b"[DONE]") == [ResponseChunk(b"[DONE]")]


@pytest.mark.vllm
def test_a_plain_response_says_with_which_of_all_tokens() -> None:
    from sluice.replica.vllm.client import _count

    call, counted = call_of(), dict[int, int]()
    for output in outputs((1, 2), (3,), (END, 4), plain=True):
        _count(output, call, True, True, counted)
    assert call.reasoned == 4
    unasked, counted = call_of(ends=frozenset()), {}
    for output in outputs((1, END), plain=True):
        _count(output, unasked, True, True, counted)
    assert unasked.reasoned == 0
