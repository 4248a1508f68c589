"""The messages and queries of the decision benchmark, all drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf, nan
from typing import Final

import numpy as np

from sluice.benchmarks.live.report import quantiles
from sluice.protocol.messages import ReplicaDelta, ReplicaHello
from sluice.scheduling.fleet.prefix import HELD
from sluice.scheduling.fleet.state import ROW, RUNNING, SUMMARY, WAITING
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO

QUEUED: Final = 64
"""Requests in each replica's queue."""

CHANGED: Final = 32
"""Requests that change in a report: a step changes every decode."""

_CONVERSATIONS = 256
_CHUNKS = 12
_HELD = 200
_PROFILE = LatencyProfile.of("benchmark", LinearLatency(a=0.004, b=0.000_02, c=0.000_000_02))


class FleetMessages:
    """Messages of ``replicas`` replicas, and queries."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._rng = random.Random(1)
        self._conversations = [
            tuple(self._rng.getrandbits(62) + 1 for _ in range(_CHUNKS))
            for _ in range(_CONVERSATIONS)
        ]
        self._seq = [0] * self.replicas
        # Backlog of a replica: the share of its queue that has no token yet.
        self._behind = [self._rng.uniform(0.02, 0.6) for _ in range(replicas)]
        # Made once for each replica: the receiver sees no difference, and making them is slow.
        self._changed_rows = [self._rows(index, CHANGED) for index in range(replicas)]

    def hello(self, index: int) -> ReplicaHello:
        """Replica ``index`` registers with a full queue."""
        held, rows = self._held(), self._rows(index, QUEUED)
        return ReplicaHello(
            *(f"replica-{index}", "node", "model", "deadline_triage", "mixed"),
            max_batch_tokens=8_192,
            max_sequences=256,
            block_tokens=16,
            capacity=2_048,
            profile=_PROFILE,
            seq=self._seq[index],
            now_s=0.0,
            slots=np.arange(len(rows), dtype=np.int32),
            rows=rows,
            summary=_summary(),
            held_slots=np.arange(len(held), dtype=np.int32),
            held=held,
        )

    def delta(self, index: int, epoch: int, finished: tuple[int, ...] = ()) -> ReplicaDelta:
        """Replica ``index`` reports a step, and that requests with these keys have ended."""
        self._seq[index] += 1
        rows = self._changed_rows[index]
        slots = np.arange(len(rows), dtype=np.int32)
        name, seq = f"replica-{index}", self._seq[index]
        return ReplicaDelta(name, epoch, seq, 0.0, slots, rows, _summary(), finished, False)

    def query(self, key: int) -> RouteQuery:
        """A request with objectives; every second one continues a conversation."""
        rng = self._rng
        conversation = rng.randrange(2 * _CONVERSATIONS)
        known = conversation < _CONVERSATIONS
        return RouteQuery(
            key,
            SLO(ttft_s=rng.choice((0.5, 1.0, 5.0)), tpot_s=0.05),
            rng.randint(32, 4_096),
            waited_s=0.002,
            output_tokens=rng.randint(1, 512),
            session=conversation + 1 if known else 0,
            prefix=self._conversations[conversation] if known else (),
        )

    def _rows(self, index: int, count: int) -> np.ndarray:
        """The first rows of a table."""
        rng, behind = self._rng, self._behind[index]
        rows = np.zeros(count, ROW)
        for slot, row in enumerate(rows):
            decoding = slot >= count * behind
            prompt = rng.randint(32, 4_096)
            row["key"] = (1 << 40) + index * QUEUED + slot
            row["arrival_s"] = -rng.uniform(0, 2)
            row["first_token_s"] = row["last_token_s"] = -rng.uniform(0, 1) if decoding else nan
            row["ttft_s"], row["tpot_s"] = (
                rng.choice((0.5, 1.0, 5.0)),
                rng.choice((0.03, 0.05, inf)),
            )
            row["e2e_s"], row["priority"], row["prompt_tokens"] = inf, rng.randint(1, 3), prompt
            row["expected_tokens"] = 500
            row["pending_tokens"], row["phase"] = prompt, WAITING
            if decoding:
                row["computed_tokens"], row["pending_tokens"] = prompt, 1
                row["emitted_tokens"], row["phase"] = rng.randint(1, 400), RUNNING
                row["kv_blocks"] = -(-prompt // 16)
            row["best_effort"] = rng.random() < 0.2
        return rows

    def _held(self) -> np.ndarray:
        """Chunks of conversations, each with all chunks before it."""
        chosen = self._rng.sample(self._conversations, _HELD // _CHUNKS)
        chunks = [(c, 128 * (n + 1), 0) for chunks in chosen for n, c in enumerate(chunks)]
        return np.array(chunks, HELD)


def _summary() -> np.void:
    """An engine's summary in the middle of its work."""
    summary = np.zeros(1, SUMMARY)
    summary["correction"] = summary["fixed_correction"] = 1.0
    summary["free_kv_blocks"], summary["total_kv_blocks"] = 5_000, 10_000
    summary["last_step_s"] = summary["predicted_step_s"] = 0.02
    summary["steps"] = 1_000
    record: np.void = summary[0]
    return record


Figures = dict[str, float]
"""``p50_ms``, ``p99_ms``, ``per_second``."""


def figures(times_ns: Sequence[int], elapsed_s: float | None = None) -> Figures:
    """Median, P99 and rate over ``elapsed_s``; by default, how many fit a second."""
    p50_ms, p99_ms = quantiles(np.array(times_ns) / 1e6, digits=4)
    seconds = sum(times_ns) / 1e9 if elapsed_s is None else elapsed_s
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "per_second": round(len(times_ns) / seconds)}
