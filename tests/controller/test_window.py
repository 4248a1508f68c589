"""Questions of several routers that wait for each other, and are decided together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.transport import channel
from sluice.controller.transport.channel import TURN_S, ReportQueue, RouteServer, Window
from sluice.protocol.connection import Frames
from sluice.protocol.messages import Refused, Report, Routed, RouteReply, decode_answer
from sluice.scheduling.placement.placer import MAX_TOGETHER
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import Tier
from tests.controller.fleet import Clock, hello
from tests.controller.test_channel import connected


class Taken:
    """A queue whose reports take ``TURN_S`` each, by a clock of its own, and what it took in."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.queue = ReportQueue(self._take, self.clock)
        self.line = Frames(1)
        self.numbers: list[int] = []
        self.wanted: list[bool] = []

    def add(self, *numbers: int, left_s: float = 10.0, size: int = 1) -> None:
        for number in numbers:
            report = Report(number, 0.0, left_s, msgspec.Raw(b""))
            self.queue.add(self.line, report, self.clock() + left_s, size)

    def _take(self, connection: Frames, report: Report, wanted: bool) -> None:
        assert connection is self.line
        self.clock.advance(TURN_S)
        self.numbers.append(report.number)
        self.wanted.append(wanted)

    async def turns(self, count: int) -> list[int]:
        """How many were taken in after each turn of the event loop."""
        found = []
        for _ in range(count):
            await asyncio.sleep(0)
            found.append(len(self.numbers))
        return found


async def test_questions_are_looked_for_after_each_part_of_the_reports() -> None:
    taken = Taken()
    taken.add(*range(4))
    assert taken.numbers == [], "reading one takes no time from a decision"
    assert await taken.turns(5) == [1, 2, 3, 4, 4]
    assert taken.numbers == [0, 1, 2, 3]


async def test_reports_get_as_much_time_as_decisions() -> None:
    taken = Taken()
    taken.add(*range(9))
    assert await taken.turns(1) == [1]
    taken.queue.owed_s += 5 * TURN_S  # of decisions meanwhile
    assert await taken.turns(3) == [6, 7, 8]


async def test_a_report_whose_sender_no_longer_waits_is_answered_so_and_a_closed_one_dropped() -> (
    None
):
    taken = Taken()
    taken.add(1, left_s=TURN_S)
    taken.add(2, left_s=TURN_S / 2)
    taken.queue.finish()
    assert (taken.numbers, taken.wanted) == ([1, 2], [True, False])
    taken.add(3)
    taken.line.closed = True
    await taken.turns(1)
    assert taken.numbers == [1, 2]


async def test_the_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_BYTES", 10)
    taken = Taken()
    taken.add(1, 2, size=5)
    assert taken.numbers == []
    taken.add(3, size=6)
    assert taken.numbers == [1, 2]
    taken.add(4, size=11)
    assert taken.numbers == [1, 2, 3, 4]


LONG_S = 3_600.0


