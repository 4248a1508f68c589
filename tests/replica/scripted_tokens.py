"""vLLM's engine writes what the prompt's script says, in place of the noise of a model without
training. The chat template marks its messages: ``\\x1e``, the role, ``\\x1f``, the text."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from tests.router.scripted_model import DONE, next_call


class Scripted(LogitsProcessor):
    """Forces each request's tokens."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self._rows,
            batch_update,
            lambda params, prompt, output: (self._answer(prompt or []), output),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (answer, output) in self._rows.items():
            token = answer[min(len(output), len(answer) - 1)]
            logits[row] = -inf
            logits[row, token] = 0.0
        return logits

    def _answer(self, prompt: list[int]) -> list[int]:
        asked: list[str] = []
        results: list[int] = []
        turns = self._tokenizer.decode(prompt).split("\x1e")[1:]
        for turn in turns:
            role, _, text = turn.partition("\x1f")
            if role == "tool":
                results = [each + 1 for each in results]
            elif role == "user":
                asked.append(text)
                results.append(0)
        has_tools = bool(turns) and turns[0].startswith("tools")
        call = next_call(asked, results) if has_tools else None
        text = DONE
        if call is not None:
            text = json.dumps({"name": call[0], "arguments": call[1]})
            text = f"<tool_call>\n{text}\n</tool_call>"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.eos_token_id]
