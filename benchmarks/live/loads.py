"""What the loads of the live benchmarks share: simulated engines, classes, kinds of requests.

Client, cluster and engines share the machine, so these engines are slow: steps of tens of
milliseconds, which cost no processor time. The classes' objectives are longer in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from sluice.benchmarks.live.client import Json, prompt_text
from sluice.router.config import ServiceClass
from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Workload
from sluice.simulation.workloads.traces import TraceError

ENGINE: Final[dict[str, Any]] = {
    "step_s": 0.06,
    "token_s": 0.0005,
    "context_token_s": 1e-7,
    "kv_blocks": 4096,
    "block_tokens": 16,
    "max_model_tokens": 8192,
    "max_batch_tokens": 2048,
    "max_sequences": 64,
}
"""The simulated engine: about the steps of a model of 70B parameters on two older GPUs. None of it
was measured."""

LIGHT_ENGINE: Final[dict[str, Any]] = {
    **ENGINE,
    "step_s": 0.05,
    "token_s": 0.0004,
    "max_model_tokens": 4096,
    "max_batch_tokens": 1024,
    "max_sequences": 16,
}
"""An engine that few requests saturate: its steps are long compared with their delays."""

CLASSES: Final = {
    "interactive": ServiceClass(ttft_ms=2_000, tpot_ms=150, priority=4),
    "standard": ServiceClass(ttft_ms=6_000, tpot_ms=250, priority=2),
    "batch": ServiceClass(priority=1),
}
SHARES: Final = {"interactive": 0.5, "standard": 0.35, "batch": 0.15}
"""Share of each class in the requests, drawn independently of their lengths."""


def objectives(classes: Mapping[str, ServiceClass] = CLASSES) -> dict[str, SLO]:
    """The objective of each class, as a router reads it."""
    return {name: entry.objective(name) for name, entry in classes.items()}


def trace_files(folder: Path) -> list[Path]:
    """The traces of a folder by name.

    Raises:
        TraceError: there are none.
    """
    found = sorted(each for each in folder.iterdir() if each.suffix in (".csv", ".jsonl"))
    if not found:
        raise TraceError(f"{folder}: has no .csv or .jsonl file")
    return found


def fitting(workload: Workload, most: int) -> Workload:
    """``workload`` without the requests of more than ``most`` tokens."""
    every = workload.arrivals
    kept = tuple(each for each in every if each.prompt_tokens + each.output_tokens <= most)
    words = f"{workload.description} Left out {len(workload) - len(kept)} over {most} tokens."
    return replace(workload, arrivals=kept, description=words)


class Kind(NamedTuple):
    """A kind of request in a mixed load: its share relative to the other kinds', whether it is
    streamed, whether it is a chat, and further fields of its body."""

    name: str
    share: float
    streams: bool
    chat: bool
    fields: Json

    def body(self, model: str, number: int, arrival: Arrival) -> Json:
        """The request of an arrival; with ``ignore_eos`` a real engine generates all tokens."""
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
    Kind("log probabilities", 0.05, True, True, {"logprobs": True}),
    Kind("JSON mode", 0.05, True, True, {"response_format": {"type": "json_object"}}),
    Kind("tools", 0.05, True, True, {"tools": [_TOOL], "tool_choice": "auto"}),
)
