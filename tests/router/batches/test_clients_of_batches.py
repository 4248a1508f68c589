"""Batches of clients with rate limits, and of clients whose keys change or go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from sluice.router.batches.lines import (
    LONGEST_PAUSE_S,
    BatchMetrics,
    BatchRequest,
    LineCaller,
    Reply,
)
from sluice.router.batches.run import LinePlaces
from sluice.router.tenancy.auth import ApiKey
from sluice.router.tenancy.limits import Client, RateLimiter, TenantLimits
from tests.router.batches.routers import (
    KEY,
    OTHER_KEY,
    URL,
    Held,
    config,
    line,
    said,
    serving,
    submit,
    until,
    upload,
)
from tests.router.far_side import Clock, Edge, FarSide, answer, serve

LINE = BatchRequest(1, "a", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, 100)


def client(**caps: Any) -> Client:
    return Client("acme", "name-acme", TenantLimits(**caps))


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

    def limiter_headers(self, who: Client) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.limiter.headers(who)}

    def left(self, who: Client) -> dict[str, str]:
        headers = self.limiter_headers(who)
        return {kind: headers[f"x-ratelimit-remaining-{kind}"] for kind in ("requests", "tokens")}


async def answered(lines: Lines, who: Client) -> Reply:
    admitted = await lines.caller.admit(LINE, URL, lambda: who)
    assert not isinstance(admitted, Reply)
    return await lines.caller.run(admitted)


async def test_lines_count_as_requests_and_wait_for_the_rate(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    acme = client(requests_per_minute=60, tokens_per_minute=60_000, burst_s=2)
    for _ in range(2):
        assert (await answered(lines, acme)).status == 200
    assert lines.left(acme) == {"requests": "0", "tokens": "1984"}
    assert lines.pauses_s == []
    for _ in range(2):
        assert (await answered(lines, acme)).status == 200
    assert lines.pauses_s == [pytest.approx(1), pytest.approx(1)]


async def test_a_line_that_is_sent_again_counts_once(tmp_path: Path) -> None:
    side = FarSide(a=answer(503, b"{}"))
    lines = Lines(side, tmp_path)
    acme = client(requests_per_minute=0.06, tokens_per_minute=10, burst_s=3_600)
    running = asyncio.create_task(answered(lines, acme))
    await side.until(lambda: len(side.calls) == 5)
    assert lines.left(acme)["requests"] == "2"
    side.behaviours["a"] = serve
    assert (await running).status == 200
    assert len(side.calls) > 5
    # Of eight tokens that it has used some have drained while it waited.
    left = 600 - max(0.0, 8 - sum(lines.pauses_s) * 10 / 60)
    assert lines.left(acme) == {"requests": "2", "tokens": str(int(left))}


async def test_a_line_that_is_not_run_gives_its_tokens_back(tmp_path: Path) -> None:
    lines, acme = Lines(FarSide(a=serve), tmp_path), client(tokens_per_minute=1_000)
    admitted = await lines.caller.admit(LINE, URL, lambda: acme)
    assert not isinstance(admitted, Reply)
    assert int(lines.limiter_headers(acme)["x-ratelimit-remaining-tokens"]) < 500
    admitted.drop()
    assert lines.limiter_headers(acme)["x-ratelimit-remaining-tokens"] == "1000"


async def test_a_long_wait_is_made_of_short_ones(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    acme = client(requests_per_minute=0.5)
    lines.limiter.count_request(acme)
    await lines.caller.admit(LINE, URL, lambda: acme)
    assert lines.pauses_s[:3] == [LONGEST_PAUSE_S] * 3
    assert sum(lines.pauses_s) == pytest.approx(120, abs=0.1)


async def test_a_wait_follows_what_the_client_may_do_by_then(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    now = client(requests_per_minute=0.001)
    lines.limiter.count_request(now)

    async def pause(seconds: float) -> None:
        nonlocal now
        now = client()
        await Lines.pause(lines, seconds)

    lines.caller._pause = pause
    admitted = await lines.caller.admit(LINE, URL, lambda: now)
    assert lines.pauses_s == [LONGEST_PAUSE_S]
    # Nor may it do what it may do no more.
    now = client(models=("another",))
    assert not isinstance(admitted, Reply)
    assert (await lines.caller.run(admitted)).status == 404


async def test_places_of_a_client_follow_its_caps_and_leave_nothing_behind() -> None:
    places = LinePlaces(3)
    now, other = client(max_in_flight=1), Client("other", "name-other")
    first = await places.take(lambda: now)
    waiting = [asyncio.create_task(places.take(lambda: now)) for _ in range(3)]
    # Others do not wait behind them.
    others = await places.take(lambda: other)
    assert not any(task.done() for task in waiting)
    now = client(max_in_flight=2)
    others()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False, False]
    now = client(max_in_flight=1)
    first()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False, False]
    # One that gives up, before it has a place and when it just got one.
    waiting[1].cancel()
    waiting[0].result()()
    waiting[2].cancel()
    await asyncio.wait(waiting)
    assert (places._free, places._of, places._waiting) == (3, {}, [])


async def test_lines_that_wait_for_their_rate_hold_up_no_other_client(tmp_path: Path) -> None:
    side = FarSide(a=serve)
    # Room for one line at a time, and a little: the next one waits for twenty seconds.
    slow = ApiKey(
        key=SecretStr(KEY), name="slow", limits=TenantLimits(tokens_per_minute=8.7, burst_s=3600)
    )
    settings = config(tmp_path, max_lines_in_flight=2)
    settings = settings.model_copy(update={"api_keys": (slow, SecretStr(OTHER_KEY))})
    async with serving(settings, side) as router:
        await submit(router.client, [line(name) for name in "abcdef"])
        await side.until(lambda: len(side.calls) == 1)
        made = await submit(router.of(OTHER_KEY), [line(name) for name in "uvwxyz"])
        await until(router.of(OTHER_KEY), made.id, "completed")
    assert said(side.calls) == ["a", *"uvwxyz"]


async def test_a_running_batch_follows_the_caps_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.tenancy.auth.POLL_S", 0.01)
    folder, path = tmp_path / "batches", tmp_path / "keys.yaml"
    monkeypatch.setattr("sluice.router.batches.lines.LONGEST_PAUSE_S", 0.01)
    path.write_text(f"- {{key: {KEY}, name: acme, limits: {{tokens_per_minute: 0.001}}}}\n")
    side = FarSide(a=serve)
    settings = config(folder).model_copy(update={"api_keys_file": path})
    async with serving(settings, side) as router:
        made = await submit(router.client, [line(name) for name in "abcdef"])
        await side.until(lambda: len(side.calls) == 1)
        path.write_text(f"- {{key: {KEY}, name: acme, limits: {{max_output_tokens: 7}}}}\n")
        done = await until(router.client, made.id, "completed")
        assert done.request_counts is not None and done.request_counts.completed == 6
    held = [request.body.get("max_completion_tokens") for _, request in side.calls]
    assert held == [None, *[7] * 5]


async def test_the_batches_of_a_key_that_is_taken_away_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.tenancy.auth.POLL_S", 0.01)
    folder, path = tmp_path / "batches", tmp_path / "keys.yaml"
    path.write_text(f"- {{key: {KEY}, name: acme}}\n- other-key\n")
    side = FarSide(a=Held(1))
    settings = config(folder).model_copy(update={"api_keys_file": path})
    async with serving(settings, side) as router:
        made = await submit(router.client, [line(name) for name in "abcdef"])
        await side.until(lambda: len(side.live) == 5)
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
    async with asyncio.timeout(120):
        while True:
            try:
                await client.models.list()
                return
            except openai.AuthenticationError:
                await asyncio.sleep(0.01)


async def test_the_rate_of_a_key_holds_for_its_batches(tmp_path: Path) -> None:
    side = FarSide(a=serve)
    slow = ApiKey(
        key=SecretStr(KEY),
        name="tenant",
        limits=TenantLimits(requests_per_minute=5 / 60, burst_s=3600),
    )
    settings = config(tmp_path).model_copy(update={"api_keys": (slow,)})
    async with serving(settings, side) as router:
        made = await submit(router.client, [line(name) for name in "abcdef"])
        # The upload and the batch itself are requests, too.
        await side.until(lambda: len(side.calls) == 3)
        with pytest.raises(openai.RateLimitError):
            await upload(router.client, [line("g")])
        with pytest.raises(openai.RateLimitError):
            await router.client.batches.create(
                input_file_id="file-x", endpoint=URL, completion_window="24h"
            )
        await router.client.batches.cancel(made.id)
        done = await until(router.client, made.id, "cancelled")
        assert done.request_counts is not None and done.request_counts.completed == 3
    assert len(side.calls) == 3
