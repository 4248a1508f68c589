"""What a scheduling policy may know: one request, and the queue of one replica.

Both are immutable. They hold no prompt text, no tokens and no output length: a policy that needs a
length must predict it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduling.objective import SLO, Anchor


class RequestView(NamedTuple):
    """One live request of a replica, as of one instant. A tuple, because one is made per request
    and step in the engine's scheduling loop.

    Attributes:
        request_id: unique in the queue.
        slo: its objective.
        arrival_s: when the edge received it, on the caller's monotonic clock.
        prompt_tokens: length of the prompt, tokens.
        computed_tokens: tokens whose KV is computed; can pass ``prompt_tokens`` in decode.
        pending_tokens: tokens that could be scheduled now, >= 1: what is left of the prefill
            (after a preemption this covers the generated tokens too), or 1 in decode.
        emitted_tokens: output tokens that have left the engine, or are being computed.
        first_token_s: when the first token left, or ``None``.
        kv_blocks: KV blocks it holds.
        running: it holds KV blocks and a place among the engine's running sequences.
    """

    request_id: str
    slo: SLO
    arrival_s: float
    prompt_tokens: int
    computed_tokens: int
    pending_tokens: int
    emitted_tokens: int = 0
    first_token_s: float | None = None
    kv_blocks: int = 0
    running: bool = False

    @property
    def is_prefill(self) -> bool:
        """Whether the next token needs more than one decode step's work: the request has no output
        yet, or lost its KV and must recompute."""
        return self.emitted_tokens == 0 or self.pending_tokens > 1

    def next_deadline_s(self, anchor: Anchor) -> float:
        """Deadline of the next token to be emitted."""
        return self.slo.deadline_s(
            self.emitted_tokens + 1, self.arrival_s, self.first_token_s, anchor
        )


class QueueView(NamedTuple):
    """Every live request of one replica, waiting and running, in order of arrival at the engine."""

    requests: Sequence[RequestView]
