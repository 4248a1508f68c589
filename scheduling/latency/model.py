"""Step-time models of an engine, and their online correction. Every family predicts the largest of
one or more sums ("pieces") over sequences with ``n`` new tokens on ``k`` computed ones. Seconds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, log, sqrt
from statistics import median
from typing import ClassVar, NamedTuple, Self

import numpy as np

from sluice.scheduling.request import kernels
from sluice.scheduling.request.kernels import Floats, Ints, compiled

MAX_FACTOR = 32.0
"""Largest factor on a part of a prediction, and the inverse of the smallest."""

MAX_SPREAD = 1.0
"""Largest spread of steps, see :attr:`StepCorrection.spread`."""

TOLERATED_SPREAD = 0.25
"""Spread up to which promises are made by the mean: independent noise averages out."""

_MEMORY = 0.05
"""Weight of the latest step in averages: they are over about 20 steps."""

# Variances of the factors' relative errors, in units of the variance of one step's relative error.
# Where steps have a noise of 10 %, a factor that nothing is known of may be off by 50 %.
_UNKNOWN = 25.0

_FAR_STEPS = 4
"""Steps far off, or in a row off to one side, that may show a change."""

_MAX_APART = 3.0
"""Largest ratio of the factors. After some long steps of decodes a fit may find the fixed part
slow and tokens almost free, so that each prompt is promised in no time."""


class _Step(NamedTuple):
    """A step by its parts, the variance of steps known before it, and whether it was far off."""

    fixed_s: float
    work_s: float
    real_s: float
    variance: float
    far: bool


class _Factors:
    """A Kalman filter of both factors, which walk at random, mostly together."""

    __slots__ = ("_cross", "_fixed", "_work", "fixed", "work")

    def __init__(self, fixed: float, work: float, variance: float) -> None:
        self.fixed = min(max(fixed, 1.0 / MAX_FACTOR), MAX_FACTOR)
        self.work = min(max(work, 1.0 / MAX_FACTOR), MAX_FACTOR)
        self.doubt(variance)

    def doubt(self, variance: float) -> None:
        """Keep the factors, but forget how they were learned: each has this variance."""
        self._fixed = self._work = variance
        # What makes one part slower makes the other one slower, too, as a rule.
        self._cross = variance * 0.8

    def ratio(self, fixed_s: float, work_s: float, real_s: float) -> float:
        """Real over predicted time; one step counts as at most twice too long or too short."""
        return min(max(real_s / (self.fixed * fixed_s + self.work * work_s), 0.5), 2.0)

    def learn(self, fixed_s: float, work_s: float, ratio: float, most: float = inf) -> None:
        """Neither factor changes by more than ``most`` of itself."""
        fixed = self.fixed * fixed_s / (self.fixed * fixed_s + self.work * work_s)
        work = 1.0 - fixed
        # An exponential average with gain g is the filter of a factor that drifts by
        # g**2 / (1 - g) a step; both drift nearly together.
        drift = _MEMORY**2 / (1.0 - _MEMORY)
        self._fixed += drift
        self._work += drift
        self._cross += drift * 0.99
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
        # Never to zero or below.
        change = max(0.5, 1.0 + min(max(to_fixed * off, -most), most))
        self.fixed = min(max(self.fixed * change, 1.0 / MAX_FACTOR), MAX_FACTOR)
        change = max(0.5, 1.0 + min(max(to_work * off, -most), most))
        self.work = min(max(self.work * change, 1.0 / MAX_FACTOR), MAX_FACTOR)
        apart = self.work / self.fixed
        if not 1.0 / _MAX_APART <= apart <= _MAX_APART:
            back = sqrt(min(max(apart, 1.0 / _MAX_APART), _MAX_APART) / apart)
            self.work *= back
            self.fixed /= back


class _OneSided:
    """Page's cumulative sum test; the noise is learned from differences of consecutive steps."""

    __slots__ = ("_last", "_noise", "_runs", "_seen", "_sums")

    def __init__(self) -> None:
        self._noise = 0.01  # variance: a deviation of 10 %
        self._seen = 0
        self.restart()

    def restart(self) -> None:
        """Look for a change from now on."""
        self._last: float | None = None
        self._sums, self._runs = [0.0, 0.0], [0, 0]

    def observe(self, off: float) -> int:
        """Steps since a change began, else 0. ``off``: log of real over predicted time."""
        deviation = max(0.005, sqrt(self._noise))
        if self._last is not None:
            self._seen += 1
            squared = min((off - self._last) ** 2 / 2.0, (4.0 * deviation) ** 2)
            self._noise += max(_MEMORY, 1.0 / (1 + self._seen)) * (squared - self._noise)
        self._last = off
        # Each step counts as at most four deviations off, less an allowance of one, and the sum of
        # a change is above nine. So three steps alone are none.
        shift = min(max(off / deviation, -4.0), 4.0)
        for side, each in enumerate((shift, -shift)):
            self._sums[side] = max(0.0, self._sums[side] + each - 1.0)
            self._runs[side] = self._runs[side] + 1 if self._sums[side] else 0
        side = int(self._sums[1] > self._sums[0])
        if self._sums[side] <= 9.0 or self._runs[side] < _FAR_STEPS:
            return 0
        return self._runs[side]


