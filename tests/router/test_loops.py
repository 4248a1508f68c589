"""The turns of a tool loop share a deadline, whichever router they come to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.protocol.requests import EngineRequest, ResponseItem
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError
from sluice.router.request.loop import loop_of
from sluice.router.request.slo import SloReader
from sluice.router.tenancy.limits import TenantLimits
from tests.router.far_side import CHAT_BODY, Clock, Edge, FarController, FarSide, serve
from tests.router.test_admission import guaranteed

READER = SloReader(RouterConfig())
LOOP = {"id": "fix-42", "deadline_ms": 60_000}


class Routers:
    """Two routers, a controller, and a replica that takes a second for a turn."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.controller: Controller | None = None
        self.edges = [
            Edge(
                FarSide(a=self._serve),
                FarController(guaranteed()),
                clock=self.clock,
                loop_age=self._age,
            )
            for _ in range(2)
        ]

    def restart(self) -> None:
        self.controller = Controller(ControllerConfig(), self.clock)

    async def _age(self, key: int, age_s: float) -> float | None:
        if self.controller is None:
            return None
        return await self.controller.loop_age(key, age_s)

    async def _serve(
        self, side: FarSide, name: str, request: EngineRequest
    ) -> AsyncIterator[ResponseItem]:
        self.clock.now_s += 1.0
        async for item in serve(side, name, request):
            yield item

    async def turn(self, router: int, at_s: float, **slo: Any) -> tuple[float | None, float]:
        """A turn that comes this late after the begin: the end-to-end objective that it is served
        with, and the time that its answer leaves to the loop, seconds."""
        self.clock.now_s = 100.0 + at_s
        edge = self.edges[router]
        async with edge.client() as client:
            body = {**CHAT_BODY, "slo": {"class": "batch", "loop": LOOP, **slo}}
            answer: httpx.Response = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        left_ms = float(answer.headers["x-sluice-loop-remaining-ms"])
        return edge.side.calls[-1][1].slo.e2e_s, left_ms / 1000


async def test_the_deadline_counts_from_the_first_turn_at_any_router() -> None:
    routers = Routers()
    routers.restart()
    assert await routers.turn(0, 0.0) == (60.0, 59.0)
    assert await routers.turn(1, 20.0) == (40.0, 39.0)
    assert await routers.turn(0, 59.5) == (0.5, 0.0)
    # Its own objective applies where that ends earlier, and another loop has its own time.
    assert await routers.turn(0, 30.0, e2e_ms=5_000) == (5.0, 29.0)
    other = {"id": "fix-43", "deadline_ms": 9_000}
    assert await routers.turn(0, 30.0, loop=other) == (9.0, 8.0)
    # The second turn at the first router took longer than the loop had left.
    kept = [[ending.kept for ending in edge.controller.endings] for edge in routers.edges]
    assert kept == [[True, False, True, True], [True]]


async def test_a_turn_after_the_deadline_is_served_and_has_missed() -> None:
    routers = Routers()
    routers.restart()
    await routers.turn(0, 0.0)
    assert await routers.turn(1, 61.0) == (1e-6, 0.0)
    ending = routers.edges[1].controller.endings[-1]
    assert (ending.outcome, ending.missed) == ("ok", ("e2e",))


async def test_stages_end_with_the_loop() -> None:
    routers = Routers()
    routers.restart()
    await routers.turn(0, 0.0)
    stages = [{"until": {"tokens": 2}, "ttft_ms": 5_000, "e2e_ms": 90_000}, {"until": "end"}]
    assert (await routers.turn(0, 20.0, stages=stages))[0] == 40.0
    slo = routers.edges[0].side.calls[-1][1].slo
    assert [stage.e2e_s for stage in slo.stages] == [90.0, None]


async def test_a_controller_that_restarts_learns_from_the_routers() -> None:
    routers = Routers()
    routers.restart()
    await routers.turn(0, 0.0)
    routers.restart()
    assert (await routers.turn(0, 20.0))[0] == 40.0
    assert (await routers.turn(1, 30.0))[0] == 30.0


async def test_without_a_controller_each_router_counts_by_what_it_has_seen() -> None:
    routers = Routers()
    assert (await routers.turn(0, 0.0))[0] == 60.0
    assert (await routers.turn(0, 20.0))[0] == 40.0
    assert (await routers.turn(1, 30.0))[0] == 60.0


def test_loops_of_different_owners_are_distinct() -> None:
    stated = READER.read({"slo": {"loop": LOOP}}, []).loop
    loops = [loop_of(stated, owner) for owner in ("acme", "acme", "other")]
    assert loops[0] == loops[1] != loops[2]


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ("fix", "slo.loop must be an object with id and deadline_ms"),
        ({"id": "fix"}, "slo.loop must be an object with id and deadline_ms"),
        ({**LOOP, "more": 1}, "slo.loop must be an object with id and deadline_ms"),
        ({**LOOP, "id": ""}, "slo.loop.id must be a string of 1 to 512 characters, got ''"),
        ({**LOOP, "id": "x" * 513}, "slo.loop.id must be a string of 1 to 512 characters"),
        ({**LOOP, "id": 7}, "slo.loop.id must be a string of 1 to 512 characters, got 7"),
        ({**LOOP, "deadline_ms": 0}, "slo.loop.deadline_ms must be a number of milliseconds"),
        ({**LOOP, "deadline_ms": True}, "slo.loop.deadline_ms must be a number of milliseconds"),
        ({**LOOP, "deadline_ms": float("nan")}, "slo.loop.deadline_ms must be a number"),
        ({**LOOP, "deadline_ms": 86_400_001}, "from 0.001 to 86400000, got 86400001"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(loop: object, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        READER.read({"slo": {"loop": loop}}, [])
    assert caught.value.reason.status == 400
    assert message in str(caught.value)


def test_a_deadline_is_held_to_the_limits_of_its_key() -> None:
    limits = TenantLimits(min_e2e_ms=90_000)
    found = READER.read({"slo": {"loop": LOOP}}, [], limits)
    assert found.loop is not None
    assert (found.loop.deadline_ms, found.clamped) == (90_000, {"deadline_ms": "90000"})
    strict = limits.model_copy(update={"beyond": "refuse"})
    with pytest.raises(ApiError, match=r"slo\.loop\.deadline_ms must be at least 90000 ms") as no:
        READER.read({"slo": {"loop": LOOP}}, [], strict)
    assert no.value.reason.status == 403
