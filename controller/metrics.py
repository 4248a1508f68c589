"""One page of metrics for the whole application: processes push, the controller merges.

Each process keeps its own ``prometheus_client`` registry and pushes all of it, cumulative, about
once a second; a lost push loses nothing. A scrape of any router shows the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf, isfinite
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from controller.checks import check_text, has_bytes, short
from controller.messages import MetricSample, MetricsPush

_log = logging.getLogger(__name__)

SUFFIXES: dict[str, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("_count", "_sum"),
}
"""The kinds of metric that are pushed, and the names of their samples after the family's."""

MAX_SOURCES = 4096
MAX_PUSH_SAMPLES = 20_000
MAX_SERIES = 200_000
MAX_HELD_SAMPLES = 1_000_000
MAX_FAMILIES = 2_000
MAX_LABELS = 16
MAX_LABEL_CHARACTERS = 256
MAX_DOCUMENTATION_CHARACTERS = 1_000

_EXPIRY_PERIOD_S = 1.0

_FAMILY = re.compile(r"sluice_[a-z0-9_]{1,120}")
_LABEL = re.compile(r"[a-z_][a-z0-9_]{0,63}")

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]


def families_of(registry: CollectorRegistry) -> list[Metric]:
    """A registry's families, with the samples that belong on the application's page.

    Left out are creation times, kinds that cannot be summed (info, state sets), and values that
    are not finite. ``O(samples)``.
    """
    families = []
    for found in registry.collect():
        allowed = SUFFIXES.get(found.type, ())
        family = Metric(found.name, found.documentation, found.type)
        family.samples = [
            sample
            for sample in found.samples
            if sample.name.removeprefix(found.name) in allowed and isfinite(sample.value)
        ]
        families.append(family)
    return families


def samples_of(registry: CollectorRegistry) -> tuple[MetricSample, ...]:
    """Every sample of a registry that can be pushed; see :func:`families_of`."""
    return tuple(
        [
            MetricSample(
                family.name,
                family.type,
                family.documentation,
                sample.name,
                tuple(sample.labels.items()),
                float(sample.value),
            )
            for family in families_of(registry)
            for sample in family.samples
        ]
    )


class PushTarget(Protocol):
    """Where a process pushes its metrics: a controller's client."""

    async def push_metrics(self, push: MetricsPush) -> bool:
        """Deliver; ``False`` where the controller did not answer.

        Raises:
            ValueError: the controller refused the push.
        """


class MetricsPusher:
    """Pushes a registry to the controller periodically, for as long as it runs.

    A controller that does not answer costs nothing but the period: the next push holds everything.

    Args:
        target: the controller's client.
        registry: what to push.
        source: name of this process, unique in the application and new with every start.
        period_s: seconds between two pushes.
        labels: added to every sample.
    """

    def __init__(
        self,
        target: PushTarget,
        registry: CollectorRegistry,
        source: str,
        period_s: float = 1.0,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if period_s <= 0:
            raise ValueError(f"period_s must be positive, got {period_s}")
        self._target = target
        self._registry = registry
        self._source = source
        self._period_s = period_s
        self._labels = tuple((labels or {}).items())
        self._task: asyncio.Task[None] | None = None
        # One at a time: an older push that comes after a newer one looks like a restart.
        self._pushing = asyncio.Lock()
        self.failed = 0
        """Pushes that the controller did not answer or refused, since the start."""

    def start(self) -> None:
        """Start pushing, on the running event loop. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def push_now(self) -> bool:
        """Push once; whether the controller took it."""
        async with self._pushing:
            taken = await self._push()
        self.failed += not taken
        return taken

    async def stop(self) -> None:
        """Stop, with a last push. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self.push_now()

    async def _push(self) -> bool:
        samples = samples_of(self._registry)
        if self._labels:
            samples = tuple([each._replace(labels=each.labels + self._labels) for each in samples])
        try:
            return await self._target.push_metrics(MetricsPush(self._source, samples))
        except ValueError as error:
            _log.warning("the controller refused the metrics of %s: %s", self._source, error)
            return False

    async def _run(self) -> None:
        while True:
            try:
                await self.push_now()
            except Exception:
                # A collector that fails once must not end the pushes for good.
                _log.exception("the metrics of %s could not be collected", self._source)
                self.failed += 1
            await asyncio.sleep(self._period_s)


class _Page(Collector):
    """Families that are collected already, for ``prometheus_client`` to write."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """The families."""
        return self._families


def text_of(families: list[Metric]) -> bytes:
    """Families in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(families))
    return generate_latest(registry)


class _Family(NamedTuple):
    kind: str
    documentation: str
    series: dict[SeriesKey, float]


class _Source:
    """The last push of one process."""

    __slots__ = ("pushed_s", "values")

    def __init__(self, pushed_s: float) -> None:
        self.pushed_s = pushed_s
        self.values: dict[SeriesKey, tuple[str, float]] = {}


