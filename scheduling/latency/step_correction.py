"""Online correction of a step-time model: two factors on its predictions, and how far they are off.

An engine can differ from its profile in what every step costs (the launch of kernels, the weights
that are read, the host's own work) and in what tokens cost. One factor on the whole prediction is
right for one mix of steps only. So there are two: one on the fixed part of a step, one on the work
of its sequences. A third one, on context, would hardly ever be told apart from the second: both
grow with the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf, log, sqrt
from statistics import median
from typing import NamedTuple

MAX_FACTOR = 32.0
"""Largest factor on a part of a prediction, and the inverse of the smallest."""

MAX_SPREAD = 1.0
"""Largest spread of steps, see :attr:`StepCorrection.spread`."""

TOLERATED_SPREAD = 0.25
"""Spread up to which guarantees are made by the mean. Independent noise of steps averages out over
a request, and the margins of guarantees cover the rest. One step that takes any time too long comes
to 0.22 by itself, and must not cost guarantees."""

_MAX_RATIO = 2.0
"""One step counts as at most this many times too long or too short."""

_MAX_CHANGE = 0.05
"""Most by which one step moves a factor, unless it shows that the engine has changed."""

_SHORTEST_S = 1e-9
_LONGEST_S = 1e9
"""Predictions outside are of no engine, and not safe to divide by."""

_MEMORY = 0.05
"""Weight of the latest step in averages: they are over about 20 steps."""

_UNKNOWN_SPREAD = 0.2
"""Assumed before the first step."""

# Variances of the factors' relative errors, in units of the variance of one step's relative error.
# Where steps have a noise of 10 %, a factor that nothing is known of may be off by 50 %, and a
# fresh profile by 2 %. What makes one part slower makes the other one slower, too, as a rule.
_UNKNOWN = 25.0
_PROFILED = 0.06
_TOGETHER = 0.8
# An exponential average with gain g is the filter of a factor that drifts by g**2 / (1 - g) a step.
_DRIFT = _MEMORY**2 / (1.0 - _MEMORY)
_DRIFT_TOGETHER = 0.99

# A step is far off from this ratio on; three times the spread where that is more, up to a bound.
_LEAST_FAR = 1.2
_MOST_FAR = 2.0
_FAR_SPREADS = 3.0
_RECENT_STEPS = 32
_FAR_STEPS = 4
_PASSES = 2

# Page's test, in standard deviations of the noise: each step counts as at most so far off, less the
# allowance, and the sum of a change is above the limit. So three steps alone are none.
_MOST_OFF = 4.0
_ALLOWED_OFF = 1.0
_SUM_OFF = 9.0
_LEAST_NOISE, _UNKNOWN_NOISE = 0.005, 0.1


class _Step(NamedTuple):
    """A step by its parts, the variance of steps known before it, and whether it was far off."""

    fixed_s: float
    work_s: float
    real_s: float
    variance: float
    far: bool


class _Factors:
    """Both factors with the covariance of their relative errors: a Kalman filter of two states that
    walk at random, mostly together. What a step tells is divided by the parts' shares in it."""

    __slots__ = ("_cross", "_fixed", "_work", "fixed", "work")

    def __init__(self, fixed: float, work: float, variance: float) -> None:
        self.fixed = _within(fixed, MAX_FACTOR)
        self.work = _within(work, MAX_FACTOR)
        self.doubt(variance)

    def doubt(self, variance: float) -> None:
        """Keep the factors, but forget how they were learned: each has this variance."""
        self._fixed = self._work = variance
        self._cross = variance * _TOGETHER

    def predicted_s(self, fixed_s: float, work_s: float) -> float:
        """Time of a step with these parts."""
        return self.fixed * fixed_s + self.work * work_s

    def ratio(self, step: _Step) -> float:
        """Real over predicted time, within the bounds of one step."""
        return _within(step.real_s / self.predicted_s(step.fixed_s, step.work_s), _MAX_RATIO)

    def learn(self, fixed_s: float, work_s: float, ratio: float, most: float = inf) -> None:
        """A step with these parts took ``ratio`` times its prediction; neither factor changes by
        more than ``most`` of itself."""
        fixed = self.fixed * fixed_s / self.predicted_s(fixed_s, work_s)
        work = 1.0 - fixed
        self._fixed += _DRIFT
        self._work += _DRIFT
        self._cross += _DRIFT * _DRIFT_TOGETHER
        to_fixed = self._fixed * fixed + self._cross * work
        to_work = self._cross * fixed + self._work * work
        variance = 1.0 + max(0.0, to_fixed * fixed + to_work * work)
        self._fixed = max(0.0, self._fixed - to_fixed * to_fixed / variance)
        self._work = max(0.0, self._work - to_work * to_work / variance)
        self._cross -= to_fixed * to_work / variance
        # Steps that are all alike do not tell the parts apart; the doubt of that has its bound.
        excess = max(self._fixed, self._work) / _UNKNOWN
        if excess > 1.0:
            self._fixed /= excess
            self._work /= excess
            self._cross /= excess
        off = (ratio - 1.0) / variance
        self.fixed = _moved(self.fixed, to_fixed * off, most)
        self.work = _moved(self.work, to_work * off, most)


