"""The metrics page, with an observer that answers and with one that does not."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.observability.metrics import KEPT_S, MetricsPusher, text_of
from sluice.controller.observability.metrics_hub import MetricsHub
from sluice.protocol.messages import MetricSample, MetricsPush
from sluice.router.metrics.instruments import Fallback, RouterMetrics
from sluice.router.metrics.page import PAGE_PERIOD_S, ControllerMetricsPage, merged
from tests.controller.fleet import newer_push
from tests.router.far_side import Clock


class HubClient:
    """The observer's side of the page: a real hub, reachable or not."""

    def __init__(self) -> None:
        self.hub = MetricsHub()
        self.up = True
        self.error: Exception | None = None
        self.asked = 0
        self.asking = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def push_metrics(self, push: MetricsPush) -> bool:
        if self.up:
            self.hub.push(push, now_s=1.0)
        return self.up

    async def render_metrics(self) -> bytes | None:
        self.asked += 1
        self.asking.set()
        text = text_of(self.hub.families(now_s=1.0)) if self.up else None
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return text


def page_of(client: HubClient, clock: Clock, metrics: RouterMetrics) -> ControllerMetricsPage:
    pusher = MetricsPusher(client, metrics.registry, "mine")
    return ControllerMetricsPage(client, pusher, metrics.registry, clock, clock.pause)  # type: ignore[arg-type]


async def read(page: ControllerMetricsPage) -> dict[str, float]:
    text = (await page.render()).decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_page_is_the_fleets_or_else_this_routers_gauges() -> None:
    client = HubClient()
    clock = Clock()
    mine, others = RouterMetrics(), RouterMetrics()
    await MetricsPusher(client, others.registry, "others").push_now()
    page = page_of(client, clock, mine)
    mine.retries.inc(2)
    mine.fallbacks(Fallback.NO_ANSWER).inc()
    mine.in_flight.inc(4)
    others.retries.inc(3)
    await MetricsPusher(client, others.registry, "others").push_now()
    fleet = await read(page)
    assert fleet["sluice_retries_total"] == 5
    assert fleet["sluice_observer_up"] == 1
    client.up = False
    clock.now_s += PAGE_PERIOD_S
    alone = await read(page)
    assert alone["sluice_in_flight_requests"] == 4
    assert alone["sluice_observer_up"] == 0
    assert alone["sluice_controller_up"] == 0, "as this router's own calls find"
    # A scraper would read the lower counts as a reset, and count them on top afterwards.
    assert not [name for name in alone if name.endswith(("_total", "_count", "_sum", "_bucket"))]


async def test_the_last_gauges_stand_while_the_observer_does_not_answer() -> None:
    client, clock, mine = HubClient(), Clock(), RouterMetrics()
    sample = MetricSample("sluice_y", "gauge", "Y.", "sluice_y", (("replica", "r"),), 3.0)
    client.hub.push(newer_push("replica", (sample,)), 1.0)
    page = page_of(client, clock, mine)
    found = await read(page)
    assert (found["sluice_y"], found["sluice_observer_page_age_seconds"]) == (3.0, 0.0)
    client.up = False
    clock.now_s += KEPT_S
    found = await read(page)
    assert (found["sluice_y"], found["sluice_observer_up"]) == (3.0, 0)
    assert found["sluice_observer_page_age_seconds"] == KEPT_S
    assert not [name for name in found if name.endswith(("_total", "_count", "_sum", "_bucket"))]
    clock.now_s += PAGE_PERIOD_S
    found = await read(page)
    assert "sluice_y" not in found and found["sluice_observer_page_age_seconds"] == 0
    client.up = True
    clock.now_s += PAGE_PERIOD_S
    assert (await read(page))["sluice_y"] == 3.0


async def test_a_push_that_fails_takes_the_fleets_page_from_nobody() -> None:
    client, metrics = HubClient(), RouterMetrics()
    await MetricsPusher(client, metrics.registry, "others").push_now()
    page = page_of(client, Clock(), metrics)

    async def lost(push: MetricsPush) -> bool:
        return False

    client.push_metrics = lost  # type: ignore[method-assign]
    found = await read(page)
    assert found["sluice_observer_up"] == 1
    assert "sluice_retries_total" in found


