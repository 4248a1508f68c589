"""The controller's copy of every replica's queue, kept up to date by their reports.

Times are seconds on the controller's monotonic clock, except inside rows and summaries, which
are on the replica's; a message's ``now_s`` converts. A delta is applied only if it carries this
controller's epoch and the number after the last report's; otherwise the replica is asked for a
new hello, which replaces all its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import exp, inf
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from sluice.controller.transport import checks
from sluice.controller.transport.checks import check_changes, checked_hello
from sluice.protocol.connection import ClockOffset
from sluice.protocol.messages import FirstTokenWait, ReplicaDelta, ReplicaHello
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.prefix import NO_HELD, NO_HELD_SLOTS
from sluice.scheduling.fleet.ranks import replica_of
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import ROW, SUMMARY
from sluice.scheduling.fleet.transfer import NO_TRANSFERS, Transfers
from sluice.scheduling.latency.model import caution
from sluice.scheduling.placement.late_first_tokens import late
from sluice.scheduling.roles import Role

MAX_REPLICAS = 4096

FORGETTING_S = 10.0
"""How long a replica must be idle for its latency correction to lose ``1 - 1/e`` of its effect."""


class MirroredReplica:
    """One replica as it last reported. Only the mirror writes its fields."""

    __slots__ = (
        "_clock_offset",
        "draining",
        "hello",
        "latency",
        "received_s",
        "seq",
        "summary",
        "table",
        "used_slots",
    )

    def __init__(self, hello: ReplicaHello) -> None:
        self._clock_offset = ClockOffset()
        self.received_s = -inf
        self.restart(hello)

    @property
    def offset_s(self) -> float:
        """Offset to add to the replica's times to convert them to the controller's clock."""
        return self._clock_offset.seconds

    def restart(self, hello: ReplicaHello) -> None:
        """Replace the table and the static properties by those of ``hello``."""
        # The mirror keeps its own arrays; those of the message need not stay in memory.
        self.hello = hello._replace(
            slots=np.empty(0, np.int32),
            rows=np.empty(0, ROW),
            summary=hello.summary.copy(),
            held_slots=NO_HELD_SLOTS,
            held=NO_HELD,
        )
        self.latency = hello.profile.model
        self.table = np.zeros(hello.capacity, ROW)
        self.used_slots = 0

    def apply(
        self, message: ReplicaHello | ReplicaDelta, now_s: float
    ) -> tuple[list[int], list[list[int]]]:
        """Write the rows of a checked message into the table. Returns the keys of its live rows;
        and for each request that ended, its key and the prompt plus output tokens as last
        reported."""
        used_slots, live, ended = checks.write(self.table, message.slots, message.rows)
        self.used_slots = max(self.used_slots, used_slots)
        # A copy, because the record of a message may be a view of a larger array. A record's own
        # `copy` takes several times as long.
        self.summary = np.frombuffer(message.summary.tobytes(), SUMMARY)[0]
        self.draining = message.draining
        self.seq = int(message.seq)
        self._clock_offset.observe(message.now_s, now_s)
        self.received_s = now_s
        return live, ended

    def report(self, made_s: float, draining: bool) -> Report:
        """Its state as a fleet's report, made at ``made_s`` of its clock."""
        summary, hello = self.summary, self.hello
        rows = self.table[: self.used_slots]
        work, fixed = float(summary["correction"]), float(summary["fixed_correction"])
        spread = float(summary["step_spread"])
        if not rows["phase"].any():
            # An idle replica runs no steps that would update the correction: slow steps in the past
            # must not exclude it from guarantees indefinitely.
            idle_s = max(0.0, made_s - float(summary["updated_s"]))
            kept = exp(-idle_s / FORGETTING_S)
            work, fixed, spread = (
                1.0 + (work - 1.0) * kept,
                1.0 + (fixed - 1.0) * kept,
                spread * kept,
            )
        careful = caution(spread)
        return Report(
            rows,
            # For an int the compiled loops would be compiled again, for seconds.
            float(made_s),
            self.offset_s,
            float(summary["updated_s"]),
            self.latency.corrected(work * careful, fixed * careful),
            int(summary["free_kv_blocks"]),
            int(summary["total_kv_blocks"]),
            hello.block_tokens,
            hello.max_sequences,
            draining,
            hello.preempts,
            hello.role,
            _transfers(summary),
            hello.local_order,
            float(summary["next_begins_s"]),
            float(summary["planned_stop_s"]),
            float(summary["kv_answer_s"]),
        )


