"""A model that computes nothing, but knows which token belongs at each position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class KnownModel:
    """Runs batches as a worker does: it keeps the sampled tokens of requests to itself, so the
    next batch can be scheduled without them. ``token_at``: the token of a request, by its name, at
    a position."""

    def __init__(self, token_at: Callable[[str, int], int]) -> None:
        self._token_at = token_at
        self._length: dict[str, int] = {}

    def run(self, output: Any) -> Any:
        """What vLLM's model runner returns for its scheduler's ``output``."""
        from vllm.v1.outputs import ModelRunnerOutput

        for new in output.scheduled_new_reqs:
            self._length.setdefault(new.req_id, len(new.prompt_token_ids))
        sampled = []
        for request_id, start, tokens in self.parts(output):
            end = start + tokens
            length = self._length[request_id]
            assert end <= length, "scheduled past the tokens that exist"
            sampled.append([self._token_at(request_id, length)] if end == length else [])
            self._length[request_id] += end == length
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def parts(self, output: Any) -> list[tuple[str, int, int]]:
        """Of each request in a batch: its name, the tokens computed before, and those of it."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        tokens = output.num_scheduled_tokens
        return [(name, starts[name], count) for name, count in tokens.items()]

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._length.pop(request_id, None)
