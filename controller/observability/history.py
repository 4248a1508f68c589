"""The routers' request counts of the last minutes, in total and by service class.

Routers push cumulative totals; a ring keeps a snapshot every few seconds, and a time span is the
difference of two."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from math import inf
from typing import Any, NamedTuple

from sluice.controller.observability.metrics_hub import MetricsHub, Values
from sluice.scheduling.request.lateness import Cause

PERIOD_S = 10.0
"""Time between two entries of the ring, seconds."""

WINDOW_S = 300.0
"""The span that is shown, seconds."""

MAX_CLASSES = 64
"""Most classes; the configuration allows 16 per model."""

_OUTCOMES = ("ok", "client_error", "refused", "failed", "cancelled")
_TOKENS = ("prompt", "cached", "generated")
_TIMES = ("ttft", "tpot", "e2e")

# Sample -> the label that selects the field, and the field by the label's value; without a label,
# the field.
_FIELDS: dict[str, tuple[str, dict[str, str]]] = {
    "sluice_slo_requests_total": ("", {"": "stated"}),
    "sluice_attained_total": ("", {"": "attained"}),
    "sluice_tdg_gain_total": ("tokens", {"first": "first_gain", "later": "gain"}),
    "sluice_tdg_ideal_total": ("tokens", {"first": "first_ideal", "later": "ideal"}),
    "sluice_requests_total": ("outcome", {name: name for name in _OUTCOMES}),
    "sluice_admissions_total": (
        "admission",
        {"guaranteed": "guaranteed", "best-effort": "best_effort"},
    ),
    "sluice_promises_total": ("outcome", {"kept": "kept", "missed": "missed"}),
    "sluice_promises_missed_total": ("cause", {cause: f"missed: {cause}" for cause in Cause}),
    "sluice_tokens_total": ("type", {name: name for name in _TOKENS}),
}
_BUCKETS = {f"sluice_{name}_seconds_bucket": name for name in _TIMES}
_FAMILIES = sorted(
    {name.removesuffix("_total") for name in _FIELDS}
    | {name.removesuffix("_bucket") for name in _BUCKETS}
)

Labels = tuple[tuple[str, str], ...]
Key = str | tuple[str, float]
"""A field, or a time's name with the upper bound of a bucket, seconds."""

Counts = Counter[Key]
_NONE: Counts = Counter()

_SERIES = (
    "requests_per_s",
    "prompt_tokens_per_s",
    "generated_tokens_per_s",
    *(f"{time}_{quantile}_ms" for time in _TIMES for quantile in ("p50", "p95")),
)


class _Entry(NamedTuple):
    """The totals at a time. ``point`` and ``attainment`` cover the time since the previous
    entry; computed once, because the controller's decisions wait for every reader."""

    at_s: float
    totals: dict[str, Counts]
    point: dict[str, float | None]
    attainment: dict[str, float | None]


class History:
    """The routers' counts of the last minutes, without counts from before a process's first
    push: a restarted controller would attribute those to the last minutes."""

    def __init__(self, period_s: float = PERIOD_S, window_s: float = WINDOW_S) -> None:
        self._period_s = period_s
        self._window_s = window_s
        self._ring: deque[_Entry] = deque(maxlen=round(window_s / period_s) + 1)
        self._before: dict[str, Counts] = {}

    def joined(self, added: Values) -> None:
        """What the first push of a process added to the sums: its counts so far are excluded."""
        rows = ((name, labels, value) for (name, labels), (_, value) in added.items())
        for name, counts in _totals(rows).items():
            self._before.setdefault(name, Counter()).update(counts)

    def note(self, source: MetricsHub, now_s: float) -> None:
        """Add an entry to the ring if one is due: ``O(series)``, otherwise ``O(1)``."""
        last = self._ring[-1] if self._ring else None
        if last is None or now_s - last.at_s >= self._period_s:
            self._ring.append(_entry(self._counted(source), now_s, last))

    def recent(self, source: MetricsHub, now_s: float) -> dict[str, Any]:
        """The last minutes up to now, as plain data: ``window_ms``, ``period_ms``, ``series`` (of
        all classes together) and ``classes``. ``O(series)``."""
        entries = [e for e in self._ring if now_s - e.at_s <= self._window_s]
        # A last period that has just begun would be dominated by noise.
        if len(entries) > 1 and now_s - entries[-1].at_s < self._period_s / 2:
            del entries[-1]
        entries.append(_entry(self._counted(source), now_s, entries[-1] if entries else None))
        points = [entry.point for entry in entries[1:]]
        return {
            "window_ms": round((now_s - entries[0].at_s) * 1000, 3),
            "period_ms": self._period_s * 1000,
            "series": {name: [point[name] for point in points] for name in _SERIES},
            "classes": [_class(name, entries) for name in sorted(entries[-1].totals)],
        }

    def objectives(self, source: MetricsHub) -> tuple[float, float]:
        """Requests with an objective that ended since the controller began, and those of them that
        met it, over all classes. ``O(series)``."""
        totals = self._counted(source).values()
        return sum(t["stated"] for t in totals), sum(t["attained"] for t in totals)

    def _counted(self, source: MetricsHub) -> dict[str, Counts]:
        """The counts by class since this history began."""
        found = _totals(row for family in _FAMILIES for row in source.series(family))
        for name, before in self._before.items():
            if name in found:
                found[name] = _less(found[name], before)
        return found


