"""The edge judges a request of stages stage by stage, however it learns of the tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseSent,
    ResponseTail,
)
from sluice.router.config import RouterConfig, ServiceClass
from sluice.scheduling.request.objective import TPOTAnchor
from sluice.scheduling.request.stages import Stage
from tests.router.far_side import Clock, Edge, FarController, FarSide, Items, serve
from tests.router.test_admission import guaranteed, post, promises
from tests.router.virtual_time import settle

# The edge judges TPOT by the anchor of the class, however it learns of the tokens.

ANCHORED_S = (0.1, 0.25, 0.26)
"""When the tokens come: 150 ms to the second, 10 ms to the third, so 80 ms in the mean."""


def edge_of(side: FarSide, clock: Clock, anchor: TPOTAnchor) -> Edge:
    standard = ServiceClass(ttft_ms=400, tpot_ms=100, tpot_anchor=anchor)
    config = RouterConfig(classes={"standard": standard})
    return Edge(side, FarController(guaranteed()), config, clock=clock)


anchors = pytest.mark.parametrize(
    ("anchor", "missed", "tpot_s"),
    [(TPOTAnchor.MEAN, 0, 0.08), (TPOTAnchor.RUNNING_MAX, 1, 0.15), (TPOTAnchor.WINDOW, 0, 0.08)],
)


@anchors
async def test_a_stream_is_judged_by_the_anchor_of_its_class(
    anchor: TPOTAnchor, missed: int, tpot_s: float
) -> None:
    clock = Clock()

    async def late_second(side: FarSide, replica: str, request: EngineRequest) -> Items:
        begun_s, offsets_s = clock.now_s, iter(ANCHORED_S)
        async for item in serve(side, replica, request):
            if isinstance(item, ResponseChunk) and item.tokens:
                clock.now_s = begun_s + next(offsets_s)
            yield item
            await settle()  # the router has it

    edge = edge_of(FarSide(a=late_second), clock, anchor)
    # The anchor is the class's, also where the client states the pace.
    await post(edge, stream=True)
    await post(edge, stream=True, slo={"tpot_ms": 90})
    assert (promises(edge, "kept"), promises(edge, "missed")) == (2 - 2 * missed, 2 * missed)
    labels = {"class": "standard"}
    assert sum(edge.causes("tpot").values()) == 2 * missed
    assert edge.sample("sluice_attained_total", **labels, priority="1") == 2 - 2 * missed
    assert edge.sample("sluice_tpot_seconds_sum", **labels) == pytest.approx(2 * tpot_s)
    # So is what the controller learns from.
    endings = edge.controller.endings
    assert [ending.missed for ending in endings] == [("tpot",) * missed] * 2
    assert [ending.tpot_s for ending in endings] == pytest.approx([tpot_s] * 2)


@anchors
@pytest.mark.parametrize("stream", [True, False], ids=["sent by the replica itself", "plain"])
async def test_times_that_a_replica_reports_are_judged_alike(
    stream: bool, anchor: TPOTAnchor, missed: int, tpot_s: float
) -> None:
    """All in one report, as of a stream that an Envoy fetches, or with the end, as of a response
    that is not streamed. The times are the tokens' own, whenever they are reported."""
    clock = Clock()

    async def reported(side: FarSide, replica: str, request: EngineRequest) -> Items:
        clock.now_s += 0.5
        if stream:
            yield ResponseHead(200, "text/event-stream", replica)
            yield ResponseSent((1, 1, 1), ANCHORED_S)
            yield ResponseTail(5, 3)
            return
        yield ResponseHead(200, "application/json", replica)
        yield ResponseChunk(b"{}")
        yield ResponseTail(5, 3, ANCHORED_S)

    edge = edge_of(FarSide(a=reported), clock, anchor)
    await post(edge, stream=stream)
    (ending,) = edge.controller.endings
    assert ending.tpot_s == pytest.approx(tpot_s)
    assert ending.missed == ("tpot",) * missed
    assert promises(edge, "missed") == missed


OFFSETS_S = (0.1, 0.2, 0.5, 0.52)
"""The second stage begins with the third token, 300 ms after the second."""

THINK: dict[str, Any] = {"ttft_ms": 150, "tpot_ms": 110}


def stages(until: object, ttft_ms: float) -> dict[str, Any]:
    """The first two tokens, then the others."""
    return {"stages": [{"until": until, **THINK}, {"until": "end", "ttft_ms": ttft_ms}]}


async def streamed(clock: Clock, replica: str, request: EngineRequest) -> Items:
    """Chunk by chunk; with the second one the reasoning ends."""
    begun_s = clock.now_s
    yield ResponseHead(200, "text/event-stream", replica)
    for place, offset_s in enumerate(OFFSETS_S, 1):
        clock.now_s = begun_s + offset_s
        yield ResponseChunk(b"data: x\n\n", 1, reasoned=int(place == 2))
        await settle()  # the router has it
    yield ResponseTail(5, 4)


