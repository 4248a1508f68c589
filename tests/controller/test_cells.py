"""Several cells as the observer reads them: sums on one clock, over restarts of a cell."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.cells import Cells
from sluice.controller.observability.observer import Observer
from sluice.controller.transport.channel import NoAnswerError
from sluice.protocol.messages import FaultNotice
from sluice.scheduling.fleet.breaker import ReplicaFault
from tests.controller.fleet import Clock, hello, query, waiting_row

CONFIG = ControllerConfig(cells=2, policy="round_robin")


async def counted(observer: Observer) -> dict[str, float]:
    """The counters of the page without labels, summed up, and the replicas that are fresh."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families((await observer.render_metrics()).decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def test_the_observer_adds_up_what_the_cells_say_on_one_clock() -> None:
    # Cells on other hosts have other clocks.
    clocks = Clock(1_000.0), Clock(50.0)
    cells = [Controller(CONFIG, clock) for clock in clocks]
    observer = Observer(Cells(cells), CONFIG, clocks[0])
    await cells[0].hello(hello("a"))
    await cells[1].hello(hello("b", [waiting_row(1, 100)]))
    (first,) = (await cells[0].route([query(1)._replace(request_id="first")])).decisions
    for clock in clocks:
        clock.advance(0.25)
    (second,) = (await cells[1].route([query(2)._replace(request_id="second")])).decisions
    assert (first.replica_id, second.replica_id) == ("a", "b")
    told = await observer.decisions(10)
    assert told is not None
    assert [(each["request_id"], each["age_ms"]) for each in told] == [
        ("second", 0.0),
        ("first", 250.0),
    ]
    told = await observer.decisions(1)
    assert told is not None and [each["request_id"] for each in told] == ["second"]
    await cells[1].faulted(1, [FaultNotice("b", ReplicaFault.FAILED)])
    for clock in clocks:
        clock.advance(0.5)
    view = await observer.snapshot()
    assert view is not None
    assert [each["replica_id"] for each in view["replicas"]] == ["a", "b"]
    assert view["reservations"] == 2
    assert view["decision_ms"]["count"] == 2
    load = await observer.load()
    assert load is not None
    assert (load.ready, load.asked, load.ongoing) == (2, 2, 3)
    page = await counted(observer)
    assert page["sluice_decisions_total"] == page["sluice_decision_seconds_count"] == 2
    assert page["sluice_reports_total"] == 2
    assert page["sluice_replicas"] == 2


async def test_the_sums_do_not_fall_when_a_cell_restarts() -> None:
    clock = Clock()
    cells = [Controller(CONFIG, clock) for _ in range(2)]
    observer = Observer(Cells(cells), CONFIG, clock)
    for place, cell in enumerate(cells):
        await cell.hello(hello(f"r{place}"))
        await cell.route([query(key) for key in range(10)])
    assert (await counted(observer))["sluice_decisions_total"] == 20
    for key in range(3):  # three restarts
        cells[1] = Controller(CONFIG, clock)
        await cells[1].hello(hello("r1"))
        await cells[1].route([query(key)])
        page = await counted(observer)
        assert page["sluice_decisions_total"] == page["sluice_decision_seconds_count"] == 21 + key
        assert page["sluice_replicas"] == 2


class Gone(Controller):
    async def figures(self) -> object:  # type: ignore[override]
        raise NoAnswerError("unavailable")


async def test_without_one_cell_there_is_no_sum() -> None:
    clock = Clock()
    observer = Observer(Cells([Controller(CONFIG, clock), Gone(CONFIG, clock)]), CONFIG, clock)
    page = await counted(observer)
    assert page["sluice_controller_up"] == 0 and "sluice_decisions_total" not in page


async def test_a_cell_says_how_much_slack_it_has_and_the_only_one_does_not() -> None:
    for cells, known in ((1, False), (2, True)):
        controller = Controller(ControllerConfig(cells=cells), Clock())
        await controller.hello(hello("a"))
        reply = await controller.route([query(1)])
        assert (reply.slack_s is not None) is known


@pytest.mark.parametrize("cells", [0, 17])
def test_the_number_of_cells_is_bounded(cells: int) -> None:
    with pytest.raises(ValueError, match="cells"):
        ControllerConfig(cells=cells)
