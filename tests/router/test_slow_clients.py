"""Clients that send slowly, read slowly or not at all, and many of them: all of it ends, and
nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import SecretStr
from starlette.types import Message

from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
)
from sluice.replica.profiling import VirtualLoop
from sluice.router.config import RouterConfig
from sluice.router.dispatch.response import TimeoutSend
from sluice.router.serve.contract import StalledReaderError
from sluice.router.tenancy.auth import ApiKey
from sluice.router.tenancy.limits import TenantLimits
from tests.router.far_side import CHAT_BODY, Client, Edge, FarSide, Items, event, stall
from tests.router.virtual_time import VirtualTime, settle

KEY = "key-1"
SHORT_S = 0.02


async def flows(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """A stream of which there is always more."""
    yield ResponseHead(200, "text/event-stream", replica)
    while True:
        await asyncio.sleep(0)
        yield ResponseChunk(event("one", request.request_id), 1)


async def ends(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """A whole answer, that is all there at once."""
    yield ResponseHead(200, "text/event-stream", replica)
    yield ResponseChunk(event("one", request.request_id), 1)
    yield ResponseTail(5, 1)


def streamed(**more: Any) -> bytes:
    return json.dumps({**CHAT_BODY, "stream": True, **more}).encode()


@pytest.mark.parametrize(
    ("behaviour", "taken"), [(flows, 0), (flows, 1), (flows, 2), (ends, 0), (ends, 1)]
)
async def test_a_reader_that_takes_nothing_is_dropped_and_its_work_ends(
    behaviour: Any, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.dispatch.response.STALLED_READER_S", SHORT_S)
    edge = Edge(FarSide(a=behaviour))
    client = Client(edge, streamed(), takes=taken)
    async with asyncio.timeout(120):
        await client.task
    await edge.side.until(lambda: not edge.side.live)
    assert edge.sample("sluice_stalled_readers_total") == 1
    labels = {"class": "standard", "outcome": "cancelled", "endpoint": "chat"}
    assert edge.sample("sluice_requests_total", **labels) == 1
    assert edge.sample("sluice_in_flight_requests") == 0


async def test_the_end_of_a_stream_leaves_with_its_last_bytes() -> None:
    client = Client(Edge(FarSide(a=ends)), streamed())
    await client.task
    assert [message["type"] for message in client.got] == [
        "http.response.start",
        "http.response.body",
    ]


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=20), st.floats(0.1, 10.0))
def test_who_takes_each_message_in_time_is_served_and_nobody_else(
    waits_s: list[float], limit_s: float
) -> None:
    """However long the whole response takes."""
    taken: list[int] = []

    async def take(message: Message) -> None:
        await asyncio.sleep(waits_s[message["number"]])
        taken.append(message["number"])

    async def respond() -> None:
        with TimeoutSend(take, limit_s) as send:
            for number in range(len(waits_s)):
                await send({"type": "http.response.body", "number": number})
                await asyncio.sleep(limit_s * 0.7)  # the engine, whose time does not count

    first_late = next((n for n, wait_s in enumerate(waits_s) if wait_s > limit_s), None)
    assume(all(abs(wait_s - limit_s) > 0.01 for wait_s in waits_s))
    loop = VirtualLoop()
    try:
        if first_late is None:
            loop.run_until_complete(respond())
        else:
            with pytest.raises(StalledReaderError):
                loop.run_until_complete(respond())
            until_s = sum(waits_s[:first_late]) + first_late * 0.7 * limit_s
            assert loop.time() == pytest.approx(until_s + limit_s, abs=0.01)
        assert taken == list(range(len(waits_s) if first_late is None else first_late))
    finally:
        loop.close()


async def test_a_cancellation_from_elsewhere_passes_a_patient_send() -> None:
    async def never(_: Message) -> None:
        await asyncio.Event().wait()

    async def sends(limit_s: float) -> None:
        with TimeoutSend(never, limit_s) as send:
            await send({"type": "http.response.body"})

    task = asyncio.create_task(sends(60.0))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(StalledReaderError):
        await sends(SHORT_S)
    this = asyncio.current_task()
    assert this is not None and this.cancelling() == 0


async def test_hundreds_of_refused_and_slow_requests_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 that are refused, by everything that refuses, and 200 that are slow, all at once."""
    monkeypatch.setattr("sluice.router.ingress.middleware.REFUSALS_PER_S", 20.0)
    time = VirtualTime()
    keys = (
        ApiKey(key=SecretStr(KEY), name="acme"),
        ApiKey(
            key=SecretStr("key-2"),
            name="often",
            limits=TenantLimits(requests_per_minute=1e-06, burst_s=1),
        ),
        ApiKey(key=SecretStr("key-3"), name="full", limits=TenantLimits(max_in_flight=1)),
    )
    config = RouterConfig(api_keys=keys)
    edge = Edge(FarSide(a=stall), config=config, clock=time)

    def left() -> tuple[int, float, float, float, int, int]:
        return (
            len(asyncio.all_tasks()),
            edge.sample("sluice_in_flight_requests"),
            edge.sample("sluice_held_body_bytes"),
            edge.sample("sluice_held_refusals"),
            len(edge.side.live),
            sum(len(family.samples) for family in edge.metrics.registry.collect()),
        )

    async def storm(slow: int, refused: int) -> list[int]:
        half = streamed()[:20]
        senders = [Client(edge, half, whole=False, key=KEY, takes=0) for _ in range(slow // 2 - 1)]
        senders.append(Client(edge, half, whole=False, key="key-3", takes=0))
        readers = [Client(edge, streamed(), key=KEY, takes=0) for _ in range(slow // 2)]
        await settle()
        bad = ("wrong", "key-2", "key-3", KEY)
        # What the last of these sends is not JSON; the others are refused unread.
        turned = [Client(edge, b"x", key=bad[each % 4], takes=9) for each in range(refused)]
        await settle()
        assert edge.sample("sluice_held_refusals") > refused / 4
        await time.advance(6.0)
        assert all(each.task.done() for each in turned)
        for each in (*senders, *readers):
            each.leave()
        await asyncio.wait([each.task for each in (*senders, *readers)])
        await edge.side.until(lambda: not edge.side.live)
        await settle()
        # What the far side notes of each call for tests.
        for noted in (edge.side.calls, edge.side.cancelled, edge.side.pools):
            noted.clear()
        edge.controller.queries.clear()
        edge.controller.released.clear()
        return sorted({each.status for each in turned})

    await storm(8, 200)
    gc.collect()
    before, objects = left(), len(gc.get_objects())
    assert await storm(200, 1_000) == [400, 401, 429]
    # Whoever watches silent streams looks once more, and ends.
    async with asyncio.timeout(120):
        while any(now > then for now, then in zip(left(), before, strict=True)):
            await settle()
    gc.collect()
    # Less than one object for each of them: no table grows with what comes.
    assert len(gc.get_objects()) - objects < 500
