"""One page of metrics for the whole application: the sum of what its processes push."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from math import inf, isfinite, isnan
from typing import Any, NamedTuple

from prometheus_client import Metric

from sluice.controller.observability.metrics import MAX_PUSH_SAMPLES, SUFFIXES
from sluice.controller.transport.checks import checked, short
from sluice.protocol.messages import MetricSample, MetricsPush
from sluice.scheduling.request.job import Id, Key

_log = logging.getLogger(__name__)

MAX_SOURCES = 4096
MAX_SERIES = 200_000
MAX_HELD_SAMPLES = 1_000_000
MAX_SILENT_SAMPLES = 100_000
MAX_FAMILIES = 2_000

GAUGE_TTL_S = 10.0
SOURCE_TTL_S = 600.0
_EXPIRY_PERIOD_S = 1.0
_MAX_LOGGED = 100

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
Values = dict[SeriesKey, tuple[str, float]]
"""Family and value of each series."""


class _Family(NamedTuple):
    kind: str
    documentation: str
    series: dict[SeriesKey, float]


class _Source:
    """The newest push of one incarnation of a process."""

    __slots__ = ("number", "pushed_s", "values")

    def __init__(self) -> None:
        self.number = 0
        self.pushed_s = -inf
        self.values: Values = {}


class MetricsHub:
    """The sum over all processes, kept up to date push by push; ``O(samples)`` a push,
    ``O(distinct series)`` a scrape.

    Counters and histograms sum the last values of every incarnation (start) of every process.
    Pushes of an incarnation are numbered and older ones dropped, so they may be lost, repeated
    and reordered. Gauges are summed too; only a source's newest incarnation has some, dropped
    after ``GAUGE_TTL_S`` of silence. A histogram needs the same buckets in every process. A
    malformed sample is skipped, logged once and counted in ``skipped``.

    Values of silent sources are kept up to ``MAX_SILENT_SAMPLES``; of those forgotten first, the
    counts stay in the sums and only the latest start is kept. An unknown incarnation that
    started no later may be one of them, so only its increments after its first push are added:
    nothing is counted twice, unless a push is in transit for ``SOURCE_TTL_S``, after which a
    silent source frees its place in ``MAX_SOURCES``. After a restart the counts of ended sources
    are lost, a counter reset to a scraper. No process may push the families in ``reserved``."""

    def __init__(self, reserved: Collection[str] = ()) -> None:
        self._reserved = frozenset(reserved)
        self._families: dict[str, _Family] = {}
        # By name and incarnation; the silent ones in the order in which they fell silent.
        self._sources: dict[tuple[str, int], _Source] = {}
        self._silent: dict[tuple[str, int], _Source] = {}
        self._newest: dict[str, int] = {}
        self._forgotten_until = -1
        # Number of sources of each gauge series, so that it is removed with its last source.
        self._holders: dict[SeriesKey, int] = {}
        self.skipped = 0
        self._logged: set[str] = set()
        self._series = 0
        self._held = 0
        self._silent_held = 0
        self._next_expiry_s = -inf

    def push(self, push: MetricsPush, now_s: float) -> Values:
        """Replace an incarnation's previous push; an older or repeated one is dropped. Returns
        what was added as a whole because the incarnation was new. Raises ValueError, with
        nothing applied: the source is malformed or one too many, or the samples are no tuple."""
        if now_s >= self._next_expiry_s or len(self._sources) >= MAX_SOURCES:
            self.expire(now_s)
        key = _checked_key(push)
        source = self._sources.get(key) or self._silent.get(key)
        if source is not None and push.number <= source.number:
            return {}
        values = self._checked(push, key)
        new = source is None and push.incarnation > self._forgotten_until
        if source is None:
            source = _Source()
            if not new:
                source.values = self._counters(values)
        if key not in self._sources:
            self._silent_held -= len(source.values) if self._silent.pop(key, None) else 0
            self._held += len(source.values)
            self._sources[key] = source
        source.number, source.pushed_s = push.number, now_s
        self._replace(source, values if self._is_newest(key) else self._counters(values))
        return values if new else {}

    def expire(self, now_s: float) -> None:
        """Drop the gauges of silent sources, and forget the longest silent ones. ``O(sources)``."""
        self._next_expiry_s = now_s + _EXPIRY_PERIOD_S
        for key, source in list(self._sources.items()):
            silent_s = now_s - source.pushed_s
            if silent_s >= GAUGE_TTL_S:
                self._drop_gauges(source)
            if silent_s >= SOURCE_TTL_S:
                self._held -= len(source.values)
                self._silent_held += len(source.values)
                self._silent[key] = self._sources.pop(key)
        while self._silent_held > MAX_SILENT_SAMPLES or len(self._silent) > MAX_SOURCES:
            self._forget(next(iter(self._silent)))

    @property
    def sources(self) -> int:
        """Processes that have pushed within ``SOURCE_TTL_S``."""
        return len(self._sources)

    def series(self, family: str) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
        """Sample, labels and value of every series of a family; none for an unknown one."""
        found = self._families.get(family)
        for (sample, labels), value in found.series.items() if found else ():
            yield sample, labels, value

    def families(self, now_s: float) -> list[Metric]:
        """A copy of the merged families, as of now. ``O(series)``, during which the event loop is
        blocked."""
        self.expire(now_s)
        metrics = []
        for name, family in self._families.items():
            if family.series:
                metric = Metric(name, family.documentation, family.kind)
                for (sample, labels), value in family.series.items():
                    metric.add_sample(sample, dict(labels), value)
                metrics.append(metric)
        return metrics

    def _checked(self, push: MetricsPush, key: tuple[str, int]) -> Values:
        """The values of the sound samples."""
        known = self._sources.get(key)
        if known is None and len(self._sources) >= MAX_SOURCES:
            raise ValueError(f"metrics of {push.source!r} refused: {MAX_SOURCES} sources are known")
        if not isinstance(push.samples, tuple):
            raise ValueError(f"samples must be a tuple, got {type(push.samples).__name__}")
        room = MAX_HELD_SAMPLES - self._held + (len(known.values) if known else 0)
        values: Values = {}
        new = 0
        for place, sample in enumerate(push.samples):
            try:
                if place >= MAX_PUSH_SAMPLES:
                    raise ValueError(f"a push has at most {MAX_PUSH_SAMPLES} samples")
                if len(values) >= room:
                    raise ValueError(f"{MAX_HELD_SAMPLES} samples are held")
                new += self._check(sample, new)
            except (TypeError, ValueError) as error:  # a TypeError is of unhashable labels
                self._skip(push.source, sample, error)
            else:
                values[(sample.name, sample.labels)] = (sample.family, sample.value)
        return values

    def _check(self, sample: MetricSample, new: int) -> bool:
        """Raise if a sample is malformed or over a limit. Returns whether its series is new, after
        ``new`` others."""
        known = _is_known(self._families, sample)
        if not known:
            _check_sample(sample)
            if sample.family in self._reserved:
                raise ValueError(f"{sample.family} is reserved for the controller's metrics")
            if self._series + new >= MAX_SERIES:
                raise ValueError(f"{sample.name} would be over {MAX_SERIES} series")
        family = self._families.get(sample.family)
        kind = sample.kind if family is None else family.kind
        if sample.kind != kind:
            raise ValueError(f"{sample.family} is a {kind}, not a {sample.kind!s:.80}")
        _check_value(sample, least=-inf if kind == "gauge" else 0.0)
        if family is None:
            if len(self._families) >= MAX_FAMILIES:
                raise ValueError(f"{sample.family} would be over {MAX_FAMILIES} families")
            self._families[sample.family] = _Family(kind, sample.documentation, {})
        return not known

    def _skip(self, source: str, sample: Any, error: Exception) -> None:
        self.skipped += 1
        name = short(getattr(sample, "name", None))
        if name not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(name)
            _log.warning("a sample of %s from %s is skipped: %s", name, source, error)

    def _is_newest(self, key: tuple[str, int]) -> bool:
        """Whether this is the newest known incarnation of the source; an older one loses its
        gauges."""
        name, incarnation = key
        newest = self._newest.setdefault(name, incarnation)
        if incarnation > newest:
            self._newest[name] = incarnation
            older = self._sources.get((name, newest))
            if older is not None:
                self._drop_gauges(older)
        return incarnation >= newest

    def _forget(self, key: tuple[str, int]) -> None:
        name, incarnation = key
        self._silent_held -= len(self._silent.pop(key).values)
        self._forgotten_until = max(self._forgotten_until, incarnation)
        if self._newest.get(name) == incarnation:
            del self._newest[name]

    def _counters(self, values: Values) -> Values:
        return {key: entry for key, entry in values.items() if not self._is_gauge(entry[0])}

    def _is_gauge(self, family: str) -> bool:
        return self._families[family].kind == "gauge"

    def _replace(self, source: _Source, values: Values) -> None:
        for key in source.values.keys() - values.keys():
            entry = source.values[key]
            if self._is_gauge(entry[0]):
                self._remove_gauge(key, *entry)
            else:
                # Missing from this push, for example because a collector failed: it still counts.
                values[key] = entry
        for key, (name, value) in values.items():
            family = self._families[name]
            before = source.values.get(key)
            if before is not None and family.kind != "gauge" and value < before[1]:
                value = before[1]
                values[key] = (name, value)
            if key not in family.series:
                family.series[key] = 0.0
                self._series += 1
            if family.kind == "gauge" and before is None:
                self._holders[key] = self._holders.get(key, 0) + 1
            if self._holders.get(key) == 1:
                family.series[key] = value  # without the rounding of many small differences
            else:
                family.series[key] += value - (before[1] if before else 0.0)
        self._held += len(values) - len(source.values)
        source.values = values

    def _drop_gauges(self, source: _Source) -> None:
        counters = self._counters(source.values)
        for key in source.values.keys() - counters.keys():
            self._remove_gauge(key, *source.values[key])
        self._held -= len(source.values) - len(counters)
        source.values = counters

    def _remove_gauge(self, key: SeriesKey, name: str, value: float) -> None:
        series = self._families[name].series
        holders = self._holders[key] - 1
        if holders:
            self._holders[key] = holders
            series[key] -= value
        else:
            del self._holders[key], series[key]
            self._series -= 1


def _checked_key(push: Any) -> tuple[str, int]:
    if not isinstance(push, MetricsPush):
        raise ValueError(f"expected a MetricsPush, got {type(push).__name__}")
    source: str = checked("source", push.source, Id)
    incarnation: int = checked("incarnation", push.incarnation, Key)
    checked("number", push.number, Key)
    return source, incarnation


def _is_known(families: dict[str, _Family], sample: Any) -> bool:
    """Whether a sample of the same series has passed the checks before; they are not repeated."""
    if not isinstance(sample, MetricSample):
        return False
    family = families.get(sample.family)
    return family is not None and (sample.name, sample.labels) in family.series


def _check_sample(sample: Any) -> None:
    if not isinstance(sample, MetricSample):
        raise ValueError(f"expected a MetricSample, got {type(sample).__name__}")
    hash(sample.labels)  # a TypeError for a list
    checked("a sample", sample, MetricSample)
    labels = dict(sample.labels)
    if sample.name not in {sample.family + suffix for suffix in SUFFIXES[sample.kind]}:
        raise ValueError(f"{sample.name!r:.150} is no sample of the {sample.kind} {sample.family}")
    if len(labels) < len(sample.labels):
        raise ValueError(f"a label of {sample.name} appears twice")
    if sample.name.endswith("_bucket") and not _is_bound(labels.get("le", "")):
        raise ValueError(f"a bucket of {sample.family} must have a number as its label le")


def _is_bound(text: str) -> bool:
    try:
        return not isnan(float(text))
    except ValueError:
        return False


def _check_value(sample: MetricSample, least: float) -> None:
    value = sample.value
    if not isinstance(value, float) or not isfinite(value) or value < least:
        raise ValueError(f"{sample.name} must be a finite float >= {least}, got {value!r:.80}")