async def reported(clock: Clock, replica: str, request: EngineRequest) -> Items:
    """All in one report, as of a stream that an Envoy fetches."""
    clock.now_s += OFFSETS_S[-1]
    yield ResponseHead(200, "text/event-stream", replica)
    yield ResponseSent((1, 1, 1, 1), OFFSETS_S, reasoned=2)
    yield ResponseTail(5, 4)


async def textless(clock: Clock, replica: str, request: EngineRequest) -> Items:
    """As above, but the token that ends the first stage makes no event: its chunk comes with the
    next one, in one delivery or two."""
    begun_s = clock.now_s
    yield ResponseHead(200, "text/event-stream", replica)
    for place, offset_s in enumerate(OFFSETS_S, 1):
        if place == 2:
            continue  # without an event
        clock.now_s = begun_s + offset_s
        if place == 3:
            yield ResponseChunk(b"", 1, reasoned=1, offset_s=OFFSETS_S[1])
            if request.slo.stages[-1].ttft_s == 0.31:
                await settle()  # alone
        yield ResponseChunk(b"data: x\n\n", 1, offset_s=offset_s)
        await settle()
    yield ResponseTail(5, 4)


async def together(clock: Clock, replica: str, request: EngineRequest) -> Items:
    """The first token, and then all others in one delivery, with those of the next stage."""
    begun_s = clock.now_s
    yield ResponseHead(200, "text/event-stream", replica)
    for place, offset_s in enumerate(OFFSETS_S, 1):
        clock.now_s = begun_s + (OFFSETS_S[0] if place == 1 else OFFSETS_S[2])
        offset_s = min(offset_s, OFFSETS_S[2])
        yield ResponseChunk(b"data: x\n\n", 1, reasoned=int(place == 2), offset_s=offset_s)
        if place == 1:
            await settle()
    yield ResponseTail(5, 4)


async def plain(clock: Clock, replica: str, request: EngineRequest) -> AsyncIterator[ResponseItem]:
    """With the end of a response that is not streamed."""
    clock.now_s += OFFSETS_S[-1]
    yield ResponseHead(200, "application/json", replica)
    yield ResponseChunk(b"{}")
    yield ResponseTail(5, 4, OFFSETS_S, reasoned=2)


@pytest.mark.parametrize("answer", [streamed, textless, together, reported, plain])
@pytest.mark.parametrize("until", [{"tokens": 2}, "reasoning_end"], ids=str)
async def test_each_stage_is_held_to_its_own_objective(answer: Any, until: object) -> None:
    clock = Clock()
    asked: list[EngineRequest] = []

    async def serve(side: FarSide, replica: str, request: EngineRequest) -> Items:
        asked.append(request)
        async for item in answer(clock, replica, request):
            yield item

    edge = Edge(FarSide(a=serve), FarController(guaranteed()), clock=clock)
    for ttft_ms in (310, 290):
        await post(edge, stream=answer is not plain, slo=stages(until, ttft_ms))
    assert (promises(edge, "kept"), promises(edge, "missed")) == (1, 1)
    assert sum(edge.causes("ttft").values()) == 1
    tokens = 2 if until != "reasoning_end" else 0
    assert asked[0].slo.stages == (Stage(0.15, 0.11, tokens=tokens), Stage(0.31))
    kept, late = edge.controller.endings
    assert (kept.missed, late.missed) == ((), ("ttft",))
    # The margins learn from the later stage, which took more of its time than the first of its own.
    assert kept.judged_s is not None and late.judged_s is not None
    assert kept.judged_s[0] == pytest.approx(0.3 / 0.31 * 0.15)
    assert late.judged_s[0] == pytest.approx(0.3 / 0.29 * 0.15)
    # And what the client saw of the whole request is told as ever.
    assert kept.ttft_s == pytest.approx(0.1)


async def test_a_late_stage_is_told_while_the_request_goes_on() -> None:
    clock = Clock()

    async def serve(side: FarSide, replica: str, request: EngineRequest) -> Items:
        async for item in streamed(clock, replica, request):
            if isinstance(item, ResponseTail):
                yield ResponseChunk(b"data: x\n\n", 4)
            yield item

    edge = Edge(FarSide(a=serve), FarController(guaranteed()), clock=clock)
    await post(edge, stream=True, slo=stages({"tokens": 2}, 290))
    notices = edge.controller.late_notices
    assert notices
    for notice in notices:
        assert notice.ttft_s == pytest.approx(0.3 / 0.29 * 0.15)
