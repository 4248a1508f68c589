"""Batches of clients with rate limits, and of clients whose keys change or go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from router.batches.line_caller import LONGEST_PAUSE_S, LineCaller
from router.batches.lines import Line
from router.batches.metrics import BatchMetrics
from router.batches.places import LinePlaces
from router.keys import ApiKey
from router.rate_limits import RateLimiter
from router.trust import Caps, Client
from tests.router.batches.routers import KEY, URL, Held, config, line, serving, submit, until
from tests.router.far_side import Clock, Edge, FarSide, answer, serve

LINE = Line("a", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, 100)


def client(**caps: Any) -> Client:
    return Client("acme", "name-acme", Caps(**caps))


class Lines:
    """A caller whose pauses let the time pass."""

    def __init__(self, side: FarSide, tmp_path: Path) -> None:
        self.clock, self.pauses_s = Clock(), list[float]()
        self.limiter = RateLimiter(clock=self.clock)
        settings = config(tmp_path).model_copy(update={"max_attempts": 1})
        self.edge = Edge(side, config=settings, clock=self.clock)
        metrics = BatchMetrics(CollectorRegistry())
        self.caller = LineCaller(
            self.edge.config, self.edge.fleets, self.limiter, metrics, self.pause
        )

    async def pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.clock.now_s += seconds

    def left(self, who: Client) -> dict[str, str]:
        headers = {name.decode(): value.decode() for name, value in self.limiter.headers(who)}
        return {kind: headers[f"x-ratelimit-remaining-{kind}"] for kind in ("requests", "tokens")}


async def test_lines_count_as_requests_and_wait_for_the_rate(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    acme = client(requests_per_minute=60, tokens_per_minute=60_000, burst_s=2)
    for _ in range(2):
        assert (await lines.caller.run(LINE, URL, acme)).status == 200
    assert lines.left(acme) == {"requests": "0", "tokens": "1984"}
    assert lines.pauses_s == []
    await lines.caller.wait_for_rate(acme)
    assert lines.pauses_s == [1]
    assert (await lines.caller.run(LINE, URL, acme)).status == 200
    # One that comes too early, as another line was faster, waits as for room.
    assert (await lines.caller.run(LINE, URL, acme)).status == 200
    assert sum(lines.pauses_s) >= 2


async def test_a_line_that_is_sent_again_counts_once(tmp_path: Path) -> None:
    side = FarSide(a=answer(503, b"{}"))
    lines = Lines(side, tmp_path)
    acme = client(requests_per_minute=0.06, tokens_per_minute=0.6, burst_s=3_600)
    running = asyncio.create_task(lines.caller.run(LINE, URL, acme))
    await side.until(lambda: len(side.calls) == 5)
    side.behaviours["a"] = serve
    assert (await running).status == 200
    assert len(side.calls) > 5
    assert lines.left(acme)["requests"] in ("2", "3")
    assert lines.left(acme)["tokens"] in ("28", "29", "30", "31")


async def test_a_long_wait_is_made_of_short_ones(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    acme = client(requests_per_minute=0.5)
    lines.limiter.count_request(acme)
    await lines.caller.wait_for_rate(acme)
    assert lines.pauses_s == [LONGEST_PAUSE_S] * 4


async def test_places_of_a_client_follow_its_caps_and_leave_nothing_behind() -> None:
    places = LinePlaces(3)
    one, two = client(max_in_flight=1), client(max_in_flight=2)
    first = await places.take(one)
    waiting = asyncio.create_task(places.take(one))
    await asyncio.sleep(0)
    others = [await places.take(two), await places.take(two)]
    waiting.cancel()
    await asyncio.wait([waiting])
    for give_back in (first, *others):
        give_back()
    assert places._of == {}


async def test_the_batches_of_a_key_that_is_taken_away_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.auth.POLL_S", 0.01)
    folder, path = tmp_path / "batches", tmp_path / "keys.yaml"
    path.write_text(f"- {{key: {KEY}, name: acme}}\n- other-key\n")
    side = FarSide(a=Held(1))
    settings = config(folder).model_copy(update={"api_keys_file": path})
    async with serving(settings, side) as router:
        made = await submit(router.client, [line(name) for name in "abcdef"])
        await side.until(lambda: len(side.calls) > 1)
        path.write_text("- other-key\n")
        await side.until(lambda: not side.live)
        # With the client's new key it goes on.
        path.write_text("- {key: new-key, name: acme}\n")
        side.behaviours["a"] = serve
        await accepted(router.of("new-key"))
        done = await until(router.of("new-key"), made.id, "completed")
        assert done.request_counts is not None and done.request_counts.completed == 6


async def accepted(client: openai.AsyncOpenAI) -> None:
    """Wait until the client's key opens the API."""
    async with asyncio.timeout(10):
        while True:
            try:
                await client.models.list()
                return
            except openai.AuthenticationError:
                await asyncio.sleep(0.01)


async def test_the_rate_of_a_key_holds_for_its_batches(tmp_path: Path) -> None:
    side = FarSide(a=serve)
    slow = ApiKey(key=SecretStr(KEY), name="tenant", requests_per_minute=0.05, burst_s=3_600)
    settings = config(tmp_path).model_copy(update={"api_keys": (slow,)})
    async with serving(settings, side) as router:
        made = await submit(router.client, [line(name) for name in "abcdef"])
        await side.until(lambda: len(side.calls) == 3)
        await router.client.batches.cancel(made.id)
        done = await until(router.client, made.id, "cancelled")
        assert done.request_counts is not None and done.request_counts.completed == 3
    assert len(side.calls) == 3