class StepCorrection:
    """Factors on both parts of a prediction, what every step costs and what tokens cost, learned
    from real step times: for steps all alike, the average over 20 steps of ProServe §4.1's beta.

    A step counts as at most twice too long or too short, and moves a factor by 5 % at most. When
    four of the last 32 steps are far off (a factor of 1.2, or three spreads) or steps are off to
    one side (``_OneSided``), both factors are refitted, if that halves the squared log error. Times
    that are not positive and finite teach nothing. ``O(1)`` but for a refit."""

    __slots__ = ("_factors", "_one_sided", "_recent", "_variance", "fixed", "spread", "work")

    def __init__(self) -> None:
        self.fixed = self.work = 1.0
        """Factors on the fixed part of a step, and on the work of its sequences."""
        self.spread = 0.2
        """Root mean square of the relative errors over about 20 steps, up to ``MAX_SPREAD``."""
        # A fresh profile may be off by a quarter of a step's deviation.
        self._factors = _Factors(1.0, 1.0, 0.06)
        self._variance = 0.2**2
        self._recent: deque[_Step] = deque(maxlen=32)
        self._one_sided = _OneSided()

    def predicted_s(self, fixed_s: float, work_s: float) -> float:
        """Corrected time of a step whose parts were predicted so."""
        return self.fixed * fixed_s + self.work * work_s

    def observe(self, fixed_s: float, work_s: float, real_s: float) -> None:
        """Learn from one step; the parts of its prediction are without correction and head-room."""
        # Other predictions are of no engine, and not safe to divide by.
        possible = fixed_s >= 0 and work_s >= 0 and 1e-9 <= fixed_s + work_s <= 1e9
        if not (possible and 0 < real_s < inf):
            return
        # The spread before the recent steps: a change must not hide itself by what it adds to it.
        before = self._recent[0].variance if self._recent else self._variance
        far_ratio = min(max(1.2, 1.0 + 3.0 * sqrt(before)), 2.0)
        ratio = self._factors.ratio(fixed_s, work_s, real_s)
        far = not 1.0 / far_ratio < ratio < far_ratio
        self._recent.append(_Step(fixed_s, work_s, real_s, self._variance, far))
        self._variance += _MEMORY * ((ratio - 1.0) ** 2 - self._variance)
        self._factors.learn(fixed_s, work_s, ratio, 0.05)
        if changed := self._one_sided.observe(log(ratio)):
            self._refit(list(self._recent)[-changed:])
            self._one_sided.restart()
        elif far:
            recent = list(self._recent)
            places = [place for place, step in enumerate(recent) if step.far]
            if len(places) >= _FAR_STEPS:
                self._refit(recent[places[-_FAR_STEPS] :])
        self.fixed, self.work = self._factors.fixed, self._factors.work
        self.spread = min(sqrt(self._variance), MAX_SPREAD)

    def _refit(self, steps: Sequence[_Step]) -> None:
        """Use a fit to ``steps`` where it is much better."""
        now = self._factors
        scale = median(s.real_s / (now.fixed * s.fixed_s + now.work * s.work_s) for s in steps)
        found = _Factors(now.fixed * scale, now.work * scale, _UNKNOWN)
        for _ in range(2):
            found.doubt(_UNKNOWN)
            for step in steps:
                found.learn(step.fixed_s, step.work_s, found.ratio(*step[:3]))
        if 2.0 * _squares(found, steps) < _squares(now, steps):
            self._factors = found
            left = sum((found.ratio(*step[:3]) - 1.0) ** 2 for step in steps) / len(steps)
            self._variance = max(steps[0].variance, left)
            self._recent.clear()
            self._one_sided.restart()


