"""Pushes of metrics, each newer than the one before."""

from __future__ import annotations

from itertools import count

from sluice.protocol.messages import MetricSample, MetricsPush

_numbers = count(1)


def newer_push(
    source: str, samples: tuple[MetricSample, ...] = (), incarnation: int = 1
) -> MetricsPush:
    """The next push of an incarnation of ``source``."""
    return MetricsPush(source, incarnation, next(_numbers), samples)
