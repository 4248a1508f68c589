"""How long an output will be: per task class, as a distribution.

002 §4.2 and §5.1 model the output lengths of each task type by a Gaussian that follows the
completed requests, unless the user states a range or a distribution; §5.3 replaces it by the real
length with an error, to see what better prediction would bring. Lengths are tokens of the whole
output.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, erfc, exp, inf, isfinite, log, nan, nextafter, pi, sqrt
from statistics import NormalDist
from typing import Protocol

MAX_TASKS = 1024
"""Most task classes that are followed; the one that completed longest ago goes first."""

MAX_TASK_NAME = 256
"""Longest name of a task class that is followed, characters."""

_TAIL = 8.0
_BELOW_ONE = nextafter(1.0, 0.0)
_NORMAL = NormalDist()


class LengthDistribution(Protocol):
    """The length of an output, with what is known of it before it has ended."""

    @property
    def mean(self) -> float:
        """Expected tokens."""

    def given(self, emitted_tokens: int) -> float:
        """Expected total tokens of an unfinished output with ``emitted_tokens``: always at least
        one more."""

    def quantile(self, share: float, emitted_tokens: int = 0) -> float:
        """Tokens that ``share``, in (0, 1), of those outputs stay within; at least one more. With
        ``share`` near 1, what memory to reserve.

        Raises:
            ValueError: ``share`` outside (0, 1).
        """


class LengthPredictor(Protocol):
    """Predicts output lengths. Not thread-safe."""

    def predict(self, task: str, prompt_tokens: int) -> float:
        """Expected output tokens of a new request of ``task``; nan if nothing is known of it."""

    def observe(self, task: str, output_tokens: int) -> None:
        """A request of ``task`` completed with ``output_tokens``."""


@dataclass(frozen=True, slots=True)
class GaussianLength:
    """A Gaussian of ``mean`` and ``deviation`` tokens.

    What is given by the tokens emitted so far is that of the Gaussian's upper tail. Lengths are
    positive, so the tail above 0 would already be the truth for a new request; but the Gaussian was
    fitted to positive lengths, and its mean is theirs, so with nothing emitted the mean stands.

    Raises:
        ValueError: a mean below 1 or not finite, or a deviation that is negative or not finite.
    """

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        if not (1 <= self.mean < inf and 0 <= self.deviation < inf):
            raise ValueError(
                f"a length needs a finite mean >= 1 and a finite deviation >= 0, "
                f"got {self.mean} and {self.deviation}"
            )

    def given(self, emitted_tokens: int) -> float:
        """``mean + deviation * hazard(z)`` where ``z`` is the emitted tokens' standard score."""
        if emitted_tokens <= 0:
            return self.mean
        least = emitted_tokens + 1.0
        if self.deviation == 0:
            return max(self.mean, least)
        score = (emitted_tokens - self.mean) / self.deviation
        return max(self.mean + self.deviation * _hazard(score), least)

    def quantile(self, share: float, emitted_tokens: int = 0) -> float:
        """Of the tail above ``emitted_tokens``; far out, where the tail is close to exponential,
        of that exponential."""
        _check_share(share)
        least = emitted_tokens + 1.0
        if self.deviation == 0:
            return max(self.mean, least)
        score = (emitted_tokens - self.mean) / self.deviation
        if score > _TAIL:
            tokens = emitted_tokens - log(1 - share) * self.deviation / _hazard(score)
        else:
            # By symmetry, so that a small tail keeps its digits.
            beyond = (1 - share) * 0.5 * erfc(score / sqrt(2))
            tokens = self.mean - self.deviation * _NORMAL.inv_cdf(min(beyond, _BELOW_ONE))
        return max(tokens, least)


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Any length from ``low`` to ``high`` tokens alike, as a user may state it.

    An output that passes ``high`` is expected to have one token more, again and again.

    Raises:
        ValueError: not ``1 <= low <= high``.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a length range needs 1 <= low <= high, got {self.low}, {self.high}")

    @property
    def mean(self) -> float:
        """The middle."""
        return (self.low + self.high) / 2

    def given(self, emitted_tokens: int) -> float:
        """The middle of what is left of the range."""
        least = max(self.low, emitted_tokens + 1)
        return (least + max(self.high, least)) / 2

    def quantile(self, share: float, emitted_tokens: int = 0) -> float:
        """The least of the range's whole numbers that enough outputs stay within."""
        _check_share(share)
        least = max(self.low, emitted_tokens + 1)
        enough = ceil(share * (self.high - least + 1))
        return float(least + max(0, enough - 1))


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share}")