class MetricsHub:
    """The sum over all processes, kept up to date push by push.

    - Counters and histograms are summed over the sources, by name and labels. They never fall: a
      source whose own counters fell has restarted, so what it had counted is kept and the new
      counts come on top; a source that stays silent is forgotten but what it counted stays.
    - Gauges with the same name and labels are summed too (requests in flight, over the routers); a
      gauge that belongs to one replica carries a ``replica`` label. The gauges of a source that is
      silent for ``gauge_ttl_s`` are dropped.
    - The histograms of one family must have the same buckets in every process.

    After a restart of the controller the living sources bring their counts back, the counts of
    sources that had ended before are lost; a scraper sees that as a counter reset.

    A push costs ``O(its samples)``, a scrape ``O(distinct series)``.

    Args:
        gauge_ttl_s: silence after which a source's gauges are dropped, seconds.
        source_ttl_s: silence after which a source is forgotten, seconds. One that speaks again
            later is counted as a new one, so this should be long.
        reserved: names of families that nobody may push, because the page has them from elsewhere.
    """

    def __init__(
        self,
        gauge_ttl_s: float = 10.0,
        source_ttl_s: float = 600.0,
        reserved: Collection[str] = (),
    ) -> None:
        if not 0 < gauge_ttl_s <= source_ttl_s:
            raise ValueError(
                f"need 0 < gauge_ttl_s <= source_ttl_s, got {gauge_ttl_s} and {source_ttl_s}"
            )
        self._gauge_ttl_s = gauge_ttl_s
        self._source_ttl_s = source_ttl_s
        self._reserved = frozenset(reserved)
        self._families: dict[str, _Family] = {}
        self._sources: dict[str, _Source] = {}
        # How many sources hold a gauge series, so that it goes with the last of them.
        self._holders: dict[SeriesKey, int] = {}
        self._series = 0
        self._held = 0
        self._next_expiry_s = -inf

    def push(self, push: MetricsPush, now_s: float) -> bool:
        """Replace what a source pushed before. ``now_s``: the hub's monotonic clock.

        Returns:
            Whether the source has pushed before, and was not silent for too long since.

        Raises:
            ValueError: the push is malformed or over a limit. Nothing of it is taken.
        """
        if now_s >= self._next_expiry_s or len(self._sources) >= MAX_SOURCES:
            self.expire(now_s)
        values = self._checked(push)
        known = push.source in self._sources
        source = self._sources.setdefault(push.source, _Source(now_s))
        source.pushed_s = now_s
        if self._restarted(source, values):
            self._drop_gauges(source)
            self._held -= len(source.values)
            source.values = {}
        self._replace(source, values)
        return known

    def expire(self, now_s: float) -> None:
        """Drop the gauges of silent sources, and forget those silent for long. ``O(sources)``."""
        self._next_expiry_s = now_s + _EXPIRY_PERIOD_S
        for name, source in list(self._sources.items()):
            silent_s = now_s - source.pushed_s
            if silent_s >= self._gauge_ttl_s:
                self._drop_gauges(source)
            if silent_s >= self._source_ttl_s:
                self._held -= len(source.values)
                del self._sources[name]

    @property
    def sources(self) -> int:
        """Processes known."""
        return len(self._sources)

    def series(self, family: str) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
        """Sample, labels and value of every series of a family; none for an unknown one."""
        found = self._families.get(family)
        for (sample, labels), value in found.series.items() if found else ():
            yield sample, labels, value

    def families(self, now_s: float) -> list[Metric]:
        """A copy of the merged families, as of now. ``O(series)``, and nothing else happens on
        the event loop meanwhile."""
        self.expire(now_s)
        metrics = []
        for name, family in self._families.items():
            if family.series:
                metric = Metric(name, family.documentation, family.kind)
                for (sample, labels), value in family.series.items():
                    metric.add_sample(sample, dict(labels), value)
                metrics.append(metric)
        return metrics

    def _checked(self, push: MetricsPush) -> dict[SeriesKey, tuple[str, float]]:
        if not isinstance(push, MetricsPush):
            raise ValueError(f"expected a MetricsPush, got {type(push).__name__}")
        check_text("source", push.source)
        if push.source not in self._sources and len(self._sources) >= MAX_SOURCES:
            raise ValueError(f"metrics of {push.source!r} refused: {MAX_SOURCES} sources are known")
        if not isinstance(push.samples, tuple) or len(push.samples) > MAX_PUSH_SAMPLES:
            raise ValueError(f"samples must be a tuple of at most {MAX_PUSH_SAMPLES}")
        source = self._sources.get(push.source)
        held = self._held - (len(source.values) if source else 0)
        if held + len(push.samples) > MAX_HELD_SAMPLES:
            raise ValueError(f"metrics of {push.source!r} refused: {MAX_HELD_SAMPLES} samples held")
        try:
            values, kinds, new = self._checked_samples(push.samples)
        except TypeError as error:  # what should be text cannot be looked up
            raise ValueError(f"a sample is malformed: {error}") from None
        if self._series + new > MAX_SERIES:
            raise ValueError(f"metrics of {push.source!r} refused: over {MAX_SERIES} series")
        if len(self._families) + len(kinds) > MAX_FAMILIES:
            raise ValueError(f"metrics of {push.source!r} refused: over {MAX_FAMILIES} families")
        for sample in push.samples:
            if sample.family not in self._families:
                self._families[sample.family] = _Family(sample.kind, sample.documentation, {})
        return values

    def _checked_samples(
        self, samples: Iterable[MetricSample]
    ) -> tuple[dict[SeriesKey, tuple[str, float]], dict[str, str], int]:
        """The values, the kinds of new families, and how many series are new."""
        values: dict[SeriesKey, tuple[str, float]] = {}
        kinds: dict[str, str] = {}
        new = 0
        for sample in samples:
            known = _is_known(self._families, sample)
            if not known:
                _check_sample(sample)
                if sample.family in self._reserved:
                    raise ValueError(f"{sample.family} is the controller's own, and not pushed")
                new += 1
            family = self._families.get(sample.family)
            kind = family.kind if family else kinds.setdefault(sample.family, sample.kind)
            if sample.kind != kind:
                raise ValueError(f"{sample.family} is a {kind}, not a {sample.kind!s:.80}")
            _check_value(sample, least=-inf if kind == "gauge" else 0.0)
            values[(sample.name, sample.labels)] = (sample.family, sample.value)
        return values, kinds, new

    def _restarted(self, source: _Source, values: dict[SeriesKey, tuple[str, float]]) -> bool:
        """Whether a counter of the source fell."""
        for key, (family, before) in source.values.items():
            now = values.get(key)
            if now is not None and now[1] < before and self._families[family].kind != "gauge":
                return True
        return False

    def _replace(self, source: _Source, values: dict[SeriesKey, tuple[str, float]]) -> None:
        for key in source.values.keys() - values.keys():
            entry = source.values[key]
            if self._families[entry[0]].kind == "gauge":
                self._remove_gauge(key, *entry)
            else:
                # Not shown this time, for example by a collector that failed: it still counts.
                values[key] = entry
        for key, (name, value) in values.items():
            family = self._families[name]
            before = source.values.get(key)
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
        gauges = [
            (key, entry)
            for key, entry in source.values.items()
            if self._families[entry[0]].kind == "gauge"
        ]
        for key, entry in gauges:
            self._remove_gauge(key, *entry)
            del source.values[key]
        self._held -= len(gauges)

    def _remove_gauge(self, key: SeriesKey, name: str, value: float) -> None:
        series = self._families[name].series
        holders = self._holders[key] - 1
        if holders:
            self._holders[key] = holders
            series[key] -= value
        else:
            del self._holders[key], series[key]
            self._series -= 1


