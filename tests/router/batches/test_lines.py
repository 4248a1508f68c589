"""The lines of batches alone: their input, their results, and the calls that they make."""

from __future__ import annotations

import asyncio
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from sluice.router.batches.lines import (
    FAILED_PAUSE_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_CUSTOM_ID,
    MAX_FAULTS,
    SLICE_LINES,
    BatchMetrics,
    BatchRequest,
    LineCaller,
    Reply,
    answered,
    check_lines,
    slices,
)
from sluice.router.batches.run import LinePlaces
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.tenancy.limits import ANYONE, Client, RateLimiter, TenantLimits
from tests.examples import examples
from tests.router.batches.routers import URL, config, jsonl, line
from tests.router.far_side import Clock, Edge, FarSide, answer, fail, serve

FAST = settings(max_examples=examples(60))
LINE_BYTES = 1_000


def check(content: bytes) -> list[tuple[str, int | None]]:
    checked = check_lines(BytesIO(content), URL, LINE_BYTES)
    return [(fault.code, fault.line) for fault in checked.faults]


def read(content: bytes) -> list[str]:
    return [each.custom_id for some in slices(BytesIO(content), URL, LINE_BYTES) for each in some]


# Input.


@FAST
@given(content=st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_any_input_is_checked_and_what_passes_can_be_read(content: bytes) -> None:
    checked = check_lines(BytesIO(content), URL, LINE_BYTES)
    assert bool(checked.faults) or len(read(content)) == checked.total > 0


@FAST
@given(
    names=st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), min_size=1, unique=True
    ),
    blanks=st.lists(st.sampled_from([b"\n", b" \r\n", b""]), min_size=1),
    last=st.booleans(),
)
def test_every_request_is_read_once(names: list[str], blanks: list[bytes], last: bool) -> None:
    lines = [jsonl([line(name)]) + blanks[n % len(blanks)] for n, name in enumerate(names)]
    content = b"".join(lines).rstrip(b"\n" if last else b"")
    assert check(content) == []
    assert read(content) == names


def test_faults_say_which_line_and_are_bounded() -> None:
    good = [line(str(number)) for number in range(3)]
    assert check(jsonl(good) + b"\n" + b"[1]\n" + jsonl([good[0]])) == [
        ("invalid_json_line", 5),
        ("duplicate_custom_id", 6),
    ]
    assert len(check(b"x\n" * 1_000)) == MAX_FAULTS


