"""Replicas as the controller hears them: real messages about tables that the tests fill in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from math import inf, nan
from typing import Any

import numpy as np

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.observer import Observer
from sluice.protocol.messages import (
    FirstTokenWait,
    LateNotice,
    MetricSample,
    MetricsPush,
    ReplicaDelta,
    ReplicaHello,
    RequestEnding,
    SyncReply,
)
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.fleet.local_orders import ARRIVAL
from sluice.scheduling.fleet.state import ROW, RUNNING, SUMMARY, WAITING
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.placement.loops import LoopTurnEnd
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role


class ObservedController(Controller):
    """Answers as the two actors together do."""

    def __init__(
        self, config: ControllerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, clock)
        self.observer = Observer(self, config, clock)

    async def push_metrics(
        self,
        push: MetricsPush,
        endings: Sequence[RequestEnding] = (),
        late: Sequence[LateNotice] = (),
        waits: Sequence[FirstTokenWait] = (),
        turns: Sequence[LoopTurnEnd] = (),
    ) -> SyncReply:
        """What a router sends once a second."""
        reply = await self.sync(endings, late, waits, turns)
        await self.observer.push_metrics(push)
        return reply

    async def render_metrics(self) -> bytes:
        return await self.observer.render_metrics()

    async def load(self, role: Role | None = None) -> Load:
        load = await self.observer.load(role)
        assert load is not None
        return load

    async def snapshot(self) -> dict[str, Any]:
        view = await self.observer.snapshot()
        assert view is not None
        return view

    async def usage(self) -> dict[str, Any]:
        return await self.observer.usage()

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        told = await self.observer.decisions(limit)
        assert told is not None
        return told


_numbers = count(1)


def newer_push(
    source: str, samples: tuple[MetricSample, ...] = (), incarnation: int = 1
) -> MetricsPush:
    """The next push of an incarnation of ``source``."""
    return MetricsPush(source, incarnation, next(_numbers), samples)


PROFILE = LatencyProfile.of("test", LinearLatency(a=0.004, b=0.0001, c=0.000001))


class Clock:
    """Monotonic seconds that pass when told."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = float(now_s)  # loops are compiled again for integers

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def waiting_row(key: int, pending: int, arrival_s: float = 0.0) -> np.ndarray:
    """A request that has computed nothing."""
    row = np.zeros((), ROW)
    row["key"], row["arrival_s"], row["phase"] = key, arrival_s, WAITING
    row["ttft_s"], row["tpot_s"], row["e2e_s"], row["priority"] = 1.0, 0.1, inf, 1
    row["prompt_tokens"] = row["pending_tokens"] = pending
    row["first_token_s"] = row["last_token_s"] = nan
    return row


def decode_row(key: int, context: int, arrival_s: float = 0.0) -> np.ndarray:
    """A request with its first token out."""
    row = waiting_row(key, context, arrival_s)
    row["computed_tokens"], row["pending_tokens"], row["emitted_tokens"] = context, 1, 1
    row["kv_blocks"], row["phase"] = 4, RUNNING
    row["first_token_s"] = row["last_token_s"] = arrival_s
    return row


def free_row() -> np.ndarray:
    """A slot that was freed."""
    return np.zeros((), dtype=ROW)


def table(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows as one array."""
    return np.array(list(rows), dtype=ROW)


def summary(free_kv_blocks: int = 900, total_kv_blocks: int = 1_000) -> np.void:
    """An engine's counters."""
    record = np.zeros((), dtype=SUMMARY)
    record["correction"] = record["fixed_correction"] = 1.0
    record["free_kv_blocks"] = free_kv_blocks
    record["total_kv_blocks"] = total_kv_blocks
    return record[()]


def hello(
    replica_id: str,
    rows: Sequence[np.ndarray] = (),
    *,
    seq: int = 0,
    now_s: float = 0.0,
    capacity: int = 64,
    draining: bool = False,
    preempts: bool = False,
    role: Role = "mixed",
    elastic: bool = False,
) -> ReplicaHello:
    """A registration whose rows fill the first slots."""
    return ReplicaHello(
        replica_id=replica_id,
        node_id="node",
        model="model",
        policy="fcfs",
        local_order=ARRIVAL,
        role=role,
        max_batch_tokens=2_048,
        max_sequences=256,
        block_tokens=16,
        capacity=capacity,
        profile=PROFILE,
        seq=seq,
        now_s=now_s,
        slots=np.arange(len(rows), dtype=np.int32),
        rows=table(rows),
        summary=summary(),
        draining=draining,
        preempts=preempts,
        elastic=elastic,
    )


def delta(
    replica_id: str,
    epoch: int,
    seq: int,
    changes: dict[int, np.ndarray] | None = None,
    *,
    now_s: float = 0.0,
    finished: tuple[int, ...] = (),
    draining: bool = False,
) -> ReplicaDelta:
    """A report of the changed slots."""
    changes = changes or {}
    return ReplicaDelta(
        replica_id=replica_id,
        epoch=epoch,
        seq=seq,
        now_s=now_s,
        slots=np.array(list(changes), dtype=np.int32),
        rows=table(list(changes.values())),
        summary=summary(),
        finished=finished,
        draining=draining,
    )


def query(key: int, prompt_tokens: int = 100) -> RouteQuery:
    """A request to place."""
    return RouteQuery(key, SLO(ttft_s=1.0, tpot_s=0.1), prompt_tokens)
