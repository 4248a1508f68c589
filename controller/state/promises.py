"""The promises in progress, and how the latest ones ended. Routers judge them
(``sluice.router.metrics.instruments``), so what is counted here agrees with the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from math import inf, log2
from typing import Final, NamedTuple

from sluice.protocol.messages import RequestEnding
from sluice.scheduling.recent import Latest, used
from sluice.scheduling.request.job import RouteDecision, RouteQuery, Tier

# Observed against predicted TTFTs, and how reliable the resulting forecasts are.
#
# The *ratio* of a promise that ended is observed over predicted time. Each forecast is checked: the
# share of observations below each quantile is the reliability curve, ideally its diagonal.
#
# Our reading: a ratio depends on the replica, on the size of the prediction (20 ms of HTTP are
# much of 50 ms and little of two seconds) and on the promised bound, as an engine that schedules
# by deadlines uses the time that it has. So each has ratios of its own, sizes in steps of four;
# with too few, those of all replicas are taken, then the prediction as it is. A promise is kept
# with a probability of its level, so no quantile up to that lies beyond the bound.
#
# For clients that receive a predicted time, and for monitoring; margins are learned in
# ``calibration``.

QUANTILES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""The quantiles that are forecast and checked."""

_MEDIAN: Final = QUANTILES.index(0.5)

WINDOW: Final = 200
"""Ratios that count: the median follows a change after half as many requests."""

FEW: Final = 20
"""With fewer ratios nothing is said of their distribution."""

CHECKED: Final = 1_000
"""Forecasts in a reliability curve: at a share of 0.9 its standard error is 0.01."""

MAX_WINDOWS: Final = 2_048
MAX_CURVES: Final = 1_024
"""Windows and curves that are kept at a time; the one that was used longest ago goes first."""

_MIN_S: Final = 0.001


class Forecast(NamedTuple):
    """When a first token is expected, seconds from the decision on: ``predicted_s`` times each of
    ``ratios``, at ``QUANTILES`` (``None``: too little is known). ``median_s``: the time that half
    of the requests keep; as predicted where that is unknown. ``bound_s`` is infinite without a
    promise."""

    predicted_s: float
    median_s: float
    ratios: tuple[float, ...] | None
    bound_s: float


class Curve:
    """How often the latest observations lay below each forecast quantile. ``O(1)`` each."""

    def __init__(self) -> None:
        self._places: deque[int] = deque()
        self._counts = [0] * (len(QUANTILES) + 1)

    def __len__(self) -> int:
        return len(self._places)

    def note(self, place: int) -> None:
        """Record an observation above the first ``place`` quantiles, and at or below the rest."""
        if len(self._places) == CHECKED:
            self._counts[self._places.popleft()] -= 1
        self._places.append(place)
        self._counts[place] += 1

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the observations at or below each of :data:`QUANTILES`; empty for none."""
        if not self._places:
            return ()
        below, found = 0, []
        for count in self._counts[:-1]:
            below += count
            found.append(below / len(self._places))
        return tuple(found)


class Reliability:
    """Forecasts by what was observed before, and how they turned out. Memory is bounded. ``level``
    is the share of the promises that are to be kept."""

    def __init__(self, level: float = 0.99) -> None:
        self._level = level
        self._windows: OrderedDict[tuple[str | None, _Kind], _Window] = OrderedDict()
        self._curves: OrderedDict[str | None, Curve] = OrderedDict()

    def forecast(self, replica_id: str, predicted_s: float, bound_s: float = inf) -> Forecast:
        """What ``predicted_s`` at this replica means for a first token that is promised within
        ``bound_s``. ``O(1)``."""
        kind = _kind(predicted_s, bound_s) if self._windows else None
        for owner in (replica_id, None):
            window = None if kind is None else self._windows.get((owner, kind))
            if window is not None and window.quantiles is not None:
                most = bound_s / predicted_s
                ratios = [
                    min(ratio, most) if share <= self._level else ratio
                    for share, ratio in zip(QUANTILES, window.quantiles, strict=True)
                ]
                median_s = min(predicted_s * ratios[_MEDIAN], bound_s)
                return Forecast(predicted_s, median_s, tuple(ratios), bound_s)
        return Forecast(predicted_s, min(predicted_s, bound_s), None, bound_s)

    def observe(self, replica_id: str, forecast: Forecast, observed_s: float) -> None:
        """A first token came after ``observed_s`` at this replica. The forecast is judged as it was
        made, and only then is anything learned. ``O(WINDOW)``."""
        kind = _kind(forecast.predicted_s, forecast.bound_s)
        if kind is None:
            return
        ratio = max(0.0, observed_s) / forecast.predicted_s
        for owner in (replica_id, None):
            if forecast.ratios is not None:
                curve = used(self._curves, owner, Curve, MAX_CURVES)
                curve.note(bisect_left(forecast.ratios, ratio))
            used(self._windows, (owner, kind), _Window, MAX_WINDOWS).add(ratio)

    def curve(self, replica_id: str | None = None) -> Curve:
        """That of a replica, or of all together."""
        return self._curves.get(replica_id) or Curve()


class _Window:
    """The latest ratios."""

    def __init__(self) -> None:
        self._latest = Latest(WINDOW)
        self.quantiles: tuple[float, ...] | None = None

    def add(self, ratio: float) -> None:
        self._latest.add(ratio)
        if len(self._latest) >= FEW:
            self.quantiles = tuple(map(self._latest.quantile, QUANTILES))


_Kind = tuple[int, int | None]
"""The steps of four in which a prediction and its bound lie; ``None``: without one."""


def _kind(predicted_s: float, bound_s: float) -> _Kind | None:
    """What a forecast is like; ``None`` for a prediction that cannot be multiplied."""
    if not 0.0 < predicted_s < inf:
        return None
    return _size(predicted_s), None if bound_s == inf else _size(bound_s)


def _size(seconds: float) -> int:
    return round(log2(max(seconds, _MIN_S)) / 2)


MAX_OPEN: Final = 65_536
"""Most promises in progress that are remembered; of more, the oldest are forgotten."""

PERIOD_S: Final = 10.0
PERIODS: Final = 30
"""Ended promises are counted in periods; of the ``PERIODS`` latest ones, as the routers' counts."""


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
    """A promise whose request has ended. ``moved``: the request had left a replica where it was
    predicted to be late."""

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
        # The start of each period with the promises that ended in it.
        self._ended: deque[tuple[float, Counter[EndedPromise]]] = deque(maxlen=PERIODS)

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
            if len(self._open) > MAX_OPEN:
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
            if not self._ended or now_s - self._ended[-1][0] >= PERIOD_S:
                self._ended.append((now_s, Counter()))
            ended = EndedPromise(promise.service_class, promise.replica_id, kept, moved)
            self._ended[-1][1][ended] += 1
        if ending.ttft_s is not None and ending.replica_id == promise.replica_id:
            observed_s = ending.ttft_s - promise.waited_s
            self._reliability.observe(promise.begins_at, promise.forecast, observed_s)

    def ended_lately(self, now_s: float) -> Counter[EndedPromise]:
        """The promises that ended in the last ``PERIODS * PERIOD_S`` seconds."""
        while self._ended and self._ended[0][0] < now_s - PERIODS * PERIOD_S:
            self._ended.popleft()
        total: Counter[EndedPromise] = Counter()
        for _, ended in self._ended:
            total.update(ended)
        return total

    def curve(self, replica_id: str | None = None) -> Curve:
        """The reliability curve of a replica's TTFT forecasts, or of all."""
        return self._reliability.curve(replica_id)
