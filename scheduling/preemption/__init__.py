"""Which prefill runs, and which one gives way, where a running prefill can be suspended."""

from sluice.scheduling.preemption.aged_share import AgedShare
from sluice.scheduling.preemption.decode_turns import DecodeTurns, decode_step_due_s
from sluice.scheduling.preemption.s_edf import (
    BATCH_TOKENS,
    CHUNK_TOKENS,
    DEPTH,
    LEAST_TOKENS,
    SMALL_CHUNK_TOKENS,
    Batch,
    InFlight,
    Options,
    Prefill,
    decide,
)

__all__ = [
    "BATCH_TOKENS",
    "CHUNK_TOKENS",
    "DEPTH",
    "LEAST_TOKENS",
    "SMALL_CHUNK_TOKENS",
    "AgedShare",
    "Batch",
    "DecodeTurns",
    "InFlight",
    "Options",
    "Prefill",
    "decide",
    "decode_step_due_s",
]
