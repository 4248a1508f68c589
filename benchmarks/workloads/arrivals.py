"""Arrival processes of generated workloads.

Each is made with its mean ``rate``, requests per second, first, so that an experiment that varies
the rate can be handed the class, or a partial call of it. With one seed a process gives the same
pattern at every rate, only slower or faster; :class:`OnOff` alone draws its phases anew, as their
lengths do not follow the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simulation.workload import Workload

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
        arrivals, phases = rng.spawn(2)
        busy_rate = self.rate * (self.on_s + self.off_s) / self.on_s
        busy_s = np.cumsum(arrivals.exponential(size=count)) / busy_rate
        # On the clock of the bursts, silences come at a constant rate.
        silences = int(phases.poisson(busy_s[-1] / self.on_s)) if count else 0
        starts_s = np.sort(phases.uniform(0, busy_s[-1], silences)) if silences else np.empty(0)
        passed_s = np.concatenate([[0.0], np.cumsum(phases.exponential(self.off_s, silences))])
        times: Times = busy_s + passed_s[np.searchsorted(starts_s, busy_s)]
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
