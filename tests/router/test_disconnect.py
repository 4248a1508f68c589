"""A client that leaves, at every point of a request: the far side's work ends with it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sluice.router.dispatch.response import DisconnectGuard
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from tests.router.far_side import (
    CHAT_BODY,
    Client,
    Edge,
    FarController,
    FarSide,
    hang,
    serve,
    stall,
)


def content(**more: Any) -> bytes:
    return json.dumps({**CHAT_BODY, **more}).encode()


def cancelled(edge: Edge, service_class: str = "standard") -> float:
    labels = {"class": service_class, "outcome": "cancelled", "endpoint": "chat"}
    return edge.sample("sluice_requests_total", **labels)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("killed", [False, True], ids=["left", "handler cancelled"])
async def test_leaving_during_the_prefill(stream: bool, killed: bool) -> None:
    edge = Edge(FarSide(a=hang))
    client = Client(edge, content(stream=stream))
    await edge.side.until(lambda: bool(edge.side.live))
    if killed:
        client.task.cancel()
    else:
        client.leave()
    await asyncio.wait([client.task])
    await edge.side.until(lambda: not edge.side.live)
    assert client.task.cancelled() == killed
    assert client.got == []
    assert len(edge.controller.released) == 1
    assert cancelled(edge) == 1
    (ending,) = edge.controller.endings
    assert (ending.outcome, ending.ttft_s, ending.tokens) == ("cancelled", None, 0)
    assert edge.sample("sluice_in_flight_requests") == 0


@pytest.mark.parametrize("killed", [False, True], ids=["left", "handler cancelled"])
async def test_leaving_in_the_middle_of_a_stream(killed: bool) -> None:
    edge = Edge(FarSide(a=stall))
    client = Client(edge, content(stream=True))
    await client.until(lambda: len(client.got) == 2)
    if killed:
        client.task.cancel()
    else:
        client.leave()
    await asyncio.wait([client.task])
    await edge.side.until(lambda: not edge.side.live)
    assert client.task.cancelled() == killed
    assert len(client.got) == 2
    assert len(edge.side.cancelled) == 1
    assert cancelled(edge) == 1
    assert edge.sample("sluice_ttft_seconds_count", **{"class": "standard"}) == 1


async def test_leaving_while_the_controller_is_asked() -> None:
    class Slow(FarController):
        async def route(self, query: RouteQuery) -> RouteDecision | None:
            self.queries.append(query)
            edge.side.changed.set()
            await asyncio.Event().wait()
            return None

    edge = Edge(FarSide(a=serve), Slow("a"))
    client = Client(edge, content())
    await edge.side.until(lambda: bool(edge.controller.queries))
    client.leave()
    await client.task
    assert edge.side.calls == []
    assert cancelled(edge) == 1


async def test_leaving_while_the_body_is_sent() -> None:
    edge = Edge(FarSide(a=serve))
    client = Client(edge, content()[:10], whole=False)
    client.leave()
    await client.task
    assert edge.side.calls == []
    assert cancelled(edge, "none") == 1


async def test_a_server_that_cannot_send_ends_the_work() -> None:
    async def broken(message: Any) -> None:
        raise OSError("connection lost")

    edge = Edge(FarSide(a=stall))
    client = Client(edge, content(stream=True), send=broken)
    await client.task
    await edge.side.until(lambda: not edge.side.live)
    assert cancelled(edge) == 1


async def test_a_disconnect_as_the_work_completes_leaves_nothing_behind() -> None:
    done = asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, Any]:
        done.set_result(None)
        return {"type": "http.disconnect"}

    guard = DisconnectGuard(receive)
    async with guard:
        await done
    assert guard.disconnected
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_cancellation_from_elsewhere_passes_the_guard() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def guarded() -> None:
        async with DisconnectGuard(receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
