"""Overload at the edge: refusals are spaced out, and what the event loop cannot take is refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram
from pydantic import SecretStr
from starlette.types import Message

from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.dispatch.placement import FULL_FOR_S
from sluice.router.errors import Reason
from sluice.router.ingress.middleware import (
    ALWAYS_PER_S,
    MAX_DELAY_S,
    MAX_HOLD_S,
    PERIOD_S,
    TICK_S,
    RefusalRate,
    Shedder,
)
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.tenancy.auth import ApiKey
from sluice.router.tenancy.limits import TenantLimits
from sluice.scheduling.request.job import UNATTAINABLE, RouteDecision, RouteQuery, Tier
from tests.router.far_side import CHAT_BODY, Clock, Edge, FarController, FarSide, serve
from tests.router.virtual_time import VirtualTime, settle

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()


def refusal_rate(time: VirtualTime, per_s: float, most: int = 10_000) -> RefusalRate:
    gauge = Gauge("held", "", registry=CollectorRegistry())
    return RefusalRate(per_s, most, gauge, time, time.pause)


def make_shedder(clock: Clock) -> Shedder:
    return Shedder(Histogram("delay", "", registry=CollectorRegistry()), clock)


# Refusals leave at a rate.


async def test_a_few_refusals_leave_at_once_and_a_storm_at_its_rate() -> None:
    time = VirtualTime()
    refusals = refusal_rate(time, per_s=10)
    left: list[float] = []

    async def retry_at_once() -> None:
        while True:
            await refusals.wait()
            left.append(time())
            await asyncio.sleep(0)

    storm = [asyncio.create_task(retry_at_once()) for _ in range(30)]
    await settle()
    # A second's worth, and the one that begins the next.
    assert len(left) == 11
    await time.advance(60.0)
    assert abs(len(left) - 11 - 600) <= 1
    assert min(b - a for a, b in pairwise(left[11:])) > 0.0999
    for task in storm:
        task.cancel()
    await asyncio.wait(storm)
    assert refusals.held == 0
    # After a pause nothing is left of it.
    await time.advance(MAX_HOLD_S + 1)
    await asyncio.wait_for(refusals.wait(), 120)


@given(
    per_s=st.floats(0.5, 1_000),
    gaps=st.lists(st.floats(0, 2), max_size=60),
    most=st.integers(1, 20),
)
def test_nobody_waits_longer_than_the_most_and_no_more_wait_than_may(
    per_s: float, gaps: list[float], most: int
) -> None:
    async def run() -> None:
        time = VirtualTime()
        refusals = refusal_rate(time, per_s, most)
        waited: list[float] = []

        async def refused() -> None:
            came_s = time()
            await refusals.wait()
            waited.append(time() - came_s)

        tasks = []
        for gap_s in gaps:
            tasks.append(asyncio.create_task(refused()))
            await time.advance(gap_s)
            assert refusals.held <= most
        await time.advance(MAX_HOLD_S + 1e-6)
        assert len(waited) == len(gaps) and refusals.held == 0
        assert all(each <= MAX_HOLD_S + 1e-6 for each in waited)

    asyncio.run(run())


# New requests are turned away while the event loop falls behind.


def run_loop(
    shedder: Shedder, clock: Clock, rates: dict[str, float], cost_s: float, seconds: float
) -> Counter[str]:
    """Requests of each client at a rate, each of which keeps the loop busy for ``cost_s`` if it is
    taken. Returns how many were, in the last half."""
    taken: Counter[str] = Counter()
    drawn = random.Random(1)
    began_s, behind_s = clock(), 0.0
    while clock() < began_s + seconds:
        clock.now_s += TICK_S
        for owner, rate in rates.items():
            count = int(rate * TICK_S) + (drawn.random() < rate * TICK_S % 1)
            for _ in range(count):
                if shedder.takes(owner):
                    behind_s += cost_s
                    taken[owner] += clock() > began_s + seconds / 2
        behind_s = max(0.0, behind_s - TICK_S)
        shedder.tick(behind_s)
    return taken


def test_nobody_is_turned_away_while_the_loop_keeps_up() -> None:
    clock = Clock()
    shedder = make_shedder(clock)
    taken = run_loop(shedder, clock, {"a": 400.0, "b": 400.0}, 0.001, 20.0)
    assert shedder.rate == inf
    assert sum(taken.values()) > 7_800


def test_a_loop_that_falls_behind_takes_about_what_it_can_and_of_the_modest_all() -> None:
    clock = Clock()
    shedder = make_shedder(clock)
    taken = run_loop(shedder, clock, {"flood": 8_000.0, "modest": 60.0}, 0.001, 60.0)
    assert taken["modest"] / 30 > 0.97 * 60
    assert 700 < sum(taken.values()) / 30 < 1_050
    # And all of them again once the flood is over.
    run_loop(shedder, clock, {"modest": 60.0}, 0.001, 20.0)
    assert shedder.rate == inf


def test_one_long_step_of_the_loop_turns_nobody_away() -> None:
    clock = Clock()
    shedder = make_shedder(clock)
    for number in range(200):
        clock.now_s += TICK_S
        assert all(shedder.takes("a") for _ in range(20))
        if number % 7 == 0:
            clock.now_s += 2 * PERIOD_S
            shedder.tick(2 * PERIOD_S)
        else:
            shedder.tick(0.0)
    assert shedder.rate == inf


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 3)), max_size=200))
def test_who_sends_little_is_never_turned_away(steps: list[tuple[int, float]]) -> None:
    """Less than its part of what is always taken, whatever the others send and the delays are."""
    clock = Clock()
    shedder = make_shedder(clock)
    owners = 10
    for each in range(owners):
        shedder.takes(str(each))
    per_period = int(ALWAYS_PER_S / owners * PERIOD_S)
    for number, (others, delay_s) in enumerate(steps):
        clock.now_s += max(TICK_S, delay_s)
        for each in range(1, owners):
            for _ in range(others * each):
                shedder.takes(str(each))
        if number % 5 == 0:
            assert all(shedder.takes("0") for _ in range(per_period))
        shedder.tick(delay_s)


# Over the whole API.


async def post(edge: Edge, headers: dict[str, str], receive: Any) -> int:
    """The status of one request whose body is asked for with ``receive``."""
    got: list[Message] = []

    async def send(message: Message) -> None:
        got.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": raw,
        "query_string": b"",
    }
    await edge.api(scope, receive, send)
    return int(got[0]["status"])


async def never() -> Message:
    raise AssertionError("the body was asked for")


def keyed(**more: Any) -> RouterConfig:
    keys = (
        ApiKey(key=SecretStr("key-1"), name="acme"),
        ApiKey(
            key=SecretStr("key-2"),
            name="slow",
            limits=TenantLimits(requests_per_minute=1e-06, burst_s=1),
        ),
        ApiKey(key=SecretStr("key-3"), name="few", limits=TenantLimits(max_in_flight=1)),
    )
    return RouterConfig(api_keys=keys, **more)


async def test_a_probe_of_health_waits_for_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.router.ingress.middleware.REFUSALS_PER_S", 1.0)

    class Nobody(FarSide):
        async def models(self) -> dict[str, object]:
            raise ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.")

    time = VirtualTime()
    edge = Edge(Nobody(a=serve), config=keyed(), clock=time)
    async with edge.client() as client:
        client.headers["authorization"] = "Bearer key-2"
        refused = [asyncio.create_task(client.post(CHAT, content=b"x")) for _ in range(9)]
        await settle()
        assert edge.sample("sluice_held_refusals") > 0
        for _ in range(5):
            assert (await asyncio.wait_for(client.get("/health"), 120)).status_code == 503
        await time.advance(MAX_HOLD_S + 1)
        await asyncio.gather(*refused)


async def test_what_is_refused_by_key_rate_room_or_load_is_refused_unread() -> None:
    edge = Edge(FarSide(a=serve), config=keyed())

    def bearer(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}", "content-length": str(len(BODY))}

    first = asyncio.create_task(post(edge, bearer("key-3"), asyncio.Event().wait))
    await settle()
    assert await post(edge, bearer("wrong"), never) == 401
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": BODY, "more_body": False})
    assert await post(edge, bearer("key-2"), inbox.get) == 200
    assert await post(edge, bearer("key-2"), never) == 429
    assert await post(edge, bearer("key-3"), never) == 429
    first.cancel()
    await asyncio.wait([first])


async def test_an_overloaded_router_says_so_and_counts_it() -> None:
    clock = Clock()
    edge = Edge(FarSide(a=serve), config=keyed(), clock=clock)
    shedder = edge.shedder
    for _ in range(40):
        for _ in range(10):
            shedder.takes("flood")
        clock.now_s += PERIOD_S
        shedder.tick(MAX_DELAY_S * 2)
        shedder.tick(MAX_DELAY_S * 2)
    async with edge.client() as client:
        client.headers["authorization"] = "Bearer key-1"
        responses = [await client.post(CHAT, content=BODY) for _ in range(80)]
    statuses = Counter(response.status_code for response in responses)
    assert set(statuses) == {200, 503} and statuses[200] >= ALWAYS_PER_S * PERIOD_S / 2
    (refused, *_) = [response for response in responses if response.status_code == 503]
    assert refused.json()["error"]["code"] == "router_overloaded"
    assert refused.headers["retry-after"] == "1"
    labels = {"class": "none", "reason": "router_overloaded"}
    assert edge.sample("sluice_refusals_total", **labels) == statuses[503]
    # Its other paths answer.
    async with edge.client() as client:
        client.headers["authorization"] = "Bearer key-1"
        assert (await client.get("/v1/models")).status_code == 200


# A late answer of the controller is no way in.


class Halting(FarController):
    """A controller whose answers come too late while it is told so."""

    late = False

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        return None if self.late else await super().route(query)


REFUSAL = RouteDecision(None, UNATTAINABLE, retry_after_s=3.0, room_s=3.0)
BEST_EFFORT = RouteDecision("a", "test", tier=Tier.BEST_EFFORT)
PROMISE = RouteDecision("a", "test", tier=Tier.GUARANTEED, predicted_ttft_s=0.1)


async def statuses_of(edge: Edge, service_class: str, count: int) -> list[int]:
    body = {**CHAT_BODY, "slo": {"class": service_class, "ttft_ms": 1_000}}
    async with edge.client() as client:
        return [(await client.post(CHAT, json=body)).status_code for _ in range(count)]


async def test_who_asks_often_does_not_get_in_by_a_late_answer() -> None:
    clock = Clock()
    controller = Halting(REFUSAL)
    config = RouterConfig(
        classes={"strict": ServiceClass(ttft_ms=1_000, when_unattainable="reject")},
        default_class="strict",
    )
    edge = Edge(FarSide(a=serve), controller, config, clock)
    assert await statuses_of(edge, "strict", 1) == [429]
    controller.late = True
    assert set(await statuses_of(edge, "strict", 50)) == {429}
    assert edge.side.calls == [] and edge.sample("sluice_fallback_total", reason="no_answer") == 0
    # It may be away, and then requests are served as best they can.
    clock.now_s += 3.1
    assert await statuses_of(edge, "strict", 1) == [200]
    assert edge.sample("sluice_fallback_total", reason="no_answer") == 1
    # A promise between refusals opens no way in for others.
    controller.late, controller.decisions = False, [REFUSAL, PROMISE]
    assert await statuses_of(edge, "strict", 2) == [429, 200]
    controller.late = True
    assert await statuses_of(edge, "strict", 3) == [429] * 3
    clock.now_s += 3.1
    assert await statuses_of(edge, "strict", 1) == [200]


async def test_who_waits_in_a_line_does_not_get_in_by_a_late_answer_either() -> None:
    time = VirtualTime()
    controller = Halting(REFUSAL)
    config = RouterConfig(
        classes={"patient": ServiceClass(ttft_ms=60_000, when_unattainable="queue")},
        default_class="patient",
    )
    edge = Edge(FarSide(a=serve), controller, config, time)
    async with edge.client() as client:
        waiting = asyncio.create_task(client.post(CHAT, json=CHAT_BODY))
        await time.advance(0.5)
        controller.late = True
        await time.advance(2.0)
        assert edge.side.calls == [] and not waiting.done()
        # It may be away, and then requests are served as best they can.
        await time.advance(FULL_FOR_S)
        assert (await waiting).status_code == 200
    assert edge.sample("sluice_fallback_total", reason="no_answer") == 1


async def test_without_an_answer_what_would_be_best_effort_is() -> None:
    clock = Clock()
    controller = Halting(BEST_EFFORT)
    edge = Edge(FarSide(a=serve), controller, clock=clock)
    await statuses_of(edge, "interactive", 1)
    controller.late = True
    await statuses_of(edge, "interactive", 1)
    clock.now_s += 1.1
    await statuses_of(edge, "interactive", 1)
    assert [request.best_effort for _, request in edge.side.calls] == [True, True, False]
