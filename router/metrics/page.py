"""The page of metrics: of the whole application, whichever router answers."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from math import inf

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.client import ControllerClient
from sluice.controller.observability.metrics import (
    KEPT_S,
    MetricsPusher,
    controller_up,
    families_of,
    text_of,
)

NO_MODEL = "none"  # model label of what is counted before a request's model is known
PAGE_PERIOD_S = 0.5  # least time from the beginning of one page to that of the next, seconds

_log = logging.getLogger(__name__)

_OWN_LABEL = re.compile(rb"[{,]model=\"")


class ControllerMetricsPage:
    """The application's metrics from the observer, this router's own up to date in them.

    Without the observer, gauges of its last page for at most :data:`KEPT_S`, and no counters: lower
    values would read as a reset. A scrape gets a page begun after it, so no counter falls; all that
    wait for the next page share it, at most one in :data:`PAGE_PERIOD_S`."""

    def __init__(
        self,
        client: ControllerClient,
        pusher: MetricsPusher,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._pusher = pusher
        self._registry = registry
        self._clock = clock
        self._sleep = sleep
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None
        self._begun_s = -inf
        self._status = CollectorRegistry()
        self._up = Gauge(
            "sluice_observer_up",
            "Whether the observer answered when this page was made: 1 or 0.",
            registry=self._status,
        )
        self._age_s = Gauge(
            "sluice_observer_page_age_seconds",
            "Age of the metrics of the application on this page: 0 if the observer answered, else "
            "its last gauges stand.",
            registry=self._status,
        )
        self._last, self._last_s = b"", -inf

    async def render(self) -> bytes:
        """Prometheus text, of after this call; see the class."""
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)

    async def _make(self) -> bytes:
        async with self._one_at_a_time:
            await self._sleep(max(0.0, self._begun_s + PAGE_PERIOD_S - self._clock()))
            self._begun_s = self._clock()
            self._next = None
            text = await self._of_fleet()
            self._up.set(text is not None)
            now_s = self._clock()
            if text is None:
                text = self._gauges(now_s)
            else:
                self._last, self._last_s = text, now_s
            self._age_s.set(now_s - self._last_s if self._last else 0.0)
            return text + generate_latest(self._status)

    def _gauges(self, now_s: float) -> bytes:
        """What is known without the observer."""
        if now_s - self._last_s > KEPT_S:
            self._last = b""
        own = [each for each in families_of(self._registry) if each.type == "gauge"]
        last = {
            each.name: each
            for each in text_string_to_metric_families(self._last.decode())
            if each.type == "gauge"
        }
        last |= {each.name: each for each in own if each.name not in last}
        last["sluice_controller_up"] = controller_up(self._client.up)
        return text_of([*last.values()])

    async def _of_fleet(self) -> bytes | None:
        try:
            # The page is the application's also where this push is late.
            await self._pusher.push_now()
            return await self._client.render_metrics()
        except Exception:
            # Whatever failed, this router's own metrics can be shown.
            _log.exception("cannot read the observer's metrics")
            return None


Render = Callable[[], Awaitable[bytes]]
"""Makes the page of the whole application, in Prometheus' text format. Never fails: at worst it
shows this router's metrics alone."""


async def rendered(pages: Mapping[str, ControllerMetricsPage]) -> bytes:
    """Several models' pages as one, each line with its model's name as a label. ``O(lines)``."""
    texts = await asyncio.gather(*(page.render() for page in pages.values()))
    return merged(dict(zip(pages, texts, strict=True)))


def merged(pages: Mapping[str, bytes]) -> bytes:
    """Models' texts merged family by family; a line that has a ``model`` label keeps it."""
    families: dict[bytes, list[bytes]] = {}
    for model, text in pages.items():
        label = b'model="' + model.encode() + b'"'
        lines: list[bytes] = []
        for line in text.split(b"\n"):  # other breaks may stand in values of labels
            if line.startswith(b"# HELP "):
                lines = families.setdefault(line.split(b" ", 3)[2], [line])
            elif line.startswith(b"# TYPE "):
                if len(lines) == 1:
                    lines.append(line)
            elif line:
                lines.append(_labelled(line, label))
    return b"".join(line + b"\n" for lines in families.values() for line in lines)


def _labelled(line: bytes, label: bytes) -> bytes:
    """A sample's line with one more label, unless it has one of that name."""
    head, brace, rest = line.partition(b"{")
    if not brace:
        name, _, value = line.partition(b" ")
        return name + b"{" + label + b"} " + value
    return line if _OWN_LABEL.search(line) else head + b"{" + label + b"," + rest
