"""What the controller says is left for batches."""

from __future__ import annotations

import pytest

from sluice.controller.config import ControllerConfig
from sluice.scheduling.placement.windows import SPANS_S
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import Clock, ObservedController, hello, newer_push

LINE = RouteQuery(1, SLO(service_class="batch"), 100, output_tokens=50)
CHAT = RouteQuery(1, SLO(ttft_s=10.0, tpot_s=1.0), 5_000, output_tokens=1)


async def test_an_idle_replica_leaves_its_time_and_promised_prompts_take_theirs() -> None:
    clock = Clock()
    controller = ObservedController(ControllerConfig(), clock)
    assert await controller.leftover(LINE, 8) is None
    for second in range(60):
        # The same replica, which is new each second: nothing of it waits.
        await controller.hello(hello("a", seq=second))
        if second >= 30:
            await controller.route([CHAT._replace(key=second + 1)])
        await controller.push_metrics(newer_push("router"))
        clock.advance(1.0)
    found = await controller.leftover(LINE, 8)
    assert found is not None
    # A prompt of 5,000 tokens takes half a second of each in the second half minute.
    assert found.spare[1] == pytest.approx(0.5 * SPANS_S[1], rel=0.05)
    # 100 tokens of prompt in 4/9 of each step, and 50 with 1/8 of a step's fixed 4 ms.
    assert found.line_s == pytest.approx(2.25 * 0.01 + 50 * (0.000225 + 0.0005), rel=0.05)


async def test_longer_lines_take_more() -> None:
    clock = Clock()
    controller = ObservedController(ControllerConfig(), clock)
    for second in range(12):
        await controller.hello(hello("a", seq=second))
        await controller.push_metrics(newer_push("router"))
        clock.advance(1.0)
    taken = []
    for prompt, output in ((100, 50), (1_000, 50), (1_000, 500)):
        found = await controller.leftover(
            LINE._replace(prompt_tokens=prompt, output_tokens=output), 8
        )
        assert found is not None
        taken.append(found.line_s)
    assert taken == sorted(taken)
    assert len(set(taken)) == 3
