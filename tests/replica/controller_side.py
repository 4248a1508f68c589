"""The controller's side of the report protocol for one replica."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sluice.protocol.messages import ReplicaDelta, ReplicaHello, ReportReply
from sluice.scheduling.fleet.prefix import HELD, HELD_SLOTS
from sluice.scheduling.fleet.state import ROW, EngineState
from sluice.scheduling.roles import Role


class MirrorOfOne:
    """``lose`` decides over each message: "request" never arrives, "reply" arrives unanswered."""

    def __init__(self) -> None:
        self.epoch = 1
        self.seq: int | None = None
        self.table = np.zeros(0, ROW)
        self.held = np.zeros(HELD_SLOTS, HELD)
        self.messages: list[ReplicaHello | ReplicaDelta] = []
        self.finished: list[int] = []
        self.draining = False
        self.left = False
        self.closed = False
        self.role: Role | None = None
        self.lose: Callable[[], str | None] = lambda: None

    def restart(self) -> None:
        self.epoch += 1
        self.seq = None

    async def hello(self, hello: ReplicaHello) -> ReportReply | None:
        loss = self.lose()
        self.messages.append(hello)
        if loss == "request":
            return None
        self.table = np.zeros(hello.capacity, ROW)
        self.table[hello.slots] = hello.rows
        self.held = np.zeros(HELD_SLOTS, HELD)
        self.held[hello.held_slots] = hello.held
        self.seq, self.draining = hello.seq, hello.draining
        return None if loss else ReportReply(self.epoch, False, self.closed, self.role)

    async def report(self, delta: ReplicaDelta) -> ReportReply | None:
        loss = self.lose()
        self.messages.append(delta)
        if loss == "request":
            return None
        if self.seq is None or delta.epoch != self.epoch or delta.seq != self.seq + 1:
            return None if loss else ReportReply(self.epoch, True)
        self.table[delta.slots] = delta.rows
        self.held[delta.held_slots] = delta.held
        self.seq, self.draining = delta.seq, delta.draining
        self.finished += delta.finished
        return None if loss else ReportReply(self.epoch, False, self.closed, self.role)

    async def goodbye(self, replica_id: str) -> bool:
        self.left = True
        return True

    def shows(self, state: EngineState) -> bool:
        """Whether the mirror equals the state, nans and all."""
        live = np.flatnonzero(self.table["phase"])
        return (
            live.tolist() == state.slots.tolist()
            and self.table[live].tobytes() == state.rows.tobytes()
            and self.held.tobytes() == state.held.tobytes()
        )
