"""What confused, broken and older clients may send to the controller: it refuses that whole."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from math import inf, nan
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import force_setattr

from sluice.controller.config import ControllerConfig
from sluice.controller.transport.channel import RouteServer, _Served
from sluice.protocol.connection import WELCOME
from sluice.protocol.messages import (
    FaultNotice,
    FirstTokenWait,
    LateNotice,
    MetricSample,
    MetricsPush,
    QuotaUse,
    Refused,
    ReplicaDelta,
    ReplicaHello,
    Report,
    RequestEnding,
    Route,
    Routed,
    decode_answer,
    encode,
)
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.fleet.prefix import HELD
from sluice.scheduling.fleet.state import ROW, SUMMARY
from sluice.scheduling.placement.loops import LoopTurn, LoopTurnEnd
from sluice.scheduling.request.job import INVALID_QUERY, RouteQuery
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from tests.controller.fleet import (
    Clock,
    ObservedController,
    decode_row,
    delta,
    hello,
    query,
    waiting_row,
)

CLOCK = Clock()
"""Stands still, so that what changes is changed by messages."""


async def fleet() -> ObservedController:
    """Two replicas, ``a`` and ``b``, with a queue each, and a reservation."""
    controller = ObservedController(ControllerConfig(), CLOCK)
    for name in ("a", "b"):
        await controller.hello(hello(name, [waiting_row(1, 100), decode_row(2, 50)]))
    await controller.route([query(77)])
    return controller


def epoch_of(controller: ObservedController) -> int:
    return controller._epoch


async def state(controller: ObservedController) -> str:
    """All that an operator sees of replicas and reservations, as text."""
    seen = await controller.snapshot()
    kept = ("replicas", "reservations", "metric_sources")
    return json.dumps({name: seen[name] for name in kept}, allow_nan=False)


async def check_sound(controller: ObservedController) -> None:
    """It places requests, shows itself, and writes its page."""
    (decision,) = (await controller.route([query(99)])).decisions
    assert decision.replica_id in (None, *controller._mirror.replicas)
    await controller.release([99])
    await state(controller)
    assert b"sluice_" in await controller.render_metrics()


ARRAYS = [
    np.zeros(0),
    np.zeros(3, np.int64),
    np.zeros((2, 2), np.int32),
    np.zeros((), ROW),
    np.zeros(1 << 19, np.int32),
    np.arange(1 << 19, dtype=np.int32),
    np.array([-1], np.int32),
    np.array([2**31 - 1], np.int32),
    np.array([5, 5], np.int32),
    np.array([None, "x"], object),
    np.array(["a"]),
    np.array([nan, inf]),
    np.zeros(2, ROW),
    np.full(2, 255, np.uint8).repeat(ROW.itemsize).view(ROW),
    np.full(2, 127, np.uint8).repeat(HELD.itemsize).view(HELD),
    np.zeros(1, ROW.descr[:-1]),
    np.zeros(1, [*ROW.descr, ("more", "<i4")]),
    np.zeros((), SUMMARY)[()],
    np.full(SUMMARY.itemsize, 255, np.uint8).view(SUMMARY)[0],
    np.float64(nan),
    np.int64(-1),
]
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 3 + 1j),
    *(nan, inf, -inf, 1e308, -0.5, 0.0, "", "a", "b", "x" * 300, "x" * 100_000, "\ud800", "\x00"),
    *(b"bytes", {}, {"a": 1}, [], [1], [None], ["\ud800"], [[]], (), (1,), (None,), ((),), set()),
    *([1] * 70_000, ["a"] * 70_000, (1,) * 300_000, frozenset({"guaranteed"}), frozenset({1})),
    *(SLO(), SLO, object(), hello("a"), hello("d"), query(1), print, *ARRAYS),
]

SAMPLE = MetricSample("sluice_x", "counter", "X.", "sluice_x_total", (("a", "b"),), 1.0)
PUSH = MetricsPush("router-1", 1, 1, (SAMPLE,))
USE = QuotaUse("acme", 1.0, 2.0, 3.0)
ENDING = RequestEnding("a", "ok", ("ttft",), 3, 0.1, 0.02, 0.3, "x", judged_s=(0.1, 0.02, 0.3))
LATE = LateNotice("a", 0.3, 0.1)
TURN_END = LoopTurnEnd(5, 3.0, 1.0, True, True)
WAIT = FirstTokenWait(1, "a", 1.0, 0.5)
STAGED = SLO.of_stages((Stage(0.5, 0.1, tokens=20), Stage(0.2, 0.05, 9.0)))
NOTICE = FaultNotice("a", ReplicaFault.FAILED)

CALLS: dict[str, Callable[[ObservedController], tuple[Any, ...]]] = {
    "hello": lambda _: (hello("c", [waiting_row(5, 10)]),),
    "report": lambda controller: (delta("a", epoch_of(controller), 1, {0: waiting_row(5, 10)}),),
    "route": lambda _: ([query(5)._replace(moves_from="a")],),
    "goodbye": lambda _: ("c",),
    "release": lambda _: ([5, 6],),
    "replica_gone": lambda _: (["c", "d"],),
    "faulted": lambda _: (7, [NOTICE]),
    "share_quotas": lambda _: ([USE],),
    "loop_turn": lambda _: (LoopTurn(5, "agent", 7, 60.0, 10.0, 0.5, 2.0, 1, True),),
    "leftover": lambda _: (query(5), 32),
    "push_metrics": lambda _: (PUSH, [ENDING], [LATE], [WAIT], [TURN_END]),
    "load": lambda _: (None,),
    "decisions": lambda _: (3,),
    "drain": lambda _: ("c", False),
}


def places(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Where something can be put in another's place: the value itself, and what it is made of."""
    found = [path]
    if isinstance(value, tuple | list):
        for index, each in enumerate(value):
            found += places(each, (*path, index))
    return found


