"""How long outputs turn out, by service class and tenant, where end-to-end times are promised.

002 §4.2 models the lengths of a task class by a Gaussian. Our reading differs for promises: a
Gaussian's tail is too short, so a promise takes the quantile of the lengths themselves. Outputs
that ``max_tokens`` or the client cut off count until then (product-limit estimate, Kaplan & Meier
1958); else short ``max_tokens`` would teach short outputs.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import erfc, exp, inf, isfinite, log, nan, pi, sqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.assumptions import UNKNOWN_OUTPUT_TOKENS
from sluice.scheduling.recent import used
from sluice.scheduling.request.job import RouteQuery

# How long an output will be: per task class, as a distribution.
#
# 002 §4.2 and §5.1 model the output lengths of each task type by a Gaussian that follows the
# completed requests; §5.3 replaces it by the real length with an error, to see what better
# prediction would bring. Lengths are tokens of the whole output.

MAX_TASKS = 1024
"""Most task classes that are followed; the one that completed longest ago goes first."""

MAX_TASK_NAME = 256
"""Longest name of a task class that is followed, characters."""

_TAIL = 8.0


@dataclass(frozen=True, slots=True)
class GaussianLength:
    """A Gaussian of ``mean`` and ``deviation`` tokens. Given tokens emitted, the mean of its upper
    tail; with none, its own mean, as it was fitted to positive lengths.

    Raises ``ValueError`` for a mean below 1, a negative deviation, or one that is not finite."""

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


def _hazard(score: float) -> float:
    """Mean of the standard normal tail above ``score``. Far out, where density and tail vanish, the
    asymptotic series stands for their ratio, within 1 in 2,000."""
    if score > _TAIL:
        return score + 1 / score - 2 / score**3
    return sqrt(2 / pi) * exp(-score * score / 2) / erfc(score / sqrt(2))


REMEMBERED: Final = 200
"""About how many of the latest outputs of a task count for its Gaussian."""


@dataclass(slots=True)
class _Moments:
    """Mean and variance of what was observed, the last :data:`REMEMBERED` or so counting most."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        """Plain moments of the first values, exponentially forgetting ones after."""
        self.count = min(self.count + 1, REMEMBERED)
        difference = value - self.mean
        share = 1 / self.count
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference * difference)


class TaskLengths:
    """Predicts by task class: the Gaussian of about the last ``REMEMBERED`` requests. ``O(1)``
    per call; at most ``MAX_TASKS`` classes are learned."""

    def __init__(self) -> None:
        # By task, of the lengths and of their logarithms.
        self._learned: OrderedDict[str, tuple[_Moments, _Moments]] = OrderedDict()

    def distribution(self, task: str) -> GaussianLength | None:
        """The distribution of ``task``, or ``None`` if nothing is known of it."""
        learned = self._learned.get(task)
        if learned is None:
            return None
        moments, _ = learned
        return GaussianLength(moments.mean, sqrt(moments.variance))

    def least(self, task: str) -> float:
        """The 0.02 quantile of a log-normal distribution of the lengths, tokens; 0 until
        :data:`MIN_ENDED` are known. The Gaussian's is mostly below 0."""
        learned = self._learned.get(task)
        if learned is None or learned[1].count < MIN_ENDED:
            return 0.0
        _, logs = learned
        return exp(logs.mean - 2.0 * sqrt(logs.variance))

    def predict(self, task: str, prompt_tokens: int = 0) -> float:
        """Expected output tokens of a new request; nan if nothing is known of ``task``. The prompt
        is not looked at: 002 goes by the task alone."""
        distribution = self.distribution(task)
        return nan if distribution is None else distribution.mean

    def observe(self, task: str, output_tokens: int) -> None:
        """A request of ``task`` completed. One without output, which was aborted, teaches nothing,
        and a class with a name above :data:`MAX_TASK_NAME` characters is not followed."""
        if output_tokens < 1 or len(task) > MAX_TASK_NAME:
            return
        learned = used(self._learned, task, lambda: (_Moments(), _Moments()), MAX_TASKS)
        for moments, value in zip(learned, (output_tokens, log(output_tokens)), strict=True):
            moments.add(value)


class OracleLengths:
    """Knows the real lengths, in the order in which they are asked for, up to a factor from ``[1 -
    error, 1 + error]``: for experiments (002 §5.3). Deterministic by ``seed``.

    Predicts nan when they are used up. Raises ``ValueError`` if ``error`` is not in [0, 1]."""

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

    def least(self, task: str) -> float:
        """Nothing: lengths are known by request, not by task."""
        return 0.0

    def observe(self, task: str, output_tokens: int) -> None:
        """Nothing is learned: all is known."""


LengthPredictor = TaskLengths | OracleLengths
"""Predicts output lengths."""


MEMORY: Final = 256
"""Latest outputs that count: at a level of 0.99 the quantile is the second longest of them."""

MIN_ENDED: Final = 20
"""Minimum outputs of known length before they replace the assumed length, and a tenant's lengths
replace its class's."""

UNSEEN: Final = 2.0
"""An output beyond all observed ones is assumed to be this many times the longest: of 20 outputs
with an exponential tail it is 3.6 means on average, and the 0.99 quantile 4.6 means."""

EVERY: Final = 8
"""Once :data:`MIN_ENDED` are known, outputs are counted in groups of this size."""

MAX_CLASSES: Final = 64
MAX_TENANTS: Final = 1_024
"""Most service classes, and most tenants in all of them together, that are followed: the one whose
request ended longest ago goes first."""

_MAX_TOKENS: Final = 1 << 30

_DIGITS: Final = 9
"""Decimal digits to which sums of floats that should be equal agree."""


