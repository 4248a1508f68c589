"""Step-time model of an engine: prediction, fit, online correction, and its stored profile.

``T = a + b * new + c * context + d * quadratic`` where, over the batch's sequences with ``n`` new
tokens on ``k`` computed ones, ``new = sum n``, ``context = sum (k + n)`` and
``quadratic = sum n * (k + n / 2)``. FairBatching §3.2 is the model without ``d``; the last term is
the attention of long prefills (ProServe Eq. 4). All times are seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np


class StepSample(NamedTuple):
    """One observed engine step: its work and its real time.

    ``new_tokens``, ``context_tokens`` and ``quadratic`` are the sums of this module's docstring.
    """

    new_tokens: float
    context_tokens: float
    quadratic: float
    seconds: float


class LatencyModel(Protocol):
    """Predicts step times as a fixed part plus a sum over the batch's sequences."""

    @property
    def fixed_s(self) -> float:
        """Time of a step before any token is counted."""

    def work_s(self, new_tokens: int, computed_tokens: int) -> float:
        """Marginal time of ``new_tokens`` of one sequence on ``computed_tokens`` computed ones."""


class LinearLatency:
    """``a + b * new + c * context + d * quadratic``, times a correction factor.

    Args:
        a: seconds per step. b: seconds per new token. c: seconds per context token.
        d: seconds per unit of the quadratic term.
        correction: factor on every prediction, see :class:`OnlineCorrection`.

    Raises:
        ValueError: a negative or non-finite coefficient, or all of them zero.
    """

    __slots__ = ("_a", "_b", "_c", "_d", "a", "b", "c", "correction", "d")

    def __init__(
        self, a: float, b: float, c: float = 0.0, d: float = 0.0, correction: float = 1.0
    ) -> None:
        coefficients = (a, b, c, d)
        if not all(0 <= value < float("inf") for value in coefficients):
            raise ValueError(f"latency coefficients must be finite and >= 0, got {coefficients}")
        if a + b <= 0 or not 0 < correction < float("inf"):
            raise ValueError("a latency model must predict a positive time")
        self.a, self.b, self.c, self.d = coefficients
        self.correction = correction
        # Scaled once here: work_s() runs for every request of every plan.
        self._a, self._b, self._c, self._d = (value * correction for value in coefficients)

    def __repr__(self) -> str:
        return (
            f"LinearLatency(a={self.a:.3g}, b={self.b:.3g}, c={self.c:.3g}, d={self.d:.3g}, "
            f"correction={self.correction:.3g})"
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LinearLatency)
            and self._key() == other._key()
        )

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[float, ...]:
        return (self.a, self.b, self.c, self.d, self.correction)

    @property
    def fixed_s(self) -> float:
        return self._a

    def work_s(self, new_tokens: int, computed_tokens: int) -> float:
        context = computed_tokens + new_tokens
        work = self._b * new_tokens + self._c * context
        if self._d:
            work += self._d * new_tokens * (computed_tokens + 0.5 * new_tokens)
        return work

    def step_s(self, new_tokens: float, context_tokens: float, quadratic: float = 0.0) -> float:
        """Time of a whole step from its sums."""
        return (
            self._a + self._b * new_tokens + self._c * context_tokens + self._d * quadratic
        )

    def tokens_within(self, seconds: float, computed_tokens: int) -> int:
        """Most new tokens of one sequence on ``computed_tokens`` whose work fits ``seconds``."""
        left = seconds - self._c * computed_tokens
        if left <= 0:
            return 0
        linear = self._b + self._c + self._d * computed_tokens
        half = 0.5 * self._d
        if half > 0:
            tokens = 2 * left / (linear + (linear * linear + 4 * half * left) ** 0.5)
        elif linear > 0:
            tokens = left / linear
        else:
            return 1 << 30
        return int(tokens + 1e-9)

    def corrected(self, correction: float) -> LinearLatency:
        """The same model with another correction factor."""
        return LinearLatency(self.a, self.b, self.c, self.d, correction)


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well a fitted model explains its samples.

    ``mape`` and ``p90_error`` are the mean and the 90th percentile of
    ``|predicted - real| / real``; ``r2`` is of the seconds; ``dropped`` counts outliers left out
    of the fit and kept in none of the errors.
    """

    samples: int
    dropped: int
    mape: float
    p90_error: float
    r2: float


def fit(samples: Sequence[StepSample], trim: float = 0.1) -> tuple[LinearLatency, FitReport]:
    """Least squares on relative errors, with coefficients >= 0.

    The worst ``trim`` share of the samples by relative error is left out and the rest is fitted
    again: a shared machine makes outliers that are not the engine's. Relative errors, because a
    plan of 5 ms needs its 5 % as much as one of 200 ms.

    Raises:
        ValueError: fewer than 8 usable samples.
    """
    data = np.array([s for s in samples if s.seconds > 0 and s.new_tokens > 0], dtype=float)
    if len(data) < 8:
        raise ValueError(f"a latency fit needs at least 8 samples, got {len(data)}")
    kept = data
    coefficients = _nonnegative_fit(kept)
    if trim > 0:
        errors = _relative_errors(coefficients, data)
        kept = data[np.argsort(errors)[: max(8, round(len(data) * (1 - trim)))]]
        coefficients = _nonnegative_fit(kept)
    errors = _relative_errors(coefficients, kept)
    seconds = kept[:, 3]
    residual = float(np.sum((_predict(coefficients, kept) - seconds) ** 2))
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    report = FitReport(
        samples=len(kept),
        dropped=len(data) - len(kept),
        mape=float(errors.mean()),
        p90_error=float(np.quantile(errors, 0.9)),
        r2=1 - residual / spread if spread > 0 else 0.0,
    )
    return LinearLatency(*(float(value) for value in coefficients)), report


def _design(data: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(data)), data[:, :3]])


def _predict(coefficients: np.ndarray, data: np.ndarray) -> np.ndarray:
    return np.asarray(_design(data) @ coefficients)


def _relative_errors(coefficients: np.ndarray, data: np.ndarray) -> np.ndarray:
    return np.abs(_predict(coefficients, data) - data[:, 3]) / data[:, 3]


def _nonnegative_fit(data: np.ndarray) -> np.ndarray:
    """Relative least squares; columns that come out negative are dropped, most negative first."""
    design = _design(data) / data[:, 3:4]
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    design = design / scale
    active = [column for column in range(4) if np.any(design[:, column])]
    target = np.ones(len(data))
    while True:
        solution = np.zeros(4)
        solution[active] = np.linalg.lstsq(design[:, active], target, rcond=None)[0]
        worst = min(active, key=lambda column: solution[column])
        if solution[worst] >= 0:
            return np.asarray(solution / scale)
        active.remove(worst)


class OnlineCorrection:
    """Multiplicative correction from real step times: ``f <- theta * f + (1 - theta) * ratio``
    where ``ratio = real / uncorrected prediction`` (ProServe's beta, one window per step).

    One ratio counts at most ``max_ratio`` and the factor stays in
    ``[1 / max_factor, max_factor]``: a step that the machine held up for a second must not stop
    all prefill.
    """

    __slots__ = ("_max_factor", "_max_ratio", "_theta", "factor")

    def __init__(
        self, theta: float = 0.95, max_ratio: float = 4.0, max_factor: float = 4.0
    ) -> None:
        if not 0 <= theta < 1:
            raise ValueError(f"theta must be in [0, 1), got {theta}")
        self.factor = 1.0
        self._theta = theta
        self._max_ratio = max_ratio
        self._max_factor = max_factor

    def observe(self, predicted_s: float, real_s: float) -> None:
        """Learn from one step; ``predicted_s`` is the prediction without correction."""
        if predicted_s <= 0 or real_s <= 0:
            return
        ratio = min(max(real_s / predicted_s, 1 / self._max_ratio), self._max_ratio)
        factor = self._theta * self.factor + (1 - self._theta) * ratio
        self.factor = min(max(factor, 1 / self._max_factor), self._max_factor)


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """A fitted model with what it was fitted on, as stored in a JSON file.

    ``key`` names model, engine version and hardware; a profile serves only the key it was made for.
    """

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
        """The profile of a fitted ``model``."""
        return cls(key, model.a, model.b, model.c, model.d, report)

    def to_json(self) -> str:
        """JSON text, readable by :meth:`from_json`."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> LatencyProfile:
        """Parse a profile.

        Raises:
            ValueError: not JSON, a missing or unknown field, or an impossible coefficient.
        """
        try:
            fields = json.loads(text)
            report = fields.get("report")
            profile = cls(**fields)
            if report is not None:
                profile = replace(profile, report=FitReport(**report))
            _ = profile.model
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"not a latency profile: {error}") from error
        return profile
