from __future__ import annotations

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.parser import text_string_to_metric_families

from controller.messages import MetricSample, MetricsPush
from controller.metrics import MAX_PUSH_SAMPLES, MetricsHub, MetricsPusher, samples_of, text_of

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Process:
    """A process with real metrics of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.registry = CollectorRegistry()
        self.requests = Counter("sluice_requests", "Requests.", ["class"], registry=self.registry)
        self.live = Gauge("sluice_live", "Live requests.", registry=self.registry)
        self.seconds = Histogram(
            "sluice_ttft_seconds", "TTFT.", buckets=(0.1, 1.0), registry=self.registry
        )

    def push(self) -> MetricsPush:
        return MetricsPush(self.name, samples_of(self.registry))


def page_of(hub: MetricsHub, now_s: float) -> Page:
    text = text_of(hub.families(now_s)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


INTERACTIVE = (("class", "interactive"),)


def test_counters_histograms_and_gauges_add_up_over_processes() -> None:
    hub = MetricsHub()
    first, second = Process("r1"), Process("r2")
    first.requests.labels("interactive").inc(3)
    second.requests.labels("interactive").inc(4)
    first.seconds.observe(0.05)
    second.seconds.observe(0.5)
    first.live.set(2)
    second.live.set(5)
    hub.push(first.push(), 0)
    hub.push(second.push(), 0)
    page = page_of(hub, 0)
    assert page["sluice_requests_total", INTERACTIVE] == 7
    assert page["sluice_ttft_seconds_bucket", (("le", "0.1"),)] == 1
    assert page["sluice_ttft_seconds_bucket", (("le", "+Inf"),)] == 2
    assert page["sluice_ttft_seconds_sum", ()] == pytest.approx(0.55)
    assert page["sluice_live", ()] == 7
    families = {
        f.name: f.type for f in text_string_to_metric_families(text_of(hub.families(0)).decode())
    }
    assert families == {
        "sluice_requests": "counter",
        "sluice_live": "gauge",
        "sluice_ttft_seconds": "histogram",
    }


def test_a_push_replaces_the_one_before() -> None:
    hub = MetricsHub()
    process = Process("r1")
    for _ in range(3):
        process.requests.labels("interactive").inc()
        hub.push(process.push(), 0)
    assert page_of(hub, 0)["sluice_requests_total", INTERACTIVE] == 3


def test_a_restarted_process_does_not_lower_the_counts() -> None:
    hub = MetricsHub()
    process = Process("r1")
    process.requests.labels("interactive").inc(10)
    process.live.set(4)
    hub.push(process.push(), 0)
    again = Process("r1")
    again.requests.labels("interactive").inc(2)
    hub.push(again.push(), 1)
    page = page_of(hub, 1)
    assert page["sluice_requests_total", INTERACTIVE] == 12
    assert page["sluice_live", ()] == 0
    # One that restarted and has not counted that class at all yet.
    hub.push(Process("r1").push(), 2)
    assert page_of(hub, 2)["sluice_requests_total", INTERACTIVE] == 12


def test_a_counter_that_is_not_shown_for_once_is_not_counted_twice() -> None:
    hub = MetricsHub()
    process = Process("r1")
    process.requests.labels("interactive").inc(10)
    hub.push(process.push(), 0)
    hub.push(MetricsPush("r1", ()), 1)
    assert page_of(hub, 1)["sluice_requests_total", INTERACTIVE] == 10
    process.requests.labels("interactive").inc(1)
    hub.push(process.push(), 2)
    assert page_of(hub, 2)["sluice_requests_total", INTERACTIVE] == 11


def test_a_dead_process_leaves_its_counts_and_takes_its_gauges() -> None:
    hub = MetricsHub(gauge_ttl_s=10, source_ttl_s=100)
    process = Process("r1")
    process.requests.labels("interactive").inc(10)
    process.live.set(4)
    hub.push(process.push(), 0)
    assert page_of(hub, 9.9)["sluice_live", ()] == 4
    assert ("sluice_live", ()) not in page_of(hub, 10)
    # Silent for a while only: its counts continue, its gauges return.
    process.requests.labels("interactive").inc(1)
    hub.push(process.push(), 50)
    page = page_of(hub, 50)
    assert page["sluice_requests_total", INTERACTIVE] == 11
    assert page["sluice_live", ()] == 4
    assert page_of(hub, 150)["sluice_requests_total", INTERACTIVE] == 11
    assert hub.sources == 0
    assert hub._held == 0 and not hub._holders


def test_gauges_of_replicas_do_not_collide() -> None:
    hub = MetricsHub()
    for name, value in (("a", 1.0), ("b", 2.0)):
        sample = MetricSample(
            "sluice_replica_live",
            "gauge",
            "Live.",
            "sluice_replica_live",
            (("replica", name),),
            value,
        )
        hub.push(MetricsPush(f"replica-{name}", (sample,)), 0)
    page = page_of(hub, 0)
    assert page["sluice_replica_live", (("replica", "a"),)] == 1
    assert page["sluice_replica_live", (("replica", "b"),)] == 2
    # A series that a process no longer shows goes.
    hub.push(MetricsPush("replica-a", ()), 1)
    assert ("sluice_replica_live", (("replica", "a"),)) not in page_of(hub, 1)


def test_sums_equal_a_recount_after_many_pushes() -> None:
    rng = random.Random(7)
    hub = MetricsHub()
    processes = [Process(f"r{index}") for index in range(4)]
    for step in range(200):
        process = rng.choice(processes)
        process.requests.labels(rng.choice(["interactive", "batch"])).inc(rng.randrange(5))
        process.seconds.observe(rng.choice([0.01, 0.5, 3.0]))
        process.live.set(rng.random())
        hub.push(process.push(), step / 100)
    for process in processes:
        hub.push(process.push(), 2)
    page = page_of(hub, 2)
    for key, value in page.items():
        labels = dict(key[1])
        expected = sum(p.registry.get_sample_value(key[0], labels) or 0.0 for p in processes)
        assert value == pytest.approx(expected), key


GOOD = MetricSample("sluice_x", "counter", "X.", "sluice_x_total", (("a", "b"),), 1.0)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (GOOD._replace(family="other_x"), "must match"),
        (GOOD._replace(family="sluice_x y"), "must match"),
        (GOOD._replace(kind="info"), "one of counter"),
        (GOOD._replace(name="sluice_y_total"), "no sample of"),
        (GOOD._replace(name="sluice_x"), "no sample of"),
        (GOOD._replace(value=float("nan")), "finite"),
        (GOOD._replace(value=float("inf")), "finite"),
        (GOOD._replace(value=-1.0), ">= 0"),
        (GOOD._replace(value=1), "finite float"),
        (GOOD._replace(labels=(("a", "b"), ("a", "c"))), "twice"),
        (GOOD._replace(labels=(("a", "x" * 300),)), "at most 256"),
        (GOOD._replace(labels=(("A b", "x"),)), "matching"),
        (GOOD._replace(labels=(("a", 1),)), "a label of"),
        (GOOD._replace(labels=tuple((f"l{i}", "") for i in range(17))), "at most 16"),
        (GOOD._replace(labels=[("a", "b")]), "tuple of pairs"),
        (GOOD._replace(documentation="x" * 2_000), "documentation"),
        (None, "MetricSample"),
        (GOOD._replace(kind="gauge", name="sluice_known"), "no sample of"),
        (
            GOOD._replace(family="sluice_known", kind="counter", name="sluice_known_total"),
            "is a gauge, not a counter",
        ),
    ],
)
def test_a_bad_push_is_refused_whole(sample: MetricSample, message: str) -> None:
    hub = MetricsHub()
    known = MetricSample("sluice_known", "gauge", "K.", "sluice_known", (), 1.0)
    hub.push(MetricsPush("r1", (known,)), 0)
    before = page_of(hub, 0)
    with pytest.raises(ValueError, match=message):
        hub.push(MetricsPush("r2", (known, sample)), 0)
    assert page_of(hub, 0) == before
    assert hub.sources == 1


def test_pushes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MetricsHub()
    with pytest.raises(ValueError, match=str(MAX_PUSH_SAMPLES)):
        hub.push(MetricsPush("r1", (GOOD,) * (MAX_PUSH_SAMPLES + 1)), 0)
    with pytest.raises(ValueError, match="source"):
        hub.push(MetricsPush("", (GOOD,)), 0)
    monkeypatch.setattr("controller.metrics.MAX_SOURCES", 1)
    hub.push(MetricsPush("r1", (GOOD,)), 0)
    with pytest.raises(ValueError, match="1 sources are known"):
        hub.push(MetricsPush("r2", (GOOD,)), 1)
    # Once the first is silent for long there is room again, and nothing of it was lost.
    hub.push(MetricsPush("r2", (GOOD,)), 1_000)
    assert page_of(hub, 1_000)["sluice_x_total", (("a", "b"),)] == 2
    monkeypatch.setattr("controller.metrics.MAX_SERIES", 1)
    with pytest.raises(ValueError, match="over 1 series"):
        hub.push(MetricsPush("r2", (GOOD, GOOD._replace(labels=()))), 1_000)


def test_a_process_that_is_known_needs_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MetricsHub()
    for source in ("r1", "r2"):
        hub.push(MetricsPush(source, (GOOD,)), 0)
    monkeypatch.setattr("controller.metrics.MAX_HELD_SAMPLES", 2)
    hub.push(MetricsPush("r2", (GOOD._replace(value=5.0),)), 1)
    assert page_of(hub, 1)["sluice_x_total", (("a", "b"),)] == GOOD.value + 5
    with pytest.raises(ValueError, match="2 samples held"):
        hub.push(MetricsPush("r3", (GOOD,)), 1)


def test_what_cannot_be_summed_is_not_pushed() -> None:
    registry = CollectorRegistry()
    Info("sluice_build", "Build.", registry=registry).info({"version": "1"})
    gauge = Gauge("sluice_odd", "Odd.", registry=registry)
    gauge.set(float("nan"))
    Counter("sluice_c", "C.", registry=registry).inc()
    assert [sample.name for sample in samples_of(registry)] == ["sluice_c_total"]


class FarSide:
    """Takes pushes, or does not."""

    def __init__(self) -> None:
        self.hub = MetricsHub()
        self.alive = True
        self.pushes = 0
        self.changed = asyncio.Event()

    async def push_metrics(self, push: MetricsPush) -> bool:
        self.pushes += 1
        self.changed.set()
        if self.alive:
            self.hub.push(push, 0)
        return self.alive

    async def until(self, pushes: int) -> None:
        async with asyncio.timeout(10):
            while self.pushes < pushes:
                self.changed.clear()
                await self.changed.wait()


async def test_the_pusher_outlives_a_dead_controller_and_a_refusal() -> None:
    far, process = FarSide(), Process("r1")
    pusher = MetricsPusher(far, process.registry, "r1", period_s=0.001)
    far.alive = False
    pusher.start()
    pusher.start()
    await far.until(3)
    assert pusher.failed >= 2
    far.alive = True
    process.requests.labels("interactive").inc(5)
    seen = far.pushes
    await far.until(seen + 2)
    assert page_of(far.hub, 0)["sluice_requests_total", INTERACTIVE] == 5
    process.requests.labels("interactive").inc(1)
    await pusher.stop()
    await pusher.stop()
    # The last push has the last count, and after it there are no more.
    assert page_of(far.hub, 0)["sluice_requests_total", INTERACTIVE] == 6
    refused = MetricsPusher(far, process.registry, "", period_s=1)
    assert not await refused.push_now()
    assert refused.failed == 1


async def test_pushes_of_one_process_do_not_overtake_each_other() -> None:
    """An older one that comes last would look like a restart, and be counted on top."""
    far, process = FarSide(), Process("r1")

    class Slow:
        """The first push takes its time on the way."""

        async def push_metrics(self, push: MetricsPush) -> bool:
            first = not far.pushes
            far.pushes += 1
            for _ in range(10 if first else 0):
                await asyncio.sleep(0)
            far.hub.push(push, 0)
            return True

    pusher = MetricsPusher(Slow(), process.registry, "r1")
    counter = process.requests.labels("interactive")
    counter.inc(3)
    periodic = asyncio.create_task(pusher.push_now())
    await asyncio.sleep(0)
    counter.inc(2)
    await pusher.push_now()  # somebody asks for the page
    await periodic
    assert page_of(far.hub, 0)["sluice_requests_total", INTERACTIVE] == 5
