"""Routers, replicas and the controller over a network that loses, repeats, delays and reorders,
with controllers that restart: the real controller and the real reporters, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.protocol.messages import ReplicaDelta, ReplicaHello, ReportReply
from sluice.replica.config import ReplicaConfig
from sluice.replica.engine import EngineInfo
from sluice.replica.reporter import Membership, Reporter
from sluice.scheduling.fleet import rows as fleet_rows
from sluice.scheduling.fleet.state import ROW, EngineState
from sluice.scheduling.placement.placer import MAX_AWAITED_S
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from tests.controller.fleet import PROFILE, Clock, summary, waiting_row
from tests.examples import examples

CONFIG = ControllerConfig(stale_after_s=40)
INFO = EngineInfo("model", "fcfs", 8192, 2048, 256, 4096, 16, PROFILE)
ROLES: tuple[Role, ...] = ("mixed", "mixed", "prefill", "decode")
CAPACITY = 64
FIGURES = (
    *("WAITING", "RUNNING", "TOKENS", "CONTEXT", "PREFILL_S", "NEEDED_BLOCKS"),
    *("EXPECTED_BLOCKS", "RESERVED", "BEST_EFFORT_S", "QUEUED", "LOADS", "FREE_BLOCKS"),
)

Fate = Literal["arrives", "is lost", "answer is lost", "comes late", "comes twice"]
fates = st.sampled_from(["arrives", "arrives", *Fate.__args__])  # type: ignore[attr-defined]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class Replica:
    """An engine's table, and the real reporter of it."""

    def __init__(self, name: str, role: Role, world: World) -> None:
        self.name = name
        self.rows: dict[int, np.ndarray] = {}
        self.fate: Fate = "arrives"
        self._world = world
        self.role = role
        self.reporter = self.new_reporter()

    def new_reporter(self) -> Reporter:
        return Reporter(
            self.state,
            INFO,
            self,
            ReplicaConfig(),
            Membership(self.name, "node", CAPACITY, self.role),
            lambda: len(self.rows),
            lambda _: False,
            self._world.clock,
        )

    def state(self) -> EngineState:
        slots = np.array(list(self.rows), np.int32)
        rows = np.array(list(self.rows.values()), ROW)
        return EngineState(self._world.clock(), slots, rows, summary())

    def admit(self, key: int, tokens: int) -> None:
        slot = next(each for each in count() if each not in self.rows)
        self.rows[slot] = waiting_row(key, tokens, self._world.clock())

    def end(self, key: int) -> None:
        for slot in [slot for slot, row in self.rows.items() if int(row["key"]) == key]:
            del self.rows[slot]
        self.reporter.finished(key)

    async def hello(self, hello: ReplicaHello) -> ReportReply | None:
        reply: ReportReply | None
        reply = self._world.send(lambda: self._world.controller.hello(hello), self.fate)
        return reply

    async def report(self, delta: ReplicaDelta) -> ReportReply | None:
        reply: ReportReply | None
        reply = self._world.send(lambda: self._world.controller.report(delta), self.fate)
        return reply

    async def goodbye(self, replica_id: str) -> None:
        """Reporters are not stopped here."""


@dataclass
class Request:
    """One on its way: where it is to go, leg by leg, and where it is."""

    key: int
    tokens: int
    legs: list[tuple[int, str]] = field(default_factory=list)
    at: str | None = None


