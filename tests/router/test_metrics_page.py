"""The metrics page, with a controller that answers and with one that does not."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from controller.messages import MetricsPush
from controller.metrics import MetricsHub, MetricsPusher, text_of
from router.app import ControllerMetricsPage
from router.metrics import Fallback, RouterMetrics


class HubClient:
    """The controller's side of the page: a real hub, reachable or not."""

    def __init__(self) -> None:
        self.hub = MetricsHub()
        self.up = True

    async def push_metrics(self, push: MetricsPush) -> bool:
        if self.up:
            self.hub.push(push, now_s=1.0)
        return self.up

    async def render_metrics(self) -> bytes | None:
        return text_of(self.hub.families(now_s=1.0)) if self.up else None


async def read(page: ControllerMetricsPage) -> dict[str, float]:
    text = (await page.render()).decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_page_is_the_fleets_or_else_this_routers() -> None:
    client = HubClient()
    mine, others = RouterMetrics(), RouterMetrics()
    pusher = MetricsPusher(client, mine.registry, "mine")
    await MetricsPusher(client, others.registry, "others").push_now()
    page = ControllerMetricsPage(client, pusher, mine.registry)  # type: ignore[arg-type]
    mine.retries.inc(2)
    mine.fallback(Fallback.NO_ANSWER)
    others.retries.inc(3)
    await MetricsPusher(client, others.registry, "others").push_now()
    fleet = await read(page)
    assert fleet["sluice_retries_total"] == 5
    assert fleet["sluice_controller_up"] == 1
    client.up = False
    alone = await read(page)
    assert alone["sluice_retries_total"] == 2
    assert alone["sluice_fallback_total"] == 1
    assert alone["sluice_controller_up"] == 0
