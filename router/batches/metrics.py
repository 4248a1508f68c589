"""Metrics of batches. Labels are bounded: their values are fixed names."""

from __future__ import annotations

import enum

from prometheus_client import CollectorRegistry, Counter, Gauge

from sluice.router.batches.records import Status


class LineOutcome(enum.StrEnum):
    """How a line ended."""

    OK = "ok"
    ERROR = "error"
    """The engine or the router refused it, or its attempts all failed."""
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class BatchMetrics:
    """The counts of one router; their sum over the routers is that of the application."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "sluice_batches", "Batches that ended, by status.", ["status"], registry=registry
        )
        self._lines = Counter(
            "sluice_batch_lines", "Lines that ended, by outcome.", ["outcome"], registry=registry
        )
        self.waits = Counter(
            "sluice_batch_line_waits",
            "Waits of lines because there was no capacity for them.",
            registry=registry,
        )
        self.put_off = Counter(
            "sluice_batches_put_off",
            "Failed runs of batches, which are retried later; the log has the cause.",
            registry=registry,
        )
        self.running = Gauge("sluice_batches_running", "Running batches.", registry=registry)
        self.in_flight = Gauge(
            "sluice_batch_lines_in_flight", "Lines in flight.", registry=registry
        )

    def ended(self, status: Status) -> None:
        """Count a batch."""
        self._ended.labels(status.value).inc()

    def line(self, outcome: LineOutcome, count: int = 1) -> None:
        """Count lines."""
        self._lines.labels(outcome.value).inc(count)