def changed(**fields: Any) -> bytes:
    return jsonl([{**line("a"), **fields}])


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        (b"{", [("invalid_json_line", 1)]),
        (changed(custom_id=7), [("invalid_custom_id", 1)]),
        (changed(custom_id="x" * MAX_CUSTOM_ID), []),
        (changed(custom_id="x" * (MAX_CUSTOM_ID + 1)), [("invalid_custom_id", 1)]),
        (changed(method="GET"), [("invalid_method", 1)]),
        (changed(url="/v1/completions"), [("invalid_url", 1)]),
        (changed(body=[]), [("invalid_body", 1)]),
        (jsonl(map(line, "abcde")), []),
        (jsonl(map(line, "abcdef")), [("too_many_lines", None)]),
        (b"\n \n", [("empty_file", None)]),
    ],
)
def test_what_is_no_input(
    content: bytes, faults: list[tuple[str, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.lines.MAX_LINES", 5)
    assert check(content) == faults


def test_a_line_is_cut_at_its_limit_and_the_next_is_whole() -> None:
    room = LINE_BYTES - len(jsonl([line("a", text="")])) + 1
    fits, long = jsonl([line("a", text="x" * room)]), jsonl([line("b", text="x" * (room + 1))])
    assert len(fits) == LINE_BYTES + 1
    for end in (b"\n", b"\r\n"):
        assert check(fits[:-1] + end + jsonl([line("c")])) == []
        assert check(long[:-1] + end + jsonl([line("c")])) == [("line_too_large", 1)]
    assert check(b"x" * 300_000 + b"\n" + jsonl([line("c")])) == [("line_too_large", 1)]
    assert check(fits[:-1]) == []


def test_slices_are_bounded_and_know_their_lines() -> None:
    content = b"\n" + jsonl(line(str(number)) for number in range(SLICE_LINES * 2 + 1))
    found = list(slices(BytesIO(content), URL, LINE_BYTES))
    assert [len(some) for some in found] == [SLICE_LINES, SLICE_LINES, 1]
    assert [each.number for some in found for each in some] == list(range(2, len(found[0]) * 2 + 3))


# Results.


def test_an_answer_that_is_not_json_is_an_error() -> None:
    result = answered(LINE, Reply(200, "r", b"<html>"))
    assert not result.ok
    assert json.loads(result.entry)["error"]["code"] == "invalid_response"
    half = answered(LINE, Reply(200, "r", b'{"text": "\\ud800"}'))
    assert json.loads(half.entry)["response"]["body"] == {"text": "\ud800"}


# Attempts and rate limits.

LINE = BatchRequest(1, "a", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, 100)


class Lines:
    """A caller whose pauses let the time pass."""

    def __init__(self, side: FarSide, tmp_path: Path) -> None:
        self.side, self.clock, self.pauses_s = side, Clock(), list[float]()
        self.limiter = RateLimiter(clock=self.clock)
        settings = config(tmp_path).model_copy(update={"max_attempts": 1})
        self.edge = Edge(side, config=settings, clock=self.clock)
        metrics = BatchMetrics(CollectorRegistry())
        self.caller = LineCaller(
            self.edge.config, self.edge.fleets, self.limiter, metrics, self.pause
        )
        self.who: Client = ANYONE
        self.after_a_pause: Client | None = None

    async def pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.clock.now_s += seconds
        self.who = self.after_a_pause or self.who

    def left(self, kind: str) -> int:
        headers = dict(self.limiter.headers(self.who))
        return int(headers[f"x-ratelimit-remaining-{kind}".encode()])

    async def admitted(self) -> Any:
        admitted = await self.caller.admit(LINE, URL, lambda: self.who)
        assert not isinstance(admitted, Reply)
        return admitted

    async def reply(self) -> Reply:
        return await self.caller.run(await self.admitted())


def client(**caps: Any) -> Client:
    return Client("acme", "name-acme", TenantLimits(**caps))


def answers(*first: Any) -> FarSide:
    """A replica that answers otherwise at first."""
    left = list(first)
    behaviour: Any = lambda *call: (left.pop(0) if left else serve)(*call)  # noqa: E731
    return FarSide(a=behaviour)


DEAD = fail(ReplicaFailedError(Reason.REPLICA_FAILED, "The replica died.", dead=True))
FULL = answer(503, b"{}")
NONE = fail(ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.", retry=False))


async def test_lack_of_room_never_ends_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.lines.MAX_ATTEMPTS", 1)
    lines = Lines(answers(*[FULL, NONE, answer(429, b"{}")] * 8), tmp_path)
    assert (await lines.reply()).status == 200
    labels = {"class": "batch", "endpoint": "chat"}
    assert lines.edge.sample("sluice_requests_total", **labels, outcome="ok") == 1
    assert lines.edge.sample("sluice_requests_total", **labels, outcome="refused") == 0
    pauses_s = lines.pauses_s
    assert len(pauses_s) == 24
    assert FIRST_PAUSE_S / 2 <= pauses_s[0] <= FIRST_PAUSE_S
    assert max(pauses_s) <= LONGEST_PAUSE_S and min(pauses_s[-10:]) >= LONGEST_PAUSE_S / 2
    ids = [request.request_id for _, request in lines.side.calls]
    assert len(set(ids)) == len(ids) == 25


@pytest.mark.parametrize(("behaviour", "status"), [(DEAD, 503), (answer(500, b"{}"), 500)])
async def test_a_line_that_fails_by_itself_ends(
    tmp_path: Path, behaviour: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.lines.MAX_ATTEMPTS", 3)
    lines = Lines(FarSide(a=behaviour), tmp_path)
    assert ((await lines.reply()).status, len(lines.side.calls)) == (status, 3)
    first_s, second_s = lines.pauses_s
    assert FAILED_PAUSE_S / 2 <= first_s <= FAILED_PAUSE_S <= second_s <= 2 * FAILED_PAUSE_S


async def test_a_line_outlives_the_time_in_which_a_dead_replica_is_replaced(tmp_path: Path) -> None:
    lines = Lines(answers(*[DEAD] * 4), tmp_path)
    assert (await lines.reply()).status == 200
    assert sum(lines.pauses_s) > 30


async def test_lines_count_as_requests_and_wait_for_the_rate(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    lines.who = client(requests_per_minute=60, tokens_per_minute=60_000, burst_s=2)
    for _ in range(2):
        assert (await lines.reply()).status == 200
    assert (lines.left("requests"), lines.left("tokens"), lines.pauses_s) == (0, 1984, [])
    for _ in range(2):
        assert (await lines.reply()).status == 200
    assert lines.pauses_s == [pytest.approx(1), pytest.approx(1)]


async def test_a_line_that_is_sent_again_counts_once(tmp_path: Path) -> None:
    lines = Lines(answers(*[FULL] * 5), tmp_path)
    lines.who = client(requests_per_minute=0.06, tokens_per_minute=10, burst_s=3_600)
    assert (await lines.reply()).status == 200
    assert len(lines.side.calls) == 6 and lines.left("requests") == 2
    # Of eight tokens that it has used some have drained while it waited.
    assert lines.left("tokens") == int(600 - max(0.0, 8 - sum(lines.pauses_s) * 10 / 60))


async def test_a_line_that_is_not_run_gives_its_tokens_back(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    lines.who = client(tokens_per_minute=1_000)
    admitted = await lines.admitted()
    assert lines.left("tokens") < 500
    admitted.drop()
    assert lines.left("tokens") == 1_000


async def test_a_long_wait_is_made_of_short_ones(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    lines.who = client(requests_per_minute=0.5)
    lines.limiter.count_request(lines.who)
    await lines.admitted()
    assert lines.pauses_s[:3] == [LONGEST_PAUSE_S] * 3
    assert sum(lines.pauses_s) == pytest.approx(120, abs=0.1)


async def test_a_wait_follows_what_the_client_may_do_by_then(tmp_path: Path) -> None:
    lines = Lines(FarSide(a=serve), tmp_path)
    lines.who, lines.after_a_pause = client(requests_per_minute=0.001), client()
    lines.limiter.count_request(lines.who)
    admitted = await lines.admitted()
    assert lines.pauses_s == [LONGEST_PAUSE_S]
    # Nor may it do what it may do no more.
    lines.who = client(models=("another",))
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
    # All three are free again.
    async with asyncio.timeout(60):
        for _ in range(3):
            await places.take(lambda: other)
