"""The edge judges TPOT by the anchor of the class, however it learns of the tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
from tests.router.far_side import Clock, Edge, FarController, FarSide, serve
from tests.router.test_admission import guaranteed, post, promises
from tests.router.virtual_time import settle

OFFSETS_S = (0.1, 0.25, 0.26)
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

    async def late_second(
        side: FarSide, replica: str, request: EngineRequest
    ) -> AsyncIterator[ResponseItem]:
        begun_s, offsets_s = clock.now_s, iter(OFFSETS_S)
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
    assert edge.sample("sluice_promises_missed_total", **labels, objective="tpot") == 2 * missed
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

    async def reported(
        side: FarSide, replica: str, request: EngineRequest
    ) -> AsyncIterator[ResponseItem]:
        clock.now_s += 0.5
        if stream:
            yield ResponseHead(200, "text/event-stream", replica)
            yield ResponseSent((1, 1, 1), OFFSETS_S)
            yield ResponseTail(5, 3)
            return
        yield ResponseHead(200, "application/json", replica)
        yield ResponseChunk(b"{}")
        yield ResponseTail(5, 3, OFFSETS_S)

    edge = edge_of(FarSide(a=reported), clock, anchor)
    await post(edge, stream=stream)
    (ending,) = edge.controller.endings
    assert ending.tpot_s == pytest.approx(tpot_s)
    assert ending.missed == ("tpot",) * missed
    assert promises(edge, "missed") == missed