def replaced(value: Any, path: tuple[int, ...], other: Any) -> Any:
    if not path:
        return other
    parts = list(value)
    parts[path[0]] = replaced(parts[path[0]], path[1:], other)
    if isinstance(value, list):
        return parts
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


SHARES = 3


@pytest.mark.parametrize(
    "share", [0, *(pytest.param(each, marks=pytest.mark.release) for each in range(1, SHARES))]
)
@pytest.mark.parametrize("method", CALLS)
async def test_a_call_with_anything_wrong_in_it_is_refused_and_changes_nothing(
    method: str, share: int
) -> None:
    """A third of :data:`JUNK` in each place, and the next third in the place beside it."""
    refused = 0
    controller = await fleet()
    before = await state(controller)
    for number, path in enumerate(places(CALLS[method](controller))[1:], share):
        for junk in JUNK[number % SHARES :: SHARES]:
            arguments = replaced(CALLS[method](controller), path, junk)
            if await taken(controller, method, arguments):
                await check_sound(controller)
                controller = await fleet()
                before = await state(controller)
            else:
                refused += 1
                assert await state(controller) == before, (path, junk)
    await check_sound(controller)
    assert refused > len(JUNK) / SHARES / 2


async def test_stages_that_no_constructor_has_seen_are_refused_or_checked_by_it() -> None:
    controller = await fleet()
    before = await state(controller)
    refused = 0
    for path in places(STAGED.stages):
        for junk in JUNK:
            forged = SLO()
            force_setattr(forged, "stages", replaced(STAGED.stages, path, junk))
            if await taken(controller, "route", ([query(5)._replace(slo=forged)],)):
                await check_sound(controller)
                controller = await fleet()
                before = await state(controller)
            else:
                refused += 1
                assert await state(controller) == before, (path, junk)
    assert refused > len(JUNK) / 2