def _transfers(summary: np.void) -> Transfers:
    done = summary["transfers"].item()
    if not done:
        return NO_TRANSFERS
    return Transfers(done, summary["transfer_seconds"].item(), summary["transfer_tokens"].item())


class Mirror:
    """All replicas that have registered and reported lately; it keeps ``fleet`` up to date.

    A draining replica is excluded from decisions. One that a router saw leave (``mark_gone``) is
    excluded for ``forget_after_s`` seconds even if it reports: Serve never restarts a replica
    under the same name, and one marked by mistake returns afterwards. A replica silent for that
    long is dropped. A report costs what ``Fleet.report`` costs with the slots in use; everything
    else is ``O(replicas)``. ``ended`` gets each request that ended, and its prompt plus output
    tokens."""

    def __init__(
        self,
        epoch: int,
        fleet: Fleet,
        forget_after_s: float,
        ended: Callable[[int, float], None] | None = None,
    ) -> None:
        self.epoch = epoch
        self._fleet = fleet
        self._forget_after_s = forget_after_s
        self._ended = ended
        self._replicas: dict[str, MirroredReplica] = {}
        self.replicas: Mapping[str, MirroredReplica] = MappingProxyType(self._replicas)
        """By id, in order of first registration. Read only."""

    def hello(self, hello: ReplicaHello, now_s: float) -> None:
        """Register a replica, or replace its state. Raises ValueError, with nothing changed: the
        message is malformed, or ``MAX_REPLICAS`` are known."""
        hello = checked_hello(hello)
        replica = self._replicas.get(hello.replica_id)
        if replica is None:
            if len(self._replicas) >= MAX_REPLICAS:
                raise ValueError(
                    f"replica {hello.replica_id!r} is refused: "
                    f"{MAX_REPLICAS} replicas are known, which is the limit"
                )
            replica = MirroredReplica(hello)
            self._replicas[hello.replica_id] = replica
        else:
            replica.restart(hello)
        self._take_in(replica, hello, (), now_s)

    def delta(self, delta: ReplicaDelta, now_s: float) -> bool:
        """Apply a decoded report. ``False``: it cannot be applied, and the replica must send a
        new hello. Raises ValueError, with nothing changed: an array is malformed."""
        replica = self._replicas.get(delta.replica_id)
        if replica is None or delta.epoch != self.epoch or delta.seq != replica.seq + 1:
            return False
        check_changes(delta, replica.hello.capacity)
        ended = self._take_in(replica, delta, delta.finished, now_s)
        if delta.finished and self._ended is not None:
            for key, tokens in ended:
                self._ended(key, tokens)
        return True

    def assign(self, replica_id: str, role: Role) -> None:
        """A known replica has another role from now on."""
        replica = self._replicas[replica_id]
        replica.hello = replica.hello._replace(role=role)
        self._fleet.assign(replica_id, role)

    def mark_gone(self, replica_ids: Iterable[str], now_s: float) -> None:
        """Exclude replicas, with all their ranks, for ``forget_after_s``; unknown ones are
        ignored."""
        gone = set(map(replica_of, replica_ids))
        for name in self._replicas:
            if replica_of(name) in gone:
                self._fleet.leave_out(name, now_s + self._forget_after_s)

    def forget(self, replica_id: str) -> None:
        """Drop a replica that said goodbye, if it is known."""
        self._replicas.pop(replica_id, None)
        self._fleet.leave(replica_id)

    def forget_silent(self, now_s: float) -> list[str]:
        """Drop the replicas that were silent for ``forget_after_s``. Returns their ids."""
        silent = [
            replica_id
            for replica_id, replica in self._replicas.items()
            if now_s - replica.received_s >= self._forget_after_s
        ]
        for replica_id in silent:
            self.forget(replica_id)
        return silent

    def _take_in(
        self,
        replica: MirroredReplica,
        message: ReplicaHello | ReplicaDelta,
        finished: Sequence[int],
        now_s: float,
    ) -> list[list[int]]:
        """Apply a checked message, and end the reservations of the requests in it. Returns the
        requests that have ended, as :meth:`MirroredReplica.apply` does."""
        fleet = self._fleet
        live, ended = replica.apply(message, now_s)
        if len(fleet.ledger):
            fleet.confirm((*live, *finished), message.replica_id)
        report = replica.report(message.now_s, message.draining)
        fleet.report(message.replica_id, report, now_s)
        renew = isinstance(message, ReplicaHello)
        if renew or len(message.held_slots):
            fleet.hold(message.replica_id, message.held_slots, message.held, renew)
        return ended


