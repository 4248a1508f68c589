"""Replicas as the controller hears them: real messages about tables that the tests fill in."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import numpy as np

from sluice.protocol.messages import ReplicaDelta, ReplicaHello
from sluice.scheduling.fleet.local_orders import ARRIVAL
from sluice.scheduling.fleet.state import ROW, RUNNING, SUMMARY, WAITING
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role

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
    return np.array(
        (
            key,
            arrival_s,
            1.0,
            0.1,
            inf,
            1,
            pending,
            0,
            pending,
            0,
            0,
            WAITING,
            0,
            0,
            nan,
            nan,
            0,
            0,
        ),
        dtype=ROW,
    )


def decode_row(key: int, context: int, arrival_s: float = 0.0) -> np.ndarray:
    """A request with its first token out."""
    return np.array(
        (
            key,
            arrival_s,
            1.0,
            0.1,
            inf,
            1,
            context,
            context,
            1,
            1,
            4,
            RUNNING,
            0,
            0,
            *[arrival_s] * 2,
            0,
            0,
        ),
        dtype=ROW,
    )


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
