"""The second actor: it merges the processes' metrics and explains the deciding actor's state.

The deciding actor never calls it, so requests are placed in the same way without it. About a
second after a restart it has all pushed state again."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from math import inf
from typing import Any

from prometheus_client import Metric

from sluice.controller.config import ControllerConfig, fingerprint_of
from sluice.controller.observability.cells import DecidingActor
from sluice.controller.observability.decision_log import DecisionLog
from sluice.controller.observability.history import History
from sluice.controller.observability.instruments import NAMES, families, refused_metrics
from sluice.controller.observability.metrics import (
    KEPT_S,
    controller_age,
    controller_up,
    text_of,
)
from sluice.controller.observability.metrics_hub import MetricsHub
from sluice.controller.observability.recent_decisions import DECISIONS
from sluice.controller.observability.snapshot import overview
from sluice.controller.transport.channel import NoAnswerError
from sluice.controller.transport.checks import checked, short
from sluice.protocol.messages import MetricsPush
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.roles import Role

SETTLING_S = 5.0
"""Time after a start in which all processes push their metrics, seconds."""


class Observer:
    """Metrics, history, decision log and the operator's view of one application."""

    def __init__(
        self,
        deciding: DecidingActor,
        config: ControllerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deciding = deciding
        self._config = config
        self._clock = clock
        self._hub = MetricsHub(reserved=NAMES)
        self._history = History()
        self._log = DecisionLog(config.make_routing())
        self._refused = 0
        # The controller's last own metrics, and when it gave them.
        self._own: list[Metric] = []
        self._own_s = -inf
        self._started_s = self._heard_s = clock()

    @property
    def silent_s(self) -> float:
        """Seconds since any process last called it."""
        return self._clock() - self._heard_s

    async def fingerprint(self) -> str:
        """See :func:`sluice.controller.config.fingerprint_of`."""
        self._hear()
        return fingerprint_of(self._config)

    async def push_metrics(self, push: MetricsPush) -> None:
        """Take a process's metrics. Raises ValueError: refused whole, as ``MetricsHub.push``."""
        now_s = self._hear()
        try:
            added = self._hub.push(push, now_s)
        except ValueError:
            self._refused += 1
            raise
        self._history.joined(added)
        self._history.note(self._hub, now_s)

    async def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format, ``O(series)``. If the controller does not
        answer, its own are the last ones, for at most ``KEPT_S``."""
        now_s = self._hear()
        try:
            self._own = list(families(await self._deciding.figures(), self._config.policy))
            self._own_s, up = self._clock(), True
        except NoAnswerError:
            up = False
        age_s = 0.0 if up else self._clock() - self._own_s
        own = [*self._own, controller_age(age_s)] if age_s <= KEPT_S else []
        # The controller's own metrics bypass the hub, whose limits are for pushed metrics.
        pushed = self._hub.families(self._clock())
        if now_s - self._started_s < SETTLING_S:
            # Only some processes have pushed: a scraper would count the others' totals as new.
            pushed = [family for family in pushed if family.type == "gauge"]
        # In a thread, so that pushes are not late meanwhile.
        status = refused_metrics(self._refused, self._hub.skipped), controller_up(up)
        return await asyncio.to_thread(text_of, [*own, *pushed, *status])

    async def load(self, role: Role | None = None) -> Load | None:
        """The load on all replicas, or those of ``role``; ``None`` if the controller does not
        answer. ``O(series of metrics by class)``. Raises ValueError: no such role."""
        if role is not None:
            checked("role", role, Role)
        self._hear()
        try:
            load = await self._deciding.demand(role)
        except NoAnswerError:
            return None
        judged, attained = self._history.objectives(self._hub)
        return load._replace(judged=judged, attained=attained)

    async def snapshot(self) -> dict[str, Any] | None:
        """The controller's state for an operator, as plain JSON data; ``None`` if the controller
        does not answer. ``O(replicas + series)``."""
        self._hear()
        try:
            detail = await self._deciding.detail()
        except NoAnswerError:
            return None
        return {
            **overview(self._config, detail),
            "metric_sources": self._hub.sources,
            "recent": self._history.recent(self._hub, self._clock()),
        }

    async def decisions(self, limit: int) -> list[dict[str, Any]] | None:
        """The last decisions, the latest first; ``None`` if the controller does not answer.
        Raises ValueError: ``limit`` is no number from 1 to ``DECISIONS``."""
        if not isinstance(limit, int) or not 1 <= limit <= DECISIONS:
            raise ValueError(f"limit must be an integer from 1 to {DECISIONS}, got {short(limit)}")
        self._hear()
        try:
            latest = await self._deciding.latest_decisions(limit)
        except NoAnswerError:
            return None
        records = [pickle.loads(each) for each in latest.pickled]
        return list(self._log.explained(records, latest.now_s))

    def _hear(self) -> float:
        """Note that a process called. Returns the time, monotonic seconds."""
        self._heard_s = self._clock()
        return self._heard_s
