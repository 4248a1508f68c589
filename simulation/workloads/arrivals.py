"""Arrival processes of generated workloads.

Each is made with its mean ``rate``, requests per second, first, so that an experiment that varies
the rate can be given the class, or a partial call of it. With one seed a process gives the same
pattern at every rate, only slower or faster; only of :class:`OnOff` the phases stay as long, with
more or fewer requests in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sluice.simulation.workload import Workload

Times = NDArray[np.float64]


class ArrivalProcess(Protocol):
    """When requests arrive."""

    @property
    def description(self) -> str:
        """The process and its parameters in words."""

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Arrival times of ``count`` requests, seconds, ascending from 0 or later."""


MakeArrivals = Callable[[float], ArrivalProcess]
"""Makes a process of a mean rate."""


_GRID = 200_001
"""Points between which the sum of a varying rate is taken to be straight."""


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    rate: float

    def __post_init__(self) -> None:
        _positive(rate=self.rate)

    @property
    def description(self) -> str:
        """The process in words."""
        return f"Poisson at {self.rate:.4g} requests/s"

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Running sums of exponential gaps."""
        return np.cumsum(rng.exponential(size=count)) / self.rate


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gaps with a Gamma distribution.

    Args:
        rate: mean requests per second.
        cv: standard deviation of the gaps over their mean: 1 is Poisson, above 1 is bursty.
    """

    rate: float
    cv: float = 2.0

    def __post_init__(self) -> None:
        _positive(rate=self.rate, cv=self.cv)

    @property
    def description(self) -> str:
        """The process in words."""
        return f"Gamma gaps of variation {self.cv:g} at {self.rate:.4g} requests/s"

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Running sums of Gamma gaps of shape ``1 / cv**2``."""
        shape = self.cv**-2
        return np.cumsum(rng.gamma(shape, size=count)) / (shape * self.rate)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Bursts and silence in turn, both of exponential length, with Poisson arrivals in a burst.

    The defaults are the first half of the Azure 2023 code trace, cut where no request came for
    5 s: bursts of 17 s, silence of 39 s. Within its bursts the trace is less even than Poisson (the
    gaps deviate by 2.2 times their mean), for which there is :class:`Recorded`.

    The first request comes in a burst. A run of few bursts has a rate of its own: 600 requests at
    5 a second came at 0.45 to 3.3 times that in nine of ten draws, 3,000 at 0.66 to 1.6 times. The
    mean of many seeds has the stated one.

    Args:
        rate: mean requests per second over bursts and silence; in a burst it is
            ``rate * (on_s + off_s) / on_s``.
        on_s: mean length of a burst, seconds.
        off_s: mean length of a silence, seconds.

    Raises:
        ValueError: a value that is not positive and finite, or fewer than one request in 100
            bursts.
    """

    rate: float
    on_s: float = 17.0
    off_s: float = 39.0

    def __post_init__(self) -> None:
        _positive(rate=self.rate, on_s=self.on_s, off_s=self.off_s)
        if self.rate * (self.on_s + self.off_s) < 0.01:
            raise ValueError(f"a rate of {self.rate} leaves 100 bursts without a request")

    @property
    def description(self) -> str:
        """The process in words."""
        return (
            f"bursts of {self.on_s:g} s and silences of {self.off_s:g} s on average, both "
            f"exponential, Poisson in a burst, {self.rate:.4g} requests/s over all"
        )

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Poisson arrivals on a clock that runs in bursts only, moved on by the silences."""
        arrivals, bursts, silences = rng.spawn(3)
        busy_rate = self.rate * (self.on_s + self.off_s) / self.on_s
        busy_s = np.cumsum(arrivals.exponential(size=count)) / busy_rate
        # Twice as many as the mean, and some: bursts of every seed last long enough.
        phases = 50 + int(2 * busy_s[-1] / self.on_s) if count else 0
        ends_s = np.cumsum(bursts.exponential(self.on_s, phases))
        passed_s = np.concatenate([[0.0], np.cumsum(silences.exponential(self.off_s, phases))])
        times: Times = busy_s + passed_s[np.searchsorted(ends_s, busy_s)]
        return times


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Poisson arrivals whose rate swings like that of a day: a cosine, least at the start.

    Args:
        rate: mean requests per second over whole periods.
        period_s: length of the day, seconds.
        swing: how far the rate goes above and below its mean, as a share of it, from 0 to below 1.
        begins: where in the day it starts, as a share of the period.

    Raises:
        ValueError: a value that is not allowed.
    """

    rate: float
    period_s: float = 86_400.0
    swing: float = 0.8
    begins: float = 0.0

    def __post_init__(self) -> None:
        _positive(rate=self.rate, period_s=self.period_s)
        if not (0 <= self.swing < 1 and 0 <= self.begins < 1):
            raise ValueError(
                f"swing and begins must be from 0 to below 1, got {self.swing} and {self.begins}"
            )

    @property
    def description(self) -> str:
        """The process in words."""
        return (
            f"Poisson whose rate swings by {self.swing:.0%} around {self.rate:.4g} requests/s in "
            f"{self.period_s:g} s"
        )

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Poisson arrivals at rate 1, moved to when the sum of the real rate is theirs."""
        sums = np.cumsum(rng.exponential(size=count)) / self.rate
        if not count:
            return sums
        turn = 2 * np.pi / self.period_s
        start = self.period_s * self.begins
        # The sum of the rate is within period * swing / 2 pi of the time.
        grid = np.linspace(0.0, sums[-1] + self.period_s, _GRID)
        wave = np.sin(turn * (grid + start)) - np.sin(turn * start)
        times: Times = np.interp(sums, grid - self.swing * wave / turn, grid)
        return times


@dataclass(frozen=True, slots=True)
class Surges:
    """A steady load with surges: two rates in turn, each for an exponential time, Poisson in both.

    Args:
        rate: mean requests per second over all.
        factor: rate of a surge over that between surges, above 1.
        surge_s, between_s: mean lengths of a surge and of the time between two, seconds.

    Raises:
        ValueError: a value that is not positive and finite, or a factor that is not above 1.
    """

    rate: float
    factor: float = 4.0
    surge_s: float = 120.0
    between_s: float = 240.0

    def __post_init__(self) -> None:
        _positive(rate=self.rate, surge_s=self.surge_s, between_s=self.between_s)
        if not 1 < self.factor < inf:
            raise ValueError(f"factor must be above 1 and finite, got {self.factor}")

    @property
    def description(self) -> str:
        """The process in words."""
        return (
            f"surges of {self.surge_s:g} s on average at {self.factor:g} times the rate of the "
            f"{self.between_s:g} s between them, {self.rate:.4g} requests/s over all"
        )

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Poisson arrivals at rate 1, moved to when the sum of the real rate is theirs."""
        arrivals, phases = rng.spawn(2)
        sums = np.cumsum(arrivals.exponential(size=count))
        mean = (self.between_s + self.factor * self.surge_s) / (self.between_s + self.surge_s)
        low = self.rate / mean
        turns, reached = [0.0], [0.0]
        while count and reached[-1] < sums[-1]:
            surge = len(turns) % 2 == 0
            lasts_s = phases.exponential(self.surge_s if surge else self.between_s)
            turns.append(turns[-1] + lasts_s)
            reached.append(reached[-1] + lasts_s * low * (self.factor if surge else 1.0))
        times: Times = np.interp(sums, reached, turns)
        return times


