from __future__ import annotations

import asyncio
import re
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.observability.metrics import (
    MAX_PUSH_SAMPLES,
    MetricsPusher,
    samples_of,
    text_of,
)
from sluice.controller.observability.metrics_hub import SOURCE_TTL_S, MetricsHub
from sluice.protocol.messages import MetricSample, MetricsPush
from tests.controller.fleet import newer_push

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Process:
    """A process with real metrics of its own."""

    def __init__(self, name: str, incarnation: int = 1) -> None:
        self.name = name
        self.incarnation = incarnation
        self.registry = CollectorRegistry()
        self.requests = Counter("sluice_requests", "Requests.", ["class"], registry=self.registry)
        self.live = Gauge("sluice_live", "Live requests.", registry=self.registry)
        self.seconds = Histogram(
            "sluice_ttft_seconds", "TTFT.", buckets=(0.1, 1.0), registry=self.registry
        )

    def push(self) -> MetricsPush:
        return newer_push(self.name, samples_of(self.registry), self.incarnation)


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


def test_counts_that_were_forgotten_are_not_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.controller.observability.metrics_hub.MAX_SILENT_SAMPLES", 0)
    hub = MetricsHub()
    process = Process("r1", incarnation=5)
    process.requests.labels("interactive").inc(10)
    hub.push(process.push(), 0)
    hub.expire(1_000)
    assert hub._held == hub._silent_held == 0 and not hub._silent and not hub._newest
    process.live.set(4)
    assert not hub.push(process.push(), 2_000)
    assert page_of(hub, 2_000)["sluice_requests_total", INTERACTIVE] == 10
    process.requests.labels("interactive").inc(2)
    hub.push(process.push(), 2_001)
    page = page_of(hub, 2_001)
    assert page["sluice_requests_total", INTERACTIVE] == 12
    assert page["sluice_live", ()] == 4
    # One that started later is a new one.
    later = Process("r2", incarnation=6)
    later.requests.labels("interactive").inc(3)
    assert hub.push(later.push(), 2_002)
    assert page_of(hub, 2_002)["sluice_requests_total", INTERACTIVE] == 15


def test_no_value_of_an_incarnation_falls() -> None:
    hub = MetricsHub()
    for value in (5.0, 3.0, 6.0):
        hub.push(newer_push("r1", (GOOD._replace(value=value),)), 0)
        assert page_of(hub, 0)["sluice_x_total", (("a", "b"),)] >= 5
    assert page_of(hub, 0)["sluice_x_total", (("a", "b"),)] == 6


COUNTED = MetricSample("sluice_x", "counter", "X.", "sluice_x_total", (), 0.0)
SHOWN = MetricSample("sluice_y", "gauge", "Y.", "sluice_y", (), 0.0)
STARTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=3)


@st.composite
def deliveries(draw: st.DrawFn) -> list[tuple[float, MetricsPush]]:
    """What arrives, and when, of the pushes of some processes that start one to three times:
    each push any number of times, in any order."""
    pushes = []
    for name, starts in enumerate(draw(st.lists(STARTS, min_size=1, max_size=3))):
        for incarnation, steps in enumerate(starts):
            for number, counted in enumerate(accumulate(steps), 1):
                values = (
                    COUNTED._replace(value=float(counted)),
                    SHOWN._replace(value=number + 0.5),
                )
                pushes.append(MetricsPush(f"r{name}", incarnation, number, values))
    arrivals = draw(
        st.lists(st.tuples(st.sampled_from([0, 1, 20, 1_000]), st.sampled_from(pushes)))
    )
    times = accumulate(wait_s for wait_s, _ in arrivals)
    return list(zip(times, (push for _, push in arrivals), strict=True))


def newest_of(arrived: list[MetricsPush]) -> dict[tuple[str, int], MetricsPush]:
    """The newest push of each incarnation."""
    ordered = sorted(arrived, key=lambda push: push.number)
    return {(push.source, push.incarnation): push for push in ordered}


