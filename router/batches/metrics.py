"""What the runner counts. Labels are bounded: they are names of our own."""

from __future__ import annotations

import enum

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.batches.records import Status


class LineOutcome(enum.StrEnum):
    """How a line ended."""

    OK = "ok"
    ERROR = "error"
    """The engine or the router refused it, or its attempts all failed."""
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class BatchMetrics:
    """The counts of one router; added up over the routers they are those of the application."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "sluice_batches", "Batches that ended, by status.", ["status"], registry=registry
        )
        self._lines = Counter(
            "sluice_batch_lines", "Lines that ended, by outcome.", ["outcome"], registry=registry
        )
        self.waits = Counter(
            "sluice_batch_line_waits",
            "Times that a line waited because there was no room for it.",
            registry=registry,
        )
        self.put_off = Counter(
            "sluice_batches_put_off",
            "Times that a batch could not be run on, and was put off; the log says why.",
            registry=registry,
        )
        self.running = Gauge(
            "sluice_batches_running", "Batches that are being run.", registry=registry
        )
        self.in_flight = Gauge(
            "sluice_batch_lines_in_flight", "Lines that are under way.", registry=registry
        )

    def ended(self, status: Status) -> None:
        """Count a batch."""
        self._ended.labels(status.value).inc()

    def line(self, outcome: LineOutcome, count: int = 1) -> None:
        """Count lines."""
        self._lines.labels(outcome.value).inc(count)