MAX_LATE: Final = 16
"""Most requests that one answer names: each of them causes another decision."""

MAX_LOOKED_AT: Final = 32
"""Most replicas that are checked for one push, ordered by their soonest due first token."""


class _Due(NamedTuple):
    """When a first token is due: as the replica plans it and as the client stated it, seconds on
    the controller's clock."""

    planned_s: float
    stated_s: float
    key: int


def late_of(
    waits: Sequence[FirstTokenWait],
    mirror: Mirror,
    fleet: Fleet,
    now_s: float,
    has_cells: bool = False,
) -> tuple[int, ...]:
    """The keys in checked ``waits`` predicted to miss their TTFT, at most ``MAX_LATE``, without
    those that could move nowhere; with ``has_cells`` they may move to another cell. ``O(requests
    at the replicas named)`` of at most ``MAX_LOOKED_AT`` replicas."""
    by_replica: dict[str, dict[int, float]] = {}
    for wait in sorted(waits, key=lambda wait: wait.ttft_s - wait.waited_s):
        due_s = now_s - wait.waited_s + wait.ttft_s
        if wait.replica_id in mirror.replicas and due_s > now_s:
            by_replica.setdefault(wait.replica_id, {})[wait.key] = due_s
    found: list[int] = []
    for replica_id, stated_s in islice(by_replica.items(), MAX_LOOKED_AT):
        if has_cells or _is_elsewhere(replica_id, fleet, now_s):
            found += _late_at(mirror.replicas[replica_id], stated_s, fleet, now_s)
    return tuple(found[:MAX_LATE])


def _is_elsewhere(replica_id: str, fleet: Fleet, now_s: float) -> bool:
    """Whether another replica may give promises."""
    others = fleet.candidates(now_s) != fleet.row_of[replica_id]
    return fleet.may_promise and bool(others.any())


def _late_at(
    replica: MirroredReplica, stated_s: dict[int, float], fleet: Fleet, now_s: float
) -> list[int]:
    """The keys in ``stated_s`` that are predicted to be late at one replica."""
    hello, offset_s = replica.hello, replica.offset_s
    rows = replica.table[: replica.used_slots]
    rows = rows[rows["phase"] > 0]
    waiting = (rows["emitted_tokens"] == 0) & (rows["best_effort"] == 0)
    waiting &= np.isin(rows["key"], list(stated_s))
    dues = [
        _Due(arrival_s + min(ttft_s, e2e_s) + offset_s, stated_s[key], key)
        for key, arrival_s, ttft_s, e2e_s in rows[waiting][
            ["key", "arrival_s", "ttft_s", "e2e_s"]
        ].tolist()
    ]
    since_s = rows["arrival_s"].min() + offset_s if len(rows) else inf
    for key, each_s in stated_s.items():
        made = fleet.ledger.of(key)
        if made is not None and made.replica_id == hello.replica_id:
            dues.append(_Due(made.due_s, each_s, key))
            since_s = min(since_s, made.made_s)
    if not dues:
        return []
    dues.sort()
    begun_s = max(float(replica.summary["updated_s"]) + offset_s, float(since_s))
    # The state of a replica that reports is known as of its last report.
    silent = now_s - replica.received_s >= fleet.settings.aged_after_s
    found = late(
        fleet,
        fleet.row_of[hello.replica_id],
        hello.max_batch_tokens,
        (begun_s, now_s if silent else replica.received_s),
        np.array([due.planned_s for due in dues]),
        np.array([due.stated_s for due in dues]),
    )
    return [dues[place].key for place in np.flatnonzero(found).tolist()]
