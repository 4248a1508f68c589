"""What the client of a vLLM engine makes of its outputs: tokens, times and the end of reasoning of
each chunk, and outputs that are made again to resume a stream. No engine: tokens are given."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.requests import ResponseChunk, Resume
from sluice.replica.vllm.engine import reasoning_ends
from sluice.replica.vllm.local_model import local_model
from tests.controller.fleet import Clock
from tests.examples import examples

pytestmark = pytest.mark.vllm

PROMPT = [300, 301, 302]
MOST = 24
LAST = 7
"""The token that ends an output."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    model = local_model(tmp_path_factory.mktemp("model"), layers=1, hidden=64)
    return AutoTokenizer.from_pretrained(model)


class Output:
    """One request in an output processor; ``call``: its outputs pass by vLLM's layer."""

    def __init__(
        self, tokenizer: Any, stop: list[str], call: Any = None, prompt: list[int] = PROMPT
    ) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

        delta = RequestOutputKind.DELTA
        params = SamplingParams(
            max_tokens=MOST, stop=stop, stop_token_ids=[LAST], output_kind=delta, min_tokens=2
        )
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id="r",
        )
        self.queue = RequestOutputCollector(delta, "r")
        self.processor.add_request(self.request, None, queue=self.queue)
        if call is not None:
            from sluice.replica.vllm.client import RelayedState

            RelayedState.relay(self.processor.request_states["r"], call, {call.wait: 0.0})

    @property
    def ended(self) -> bool:
        return not self.processor.has_request("r")

    def feed(self, groups: list[list[int]]) -> list[Any]:
        """What comes of these tokens, as an engine gives them."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        made = []
        for group in groups:
            if self.ended:
                break
            output = EngineCoreOutput("r", list(group))
            done = self.processor.request_states["r"].detokenizer.num_output_tokens()
            if group[-1] == LAST:
                output.finish_reason, output.stop_reason = FinishReason.STOP, LAST
            elif done + len(group) == MOST:
                output.finish_reason = FinishReason.LENGTH
            self.processor.process_outputs([output])
            made.append(self.queue.get_nowait())
        return made


def told(made: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (choice.text, list(choice.token_ids), choice.finish_reason, choice.stop_reason)
        for output in made
        for choice in output.outputs
    ]


def grouped(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    groups = []
    while tokens:
        size = sizes[len(groups) % len(sizes)]
        groups.append(tokens[:size])
        tokens = tokens[size:]
    return groups


# Bytes of characters that are cut apart, words, and now and then the token that ends.
TOKENS = st.one_of(st.integers(131, 258), st.integers(259, 2047), st.sampled_from([LAST, 400]))


@given(
    st.lists(TOKENS, min_size=1, max_size=MOST),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.sampled_from([[], ["a"], ["e "], ["th", "er"], ["\ufffd"]]),
    st.data(),
)
@settings(max_examples=examples(150), deadline=None)
def test_what_is_made_again_is_what_was_made(
    tokenizer: Any, tokens: list[int], sizes: list[int], stop: list[str], data: st.DataObject
) -> None:
    from sluice.replica.vllm.client import repeat

    if LAST in tokens:
        tokens = tokens[: tokens.index(LAST) + 1]
    groups = grouped(tokens, sizes)
    whole = Output(tokenizer, stop)
    made = whole.feed(groups)
    cut = data.draw(st.integers(1, len(made)))
    sent = [token for group in groups[:cut] for token in group]
    resume = Resume(tuple(sent), tuple(len(group) for group in groups[:cut]), "r")
    rest = Output(tokenizer, stop)
    again = asyncio.run(repeat(rest.processor, rest.request, rest.queue, resume, 999))
    assert told(again) == told(made[:cut])
    assert rest.ended == (cut == len(made) and whole.ended)
    assert told(again + rest.feed(groups[cut:])) == told(made)
    assert rest.ended == whole.ended


def test_the_rest_of_a_request(tokenizer: Any) -> None:
    from sluice.replica.vllm.client import rest_of

    request = Output(tokenizer, []).request
    rest = rest_of(request, [5, 6, 7], prefill_only=False)
    assert rest.prompt_token_ids == [*PROMPT, 5, 6, 7]
    assert (rest.sampling_params.max_tokens, rest.sampling_params.min_tokens) == (MOST - 3, 0)
    assert request.prompt_token_ids == PROMPT
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (MOST, 2)
    apart = rest_of(request, [5, 6, 7], prefill_only=True)
    assert apart.prompt_token_ids == rest.prompt_token_ids
    assert apart.sampling_params.max_tokens == MOST, "one token, which nobody sees"


async def test_an_abort_while_outputs_are_made_again_is_the_last_output(tokenizer: Any) -> None:
    """It comes where others get their turn; whoever reads the queue then sees that it is over."""
    from sluice.replica.vllm.client import AT_ONCE, repeat

    output = Output(tokenizer, [])
    output.request.sampling_params.max_tokens = 4 * AT_ONCE
    tokens = 3 * AT_ONCE
    resume = Resume((400,) * tokens, (1,) * tokens, "r")
    repeating = asyncio.create_task(
        repeat(output.processor, output.request, output.queue, resume, 999)
    )
    await asyncio.sleep(0)
    assert not repeating.done()
    output.processor.abort_requests(["r"], internal=True)
    made = await repeating
    assert 0 < len(made) < tokens and not any(each.finished for each in made)
    last = output.queue.get_nowait()
    assert last is not None and last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert output.queue.get_nowait() is None


@pytest.mark.parametrize("fails_at", [0, 2])
def test_an_output_that_cannot_pass_fails_its_request_and_no_other(
    tokenizer: Any, fails_at: int
) -> None:
    """The processor serves all requests in one task, which ends with an exception."""
    passed: list[ResponseChunk] = []

    def forward(chunk: ResponseChunk) -> bool:
        if len(passed) == fails_at:
            raise RuntimeError("no way")
        passed.append(chunk)
        return True

    output = Output(tokenizer, [], call_of(forward=forward, template=(b"<", b">")))
    assert output.feed([[400], [401]][:fails_at]) == [None] * fails_at
    assert [chunk.tokens for chunk in passed] == [1] * fails_at
    from vllm.v1.engine import EngineCoreOutput

    output.processor.process_outputs([EngineCoreOutput("r", [402])])
    with pytest.raises(RuntimeError, match="no way"):
        output.queue.get_nowait()


def test_tokens_pass_where_the_client_waits_and_else_nothing_of_them_is_lost(
    tokenizer: Any,
) -> None:
    """The last output has its end, and those without room their text, in vLLM's queue."""
    passed: list[ResponseChunk] = []

    def forward(chunk: ResponseChunk) -> bool:
        if len(passed) == 2:
            return False
        passed.append(chunk)
        return True

    tokens = [[400], [401, 402], [403], [404, LAST]]
    whole = told(Output(tokenizer, []).feed(tokens))
    call = call_of(forward=forward, template=(b"<", b">"), resumable=True)
    made = Output(tokenizer, [], call).feed(tokens)
    assert made[:2] == [None, None]
    assert told(made[2:]) == whole[2:]
    assert [chunk.data for chunk in passed] == [b'<"%s">' % text.encode() for text, *_ in whole[:2]]
    assert [chunk.token_ids for chunk in passed] == [(400,), (401, 402)]
    assert (call.forwarded, call.output_tokens) == ([400, 401, 402], 3)


