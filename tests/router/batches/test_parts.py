"""The parts of batches alone: input lines, results, attempts."""

from __future__ import annotations

import asyncio
import json
from io import BytesIO
from pathlib import Path

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
    LineError,
    Reply,
    answered,
    check_lines,
    parse_line,
    slices,
)
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.tenancy.limits import ANYONE, RateLimiter
from tests.examples import examples
from tests.router.batches.routers import URL, config, jsonl, line
from tests.router.far_side import Edge, FarSide, answer, fail, hang, serve

FAST = settings(max_examples=examples(60))
LINE_BYTES = 1_000


def check(content: bytes, max_lines: int = 1_000) -> list[tuple[str, int | None]]:
    checked = check_lines(BytesIO(content), URL, max_lines, LINE_BYTES)
    return [(fault.code, fault.line) for fault in checked.faults]


def read(content: bytes) -> list[str]:
    return [each.custom_id for some in slices(BytesIO(content), URL, LINE_BYTES) for each in some]


# Input.


@FAST
@given(content=st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_any_input_is_checked_and_what_passes_can_be_read(content: bytes) -> None:
    checked = check_lines(BytesIO(content), URL, 10, LINE_BYTES)
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
    assert check(jsonl(good), max_lines=2) == [("too_many_lines", None)]
    assert check(jsonl(good), max_lines=3) == []


def test_a_line_is_cut_at_its_limit_and_the_next_is_whole() -> None:
    room = LINE_BYTES - len(jsonl([line("a", text="")])) + 1
    fits, long = jsonl([line("a", text="x" * room)]), jsonl([line("b", text="x" * (room + 1))])
    assert len(fits) == LINE_BYTES + 1
    for end in (b"\n", b"\r\n"):
        assert check(fits[:-1] + end + jsonl([line("c")])) == []
        assert check(long[:-1] + end + jsonl([line("c")])) == [("line_too_large", 1)]
    assert check(b"x" * 300_000 + b"\n" + jsonl([line("c")])) == [("line_too_large", 1)]
    assert check(fits[:-1]) == []


def test_the_longest_id() -> None:
    raw = json.dumps(line("x" * MAX_CUSTOM_ID)).encode()
    assert parse_line(1, raw, URL, 10_000).custom_id == "x" * MAX_CUSTOM_ID
    with pytest.raises(LineError, match="1 to 512 characters"):
        parse_line(1, json.dumps(line("x" * (MAX_CUSTOM_ID + 1))).encode(), URL, 10_000)


def test_slices_are_bounded_and_know_their_lines() -> None:
    content = b"\n" + jsonl(line(str(number)) for number in range(SLICE_LINES * 2 + 1))
    found = list(slices(BytesIO(content), URL, LINE_BYTES))
    assert [len(some) for some in found] == [SLICE_LINES, SLICE_LINES, 1]
    assert [each.number for some in found for each in some] == list(range(2, len(found[0]) * 2 + 3))


# Results.


def test_an_answer_that_is_not_json_is_an_error() -> None:
    asked = BatchRequest(1, "a", {}, 10)
    result = answered(asked, Reply(200, "r", b"<html>"))
    assert not result.ok
    assert json.loads(result.entry)["error"]["code"] == "invalid_response"
    half = answered(asked, Reply(200, "r", b'{"text": "\\ud800"}'))
    assert json.loads(half.entry)["response"]["body"] == {"text": "\ud800"}


# Attempts.


class Pauses:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def caller(side: FarSide, tmp_path: Path, **batches: int) -> tuple[LineCaller, Pauses, Edge]:
    edge = Edge(side, config=config(tmp_path, **batches).model_copy(update={"max_attempts": 1}))
    pauses, metrics = Pauses(), BatchMetrics(CollectorRegistry())
    return LineCaller(edge.config, edge.fleets, RateLimiter(), metrics, pauses), pauses, edge


async def answered_by(lines: LineCaller) -> Reply:
    admitted = await lines.admit(BODY, URL, lambda: ANYONE)
    assert not isinstance(admitted, Reply)
    return await lines.run(admitted)


class Late:
    """A replica that answers otherwise at first."""

    def __init__(self, *first: object) -> None:
        self.first = list(first)

    def __call__(self, side: FarSide, replica: str, request: object) -> object:
        behaviour = self.first.pop(0) if self.first else serve
        return behaviour(side, replica, request)  # type: ignore[operator]


BODY = BatchRequest(1, "a", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, 100)
DEAD = fail(ReplicaFailedError(Reason.REPLICA_FAILED, "The replica died.", dead=True))
FULL = answer(503, b"{}")
NONE = fail(ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.", retry=False))


async def test_lack_of_room_never_ends_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.lines.MAX_ATTEMPTS", 1)
    side = FarSide(a=Late(*[FULL, NONE, answer(429, b"{}")] * 8))  # type: ignore[arg-type]
    lines, pauses, edge = caller(side, tmp_path)
    reply = await answered_by(lines)
    assert reply.status == 200
    labels = {"class": "batch", "endpoint": "chat"}
    assert edge.sample("sluice_requests_total", **labels, outcome="ok") == 1
    assert edge.sample("sluice_requests_total", **labels, outcome="refused") == 0
    assert len(pauses.seconds) == 24
    assert FIRST_PAUSE_S / 2 <= pauses.seconds[0] <= FIRST_PAUSE_S
    assert all(seconds <= LONGEST_PAUSE_S for seconds in pauses.seconds)
    assert min(pauses.seconds[-10:]) >= LONGEST_PAUSE_S / 2
    ids = [request.request_id for _, request in side.calls]
    assert len(set(ids)) == len(ids) == 25


@pytest.mark.parametrize(("behaviour", "status"), [(DEAD, 503), (answer(500, b"{}"), 500)])
async def test_a_line_that_fails_by_itself_ends(
    tmp_path: Path, behaviour: object, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.lines.MAX_ATTEMPTS", 3)
    side = FarSide(a=behaviour)  # type: ignore[arg-type]
    lines, pauses, _ = caller(side, tmp_path)
    reply = await answered_by(lines)
    assert (reply.status, len(side.calls), len(pauses.seconds)) == (status, 3, 2)
    for seconds, longest_s in zip(
        pauses.seconds, (FAILED_PAUSE_S, 2 * FAILED_PAUSE_S), strict=True
    ):
        assert longest_s / 2 <= seconds <= longest_s


async def test_a_line_outlives_the_time_in_which_a_dead_replica_is_replaced(tmp_path: Path) -> None:
    side = FarSide(a=Late(*[DEAD] * 4))  # type: ignore[arg-type]
    lines, pauses, _ = caller(side, tmp_path)
    assert (await answered_by(lines)).status == 200
    assert sum(pauses.seconds) > 30


async def test_a_failure_and_then_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.lines.MAX_ATTEMPTS", 3)
    side = FarSide(a=Late(DEAD, DEAD))  # type: ignore[arg-type]
    lines, _, _ = caller(side, tmp_path)
    assert (await answered_by(lines)).status == 200


async def test_a_line_that_is_given_up_frees_its_replica(tmp_path: Path) -> None:
    side = FarSide(a=hang)
    lines, _, _ = caller(side, tmp_path)
    task = asyncio.create_task(answered_by(lines))
    await side.until(lambda: bool(side.live))
    task.cancel()
    await side.until(lambda: not side.live)
