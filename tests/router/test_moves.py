"""Promised requests leave a replica that is going to miss their first tokens, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.protocol.messages import MAX_WAITS, FirstTokenWait
from sluice.protocol.requests import EngineRequest, request_key
from sluice.router.config import RouterConfig
from sluice.router.dispatch.attempt import Answer, Attempt, OpenAttempts, SuspicionState
from sluice.router.dispatch.migrations import Moves
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.scheduling.request.job import STAYS, RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO, TokenClock
from tests.router.far_side import (
    DIED,
    Behaviour,
    Edge,
    FarController,
    FarSide,
    NoItems,
    answer,
    fail,
)
from tests.router.test_resume import simulated, text, without_time_and_name
from tests.router.test_stall_detector import CHAT, COMPLETIONS, asked, freezing
from tests.router.virtual_time import LoopClock, virtual

STATED: dict[str, Any] = {"slo": {"ttft_ms": 4_000, "tpot_ms": 500}}
STAY = RouteDecision(None, STAYS)


def promise(replica_id: str, **more: Any) -> RouteDecision:
    return RouteDecision(
        replica_id, "placed", Tier.GUARANTEED, 0.2, planned=(3.0, 0.4, None), **more
    )


class SlowController(FarController):
    """Answers when it is let."""

    def __init__(self, *decisions: str | RouteDecision | None) -> None:
        super().__init__(*decisions)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        decision = await super().route(query)
        await self.may_answer.wait()
        return decision


def edge(*decisions: RouteDecision | None, **replicas: Behaviour) -> Edge:
    # What looks for replicas that hang does not come first.
    config = RouterConfig(stall_after_s=3_600)
    controller = SlowController(*decisions)
    clock = LoopClock()
    return Edge(FarSide(**replicas), controller, config, clock)  # type: ignore[arg-type]


async def tell(router: Edge) -> list[int]:
    """Say of all that wait that they are going to miss; their keys."""
    keys = [wait.key for wait in router.controller.waits()]
    router.controller.missing(keys)
    await asyncio.sleep(0.1)
    return keys


def moved(router: Edge, outcome: str) -> float:
    labels = {"class": "standard", "outcome": outcome}
    return router.sample("sluice_promises_moved_total", **labels)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@virtual
async def test_it_moves_with_its_promise_and_its_client_sees_nothing_of_it(path: str) -> None:
    whole = await text(edge(promise("r0"), r0=simulated()), path, **STATED)
    router = edge(promise("r0"), promise("r1"), r0=freezing(0), r1=simulated())
    stream = await asked(router, path, **STATED)
    await asyncio.sleep(1.0)
    (wait,) = router.controller.waits()
    assert (wait.replica_id, wait.ttft_s) == ("r0", 4.0)
    assert wait.waited_s == pytest.approx(1.0, abs=0.1)
    router.controller.missing([wait.key])
    came = (await stream).replace("-moved", "")
    assert without_time_and_name(came) == without_time_and_name(whole)
    (_, first), (name, second) = router.side.calls
    assert name == "r1" and second.promised and second.slo.ttft_s == 3.0
    assert second.waited_s == pytest.approx(1.0, abs=0.1)
    assert second.request_id == f"{first.request_id}-moved"
    query = router.controller.queries[1]
    assert (query.moves_from, query.tiers) == ("r0", {Tier.GUARANTEED})
    assert query.key == request_key(second.request_id)
    assert router.side.cancelled == [first.request_id]
    assert router.controller.released == [request_key(first.request_id)]
    assert (moved(router, "kept"), moved(router, "missed")) == (1, 0)
    assert router.sample("sluice_promises_total", **{"class": "standard", "outcome": "kept"}) == 1
    assert router.sample("sluice_retries_total") == 0
    assert not router.controller.troubles and not router.controller.gone
    assert router.controller.endings[0].replica_id == "r1"
    assert router.controller.waits() == ()


@virtual
async def test_a_plain_response_moves_too() -> None:
    router = edge(promise("r0"), promise("r1"), r0=freezing(0), r1=answer(200, b"{}"))
    plain = await asked(router, CHAT, stream=False, **STATED)
    await tell(router)
    assert await plain == "{}"
    assert [name for name, _ in router.side.calls] == ["r0", "r1"]


@pytest.mark.parametrize(
    "decision", [STAY, None, RouteDecision("r1", "placed", Tier.BEST_EFFORT)], ids=str
)
@virtual
async def test_it_stays_where_no_other_replica_promises_what_is_left(
    decision: RouteDecision | None,
) -> None:
    router = edge(promise("r0"), decision, r0=freezing(0), r1=simulated())
    stream = await asked(router, **STATED)
    keys = await tell(router)
    assert keys and await tell(router) == keys, "it is asked about again"
    assert len(router.controller.queries) == 3
    router.side.thaw("r0")
    assert (await stream).endswith("data: [DONE]\n\n")
    assert [name for name, _ in router.side.calls] == ["r0"]
    assert (moved(router, "kept"), moved(router, "missed")) == (0, 0)


@virtual
async def test_it_moves_once() -> None:
    replicas = {"r0": freezing(0), "r1": freezing(0), "r2": simulated()}
    router = edge(*map(promise, replicas), **replicas)
    stream = await asked(router, **STATED)
    (key,) = await tell(router)
    assert router.controller.waits() == ()
    router.controller.missing([key, key + 1])
    await asyncio.sleep(10)
    assert [name for name, _ in router.side.calls] == ["r0", "r1"]
    router.side.thaw("r1")
    assert (await stream).endswith("data: [DONE]\n\n")
    assert (moved(router, "kept"), moved(router, "missed")) == (0, 1)


@virtual
async def test_what_comes_while_it_is_asked_about_is_kept() -> None:
    router = edge(promise("r0"), promise("r1"), r0=freezing(0), r1=simulated())
    stream = await asked(router, **STATED)
    assert isinstance(router.controller, SlowController)
    router.controller.may_answer.clear()
    await tell(router)
    assert router.controller.waits() == (), "it is asked about once at a time"
    router.side.thaw("r0")
    assert (await stream).endswith("data: [DONE]\n\n")
    router.controller.may_answer.set()
    await asyncio.sleep(1)
    assert [name for name, _ in router.side.calls] == ["r0"]
    (_, request) = router.side.calls[0]
    assert router.controller.released == [request_key(f"{request.request_id}-moved")]
    assert moved(router, "kept") == 0


@pytest.mark.parametrize("after", [0, 1])
@virtual
async def test_a_client_that_leaves_while_it_moves_leaves_nothing_behind(after: int) -> None:
    """While the controller is asked, and just after it has answered."""
    router = edge(promise("r0"), promise("r1"), r0=freezing(0), r1=simulated())
    stream = await asked(router, **STATED)
    assert isinstance(router.controller, SlowController)
    router.controller.may_answer.clear()
    await tell(router)
    if after:
        router.controller.may_answer.set()
        while not router.controller.released and not stream.cancelling():
            if any(name == "r1" for name, _ in router.side.calls):
                break
            await asyncio.sleep(0)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    router.controller.may_answer.set()
    await asyncio.sleep(1)
    (_, request) = router.side.calls[0]
    keys = {request_key(name) for name in (request.request_id, f"{request.request_id}-moved")}
    assert set(router.controller.released) == keys
    assert not router.side.live


@virtual
async def test_where_the_other_replica_fails_it_is_tried_again_as_ever() -> None:
    decisions = [promise("r0"), promise("r1"), promise("r2")]
    router = edge(*decisions, r0=freezing(0), r1=fail(DIED), r2=simulated())
    stream = await asked(router, **STATED)
    await tell(router)
    assert (await stream).endswith("data: [DONE]\n\n")
    assert [name for name, _ in router.side.calls] == ["r0", "r1", "r2"]
    assert router.controller.queries[2].avoid == ("r1",), "r0 has not failed"
    assert router.controller.gone == ["r1"]
    assert router.sample("sluice_retries_total") == 1
    assert moved(router, "kept") == 1


@pytest.mark.parametrize(
    ("body", "decision"),
    [
        ({"slo": {"class": "batch", "e2e_ms": 9_000}}, promise("r0")),
        (STATED, RouteDecision("r0", "placed", Tier.BEST_EFFORT)),
        (STATED, RouteDecision("r0", "placed")),
        (STATED, promise("r1", role="decode", prefill_id="r0")),
    ],
    ids=["no TTFT", "best effort", "no tier", "pair"],
)
@virtual
async def test_others_than_promised_first_tokens_of_one_replica_do_not_move(
    body: dict[str, Any], decision: RouteDecision
) -> None:
    router = edge(decision, r0=freezing(0), r1=simulated())
    stream = await asked(router, **body)
    await asyncio.sleep(0.5)
    assert router.controller.waits() == ()
    stream.cancel()


def test_a_bounded_number_is_asked_about_those_due_soonest_first() -> None:
    open_: OpenAttempts = {}
    moves = Moves(open_, FarController(), None, lambda: 10.0)  # type: ignore[arg-type]

    def watched(name: str, ttft_s: float) -> Attempt:
        slo = SLO(ttft_s)
        call = Call(name, "chat", {}, slo, PromptSize(1, 1), 7.0)
        request = EngineRequest(name, "chat", {}, slo, promised=True)
        attempt = Attempt(request, promise("r0"), "mixed", NoItems())
        open_[attempt] = Answer(call, SuspicionState(), TokenClock(call.slo, 0.0))
        return attempt

    attempts = [watched(str(number), 5.0 + number % 300) for number in range(MAX_WAITS + 10)]
    watched("late", 2.0)
    found = moves.waits()
    assert len(found) == MAX_WAITS
    assert found[0] == FirstTokenWait(attempts[0].key, "r0", 5.0, 3.0)
    assert [wait.ttft_s for wait in found] == sorted(wait.ttft_s for wait in found)
    open_.clear()
    assert moves.waits() == ()