async def taken(controller: ObservedController, method: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a call is taken; it is refused with a reason, and fails in no other way."""
    try:
        told = await getattr(controller, method)(*arguments)
    except ValueError as error:
        assert 0 < len(str(error)) < 2_000
        return False
    return method != "route" or [each.reason for each in told.decisions] != [INVALID_QUERY]


def mutated(chance: random.Random, message: bytes) -> bytes:
    """A message with bits flipped, bytes cut out or doubled, or cut off."""
    data = bytearray(message)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(len(data) or 1)
        match chance.randrange(5):
            case 0 if data:
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place : place + chance.randint(1, 20)]
            case 2:
                data[place:place] = data[place : place + chance.randint(1, 40)]
            case 3:
                data[place:place] = bytes(chance.randrange(256) for _ in range(3))
            case _:
                del data[place:]
    return bytes(data)


NUMBERS: list[Any] = [None, -1, inf, nan, 2**64 - 1, -(2**63), True, "", [], {}, b"", [[]] * 9]


def renumbered(chance: random.Random, message: bytes) -> bytes:
    """A message that is still MessagePack, with another value in the place of one of its items."""
    whole = msgspec.msgpack.decode(message, ext_hook=msgspec.msgpack.Ext)
    path = chance.choice(places(whole)[1:])
    return msgspec.msgpack.encode(replaced(whole, path, chance.choice(NUMBERS)))


class Wire(asyncio.Transport):
    """The controller's end of a connection, without a network."""

    def __init__(self, server: RouteServer) -> None:
        super().__init__()
        self.sent = b""
        self._server = server
        self._protocol = _Served(server)
        self._protocol.connection_made(self)
        assert self.hear(server.token.encode()) == WELCOME

    def hear(self, message: bytes) -> bytes:
        """What the controller answers to a message when its turn has come; empty for nothing."""
        self.sent = b""
        self._protocol.data_received(len(message).to_bytes(4, "big") + message)
        self._server.reports.finish()
        assert int.from_bytes(self.sent[:4], "big") == len(self.sent[4:]), "one frame at most"
        return self.sent[4:]

    @property
    def closed(self) -> bool:
        return self._protocol.closed

    def end(self) -> None:
        self._protocol.connection_lost(None)

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def inside(
    change: Callable[[random.Random, bytes], bytes], chance: random.Random, data: bytes
) -> bytes:
    """Half of the time the content itself is changed, and the message around it is whole."""
    return change(chance, data) if chance.random() < 0.5 else data


@pytest.mark.parametrize("what", ["query", "report"])
async def test_a_garbled_message_is_refused_or_ends_its_connection_alone(what: str) -> None:
    chance = random.Random(what)
    controller = await fleet()
    server = controller._server
    other = Wire(server)
    closed = refused = 0
    for number in range(1_500):
        change = chance.choice((mutated, renumbered))
        if what == "query":
            asked = query(5)._replace(slo=STAGED, prefix=(1, 2), avoid=("a",))
            data = inside(change, chance, encode(asked))
            question: Any = Route(number, CLOCK(), 5.0, [msgspec.Raw(data)])
        else:
            seq = controller._mirror.replicas["a"].seq + 1
            sent = delta("a", epoch_of(controller), seq, {0: waiting_row(5, 10)}, finished=(3,))
            data = inside(change, chance, encode(sent))
            question = Report(number, CLOCK(), 5.0, msgspec.Raw(data))
        message = encode(question)
        wire = Wire(server)
        answer = wire.hear(change(chance, message) if chance.random() < 0.5 else message)
        assert wire.closed or answer, "it is answered, or the connection ends"
        closed += wire.closed
        if answer:
            told = decode_answer(answer)
            reasons = (
                [made.reason for made in told.reply.decisions] if isinstance(told, Routed) else []
            )
            refused += isinstance(told, Refused) or INVALID_QUERY in reasons
        wire.end()
        # Another client is answered all the while.
        good = decode_answer(other.hear(encode(Route(number, CLOCK(), 5.0, []))))
        assert isinstance(good, Routed) and good.number == number
        if "a" not in controller._mirror.replicas:
            await controller.hello(hello("a"))
    await check_sound(controller)
    assert closed > 100 and refused > 100
    other.end()
    assert not server._trusted and not server._strangers


async def test_a_report_under_another_replicas_name_is_asked_to_say_hello() -> None:
    controller = await fleet()
    await controller.report(delta("b", epoch_of(controller), 1))
    before = await state(controller)
    # a's next report, sent as b's: b is ahead, so the number is not the next one.
    told = await controller.report(delta("b", epoch_of(controller), 1, {0: waiting_row(9, 9)}))
    assert told.resync
    assert await state(controller) == before


def of_older(message: Any, fields: int) -> Any:
    """As it comes from a process whose class had only the first ``fields`` of them: a named tuple
    travels as its class and its fields in order."""
    return type(message)(*tuple(message)[:fields])


async def test_messages_of_an_older_version_are_understood() -> None:
    """In a rolling update old routers and replicas ask a new controller, by actor calls."""
    controller = await fleet()
    required = {RouteQuery: 3, ReplicaDelta: 9, ReplicaHello: 15}
    for kind, least in required.items():
        assert len(kind._fields) - len(kind._field_defaults) == least, "old ones lack this field"
    older_hello = of_older(hello("c", [waiting_row(5, 10)]), 15)
    older_delta = of_older(delta("c", epoch_of(controller), 1), 9)
    older_query = of_older(query(5), 3)
    assert not (await controller.hello(older_hello)).resync
    assert not (await controller.report(older_delta)).resync
    (decision,) = (await controller.route([older_query])).decisions
    assert decision.replica_id in ("a", "b", "c")
