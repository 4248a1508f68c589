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
from sluice.scheduling.placement.loops import LoopPart, LoopTurn, LoopTurnEnd
from sluice.scheduling.request.job import RouteDecision, Tier
from tests.router.far_side import CHAT_BODY, Clock, Edge, FarController, FarSide, serve
from tests.router.test_admission import guaranteed

READER = SloReader(RouterConfig())
LOOP = {"id": "fix-42", "deadline_ms": 60_000}


class Routers:
    """Two routers, a controller, and a replica that takes a second for a turn."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ended: list[LoopTurnEnd] = []
        self.controller: Controller | None = None
        self.edges = [
            Edge(
                FarSide(a=self._serve),
                FarController(guaranteed()),
                clock=self.clock,
                loop_service=self,
            )
            for _ in range(2)
        ]

    def restart(self) -> None:
        self.controller = Controller(ControllerConfig(), self.clock)

    async def loop_turn(self, turn: LoopTurn) -> LoopPart | None:
        return None if self.controller is None else await self.controller.loop_turn(turn)

    def loop_ended(self, ended: LoopTurnEnd) -> None:
        self.ended.append(ended)

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


CLASSES = {
    "agent": {"loop": {"deadline_ms": 60_000, "idle_ms": 10_000}},
    "strict": {"loop": {"deadline_ms": 60_000}, "when_unattainable": "reject"},
    "chat": {"ttft_ms": 500},
}
CONFIG = RouterConfig.model_validate({"classes": CLASSES, "default_class": "agent"})


class OneRouter:
    """A router with classes of loops, and what its controller says of each turn."""

    def __init__(self, tier: Tier | None = Tier.GUARANTEED) -> None:
        self.clock = Clock()
        self.turns: list[LoopTurn] = []
        self.ended: list[LoopTurnEnd] = []
        self.part = LoopPart(0.0, 1, 20.0, True, 30.0)
        decision = guaranteed() if tier is Tier.GUARANTEED else RouteDecision("a", "placed", tier)
        self.edge = Edge(
            FarSide(a=serve),
            FarController(decision),
            CONFIG,
            clock=self.clock,
            loop_service=self,
        )

    async def loop_turn(self, turn: LoopTurn) -> LoopPart | None:
        self.turns.append(turn)
        return self.part

    def loop_ended(self, ended: LoopTurnEnd) -> None:
        self.ended.append(ended)

    async def turn(
        self, session: str | None = "s1", name: str | None = None, **slo: Any
    ) -> httpx.Response:
        headers = {"x-sluice-session": session} if session else {}
        return await self.send(headers, **slo, **({"class": name} if name else {}))

    async def send(self, headers: dict[str, str], **slo: Any) -> httpx.Response:
        body = {**CHAT_BODY, "slo": slo}
        async with self.edge.client() as client:
            return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_the_turns_of_a_session_are_a_loop_of_their_class() -> None:
    router = OneRouter()
    answer = await router.turn()
    assert answer.headers["x-sluice-loop-admission"] == "guaranteed"
    assert answer.headers["x-sluice-loop-remaining-ms"] == "60000.0"
    assert answer.headers["x-sluice-promised-e2e-ms"] == "20000.0"
    (turn,) = router.turns
    assert (turn.service_class, turn.deadline_s, turn.idle_s) == ("agent", 60.0, 10.0)
    assert (turn.age_s, turn.turns, turn.promised, turn.stated) == (0.0, 0, None, False)
    (ended,) = router.ended
    assert ended == LoopTurnEnd(turn.key, 0.0, 0.0, True, True)
    await router.turn("s2")
    assert router.turns[1].key != turn.key
    await router.turn("s1", "strict")
    assert router.turns[2].key != turn.key, "a loop has one class"
    # Without a session, and in a class without loops, there is none.
    for answer in (await router.turn(None), await router.turn("s1", "chat")):
        assert "x-sluice-loop-remaining-ms" not in answer.headers
    assert len(router.turns) == len(router.ended) == 3


async def test_the_loop_that_a_body_states_goes_before_its_class() -> None:
    router = OneRouter()
    await router.turn(loop=LOOP | {"deadline_ms": 9_000})
    (turn,) = router.turns
    assert (turn.deadline_s, turn.idle_s, turn.stated) == (9.0, 10.0, True)


async def test_a_loop_ends_with_its_session_not_with_a_sub_agents() -> None:
    router = OneRouter()
    child = {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "root"}
    root = {"x-dynamo-session-id": "root"}
    for headers in (child, root, root):
        await router.send(headers | {"x-dynamo-session-final": "true"})
    assert [ended.final for ended in router.ended] == [False, True, True]
    assert len({ended.key for ended in router.ended}) == 1
    # The router that served its last turn knows that the next one begins another.
    assert [(turn.turns, turn.promised) for turn in router.turns][2] == (0, None)
    await router.send({"x-dynamo-session-final": "true"}, loop=LOOP)
    assert router.ended[-1].final


async def test_a_router_tells_what_it_knows_of_a_loop() -> None:
    router = OneRouter()
    router.part = LoopPart(7.0, 4, 5.0, True, 30.0)
    await router.turn()
    router.clock.now_s += 2.0
    await router.turn()
    turn = router.turns[1]
    assert (turn.age_s, turn.turns, turn.promised) == (9.0, 4, True)


async def test_a_turns_log_line_says_what_is_left_of_its_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = OneRouter()
    router.part = LoopPart(62.5, 4, 5.0, True, 30.0)
    with caplog.at_level("INFO", "sluice.router"):
        await router.turn()
        await router.turn(None)
    first, second = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert (first["loop_turn"], first["loop_promised"], first["loop_left_ms"]) == (4, True, -2500)
    assert "loop_turn" not in second


async def test_the_turns_of_a_loop_that_cannot_be_promised_are_best_effort() -> None:
    router = OneRouter(Tier.BEST_EFFORT)
    router.part = LoopPart(0.0, 1, 60.0, False, 90.0)
    answer = await router.turn()
    assert answer.headers["x-sluice-loop-admission"] == "best-effort"
    assert router.edge.controller.queries[-1].tiers == {Tier.BEST_EFFORT}
    assert router.ended[0].promised is False


async def test_a_class_that_rejects_refuses_a_loop_that_cannot_be_promised() -> None:
    router = OneRouter()
    router.part = LoopPart(0.0, 1, 60.0, False, 90.0)
    answer = await router.turn(name="strict")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "10")
    error = answer.json()["error"]
    assert error["code"] == "slo_unattainable"
    assert "needs up to 90.0 seconds now, and its deadline is 60 seconds" in error["message"]
    assert not router.edge.controller.queries
    assert router.ended[0].answered is False


async def test_a_promised_loop_is_not_refused_in_its_midst() -> None:
    router = OneRouter()
    await router.turn(name="strict")
    assert router.edge.controller.queries[-1].tiers == {Tier.GUARANTEED}
    router.part = LoopPart(5.0, 2, 20.0, True, 30.0)
    await router.turn(name="strict")
    assert router.edge.controller.queries[-1].tiers == frozenset(Tier)


async def test_a_first_turn_without_a_promise_leaves_its_loop_without_one() -> None:
    router = OneRouter(Tier.BEST_EFFORT)
    answer = await router.turn()
    assert answer.headers["x-sluice-loop-admission"] == "best-effort"
    assert router.ended[0].promised is False
    await router.turn()
    assert router.turns[1].promised is False


async def test_a_turn_beside_the_first_one_takes_no_promise_from_the_loop() -> None:
    """Agents ask for a title meanwhile."""
    router = OneRouter(Tier.BEST_EFFORT)
    router.part = LoopPart(5.0, 2, 20.0, True, 30.0)
    answer = await router.turn()
    assert answer.headers["x-sluice-loop-admission"] == "guaranteed"
    await router.turn()
    assert router.turns[1].promised is True
    assert router.ended[0].promised is True


def test_loops_of_different_owners_are_distinct() -> None:
    stated = READER.read({"slo": {"loop": LOOP}}, []).loop
    loops = [loop_of(stated, owner, None) for owner in ("acme", "acme", "other")]
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
