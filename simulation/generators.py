"""Generated workloads: distributions of lengths, arrival processes, and requests of both.

A seed gives the same arrivals at every rate, scaled in time (of :class:`OnOff` the phases stay). No
log-normal has the mean, quantile and deviation that papers print, so a log-normal body cut at the
quantile ``cap`` meets a log-uniform tail up to ``reach * cap``; the body is solved so that the
whole has the printed mean and deviation, or where only a mean is printed is cut at its quantile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import erfc, exp, inf, log, pi, sqrt
from statistics import NormalDist
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Stage, Workload

_STEPS = 2000
"""Points of the table of quantiles that is drawn from."""

_FURTHEST = 30.0
"""Furthest place of the cut, in standard deviations of the logarithm."""

_P99_REACH = 1.25
_P90_REACH = 3.0

Lengths = NDArray[np.int64]


class Distribution(Protocol):
    """Lengths in tokens."""

    @property
    def mean(self) -> float:
        """Tokens."""

    def draw(self, count: int, rng: np.random.Generator) -> Lengths:
        """``count`` independent lengths."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths in tokens, see the module. ``cap`` is where body and tail meet, ``share`` the body's
    mass, ``reach`` the longest over ``cap``; ``cut`` and ``sigma`` place the cap in the body's
    normal distribution of logarithms (``sigma`` 0: every length is ``cap``)."""

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
        """With this mean, P99 and deviation; a deviation that is too large gives the widest one."""
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
    """Lengths at ``0, 1/_STEPS, .. 1``; the first stands half a step in."""
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


Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """When requests arrive. Raises :class:`ValueError`: a rate or a length of time is not positive
    and finite."""

    words: ClassVar[str]
    """The process and its parameters, ``{0}``, in words."""

    def __post_init__(self) -> None:
        for name in ("rate", "cv", "on_s", "off_s", "period_s", "surge_s", "between_s"):
            value = getattr(self, name, 1.0)
            if not 0 < value < inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")

    @property
    def description(self) -> str:
        """The process in words."""
        return self.words.format(self)

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Arrival times of ``count`` requests, seconds, ascending from 0 or later."""
        raise NotImplementedError


MakeArrivals = Callable[[float], ArrivalProcess]
"""Makes a process of a mean rate."""


_GRID = 200_001
"""Points between which the sum of a varying rate is taken to be straight."""


@dataclass(frozen=True, slots=True)
class Poisson(ArrivalProcess):
    """Independent arrivals: exponential gaps."""

    words = "Poisson at {0.rate:.4g} requests/s"
    rate: float

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Running sums of exponential gaps."""
        return np.cumsum(rng.exponential(size=count)) / self.rate


@dataclass(frozen=True, slots=True)
class Gamma(ArrivalProcess):
    """Gamma gaps of variation ``cv``: 1 is Poisson, above 1 is bursty."""

    words = "Gamma gaps of variation {0.cv:g} at {0.rate:.4g} requests/s"
    rate: float
    cv: float = 2.0

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Running sums of Gamma gaps of shape ``1 / cv**2``."""
        shape = self.cv**-2
        return np.cumsum(rng.gamma(shape, size=count)) / (shape * self.rate)


