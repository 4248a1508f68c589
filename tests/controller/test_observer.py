"""The observer while the deciding actor answers, and while it does not."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.instruments import NAMES, families
from sluice.controller.observability.metrics import KEPT_S
from sluice.controller.observability.observer import SETTLING_S, Observer
from sluice.controller.observability.readings import AT_ONCE
from sluice.controller.observability.recent_decisions import DECISION_BUCKETS_S, Counters
from sluice.controller.transport.channel import NoAnswerError
from sluice.protocol.messages import MetricSample, MetricsPush
from sluice.scheduling.request.job import PLACED, RouteDecision
from tests.controller.fleet import Clock, ObservedController, hello, newer_push, query


class Gone:
    """A deciding actor that does not answer."""

    def __getattr__(self, _: str) -> Any:
        async def ask(*_: object) -> Any:
            raise NoAnswerError("unavailable")

        return ask


def push(number: float, kind: str = "counter") -> MetricsPush:
    name = "sluice_x_total" if kind == "counter" else "sluice_x"
    return newer_push("router", (MetricSample("sluice_x", kind, "X.", name, (), number),))


async def page(observer: Observer) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families((await observer.render_metrics()).decode())
        for sample in family.samples
    }


async def test_without_the_controller_the_page_has_what_was_pushed() -> None:
    clock = Clock()
    observer = Observer(Gone(), ControllerConfig(), clock)
    await observer.push_metrics(push(3.0))
    clock.advance(SETTLING_S)
    assert await page(observer) == {
        "sluice_x_total": 3.0,
        "sluice_controller_up": 0.0,
        "sluice_metrics_refused_total": 0.0,
    }


async def test_the_controllers_last_metrics_stand_while_it_does_not_answer() -> None:
    clock, age = Clock(), "sluice_controller_metrics_age_seconds"
    controller = Controller(ControllerConfig(), clock)
    await controller.hello(hello("a"))
    observer = Observer(controller, ControllerConfig(), clock)

    def replicas(found: bytes) -> list[bytes]:
        return [line for line in found.splitlines() if line.startswith(b"sluice_replica")]

    shown = replicas(await observer.render_metrics())
    found = await page(observer)
    assert shown and (found["sluice_controller_up"], found[age]) == (1, 0)
    observer._deciding = Gone()
    clock.advance(KEPT_S)
    assert replicas(await observer.render_metrics()) == shown
    found = await page(observer)
    assert (found["sluice_controller_up"], found[age]) == (0, KEPT_S)
    clock.advance(0.1)
    assert replicas(await observer.render_metrics()) == [] and age not in await page(observer)
    observer._deciding = controller
    assert (await page(observer))[age] == 0


async def test_without_the_controller_nothing_is_said_of_its_state() -> None:
    observer = Observer(Gone(), ControllerConfig())
    assert await observer.snapshot() is None
    assert await observer.decisions(5) is None
    assert await observer.load() is None


async def test_another_controller_is_shown_with_the_metrics_of_before() -> None:
    """The controller was restarted; the observer was not."""
    clock = Clock()
    first, second = (Controller(ControllerConfig(), clock) for _ in range(2))
    await first.hello(hello("a"))
    observer = Observer(first, ControllerConfig(), clock)
    await observer.push_metrics(push(3.0))
    clock.advance(SETTLING_S)
    before = await observer.snapshot()
    observer._deciding = second
    after = await observer.snapshot()
    assert before is not None and after is not None
    assert (len(before["replicas"]), len(after["replicas"])) == (1, 0)
    assert before["epoch"] != after["epoch"]
    assert (await page(observer))["sluice_x_total"] == 3


async def test_a_restarted_observer_has_the_decisions_and_soon_the_metrics() -> None:
    clock = Clock()
    controller = ObservedController(ControllerConfig(), clock)
    await controller.hello(hello("a"))
    await controller.route([query(1)])
    await controller.push_metrics(push(3.0))
    clock.advance(60)
    again = Observer(controller, ControllerConfig(), clock)
    assert await again.decisions(5) == await controller.decisions(5)
    early = await page(again)
    assert early["sluice_decisions_total"] >= 0 and "sluice_x_total" not in early
    await again.push_metrics(push(4.0))
    # A scraper would count the totals of processes that push later as new.
    assert "sluice_x_total" not in await page(again)
    clock.advance(SETTLING_S)
    assert (await page(again))["sluice_x_total"] == 4


async def test_what_the_observer_refuses_is_counted_by_the_observer_alone() -> None:
    """The count of reports is the controller's: it would fall with an observer that restarts."""
    controller = ObservedController(ControllerConfig(), Clock())
    with pytest.raises(ValueError, match="capacity"):
        await controller.hello(hello("c", capacity=0))
    await controller.observer.push_metrics(push(-1.0))
    with pytest.raises(ValueError, match="source"):
        await controller.observer.push_metrics(push(1.0)._replace(source=""))
    text = (await controller.render_metrics()).decode()
    assert 'sluice_reports_total{outcome="refused"} 1.0' in text
    assert 'sluice_metrics_refused_total{part="push"} 1.0' in text
    assert 'sluice_metrics_refused_total{part="sample"} 1.0' in text


async def test_a_bad_sample_does_not_stop_the_history() -> None:
    clock = Clock()
    observer = Observer(Controller(ControllerConfig(), clock), ControllerConfig(), clock)
    family, labels = "sluice_ttft_seconds", (("class", "chat"),)
    sound = MetricSample(family, "histogram", "T.", f"{family}_count", labels, 3.0)
    bad = [sound._replace(name=f"{family}_bucket", labels=(*labels, ("le", "x")))]
    bad += [bad[0]._replace(labels=labels), sound._replace(value=float("nan"))]
    await observer.push_metrics(newer_push("router", (sound, *bad)))
    clock.advance(SETTLING_S)
    found = await page(observer)
    assert (found["sluice_ttft_seconds_count"], found["sluice_metrics_refused_total"]) == (3, 3)
    assert await observer.snapshot() is not None and await observer.load() is not None


async def test_a_large_fleet_is_read_in_parts_that_let_decisions_through() -> None:
    controller = Controller(ControllerConfig(), Clock())
    for index in range(3 * AT_ONCE):
        await controller.hello(hello(f"{index}"))
    reading = controller.detail()
    reading.send(None)  # it waits, and the rest is read later
    assert (await controller.route([query(1)])).decisions[0].reason == PLACED
    await controller.goodbye("20")
    with pytest.raises(StopIteration) as stop:
        while True:
            reading.send(None)
    assert set(stop.value.value.replicas) == {str(n) for n in range(3 * AT_ONCE)} - {"20"}


async def test_the_names_of_its_own_families_are_those_that_it_writes() -> None:
    controller = Controller(ControllerConfig(), Clock())
    await controller.hello(hello("a"))
    assert {each.name for each in families(await controller.figures(), "p")} < NAMES


def test_decisions_are_counted_by_outcome_and_duration() -> None:
    counters = Counters()
    for seconds in (DECISION_BUCKETS_S[0], 0.00002, 1.0):
        counters.decided(RouteDecision("a", PLACED), seconds)
    before = counters.read()
    counters.decided(RouteDecision("a", PLACED), 1.0)
    assert before.decisions[PLACED] == 3
    assert (before.buckets[0], before.buckets[1], before.buckets[-1]) == (1, 1, 1)
    assert sum(before.buckets) == 3
    assert before.seconds == pytest.approx(1.00003)
