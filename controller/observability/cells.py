"""The cells of a fleet as one deciding actor, for the observer."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorDiedError, RayError

from sluice.controller.observability.readings import Detail, Figures, Reliable
from sluice.controller.observability.recent_decisions import Counts, DecisionRecord, LatestDecisions
from sluice.controller.transport.channel import NoAnswerError
from sluice.scheduling.autoscaling.load import Load, Pressure, sum_of
from sluice.scheduling.fleet.rows import FIGURES
from sluice.scheduling.request.objective import Objective
from sluice.scheduling.roles import Role

Found = TypeVar("Found", Figures, Detail, LatestDecisions, Load)


class Cells:
    """Asks all cells at once, and adds up what they answer. Each method raises NoAnswerError if
    one does not answer: the sum would be wrong.

    The counts of a cell before its restart stay in the sums: Prometheus would count all of the
    other cells' totals again if these fell. Times of a cell are converted to the first one's
    clock."""

    def __init__(self, cells: Sequence[DecidingActor]) -> None:
        self._cells = cells
        # Of each cell: the counts of its earlier starts, and its last figures.
        self._earlier: list[list[Figures]] = [[] for _ in cells]
        self._last: list[Figures | None] = [None] * len(cells)

    async def figures(self) -> Figures:
        """See :meth:`sluice.controller.actor.Controller.figures`."""
        found = await _all(cell.figures() for cell in self._cells)
        for place, each in enumerate(found):
            last = self._last[place]
            if last is not None and each.epoch != last.epoch:
                earlier = self._earlier[place]
                self._earlier[place] = [_added([*earlier, _counted(last)])]
            self._last[place] = each
        return _added([*found, *(each for earlier in self._earlier for each in earlier)])

    async def detail(self) -> Detail:
        """See :meth:`sluice.controller.actor.Controller.detail`. ``epoch`` and ``up_s`` are of the
        cell that started last."""
        found = await _all(cell.detail() for cell in self._cells)
        youngest = min(found, key=lambda each: each.up_s)
        pressures = [each.pressure for each in found]
        roles = sorted({role for each in pressures for role in each})
        return Detail(
            _added([each.figures for each in found]),
            youngest.epoch,
            youngest.up_s,
            sum(each.expired for each in found),
            [took_s for each in found for took_s in each.took_s],
            Counter(_sum(each.promises for each in found)),
            {role: _pressed([each[role] for each in pressures if role in each]) for role in roles},
            _reliable([each.reliability for each in found]),
            {name: replica for each in found for name, replica in each.replicas.items()},
        )

    async def latest_decisions(self, limit: int) -> LatestDecisions:
        """The last decisions of all cells together, at most ``limit``."""
        found = await _all(cell.latest_decisions(limit) for cell in self._cells)
        now_s = found[0].now_s
        records: list[DecisionRecord] = []
        for each in found:
            for record in map(pickle.loads, each.pickled):
                at_s = record.decided_s + now_s - each.now_s
                records.append(record._replace(decided_s=at_s))
        records.sort(key=lambda record: record.decided_s, reverse=True)
        return LatestDecisions(now_s, [pickle.dumps(record) for record in records[:limit]])

    async def demand(self, role: Role | None) -> Load:
        """The load on the replicas of all cells."""
        return sum_of(await _all(cell.demand(role) for cell in self._cells))


async def _all(asked: Iterable[Awaitable[Found]]) -> list[Found]:
    return await asyncio.gather(*asked)


def _counted(figures: Figures) -> Figures:
    """The counts alone, as of a cell without replicas."""
    loads = {
        role: Load(load.now_s, 0.0, load.asked, load.asked_s, load.unpromised, load.unpromised_s)
        for role, load in figures.loads.items()
    }
    return figures._replace(
        reservations=0,
        margins={},
        loads=loads,
        quarantined={},
        replicas=(),
        roles=(),
        conditions=(),
        ages_s=(),
        pab_tokens=np.zeros(0),
        figures=np.zeros((0, FIGURES)),
    )


def _added(found: Sequence[Figures]) -> Figures:
    """The sum of figures, on the clock of the first ones."""
    first = found[0]
    margins: dict[Objective, float] = {}
    for each in found:
        for objective, margin in each.margins.items():
            margins[objective] = max(margin, margins.get(objective, margin))
    quarantined = {
        name: why._replace(since_s=why.since_s + first.now_s - each.now_s)
        for each in found
        for name, why in each.quarantined.items()
    }
    return Figures(
        first.now_s,
        Counts(
            _sum(each.counts.decisions for each in found),
            _sum(each.counts.reports for each in found),
            tuple(map(sum, zip(*(each.counts.buckets for each in found), strict=True))),
            sum(each.counts.seconds for each in found),
            sum(each.counts.pairs for each in found),
            _sum(each.counts.role_changes for each in found),
        ),
        sum(each.reservations for each in found),
        margins,
        (sum(each.retried[0] for each in found), sum(each.retried[1] for each in found)),
        {role: sum_of([each.loads[role] for each in found]) for role in first.loads},
        _sum(each.opened for each in found),
        _sum(each.believed for each in found),
        _sum(each.disbelieved for each in found),
        quarantined,
        tuple(name for each in found for name in each.replicas),
        tuple(role for each in found for role in each.roles),
        tuple(condition for each in found for condition in each.conditions),
        [age_s for each in found for age_s in each.ages_s],
        np.concatenate([each.pab_tokens for each in found]),
        np.concatenate([each.figures for each in found]),
        loops=_sum(each.loops for each in found),
    )


def _sum(counts: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _pressed(found: Sequence[Pressure]) -> Pressure:
    return Pressure(
        max(each.span_s for each in found),
        sum(each.ready for each in found),
        sum(each.demand for each in found),
    )


def _reliable(found: Sequence[Reliable]) -> Reliable:
    """Forecasts of all cells: the mean of the shares, weighted by their numbers."""
    with_any = [each for each in found if each.forecasts]
    total = sum(each.forecasts for each in with_any)
    shares = zip(*(each.shares for each in with_any), strict=True)
    weights = [each.forecasts / total for each in with_any]
    return Reliable(total, tuple(float(np.dot(weights, each)) for each in shares))


_TIMEOUT_S = 1.0
"""Longest wait for an answer, seconds: less than routers wait for the observer's."""


