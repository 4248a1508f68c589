"""Which replicas get no requests for a while because they fail or hang, and why.

Each replica with recent faults has a circuit breaker (``scheduling.fleet.breaker``), fed by
routers' notices and by the replica's reports of hangs and probes. After a restart of the
controller the breakers are closed, and the hellos state which replicas hang."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from sluice.controller.state.mirror import Mirror, MirroredReplica
from sluice.protocol.messages import FaultNotice, ReplicaDelta, ReplicaHello
from sluice.scheduling.fleet.breaker import Breaker, BreakerState, ReplicaFault
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.state import WAITING
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.roles import ROLES, Role

STEPPING_S = 1.0
"""An engine counts as making steps if its last step ended at most this long ago, seconds."""

ACCUSED_S = 10.0
"""How long a router's accusation of a replica counts, seconds."""

LOOK_S = 1.0
"""Interval at which breakers that can be forgotten are searched for, seconds."""

MAX_ROUTERS = 1024
"""Most routers whose accusations are kept; of more, the one silent for longest is forgotten."""

_log = logging.getLogger(__name__)


class Quarantined(NamedTuple):
    """Why a replica is in quarantine. ``state``: ``open`` or, while it is tried, ``half-open``;
    ``since_s``: on the controller's clock; ``retry_in_s``: 0 while it is tried, ``None`` if it
    must first report that it works again."""

    cause: ReplicaFault
    state: BreakerState
    since_s: float
    retry_in_s: float | None


