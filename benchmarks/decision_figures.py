"""Times of decisions as they are reported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Figures = dict[str, float]
"""``p50_ms``, ``p99_ms``, ``per_second``."""


def figures(times_ns: Sequence[int], elapsed_s: float | None = None) -> Figures:
    """Median and 99th percentile, and the rate over ``elapsed_s`` seconds; by default, how many of
    them fit a second."""
    p50, p99 = np.quantile(np.array(times_ns) / 1e6, (0.5, 0.99))
    seconds = sum(times_ns) / 1e9 if elapsed_s is None else elapsed_s
    return {
        "p50_ms": round(float(p50), 4),
        "p99_ms": round(float(p99), 4),
        "per_second": round(len(times_ns) / seconds),
    }