def test_an_abort_ends_a_request_whose_tokens_pass(tokenizer: Any) -> None:
    output = Output(tokenizer, [], call_of(forward=lambda _: True, template=(b"<", b">")))
    assert output.feed([[400]]) == [None]
    output.processor.abort_requests(["r"], internal=True)
    assert [reason for *_, reason, _ in told([output.queue.get_nowait()])] == ["abort"]


@given(st.lists(TOKENS, min_size=1, max_size=99), st.lists(TOKENS, min_size=1, max_size=MOST))
@settings(max_examples=examples(150), deadline=None)
def test_the_end_of_a_prompt_decides_how_its_output_is_written(
    tokenizer: Any, prompt: list[int], tokens: list[int]
) -> None:
    from sluice.replica.vllm.client import prime

    groups = grouped(tokens, [1])
    whole, primed = (Output(tokenizer, [], prompt=prompt) for _ in range(2))
    prime(primed.processor.request_states["r"].detokenizer, prompt)
    assert told(primed.feed(groups)) == told(whole.feed(groups))


END = 9


def test_the_parser_of_the_engine_says_with_which_tokens_reasoning_ends() -> None:
    vocabulary = {"<think>": 7, "</think>": END}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)
    for parser, ends in (("deepseek_r1", {END}), ("", set())):
        outputs = SimpleNamespace(reasoning_parser=parser)
        config = SimpleNamespace(structured_outputs_config=outputs)
        engine = SimpleNamespace(vllm_config=config, get_tokenizer=lambda: tokenizer)
        assert reasoning_ends(engine) == ends