class OutputLength(NamedTuple):
    """What is expected of an output: its ``mean`` tokens, and the ``bound``, at least the mean,
    that a stated share of such outputs stays within, for promises."""

    mean: float
    bound: float


UNKNOWN: Final = OutputLength(UNKNOWN_OUTPUT_TOKENS, UNSEEN * UNKNOWN_OUTPUT_TOKENS)
"""Where nothing is known: as if one output of :data:`UNKNOWN_OUTPUT_TOKENS` had been seen."""


class OutputLengths:
    """Learns the lengths of outputs by service class and tenant, from how requests ended.

    A tenant counts by its own outputs from ``MIN_ENDED`` on, and by its class before; until a
    class has as many, one of ``UNKNOWN_OUTPUT_TOKENS`` is added. What clients expect counts by how
    long their outputs of such an expectation, within a factor of two, turned out; until
    ``MIN_ENDED`` have, it can only raise the prediction. ``O(1)`` to ask, ``O(MEMORY log
    MEMORY)`` for ``EVERY`` outputs to learn, bounded memory.

    Raises ``ValueError`` if ``level``, the share of outputs within the bound, is not in (0, 1)."""

    def __init__(self, level: float = 0.99) -> None:
        if not 0.0 < level < 1.0:
            raise ValueError(f"the level must be between 0 and 1, got {level}")
        self._level = level
        self._classes: OrderedDict[str, _Seen] = OrderedDict()
        self._tenants: OrderedDict[tuple[str, int], _Seen] = OrderedDict()
        self._expected: OrderedDict[tuple[str, int, int], _Seen] = OrderedDict()

    def __len__(self) -> int:
        """Classes, tenants and expectations that are followed."""
        return len(self._classes) + len(self._tenants) + len(self._expected)

    def of(self, query: RouteQuery) -> OutputLength:
        """What is expected of the output of a request."""
        service_class, most_tokens = query.slo.service_class, float(query.output_tokens)
        seen = self._tenants.get((service_class, query.tenant))
        if seen is None or seen.ended < MIN_ENDED:
            seen = self._classes.get(service_class)
        found = UNKNOWN if seen is None else seen.length
        if tokens := query.expected_tokens:
            seen = self._expected.get((service_class, query.tenant, tokens.bit_length()))
            if seen is not None and seen.ended >= MIN_ENDED:
                found = seen.length
            else:
                found = OutputLength(max(found.mean, tokens), max(found.bound, tokens))
        if not most_tokens:
            return found
        return OutputLength(min(found.mean, most_tokens), min(found.bound, most_tokens))

    def observe(
        self, service_class: str, tenant: int, tokens: int, ended: bool, expected_tokens: int = 0
    ) -> None:
        """Learn from an output of ``tokens`` that ended by itself or was cut off. Empty outputs and
        class names that are empty or too long are ignored."""
        if tokens < 1 or not 0 < len(service_class) <= MAX_TASK_NAME:
            return
        tokens = min(tokens, _MAX_TOKENS)
        of_class = used(self._classes, service_class, _Seen, MAX_CLASSES)
        of_class.add(tokens, ended, self._level)
        if tenant:
            of_tenant = used(self._tenants, (service_class, tenant), _Seen, MAX_TENANTS)
            of_tenant.add(tokens, ended, self._level)
        if expected_tokens:
            kind = service_class, tenant, expected_tokens.bit_length()
            used(self._expected, kind, _Seen, MAX_TENANTS).add(tokens, ended, self._level)


class _Seen:
    """The latest outputs of one kind."""

    __slots__ = ("_count", "_ended", "_tokens", "ended", "length")

    def __init__(self) -> None:
        self._count = 0
        self._tokens = np.zeros(MEMORY, np.int32)
        self._ended = np.zeros(MEMORY, np.bool_)
        self.ended = 0
        self.length = UNKNOWN

    def add(self, tokens: int, ended: bool, level: float) -> None:
        place = self._count % MEMORY
        self._tokens[place], self._ended[place] = tokens, ended
        self._count += 1
        if self._count > MIN_ENDED and self._count % EVERY:
            return
        known = min(self._count, MEMORY)
        tokens_seen, ended_seen = self._tokens[:known], self._ended[:known]
        self.ended = int(np.count_nonzero(ended_seen))
        if self.ended < MIN_ENDED:
            tokens_seen = np.append(tokens_seen, np.int32(UNKNOWN_OUTPUT_TOKENS))
            ended_seen = np.append(ended_seen, True)
        self.length = length_of(tokens_seen, ended_seen, level)


def length_of(tokens: NDArray[np.int32], ended: NDArray[np.bool_], level: float) -> OutputLength:
    """What outputs of these lengths say of the next one; those not ``ended`` would have been
    longer. At least one has ended.

    The bound is the ``level * (n + 1) / n`` quantile (split conformal prediction), or ``UNSEEN``
    times the longest where it lies beyond the known lengths. In the mean, what was cut off later
    than all others ended counts as ended there (Efron 1967)."""
    order = np.lexsort((~ended, tokens))
    lengths, known = tokens[order], ended[order]
    at_risk = np.arange(len(lengths), 0, -1)
    beyond = np.cumprod(1.0 - known / at_risk)
    shares = -np.diff(beyond, prepend=1.0)
    longest = float(lengths[-1])
    mean = round(float(shares @ lengths) + float(beyond[-1]) * longest, _DIGITS)
    count = int(np.count_nonzero(known))
    wanted = level * (count + 1) / count
    place = int(np.searchsorted(np.round(1.0 - beyond, _DIGITS), round(wanted, _DIGITS)))
    bound = float(lengths[place]) if place < len(lengths) else UNSEEN * longest
    return OutputLength(mean, max(mean, bound))
