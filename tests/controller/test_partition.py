"""The network between the controller and some of its clients is cut, and heals: real sockets and a
real controller, and between them a relay that keeps what it cannot deliver, as TCP does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.transport.channel import MAX_TIMEOUTS, Endpoint, NoAnswerError, RouteChannel
from sluice.scheduling.request.job import NO_REPLICA, RouteDecision, RouteQuery
from tests.controller.fleet import Clock, delta, hello, query, waiting_row

CONFIG = ControllerConfig(admission="none")
LEFT_S = 0.02


class Cable:
    """Relays bytes both ways between clients and one address, but while it is cut."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._far = endpoint
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def endpoint(self) -> Endpoint:
        """Where clients reach the far side."""
        if self._server is None:
            self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return self._far._replace(host="127.0.0.1", port=port)

    def cut(self) -> None:
        """Nothing comes through from now on."""
        self._whole.clear()

    def mend(self) -> None:
        """What waits comes through, and all that follows."""
        self._whole.set()

    async def close(self) -> None:
        """Drop all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._far.host, self._far.port)
        self._writers += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._relay(source, target))
            self._tasks.add(task)

    async def _relay(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._whole.wait()
                target.write(data)
                await target.drain()


class Site:
    """A controller, a cable to it, and what became of a client at its end."""

    def __init__(self, controller: Controller, clock: Clock, cable: Cable) -> None:
        self.controller = controller
        self.clock = clock
        self.cable = cable
        self.lost = asyncio.Event()
        self.late: list[tuple[RouteQuery, RouteDecision]] = []
        self.channel = RouteChannel(
            cable.endpoint, self.lost.set, lambda *told: self.late.append(told)
        )

    @property
    def reserved(self) -> int:
        """Reservations."""
        return len(self.controller._fleet.ledger)

    async def connect(self) -> None:
        """Return once the client is connected."""
        while not self.channel.open:
            self.channel.connect_soon()
            await asyncio.sleep(0)

    async def asked(self, key: int, left_s: float = 10.0) -> str | None:
        """Where a request goes; ``None`` without an answer in time."""
        try:
            reply = await self.channel.route([query(key)], left_s)
        except NoAnswerError:
            return None
        return reply.decisions[0].replica_id or reply.decisions[0].reason

    async def handled(self) -> None:
        """Return when the controller has dealt with all that came through the cable."""
        again = RouteChannel(self.cable.endpoint, lambda: None, lambda *_: None)
        while not again.open:
            again.connect_soon()
            await asyncio.sleep(0)
        await again.route([], 5)
        await again.close()


@asynccontextmanager
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    clock = Clock()
    controller = Controller(CONFIG, clock)
    cable = Cable(await controller.endpoint())
    made = Site(controller, clock, cable)
    async with asyncio.timeout(120):
        await made.connect()
        try:
            yield made
        finally:
            await made.channel.close()
            await cable.close()


async def test_routers_that_are_cut_off_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas reach the controller all the while; what the routers asked comes when the network
    heals, long after requests went elsewhere."""
    async with site(monkeypatch) as here:
        epoch = (await here.controller.hello(hello("a"))).epoch
        assert await here.asked(1) == "a"
        await here.controller.report(delta("a", epoch, 1, {0: waiting_row(1, 100)}))
        assert here.reserved == 0

        here.cable.cut()
        for key in range(2, 2 + MAX_TIMEOUTS):
            assert await here.asked(key, LEFT_S) is None
        await here.lost.wait()
        assert not here.channel.open, "no later request pays for it"
        # Serve's own choice placed them there, and one has ended.
        rows = {slot: waiting_row(slot + 1, 100) for slot in range(1, MAX_TIMEOUTS)}
        await here.controller.report(delta("a", epoch, 2, rows, finished=(MAX_TIMEOUTS + 1,)))

        here.clock.advance(5.0)
        await here.controller.report(delta("a", epoch, 3, rows))
        here.cable.mend()
        await here.handled()
        assert here.reserved == 0
        assert here.controller._fleet.ledger.expired == 0
        await here.connect()
        assert await here.asked(99) == "a"
        assert here.reserved == 1
        assert here.late == []


async def test_replicas_that_are_cut_off_are_left_out_until_they_say_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routers reach the controller all the while."""
    async with site(monkeypatch) as here:
        epoch = (await here.controller.hello(hello("a"))).epoch
        first = delta("a", epoch, 1, {0: waiting_row(1, 100)})
        assert not (await here.channel.report(first, 10)).resync

        here.cable.cut()
        lost = delta("a", epoch, 2, {1: waiting_row(2, 100)})
        with pytest.raises(NoAnswerError, match="timeout"):
            await here.channel.report(lost, LEFT_S)
        here.clock.advance(CONFIG.stale_after_s)
        (decision,) = (await here.controller.route([query(3)])).decisions
        assert (decision.replica_id, decision.reason) == (None, NO_REPLICA)

        # The lost report comes after all, and changes nothing: the replica has told all since.
        here.cable.mend()
        rows = [waiting_row(key, 100) for key in (1, 2)]
        assert not (await here.controller.hello(hello("a", rows, seq=3))).resync
        await here.handled()
        assert not (await here.channel.report(delta("a", epoch, 4), 10)).resync
        (decision,) = (await here.controller.route([query(4)])).decisions
        assert decision.replica_id == "a"
