"""The controller counts the loops of the routers' turns, and gives each its part."""

from __future__ import annotations

from sluice.controller.config import ControllerConfig
from sluice.scheduling.placement.loops import MIN_PROMISED, LoopTurn, LoopTurnEnd
from tests.controller.fleet import ObservedController
from tests.router.far_side import Clock

AGENT = LoopTurn(1, "agent", 7, 60.0, 10.0)


async def test_loops_that_ended_are_counted_and_teach_the_parts_of_later_ones() -> None:
    clock = Clock()
    controller = ObservedController(ControllerConfig(), clock)
    for key in range(MIN_PROMISED):
        for _ in range(2):
            part = await controller.loop_turn(AGENT._replace(key=key))
            assert part.promised is None
            clock.now_s += 1.0
            ended = LoopTurnEnd(key, part.age_s + 1.0, 1.0, True, True)
            await controller.sync(turns=(ended,))
        clock.now_s += 11.0
    part = await controller.loop_turn(AGENT._replace(key=99))
    assert (part.promised, part.part_s) == (True, 30.0)
    late = LoopTurnEnd(99, 61.0, 61.0, True, True)
    clock.now_s += 61.0
    await controller.sync(turns=(late,))
    clock.now_s += 11.0
    await controller.sync()
    text = (await controller.render_metrics()).decode()
    samples = {line for line in text.splitlines() if line.startswith("sluice_loops_total")}
    assert {line.rpartition("{")[2] for line in samples} == {
        f'admission="best-effort",class="agent",outcome="kept"}} {MIN_PROMISED}.0',
        'admission="guaranteed",class="agent",outcome="missed"} 1.0',
    }