class Line(Frames):
    """A connection that keeps what is sent to it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.answers: list[Routed | Refused] = []

    def send(self, *frames: bytes) -> None:
        (frame,) = frames
        answer = decode_answer(frame)
        assert isinstance(answer, Routed | Refused)
        self.answers.append(answer)


class Decided:
    """Decides each query by its key, and keeps what it was asked in each call."""

    def __init__(self, fails: Callable[[Sequence[int]], bool] = lambda keys: False) -> None:
        self.calls: list[list[RouteQuery]] = []
        self._fails = fails

    def __call__(self, queries: list[RouteQuery | None]) -> RouteReply:
        known = [query for query in queries if query is not None]
        self.calls.append(known)
        if self._fails([query.key for query in known]):
            raise RuntimeError("a policy failed")
        made = tuple(RouteDecision(f"r{query.key}", "placed") for query in known)
        return RouteReply(1, made, None, ())


def query(key: int) -> RouteQuery:
    return RouteQuery(key, SLO(ttft_s=1.0), 100, waited_s=0.5)


def replicas(answer: Routed | Refused) -> list[str | None]:
    assert isinstance(answer, Routed)
    return [decision.replica_id for decision in answer.reply.decisions]


def window(decided: Decided, clock: Clock, window_s: float = LONG_S) -> Window:
    return Window(decided, clock, window_s)


async def test_messages_of_several_routers_are_one_call_and_each_gets_its_own_answer() -> None:
    decided, clock, lines = Decided(), Clock(), [Line(), Line()]
    waits = window(decided, clock)
    waits.ask(lines[0], 7, [query(1), query(2)], clock() + 1.0)
    clock.advance(0.003)
    waits.ask(lines[1], 7, [query(3)], clock() + 1.0)
    waits.ask(lines[0], 8, [query(4)], clock() + 1.0)
    assert not decided.calls
    clock.advance(0.002)
    waits.close()
    assert [[each.key for each in call] for call in decided.calls] == [[1, 2, 3, 4]]
    ages = [each.waited_s for each in decided.calls[0]]
    assert ages == pytest.approx([0.505, 0.505, 0.502, 0.502]), "a wait makes a request older"
    assert [answer.number for answer in lines[0].answers] == [7, 8], "in order"
    assert [replicas(answer) for answer in lines[0].answers] == [["r1", "r2"], ["r4"]]
    assert [replicas(answer) for answer in lines[1].answers] == [["r3"]]


async def test_a_full_window_does_not_wait_and_without_one_nothing_does() -> None:
    decided, clock, line = Decided(), Clock(), Line()
    waits = window(decided, clock)
    for key in range(1, MAX_TOGETHER):
        waits.ask(line, key, [query(key)], clock() + 1.0)
    assert not decided.calls
    waits.ask(line, MAX_TOGETHER, [query(MAX_TOGETHER)], clock() + 1.0)
    assert len(decided.calls) == 1
    at_once = window(decided, clock, 0.0)
    at_once.ask(line, 99, [query(99)], clock() + 1.0)
    assert [each.waited_s for each in decided.calls[1]] == [0.5]


async def test_a_lone_question_is_answered_when_its_window_ends() -> None:
    decided, line = Decided(), Line()
    waits = window(decided, Clock(), 0.001)
    waits.ask(line, 7, [query(1)], LONG_S)
    async with asyncio.timeout(120):
        while not line.answers:  # noqa: ASYNC110 - it has no event, because nothing else waits
            await asyncio.sleep(0)
    assert replicas(line.answers[0]) == ["r1"]


async def test_nothing_is_decided_for_a_router_that_is_gone_or_no_longer_waits() -> None:
    decided, clock, lines = Decided(), Clock(), [Line(), Line(), Line()]
    waits = window(decided, clock)
    for key, line in enumerate(lines):
        waits.ask(line, 7, [query(key + 1)], clock() + (0.001 if key == 1 else 1.0))
    lines[0].connection_lost(None)
    clock.advance(0.002)
    waits.close()
    assert [each.key for each in decided.calls[0]] == [3]
    assert not lines[0].answers
    assert lines[1].answers == [Refused(7, None)]
    assert replicas(lines[2].answers[0]) == ["r3"]


async def test_a_decision_that_fails_ends_the_connection_of_its_own_router_only() -> None:
    decided, clock, lines = Decided(lambda keys: 2 in keys), Clock(), [Line(), Line(), Line()]
    waits = window(decided, clock)
    for key, line in enumerate(lines):
        waits.ask(line, 7, [query(key + 1)], clock() + 1.0)
    waits.close()
    assert [line.closed for line in lines] == [False, True, False]
    assert [replicas(lines[place].answers[0]) for place in (0, 2)] == [["r1"], ["r3"]]


async def test_routers_that_ask_over_real_connections_get_the_best_set() -> None:
    config = ControllerConfig(policy="least_tokens", admission="slos_serve")
    clock = Clock()
    controller = Controller(config, clock)
    await controller.hello(hello("a"))
    server = RouteServer(controller._route, controller._read_report, clock, LONG_S)
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    # 8,000 tokens take most of the second, 4,000 a good third of it; the other requests state no
    # objective, and fill the window.
    long, short = RouteQuery(1, slo, 8_000), [RouteQuery(key, slo, 4_000) for key in (2, 3)]
    others = [RouteQuery(key, SLO(), 10) for key in range(4, MAX_TOGETHER + 1)]
    async with connected(server) as (first, _), connected(server) as (second, _):
        asked = asyncio.create_task(first.route([long], 60.0))
        while not server.window._waiting or not server.window._waiting[-1].queries:  # noqa: ASYNC110
            await asyncio.sleep(0)
        told = await second.route([*short, *others], 60.0)
        alone = await asked
    assert alone.decisions[0].tier is Tier.BEST_EFFORT, "it came first"
    assert [made.tier for made in told.decisions[:2]] == [Tier.GUARANTEED] * 2
    assert len(told.decisions) == 2 + len(others)
    assert (await controller.figures()).reservations == MAX_TOGETHER


async def test_actor_calls_of_fresh_routers_get_the_best_set_too() -> None:
    controller = Controller(
        ControllerConfig(policy="least_tokens", admission="slos_serve"), Clock()
    )
    await controller.hello(hello("a"))
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    long, short = RouteQuery(1, slo, 8_000), [RouteQuery(key, slo, 4_000) for key in (2, 3)]
    alone, told = await asyncio.gather(controller.route([long]), controller.route(short))
    assert [made.tier for made in (*alone.decisions, *told.decisions)] == [
        Tier.BEST_EFFORT,
        Tier.GUARANTEED,
        Tier.GUARANTEED,
    ]


async def test_calls_and_messages_wait_for_each_other() -> None:
    decided, clock, line = Decided(lambda keys: 3 in keys), Clock(), Line()
    waits = window(decided, clock)
    call = asyncio.create_task(waits.route([query(1)]))
    given_up = asyncio.create_task(waits.route([query(4)]))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    waits.ask(line, 7, [query(2)], clock() + 1.0)
    waits.close()
    assert [[each.key for each in call] for call in decided.calls] == [[1, 2]]
    assert (await call).decisions[0].replica_id == "r1"
    assert replicas(line.answers[0]) == ["r2"]
    failing = asyncio.create_task(waits.route([query(3)]))
    await asyncio.sleep(0)
    waits.close()
    with pytest.raises(RuntimeError, match="a decision failed"):
        await failing
