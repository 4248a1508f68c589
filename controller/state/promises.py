"""The log of guarantees, their outcomes, and a summary of both.

Between a decision and its request's end this remembers the replica of each guarantee and the TTFT
forecast. Routers judge the guarantees (:mod:`sluice.router.metrics.admission`), so this summary
agrees with the metrics.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from sluice.controller.messages import RequestEnding, RouteDecision, RouteQuery, Tier
from sluice.scheduling.objective import Objective
from sluice.scheduling.reliability import QUANTILES, Curve, Forecast, Reliability

MOST_OPEN: Final = 65_536
"""Most guarantees in progress that are remembered; of more, the oldest are forgotten."""

RECENT: Final = 2_000
RECENT_S: Final = 3_600.0
"""The summary covers the latest ``RECENT`` guarantees, and none that ended more than ``RECENT_S``
seconds ago. At a level of 0.99 the standard error of the share kept is 0.2 points."""


class _Promise(NamedTuple):
    """Attributes: ``replica_id`` answers, ``begins_at`` computes the prompt; ``waited_s``: the
    request's age at the decision; ``moved``: it left a replica where it was predicted to be late.
    """

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
    """The guarantees of a fleet. A decision costs ``O(1)``, an ending as much as
    :meth:`Reliability.observe`."""

    def __init__(self) -> None:
        self._reliability = Reliability()
        self._open: OrderedDict[str, _Promise] = OrderedDict()
        self._ended: deque[_Ended] = deque(maxlen=RECENT)

    def made(self, query: RouteQuery, decision: RouteDecision) -> RouteDecision:
        """Note a decision. Returns it, if it is guaranteed, with the forecast's median as predicted
        TTFT. A later guarantee of the same request replaces the first."""
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
                _Ended(now_s, promise.service_class, promise.replica_id, kept, moved)
            )
        if ending.ttft_s is not None and ending.replica_id == promise.replica_id:
            observed_s = ending.ttft_s - promise.waited_s
            self._reliability.observe(promise.begins_at, promise.forecast, observed_s)

    def describe(
        self, level: float, margins: Mapping[Objective, float], known: Collection[str], now_s: float
    ) -> dict[str, Any]:
        """How well guarantees are kept, as plain JSON data. ``O(RECENT + replicas)``.

        Args:
            level: target share of guarantees that are kept.
            margins: safety margin of each objective, as a share of it.
            known: replicas to describe one by one.
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
    """Number of evaluated forecasts, and the share of observations at or below each quantile."""
    return {"count": len(curve), "observed": [round(share, 4) for share in curve.shares]}
