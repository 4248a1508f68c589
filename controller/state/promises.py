"""The promises in progress, and how the latest ones ended. Routers judge them
(``sluice.router.metrics.instruments``), so what is counted here agrees with the metrics."""

from __future__ import annotations

from collections import OrderedDict, deque
from math import inf
from typing import Final, NamedTuple

from sluice.protocol.messages import RequestEnding
from sluice.scheduling.placement.reliability import Curve, Forecast, Reliability
from sluice.scheduling.request.job import RouteDecision, RouteQuery, Tier

MOST_OPEN: Final = 65_536
"""Most promises in progress that are remembered; of more, the oldest are forgotten."""

RECENT: Final = 2_000
RECENT_S: Final = 3_600.0
"""The latest ``RECENT`` ended promises are remembered, and none that ended more than ``RECENT_S``
seconds ago. At a level of 0.99 the standard error of the share kept is 0.2 points."""


class _Promise(NamedTuple):
    """``replica_id`` answers, ``begins_at`` computes the prompt; ``waited_s``: age at the
    decision; ``moved``: it left a replica where it was predicted to be late."""

    service_class: str
    replica_id: str
    begins_at: str
    forecast: Forecast
    waited_s: float
    moved: bool


class EndedPromise(NamedTuple):
    """A promise whose request has ended, at ``at_s`` on the controller's clock. ``moved``: the
    request had left a replica where it was predicted to be late."""

    at_s: float
    service_class: str
    replica_id: str
    kept: bool
    moved: bool


class PromiseLog:
    """The promises of a fleet, of which the share ``level`` is to be kept. A decision costs
    ``O(1)``, an ending as much as ``Reliability.observe``."""

    def __init__(self, level: float = 0.99) -> None:
        self._level = level
        self._reliability = Reliability(level)
        self._open: OrderedDict[str, _Promise] = OrderedDict()
        self._ended: deque[EndedPromise] = deque(maxlen=RECENT)

    def made(self, query: RouteQuery, decision: RouteDecision) -> RouteDecision:
        """Note a decision. Returns it, if it is promised, with the forecast's median as predicted
        TTFT and the level. A later promise of the same request replaces the first."""
        predicted_s, replica_id = decision.predicted_ttft_s, decision.replica_id
        if decision.tier is not Tier.GUARANTEED or predicted_s is None or replica_id is None:
            return decision
        begins_at = decision.prefill_id or replica_id
        ttft_s, _, e2e_s, _ = query.slo.columns
        left_s = min(ttft_s, e2e_s) - query.waited_s
        forecast = self._reliability.forecast(
            begins_at, predicted_s, left_s if left_s > 0.0 else inf
        )
        if query.request_id:
            name = query.slo.service_class
            self._open[query.request_id] = _Promise(
                name, replica_id, begins_at, forecast, query.waited_s, query.moves_from != ""
            )
            self._open.move_to_end(query.request_id)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return decision._replace(predicted_ttft_s=forecast.median_s, level=self._level)

    def ended(self, ending: RequestEnding, now_s: float) -> None:
        """A request ended. If another replica answered it, the forecast is not evaluated."""
        promise = self._open.pop(ending.request_id, None)
        if promise is None:
            return
        kept = ending.kept
        if kept is None and ending.outcome == "failed":
            kept = False  # it failed before an answer began; the router reports no more
        if kept is not None:
            # Its first token may have come just before the move.
            moved = promise.moved and ending.replica_id in ("", promise.replica_id)
            self._ended.append(
                EndedPromise(now_s, promise.service_class, promise.replica_id, kept, moved)
            )
        if ending.ttft_s is not None and ending.replica_id == promise.replica_id:
            observed_s = ending.ttft_s - promise.waited_s
            self._reliability.observe(promise.begins_at, promise.forecast, observed_s)

    def ended_lately(self, now_s: float) -> tuple[EndedPromise, ...]:
        """The latest promises that ended, the oldest first."""
        ended = self._ended
        while ended and ended[0].at_s < now_s - RECENT_S:
            ended.popleft()
        return tuple(ended)

    def curve(self, replica_id: str | None = None) -> Curve:
        """The reliability curve of a replica's TTFT forecasts, or of all."""
        return self._reliability.curve(replica_id)