class World:
    """Everything, and a clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.controller = Controller(CONFIG, self.clock)
        self.late: list[Callable[[], object]] = []
        self.replicas: dict[str, Replica] = {}
        for number, role in enumerate(ROLES):
            self.join(f"{number}.0", role)

    def join(self, name: str, role: Role) -> None:
        self.replicas[name] = Replica(name, role, self)

    def send(self, call: Callable[[], Coroutine[Any, Any, Any]], fate: Fate) -> Any:
        """The answer to a message, if it comes to its sender."""
        if fate == "is lost":
            return None
        if fate == "comes late":
            self.late.append(lambda: run(call()))
            return None
        if fate == "comes twice":
            self.late.append(lambda: run(call()))
        answer = run(call())
        return None if fate == "answer is lost" else answer

    def reserved(self) -> set[int]:
        return set(self.controller._fleet.ledger._entries)

    def mirrored(self) -> set[int]:
        replicas = self.controller._mirror.replicas.values()
        return {int(row["key"]) for each in replicas for row in each.table if row["phase"]}


class Conversation(RuleBasedStateMachine):
    """Any order of what can happen; whatever it was, nothing stays counted that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.keys = count(1)
        self.requests: list[Request] = []
        self.excused: set[int] = set()
        """Keys of which the controller was not told what it should have been."""
        for replica in self.world.replicas.values():
            run(replica.reporter.tick())

    @rule(eighths=st.sampled_from([1, 4, 12, 48]))
    def time_passes(self, eighths: int) -> None:
        self.world.clock.advance(eighths / 8)

    @rule(tokens=st.integers(1, 3_000), split=st.booleans(), fate=fates, own=st.integers(0, 3))
    def a_router_asks(self, tokens: int, split: bool, fate: Fate, own: int) -> None:
        key, prefill_key = next(self.keys), next(self.keys) if split else 0
        query = RouteQuery(key, SLO(ttft_s=1.0, tpot_s=0.1), tokens, prefill_key=prefill_key)
        if fate in ("comes late", "comes twice"):
            # Decisions travel once. One that comes after its question was given up is taken back.
            self.world.late.append(partial(self._decided_late, query))
            decision = None
        else:
            reply = self.world.send(lambda: self.world.controller.route([query]), fate)
            decision = reply.decisions[0] if reply is not None else None
            if fate == "answer is lost":
                self.excused |= {key, prefill_key}
        self.requests.append(Request(key, tokens, self._legs(query, decision, own)))

    def _legs(
        self, query: RouteQuery, decision: RouteDecision | None, own: int
    ) -> list[tuple[int, str]]:
        if decision is None or decision.replica_id is None:
            return [(query.key, list(self.world.replicas)[own])]
        legs = [(query.key, decision.replica_id)]
        if decision.prefill_id is not None:
            legs.insert(0, (query.prefill_key, decision.prefill_id))
        return legs

    def _decided_late(self, query: RouteQuery) -> None:
        (decision,) = run(self.world.controller.route([query])).decisions
        keys = [query.key] if decision.replica_id is not None else []
        keys += [query.prefill_key] if decision.prefill_id is not None else []
        self._release(keys, "arrives")

    def _release(self, keys: list[int], fate: Fate) -> None:
        self.world.send(lambda: self.world.controller.release(keys), fate)
        if fate in ("is lost", "comes late"):
            self.excused.update(keys)

    @rule(pick=st.integers(0, 99), moved=st.integers(0, 9), fate=fates)
    def a_request_comes_to_a_replica(self, pick: int, moved: int, fate: Fate) -> None:
        waiting = [each for each in self.requests if each.at is None]
        if not waiting:
            return
        request = waiting[pick % len(waiting)]
        key, name = request.legs.pop(0)
        if moved < len(ROLES) or name not in self.world.replicas:
            # Full, or gone: Serve sends it elsewhere, and the router says so.
            name = list(self.world.replicas)[moved % len(ROLES)]
            self._release([key], fate)
        request.key, request.at = key, name
        if len(self.world.replicas[name].rows) < CAPACITY:
            self.world.replicas[name].admit(key, request.tokens)

    @rule(pick=st.integers(0, 99), fate=fates)
    def a_request_ends_at_its_replica(self, pick: int, fate: Fate) -> None:
        there = [each for each in self.requests if each.at is not None]
        if there:
            self._end(there[pick % len(there)], fate)

    def _end(self, request: Request, fate: Fate) -> None:
        assert request.at is not None
        if request.at in self.world.replicas:
            self.world.replicas[request.at].end(request.key)
        self._release([request.key], fate)
        request.at = None
        if not request.legs:
            self.requests.remove(request)

    @rule(pick=st.integers(0, 99), fate=fates)
    def a_client_leaves(self, pick: int, fate: Fate) -> None:
        if not self.requests:
            return
        request = self.requests[pick % len(self.requests)]
        self._release([key for key, _ in request.legs], fate)
        request.legs.clear()
        if request.at is not None:
            self._end(request, fate)
        else:
            self.requests.remove(request)

    @rule(pick=st.integers(0, 3), fate=fates)
    def a_replica_reports(self, pick: int, fate: Fate) -> None:
        replica = list(self.world.replicas.values())[pick]
        replica.fate = fate
        run(replica.reporter.tick())

    @rule(pick=st.integers(0, 99))
    def a_late_message_comes(self, pick: int) -> None:
        if self.world.late:
            self.world.late.pop(pick % len(self.world.late))()

    @rule()
    def the_controller_restarts(self) -> None:
        self.world.controller = Controller(CONFIG, self.world.clock)

    @rule(pick=st.integers(0, 3))
    def a_replica_dies_and_another_comes(self, pick: int) -> None:
        name, dead = list(self.world.replicas.items())[pick]
        del self.world.replicas[name]
        run(self.world.controller.replica_gone([name]))
        number, _, life = name.partition(".")
        for request in [each for each in self.requests if each.at == name]:
            self._end(request, "arrives")
        self.world.join(f"{number}.{int(life) + 1}", dead.role)

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        """As a reservation and as a row, or as two reservations."""
        ledger = self.world.controller._fleet.ledger
        ids = [*self.world.controller._mirror.replicas]
        assert sum(len(list(ledger.at(each))) for each in ids) == len(ledger)
        assert not self.world.reserved() & self.world.mirrored() - self.excused

    def teardown(self) -> None:
        """All becomes quiet: what is left is what is there."""
        world = self.world
        while world.late:
            world.late.pop()()
        for request in self.requests:
            # Of one whose prompt is being computed, what is reserved for its decode.
            self._release([key for key, _ in request.legs], "arrives")
        self._all_report()
        # What nobody could tell of is left to its age, and nothing else.
        assert world.reserved() <= self.excused
        steps = ceil((CONFIG.reservation_ttl_s + MAX_AWAITED_S) / CONFIG.stale_after_s)
        for _ in range(steps):
            world.clock.advance(CONFIG.stale_after_s)
            self._all_report()
        world.controller._fleet.expire(world.clock())
        assert world.reserved() == set()
        there = {int(row["key"]) for each in world.replicas.values() for row in each.rows.values()}
        names = set(world.replicas)
        assert there == {
            int(row["key"])
            for name in names
            for row in world.controller._mirror.replicas[name].table
            if row["phase"]
        }
        self._compare_with_one_that_has_just_begun()

    def _all_report(self) -> None:
        for replica in self.world.replicas.values():
            replica.fate = "arrives"
            for _ in range(4):
                run(replica.reporter.tick())
                self.world.clock.advance(1 / 8)

    def _compare_with_one_that_has_just_begun(self) -> None:
        known = self.world.controller
        fresh = self.world.controller = Controller(CONFIG, self.world.clock)
        for replica in self.world.replicas.values():
            run(replica.new_reporter().tick())
        for name in self.world.replicas:
            assert self._figures(known, name) == pytest.approx(self._figures(fresh, name)), name

    @staticmethod
    def _figures(controller: Controller, name: str) -> list[float]:
        fleet = controller._fleet
        row = fleet.figures[fleet.row_of[name]]
        return [float(row[getattr(fleet_rows, figure)]) for figure in FIGURES]


Conversation.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestConversation = Conversation.TestCase