async def test_scrapes_at_once_ask_the_observer_once() -> None:
    client, clock, metrics = HubClient(), Clock(), RouterMetrics()
    page = page_of(client, clock, metrics)
    began_s = clock.now_s
    scrapes = [asyncio.create_task(page.render()) for _ in range(50)]
    assert len({*await asyncio.gather(*scrapes)}) == 1
    assert client.asked == 1
    assert clock.now_s == began_s, "nobody waits for the first page"
    client.gate.clear()
    client.asking.clear()
    under_way = asyncio.create_task(page.render())
    await client.asking.wait()
    late = [asyncio.create_task(page.render()) for _ in range(50)]
    client.gate.set()
    await asyncio.gather(under_way, *late)
    assert client.asked == 3
    assert clock.now_s == began_s + 2 * PAGE_PERIOD_S


async def test_a_page_is_no_older_than_the_scrape() -> None:
    """One router gets a scrape, and another the next, which began a page earlier."""
    metrics, fast, slow = RouterMetrics(), HubClient(), HubClient()
    slow.hub = fast.hub
    clock = Clock()
    early = page_of(slow, clock, RouterMetrics())
    slow.gate.clear()
    left = asyncio.create_task(early.render())
    await slow.asking.wait()
    metrics.retries.inc()
    assert (await read(page_of(fast, clock, metrics)))["sluice_retries_total"] == 1
    next_scrape = asyncio.create_task(read(early))
    await asyncio.sleep(0)
    slow.gate.set()
    assert (await next_scrape)["sluice_retries_total"] == 1
    assert (await read(early))["sluice_retries_total"] == 1
    await left


async def test_a_scraper_that_leaves_takes_the_page_from_nobody() -> None:
    client = HubClient()
    page = page_of(client, Clock(), RouterMetrics())
    client.gate.clear()
    first, second = (asyncio.create_task(page.render()) for _ in range(2))
    await client.asking.wait()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    client.gate.set()
    assert b"sluice_observer_up 1.0" in await second
    assert client.asked == 1


@pytest.mark.parametrize("error", [ValueError("over a limit"), RuntimeError("a bug")])
async def test_an_observer_that_refuses_or_fails_leaves_this_routers_page(
    error: Exception,
) -> None:
    client, clock, metrics = HubClient(), Clock(), RouterMetrics()
    page = page_of(client, clock, metrics)
    metrics.in_flight.inc(2)
    client.error = error
    alone = await read(page)
    assert alone["sluice_in_flight_requests"] == 2
    assert alone["sluice_observer_up"] == 0
    client.error = None
    clock.now_s += PAGE_PERIOD_S
    assert (await read(page))["sluice_observer_up"] == 1


LABEL_VALUES = st.text(max_size=12)


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,8}", fullmatch=True),
        st.dictionaries(LABEL_VALUES, st.integers(0, 9), max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_pages_of_models_lose_and_mix_up_nothing(pages: dict[str, dict[str, int]]) -> None:
    texts, expected = {}, {}
    for model, values in pages.items():
        registry = CollectorRegistry()
        plain = Gauge("sluice_plain", "Without labels.", registry=registry)
        gauge = Gauge("sluice_labelled", "With one: { } \n done", ["x"], registry=registry)
        plain.set(len(values))
        expected["sluice_plain", model, None] = len(values)
        for label, value in values.items():
            gauge.labels(label).set(value)
            expected["sluice_labelled", model, label] = value
        texts[model] = generate_latest(registry)
    families = list(text_string_to_metric_families(merged(texts).decode()))
    assert {
        (sample.name, sample.labels["model"], sample.labels.get("x")): sample.value
        for family in families
        for sample in family.samples
    } == expected
    assert len({family.name for family in families}) == len(families)