class Quarantine:
    """The breakers of a fleet's replicas; ``fleet`` excludes those in quarantine.

    A router that has accused more than half of a role's replicas within ``ACCUSED_S`` is
    probably cut off from them, so its notices open no more breakers there: one router alone
    cannot quarantine a role. A decision costs ``O(breakers)`` if a breaker has changed or
    ``LOOK_S`` have passed, else nothing."""

    def __init__(self, mirror: Mirror, fleet: Fleet) -> None:
        self._mirror = mirror
        self._fleet = fleet
        self._breakers: dict[str, Breaker] = {}
        self._probes: dict[str, _Probe] = {}
        self.look_s = inf
        """When :meth:`advance` has something to do."""
        self._accused: dict[int, dict[str, float]] = {}
        self.names: tuple[str, ...] = ()
        """The replicas in quarantine."""
        self.opened: Counter[ReplicaFault] = Counter()
        """Times that a breaker opened, since the start."""
        self.believed: Counter[ReplicaFault] = Counter()
        """Notices of routers that counted, since the start."""
        self.disbelieved: Counter[ReplicaFault] = Counter()
        """Notices that did not count, because their router had accused too many."""

    def of(self, replica_id: str, now_s: float) -> Quarantined | None:
        """Why a replica is in quarantine, if it is."""
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.state is BreakerState.CLOSED:
            return None
        left_s: float | None = 0.0
        if breaker.state is BreakerState.OPEN:
            left_s = max(0.0, breaker.due_s - now_s) if breaker.due_s < inf else None
        return Quarantined(breaker.cause, breaker.state, breaker.since_s, left_s)

    def advance(self, now_s: float) -> None:
        """Apply the state changes that are due. To be called before each decision."""
        if now_s < self.look_s:
            return
        for replica_id, breaker in list(self._breakers.items()):
            if now_s >= breaker.due_s:
                breaker.advance(now_s)
                self._show(replica_id, breaker)
            elif breaker.forgettable(now_s):
                del self._breakers[replica_id]
        due_s = min((each.due_s for each in self._breakers.values()), default=inf)
        self.look_s = min(due_s, now_s + LOOK_S) if self._breakers else inf

    def faulted(self, source: int, notices: Sequence[FaultNotice], now_s: float) -> None:
        """The router ``source`` saw faults. Notices about unknown replicas are ignored."""
        known = [notice for notice in notices if notice.replica_id in self._mirror.replicas]
        accused = self._accused_by(source, known, now_s)
        doubtful = self._doubtful(accused, now_s)
        for replica_id, fault in known:
            breaker = self._breakers.get(replica_id)
            role = self._mirror.replicas[replica_id].hello.role
            closed = breaker is None or breaker.state is BreakerState.CLOSED
            if closed and role in doubtful:
                self.disbelieved[fault] += 1
                continue
            self.believed[fault] += 1
            if breaker is None:
                breaker = self._breakers[replica_id] = Breaker()
            stepping = _is_stepping(self._mirror.replicas[replica_id], now_s)
            self._note(replica_id, breaker, breaker.fault(fault, now_s, stepping))

    def reported(
        self, message: ReplicaHello | ReplicaDelta, finished: Sequence[int], now_s: float
    ) -> None:
        """A report was applied; ``finished``: the requests that ended with it."""
        replica_id = message.replica_id
        breaker = self._breakers.get(replica_id)
        if breaker is None:
            if not message.hung:
                return
            breaker = self._breakers[replica_id] = Breaker()
        opened = breaker.report(message.hung, len(finished), now_s)
        if breaker.probe is not None:
            self._look_at_probe(breaker, message, finished, now_s)
        self._note(replica_id, breaker, opened)

    def placed(self, query: RouteQuery, decision: RouteDecision, now_s: float) -> None:
        """A decision was made: if its replica is due for a trial, the request is the probe."""
        if not self.names:
            return
        for replica_id, key in (
            (decision.replica_id, query.key),
            (decision.prefill_id, query.prefill_key),
        ):
            breaker = self._breakers.get(replica_id) if replica_id is not None else None
            if (
                replica_id is not None
                and breaker is not None
                and breaker.state is BreakerState.HALF_OPEN
                and breaker.probe is None
            ):
                breaker.send(key, now_s)
                steps = int(self._mirror.replicas[replica_id].summary["steps"])
                self._probes[replica_id] = _Probe(steps)
                self._show(replica_id, breaker)

    def released(self, keys: Iterable[int], now_s: float) -> None:
        """These requests have ended, or routers abandoned them."""
        if not self._probes:
            return
        ended = set(keys)
        for replica_id in self._probes:
            breaker = self._breakers[replica_id]
            if breaker.probe in ended:
                breaker.ended(now_s)
                self.look_s = -inf

    def forget(self, replica_id: str) -> None:
        """The mirror has dropped a replica."""
        breaker = self._breakers.pop(replica_id, None)
        if breaker is not None:
            self._fleet.readmit(replica_id)
            self._count_up()

    def _accused_by(
        self, source: int, notices: Iterable[FaultNotice], now_s: float
    ) -> dict[str, float]:
        """A router's recently accused replicas, these notices included, the latest last."""
        accused = self._accused.pop(source, {})
        for replica_id, _ in notices:
            accused.pop(replica_id, None)
            accused[replica_id] = now_s
        while accused and now_s - accused[oldest := next(iter(accused))] > ACCUSED_S:
            del accused[oldest]
        if accused:
            self._accused[source] = accused
        if len(self._accused) > MAX_ROUTERS:
            del self._accused[next(iter(self._accused))]
        return accused

    def _doubtful(self, accused: Iterable[str], now_s: float) -> set[Role]:
        """The roles of which too many replicas are accused. ``O(replicas)``."""
        fleet = self._fleet
        present = fleet.present(now_s)
        found: set[Role] = set()
        for role in ROLES:
            names = {fleet.ids[row] for row in fleet.of_role(present, role).tolist()}
            if 2 * sum(each in names for each in accused) > len(names):
                found.add(role)
        return found

    def _look_at_probe(
        self,
        breaker: Breaker,
        message: ReplicaHello | ReplicaDelta,
        finished: Sequence[int],
        now_s: float,
    ) -> None:
        """Close the breaker where the probe has arrived and the engine has made steps since."""
        key, replica_id = breaker.probe, message.replica_id
        probe = self._probes[replica_id]
        rows = message.rows
        if not probe.arrived:
            live = rows["key"][rows["phase"] >= WAITING]
            if key not in finished and key not in live.tolist():
                return
            probe = self._probes[replica_id] = probe._replace(arrived=True)
        if int(message.summary["steps"]) > probe.steps:
            breaker.close(now_s)
            _log.warning("replica %s works again and is out of quarantine", replica_id)
        elif key in finished:
            breaker.ended(now_s)

    def _note(self, replica_id: str, breaker: Breaker, opened: bool) -> None:
        """Log, count and show the outcome of a breaker's input."""
        if opened:
            self.opened[breaker.cause] += 1
            _log.warning("replica %s is in quarantine: %s", replica_id, breaker.cause)
        self._show(replica_id, breaker)

    def _show(self, replica_id: str, breaker: Breaker) -> None:
        """Apply the state of a breaker to the fleet."""
        if breaker.state is BreakerState.CLOSED:
            self._fleet.readmit(replica_id)
        else:
            untried = breaker.state is BreakerState.HALF_OPEN and breaker.probe is None
            self._fleet.quarantine(replica_id, untried)
        self._count_up()

    def _count_up(self) -> None:
        """Update the names of replicas in quarantine, and the pending probes."""
        breakers = self._breakers
        self.look_s = -inf
        self.names = tuple(
            [name for name, each in breakers.items() if each.state is not BreakerState.CLOSED]
        )
        for name in list(self._probes):
            if name not in breakers or breakers[name].probe is None:
                del self._probes[name]


class _Probe(NamedTuple):
    """The replica's step count when its probe request was sent, and whether the probe arrived."""

    steps: int
    arrived: bool = False


def _is_stepping(replica: MirroredReplica, now_s: float) -> bool:
    """Whether its last report shows a step that ended less than ``STEPPING_S`` ago."""
    stepped_s = float(replica.summary["updated_s"]) + replica.offset_s
    return bool(replica.summary["steps"] > 0 and now_s - stepped_s < STEPPING_S)
