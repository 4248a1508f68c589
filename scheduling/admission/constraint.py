"""Which constraint kept a replica from guaranteeing a request its objective."""

from __future__ import annotations

import enum


class Constraint(enum.IntEnum):
    """The constraint that binds, as an admission policy records it in compiled code."""

    NONE = 0
    """The objective can be guaranteed."""
    TTFT = 1
    """Its first token would be late."""
    TPOT = 2
    """The decodes could not all be held at their pace."""
    GUARANTEES = 3
    """Requests that are guaranteed already would be late."""
    KV_MEMORY = 4
    """There are too few KV blocks."""
    SEQUENCES = 5
    """The engine runs as many sequences as it may."""
    PREFILL_BUDGET = 6
    """The prompt exceeds the prefill admission budget."""
    WORTHIER = 7
    """No capacity would be left for requests of more worth that are expected and due before."""