def output_of(*token_ids: int) -> Any:
    """What an engine gives of one choice."""
    choice = SimpleNamespace(index=0, token_ids=token_ids)
    return SimpleNamespace(
        outputs=[choice],
        prompt_token_ids=(1,),
        num_cached_tokens=0,
        metrics=None,
        kv_transfer_params=None,
    )


def call_of(**own: Any) -> Any:
    from sluice.replica.vllm.client import ApiCall

    return ApiCall(0.0, **{"ends": frozenset({END}), **own})


@pytest.mark.parametrize("resumable", [False, True])
def test_a_chunk_says_with_which_of_its_tokens_reasoning_ended(resumable: bool) -> None:
    call, counted = call_of(resumable=resumable), dict[int, int]()
    chunks: list[ResponseChunk] = []
    # The second event has what two outputs of the engine made.
    for event in ([(1, 2)], [(3,), (4, END, 5)], [(END,)]):
        for token_ids in event:
            call.count(output_of(*token_ids), counted)
        chunks += call.chunks(b"event")
    assert [(chunk.tokens, chunk.reasoned) for chunk in chunks] == (
        [(2, 0), (1, 0), (3, 2), (1, 0)] if resumable else [(2, 0), (4, 3), (1, 0)]
    )


@pytest.mark.parametrize("resumable", [False, True])
def test_chunks_of_a_request_of_stages_have_the_times_of_their_tokens(
    resumable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a token that makes no event, as the one that ends the reasoning."""
    call, counted = call_of(resumable=resumable, staged=True), dict[int, int]()
    clock = Clock(0.0)
    monkeypatch.setattr("sluice.replica.vllm.client.time.monotonic", clock)
    for token_ids in ((1, 2), (END,), (3,)):
        clock.advance(0.5)
        call.count(output_of(*token_ids), counted)
    clock.advance(0.5)
    assert call.chunks(b"event") == [
        ResponseChunk(b"", 2, (1, 2) if resumable else (), 0, 0.5),
        ResponseChunk(b"", 1, (END,) if resumable else (), 1, 1.0),
        ResponseChunk(b"event", 1, (3,) if resumable else (), 0, 1.5),
    ]
    assert call.chunks(b"[DONE]") == [ResponseChunk(b"[DONE]")]


def test_a_plain_response_says_with_which_of_all_tokens() -> None:
    for ends, reasoned in ((frozenset({END}), 4), (frozenset(), 0)):
        call, counted = call_of(ends=ends), dict[int, int]()
        for token_ids in ((1, 2), (1, 2, 3), (1, 2, 3, END, 4, END)):
            call.count(output_of(*token_ids), counted, plain=True)
        assert (call.reasoned, call.output_tokens) == (reasoned, 6)
