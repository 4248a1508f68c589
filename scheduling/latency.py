"""Step-time model of an engine: prediction, fit, online correction, and its stored profile.

``T = a + b * new + c * context + d * quadratic`` where, over the batch's sequences with ``n`` new
tokens on ``k`` computed ones, ``new = sum n``, ``context = sum (k + n)`` and
``quadratic = sum n * (k + n / 2)``. FairBatching §3.2 is the model without ``d``; the last term is
the attention of long prefills (ProServe Eq. 4). All times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, sqrt
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from scheduling.kernels import Floats


class StepSample(NamedTuple):
    """One observed engine step: its work and its real time.

    ``new_tokens``, ``context_tokens`` and ``quadratic`` are the sums of this module's docstring.
    """

    new_tokens: float
    context_tokens: float
    quadratic: float
    seconds: float


class LatencyModel(Protocol):
    """Predicts the time of a step as the largest of one or more sums: each has a fixed part and a
    part per sequence of the batch.
    """

    @property
    def pieces(self) -> Floats:
        """The sums, ``float64[pieces, COEFFICIENTS]`` of :mod:`scheduling.kernels`, corrected. With
        ``n`` new tokens of a sequence on ``k`` computed ones, its part is ``PREFILL_TOKENS n +
        PREFILL_SQUARE n**2 + PREFILL_CROSS n k + PREFILL_CONTEXT k + PREFILL_SEQUENCE`` for
        ``n > 1`` and ``DECODE_SEQUENCE + DECODE_CONTEXT k`` for ``n = 1``.
        """

    @property
    def fixed_s(self) -> float:
        """Time of a step before any token is counted."""

    def work_s(self, new_tokens: int, computed_tokens: int) -> float:
        """Marginal time of ``new_tokens`` of one sequence on ``computed_tokens`` computed ones."""

    def tokens_within(self, seconds: float, computed_tokens: int) -> int:
        """Most new tokens of one sequence on ``computed_tokens`` whose work fits ``seconds``."""


UNBOUNDED_TOKENS = 1 << 30
"""More tokens than any sequence has: what fits where no term of a model limits it."""


class LinearLatency:
    """``a + b * new + c * context + d * quadratic``, times a correction factor. Immutable.

    Args:
        a: seconds per step.
        b: seconds per new token.
        c: seconds per context token.
        d: seconds per unit of the quadratic term.
        correction: factor on every prediction, see :class:`OnlineCorrection`.

    Raises:
        ValueError: a negative or non-finite coefficient, all of them zero, or a correction that
            is not positive and finite.
    """

    __slots__ = ("_a", "_b", "_c", "_d", "_pieces", "a", "b", "c", "correction", "d")

    def __init__(
        self, a: float, b: float, c: float = 0.0, d: float = 0.0, correction: float = 1.0
    ) -> None:
        coefficients = (a, b, c, d)
        if not all(0 <= value < inf for value in coefficients):
            raise ValueError(f"latency coefficients must be finite and >= 0, got {coefficients}")
        if not any(coefficients):
            raise ValueError("a latency model needs at least one coefficient above 0")
        if not 0 < correction < inf:
            raise ValueError(f"correction must be positive and finite, got {correction}")
        self.a, self.b, self.c, self.d = coefficients
        self.correction = correction
        # Scaled once here: work_s() runs for every request of every plan.
        self._a, self._b, self._c, self._d = (value * correction for value in coefficients)
        self._pieces: Floats | None = None

    def __repr__(self) -> str:
        return (
            f"LinearLatency(a={self.a:.3g}, b={self.b:.3g}, c={self.c:.3g}, d={self.d:.3g}, "
            f"correction={self.correction:.3g})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinearLatency) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[float, ...]:
        return (self.a, self.b, self.c, self.d, self.correction)

    @property
    def fixed_s(self) -> float:
        """Time of a step before any token is counted."""
        return self._a

    @property
    def pieces(self) -> Floats:
        """One piece, see :class:`LatencyModel`."""
        if self._pieces is None:
            a, b, c, d = self.coefficients
            row = (a, b + c, d / 2, d, c, 0.0, b + c + d / 2, c + d)
            self._pieces = np.array([row])
        return self._pieces

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """``a, b, c, d``, corrected."""
        return (self._a, self._b, self._c, self._d)

    def work_s(self, new_tokens: int, computed_tokens: int) -> float:
        """Marginal time of ``new_tokens`` of one sequence on ``computed_tokens`` computed ones."""
        context = computed_tokens + new_tokens
        work = self._b * new_tokens + self._c * context
        if self._d:
            work += self._d * new_tokens * (computed_tokens + 0.5 * new_tokens)
        return work

    def step_s(self, new_tokens: float, context_tokens: float, quadratic: float = 0.0) -> float:
        """Time of a whole step from its sums."""
        return self._a + self._b * new_tokens + self._c * context_tokens + self._d * quadratic

    def tokens_within(self, seconds: float, computed_tokens: int) -> int:
        """Most new tokens of one sequence on ``computed_tokens`` whose work fits ``seconds``."""
        left = seconds - self._c * computed_tokens
        if left < 0:
            return 0
        linear = self._b + self._c + self._d * computed_tokens
        # The root of d/2 n^2 + linear n = left, in the form that also holds for d = 0.
        divisor = linear + sqrt(linear * linear + 2 * self._d * left)
        if divisor <= 0 or 2 * left >= divisor * UNBOUNDED_TOKENS:
            return UNBOUNDED_TOKENS
        # A whole number of tokens must not be lost to rounding.
        return int(2 * left / divisor + 1e-9)

    def corrected(self, correction: float) -> LinearLatency:
        """The same model with another correction factor."""
        return LinearLatency(self.a, self.b, self.c, self.d, correction)


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well a fitted model explains its samples.

    ``mape`` and ``p90_error`` are the mean and the 90th percentile of
    ``|predicted - real| / real``; ``r2`` is of the seconds; ``dropped`` counts outliers left out
    of the fit and of all three.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    samples: int
    dropped: int
    mape: float
    p90_error: float
    r2: float


MIN_FIT_SAMPLES = 8
"""Fewest samples of a fit: twice the coefficients."""


def fit(samples: Sequence[StepSample], trim: float = 0.1) -> tuple[LinearLatency, FitReport]:
    """Least squares on relative errors, with coefficients >= 0.

    The worst ``trim`` share of the samples by relative error is left out and the rest is fitted
    again: a shared machine makes outliers that are not the engine's. Relative errors, because a
    plan of 5 ms needs its 5 % as much as one of 200 ms. Samples without new tokens, or with a time
    that is not positive and finite, are ignored.

    Raises:
        ValueError: fewer than 8 usable samples, or ``trim`` outside [0, 0.5].
    """
    if not 0 <= trim <= 0.5:
        raise ValueError(f"trim must be from 0 to 0.5, got {trim}")
    usable = [s for s in samples if s.new_tokens > 0 and 0 < s.seconds < inf]
    if len(usable) < MIN_FIT_SAMPLES:
        raise ValueError(
            f"a latency fit needs at least {MIN_FIT_SAMPLES} samples, got {len(usable)}"
        )
    data: Floats = np.array(usable, dtype=np.float64)
    coefficients = _nonnegative_fit(data)
    errors = _relative_errors(coefficients, data)
    keep = max(MIN_FIT_SAMPLES, round(len(data) * (1 - trim)))
    kept = data[np.argsort(errors, kind="stable")[:keep]]
    coefficients = _nonnegative_fit(kept)
    errors = _relative_errors(coefficients, kept)
    seconds = kept[:, 3]
    residual = float(np.sum((errors * seconds) ** 2))
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    report = FitReport(
        samples=len(kept),
        dropped=len(data) - len(kept),
        mape=float(errors.mean()),
        p90_error=float(np.quantile(errors, 0.9)),
        r2=1 - residual / spread if spread > 0 else 0.0,
    )
    return LinearLatency(*coefficients.tolist()), report


def _design(data: Floats) -> Floats:
    return np.column_stack([np.ones(len(data)), data[:, :3]])


def _relative_errors(coefficients: Floats, data: Floats) -> Floats:
    errors: Floats = np.abs(_design(data) @ coefficients / data[:, 3] - 1)
    return errors


def _nonnegative_fit(data: Floats) -> Floats:
    """The relative least-squares coefficients under the bound 0.

    The bounded optimum is the free optimum on its own support, so it is the best of those free
    optima, one per set of columns, that stay within the bound: 15 small problems.
    """
    design = _design(data) / data[:, 3:4]
    scale = design.max(axis=0)
    columns = np.flatnonzero(scale > 0).tolist()
    design[:, columns] /= scale[columns]
    best = np.zeros(design.shape[1])
    least = inf
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            solution = np.linalg.lstsq(design[:, chosen], np.ones(len(data)), rcond=None)[0]
            error = float(np.sum((design[:, chosen] @ solution - 1) ** 2))
            if error < least and solution.min() >= 0:
                least = error
                best = np.zeros(design.shape[1])
                best[list(chosen)] = solution / scale[list(chosen)]
    return best


class OnlineCorrection:
    """Multiplicative correction from real step times: ``f <- theta * f + (1 - theta) * ratio``
    where ``ratio = real / uncorrected prediction`` (ProServe §4.1's beta, with a window of one
    step: theta alone sets how long it remembers).

    One ratio counts at most ``max_ratio`` and the factor stays in
    ``[1 / max_factor, max_factor]``: a step that the machine held up for a second must not stop
    all prefill. Times that are not positive teach nothing.

    Raises:
        ValueError: ``theta`` outside [0, 1), or a bound below 1.
    """

    __slots__ = ("_max_factor", "_max_ratio", "_theta", "factor")

    def __init__(
        self, theta: float = 0.95, max_ratio: float = 4.0, max_factor: float = 4.0
    ) -> None:
        if not 0 <= theta < 1:
            raise ValueError(f"theta must be in [0, 1), got {theta}")
        if not (max_ratio >= 1 and max_factor >= 1):
            raise ValueError(
                f"max_ratio and max_factor must be >= 1, got {max_ratio} and {max_factor}"
            )
        self.factor = 1.0
        self._theta = theta
        self._max_ratio = max_ratio
        self._max_factor = max_factor

    def observe(self, predicted_s: float, real_s: float) -> None:
        """Learn from one step; ``predicted_s`` is the prediction without correction."""
        if not (predicted_s > 0 and real_s > 0):
            return
        ratio = min(max(real_s / predicted_s, 1 / self._max_ratio), self._max_ratio)
        factor = self._theta * self.factor + (1 - self._theta) * ratio
        self.factor = min(max(factor, 1 / self._max_factor), self._max_factor)


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """A fitted model with what it was fitted on, as stored in a JSON file.

    ``key`` names model, engine version and hardware; a profile serves only the key it was made for.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    key: str
    a: float
    b: float
    c: float
    d: float
    report: FitReport | None = None

    @property
    def model(self) -> LinearLatency:
        """The model, uncorrected."""
        return LinearLatency(self.a, self.b, self.c, self.d)

    @classmethod
    def of(cls, key: str, model: LinearLatency, report: FitReport | None) -> LatencyProfile:
        """The profile of a fitted ``model``; its correction is not stored."""
        return cls(key, model.a, model.b, model.c, model.d, report)

    def to_json(self) -> str:
        """JSON text, readable by :meth:`from_json`."""
        return TypeAdapter(LatencyProfile).dump_json(self, indent=2).decode()

    @classmethod
    def from_json(cls, text: str) -> LatencyProfile:
        """Parse a profile.

        Raises:
            ValueError: not JSON, a missing, unknown or mistyped field, or an impossible
                coefficient; the text says which.
        """
        try:
            profile = TypeAdapter(cls).validate_json(text)
            _ = profile.model
        except ValidationError as error:
            details = "; ".join(
                f"{'.'.join(map(str, part['loc'])) or 'text'}: {part['msg']}"
                for part in error.errors(include_url=False)
            )
            raise ValueError(f"not a latency profile: {details}") from error
        except ValueError as error:
            raise ValueError(f"not a latency profile: {error}") from error
        return profile