@dataclass(frozen=True, slots=True)
class OnOff(ArrivalProcess):
    """Poisson bursts and silence in turn, both of exponential length; raises :class:`ValueError`.

    The defaults are the first half of the Azure 2023 code trace, cut at silences of 5 s. The rate
    of few bursts varies: 600 requests came at 0.45 to 3.3 times it in nine of ten draws."""

    words = (
        "bursts of {0.on_s:g} s and silences of {0.off_s:g} s on average, both exponential, "
        "Poisson in a burst, {0.rate:.4g} requests/s over all"
    )
    rate: float
    on_s: float = 17.0
    off_s: float = 39.0

    def __post_init__(self) -> None:
        ArrivalProcess.__post_init__(self)
        if self.rate * (self.on_s + self.off_s) < 0.01:
            raise ValueError(f"a rate of {self.rate} leaves 100 bursts without a request")

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
class Diurnal(ArrivalProcess):
    """Poisson arrivals whose rate is a cosine, least at the start, with amplitude ``swing`` of its
    mean; it ``begins`` at this share of the period. Raises :class:`ValueError`."""

    words = (
        "Poisson whose rate swings by {0.swing:.0%} around {0.rate:.4g} requests/s in "
        "{0.period_s:g} s"
    )
    rate: float
    period_s: float = 86_400.0
    swing: float = 0.8
    begins: float = 0.0

    def __post_init__(self) -> None:
        ArrivalProcess.__post_init__(self)
        if not (0 <= self.swing < 1 and 0 <= self.begins < 1):
            raise ValueError(
                f"swing and begins must be from 0 to below 1, got {self.swing} and {self.begins}"
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
class Surges(ArrivalProcess):
    """A steady load with surges of ``factor`` (> 1) times its rate, of exponential length."""

    words = (
        "surges of {0.surge_s:g} s on average at {0.factor:g} times the rate of the "
        "{0.between_s:g} s between them, {0.rate:.4g} requests/s over all"
    )
    rate: float
    factor: float = 4.0
    surge_s: float = 120.0
    between_s: float = 240.0

    def __post_init__(self) -> None:
        ArrivalProcess.__post_init__(self)
        if not 1 < self.factor < inf:
            raise ValueError(f"factor must be above 1 and finite, got {self.factor}")

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
class AtOnce(ArrivalProcess):
    """Every request at 0."""

    words = "all at once"

    def times(self, count: int, rng: np.random.Generator) -> Times:
        """Zeros."""
        return np.zeros(count)


Objective = Callable[[int], SLO]
"""The objective of a request, or of a stage, by its new prompt tokens."""


def always(slo: SLO) -> Objective:
    """The same objective for every length."""
    return lambda _: slo


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A TTFT objective as a multiple of the prompt's time alone (SLOs-Serve Table 3), at least
    ``floor_s``: for short prompts it can be less than one step of a full batch."""

    factor: float
    zero_load_s: Callable[[int], float]
    floor_s: float
    tpot_s: float

    def __call__(self, prompt_tokens: int) -> SLO:
        """The objective of a prompt of ``prompt_tokens`` new tokens."""
        ttft_s = max(self.factor * self.zero_load_s(prompt_tokens), self.floor_s)
        return SLO(ttft_s=ttft_s, tpot_s=self.tpot_s)


@dataclass(frozen=True, slots=True)
class Task:
    """Requests of one stage; prompt and output lengths are independent."""

    name: str
    prompt: Distribution
    output: Distribution
    objective: Objective
    share: float = 1.0

    def requests(self, count: int, rng: np.random.Generator) -> list[Arrival]:
        """``count`` requests, all at time 0."""
        prompts = self.prompt.draw(count, rng).tolist()
        outputs = self.output.draw(count, rng).tolist()
        return [
            Arrival(0.0, prompt, output, self.objective(prompt), self.name)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Requests that think and then answer: two stages, the second without a new prompt. The
    answer's first token is due as a decode step."""

    name: str
    prompt: LengthDistribution
    thinking: LengthDistribution
    answer: LengthDistribution
    objective: Objective
    answer_tpot_s: float
    share: float = 1.0

    def requests(self, count: int, rng: np.random.Generator) -> list[Arrival]:
        """``count`` requests, all at time 0."""
        prompts = self.prompt.draw(count, rng).tolist()
        thinking = self.thinking.draw(count, rng).tolist()
        answers = self.answer.draw(count, rng).tolist()
        slo = SLO(ttft_s=self.answer_tpot_s, tpot_s=self.answer_tpot_s)
        return [
            Arrival.of_stages(
                0.0, prompt, (Stage(first, self.objective(prompt)), Stage(second, slo)), self.name
            )
            for prompt, first, second in zip(prompts, thinking, answers, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """Rounds of prefill and decode, the last of which is the answer: a rounded normal number from 1
    to ``most_rounds``, with independent lengths. The tools take no time."""

    name: str
    prompt: LengthDistribution
    output: LengthDistribution
    calling: Objective
    answering: Objective
    mean_rounds: float
    std_rounds: float
    most_rounds: int = 8
    share: float = 1.0

    def requests(self, count: int, rng: np.random.Generator) -> list[Arrival]:
        """``count`` requests, all at time 0."""
        drawn = np.rint(rng.normal(self.mean_rounds, self.std_rounds, count))
        rounds = np.clip(drawn, 1, self.most_rounds).astype(int).tolist()
        prompts = iter(self.prompt.draw(sum(rounds), rng).tolist())
        outputs = iter(self.output.draw(sum(rounds), rng).tolist())
        return [self._request(number, prompts, outputs) for number in rounds]

    def _request(self, rounds: int, prompts: Iterator[int], outputs: Iterator[int]) -> Arrival:
        entering = [next(prompts) for _ in range(rounds)]
        objectives = [self.calling] * (rounds - 1) + [self.answering]
        stages = [
            Stage(next(outputs), objective(prompt), prompt if index else 0)
            for index, (prompt, objective) in enumerate(zip(entering, objectives, strict=True))
        ]
        return Arrival.of_stages(0.0, entering[0], stages, self.name)


TaskClass = Task | Reasoning | ToolLoop
"""Requests of one kind; ``name``: the task class in each arrival; ``share``: relative to the
others'."""


def generate(
    name: str,
    tasks: Sequence[TaskClass],
    arrivals: ArrivalProcess,
    requests: int,
    seed: int,
    description: str = "",
) -> Workload:
    """``requests`` requests of task classes drawn by share; with one seed, another rate or process
    brings the same requests at other times. Raises :class:`ValueError`."""
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    shares = np.array([task.share for task in tasks], dtype=np.float64)
    if not len(shares) or not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ValueError(f"workload {name} needs tasks with positive shares, got {shares.tolist()}")
    clock, chooser, *streams = np.random.default_rng(seed).spawn(2 + len(tasks))
    times = arrivals.times(requests, clock).tolist()
    kinds = chooser.choice(len(tasks), size=requests, p=shares / shares.sum())
    drawn = [
        iter(task.requests(int((kinds == kind).sum()), stream))
        for kind, (task, stream) in enumerate(zip(tasks, streams, strict=True))
    ]
    return Workload(
        name,
        tuple(
            next(drawn[kind])._replace(arrival_s=at_s)
            for at_s, kind in zip(times, kinds.tolist(), strict=True)
        ),
        scaling=f"generated: {arrivals.description} (seed {seed})",
        description=description,
    )