@dataclass(frozen=True, slots=True)
class Even:
    """One request every ``1 / rate`` seconds, the first at 0."""

    rate: float

    def __post_init__(self) -> None:
        _positive(rate=self.rate)

    @property
    def description(self) -> str:
        """The process in words."""
        return f"evenly at {self.rate:.4g} requests/s"

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Multiples of the gap."""
        return np.arange(count) / self.rate


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Every request at 0."""

    @property
    def description(self) -> str:
        """The process in words."""
        return "all at once"

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Zeros."""
        return np.zeros(count)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The arrival times of a trace, stretched to a rate: ``partial(Recorded, trace=workload)``.

    Args:
        rate: mean requests per second after stretching.
        trace: the workload whose times to take.

    Raises:
        ValueError: the trace has no rate of its own: fewer than two requests, or all at once.
    """

    rate: float
    trace: Workload

    def __post_init__(self) -> None:
        _positive(rate=self.rate)
        if not 0 < self.trace.rate < inf:
            raise ValueError(f"trace {self.trace.name} has no rate: its requests come at once")

    @property
    def description(self) -> str:
        """The process in words."""
        return f"times of {self.trace.name}, stretched to {self.rate:.4g} requests/s"

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """The first ``count`` times.

        Raises:
            ValueError: the trace has fewer requests.
        """
        if count > len(self.trace):
            raise ValueError(f"trace {self.trace.name} has {len(self.trace)} requests, not {count}")
        recorded = np.array([arrival.arrival_s for arrival in self.trace.arrivals[:count]])
        return recorded * (self.trace.rate / self.rate)