class _OneSided:
    """Finds steps that are off to one side, however little: Page's cumulative sum test.

    The noise is learned from the differences of consecutive steps, in which a change is seen once.
    """

    __slots__ = ("_last", "_noise", "_runs", "_seen", "_sums")

    def __init__(self) -> None:
        self._noise = _UNKNOWN_NOISE**2
        self._seen = 0
        self.restart()

    def restart(self) -> None:
        """Look for a change from now on."""
        self._last: float | None = None
        self._sums, self._runs = [0.0, 0.0], [0, 0]

    def observe(self, off: float) -> int:
        """Number of steps since a change began, if one is found with this step, of which the
        logarithm of real over predicted time is ``off``; else 0."""
        deviation = max(_LEAST_NOISE, sqrt(self._noise))
        if self._last is not None:
            self._seen += 1
            squared = min((off - self._last) ** 2 / 2.0, (_MOST_OFF * deviation) ** 2)
            self._noise += max(_MEMORY, 1.0 / (1 + self._seen)) * (squared - self._noise)
        self._last = off
        shift = min(max(off / deviation, -_MOST_OFF), _MOST_OFF)
        for side, each in enumerate((shift, -shift)):
            self._sums[side] = max(0.0, self._sums[side] + each - _ALLOWED_OFF)
            self._runs[side] = self._runs[side] + 1 if self._sums[side] else 0
        side = int(self._sums[1] > self._sums[0])
        if self._sums[side] <= _SUM_OFF or self._runs[side] < _FAR_STEPS:
            return 0
        return self._runs[side]


