"""The classes and the kinds of requests of loads under which something breaks."""

from __future__ import annotations

from typing import Final, NamedTuple

from sluice.benchmarks.live.client import Json, prompt_text
from sluice.router.config import ServiceClass
from sluice.simulation.workload import Arrival

CLASSES: Final = {
    "interactive": ServiceClass(ttft_ms=2_000, tpot_ms=150, priority=4),
    "standard": ServiceClass(ttft_ms=6_000, tpot_ms=250, priority=2),
    "batch": ServiceClass(priority=1),
}
SHARES: Final = {"interactive": 0.5, "standard": 0.35, "batch": 0.15}
"""Share of each class in the requests, drawn independently of their lengths."""


class Kind(NamedTuple):
    """A kind of request in a mixed load: its relative share, and its body."""

    name: str
    share: float
    streams: bool
    chat: bool
    fields: Json

    def body(self, model: str, number: int, arrival: Arrival) -> Json:
        text = prompt_text(number, arrival.prompt_tokens)
        prompt = (
            {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        )
        asked = {
            "model": model,
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **prompt,
            **self.fields,
        }
        if self.streams:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked


_WORD = {"type": "object", "properties": {"word": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": _WORD}}

KINDS: Final = (
    Kind("completion stream", 0.35, True, False, {}),
    Kind("chat stream", 0.25, True, True, {}),
    Kind("plain completion", 0.1, False, False, {}),
    Kind("plain chat", 0.1, False, True, {}),
    Kind("two choices", 0.05, True, False, {"n": 2}),
    Kind("sampled", 0.1, True, True, {"temperature": 0.8, "top_p": 0.9, "seed": 1}),
    Kind("tools", 0.05, True, True, {"tools": [_TOOL], "tool_choice": "auto"}),
)
