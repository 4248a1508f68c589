"""Outputs that are made again in vLLM's output processor, against those of one that was left alone.
No engine: tokens are given."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.requests import Resume
from sluice.replica.vllm.local_model import local_model
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
    """One request in an output processor."""

    def __init__(self, tokenizer: Any, stop: list[str]) -> None:
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
            prompt_token_ids=PROMPT,
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

    @property
    def ended(self) -> bool:
        return not self.processor.has_request("r")

    def feed(self, groups: list[list[int]]) -> list[Any]:
        """What comes of these tokens, as an engine gives them."""
        from vllm.v1.engine import EngineCoreOutput

        from sluice.replica.vllm.client import _end_of

        made = []
        for group in groups:
            if self.ended:
                break
            reason, stop = None, None
            done = self.processor.request_states["r"].detokenizer.num_output_tokens()
            if group[-1] == LAST or done + len(group) == MOST:
                reason, stop = _end_of(
                    self.request, [0] * (done + len(group) - 1) + group[-1:], 999
                )
            self.processor.process_outputs(
                [EngineCoreOutput("r", list(group), finish_reason=reason, stop_reason=stop)]
            )
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
