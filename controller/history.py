"""What the edge counted in the last minutes, by service class: for an operator who has just come.

The routers push totals; a ring of them, one every few seconds, makes any recent span of them a
difference. Prometheus does this better for longer; here nothing else has to run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from controller.messages import MetricSample

PERIOD_S = 10.0
"""Between two entries of the ring, seconds."""

WINDOW_S = 300.0
"""The span that is shown, seconds."""

MAX_CLASSES = 64
"""Most classes; the configuration allows 16 per model."""

_TTFT = "sluice_ttft_seconds"
_TTFT_BUCKET = f"{_TTFT}_bucket"

# Sample -> the label whose value says which field it counts for, and the fields by that value;
# with no label, the field.
_FIELDS: dict[str, tuple[str, dict[str, str]]] = {
    "sluice_slo_requests_total": ("", {"": "stated"}),
    "sluice_attained_total": ("", {"": "attained"}),
    "sluice_tdg_gain_total": ("", {"": "gain"}),
    "sluice_tdg_ideal_total": ("", {"": "ideal"}),
    "sluice_requests_total": (
        "outcome",
        {name: name for name in ("ok", "client_error", "refused", "failed", "cancelled")},
    ),
    "sluice_admissions_total": (
        "admission",
        {"guaranteed": "guaranteed", "best-effort": "best_effort"},
    ),
    "sluice_promises_total": ("outcome", {"kept": "kept", "missed": "missed"}),
}
_NAMES = [field for _, fields in _FIELDS.values() for field in fields.values()]
_PLACE = {name: place for place, name in enumerate(_NAMES)}
_FAMILIES = sorted({name.removesuffix("_total") for name in _FIELDS} | {_TTFT})

Labels = tuple[tuple[str, str], ...]
Totals = dict[str, NDArray[np.float64]]
"""Of each class: the fields, then the buckets of TTFT, cumulative, by bound."""


class TotalsSource(Protocol):
    """Where the sums over all processes are: the metrics hub."""

    def series(self, family: str) -> Iterable[tuple[str, Labels, float]]:
        """Sample, labels and value of every series of a family; none for an unknown one."""


class _Entry(NamedTuple):
    at_s: float
    totals: Totals


class History:
    """The last minutes of what routers have counted.

    What a process had counted before it was first heard of is none of it, or a controller that
    has restarted would take the past of its routers for the last minutes.

    Args:
        period_s, window_s: see the module.
    """

    def __init__(self, period_s: float = PERIOD_S, window_s: float = WINDOW_S) -> None:
        self._period_s = period_s
        self._window_s = window_s
        self._ring: deque[_Entry] = deque(maxlen=round(window_s / period_s) + 1)
        self._bounds: tuple[float, ...] = ()
        self._before: Totals = {}

    def joined(self, samples: Iterable[MetricSample]) -> None:
        """The first push of a process: all that it has counted until now was before."""
        for name, row in self._totals((s.name, s.labels, s.value) for s in samples).items():
            known = self._before.get(name)
            self._before[name] = row if known is None else known + row

    def note(self, source: TotalsSource, now_s: float) -> None:
        """Make an entry of the ring where it is time for one. ``O(series)`` then, else ``O(1)``."""
        if not self._ring or now_s - self._ring[-1].at_s >= self._period_s:
            self._ring.append(self._entry(source, now_s))

    def recent(self, source: TotalsSource, now_s: float) -> dict[str, Any]:
        """The last minutes up to now, as plain data: ``window_ms``, ``period_ms`` and
        ``classes``."""
        entries = [e for e in self._ring if now_s - e.at_s <= self._window_s]
        entries.append(self._entry(source, now_s))
        first, last = entries[0], entries[-1]
        return {
            "window_ms": round((last.at_s - first.at_s) * 1000, 3),
            "period_ms": self._period_s * 1000,
            "classes": [self._told(name, entries) for name in sorted(last.totals)],
        }

    def objectives(self, source: TotalsSource) -> tuple[float, float]:
        """Requests with an objective that ended since the controller began, and those of them that
        met it, over all classes. ``O(series)``."""
        totals = self._entry(source, 0.0).totals.values()
        stated, attained = _PLACE["stated"], _PLACE["attained"]
        return sum(float(t[stated]) for t in totals), sum(float(t[attained]) for t in totals)

    def _entry(self, source: TotalsSource, now_s: float) -> _Entry:
        found = self._totals(row for family in _FAMILIES for row in source.series(family))
        for name, before in self._before.items():
            if name in found:
                found[name] = np.maximum(found[name] - before, 0.0)
        return _Entry(now_s, found)

    def _totals(self, rows: Iterable[tuple[str, Labels, float]]) -> Totals:
        fields: dict[str, NDArray[np.float64]] = {}
        buckets: list[tuple[str, float, float]] = []
        for sample, labels, value in rows:
            if sample != _TTFT_BUCKET and sample not in _FIELDS:
                continue
            by_label = dict(labels)
            name = by_label.get("class", "")
            if name not in fields and len(fields) >= MAX_CLASSES:
                continue
            row = fields.setdefault(name, np.zeros(len(_NAMES)))
            if sample == _TTFT_BUCKET:
                buckets.append((name, float(by_label["le"]), value))
                continue
            label, places = _FIELDS[sample]
            field = places.get(by_label.get(label, ""))
            if field is not None:
                row[_PLACE[field]] += value
        self._learn_bounds({bound for _, bound, _ in buckets})
        place = {bound: len(_NAMES) + index for index, bound in enumerate(self._bounds)}
        room = np.zeros(len(self._bounds))
        totals = {name: np.concatenate((row, room)) for name, row in fields.items()}
        for name, bound, value in buckets:
            totals[name][place[bound]] += value
        return totals

    def _learn_bounds(self, found: set[float]) -> None:
        """The histogram's bounds are the same in all processes of a version; where there are other
        ones, what was kept with the old ones is of no use. Until a first token there are none."""
        if found <= set(self._bounds):
            return
        if self._bounds:
            self._ring.clear()
            self._before.clear()
        self._bounds = tuple(sorted(found | set(self._bounds)))
        room = np.zeros(len(self._bounds))
        for totals in (self._before, *(entry.totals for entry in self._ring)):
            for name, row in totals.items():
                totals[name] = np.concatenate((row, room))

    def _told(self, name: str, entries: list[_Entry]) -> dict[str, Any]:
        none = np.zeros(len(_NAMES) + len(self._bounds))
        rows = [entry.totals.get(name, none) for entry in entries]
        gone = rows[-1] - rows[0]
        count = {field: float(gone[place]) for field, place in _PLACE.items()}
        span_s = entries[-1].at_s - entries[0].at_s
        ended = sum(count[f] for f in ("ok", "client_error", "refused", "failed", "cancelled"))
        return {
            "class": name,
            "requests": ended,
            "requests_per_s": ended / span_s if span_s > 0 else None,
            "attainment": _share(count["attained"], count["stated"]),
            "tdg": _share(count["gain"], count["ideal"]),
            "stated": count["stated"],
            "promises_kept": _share(count["kept"], count["kept"] + count["missed"]),
            "outcomes": {
                f: count[f] for f in ("ok", "client_error", "refused", "failed", "cancelled")
            },
            "admission": {f: count[f] for f in ("guaranteed", "best_effort", "refused")},
            "ttft_ms": {
                "p50": _quantile_ms(self._bounds, gone[len(_NAMES) :], 0.5),
                "p95": _quantile_ms(self._bounds, gone[len(_NAMES) :], 0.95),
            },
            "trend": list(_trend(rows)),
        }


def _trend(rows: list[NDArray[np.float64]]) -> Iterator[float | None]:
    """The attainment between each two entries."""
    attained, stated = _PLACE["attained"], _PLACE["stated"]
    for before, after in pairwise(rows):
        yield _share(after[attained] - before[attained], after[stated] - before[stated])


def _share(part: float, whole: float) -> float | None:
    return round(float(part / whole), 4) if whole > 0 else None


def _quantile_ms(
    bounds: tuple[float, ...], counts: NDArray[np.float64], share: float
) -> float | None:
    """A quantile of a histogram, linear within a bucket; of the last, endless one its beginning.
    ``counts`` are cumulative."""
    if not len(counts) or counts[-1] <= 0:
        return None
    wanted = share * counts[-1]
    place = int(np.searchsorted(counts, wanted))
    below = bounds[place - 1] if place else 0.0
    if bounds[place] == inf:
        return below * 1000
    before = counts[place - 1] if place else 0.0
    inside = (wanted - before) / (counts[place] - before)
    return round(float(below + inside * (bounds[place] - below)) * 1000, 3)
