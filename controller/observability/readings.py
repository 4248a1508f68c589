"""Reads the deciding actor's state for the observer. Decisions wait for this, so nothing is
formatted here, and what takes longer than a decision is read in parts."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from sluice.controller.observability.recent_decisions import Counters, Counts, RequestClasses
from sluice.controller.state.drains import drain_of
from sluice.controller.state.mirror import Mirror, MirroredReplica
from sluice.controller.state.promises import (
    PERIOD_S,
    PERIODS,
    Curve,
    EndedPromise,
    PromiseLog,
)
from sluice.controller.state.quarantine import Quarantine, Quarantined
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.autoscaling.load import Pressure
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.fleet.fleet import Condition, Fleet
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.loops import LoopEnding, LoopPromises
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.kernels import PREFILL_TOKENS, Floats
from sluice.scheduling.request.objective import Objective
from sluice.scheduling.roles import ROLES, Role

# What the deciding actor hands over to the observer: numbers and records, no text.
#
# Times are seconds on the deciding actor's clock; ages are relative to :attr:`Figures.now_s`.


class Figures(NamedTuple):
    """The numbers of the deciding actor's metrics; lists by replica are in the order of
    ``replicas``.

    ``reservations`` are decisions that no replica has confirmed yet; ``margins`` the largest
    safety margin by objective, as a share of it; ``retried`` the refused requests that retried
    when advised to: promised then, and refused again. ``opened``, ``believed`` and
    ``disbelieved`` are breakers opened, and router notices counted and ignored, by reason.
    ``pab_tokens`` (prefill admission budget, prompt tokens) is negative in overload and not
    finite where tokens cost nothing. ``figures`` is ``float64[replicas, FIGURES]``.
    ``startup_s`` is the predicted time of a first replica's start; ``None`` for a model that
    always has replicas. ``loops`` are the tool loops that ended."""

    now_s: float
    counts: Counts
    reservations: int
    margins: Mapping[Objective, float]
    retried: tuple[int, int]
    loads: Mapping[Role, Load]
    opened: Mapping[ReplicaFault, int]
    believed: Mapping[ReplicaFault, int]
    disbelieved: Mapping[ReplicaFault, int]
    quarantined: Mapping[str, Quarantined]
    replicas: tuple[str, ...]
    roles: tuple[Role, ...]
    conditions: tuple[Condition, ...]
    ages_s: Sequence[float]
    pab_tokens: Floats
    figures: Floats
    epoch: int = 0
    cold_starts: int = 0
    startup_s: float | None = None
    loops: Mapping[LoopEnding, int] = MappingProxyType({})


class Reliable(NamedTuple):
    """How many TTFT forecasts were evaluated, and the share of the observations at or below each of
    :data:`sluice.controller.state.promises.QUANTILES`; empty for none."""

    forecasts: int
    shares: tuple[float, ...]


class ReplicaDetail(NamedTuple):
    """A replica beyond its ``Figures``. ``summary``: bytes of one ``SUMMARY``; ``queue``: live
    requests by class, whether best effort, and phase; ``reliability``: of its TTFT forecasts."""

    node_id: str
    model: str
    policy: str
    reports: int
    drain: str | None
    summary: bytes
    queue: Mapping[tuple[str, int, int], int]
    reliability: Reliable


class Detail(NamedTuple):
    """The deciding actor's state for an operator. ``expired``: reservations not confirmed in
    time, since the start; ``promises``: those that ended in the last minutes. A replica that came
    or left while ``replicas`` was read may be missing."""

    figures: Figures
    epoch: int
    up_s: float
    expired: int
    took_s: Sequence[float]
    promises: Counter[EndedPromise]
    pressure: Mapping[Role, Pressure]
    reliability: Reliable
    replicas: Mapping[str, ReplicaDetail]


AT_ONCE: Final = 8
"""Replicas of which details are read before the next decision may be made."""


class Readings:
    """Reads numbers and records; changes nothing."""

    def __init__(
        self,
        counters: Counters,
        mirror: Mirror,
        fleet: Fleet,
        placer: Placer,
        quarantine: Quarantine,
        calibration: Calibration,
        promises: PromiseLog,
        classes: RequestClasses,
        loops: LoopPromises,
    ) -> None:
        self._counters = counters
        self._mirror = mirror
        self._fleet = fleet
        self._placer = placer
        self._quarantine = quarantine
        self._calibration = calibration
        self._promises = promises
        self._classes = classes
        self._loops = loops
        # The loads of each role at the start of each of the last periods.
        self._loads: deque[dict[Role, Load]] = deque(maxlen=PERIODS)

    def note_load(self, now_s: float) -> None:
        """Keep the load if that of the last period is due: then ``O(replicas)``."""
        if not self._loads or now_s - self._loads[-1]["mixed"].now_s >= PERIOD_S:
            self._loads.append(self._load(now_s))

    def _load(self, now_s: float) -> dict[Role, Load]:
        return {role: self._placer.demand.load(self._fleet, now_s, role=role) for role in ROLES}

    def _pressure(self, now: Mapping[Role, Load]) -> dict[Role, Pressure]:
        """The demand on each role that has replicas or had requests."""
        oldest_s = now["mixed"].now_s - PERIODS * PERIOD_S
        loads = [*(each for each in self._loads if each["mixed"].now_s >= oldest_s), now]
        return {
            role: Pressure.of([each[role] for each in loads])
            for role, load in now.items()
            if load.ready or load.asked
        }

    def figures(self, now_s: float) -> Figures:
        """The numbers of the metrics. ``O(replicas)``."""
        fleet, quarantine, returns = self._fleet, self._quarantine, self._placer.returns
        rows = list(fleet.row_of.values())
        replicas = self._mirror.replicas
        cold = self._placer.cold_start
        names = ((name, quarantine.of(name, now_s)) for name in quarantine.names)
        return Figures(
            now_s,
            self._counters.read(),
            len(fleet.ledger),
            self._calibration.largest(now_s),
            (returns.held, returns.missed),
            self._load(now_s),
            dict(quarantine.opened),
            dict(quarantine.believed),
            dict(quarantine.disbelieved),
            {name: found for name, found in names if found is not None},
            tuple(fleet.row_of),
            tuple([fleet.roles[row] for row in rows]),
            tuple([fleet.condition(row, now_s) for row in rows]),
            [now_s - replicas[name].received_s for name in fleet.row_of],
            self._pab_tokens(rows, now_s),
            fleet.figures[rows],
            self._mirror.epoch,
            0 if cold is None else cold.done,
            None if cold is None else cold.startup_s,
            dict(self._loops.ended),
        )

    def _pab_tokens(self, rows: list[int], now_s: float) -> Floats:
        token_s = self._fleet.pieces[rows, :, PREFILL_TOKENS].max(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = self._fleet.budgets_s(np.array(rows, np.int64), now_s) / token_s
        return found

    async def detail(self, now_s: float, up_s: float, took_s: list[float]) -> Detail:
        """The state for an operator, without the actor's own ``up_s`` and ``took_s``, which are
        passed on. ``O(live requests)``; decisions may be made meanwhile."""
        figures = self.figures(now_s)
        expired, promises = self._fleet.ledger.expired, self._promises.ended_lately(now_s)
        found: dict[str, ReplicaDetail] = {}
        for place, name in enumerate(figures.replicas):
            if place % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            replica = self._mirror.replicas.get(name)
            if replica is not None:
                found[name] = self._of_replica(name, replica)
        overall = reliable(self._promises.curve())
        return Detail(
            figures,
            self._mirror.epoch,
            up_s,
            expired,
            took_s,
            promises,
            self._pressure(figures.loads),
            overall,
            found,
        )

    def _of_replica(self, name: str, replica: MirroredReplica) -> ReplicaDetail:
        hello = replica.hello
        return ReplicaDetail(
            hello.node_id,
            hello.model,
            hello.policy,
            replica.seq,
            drain_of(self._mirror, self._fleet, name),
            replica.summary.tobytes(),
            self._queue(replica),
            reliable(self._promises.curve(name)),
        )

    def _queue(self, replica: MirroredReplica) -> dict[tuple[str, int, int], int]:
        rows = replica.table[: replica.used_slots]
        rows = rows[rows["phase"] > 0]
        names = self._classes.of(rows["key"].tolist())
        tiers, phases = rows["best_effort"].tolist(), rows["phase"].tolist()
        return dict(Counter(zip(names, tiers, phases, strict=True)))


def reliable(curve: Curve) -> Reliable:
    """The numbers of a reliability curve."""
    return Reliable(len(curve), curve.shares)
