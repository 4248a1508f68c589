"""How long the steps of an engine on a GPU take: what its device needs for a batch, and for how
long the engine's loop is busy to launch it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sluice.scheduling.latency.model import LatencyModel
from sluice.simulation.engine import Launches


@dataclass(frozen=True, repr=False)
class GPULatency(LatencyModel):
    """The longer of reading the weights and of computing each token; then attention, and a price of
    each sequence that decodes. No family of profiles: planners know a step less well than this."""

    family = "gpu"
    source = "a roofline, with attention"
    names = ("weights_s", "compute_s", "token_s", "cross_s", "context_s", "sequence_s")

    weights_s: float
    compute_s: float
    token_s: float
    cross_s: float
    """Of a new token of a prefill and one before it."""
    context_s: float
    """Of a decode and one token before it."""
    sequence_s: float

    def _rows(self) -> Sequence[Sequence[float]]:
        weights, fixed, token, cross, context, sequence = self.coefficients
        attention = (cross / 2, cross, 0.0, 0.0)
        return [
            (weights, 0.0, *attention, sequence, context),
            (fixed, token, *attention, token + sequence, context),
        ]


class Device(NamedTuple):
    """The times of a device, and the launches of a loop that prepares a batch while one runs: a
    step takes the longer of both."""

    model: LatencyModel
    launches: Launches


H100 = Device(
    GPULatency(6.6e-3, 2.1e-3, 21.1e-6, 2.0e-9, 40.4e-9, 5.1e-6), Launches(2.2e-3, 7.6e-3, 20.1e-3)
)
"""Llama 3 8B on an H100 with 80 GB, vLLM 0.26; ``docs/results/gpu.md`` has how it was fitted."""
