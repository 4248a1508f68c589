"""How a process collects its metrics and pushes them to the observer.

Each process pushes its whole registry, cumulative, every two seconds, so a lost push loses
nothing. ``metrics_hub`` adds the pushes up: a scrape of any router shows the whole application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from math import isfinite

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sluice.protocol.messages import MetricSample, MetricsPush

_log = logging.getLogger(__name__)

SUFFIXES: dict[str, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("_count", "_sum"),
}
"""The kinds of metric that are pushed, and the names of their samples after the family's."""

PUSH_PERIOD_S = 2.0
"""Time between two pushes of a process, seconds."""

MAX_PUSH_SAMPLES = 20_000
"""Most samples of one push."""


def families_of(registry: CollectorRegistry) -> list[Metric]:
    """A registry's families without creation times, kinds that cannot be summed (info, state
    sets), and gauges that are not finite. ``O(samples)``."""
    families = []
    for found in registry.collect():
        allowed = SUFFIXES.get(found.type, ())
        family = Metric(found.name, found.documentation, found.type)
        family.samples = [
            sample
            for sample in found.samples
            if sample.name.removeprefix(found.name) in allowed
            and (found.type != "gauge" or isfinite(sample.value))
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


class MetricsPusher:
    """Pushes a registry to the observer every ``PUSH_PERIOD_S``. A push that timed out may
    still arrive after a newer one; the observer drops it by its number. ``source`` is unique in
    the application; ``labels`` are added to every sample. ``deliver``: ``False`` where the observer
    did not answer; raises ValueError: refused."""

    def __init__(
        self,
        deliver: Callable[[MetricsPush], Awaitable[bool]],
        registry: CollectorRegistry,
        source: str,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._deliver = deliver
        self._registry = registry
        self._source = source
        self._labels = tuple((labels or {}).items())
        self._task: asyncio.Task[None] | None = None
        self._incarnation = time.time_ns()
        self._number = 0
        self._pushing = asyncio.Lock()
        self.failed = 0
        """Pushes that the observer did not answer or refused, since the start."""

    def start(self) -> None:
        """Start pushing, on the running event loop. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def push_now(self) -> bool:
        """Push once. Returns whether the observer accepted it."""
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
        self._number += 1
        push = MetricsPush(self._source, self._incarnation, self._number, samples)
        try:
            return await self._deliver(push)
        except ValueError as error:
            _log.warning("the observer refused the metrics of %s: %s", self._source, error)
            return False

    async def _run(self) -> None:
        while True:
            try:
                await self.push_now()
            except Exception:
                # A collector that fails once must not end the pushes.
                _log.exception("collecting the metrics of %s failed", self._source)
                self.failed += 1
            await asyncio.sleep(PUSH_PERIOD_S)


class _Page(Collector):
    """Collected families, in the form that ``prometheus_client`` writes."""

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


KEPT_S = 60.0
"""How long the last known metrics stand for those of an actor that does not answer, seconds."""


def controller_age(age_s: float) -> Metric:
    """The metric that says how old the controller's own metrics are."""
    return GaugeMetricFamily(
        "sluice_controller_metrics_age_seconds",
        "Age of the controller's own metrics on this page: 0 if it answered, else its last ones "
        "stand.",
        value=age_s,
    )


def controller_up(up: bool) -> Metric:
    """The metric that says whether the controller answers."""
    return GaugeMetricFamily(
        "sluice_controller_up",
        "Whether the controller answered when this page was made: 1 or 0.",
        value=float(up),
    )
