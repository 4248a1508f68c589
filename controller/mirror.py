"""The controller's copy of every replica's queue, kept up to date by their reports.

Times are seconds on the controller's monotonic clock, passed in, except the times inside rows and
summaries, which are on the replica's own; a message's ``now_s`` leads from one to the other.

The rules of order: a hello replaces all that is known of a replica; a delta counts only if it
carries this controller's epoch and the number after the last report's. Anything else (a lost, a
repeated or a late delta) changes nothing and asks for a new hello.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, inf
from types import MappingProxyType

import numpy as np

from controller import report_rows
from controller.checks import check_delta_body, check_delta_header, check_hello
from controller.clock_offset import ClockOffset
from controller.messages import ReplicaDelta, ReplicaHello
from scheduling.fleet import Fleet, Report
from scheduling.prefix import NO_HELD, NO_HELD_SLOTS
from scheduling.state import ROW, SUMMARY
from scheduling.step_correction import caution
from scheduling.transfer import NO_TRANSFERS, Transfers

MAX_REPLICAS = 4096

FORGETTING_S = 10.0
"""How long a replica must be idle for its latency correction to lose ``1 - 1/e`` of its effect."""


class MirroredReplica:
    """One replica as it last reported. Its fields are read by all and written by the mirror."""

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
        """What to add to the replica's times to have them on the controller's clock."""
        return self._clock_offset.seconds

    def restart(self, hello: ReplicaHello) -> None:
        """Forget the table and the static facts, and take those of ``hello``."""
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
        """Write the rows of a checked message into the table.

        Returns:
            The keys of its live rows; and of each request that has ended with it the key, and the
            tokens of prompt and output as they were last reported.
        """
        used_slots, live, ended = report_rows.write(self.table, message.slots, message.rows)
        self.used_slots = max(self.used_slots, used_slots)
        # Of its own: the record of a message may be a part of something larger. A record's own
        # `copy` takes several times as long.
        self.summary = np.frombuffer(message.summary.tobytes(), SUMMARY)[0]
        self.draining = message.draining
        self.seq = int(message.seq)
        self._clock_offset.hear(message.now_s, now_s)
        self.received_s = now_s
        return live, ended

    def report(self, made_s: float, draining: bool) -> Report:
        """Its state, made at ``made_s`` of its clock, as a fleet takes it."""
        summary, hello = self.summary, self.hello
        rows = self.table[: self.used_slots]
        work, fixed = float(summary["correction"]), float(summary["fixed_correction"])
        spread = float(summary["step_spread"])
        if not rows["phase"].any():
            # Nothing runs that could correct it: what slow steps have taught must not keep an idle
            # replica from all promises for good.
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
            # For a whole number the compiled loops would be compiled anew, for seconds.
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
        )


def _transfers(summary: np.void) -> Transfers:
    done = summary["transfers"].item()
    if not done:
        return NO_TRANSFERS
    return Transfers(done, summary["transfer_seconds"].item(), summary["transfer_tokens"].item())


class Mirror:
    """All replicas that have registered and been heard of lately; it keeps a fleet up to date.

    A replica that drains is left out of decisions at once. One that a router saw leave
    (:meth:`mark_gone`) is left out for ``forget_after_s`` whatever it says: Serve never brings a
    replica back under the same name, and one that was marked by mistake returns by itself. One that
    is silent for ``forget_after_s`` is dropped.

    A report costs what :meth:`Fleet.report <scheduling.fleet.Fleet.report>` costs, with the slots
    in use for requests; everything else is ``O(replicas)``.

    Args:
        epoch: number of this controller's life; deltas must carry it.
        fleet: what decisions are made from.
        forget_after_s: seconds, as above.
        limit: most replicas.
        ended: told of each request that has ended at a replica, with its tokens of prompt and
            output as far as they were reported.
    """

    def __init__(
        self,
        epoch: int,
        fleet: Fleet,
        forget_after_s: float,
        limit: int = MAX_REPLICAS,
        ended: Callable[[int, float], None] | None = None,
    ) -> None:
        self.epoch = epoch
        self._fleet = fleet
        self._forget_after_s = forget_after_s
        self._limit = limit
        self._ended = ended
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
        self._take_in(replica, hello, (), now_s)

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
        ended = self._take_in(replica, delta, delta.finished, now_s)
        if delta.finished and self._ended is not None:
            for key, tokens in ended:
                self._ended(key, tokens)
        return True

    def mark_gone(self, replica_ids: Iterable[str], now_s: float) -> None:
        """Leave replicas out from now on; unknown ones are ignored."""
        for replica_id in replica_ids:
            self._fleet.leave_out(replica_id, now_s + self._forget_after_s)

    def forget(self, replica_id: str) -> None:
        """Drop a replica that said goodbye, if it is known."""
        self._replicas.pop(replica_id, None)
        self._fleet.leave(replica_id)

    def forget_silent(self, now_s: float) -> list[str]:
        """Drop the replicas that were silent for too long; which these are."""
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
        """Apply a checked message, and end the reservations of the requests that it tells of.
        Returns the requests that have ended, as :meth:`MirroredReplica.apply` does."""
        fleet = self._fleet
        live, ended = replica.apply(message, now_s)
        if len(fleet.ledger):
            fleet.confirm((*live, *finished), message.replica_id)
        report = replica.report(message.now_s, message.draining)
        fleet.report(message.replica_id, report, now_s)
        anew = isinstance(message, ReplicaHello)
        if anew or len(message.held_slots):
            fleet.hold(message.replica_id, message.held_slots, message.held, anew)
        return ended
