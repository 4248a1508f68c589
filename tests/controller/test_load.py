"""What the controller says of its pool while replicas come and go."""

from __future__ import annotations

from sluice.controller.config import ControllerConfig
from sluice.protocol.messages import MetricSample, MetricsPush
from tests.controller.fleet import PROFILE, Clock, decode_row, delta, hello, query
from tests.controller.observed import ObservedController
from tests.controller.pushes import newer_push


def make() -> tuple[ObservedController, Clock]:
    clock = Clock()
    return ObservedController(ControllerConfig(), clock), clock


def counted(source: str, stated: float, attained: float) -> MetricsPush:
    """What a router pushes of objectives."""
    labels = (("class", "standard"), ("priority", "2"))
    return newer_push(
        source,
        tuple(
            MetricSample(name, "counter", "words", f"{name}_total", labels, value)
            for name, value in (("sluice_slo_requests", stated), ("sluice_attained", attained))
        ),
    )


async def test_replicas_that_come_go_and_drain_are_counted_as_they_do() -> None:
    controller, clock = make()
    assert (await controller.load()).ready == 0
    epoch = (await controller.hello(hello("a"))).epoch
    await controller.hello(hello("b"))
    assert (await controller.load()).ready == 2
    await controller.report(delta("b", epoch, 1, draining=True))
    assert (await controller.load()).ready == 1
    await controller.goodbye("b")
    assert (await controller.load()).ready == 1
    await controller.hello(hello("c"))
    assert (await controller.load()).ready == 2
    clock.advance(100.0)
    assert (await controller.load()).ready == 0


async def test_requests_go_to_a_replica_that_came_and_to_none_that_drains() -> None:
    controller, _ = make()
    epoch = (await controller.hello(hello("a"))).epoch
    await controller.route([query(key, 2_000) for key in range(3)])
    await controller.hello(hello("b"))
    (decision,) = (await controller.route([query(10)])).decisions
    assert decision.replica_id == "b"
    await controller.report(delta("b", epoch, 1, draining=True))
    decisions = (await controller.route([query(20 + key) for key in range(5)])).decisions
    assert {each.replica_id for each in decisions} == {"a"}


async def test_demand_is_what_was_asked_for_and_what_decodes_take() -> None:
    controller, _ = make()
    await controller.hello(hello("a", [decode_row(key, 100) for key in range(4)]))
    await controller.route([query(key, 1_000) for key in range(10, 60)])
    load = await controller.load()
    work_s = PROFILE.model.work_s(1_000, 0)
    assert load.asked == 50
    assert abs(load.asked_s - 50 * work_s) < 1e-6
    assert 0 < load.unpromised < 50
    assert 0 < load.decode_share < 1
    assert load.head_room < 0.2
    assert load.ongoing == 54
    text = (await controller.render_metrics()).decode()
    assert 'sluice_asked_requests_total{role="mixed"} 50.0' in text
    assert f'sluice_unpromised_requests_total{{role="mixed"}} {load.unpromised}' in text


async def test_objectives_count_from_the_controllers_beginning() -> None:
    """A controller that was restarted hears of all that its routers had counted before: that is
    no loss of now."""
    controller, _ = make()
    await controller.push_metrics(counted("router-1", 1_000.0, 400.0))
    load = await controller.load()
    assert (load.judged, load.attained) == (0, 0)
    await controller.push_metrics(counted("router-1", 1_010.0, 409.0))
    await controller.push_metrics(counted("router-2", 5.0, 5.0))
    load = await controller.load()
    assert (load.judged, load.attained) == (10, 9)
