"""Whether what a process holds grows over a soak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

APPLICATION: Final = "application"
"""In place of a kind of process: what the application says of itself."""

JUDGED: Final = ("routers", "replicas", "controller", "HAProxy", "Serve", APPLICATION)
"""Whose growth counts. That of Ray's own processes and of the client is shown."""

LEAST_S: Final = 300.0
"""A shorter time says nothing of growth, seconds: caches fill and allocators settle."""

_ALLOWED: Final[dict[str, tuple[float, float]]] = {
    "memory MiB": (8.0, 0.04),
    "objects": (20_000.0, 0.03),
    "handles": (10.0, 0.1),
    "threads": (5.0, 0.1),
    "tasks": (30.0, 0.15),
}
_ALLOWED_OF_GAUGES = (20.0, 0.25)


class Series(NamedTuple):
    """What was looked at: of which kind of process, of which one, and what of it."""

    kind: str
    who: str
    what: str


class Sample(NamedTuple):
    """One look. ``values`` lacks what could not be had."""

    at_s: float
    values: dict[Series, float]


class Trend(NamedTuple):
    """How a series went.

    Attributes:
        first, last: medians of the first and the last quarter of its samples.
        slope: of a straight line through all, per hour; error: its standard error.
        grows: whether it is more in the end than the rule allows, and rises steadily.
    """

    series: Series
    first: float
    last: float
    slope: float
    error: float
    grows: bool


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Of every series that is there in at least half of the samples, and in four."""
    found = []
    for series in sorted({series for sample in samples for series in sample.values}):
        points = [(each.at_s, each.values[series]) for each in samples if series in each.values]
        if len(points) >= max(4, len(samples) / 2):
            found.append(trend(series, np.array(points)))
    return found


def trend(series: Series, points: np.ndarray) -> Trend:
    """How a series went. It grows where the median of its last quarter is more than that of its
    first by more than is allowed of its kind (a number and a share), and its slope is more than
    twice its standard error. What counts events (``_total``) is not judged.

    Args:
        points: ``[samples, 2]``, seconds and values, four samples or more.
    """
    hours, values = points[:, 0] / 3600, points[:, 1]
    quarter = max(1, len(values) // 4)
    first, last = float(np.median(values[:quarter])), float(np.median(values[-quarter:]))
    centred = hours - hours.mean()
    spread = float(centred @ centred)
    slope = float(centred @ values) / spread if spread else 0.0
    rest = values - values.mean() - slope * centred
    error = float(np.sqrt(rest @ rest / (len(values) - 2) / spread)) if spread else 0.0
    number, share = _ALLOWED.get(series.what, _ALLOWED_OF_GAUGES)
    grows = (
        series.kind in JUDGED
        and not series.what.endswith("_total")
        and hours[-1] - hours[0] >= LEAST_S / 3600
        and last - first > max(number, share * first)
        and slope > 2 * error
    )
    return Trend(series, first, last, slope, error, bool(grows))
