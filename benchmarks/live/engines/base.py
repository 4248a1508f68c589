"""One vLLM engine in this process, which runs one request after the other or many together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple


class Work(NamedTuple):
    """One request.

    Attributes:
        name: unique among the live ones.
        prompt: its tokens.
        output: how many tokens it generates.
        ttft_s: its objective, seconds.
        best_effort: whether it has no guarantee.
        tpot_s: the other objective, seconds; None for none.
    """

    name: str
    prompt: Sequence[int]
    output: int
    ttft_s: float
    best_effort: bool = False
    tpot_s: float | None = None


class Result(NamedTuple):
    """The output of a request.

    Attributes:
        tokens: greedy tokens.
        logprobs: of each token.
        ttft_s: from its arrival to its first token, seconds.
        reason: finish reason.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    reason: str | None


def result_of(output: Any, ttft_s: float) -> Result:
    """The result in vLLM's ``output`` of a request."""
    return Result(
        tuple(output.token_ids),
        tuple(next(iter(each.values())).logprob for each in output.logprobs or ()),
        ttft_s,
        output.finish_reason,
    )


class OneEngine:
    """Base class of engines in this process. Its subclasses make ``_llm``, vLLM's ``LLM``."""

    _llm: Any

    def __init__(self) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS="1",
            VLLM_NO_USAGE_STATS="1",
        )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._arrived_s: dict[str, float] = {}
        self._first_s: dict[str, float] = {}

    def add(self, work: Work, arrived_s: float | None = None) -> None:
        """A request arrives now, or arrived some time ago; on the engine's thread."""
        raise NotImplementedError

    def run(self) -> dict[str, Result]:
        """Run until no request is left."""
        raise NotImplementedError

    def alone(self, work: Work) -> Result:
        """The result of a request that runs alone, from an empty prefix cache."""
        self.reset()
        self.add(work)
        return self.run()[work.name]

    def reset(self) -> None:
        """Empty the prefix cache; nothing may be live.

        Raises:
            RuntimeError: blocks are in use.
        """
        if not self._llm.llm_engine.reset_prefix_cache():
            raise RuntimeError("KV blocks are in use, though nothing is live")

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
