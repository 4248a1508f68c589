"""What the deciding actor hands over to the observer: numbers and records, no text.

Times are seconds on the deciding actor's clock; ages are relative to :attr:`Figures.now_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluice.controller.observability.counters import Counts
from sluice.controller.state.promises import EndedPromise
from sluice.controller.state.quarantine import Quarantined
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.fleet.breaker import Trouble
from sluice.scheduling.fleet.fleet import Condition
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import Objective
from sluice.scheduling.roles import Role


class Figures(NamedTuple):
    """The numbers of the deciding actor's metrics. The replicas' ones have an item per replica, in
    the order of ``replicas``.

    Attributes:
        now_s: when they were read.
        counts: of its operations.
        reservations: decisions that no replica has confirmed yet.
        margins: largest safety margin of guarantees by objective, as a share of the objective.
        retried: refused requests that retried when advised to: guaranteed then, and refused again.
        loads: the load on each role.
        opened, believed, disbelieved: breakers opened, and notices of routers counted and ignored,
            by reason.
        quarantined: the replicas in quarantine.
        replicas, roles, conditions: id, role and condition of each replica.
        ages_s: time since the last report of each.
        pab_tokens: prefill admission budget of each, in prompt tokens; negative in overload. Not
            finite for a model in which tokens cost nothing.
        figures: ``float64[replicas, FIGURES]``, see :mod:`sluice.scheduling.fleet.rows`.
        epoch: number of this start of the actor.
        cold_starts: of a model that may have no replica: starts of its first one that have ended.
        startup_s: predicted time of such a start; ``None`` for a model that always has replicas.
    """

    now_s: float
    counts: Counts
    reservations: int
    margins: Mapping[Objective, float]
    retried: tuple[int, int]
    loads: Mapping[Role, Load]
    opened: Mapping[Trouble, int]
    believed: Mapping[Trouble, int]
    disbelieved: Mapping[Trouble, int]
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


class Reliable(NamedTuple):
    """How many TTFT forecasts were evaluated, and the share of the observations at or below each of
    :data:`sluice.scheduling.placement.reliability.QUANTILES`; empty for none."""

    forecasts: int
    shares: tuple[float, ...]


class ReplicaDetail(NamedTuple):
    """A replica beyond its :class:`Figures`.

    Attributes:
        node_id, model, policy: as it registered.
        reports: number of its last report.
        drain: what drains it, see :func:`sluice.controller.state.drains.drain_of`.
        summary: its engine's, the bytes of one :data:`sluice.scheduling.fleet.state.SUMMARY`.
        queue: live requests by class, whether they are best effort, and phase.
        reliability: of its TTFT forecasts.
    """

    node_id: str
    model: str
    policy: str
    reports: int
    drain: str | None
    summary: bytes
    queue: Mapping[tuple[str, int, int], int]
    reliability: Reliable


class Detail(NamedTuple):
    """The deciding actor's state for an operator.

    Attributes:
        figures: see :class:`Figures`.
        epoch: number of this start of the actor. up_s: time since its start.
        expired: reservations that no replica has confirmed in time, since the start.
        took_s: duration of the latest decisions.
        promises: the latest guarantees that ended, the oldest first.
        reliability: of all TTFT forecasts.
        replicas: by id. A replica that registered or left while they were read may be missing.
    """

    figures: Figures
    epoch: int
    up_s: float
    expired: int
    took_s: Sequence[float]
    promises: Sequence[EndedPromise]
    reliability: Reliable
    replicas: Mapping[str, ReplicaDetail]
