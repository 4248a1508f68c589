"""Bounds the time that one request's grammar takes of an engine's steps.

vLLM advances grammars on the thread that runs the steps of all requests. With an ambiguous grammar
xgrammar's Earley parser keeps every possible parse, so the time per token grows with the text. A
call cannot be interrupted, but the next one can be avoided."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sluice.replica.grammar.backends import by_backend

BURST_S: Final = 0.25  # CPU time that a grammar may take beyond its share per token, seconds

TOKEN_S: Final = 0.01
"""CPU time that a grammar may take per token, on average, seconds. Usual ones take 0.0001 s."""

TOO_COSTLY: Final = "grammar-too-costly"
"""vLLM's ``stop_reason`` of a request that was stopped for its grammar's time."""


class BoundedGrammar(StructuredOutputGrammar):
    """A grammar that refuses every token after its limit of CPU time of the calling thread; vLLM
    then ends the request with an error. ``on_exceeded`` is called once, when that happens."""

    def __init__(
        self,
        grammar: StructuredOutputGrammar,
        on_exceeded: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._grammar = grammar
        self._on_exceeded = on_exceeded
        self._clock = clock
        self._left_s = BURST_S

    @property
    def too_costly(self) -> bool:
        """Whether its time limit is exceeded."""
        return self._left_s < 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance by ``tokens``; false if they are not allowed or the time limit is exceeded."""
        if self.too_costly:
            return False
        before_s = self._clock()
        accepted: bool = self._grammar.accept_tokens(request_id, tokens)
        self._spend(before_s, TOKEN_S * len(tokens) if accepted else 0.0)
        return accepted and not self.too_costly

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The allowed prefix of drafted tokens; none after the time limit is exceeded."""
        if self.too_costly:
            return []
        before_s = self._clock()
        allowed: list[int] = self._grammar.validate_tokens(tokens)
        self._spend(before_s)
        return allowed

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        self._grammar.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """The mask of the next token; past the limit the old one stays: the request ends."""
        if self.too_costly:
            return
        before_s = self._clock()
        self._grammar.fill_bitmask(bitmask, batch_index)
        self._spend(before_s)

    def is_terminated(self) -> bool:
        """Whether the text is complete."""
        ended: bool = self._grammar.is_terminated()
        return ended

    def reset(self) -> None:
        """Start from the first token again."""
        self._grammar.reset()

    def _spend(self, before_s: float, earned_s: float = 0.0) -> None:
        was_left_s = self._left_s
        self._left_s = min(BURST_S, was_left_s + earned_s) - (self._clock() - before_s)
        matcher = getattr(self._grammar, "ll_matcher", None)
        if matcher is not None and matcher.is_error():
            # guidance has given up, as at its own limits, and would let the text end here.
            self._left_s = -1.0
        if self.too_costly and was_left_s >= 0:
            self._on_exceeded()


def bound_grammars(manager: Any) -> None:
    """Have vLLM's ``StructuredOutputManager`` make bounded grammars only. A request that is stopped
    has ``TOO_COSTLY`` as its stop reason."""
    create = by_backend(manager)

    def bounded(request: Any) -> BoundedGrammar:
        # The request holds its grammar; a cycle would wait for the garbage collector.
        weak = weakref.ref(request)

        def on_exceeded() -> None:
            stopped = weak()
            if stopped is not None:
                stopped.stop_reason = TOO_COSTLY

        return BoundedGrammar(create(request), on_exceeded)

    manager._create_grammar = bounded
