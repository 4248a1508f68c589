"""Means with confidence ranges over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

METHOD = (
    "mean over seeds; the range is the 95 % t-interval of that mean, with the seeds as independent "
    "samples"
)

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""

_T_MORE = 1.96


class Estimate(NamedTuple):
    """A mean over seeds.

    Attributes:
        mean: of the seeds that have the figure; nan without any.
        half_width: of the 95 % range; nan with fewer than two.
        seeds: how many have the figure.
    """

    mean: float
    half_width: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The mean of ``values``, one per seed; nan means that a seed lacks the figure. An infinite
        value makes the mean infinite and the range unknown."""
        known = [value for value in values if not isnan(value)]
        if not known:
            return cls(nan, nan, 0)
        mean = fmean(known)
        if len(known) < 2 or abs(mean) == inf:
            return cls(mean, nan, len(known))
        freedom = len(known) - 1
        quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else _T_MORE
        return cls(mean, quantile * stdev(known) / sqrt(len(known)), len(known))

    def shown(self, digits: int = 3) -> str:
        """As it stands in a table: ``0.972 ± 0.004``, or ``-`` where there is nothing."""
        if isnan(self.mean):
            return "-"
        mean = f"{self.mean:.{digits}f}"
        return mean if isnan(self.half_width) else f"{mean} ± {self.half_width:.{digits}f}"
