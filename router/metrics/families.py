"""Makes the router's metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Families:
    """Metrics in ``registry``. ``text`` is their documentation, ``labels`` the names of theirs.

    The library looks up a series by its labels under a lock, and each request has dozens. So
    :meth:`counters` and :meth:`histograms` return a lookup that remembers what it has found: it has
    no more entries than there are series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter."""
        return Counter(name, text, labels, registry=self._registry)

    def counters(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """A counter's series, by the values of its labels."""
        return cache(self.counter(name, text, *labels).labels)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A gauge."""
        return Gauge(name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """A histogram."""
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def histograms(
        self, name: str, text: str, buckets: Sequence[float], *labels: str
    ) -> Callable[..., Histogram]:
        """A histogram's series, by the values of its labels."""
        return cache(self.histogram(name, text, buckets, *labels).labels)