def caution(spread: float) -> float:
    """Factor on predictions that guarantees are made by: 1 up to ``TOLERATED_SPREAD``."""
    return 1.0 + max(0.0, spread - TOLERATED_SPREAD)


def _squares(factors: _Factors, steps: Sequence[_Step]) -> float:
    return sum(log(factors.ratio(*step[:3])) ** 2 for step in steps)


UNBOUNDED_TOKENS = 1 << 30
"""More tokens than any sequence has: what fits where no term of a model limits it."""


class StepSample(NamedTuple):
    """The work of one engine step, in sums over its sequences in the order of the coefficients of
    ``request.kernels``, and its ``seconds`` (0: has not run).

    Prefills are the sequences with ``n > 1``; ``prefill_tokens``, ``prefill_square``,
    ``prefill_cross`` and ``prefill_context`` are sums of ``n``, ``n**2``, ``n * k`` and ``k`` over
    them, ``decode_context`` of ``k`` over the others. ``spec_steps``: steps of a draft model before
    the step."""

    prefill_tokens: float
    prefill_square: float
    prefill_cross: float
    prefill_context: float
    prefills: float
    decodes: float
    decode_context: float
    spec_steps: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(
        cls, sequences: Iterable[tuple[int, int]], seconds: float = 0.0, spec_steps: float = 0.0
    ) -> StepSample:
        """The step of ``sequences``, each given by its new and its computed tokens."""
        new, computed = [], []
        for tokens, before in sequences:
            new.append(tokens)
            computed.append(before)
        return cls(*work_sums(new, computed), spec_steps, seconds)

    @classmethod
    def of_arrays(cls, new: Ints, computed: Ints, spec_steps: float = 0.0) -> StepSample:
        """The same of arrays: per sequence, its new and its computed tokens."""
        sums = _compiled_sums(new.astype(np.float64), computed.astype(np.float64))
        return cls(*sums, spec_steps)

    @property
    def new_tokens(self) -> float:
        """Sum of ``n`` over all sequences."""
        return self.prefill_tokens + self.decodes

    @property
    def context_tokens(self) -> float:
        """Sum of ``k + n`` over all sequences."""
        return self.prefill_context + self.decode_context + self.new_tokens

    @property
    def quadratic(self) -> float:
        """Sum of ``n * (k + n / 2)`` over all sequences."""
        cross = self.prefill_cross + self.decode_context
        return cross + 0.5 * (self.prefill_square + self.decodes)


def work_sums(
    new: Sequence[float] | Floats, computed: Sequence[float] | Floats
) -> tuple[float, float, float, float, float, float, float]:
    """The sums of a :class:`StepSample` over sequences."""
    tokens = square = cross = context = prefills = decodes = decode_context = 0.0
    for sequence in range(len(new)):
        count, before = new[sequence], computed[sequence]
        if count == 1.0:
            decodes += 1.0
            decode_context += before
        elif count > 1.0:
            prefills += 1.0
            tokens += count
            square += count * count
            cross += count * before
            context += before
    return tokens, square, cross, context, prefills, decodes, decode_context


_compiled_sums = compiled(work_sums)


@compiled
def prefill_within(coefficients: Floats, left_s: float, computed_tokens: int) -> int:
    """Most new tokens of a prefill whose work by one piece fits ``left_s``; < 2: two do not."""
    left = (
        left_s
        - coefficients[kernels.PREFILL_SEQUENCE]
        - coefficients[kernels.PREFILL_CONTEXT] * computed_tokens
    )
    if left < 0.0:
        return 0
    if left == inf:
        return UNBOUNDED_TOKENS
    linear = (
        coefficients[kernels.PREFILL_TOKENS] + coefficients[kernels.PREFILL_CROSS] * computed_tokens
    )
    square = coefficients[kernels.PREFILL_SQUARE]
    # The root of square n^2 + linear n = left, in the form that also holds without a square.
    divisor = linear + sqrt(linear * linear + 4.0 * square * left)
    if divisor <= 0.0:
        return 0 if square > 0.0 else UNBOUNDED_TOKENS
    if 2.0 * left >= divisor * UNBOUNDED_TOKENS:
        return UNBOUNDED_TOKENS
    # A whole number of tokens must not be lost to rounding.
    return int(2.0 * left / divisor + 1e-9)


