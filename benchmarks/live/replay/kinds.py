"""The kinds of requests in a mixed load: their options and endpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

from sluice.benchmarks.live.replay.client import prompt_text
from sluice.simulation.workload import Arrival

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


class Kind(NamedTuple):
    """One kind.

    Attributes:
        name: in reports.
        share: of a mixed load's requests, relative to the other kinds'.
        streams: whether its answer is streamed.
        chat: whether it is a chat.
        fields: further fields of its body.
        resumes: whether another replica can resume its stream with a real engine.
    """

    name: str
    share: float
    streams: bool
    chat: bool
    fields: dict[str, Any]
    resumes: bool

    def body(self, model: str, number: int, arrival: Arrival) -> dict[str, Any]:
        """The request of an arrival; with ``ignore_eos`` a real engine generates all tokens."""
        text = prompt_text(number, arrival.prompt_tokens)
        asked: dict[str, Any] = {
            "model": model,
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({"messages": [{"role": "user", "content": text}]} if self.chat else {}),
            **({} if self.chat else {"prompt": text}),
            **self.fields,
        }
        if self.streams:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked


KINDS: tuple[Kind, ...] = (
    Kind("completion stream", 0.35, True, False, {}, True),
    Kind("chat stream", 0.25, True, True, {}, True),
    Kind("plain completion", 0.1, False, False, {}, False),
    Kind("plain chat", 0.1, False, True, {}, False),
    Kind("two choices", 0.05, True, False, {"n": 2}, False),
    Kind("log probabilities", 0.05, True, True, {"logprobs": True}, False),
    Kind("JSON mode", 0.05, True, True, {"response_format": {"type": "json_object"}}, False),
    Kind("tools", 0.05, True, True, {"tools": [_TOOL], "tool_choice": "auto"}, True),
)