def _entry(totals: dict[str, Counts], now_s: float, last: _Entry | None) -> _Entry:
    before = {} if last is None else last.totals
    steps = {name: _less(counts, before.get(name, _NONE)) for name, counts in totals.items()}
    attainment = {name: _share(each["attained"], each["stated"]) for name, each in steps.items()}
    overall: Counts = Counter()
    for step in steps.values():
        overall.update(step)
    span_s = 0.0 if last is None else now_s - last.at_s
    return _Entry(now_s, totals, _point(overall, span_s), attainment)


def _point(count: Counts, span_s: float) -> dict[str, float | None]:
    """The values of :data:`_SERIES`: rates, and quantiles over the requests that ended; ``None``
    where there were none."""
    rates = (_ended(count), count["prompt"], count["generated"])
    values = [round(each / span_s, 4) if span_s > 0 else None for each in rates]
    for time in _TIMES:
        values += _quantiles(count, time).values()
    return dict(zip(_SERIES, values, strict=True))


def _totals(rows: Iterable[tuple[str, Labels, float]]) -> dict[str, Counts]:
    """The counts of each class."""
    totals: dict[str, Counts] = {}
    for sample, labels, value in rows:
        by_label = dict(labels)
        name, key = by_label.get("class", ""), _key(sample, by_label)
        if key is not None and (name in totals or len(totals) < MAX_CLASSES):
            totals.setdefault(name, Counter())[key] += value  # type: ignore[assignment]
    return totals


def _key(sample: str, labels: dict[str, str]) -> Key | None:
    if sample in _BUCKETS:
        return _BUCKETS[sample], float(labels["le"])
    label, fields = _FIELDS.get(sample, ("", {}))
    return fields.get(labels.get(label, ""))


def _class(name: str, entries: list[_Entry]) -> dict[str, Any]:
    count = _less(entries[-1].totals[name], entries[0].totals.get(name, _NONE))
    span_s = entries[-1].at_s - entries[0].at_s
    ended = _ended(count)
    admission = {field: count[field] for field in ("guaranteed", "best_effort", "refused")}
    asked = sum(admission.values())
    return {
        "class": name,
        "requests": ended,
        "asked": asked,
        "asked_per_s": asked / span_s if span_s > 0 else None,
        "attainment": _share(count["attained"], count["stated"]),
        "tdg": _share(_gain(count, "gain"), _gain(count, "ideal")),
        "stated": count["stated"],
        "promises": {field: count[field] for field in ("kept", "missed")},
        "causes": {cause: n for cause in Cause if (n := count[f"missed: {cause}"])},
        "outcomes": {field: count[field] for field in _OUTCOMES},
        "admission": admission,
        "tokens": {field: count[field] for field in _TOKENS},
        **{f"{time}_ms": _quantiles(count, time) for time in _TIMES},
        "trend": [entry.attainment.get(name) for entry in entries[1:]],
    }


def _gain(count: Counts, kind: str) -> float:
    """ProServe's weights: a first token is worth the mean input, a later one the mean output."""
    return count["prompt"] * count[f"first_{kind}"] + count["generated"] * count[kind]


def _less(after: Counts, before: Counts) -> Counts:
    # Counter subtraction would drop the empty buckets, which bound the others.
    return Counter({key: max(0, counted - before[key]) for key, counted in after.items()})


def _ended(count: Counts) -> float:
    return sum(count[field] for field in _OUTCOMES)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None


def _quantiles(count: Counts, time: str) -> dict[str, float | None]:
    """The p50 and p95 of a time, milliseconds."""
    buckets = sorted(
        (key[1], float(counted))
        for key, counted in count.items()
        if not isinstance(key, str) and key[0] == time
    )
    return {"p50": _quantile_ms(buckets, 0.5), "p95": _quantile_ms(buckets, 0.95)}


def _quantile_ms(buckets: list[tuple[float, float]], share: float) -> float | None:
    """A quantile of a histogram, interpolated linearly within a bucket; in the last, unbounded
    bucket its lower bound. ``buckets`` are upper bounds and cumulative counts."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted = share * buckets[-1][1]
    below_s, before = 0.0, 0.0
    for bound_s, counted in buckets:
        if counted >= wanted:
            if bound_s == inf:
                break
            inside = (wanted - before) / (counted - before)
            return round((below_s + inside * (bound_s - below_s)) * 1000, 3)
        below_s, before = bound_s, counted
    return round(below_s * 1000, 3)