@compiled
def tokens_within(
    pieces: Floats, costs: Floats, until_s: float, computed_tokens: int, most: int
) -> int:
    """Most new tokens of one sequence that keep every piece, at ``costs`` so far, within
    ``until_s``."""
    fit = most
    for piece in range(pieces.shape[0]):
        if fit > 1:
            fit = min(fit, prefill_within(pieces[piece], until_s - costs[piece], computed_tokens))
    if fit > 1 or most < 1:
        return fit
    # One token is a decode, which has a price of its own.
    for piece in range(pieces.shape[0]):
        if kernels.work_s(pieces[piece], 1.0, computed_tokens) > until_s - costs[piece]:
            return 0
    return 1


@dataclass(frozen=True, kw_only=True, repr=False)
class LatencyModel(ABC):
    """Predicts the time of a step: the largest of its pieces, times a correction and a head-room. A
    subclass is a family: its positional fields are its coefficients. Immutable. Raises ValueError
    for a negative or non-finite coefficient, for all of them zero, and for a factor out of range.

    Attributes:
        headroom: factor on every prediction, >= 1: with 5 % a planner meets objectives of which an
            exact one would miss half.
        spread: relative error of recent predictions, root mean square.
        pieces: ``float64[pieces, COEFFICIENTS]`` of ``request.kernels``, with the factors: per
            sequence ``PREFILL_TOKENS n + PREFILL_SQUARE n**2 + PREFILL_CROSS n k + PREFILL_CONTEXT
            k + PREFILL_SEQUENCE`` for ``n > 1``, ``DECODE_SEQUENCE + DECODE_CONTEXT k`` for ``n =
            1``. Not to be written to."""

    family: ClassVar[str]
    source: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    correction: float = 1.0
    fixed_correction: float = 1.0
    headroom: float = 1.0
    spread: float = 0.0
    pieces: Floats = field(init=False, compare=False)
    fixed_s: float = field(init=False, compare=False)
    _bare: Floats = field(init=False, compare=False)

    def __post_init__(self) -> None:
        coefficients = self.coefficients
        if not all(0 <= value < inf for value in coefficients):
            raise ValueError(f"latency coefficients must be finite and >= 0, got {coefficients}")
        if not any(coefficients):
            raise ValueError("a latency model needs at least one coefficient above 0")
        bare: Floats = np.array(self._rows(), dtype=np.float64)
        object.__setattr__(self, "_bare", bare)
        self._scale(self.correction, self.fixed_correction, self.headroom, self.spread)

    def __repr__(self) -> str:
        named = zip(self.names, self.coefficients, strict=True)
        names = ("correction", "fixed_correction", "headroom")
        factors = ((name, getattr(self, name)) for name in names)
        shown = ", ".join(f"{name}={value:.3g}" for name, value in (*named, *factors))
        return f"{type(self).__name__}({shown})"

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The family's coefficients in the order of ``names``, without the factors."""
        return tuple([getattr(self, name) for name in self.names])

    @abstractmethod
    def _rows(self) -> Sequence[Sequence[float]]:
        """:attr:`pieces` without the factors."""

    @classmethod
    def of(cls, coefficients: Sequence[float]) -> Self:
        """The model with these coefficients. Raises ValueError if their number or one of them is
        wrong."""
        if len(coefficients) != len(cls.names):
            raise ValueError(
                f"a model of the family {cls.family} has {len(cls.names)} coefficients "
                f"({', '.join(cls.names)}), got {len(coefficients)}"
            )
        return cls(*coefficients)

    def work_s(self, new_tokens: int, computed_tokens: int) -> float:
        """Marginal time of ``new_tokens`` (>= 1) of one sequence, by the costliest piece."""
        return kernels.most_work_s(self.pieces, float(new_tokens), float(computed_tokens))

    def step_s(self, step: StepSample) -> float:
        """Time of a whole step; its own ``seconds`` are not looked at. ``O(pieces)``."""
        return float((self.pieces @ np.array((1.0, *step[:7]))).max())

    def parts_s(self, step: StepSample) -> tuple[float, float]:
        """Fixed part and work of a step by its costliest piece, without factors. ``O(pieces)``."""
        work = np.array((1.0, *step[:7]))
        piece = int((self.pieces @ work).argmax()) if len(self.pieces) > 1 else 0
        fixed_s = float(self._bare[piece, kernels.FIXED])
        return fixed_s, max(0.0, float(self._bare[piece] @ work) - fixed_s)

    def tokens_within(self, seconds: float, computed_tokens: int) -> int:
        """Most new tokens of one sequence on ``computed_tokens`` whose work fits ``seconds``."""
        costs = np.zeros(len(self.pieces))
        return tokens_within(self.pieces, costs, float(seconds), computed_tokens, UNBOUNDED_TOKENS)

    def corrected(
        self, correction: float, fixed_correction: float | None = None, spread: float = 0.0
    ) -> Self:
        """The same model with another correction and spread. Cheap enough for every step."""
        fixed = correction if fixed_correction is None else fixed_correction
        return self._scaled(correction, fixed, self.headroom, spread)

    def with_headroom(self, headroom: float) -> Self:
        """The same model with another head-room."""
        return self._scaled(self.correction, self.fixed_correction, headroom, self.spread)

    def _scaled(
        self, correction: float, fixed_correction: float, headroom: float, spread: float
    ) -> Self:
        model = object.__new__(type(self))
        # What the constructor would do, without checking the coefficients again.
        model.__dict__.update(self.__dict__)
        model._scale(correction, fixed_correction, headroom, spread)
        return model

    def _scale(
        self, correction: float, fixed_correction: float, headroom: float, spread: float
    ) -> None:
        """Set the factors, and what follows from them."""
        if not (0 < correction < inf and 0 < fixed_correction < inf):
            raise ValueError(
                f"correction must be positive and finite, got {correction}, and "
                f"{fixed_correction} for the fixed part"
            )
        if not 1 <= headroom < inf:
            raise ValueError(f"headroom must be finite and >= 1, got {headroom}")
        pieces: Floats = self._bare * (correction * headroom)
        if fixed_correction != correction:
            pieces[:, kernels.FIXED] = self._bare[:, kernels.FIXED] * (fixed_correction * headroom)
        self.__dict__.update(
            correction=correction,
            fixed_correction=fixed_correction,
            headroom=headroom,
            spread=spread,
            pieces=pieces,
            fixed_s=float(pieces[:, kernels.FIXED].max()),
        )


