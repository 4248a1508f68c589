"""Whether what a process holds grows over a soak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

APPLICATION: Final = "application"
"""In place of a kind of process: the application's own figures."""

JUDGED: Final = ("routers", "replicas", "controller", "HAProxy", "Serve", APPLICATION)
"""Kinds of processes whose growth counts. Ray's own processes and the client are only shown."""

LEAST_S: Final = 300.0
"""Minimum time to judge growth, seconds: before, caches fill and allocators settle."""

_ALLOWED: Final[dict[str, tuple[float, float]]] = {
    "memory MiB": (8.0, 0.04),
    "objects": (20_000.0, 0.03),
    "handles": (20.0, 0.15),
    "threads": (5.0, 0.1),
    "tasks": (30.0, 0.15),
}
"""Number and share by which a series may grow. Connections outlive their requests, so handles
follow the load with noise."""

_ALLOWED_OF_GAUGES = (20.0, 0.25)

_LOAD: Final = "sluice_in_flight_requests"
_BACKLOG: Final = (
    _LOAD,
    "sluice_held_body_bytes",
    "sluice_line_requests",
    "sluice_replica_live_requests",
    "sluice_replica_waiting_requests",
    "sluice_replica_running_requests",
    "sluice_batches_running",
    "sluice_batch_lines_in_flight",
    "used KV blocks",
)
"""Running requests and what they hold: these follow the load. Leaks show at the end, when no
request is running."""


class Series(NamedTuple):
    """Key of a series: kind of process, the process, and the figure."""

    kind: str
    who: str
    what: str


class Sample(NamedTuple):
    """One sample. ``values`` lacks figures that were unavailable."""

    at_s: float
    values: dict[Series, float]


class Trend(NamedTuple):
    """The trend of a series.

    Attributes:
        first, last: medians of the first and the last quarter of its samples, at the mean load.
        slope: of a straight line through all, per hour; error: its standard error.
        grows: whether its increase exceeds the limit, and it rises steadily.
    """

    series: Series
    first: float
    last: float
    slope: float
    error: float
    grows: bool


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """The trend of every series that is in at least half of the samples, and in at least four."""
    found = []
    loaded = _with_load(samples)
    for series in sorted({series for sample in samples for series in sample.values}):
        points = [
            (each.at_s, each.values[series], *requests)
            for each, requests in loaded
            if series in each.values
        ]
        if len(points) >= max(4, len(samples) / 2):
            found.append(trend(series, np.array(points)))
    return found


def _with_load(samples: Sequence[Sample]) -> list[tuple[Sample, tuple[float, float]]]:
    """Each sample with the number of running requests, and its maximum so far. Where the number was
    unavailable, the last one applies."""
    under_way = Series(APPLICATION, "", _LOAD)
    found, now, most = [], 0.0, 0.0
    for sample in samples:
        now = sample.values.get(under_way, now)
        most = max(most, now)
        found.append((sample, (now, most)))
    return found


def trend(series: Series, points: np.ndarray) -> Trend:
    """The trend of a series, corrected for the load: the effect of running requests is removed by
    least squares of the values over time and these requests together. For memory the regressor is
    their maximum so far, as allocators keep what they once needed.

    It grows where the median of its last quarter exceeds that of its first by more than the limit
    of its kind (a number and a share), both corrected and uncorrected, and its slope is more than
    twice its standard error.
    Event counters (``_total``) are not judged, nor are figures of running requests.

    Args:
        points: ``[samples, 4]``: seconds, values, running requests, and their maximum so far; four
            samples or more.
    """
    hours, values = points[:, 0] / 3600, points[:, 1]
    load = points[:, 3] if series.what == "memory MiB" else points[:, 2]
    columns = [np.ones_like(hours), hours - hours.mean()]
    if series.kind != APPLICATION and np.ptp(load):
        columns.append(load - load.mean())
    facts = np.column_stack(columns)
    fitted = np.linalg.lstsq(facts, values, rcond=None)[0]
    rest = values - facts @ fitted
    slope = float(fitted[1])
    freedom = len(values) - facts.shape[1]
    error = 0.0
    if freedom > 0:
        spread = np.linalg.pinv(facts.T @ facts)[1, 1]
        error = float(np.sqrt(rest @ rest / freedom * spread))
    alike = values - facts[:, 2:] @ fitted[2:]
    first, last = _ends(alike)
    first_as_is, last_as_is = _ends(values)
    number, share = _ALLOWED.get(series.what, _ALLOWED_OF_GAUGES)
    grows = (
        series.kind in JUDGED
        and not series.what.endswith("_total")
        and series.what not in _BACKLOG
        and hours[-1] - hours[0] >= LEAST_S / 3600
        and min(last - first, last_as_is - first_as_is) > max(number, share * first)
        and slope > 2 * error
    )
    return Trend(series, first, last, slope, error, bool(grows))


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Medians of the first and the last quarter."""
    quarter = max(1, len(values) // 4)
    return float(np.median(values[:quarter])), float(np.median(values[-quarter:]))