class StepCorrection:
    """Multiplicative corrections of both parts of a prediction, learned from real step times.

    Between changes each step moves the factors by what it says of them (:class:`_Factors`). For
    steps that are all alike that is the exponential average over 20 steps of ProServe §4.1's beta;
    steps that differ in their shares of fixed cost tell the factors apart. A step counts as at most
    twice too long or too short and moves a factor by 5 % at most, so an outlier does no harm.

    A change of the engine is found separately, in two ways. A step is *far off* if its time is a
    factor of 1.2, or three spreads if that is more, from its prediction: four of the last 32 steps
    may show a change. So may steps in a row that are off to one side, by more than one deviation of
    their noise (:class:`_OneSided`): a change of 1.3 under a noise of 3 % takes 4 steps in most
    cases. Then both factors are refitted to the steps since the first of these: they start from the
    median ratio, which outliers do not move. The fit is used if it leaves less than half of the
    squared (logarithmic) error. So four slow steps in a row are a change, and so are four slow
    prefills among decodes that are as before, while outliers among like steps are none.

    The factors stay in ``[1 / MAX_FACTOR, MAX_FACTOR]``. Times that are not positive and finite,
    and predictions below a nanosecond, teach nothing. ``O(1)`` for a step; one that is far off may
    cost a fit to the last 32.
    """

    __slots__ = ("_factors", "_one_sided", "_recent", "_variance")

    def __init__(self) -> None:
        self._factors = _Factors(1.0, 1.0, _PROFILED)
        self._variance = _UNKNOWN_SPREAD**2
        self._recent: deque[_Step] = deque(maxlen=_RECENT_STEPS)
        self._one_sided = _OneSided()

    @property
    def fixed(self) -> float:
        """Factor on the fixed part of a step."""
        return self._factors.fixed

    @property
    def work(self) -> float:
        """Factor on the work of a step's sequences."""
        return self._factors.work

    @property
    def spread(self) -> float:
        """Root mean square of the relative errors of the corrected predictions, over about 20
        steps, from 0 to ``MAX_SPREAD``: noise, and what the model gets wrong."""
        return min(sqrt(self._variance), MAX_SPREAD)

    def predicted_s(self, fixed_s: float, work_s: float) -> float:
        """Corrected time of a step whose parts were predicted so."""
        return self._factors.predicted_s(fixed_s, work_s)

    def observe(self, fixed_s: float, work_s: float, real_s: float) -> None:
        """Learn from one step; ``fixed_s`` and ``work_s`` are the parts of its prediction without
        correction and without head-room, which would be learned away."""
        possible = fixed_s >= 0 and work_s >= 0 and _SHORTEST_S <= fixed_s + work_s <= _LONGEST_S
        if not (possible and 0 < real_s < inf):
            return
        predicted_s = self.predicted_s(fixed_s, work_s)
        # The spread before the recent steps: a change must not hide itself by what it adds to it.
        before = self._recent[0].variance if self._recent else self._variance
        far_ratio = min(max(_LEAST_FAR, 1.0 + _FAR_SPREADS * sqrt(before)), _MOST_FAR)
        ratio = _within(real_s / predicted_s, _MAX_RATIO)
        far = not 1.0 / far_ratio < ratio < far_ratio
        self._recent.append(_Step(fixed_s, work_s, real_s, self._variance, far))
        self._variance += _MEMORY * ((ratio - 1.0) ** 2 - self._variance)
        self._factors.learn(fixed_s, work_s, ratio, _MAX_CHANGE)
        if changed := self._one_sided.observe(log(ratio)):
            self._refit(list(self._recent)[-changed:])
            self._one_sided.restart()
        elif far:
            recent = list(self._recent)
            places = [place for place, step in enumerate(recent) if step.far]
            if len(places) >= _FAR_STEPS:
                self._refit(recent[places[-_FAR_STEPS] :])

    def _refit(self, steps: Sequence[_Step]) -> None:
        """Use a fit to ``steps`` where it is much better."""
        scale = median(s.real_s / self.predicted_s(s.fixed_s, s.work_s) for s in steps)
        found = _Factors(self.fixed * scale, self.work * scale, _UNKNOWN)
        for _ in range(_PASSES):
            found.doubt(_UNKNOWN)
            for step in steps:
                found.learn(step.fixed_s, step.work_s, found.ratio(step))
        if 2.0 * _squares(found, steps) < _squares(self._factors, steps):
            self._factors = found
            left = sum((found.ratio(step) - 1.0) ** 2 for step in steps) / len(steps)
            self._variance = max(steps[0].variance, left)
            self._recent.clear()
            self._one_sided.restart()


def caution(spread: float) -> float:
    """Factor on predictions that guarantees are made by, for steps of this spread: 1 up to
    ``TOLERATED_SPREAD``, and more by what exceeds it."""
    return 1.0 + max(0.0, spread - TOLERATED_SPREAD)


def _squares(factors: _Factors, steps: Sequence[_Step]) -> float:
    return sum(log(factors.ratio(step)) ** 2 for step in steps)


def _within(value: float, most: float) -> float:
    return min(max(value, 1.0 / most), most)


def _moved(factor: float, change: float, most: float) -> float:
    # Never to zero or below.
    return _within(factor * max(0.5, 1.0 + min(max(change, -most), most)), MAX_FACTOR)
