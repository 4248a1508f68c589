"""A latency profile for engines in tests, which then need not measure at their start."""

from __future__ import annotations

from pathlib import Path

from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile

_SMALL = LinearLatency(a=0.004, b=0.0001, c=0.000001)
"""About that of the small local models on one core."""


def known_profile(directory: Path, model: LinearLatency = _SMALL) -> Path:
    """A file in ``directory`` for ``latency_profile`` of an engine's configuration."""
    path = directory / "profile.json"
    path.write_text(LatencyProfile.of("test", model).to_json(), encoding="utf-8")
    return path