def _is_known(families: dict[str, _Family], sample: Any) -> bool:
    """Whether an equal sample passed the checks before, which saves doing them again."""
    if not isinstance(sample, MetricSample):
        return False
    family = families.get(sample.family)
    return family is not None and (sample.name, sample.labels) in family.series


def _check_sample(sample: Any) -> None:
    if not isinstance(sample, MetricSample):
        raise ValueError(f"expected a MetricSample, got {type(sample).__name__}")
    if not isinstance(sample.family, str) or not _FAMILY.fullmatch(sample.family):
        raise ValueError(f"a family must match {_FAMILY.pattern}, got {sample.family!r:.150}")
    if sample.kind not in SUFFIXES:
        raise ValueError(
            f"{sample.family} must be one of {', '.join(SUFFIXES)}: {short(sample.kind)}"
        )
    if sample.name not in {sample.family + suffix for suffix in SUFFIXES[sample.kind]}:
        raise ValueError(f"{sample.name!r:.150} is no sample of the {sample.kind} {sample.family}")
    if (
        not isinstance(sample.documentation, str)
        or len(sample.documentation) > MAX_DOCUMENTATION_CHARACTERS
        or not has_bytes(sample.documentation)
    ):
        raise ValueError(f"{sample.family}: documentation must be text of at most 1000 characters")
    _check_labels(sample.name, sample.labels)


def _check_value(sample: MetricSample, least: float) -> None:
    value = sample.value
    if not isinstance(value, float) or not isfinite(value) or value < least:
        raise ValueError(f"{sample.name} must be a finite float >= {least}, got {value!r:.80}")


def _check_labels(name: str, labels: Any) -> None:
    if not isinstance(labels, tuple) or len(labels) > MAX_LABELS:
        raise ValueError(f"{name} may have at most {MAX_LABELS} labels, as a tuple of pairs")
    for pair in labels:
        if (
            not isinstance(pair, tuple)
            or len(pair) != 2
            or not all(isinstance(text, str) for text in pair)
            or not _LABEL.fullmatch(pair[0])
            or len(pair[1]) > MAX_LABEL_CHARACTERS
            or not has_bytes(pair[1])
        ):
            raise ValueError(
                f"a label of {name} must be a name matching {_LABEL.pattern} and a text of at most "
                f"{MAX_LABEL_CHARACTERS} characters, got {pair!r:.80}"
            )
    if len({label for label, _ in labels}) != len(labels):
        raise ValueError(f"a label of {name} appears twice")