class DecidingActor(Protocol):
    """The part of the deciding actor that the observer uses. Each method may raise
    :class:`NoAnswerError`."""

    async def figures(self) -> Figures:
        """The numbers of its metrics."""

    async def detail(self) -> Detail:
        """Its state for an operator."""

    async def latest_decisions(self, limit: int) -> LatestDecisions:
        """At most ``limit`` of its last decisions."""

    async def demand(self, role: Role | None) -> Load:
        """The load on the replicas of ``role``, or on all; without what routers count."""


class ControllerHandle:
    """Calls the deciding actor, which it never starts. Each method raises NoAnswerError if it
    does not answer."""

    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._namespace = namespace
        self._handle: Any = None

    async def figures(self) -> Figures:
        """See :meth:`sluice.controller.actor.Controller.figures`."""
        found: Figures = await self._ask("figures")
        return found

    async def detail(self) -> Detail:
        """See :meth:`sluice.controller.actor.Controller.detail`."""
        found: Detail = await self._ask("detail")
        return found

    async def latest_decisions(self, limit: int) -> LatestDecisions:
        """See :meth:`sluice.controller.actor.Controller.latest_decisions`."""
        found: LatestDecisions = await self._ask("latest_decisions", limit)
        return found

    async def demand(self, role: Role | None) -> Load:
        """See :meth:`sluice.controller.actor.Controller.demand`."""
        found: Load = await self._ask("demand", role)
        return found

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            if self._handle is None:
                # In a thread, because it blocks.
                self._handle = await asyncio.to_thread(
                    ray.get_actor, self._name, namespace=self._namespace
                )
            async with asyncio.timeout(_TIMEOUT_S):
                return await getattr(self._handle, method).remote(*args)
        except TimeoutError:
            raise NoAnswerError("timeout") from None
        except (RayError, ValueError) as error:  # ValueError: there is no such actor
            if isinstance(error, ActorDiedError):
                self._handle = None
            raise NoAnswerError("unavailable") from None
