"""The client of the live benchmarks, against a server that ends answers in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from sluice.benchmarks.live.client import (
    AnswerCheck,
    End,
    Outcome,
    WrongAnswerError,
    replay,
    simulated,
)
from sluice.benchmarks.live.report import Meter
from sluice.protocol.requests import Endpoint
from sluice.replica.openai_format import ResponseWriter, parse_call
from sluice.scheduling.request.objective import SLO
from sluice.simulation.cluster import LOOP_ENDED
from sluice.simulation.workload import Arrival, Turn, Workload
from tests.faults.kinds import KINDS

SLOW = SLO(ttft_s=60.0, tpot_s=60.0, service_class="standard")


TOKENS = 3
ERROR = b'{"error": {"message": "none", "type": "t", "param": null, "code": "%s"}}'
BROKEN = b"data: " + ERROR % b"stream_broken" + b"\n\n"
STATUSES = {
    11: (429, ERROR % b"slo_unattainable", End.REFUSED, "slo_unattainable"),
    12: (503, ERROR % b"no_replica", End.REFUSED, "no_replica"),
    13: (500, ERROR % b"internal_error", End.FAILED, "internal_error"),
    14: (502, b"bad gateway", End.FAILED, "status 502"),
}
BREAKS, HANGS = 21, 22


def answer_of(body: dict[str, Any]) -> list[bytes]:
    """The events of the answer that a simulated engine gives, or its body."""
    endpoint: Endpoint = "chat" if "messages" in body else "completions"
    call = parse_call(endpoint, body, "model", 1_000)
    writer = ResponseWriter(call, "r", "model", 0)
    if not call.stream:
        return [writer.body()]
    deltas = [
        writer.delta(choice, token, token + 1)
        for token in range(call.max_tokens)
        for choice in range(call.choices)
    ]
    # The usage and the end mark are events of their own.
    closing = [event + b"\n\n" for event in writer.closing().split(b"\n\n") if event]
    return [*filter(None, [writer.opening()]), *deltas, *closing]


Spoil = Callable[[list[bytes]], list[bytes]]

ENDINGS: dict[int, tuple[Spoil, End, str]] = {
    1: (lambda events: events, End.ANSWERED, ""),
    2: (lambda events: events[:1] + events[2:], End.SILENT, "tokens are missing or there twice"),
    3: (lambda events: events[:2], End.SILENT, "no end mark"),
    4: (lambda events: [], End.SILENT, "no end mark"),
    5: (lambda events: [*events[:2], BROKEN], End.FAILED, "stream_broken"),
    # A first token that comes in two pieces of the connection.
    6: (lambda e: [e[0][:30], e[0][30:] + e[1], *e[2:]], End.ANSWERED, ""),
    7: (lambda e: [e[0], *e], End.SILENT, "tokens are missing or there twice"),
    8: (lambda e: [*e[:2], *e[3:]], End.SILENT, "tokens are missing"),
    9: (lambda e: [*e, e[-1]], End.SILENT, "more after the end mark"),
    10: (lambda e: [e[0].replace(b"cmpl-r", b"cmpl-s"), *e[1:]], End.SILENT, "another id"),
    15: (lambda e: [x.replace(b'_tokens": 3', b'_tokens": 2') for x in e], End.SILENT, "number"),
    16: (lambda e: [x.replace(b'"prompt_', b'"p') for x in e], End.SILENT, "prompt tokens"),
    17: (lambda e: [x.replace(b'"length"', b"null") for x in e], End.SILENT, "no finish reason"),
    18: (lambda e: [*e[:3], *e[4:]], End.SILENT, "another number of tokens"),
    19: (lambda e: [*e[:2], b"data: {\n\n"], End.SILENT, "not JSON"),
    20: (lambda e: [*e[:1], e[0] + BROKEN], End.SILENT, "there twice"),
}


async def _answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    kind = -(-len(body.get("prompt", "xxxx")) // 4)
    if kind in STATUSES:
        status, answer, *_ = STATUSES[kind]
        return web.Response(status=status, body=answer)
    response = web.StreamResponse(
        headers={"x-sluice-admission": "guaranteed", "x-sluice-predicted-ttft-ms": "250.5"}
    )
    await response.prepare(request)
    events = answer_of(body)
    for event in ENDINGS.get(kind, (lambda e: e[:2], 0, 0))[0](events):
        await response.write(event)
    if kind == BREAKS and request.transport is not None:
        request.transport.abort()
    if kind == HANGS:
        await asyncio.Event().wait()
    return response


@asynccontextmanager
async def far_side() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/{path:.*}", _answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
    finally:
        await runner.cleanup()


async def outcomes_of(kinds: list[int], grace_s: float = 30.0, **options: Any) -> list[Outcome]:
    arrivals = tuple(Arrival(0.001 * n, kind, TOKENS, SLOW) for n, kind in enumerate(kinds))
    async with far_side() as url:
        return await replay(url, "model", Workload("test", arrivals), grace_s, **options)


async def test_the_client_tells_every_ending_from_every_other() -> None:
    expected = {kind: (end, reason) for kind, (_, end, reason) in ENDINGS.items()}
    expected |= {kind: (end, reason) for kind, (_, _, end, reason) in STATUSES.items()}
    outcomes = await outcomes_of(list(expected))
    for kind, outcome in zip(expected, outcomes, strict=True):
        end, reason = expected[kind]
        assert outcome.end is end, (kind, outcome)
        assert reason in outcome.reason and bool(reason) == bool(outcome.reason), (kind, outcome)
    answered = [each for each in outcomes if each.end is End.ANSWERED]
    assert all(each.attained and each.admission == "guaranteed" for each in answered)
    assert not any(each.attained for each in outcomes if each not in answered)


@given(st.integers(0, 40), st.data())
def test_an_answer_is_whole_however_it_is_cut_and_no_other_one_is(
    number: int, data: st.DataObject
) -> None:
    """Over every kind of request: all of it passes in pieces of any size, and not without an event,
    with one twice, or with two the other way round."""
    arrival = Arrival(0.0, 12, data.draw(st.integers(2, 9)), SLOW)
    kind = data.draw(st.sampled_from([kind for kind in KINDS if kind.streams]))
    body = kind.body("model", number, arrival)
    expected = simulated("chat" if "messages" in body else "completions", body)
    events = answer_of(body)
    if events[0].startswith(b"data: ") and b'"role"' in events[0]:
        opening, *events = events  # says nothing, so that it is harmless twice
        events = [opening + events[0], *events[1:]]

    def read(parts: list[bytes]) -> None:
        check = AnswerCheck(expected)
        for part in parts:
            check.feed(part)
        check.end_stream()

    whole = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    read([whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)])
    place = data.draw(st.integers(0, len(events) - 1))
    missing = events[:place] + events[place + 1 :]
    twice = events[: place + 1] + events[place:]
    for spoilt in (missing, twice):
        with pytest.raises(WrongAnswerError):
            read(spoilt)


async def test_every_kind_of_request_is_answered_and_known() -> None:
    kinds = [kind.body for kind in KINDS]

    def body(model: str, number: int, arrival: Arrival) -> dict[str, Any]:
        return kinds[number](model, number, arrival)

    outcomes = await outcomes_of([1] * len(kinds), body=body)
    assert [(each.end, each.reason) for each in outcomes] == [(End.ANSWERED, "")] * len(kinds)
    assert all(each.attained for each in outcomes)


async def test_a_client_that_goes_away_has_left_and_what_is_refused_is_refused() -> None:
    outcomes = await outcomes_of([1, 12, HANGS, 1], leaves_after=[2, 2, 2, 9].__getitem__)
    ends = [each.end for each in outcomes]
    assert ends == [End.LEFT, End.REFUSED, End.LEFT, End.ANSWERED]


async def test_of_a_real_engine_the_frame_is_checked() -> None:
    outcomes = await outcomes_of([1, 7, 18, 17, 2], exact=False)
    assert [each.end for each in outcomes] == [
        *(End.ANSWERED, End.ANSWERED, End.SILENT, End.SILENT, End.ANSWERED)
    ]


async def test_a_connection_that_breaks_after_the_head_is_cut() -> None:
    (outcome,) = await outcomes_of([BREAKS])
    assert outcome.end is End.CUT


async def test_a_stream_that_never_ends_is_silent_after_the_grace() -> None:
    hanging, answered = await outcomes_of([HANGS, 1], grace_s=0.5)
    assert (hanging.end, hanging.reason) == (End.SILENT, "unfinished")
    assert answered.end is End.ANSWERED


async def test_a_turn_is_sent_when_its_tool_is_done_and_not_behind_a_refused_one() -> None:
    def turn(kind: int, *after: int) -> Arrival:
        stated = Turn(1, after=after, gap_s=0.05 if after else 0.0)
        return Arrival(0.0, kind, TOKENS, SLOW, turn=stated)

    turns = (turn(1), turn(1, 0), turn(1, 0, 1), turn(12), turn(1, 3), turn(1, 4, 2))
    async with far_side() as url:
        found = await replay(url, "model", Workload("loops", turns))
    ends = [(each.end, each.reason) for each in found]
    assert ends[:3] == [(End.ANSWERED, "")] * 3
    assert ends[3:] == [
        (End.REFUSED, "no_replica"),
        *[(End.FAILED, LOOP_ENDED)] * 2,
    ]
    for before, after in pairwise(found[:3]):
        assert before.ended_s is not None
        assert after.sent_s >= before.ended_s + 0.05


async def test_nobody_there_is_a_failure_and_not_silence() -> None:
    async with far_side() as url:
        pass
    workload = Workload("test", (Arrival(0.0, 1, TOKENS, SLOW),))
    (outcome,) = await replay(url, "model", workload)
    assert outcome.end is End.FAILED


def test_all_that_was_stated_counts() -> None:
    slo = SLO(ttft_s=2.0, tpot_s=0.1, e2e_s=3.0)
    made = [
        Outcome(slo, 10, 5, 0.0, 0.0, End.ANSWERED, "", ended_s, ttft_s=1.0, tpot_s=0.05)
        for ended_s in (2.9, 3.1)
    ]
    assert [each.attained for each in made] == [True, False]


def test_the_meter_sees_what_this_process_does() -> None:
    meter = Meter()
    assert sum(range(2_000_000)) > 0
    client = meter.stop().kinds["client"]
    assert client.cores > 0 and client.cpu_s > 0 and client.memory_mib > 10