@given(deliveries())
def test_sums_are_of_the_last_values_of_each_incarnation(
    arriving: list[tuple[float, MetricsPush]],
) -> None:
    """Whatever pushes are lost, repeated and reordered, and however long a source is silent."""
    hub = MetricsHub()
    counted, joined = 0.0, 0.0
    for index, (now_s, push) in enumerate(arriving):
        if hub.push(push, now_s):
            joined += push.samples[0].value
        known = newest_of([push for _, push in arriving[: index + 1]])
        page = page_of(hub, now_s)
        assert page["sluice_x_total", ()] == sum(p.samples[0].value for p in known.values())
        assert page["sluice_x_total", ()] >= max(counted, joined)
        counted = page["sluice_x_total", ()]
        assert hub._held == sum(len(source.values) for source in hub._sources.values())
        assert hub._silent_held == sum(len(source.values) for source in hub._silent.values())


@given(deliveries())
def test_gauges_are_those_of_the_newest_incarnation(
    arriving: list[tuple[float, MetricsPush]],
) -> None:
    hub = MetricsHub()
    for _, push in arriving:
        hub.push(push, 0)
    newest = newest_of([push for _, push in arriving])
    shown = {name: newest[name, start].samples[1].value for name, start in sorted(newest)}
    assert page_of(hub, 0).get(("sluice_y", ()), 0.0) == sum(shown.values())