@dataclass(frozen=True, repr=False)
class LinearLatency(LatencyModel):
    """``a + b * sum n + c * sum (k + n) + d * sum n * (k + n / 2)`` seconds: FairBatching §3.2, and
    with ``d`` the attention of long prefills, as in ProServe Eq. 5."""

    family = "linear"
    source = "FairBatching §3.2, with an attention term"
    names = ("a", "b", "c", "d")

    a: float
    b: float
    c: float = 0.0
    d: float = 0.0

    def _rows(self) -> Sequence[Sequence[float]]:
        a, b, c, d = self.coefficients
        return [(a, b + c, d / 2, d, c, 0.0, b + c + d / 2, c + d)]


@dataclass(frozen=True, repr=False)
class PrefillDecodeLatency(LatencyModel):
    """``t_c + sum over prefills (a_p n**2 + b_p n k + c_p n) + sum over decodes (a_d k + b_d)``
    seconds: ProServe §4.1, Eq. 4 to 7. We read ``l_kv`` as the tokens computed before the step."""

    family = "prefill_decode"
    source = "ProServe §4.1, Eq. 4-7"
    names = ("a_p", "b_p", "c_p", "a_d", "b_d", "t_c")

    a_p: float
    b_p: float
    c_p: float
    a_d: float
    b_d: float
    t_c: float

    def _rows(self) -> Sequence[Sequence[float]]:
        return [(self.t_c, self.c_p, self.a_p, self.b_p, 0.0, 0.0, self.b_d, self.a_d)]


@dataclass(frozen=True, repr=False)
class RooflineLatency(LatencyModel):
    """The larger of two lines ``k1 * new tokens + k2 * spec_steps + b``, seconds: SLOs-Serve
    §3.1.1, ``l = 2``. The paper counts draft steps per batch; here they are a number of the model.
    """

    family = "roofline"
    source = "SLOs-Serve §3.1.1"
    names = ("k1", "k2", "b", "k1_other", "k2_other", "b_other", "spec_steps")

    k1: float
    k2: float
    b: float
    k1_other: float
    k2_other: float
    b_other: float
    spec_steps: float = 0.0

    @property
    def lines(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """``k1, k2, b`` of both lines."""
        return ((self.k1, self.k2, self.b), (self.k1_other, self.k2_other, self.b_other))

    def _rows(self) -> Sequence[Sequence[float]]:
        return [
            (b + k2 * self.spec_steps, k1, 0.0, 0.0, 0.0, 0.0, k1, 0.0) for k1, k2, b in self.lines
        ]


FAMILIES: dict[str, type[LatencyModel]] = {
    model.family: model for model in (LinearLatency, PrefillDecodeLatency, RooflineLatency)
}
"""Every family of step-time models by name."""