def _hazard(score: float) -> float:
    """Density over tail of the standard normal distribution: the mean of its tail above ``score``.

    Far out both vanish, and the first terms of the asymptotic series stand for their ratio, which
    they miss by less than 1 in 2,000 there.
    """
    if score > _TAIL:
        return score + 1 / score - 2 / score**3
    return sqrt(2 / pi) * exp(-score * score / 2) / erfc(score / sqrt(2))


@dataclass(slots=True)
class _Moments:
    """Mean and variance of what was observed, the last ``memory`` or so counting most."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float, memory: int) -> None:
        """Plain moments of the first ``memory`` values, exponentially forgetting ones after."""
        self.count = min(self.count + 1, memory)
        difference = value - self.mean
        share = 1 / self.count
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference * difference)


class TaskLengths:
    """Predicts by task class: what the user stated, else the Gaussian of completed requests.

    ``O(1)`` per call; memory is bounded by :data:`MAX_TASKS` classes.

    Args:
        stated: distribution per task class; it is not changed by what is observed.
        memory: about how many completed requests of a class count.
        max_tasks: most classes to learn.

    Raises:
        ValueError: ``memory`` below 2 or ``max_tasks`` outside [1, :data:`MAX_TASKS`].
    """

    def __init__(
        self,
        stated: Mapping[str, LengthDistribution] | None = None,
        memory: int = 200,
        max_tasks: int = MAX_TASKS,
    ) -> None:
        if memory < 2:
            raise ValueError(f"memory must be at least 2 requests, got {memory}")
        if not 1 <= max_tasks <= MAX_TASKS:
            raise ValueError(f"max_tasks must be from 1 to {MAX_TASKS}, got {max_tasks}")
        self._stated = dict(stated or {})
        self._memory = memory
        self._max_tasks = max_tasks
        self._learned: OrderedDict[str, _Moments] = OrderedDict()

    def distribution(self, task: str) -> LengthDistribution | None:
        """The distribution of ``task``, or ``None`` if nothing is known of it."""
        stated = self._stated.get(task)
        if stated is not None:
            return stated
        moments = self._learned.get(task)
        if moments is None:
            return None
        return GaussianLength(moments.mean, sqrt(moments.variance))

    def predict(self, task: str, prompt_tokens: int = 0) -> float:
        """Expected output tokens of a new request; nan if nothing is known of ``task``. The prompt
        is not looked at: 002 goes by the task alone."""
        distribution = self.distribution(task)
        return nan if distribution is None else distribution.mean

    def observe(self, task: str, output_tokens: int) -> None:
        """A request of ``task`` completed. One without output, which was aborted, teaches nothing,
        and a class with a name above :data:`MAX_TASK_NAME` characters is not followed."""
        if output_tokens < 1 or task in self._stated or len(task) > MAX_TASK_NAME:
            return
        moments = self._learned.get(task)
        if moments is None:
            moments = self._learned[task] = _Moments()
            if len(self._learned) > self._max_tasks:
                self._learned.popitem(last=False)
        else:
            self._learned.move_to_end(task)
        moments.add(output_tokens, self._memory)


class OracleLengths:
    """Knows the real lengths, up to an error: for experiments (002 §5.3).

    Each prediction is the next real length times a factor drawn evenly from
    ``[1 - error, 1 + error]``, rounded, and at least 1. Deterministic by ``seed``.

    Args:
        lengths: real output tokens of the requests, in the order in which they are asked for; nan
            is predicted when they are used up.
        error: largest relative error, from 0 to 1.

    Raises:
        ValueError: ``error`` out of range.
    """

    def __init__(self, lengths: Iterable[int], error: float, seed: int) -> None:
        if not (isfinite(error) and 0 <= error <= 1):
            raise ValueError(f"error must be from 0 to 1, got {error}")
        self._lengths = iter(lengths)
        self._error = error
        self._chance = random.Random(seed)

    def predict(self, task: str = "", prompt_tokens: int = 0) -> float:
        """The next request's length, with its error."""
        real = next(self._lengths, None)
        if real is None:
            return nan
        factor = 1 + self._chance.uniform(-self._error, self._error)
        return float(max(1, round(real * factor)))

    def observe(self, task: str, output_tokens: int) -> None:
        """Nothing is learned: all is known."""