@given(deliveries(), st.integers(0, 3))
def test_a_small_memory_never_counts_twice(
    arriving: list[tuple[float, MetricsPush]], most: int
) -> None:
    """No push is under way for as long as it takes until its source is forgotten."""
    newest: dict[tuple[str, int], tuple[float, MetricsPush]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sluice.controller.observability.metrics_hub.MAX_SILENT_SAMPLES", most)
        hub, counted = MetricsHub(), 0.0
        for now_s, push in arriving:
            at_s, last = newest.get((push.source, push.incarnation), (now_s, None))
            if last is None or push.number > last.number:
                newest[push.source, push.incarnation] = (now_s, push)
            elif now_s - at_s >= SOURCE_TTL_S:
                continue
            hub.push(push, now_s)
            total = page_of(hub, now_s)["sluice_x_total", ()]
            assert counted <= total <= sum(p.samples[0].value for _, p in newest.values())
            assert hub._silent_held <= most
            counted = total


def test_a_counter_that_is_not_shown_for_once_is_not_counted_twice() -> None:
    hub = MetricsHub()
    process = Process("r1")
    process.requests.labels("interactive").inc(10)
    hub.push(process.push(), 0)
    hub.push(newer_push("r1", ()), 1)
    assert page_of(hub, 1)["sluice_requests_total", INTERACTIVE] == 10
    process.requests.labels("interactive").inc(1)
    hub.push(process.push(), 2)
    assert page_of(hub, 2)["sluice_requests_total", INTERACTIVE] == 11


def test_a_dead_process_leaves_its_counts_and_takes_its_gauges() -> None:
    hub = MetricsHub()
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
    assert page_of(hub, 650)["sluice_requests_total", INTERACTIVE] == 11
    assert hub.sources == 0
    assert hub._held == 0 and not hub._holders


def test_gauges_of_replicas_do_not_collide() -> None:
    hub = MetricsHub()
    for name, value in (("a", 1.0), ("b", 2.0)):
        sample = SHOWN._replace(labels=(("replica", name),), value=value)
        hub.push(newer_push(f"replica-{name}", (sample,)), 0)
    page = page_of(hub, 0)
    assert page["sluice_y", (("replica", "a"),)] == 1
    assert page["sluice_y", (("replica", "b"),)] == 2
    # A series that a process no longer shows goes.
    hub.push(newer_push("replica-a", ()), 1)
    assert ("sluice_y", (("replica", "a"),)) not in page_of(hub, 1)


GOOD = MetricSample("sluice_x", "counter", "X.", "sluice_x_total", (("a", "b"),), 1.0)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (GOOD._replace(family="other_x"), "family: expected .* matching"),
        (GOOD._replace(family="sluice_x y"), "family: expected .* matching"),
        (GOOD._replace(kind="info"), "kind: expected .* matching"),
        (GOOD._replace(name="sluice_y_total"), "no sample of"),
        (GOOD._replace(name="sluice_x"), "no sample of"),
        (GOOD._replace(value=float("nan")), "finite"),
        (GOOD._replace(value=float("inf")), "finite"),
        (GOOD._replace(value=-1.0), ">= 0"),
        (GOOD._replace(value=1), "finite float"),
        (GOOD._replace(labels=(("a", "b"), ("a", "c"))), "twice"),
        (GOOD._replace(labels=(("a", "x" * 300),)), "length <= 256"),
        (GOOD._replace(labels=(("A b", "x"),)), "labels.* matching"),
        (GOOD._replace(labels=(("a", 1),)), "expected .str."),
        (GOOD._replace(labels=tuple((f"l{i}", "") for i in range(17))), "length <= 16"),
        (GOOD._replace(labels=[("a", "b")]), "unhashable"),
        (GOOD._replace(documentation="x" * 2_000), "documentation"),
        (None, "MetricSample"),
        (GOOD._replace(kind="gauge", name="sluice_known"), "no sample of"),
        (
            GOOD._replace(family="sluice_known", kind="counter", name="sluice_known_total"),
            "is a gauge, not a counter",
        ),
    ],
)
def test_a_bad_sample_costs_no_other(
    sample: MetricSample, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub = MetricsHub()
    known = MetricSample("sluice_known", "gauge", "K.", "sluice_known", (), 1.0)
    hub.push(newer_push("r1", (known,)), 0)
    for pushes in (1, 2):
        hub.push(newer_push("r2", (known, sample, COUNTED._replace(value=2.0))), 0)
        assert page_of(hub, 0) == {("sluice_known", ()): 2, ("sluice_x_total", ()): 2}
        assert hub.skipped == pushes
    assert hub.sources == 2
    assert len(caplog.records) == 1  # not one for each push
    assert re.search(message, caplog.text)


def test_a_counter_that_turns_bad_keeps_its_value() -> None:
    hub = MetricsHub()
    for value in (3.0, -1.0, float("nan"), 4.0):
        hub.push(newer_push("r1", (GOOD._replace(value=value), SHOWN._replace(value=value))), 0)
        assert page_of(hub, 0)["sluice_x_total", (("a", "b"),)] == (3 if value != 4 else 4)
    assert (hub.skipped, hub._held) == (3, 2)


def test_the_log_of_bad_samples_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    hub = MetricsHub()
    bad = [GOOD._replace(name=f"sluice_x_{number}") for number in range(1_000)]
    hub.push(newer_push("r1", tuple(bad)), 0)
    assert hub.skipped == 1_000 > len(caplog.records)


SAMPLES = st.tuples(
    st.sampled_from(["sluice_a", "sluice_b", "other"]),
    st.sampled_from(["counter", "gauge", "histogram", "info"]),
    st.sampled_from(["_total", "", "_bucket", "_sum", "_count"]),
    st.sampled_from([(), (("le", "1"),), (("le", "x"),), [], None]),
    st.sampled_from([0.0, 1.5, 3.0, -1.0, float("nan"), float("inf"), None, 2]),
).map(lambda each: MetricSample(*each[:2], "X.", each[0] + each[2], *each[3:]))


COUNT = MetricSample("sluice_a", "counter", "X.", "sluice_a_total", (), 0.0)


@given(st.lists(st.lists(SAMPLES, max_size=6), max_size=6))
@example([[COUNT._replace(kind="gauge", name="sluice_a"), COUNT], [COUNT]])  # the kind stays
def test_sound_samples_are_shown_and_no_counter_falls_whatever_else_is_pushed(
    pushed: list[list[MetricSample]],
) -> None:
    hub, counts = MetricsHub(), Page()
    for samples in pushed:
        hub.push(newer_push("r1", tuple(samples)), 0)
        page = page_of(hub, 0)
        kinds = {each.name: each.type for each in hub.families(0)}
        for key, value in counts.items():
            assert page[key] >= value
        counts = {
            key: value
            for key, value in page.items()
            if kinds.get(key[0].removesuffix("_total"), "") != "gauge"
        }
        for each in samples:
            alone = MetricsHub()
            alone.push(newer_push("r1", (each,)), 0)
            shown = [*page_of(alone, 0)]
            if shown and kinds.get(each.family) == each.kind:
                assert shown[0] in page


def test_pushes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MetricsHub()
    hub.push(newer_push("r1", (GOOD,) * (MAX_PUSH_SAMPLES + 1)), 0)
    assert hub.skipped == 1
    with pytest.raises(ValueError, match="source"):
        hub.push(newer_push("", (GOOD,)), 0)
    monkeypatch.setattr("sluice.controller.observability.metrics_hub.MAX_SOURCES", 1)
    hub.push(newer_push("r1", (GOOD,)), 0)
    with pytest.raises(ValueError, match="1 sources are known"):
        hub.push(newer_push("r2", (GOOD,)), 1)
    # Once the first is silent for long there is room again, and nothing of it was lost.
    hub.push(newer_push("r2", (GOOD,)), 1_000)
    assert page_of(hub, 1_000)["sluice_x_total", (("a", "b"),)] == 2
    monkeypatch.setattr("sluice.controller.observability.metrics_hub.MAX_SERIES", 1)
    hub.push(newer_push("r2", (GOOD, GOOD._replace(labels=()))), 1_001)
    assert (len(page_of(hub, 1_001)), hub.skipped) == (1, 2)


def test_a_process_that_is_known_needs_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MetricsHub()
    for source in ("r1", "r2"):
        hub.push(newer_push(source, (GOOD,)), 0)
    monkeypatch.setattr("sluice.controller.observability.metrics_hub.MAX_HELD_SAMPLES", 2)
    hub.push(newer_push("r2", (GOOD._replace(value=5.0),)), 1)
    assert page_of(hub, 1)["sluice_x_total", (("a", "b"),)] == GOOD.value + 5
    hub.push(newer_push("r3", (GOOD,)), 1)
    assert page_of(hub, 1)["sluice_x_total", (("a", "b"),)] == GOOD.value + 5
    assert hub.skipped == 1


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
        async with asyncio.timeout(120):
            while self.pushes < pushes:
                self.changed.clear()
                await self.changed.wait()


async def test_the_pusher_outlives_a_dead_controller_and_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.controller.observability.metrics.PUSH_PERIOD_S", 0.001)
    far, process = FarSide(), Process("r1")
    pusher = MetricsPusher(far.push_metrics, process.registry, "r1")
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
    refused = MetricsPusher(far.push_metrics, process.registry, "")
    assert not await refused.push_now()
    assert refused.failed == 1


async def test_pushes_of_one_process_do_not_overtake_each_other() -> None:
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

    pusher = MetricsPusher(Slow().push_metrics, process.registry, "r1")
    counter = process.requests.labels("interactive")
    counter.inc(3)
    periodic = asyncio.create_task(pusher.push_now())
    await asyncio.sleep(0)
    counter.inc(2)
    await pusher.push_now()  # somebody asks for the page
    await periodic
    assert page_of(far.hub, 0)["sluice_requests_total", INTERACTIVE] == 5


async def test_a_push_that_timed_out_and_arrives_after_a_newer_one_is_dropped() -> None:
    """The caller gave up on it, but it was on its way: the counts must not double."""
    process, hub = Process("r1"), MetricsHub()
    delayed: list[MetricsPush] = []

    class Network:
        """Delivers the first push too late for the caller, who reads that as a failure."""

        async def push_metrics(self, push: MetricsPush) -> bool:
            if not delayed:
                delayed.append(push)
                return False
            hub.push(push, 0)
            return True

    pusher = MetricsPusher(Network().push_metrics, process.registry, "r1")
    process.requests.labels("interactive").inc(120)
    process.live.set(7)
    assert not await pusher.push_now()
    process.requests.labels("interactive").inc(1)
    process.live.set(2)
    assert await pusher.push_now()
    hub.push(delayed[0], 0)
    assert await pusher.push_now()
    page = page_of(hub, 0)
    assert page["sluice_requests_total", INTERACTIVE] == 121
    assert page["sluice_live", ()] == 2
