"""What is known of every replica, as arrays for placement and admission, filled from real reports
by the controller and from simulated ones. Times are seconds on one monotonic clock of the caller's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.prefix import PrefixIndex
from sluice.scheduling.fleet.ranks import replica_of
from sluice.scheduling.fleet.report import Ledger, Report, Reservation, add_reservation, fold
from sluice.scheduling.fleet.rows import (
    FIGURES,
    LENT_FIELDS,
    LOAD_FIELDS,
    PREFILL_FIELDS,
    FleetArrays,
)
from sluice.scheduling.fleet.transfer import NO_TRANSFERS, TransferTime
from sluice.scheduling.request.kernels import COEFFICIENTS, Floats, Ints
from sluice.scheduling.roles import ROLES, Role

Condition = Literal["fresh", "aged", "stale", "quarantined", "draining", "gone"]
CONDITIONS: tuple[Condition, ...] = ("fresh", "aged", "stale", "quarantined", "draining", "gone")

MAX_CLOSED = 4096
"""Most replicas that are closed at once; the one closed first is forgotten for one more."""

_CODES: dict[Role, int] = {role: code for code, role in enumerate(ROLES)}

SLACK_KEPT_S = 0.01
"""How long :meth:`Fleet.slack_s` keeps its last value, seconds: replicas report less often."""

_FIRST_REPLICAS = 8
_FIRST_ENTRIES = 16


class FleetSettings(NamedTuple):
    """How reports are judged, by the silence of a replica.

    Attributes:
        aged_after_s: then nothing is promised there, and it is chosen only where no other is left.
        stale_after_s: then it is left out.
        reservation_ttl_s: a decision that no replica confirmed by then is dropped.
        reference_ttft_s: horizon of the prefill admission budget where no request states one."""

    aged_after_s: float = 1.0
    stale_after_s: float = 2.0
    reservation_ttl_s: float = 5.0
    reference_ttft_s: float = 1.0


class Fleet:
    """Every replica as a row of a few arrays, kept up to date by reports and by own decisions.

    Rows of replicas that left are reused. A report costs ``O(n log n)`` with ``n`` requests at the
    replica, a decision ``O(n)``, both compiled. Policies must not write to the arrays."""

    def __init__(self, settings: FleetSettings | None = None) -> None:
        settings = settings or FleetSettings()
        aged_after_s = min(settings.aged_after_s, settings.stale_after_s)
        self.settings = settings._replace(aged_after_s=aged_after_s)
        self.ledger = Ledger(self.settings.reservation_ttl_s)
        self.prefixes = PrefixIndex()
        self.transfer = TransferTime()
        """How long KV takes from replica to replica."""
        self.has_roles = False
        """Whether any replica is not ``mixed``."""
        self.ids: list[str] = []
        """Replica of each row; empty where the row is free. A new list whenever that changes, so a
        caller that keeps this one knows later what the rows were."""
        self.row_of: dict[str, int] = {}
        self.closed: tuple[str, ...] = ()
        """The replicas that are closed, also unknown ones."""
        self.figures: Floats = np.zeros((0, FIGURES))
        self.pieces: Floats = np.zeros((0, 1, COEFFICIENTS))
        self.starts: Ints = np.zeros(0, np.int64)
        self.prefills: Floats = np.zeros((0, PREFILL_FIELDS))
        self.loads: Floats = np.zeros((0, LOAD_FIELDS))
        self.lent: Floats = np.zeros((0, LENT_FIELDS))
        self.arrays: FleetArrays
        """The arrays, for compiled loops; valid until the next change."""
        self._renew_arrays()
        self._rooms: Ints = np.zeros(0, np.int64)
        self._used = 0
        self._reports: list[Report | None] = []
        self._last_report_s: Floats = np.zeros(0)
        self._gone_until_s: Floats = np.zeros(0)
        self._willing: NDArray[np.bool_] = np.zeros(0, bool)
        # Kept with every change of what it is made from, as each decision reads it.
        self._sound: NDArray[np.bool_] = np.zeros(0, bool)
        # The candidates as last found, the least time at which one of them was heard, and when the
        # first of those that were left out returns. `None`: to be found again.
        self._candidates: Ints | None = None
        self.may_promise = False
        """Whether the last candidates may promise: they are neither aged nor in quarantine."""
        self._oldest_s, self._returns_s = inf, inf
        self._quarantined: dict[int, bool] = {}
        self.untried: frozenset[int] = frozenset()
        """Rows of the quarantined replicas to which one request may go now, to try them."""
        self.roles: list[Role] = []
        """Role of each row's replica; ``mixed`` where the row is free."""
        self._codes: Ints = np.zeros(0, np.int64)
        self._free: list[int] = []
        self._slack_s, self._slack_at_s = -inf, -inf

    def __len__(self) -> int:
        return len(self.row_of)

    def _renew_arrays(self) -> None:
        """One of the arrays is another one now."""
        self.arrays = self.figures, self.pieces, self.starts, self.prefills, self.loads, self.lent

    # Membership.

    def report(self, replica_id: str, report: Report, now_s: float) -> None:
        """Take in a replica's state; one that is not known yet joins."""
        row = self.row_of.get(replica_id)
        if row is None:
            row = self._join(replica_id)
        if now_s - self._last_report_s[row] >= self.settings.aged_after_s:
            self._candidates = None
        self._last_report_s[row] = now_s
        if self.roles[row] != report.role:
            self._set_role(row, report.role)
        if report.transfers.done:
            before = self._reports[row]
            done = before.transfers if before is not None else NO_TRANSFERS
            self.transfer.learn(done, report.transfers)
        self._set_willing(row, not report.draining and replica_id not in self.closed)
        self._reports[row] = report
        self._set_pieces(row, report.latency.pieces)
        self._fold(row, report)

    def assign(self, replica_id: str, role: Role) -> None:
        """A known replica has another role from now on; reports that follow must name it, too."""
        self._set_role(self.row_of[replica_id], role)

    def leave(self, replica_id: str) -> bool:
        """Forget a replica and what is reserved there; whether it was known."""
        row = self.row_of.pop(replica_id, None)
        if row is None:
            return False
        self.ledger.drop_replica(replica_id)
        self.prefixes.clear(row)
        self.ids = [*self.ids]
        self.ids[row] = ""
        self._rooms[row] = 0
        self._reports[row] = None
        self._quarantined.pop(row, None)
        self._set_willing(row, False)
        self._set_role(row, "mixed")
        self._free.append(row)
        return True

    def leave_out(self, replica_id: str, until_s: float) -> bool:
        """Leave a replica out of decisions until then whatever it reports, and drop what is
        reserved there; whether it is known."""
        row = self.row_of.get(replica_id)
        if row is None:
            return False
        self._gone_until_s[row] = until_s
        self._candidates = None
        if self.ledger.drop_replica(replica_id):
            self._again(replica_id)
        return True

    def close(self, replica_id: str) -> None:
        """Leave a replica out of decisions until :meth:`reopen`, whatever it reports, also where it
        joins later. What is reserved there is on its way and stays."""
        if replica_id not in self.closed:
            self.closed = (*self.closed, replica_id)[-MAX_CLOSED:]
        row = self.row_of.get(replica_id)
        if row is not None:
            self._set_willing(row, False)

    def reopen(self, replica_id: str) -> bool:
        """Take :meth:`close` back; whether it was closed."""
        if replica_id not in self.closed:
            return False
        self.closed = tuple([each for each in self.closed if each != replica_id])
        row = self.row_of.get(replica_id)
        if row is not None:
            report = self._reports[row]
            assert report is not None
            self._set_willing(row, not report.draining)
        return True

    def quarantine(self, replica_id: str, untried: bool = False) -> None:
        """Leave a replica, which is known, out of decisions as long as others are left, until
        :meth:`readmit`; or with ``untried`` until a request has gone there."""
        row = self.row_of[replica_id]
        self._quarantined[row] = untried
        self._set_willing(row, bool(self._willing[row]))

    def readmit(self, replica_id: str) -> None:
        """Take :meth:`quarantine` back, if the replica is known."""
        row = self.row_of.get(replica_id)
        if row is not None and self._quarantined.pop(row, None) is not None:
            self._set_willing(row, bool(self._willing[row]))

    def candidates(self, now_s: float) -> Ints:
        """Rows of the replicas that may be chosen, ascending and read-only: the fresh ones without
        quarantine, else the aged ones, else the quarantined ones, the same way.

        ``O(1)`` while these are the same, ``O(replicas)`` at a change and once in ``aged_after_s``.
        ``now_s`` must not run backwards."""
        aged_after_s = self.settings.aged_after_s
        if self._candidates is not None:
            if now_s - self._oldest_s < aged_after_s and now_s < self._returns_s:
                return self._candidates
            self._candidates = None
        self.may_promise = True
        silent_s = now_s - self._last_report_s
        here = now_s >= self._gone_until_s
        fresh = here & (silent_s < aged_after_s)
        rows = np.flatnonzero(self._sound & fresh)
        if len(rows):
            self._oldest_s = float(self._last_report_s[rows].min())
            self._returns_s = float(self._gone_until_s[~here].min(initial=inf))
            self._candidates = rows
            return rows
        self.may_promise = False
        aged = here & (silent_s < self.settings.stale_after_s)
        for able in (self._sound & aged, self._willing & fresh, self._willing & aged):
            rows = np.flatnonzero(able)
            if len(rows):
                break
        return rows

    def is_empty(self, now_s: float) -> bool:
        """Whether no replica is there that takes requests or that only an operator has closed: all
        have left, or are about to. ``O(replicas)``."""
        here = (self._willing & (now_s >= self._gone_until_s)).any()
        return not here and not any(name in self.closed for name in self.row_of)

    @property
    def last_row(self) -> Ints:
        """The row of one replica, or else of the last one that has left, for its latency model;
        empty if there has been none."""
        rows = list(self.row_of.values()) or self._free[-1:]
        return np.array(rows[-1:], np.int64)

    def capacity(self, now_s: float) -> Ints:
        """Rows of the candidates that are not quarantined: what there is to serve requests with."""
        rows = self.candidates(now_s)
        if not self._quarantined:
            return rows
        return np.array([row for row in rows.tolist() if row not in self._quarantined], np.int64)

    def present(self, now_s: float) -> Ints:
        """Rows of the replicas that take requests or would if they were not quarantined."""
        heard = now_s - self._last_report_s < self.settings.stale_after_s
        return np.flatnonzero(self._willing & heard & (now_s >= self._gone_until_s))

    def but(self, rows: Ints, replica_ids: Iterable[str]) -> Ints:
        """``rows`` without those of some replicas and of their other ranks, which may end with
        them; or all of them if none were left. ``O(rows)``, for retries."""
        out = set(map(replica_of, replica_ids))
        rest = rows[[replica_of(self.ids[row]) not in out for row in rows]]
        return rest if len(rest) else rows

    def among(self, rows: Ints, replica_ids: Collection[str]) -> Ints:
        """The ranks among ``rows`` of some of Serve's replicas. ``O(rows)``."""
        own = set(replica_ids)
        return rows[[replica_of(self.ids[row]) in own for row in rows]]

    def of_role(self, rows: Ints, role: Role) -> Ints:
        """Those of ``rows`` whose replica has a role."""
        return rows[self.are(rows, role)]

    def are(self, rows: Ints, role: Role) -> NDArray[np.bool_]:
        """Which of ``rows`` have a role."""
        own: NDArray[np.bool_] = self._codes[rows] == _CODES[role]
        return own

    def condition(self, row: int, now_s: float) -> Condition:
        """Whether a replica may be chosen (``fresh``), or why not, or only where no other is left
        (``aged``, ``quarantined``)."""
        if not self._willing[row]:
            return "draining"
        if now_s < self._gone_until_s[row]:
            return "gone"
        silent_s = now_s - self._last_report_s[row]
        if silent_s >= self.settings.stale_after_s:
            return "stale"
        if row in self._quarantined:
            return "quarantined"
        return "fresh" if silent_s < self.settings.aged_after_s else "aged"

    def budgets_s(self, rows: Ints, now_s: float) -> Floats:
        """The prefill admission budget of each of ``rows`` within the reference TTFT, seconds, see
        :func:`sluice.scheduling.fleet.rows.budget_s`."""
        due_s, nothing = now_s + self.settings.reference_ttft_s, np.zeros(len(rows))
        found: Floats = figure.spare_after_s(self.arrays, rows, now_s, due_s, nothing, nothing)
        return found

    def slack_s(self, now_s: float) -> float:
        """Mean budget of the candidates less their best-effort prefills, seconds; ``-inf`` without
        one. ``O(replicas)``, at most once in ``SLACK_KEPT_S``."""
        if now_s - self._slack_at_s >= SLACK_KEPT_S:
            rows = self.capacity(now_s)
            left_s = self.budgets_s(rows, now_s) - self.figures[rows, figure.BEST_EFFORT_S]
            self._slack_s = float(left_s.mean()) if len(rows) else -inf
            self._slack_at_s = now_s
        return self._slack_s

    def hold(
        self, replica_id: str, slots: NDArray[np.integer], held: np.ndarray, renew: bool = False
    ) -> None:
        """Store the prompt chunks that a known replica reports: changed ``slots`` of its table, or
        all of it (see ``PrefixIndex.write``)."""
        row = self.row_of[replica_id]
        if renew:
            self.prefixes.clear(row)
        self.prefixes.write(row, slots, held)

    # Decisions on their way.

    def reserve(self, key: int, made: Reservation) -> None:
        """Count a decision at once, as if its replica had reported the request."""
        changed = self.ledger.reserve(key, made)
        if changed:
            for replica_id in changed:
                self._again(replica_id)
            if made.replica_id in changed:
                return  # it has just been counted, with this one
        row = self.row_of[made.replica_id]
        while not add_reservation(self.arrays, row, self._rooms[row], made[1:]):
            self._make_room(row, int(self._rooms[row]) + 1)

    def release(self, keys: Iterable[int]) -> None:
        """Requests that a router gave up; unknown ones are ignored."""
        for replica_id in self.ledger.release(keys):
            self._again(replica_id)

    def confirm(self, keys: Iterable[int], replica_id: str) -> None:
        """A report of ``replica_id`` that follows holds these requests, or their ends: the
        reservations end. :meth:`report` makes the new count of that replica."""
        for changed in self.ledger.release(keys):
            if changed != replica_id:
                self._again(changed)

    def expire(self, now_s: float) -> None:
        """Drop the reservations that are too old."""
        for replica_id in self.ledger.expire(now_s):
            self._again(replica_id)

    def _set_willing(self, row: int, willing: bool) -> None:
        sound = willing and self._quarantined.get(row, True)
        self._willing[row] = willing
        if sound != self._sound[row]:
            self._sound[row] = sound
            self._candidates = None
        if self._quarantined or self.untried:
            untried = [each for each, may in self._quarantined.items() if may]
            self.untried = frozenset(untried)

    def _set_pieces(self, row: int, pieces: Floats) -> None:
        """All rows have as many as the model with most: a loop over all replicas reads them."""
        more = len(pieces) - self.pieces.shape[1]
        if more > 0:
            self.pieces = np.pad(self.pieces, ((0, 0), (0, more), (0, 0)))
            self._renew_arrays()
        self.pieces[row, : len(pieces)] = pieces
        self.pieces[row, len(pieces) :] = 0.0

    def _set_role(self, row: int, role: Role) -> None:
        self.roles[row] = role
        self._codes[row] = _CODES[role]
        self.has_roles = bool(self._codes.any())

    def _join(self, replica_id: str) -> int:
        if not self._free:
            self._grow(max(_FIRST_REPLICAS, 2 * len(self.ids)))
        row = self._free.pop()
        self.ids = [*self.ids]
        self.ids[row] = replica_id
        self.row_of[replica_id] = row
        self._gone_until_s[row] = -inf
        return row

    def _grow(self, rows: int) -> None:
        more = rows - len(self.ids)
        # The lowest row is taken first.
        self._free.extend(range(rows - 1, len(self.ids) - 1, -1))
        self.ids = self.ids + [""] * more
        self._reports.extend([None] * more)
        self.roles.extend(["mixed"] * more)
        for name in ("figures", "pieces", "starts", "_rooms", "_codes"):
            array = getattr(self, name)
            room = np.zeros((more, *array.shape[1:]), array.dtype)
            setattr(self, name, np.concatenate((array, room)))
        self._renew_arrays()
        self._last_report_s = np.concatenate((self._last_report_s, np.full(more, -inf)))
        self._gone_until_s = np.concatenate((self._gone_until_s, np.full(more, -inf)))
        self._willing = np.concatenate((self._willing, np.zeros(more, bool)))
        self._sound = np.concatenate((self._sound, np.zeros(more, bool)))

    def _entries(self, row: int) -> tuple[Floats, Floats, Floats]:
        """The prefills, the loads and the best-effort prefills of a row, to their full capacity."""
        own = slice(self.starts[row], self.starts[row] + self._rooms[row])
        return self.prefills[own], self.loads[own], self.lent[own]

    def _make_room(self, row: int, entries: int) -> None:
        """Have room for ``entries`` of each kind in a row; what it has is kept. ``O(1)``
        copies of an entry, amortised."""
        if entries <= self._rooms[row]:
            return
        room = max(_FIRST_ENTRIES, 2 * entries)
        if self._used + room > len(self.prefills):
            self._compact(room)
        kept = self._entries(row)
        self.starts[row], self._rooms[row] = self._used, room
        self._used += room
        for new, old in zip(self._entries(row), kept, strict=True):
            new[: len(old)] = old

    def _compact(self, more: int) -> None:
        """Move all entries together, into twice the space that they need with ``more`` of them."""
        rows = np.flatnonzero(self._rooms)
        space = 2 * (int(self._rooms.sum()) + more)
        fields = (PREFILL_FIELDS, LOAD_FIELDS, LENT_FIELDS)
        moved = tuple(np.zeros((space, each)) for each in fields)
        used = 0
        for row in rows.tolist():
            end = used + int(self._rooms[row])
            for new, old in zip(moved, self._entries(row), strict=True):
                new[used:end] = old
            self.starts[row] = used
            used = end
        self.prefills, self.loads, self.lent = moved
        self._renew_arrays()
        self._used = used

    def _again(self, replica_id: str) -> None:
        """Count a replica again from its last report."""
        row = self.row_of.get(replica_id)
        if row is None:
            return
        report = self._reports[row]
        assert report is not None
        self._fold(row, report)

    def _fold(self, row: int, report: Report) -> None:
        made = list(self.ledger.at(self.ids[row]))
        self._make_room(row, len(report.rows) + len(made))
        stated = (
            float(report.free_blocks), float(report.total_blocks), float(report.block_tokens),
            float(report.places), float(report.local_order), report.planned_stop_s,
            report.kv_answer_s,
        )  # fmt: skip
        times = report.made_s, report.stepped_s, report.next_begins_s, report.offset_s
        fold(self.arrays, row, report.rows, stated, (*times, report.preempts))
        for reservation in made:
            add_reservation(self.arrays, row, self._rooms[row], reservation[1:])
