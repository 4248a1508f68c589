"""The reporter against a controller's mirror kept by its rules, with a clock of the test's own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.messages import ReplicaDelta, ReplicaHello, ReportReply
from sluice.replica.config import ReplicaConfig
from sluice.replica.engine import EngineInfo
from sluice.replica.reporter import MAX_FINISHED, AcknowledgedState, Membership, Reporter
from sluice.replica.scheduler.state_table import StateTable
from sluice.scheduling.fleet.prefix import HELD
from sluice.scheduling.fleet.state import EngineState
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.request.objective import SLO
from tests.examples import examples
from tests.replica.controller_side import MirrorOfOne
from tests.replica.rows import running
from tests.replica.waiting import until

INTERVAL_S, HEARTBEAT_S = 0.025, 0.5
INFO = EngineInfo(
    "model", "fcfs", 8192, 2048, 256, 4096, 16, LatencyProfile.of("k", LinearLatency(1, 1))
)


class Bench:
    """A table, a reporter and a mirror."""

    def __init__(self, capacity: int = 8) -> None:
        self.table = StateTable.create(capacity)
        self.mirror = MirrorOfOne()
        self.now_s = 100.0
        self.live = 0
        self.hung = False
        self.dead = False
        self.followed: list[str] = []
        self.reporter = Reporter(
            self.read,
            INFO,
            self.mirror,
            ReplicaConfig(report_interval_s=INTERVAL_S),
            Membership("replica-1", "node-1", capacity, elastic=True),
            lambda: self.live,
            lambda _: self.hung,
            lambda: self.now_s,
            follow=self.followed.append,
        )

    def read(self) -> EngineState:
        if self.dead:
            raise RuntimeError("the engine is gone")
        return self.table.read()

    def admit(self, key: int) -> int:
        return self.table.allocate(key, SLO(ttft_s=1.0), 5.0, 10)

    def update(self, slot: int, computed: int, emitted: int) -> None:
        first_token_s = 7.0 if emitted else None
        self.table.write(running(slot, computed, emitted, 1, first_token_s))

    def hold(self, chunks: dict[int, int]) -> None:
        """Chunk hashes by slot; 0 frees one."""
        held = np.array([(chunk, 128 if chunk else 0, 0) for chunk in chunks.values()], HELD)
        self.table.write_held(np.array(list(chunks)), held)

    async def tick(self) -> float:
        wait_s = await self.reporter.tick()
        self.now_s += wait_s
        return wait_s

    async def heartbeat(self) -> None:
        self.now_s += HEARTBEAT_S
        await self.tick()

    async def restarted(self) -> ReplicaHello:
        """The hello to a controller that has just started, which refuses a report before it."""
        self.mirror.restart()
        began_s = self.now_s
        while self.mirror.seq is None:
            await self.tick()
        assert self.now_s - began_s < 2.0
        assert self.mirror.shows(self.table.read())
        return self.hello

    @property
    def hello(self) -> ReplicaHello:
        """The last message."""
        last = self.mirror.messages[-1]
        assert isinstance(last, ReplicaHello)
        return last

    @property
    def delta(self) -> ReplicaDelta:
        """The last message."""
        last = self.mirror.messages[-1]
        assert isinstance(last, ReplicaDelta)
        return last


async def test_a_hello_and_then_only_what_changed() -> None:
    bench = Bench()
    first, second = bench.admit(1), bench.admit(2)
    await bench.tick()
    hello = bench.hello
    assert (hello.seq, hello.capacity, hello.node_id) == (1, 8, "node-1")
    assert bench.mirror.shows(bench.table.read())

    bench.update(second, 10, 1)
    assert await bench.tick() == INTERVAL_S
    delta = bench.delta
    assert (delta.seq, delta.epoch, delta.slots.tolist()) == (2, 1, [second])

    bench.table.free(first)
    bench.reporter.finished(1)
    await bench.tick()
    delta = bench.delta
    assert (delta.slots.tolist(), delta.rows["phase"].tolist()) == ([first], [0])
    assert delta.finished == (1,)
    assert bench.mirror.shows(bench.table.read())


async def test_further_tokens_alone_are_reported_less_often() -> None:
    bench = Bench()
    first = bench.admit(1)
    await bench.tick()
    bench.update(first, 10, 1)
    await bench.tick()
    reports = len(bench.mirror.messages)
    for emitted in range(2, 10):
        bench.update(first, 9 + emitted, emitted)
        assert await bench.tick() == INTERVAL_S
    assert len(bench.mirror.messages) == reports + 2
    assert bench.mirror.shows(bench.table.read())

    bench.update(first, 19, 10)
    bench.admit(2)
    await bench.tick()
    assert len(bench.delta.slots) == 2, "a request that comes takes the others' tokens with it"
    assert bench.mirror.shows(bench.table.read())


async def test_held_chunks_are_told_whole_and_then_as_they_change() -> None:
    bench = Bench()
    bench.hold({3: 33, 5: 55})
    await bench.tick()
    hello = bench.hello
    assert (hello.held_slots.tolist(), hello.held["hash"].tolist()) == ([3, 5], [33, 55])

    bench.hold({5: 0, 7: 77})
    await bench.tick()
    delta = bench.delta
    assert (delta.held_slots.tolist(), delta.held["hash"].tolist()) == ([5, 7], [0, 77])
    assert len(delta.slots) == 0

    await bench.heartbeat()
    assert bench.delta.seq == delta.seq + 1
    assert len(bench.delta.held_slots) == 0
    assert bench.mirror.shows(bench.table.read())


async def test_nothing_is_sent_between_heartbeats_if_nothing_changed() -> None:
    bench = Bench()
    bench.admit(1)
    for _ in range(round(3 * HEARTBEAT_S / INTERVAL_S)):
        assert await bench.tick() == INTERVAL_S
    heartbeats = bench.mirror.messages[1:]
    assert 2 <= len(heartbeats) <= 3
    assert all(len(delta.slots) == 0 for delta in heartbeats)


async def test_an_idle_replica_is_looked_at_once_a_heartbeat() -> None:
    bench = Bench()
    waits = [await bench.tick() for _ in range(4)]
    assert waits == [HEARTBEAT_S] * 4
    assert len(bench.mirror.messages) == 4
    # A request that is not in the table yet is enough to look often.
    bench.live = 1
    assert await bench.tick() == INTERVAL_S


@pytest.mark.parametrize("loss", ["request", "reply"])
async def test_an_unanswered_report_is_followed_by_a_hello(loss: str) -> None:
    bench = Bench()
    slot = bench.admit(1)
    await bench.tick()
    bench.mirror.lose = lambda: loss
    bench.update(slot, 10, 1)
    bench.reporter.finished(9)
    assert await bench.tick() < 1.0
    assert not bench.reporter.registered
    assert bench.reporter.lost == 1
    bench.mirror.lose = lambda: None
    await bench.tick()
    assert bench.hello and bench.mirror.shows(bench.table.read())
    await bench.tick()
    assert 9 in bench.mirror.finished


async def test_a_restarted_controller_is_told_all_within_two_seconds() -> None:
    """Also what the one before has said: a drain of the operator, and a role."""
    bench = Bench()
    bench.admit(1)
    await bench.tick()
    bench.reporter.drain()
    await bench.tick()
    assert bench.mirror.draining
    bench.mirror.closed, bench.mirror.role = True, "prefill"
    for _ in range(3):
        await bench.heartbeat()
    assert bench.followed == ["prefill"], "once"
    bench.mirror.closed, bench.mirror.role = False, None
    hello = await bench.restarted()
    assert hello.draining and hello.closed
    assert (hello.role, hello.elastic) == ("prefill", True)
    assert not (await bench.restarted()).closed, "the new one has said otherwise"


async def test_finished_keys_are_bounded() -> None:
    bench = Bench()
    for key in range(MAX_FINISHED + 10):
        bench.reporter.finished(key)
    await bench.tick()
    await bench.tick()
    assert bench.mirror.finished == list(range(10, MAX_FINISHED + 10))


async def test_a_dead_engine_is_not_reported_as_alive() -> None:
    bench = Bench()
    await bench.tick()
    bench.dead = True
    for _ in range(3):
        await bench.tick()
    assert len(bench.mirror.messages) == 1


def idle_reporter(table: StateTable, mirror: MirrorOfOne) -> Reporter:
    """Of a replica that has no request and steps as it should, by the real clock."""
    config, membership = (
        ReplicaConfig(report_interval_s=0.001),
        Membership("replica-1", "node-1", 8),
    )
    return Reporter(table.read, INFO, mirror, config, membership, lambda: 0, lambda _: False)


async def test_the_task_reports_changes_and_says_goodbye() -> None:
    table = StateTable.create(8)
    mirror = MirrorOfOne()
    reporter = idle_reporter(table, mirror)
    reporter.start()
    await until(lambda: reporter.registered)
    # It sleeps until the heartbeat now, far beyond this test; only a wake-up brings it back.
    table.allocate(1, SLO(), 5.0, 10)
    reporter.wake()
    await until(lambda: mirror.shows(table.read()))
    await reporter.stop()
    await reporter.stop()
    assert mirror.left


async def test_a_refused_message_does_not_end_the_reports() -> None:
    class Refusing(MirrorOfOne):
        refusals = 2

        async def hello(self, hello: ReplicaHello) -> ReportReply | None:
            if self.refusals:
                self.refusals -= 1
                raise ValueError("no")
            return await super().hello(hello)

    reporter = idle_reporter(StateTable.create(8), Refusing())
    reporter.start()
    await until(lambda: reporter.registered)
    await reporter.stop()


# Each step: what happens to the table, and what becomes of the next message.
events = st.lists(
    st.tuples(
        st.sampled_from(
            ["admit", "update", "free", "nothing", "restart", "finish", "hold", "drop"]
        ),
        st.integers(0, 7),
        st.sampled_from([None, None, None, "request", "reply"]),
    ),
    max_size=40,
)


@settings(max_examples=examples(100))
@given(events)
def test_the_mirror_ends_equal_to_the_table(script: list[tuple[str, int, str | None]]) -> None:
    asyncio.run(play(script))


async def play(script: list[tuple[str, int, str | None]]) -> None:
    bench = Bench()
    loss: str | None = None
    bench.mirror.lose = lambda: loss
    slots: list[int] = []
    finished: set[int] = set()
    for step, (event, index, fate) in enumerate(script):
        loss = fate
        if event == "admit" and len(slots) < 8:
            slots.append(bench.admit(step))
        elif event == "update" and slots:
            bench.update(slots[index % len(slots)], step, index)
        elif event == "free" and slots:
            bench.table.free(slots.pop(index % len(slots)))
        elif event == "hold":
            bench.hold({index: step + 1})
        elif event == "drop":
            bench.hold({index: 0})
        elif event == "restart":
            bench.mirror.restart()
        elif event == "finish":
            bench.reporter.finished(step)
            finished.add(step)
        await bench.tick()
    loss = None
    for _ in range(5):
        await bench.heartbeat()
    assert bench.mirror.shows(bench.table.read())
    assert set(bench.mirror.finished) == finished
    numbers = [message.seq for message in bench.mirror.messages]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_reused_slot_counts_as_changed() -> None:
    table = StateTable.create(2)
    known = AcknowledgedState(2)
    slot = table.allocate(1, SLO(), 5.0, 10)
    known.acknowledge(table.read())
    assert not known.changes(table.read()).any
    table.free(slot)
    assert table.allocate(2, SLO(), 5.0, 10) == slot
    changes = known.changes(table.read())
    assert (changes.slots.tolist(), changes.rows["key"].tolist()) == ([slot], [2])
