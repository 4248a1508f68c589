"""Distributions of prompt and output lengths that match a published table.

A table gives a mean, one high quantile, and at times the standard deviation. No log-normal has
the three that the papers print: some of their columns are cut off by a context limit, others have
a heavier tail. We therefore take a body and a tail that meet at the printed quantile ``cap``:

* below it, a log-normal truncated at ``cap``;
* above it, log-uniform from ``cap`` to ``reach * cap``, with the mass that the quantile leaves.

The quantile holds by construction. The body's two parameters are then solved so that the mean,
and the standard deviation where there is one, of the whole are those of the table; where only the
mean is printed, the body is cut at the same quantile as the whole. Lengths are rounded to whole
tokens, at least 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import erfc, exp, log, pi, sqrt
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_STEPS = 2000
"""Points of the table of quantiles that is drawn from."""

_FURTHEST = 30.0
"""Furthest place of the cut, in standard deviations of the logarithm; at minus this the body is
a power law to within 0.1 %, the most spread-out one of its mean."""

_P99_REACH = 1.25
_P90_REACH = 3.0

Lengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths in tokens, see the module. Made by one of its constructors.

    Args:
        mean: mean length, tokens.
        cap: where body and tail meet, tokens.
        share: mass of the body, in (0, 1].
        reach: the longest length over ``cap``, >= 1.
        cut: the cap's place in the body's normal distribution of logarithms.
        sigma: standard deviation of that distribution; 0: every length is ``cap``.
    """

    mean: float
    cap: float
    share: float = 1.0
    reach: float = 1.0
    cut: float = 0.0
    sigma: float = 0.0

    @classmethod
    def fixed(cls, tokens: int) -> Self:
        """Every length is ``tokens``."""
        if tokens < 1:
            raise ValueError(f"a length must be at least 1 token, got {tokens}")
        return cls(tokens, tokens)

    @classmethod
    @lru_cache(maxsize=64)
    def of_p99(cls, mean: float, p99: float, std: float) -> Self:
        """With this mean, 99th percentile and standard deviation.

        A spread beyond that of every such distribution gives the widest one; for the papers'
        columns its standard deviation is at most 0.3 % below the printed one.
        """
        share, reach = 0.99, _P99_REACH
        body_mean = _body_moment(mean, share, p99, reach, 1)
        body_square = _body_moment(mean**2 + std**2, share, p99, reach, 2)
        if not 0 < body_mean < p99 or body_square <= body_mean**2:
            raise ValueError(f"no lengths have mean {mean}, P99 {p99} and deviation {std}")

        def too_narrow(cut: float) -> bool:
            sigma = _sigma(body_mean / p99, cut)
            return p99**2 * _moment(2, cut, sigma) < body_square

        # A cut further up means a narrower body.
        cut = _bisected(too_narrow, _FURTHEST, -_FURTHEST)
        return cls(mean, p99, share, reach, cut, _sigma(body_mean / p99, cut))

    @classmethod
    def of_p90(cls, mean: float, p90: float) -> Self:
        """With this mean and 90th percentile."""
        share, reach = 0.9, _P90_REACH
        body_mean = _body_moment(mean, share, p90, reach, 1)
        if not 0 < body_mean < p90:
            raise ValueError(f"no lengths with mean {mean} and P90 {p90} reach {reach} times P90")
        cut = NormalDist().inv_cdf(share)
        return cls(mean, p90, share, reach, cut, _sigma(body_mean / p90, cut))

    def draw(self, count: int, rng: np.random.Generator) -> Lengths:
        """``count`` independent lengths, tokens."""
        places = rng.random(count) * _STEPS
        lengths = np.interp(places, np.arange(_STEPS + 1), _quantiles(self))
        tokens: Lengths = np.maximum(np.rint(lengths), 1).astype(np.int64)
        return tokens


@lru_cache(maxsize=64)
def _quantiles(of: LengthDistribution) -> NDArray[np.float64]:
    """Lengths at ``0, 1/_STEPS, .. 1``. The first stands half a step in, as the body's
    logarithm has no lower end."""
    normal = NormalDist()
    below = erfc(-of.cut / sqrt(2)) / 2
    values = []
    for step in range(_STEPS + 1):
        place = max(step, 0.5) / _STEPS
        if place > of.share:
            above = (place - of.share) / (1 - of.share)
            values.append(of.cap * of.reach**above)
        else:
            deviation = normal.inv_cdf(min(place / of.share * below, 1 - 1e-12))
            values.append(of.cap * exp(of.sigma * (deviation - of.cut)))
    return np.array(values)


def _body_moment(moment: float, share: float, cap: float, reach: float, power: int) -> float:
    """What the body's moment must be for the whole's to be ``moment``."""
    tail = cap**power * (reach**power - 1) / (power * log(reach))
    return (moment - (1 - share) * tail) / share


def _moment(power: int, cut: float, sigma: float) -> float:
    """``E[(X / cap)**power]`` of a log-normal truncated at ``cap``: a ratio of Mills ratios."""
    return _mills(power * sigma - cut) / _mills(-cut)


def _sigma(mean: float, cut: float) -> float:
    """Deviation at which the body's mean is ``mean`` caps; a wider body has a lower mean."""
    return _bisected(lambda sigma: _moment(1, cut, sigma) > mean, 0.0, 1e4)


def _mills(x: float) -> float:
    """``(1 - Phi(x)) / phi(x)`` of the standard normal distribution."""
    if x > 20:
        return (1 - (1 - 3 / x**2) / x**2) / x
    return erfc(x / sqrt(2)) * sqrt(pi / 2) * exp(x * x / 2)


def _bisected(before: Callable[[float], Any], low: float, high: float) -> float:
    """Where ``before`` turns from true, at ``low``, to false, at ``high``."""
    for _ in range(60):
        middle = (low + high) / 2
        if before(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2
