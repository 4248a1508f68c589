"""The controller's copy of every replica's queue, kept up to date by their reports.

Times are seconds on the controller's monotonic clock, passed in, except the times inside rows and
summaries, which are on the replica's own; ``clock_offset_s`` leads from one to the other.

The rules of order: a hello replaces all that is known of a replica; a delta counts only if it
carries this controller's epoch and the number after the last report's. Anything else (a lost, a
repeated or a late delta) changes nothing and asks for a new hello.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isnan
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from controller.checks import check_delta_body, check_delta_header, check_hello
from controller.messages import ReplicaDelta, ReplicaHello
from scheduling.admission.pab import replica_pab_tokens
from scheduling.state import ROW, RUNNING, prefill_rows

MAX_REPLICAS = 4096

Condition = Literal["fresh", "draining", "gone", "stale"]
CONDITIONS: tuple[Condition, ...] = ("fresh", "draining", "gone", "stale")


class Aggregates(NamedTuple):
    """What decisions need of a replica's table, as of its last report.

    Requests and tokens are counted from the rows, not from the summary: a request has a row as
    soon as the replica has it, while the summary is as old as the engine's last step, and a
    reservation ends when its row arrives.
    """

    waiting: int
    running: int
    prefill_tokens: int
    context_tokens: int
    free_kv_blocks: int
    total_kv_blocks: int
    pab_tokens: float


class MirroredReplica:
    """One replica as it last reported. Its fields are read by all and written by the mirror."""

    __slots__ = (
        "aggregates",
        "clock_offset_s",
        "draining",
        "gone_until_s",
        "hello",
        "latency",
        "received_s",
        "seq",
        "summary",
        "table",
        "used_slots",
    )

    # Written by the mirror with every report.
    aggregates: Aggregates

    def __init__(self, hello: ReplicaHello) -> None:
        self.gone_until_s = -inf
        self.restart(hello)

    def restart(self, hello: ReplicaHello) -> None:
        """Forget the table and the static facts, and take those of ``hello``."""
        # The mirror keeps its own arrays; those of the message need not stay in memory.
        self.hello = hello._replace(
            slots=np.empty(0, np.int32), rows=np.empty(0, ROW), summary=hello.summary.copy()
        )
        self.latency = hello.profile.model
        self.table = np.zeros(hello.capacity, ROW)
        self.used_slots = 0

    def apply(self, message: ReplicaHello | ReplicaDelta, now_s: float) -> None:
        """Write the rows of a checked message into the table."""
        slots = message.slots
        if len(slots):
            self.table[slots] = message.rows
            self.used_slots = max(self.used_slots, int(slots.max()) + 1)
        self.summary = message.summary.copy()
        self.seq = int(message.seq)
        self.draining = message.draining
        self.received_s = now_s
        self.clock_offset_s = now_s - message.now_s

    def live_rows(self) -> np.ndarray:
        """The rows of the live requests, a copy. ``O(used slots)``."""
        used = self.table[: self.used_slots]
        return used[np.flatnonzero(used["phase"])]


class Mirror:
    """All replicas that have registered and been heard of lately.

    A replica that is silent for ``stale_after_s`` is left out of decisions, and dropped after
    ``forget_after_s``. One that drains is left out at once. One that a router saw leave
    (:meth:`mark_gone`) is left out for ``forget_after_s`` whatever it says: Serve never brings a
    replica back under the same name, and one that was marked by mistake returns by itself.

    A report costs ``O(its rows + slots in use)``, everything else ``O(replicas)``.

    Args:
        epoch: number of this controller's life; deltas must carry it.
        stale_after_s, forget_after_s: seconds, as above.
        reference_ttft_s: horizon of the prefill admission budget, seconds.
        reference_tpot_s: decode pace of the budget where a request states none, seconds.
        limit: most replicas.
    """

    def __init__(
        self,
        epoch: int,
        stale_after_s: float,
        forget_after_s: float,
        reference_ttft_s: float,
        reference_tpot_s: float,
        limit: int = MAX_REPLICAS,
    ) -> None:
        self.epoch = epoch
        self._stale_after_s = stale_after_s
        self._forget_after_s = forget_after_s
        self._reference_ttft_s = reference_ttft_s
        self._reference_tpot_s = reference_tpot_s
        self._limit = limit
        self._replicas: dict[str, MirroredReplica] = {}
        self.replicas: Mapping[str, MirroredReplica] = MappingProxyType(self._replicas)
        """By id, in order of first registration. Read only."""

    def hello(self, hello: ReplicaHello, now_s: float) -> None:
        """Register a replica, or replace what is known of it.

        Raises:
            ValueError: the message is malformed, or there is no room for another replica. The
                mirror is as it was.
        """
        check_hello(hello)
        replica = self._replicas.get(hello.replica_id)
        if replica is None:
            if len(self._replicas) >= self._limit:
                raise ValueError(
                    f"replica {hello.replica_id!r} is refused: "
                    f"{self._limit} replicas are known and that is the most"
                )
            replica = MirroredReplica(hello)
            self._replicas[hello.replica_id] = replica
        else:
            replica.restart(hello)
        replica.apply(hello, now_s)
        replica.aggregates = self._aggregate(replica, hello.now_s)

    def delta(self, delta: ReplicaDelta, now_s: float) -> bool:
        """Apply a report. ``False``: it cannot be applied, the replica must say hello again.

        Raises:
            ValueError: the message is malformed. The mirror is as it was.
        """
        check_delta_header(delta)
        replica = self._replicas.get(delta.replica_id)
        if replica is None or delta.epoch != self.epoch or delta.seq != replica.seq + 1:
            return False
        check_delta_body(delta, replica.hello.capacity)
        replica.apply(delta, now_s)
        replica.aggregates = self._aggregate(replica, delta.now_s)
        return True

    def mark_gone(self, replica_ids: Iterable[str], now_s: float) -> list[str]:
        """Leave replicas out from now on; return those that are known."""
        known = [replica_id for replica_id in replica_ids if replica_id in self._replicas]
        for replica_id in known:
            self._replicas[replica_id].gone_until_s = now_s + self._forget_after_s
        return known

    def forget(self, replica_id: str) -> bool:
        """Drop a replica that said goodbye; whether it was known."""
        return self._replicas.pop(replica_id, None) is not None

    def forget_silent(self, now_s: float) -> list[str]:
        """Drop the replicas that were silent for too long, and return their ids."""
        silent = [
            replica_id
            for replica_id, replica in self._replicas.items()
            if now_s - replica.received_s >= self._forget_after_s
        ]
        for replica_id in silent:
            del self._replicas[replica_id]
        return silent

    def condition(self, replica: MirroredReplica, now_s: float) -> Condition:
        """Whether a replica may be chosen (``fresh``), or why not."""
        if replica.draining:
            return "draining"
        if now_s < replica.gone_until_s:
            return "gone"
        return "fresh" if now_s < self.stale_at_s(replica) else "stale"

    def stale_at_s(self, replica: MirroredReplica) -> float:
        """When a replica goes stale if it does not report before."""
        return replica.received_s + self._stale_after_s

    def _aggregate(self, replica: MirroredReplica, replica_now_s: float) -> Aggregates:
        """Sums over a table; once per report, so that no decision pays for it."""
        rows = replica.live_rows()
        prefill = prefill_rows(rows)
        running = int(np.count_nonzero(rows["phase"] == RUNNING))
        summary = replica.summary
        pab_tokens = replica_pab_tokens(
            rows,
            replica_now_s,
            replica.latency.corrected(float(summary["correction"])),
            self._reference_ttft_s,
            self._reference_tpot_s,
        )
        return Aggregates(
            waiting=len(rows) - running,
            running=running,
            prefill_tokens=int(rows["pending_tokens"][prefill].sum()),
            context_tokens=int(rows["computed_tokens"][~prefill].sum()),
            free_kv_blocks=int(summary["free_kv_blocks"]),
            total_kv_blocks=int(summary["total_kv_blocks"]),
            # Extreme coefficients can overflow; not-a-number would win or lose every comparison.
            pab_tokens=-inf if isnan(pab_tokens) else pab_tokens,
        )
