"""What was promised to whom, how it turned out, and what is told of that.

Between a decision and its request's end this remembers where a promise was made and what was
forecast with it. Routers judge the promises (:mod:`router.metrics.admission`), so what is told here
and what the metrics count agree.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from controller.messages import RequestEnding, RouteDecision, RouteQuery, Tier
from scheduling.objective import Objective
from scheduling.reliability import QUANTILES, Curve, Forecast, Reliability

MOST_OPEN: Final = 65_536
"""Promises under way that are known at a time; of more, the oldest are forgotten."""

RECENT: Final = 2_000
RECENT_S: Final = 3_600.0
"""Promises that are told of: the latest, and none that ended longer ago, seconds. At a level of
0.99 the standard error of the share kept is 0.2 points."""


class _Promise(NamedTuple):
    """Attributes: ``replica_id`` answers, ``begins_at`` computes the prompt; ``waited_s``: the
    request's age at the decision; ``moved``: another replica had it, and was going to miss it."""

    service_class: str
    replica_id: str
    begins_at: str
    forecast: Forecast
    waited_s: float
    moved: bool


class _Ended(NamedTuple):
    at_s: float
    service_class: str
    replica_id: str
    kept: bool
    moved: bool


class PromiseLog:
    """The promises of a fleet. A decision costs ``O(1)``, an ending what
    :meth:`Reliability.observe` does."""

    def __init__(self) -> None:
        self._reliability = Reliability()
        self._open: OrderedDict[str, _Promise] = OrderedDict()
        self._ended: deque[_Ended] = deque(maxlen=RECENT)

    def made(self, query: RouteQuery, decision: RouteDecision) -> RouteDecision:
        """The decision with the median of what its predicted TTFT means, where it promises. A
        later promise to a request takes the place of the first."""
        predicted_s, replica_id = decision.predicted_ttft_s, decision.replica_id
        if decision.tier is not Tier.GUARANTEED or predicted_s is None or replica_id is None:
            return decision
        begins_at = decision.prefill_id or replica_id
        forecast = self._reliability.forecast(begins_at, predicted_s)
        if query.request_id:
            name = query.slo.service_class
            self._open[query.request_id] = _Promise(
                name, replica_id, begins_at, forecast, query.waited_s, query.moves_from != ""
            )
            self._open.move_to_end(query.request_id)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return decision._replace(predicted_ttft_s=forecast.median_s)

    def ended(self, ending: RequestEnding, now_s: float) -> None:
        """A request ended. One that another replica answered says nothing of the forecast."""
        promise = self._open.pop(ending.request_id, None)
        if promise is None:
            return
        kept = ending.kept
        if kept is None and ending.outcome == "failed":
            kept = False  # before an answer began, of which the router says no more
        if kept is not None:
            # Its first token may have come just before it was to move.
            moved = promise.moved and ending.replica_id in ("", promise.replica_id)
            self._ended.append(
                _Ended(now_s, promise.service_class, promise.replica_id, kept, moved)
            )
        if ending.ttft_s is not None and ending.replica_id == promise.replica_id:
            observed_s = ending.ttft_s - promise.waited_s
            self._reliability.observe(promise.begins_at, promise.forecast, observed_s)

    def describe(
        self, level: float, margins: Mapping[Objective, float], known: Collection[str], now_s: float
    ) -> dict[str, Any]:
        """How well promises are kept, as plain data that JSON can hold. ``O(RECENT + replicas)``.

        Args:
            level: share of the promises that are to be kept.
            margins: by how much of each objective they are planned earlier.
            known: replicas to tell of one by one.
        """
        ended = self._ended
        while ended and ended[0].at_s < now_s - RECENT_S:
            ended.popleft()
        classes = Counter((each.service_class, each.kept) for each in ended)
        replicas = Counter((each.replica_id, each.kept) for each in ended)
        kept = sum(each.kept for each in ended)
        curve = self._reliability.curve()
        return {
            "level": level,
            "margins": {name: round(margin, 4) for name, margin in margins.items()},
            "window_ms": round((now_s - ended[0].at_s) * 1000) if ended else 0,
            "promised": len(ended),
            "kept": kept,
            "moved": sum(each.moved for each in ended),
            "moved_kept": sum(each.moved and each.kept for each in ended),
            "quantiles": list(QUANTILES),
            "reliability": _curve(curve),
            "classes": [
                {"class": name, **_counts(classes, name)}
                for name in sorted({n for n, _ in classes})
            ],
            "replicas": [
                {
                    "replica_id": name,
                    **_counts(replicas, name),
                    "reliability": _curve(self._reliability.curve(name)),
                }
                for name in sorted(known)
            ],
        }


def _counts(found: Counter[tuple[str, bool]], name: str) -> dict[str, int]:
    kept = found[name, True]
    return {"promised": kept + found[name, False], "kept": kept}


def _curve(curve: Curve) -> dict[str, Any]:
    """Forecasts that ended, and the share of observations at or below each of their quantiles."""
    return {"count": len(curve), "observed": [round(share, 4) for share in curve.shares]}
