"""How long outputs turn out, by service class and tenant, where end-to-end times are guaranteed.

002 §4.2 models the lengths of a task class by a Gaussian of its completed requests, unless the user
states a range or a distribution. Our reading differs where a guarantee is made. A Gaussian's tail
is much shorter than that of real outputs, so a guarantee takes the quantile of the lengths
themselves. And an output that ``max_tokens`` cut off, or whose client left, has no known length: it
would have had at least the tokens counted. The quantile is therefore that of the product-limit
estimate (Kaplan & Meier 1958), which counts such outputs until they were cut off. Without that, a
class of short ``max_tokens`` would teach that all outputs are short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.assumptions import UNKNOWN_OUTPUT_TOKENS
from sluice.scheduling.placement.length import MAX_TASK_NAME, LengthDistribution
from sluice.scheduling.recent import used
from sluice.scheduling.request.job import RouteQuery

MEMORY: Final = 256
"""Latest outputs that count: at a level of 0.99 the quantile is the second longest of them."""

LEAST_ENDED: Final = 20
"""Minimum outputs of known length before they replace the assumed length, and a tenant's lengths
replace its class's."""

UNSEEN: Final = 2.0
"""An output longer than all observed ones is assumed to be this many times as long as the longest:
of 20 outputs with an exponential tail the longest has 3.6 times their mean on average, and the 0.99
quantile is 4.6 times."""

EVERY: Final = 8
"""Once :data:`LEAST_ENDED` are known, outputs are counted in groups of this size."""

MAX_CLASSES: Final = 64
MAX_TENANTS: Final = 1_024
"""Most service classes, and most tenants in all of them together, that are followed: the one whose
request ended longest ago goes first."""

_MOST_TOKENS: Final = 1 << 30

_DIGITS: Final = 9
"""Decimal digits to which sums of floats that should be equal agree."""


class OutputLength(NamedTuple):
    """What is expected of an output.

    Attributes:
        mean: expected tokens, for what it takes of a replica.
        bound: tokens that a stated share of such outputs stay within, for what is guaranteed; at
            least ``mean``.
    """

    mean: float
    bound: float

    def within(self, most_tokens: float) -> OutputLength:
        """The same of an output that ends after ``most_tokens``."""
        return OutputLength(min(self.mean, most_tokens), min(self.bound, most_tokens))


UNKNOWN: Final = OutputLength(UNKNOWN_OUTPUT_TOKENS, UNSEEN * UNKNOWN_OUTPUT_TOKENS)
"""Where nothing is known: as if one output of :data:`UNKNOWN_OUTPUT_TOKENS` had been seen."""


class OutputLengths:
    """Learns the lengths of outputs by service class and tenant, from how requests ended.

    A tenant counts by its own outputs from :data:`LEAST_ENDED` on, and by its class before. Until a
    class has as many, one output of :data:`UNKNOWN_OUTPUT_TOKENS` counts as seen, too. A class
    whose distribution is stated learns nothing. The prompt is not looked at: 002 goes by the task
    alone.

    ``O(1)`` to ask, ``O(MEMORY log MEMORY)`` for :data:`EVERY` outputs to learn. Memory is bounded.

    Args:
        level: share of the outputs that stay within the bound, in (0, 1).
        stated: distribution by service class.

    Raises:
        ValueError: ``level`` is not in (0, 1).
    """

    def __init__(
        self, level: float = 0.99, stated: Mapping[str, LengthDistribution] | None = None
    ) -> None:
        if not 0.0 < level < 1.0:
            raise ValueError(f"the level must be between 0 and 1, got {level}")
        self._level = level
        self._stated = {
            name: OutputLength(of.mean, max(of.mean, of.quantile(level)))
            for name, of in (stated or {}).items()
        }
        self._classes: OrderedDict[str, _Seen] = OrderedDict()
        self._tenants: OrderedDict[tuple[str, int], _Seen] = OrderedDict()

    def __len__(self) -> int:
        """Classes and tenants that are followed."""
        return len(self._classes) + len(self._tenants)

    def expected(self, service_class: str, tenant: int = 0, most_tokens: int = 0) -> OutputLength:
        """What is expected of an output.

        Args:
            service_class: of the request.
            tenant: as in :class:`~sluice.scheduling.request.job.RouteQuery`; 0: no tenant is known.
            most_tokens: maximum output length; 0 if unknown.
        """
        found = self._stated.get(service_class)
        if found is None:
            seen = self._tenants.get((service_class, tenant))
            if seen is None or seen.ended < LEAST_ENDED:
                seen = self._classes.get(service_class)
            found = UNKNOWN if seen is None else seen.length
        return found.within(float(most_tokens) or inf)

    def of(self, query: RouteQuery) -> OutputLength:
        """What is expected of the output of a request."""
        return self.expected(query.slo.service_class, query.tenant, query.output_tokens)

    def observe(self, service_class: str, tenant: int, tokens: int, ended: bool) -> None:
        """Learn from an output that had ``tokens`` when it ended by itself, or else when it was cut
        off. Empty outputs are ignored, and so are classes with an empty name or one that is too
        long."""
        if tokens < 1 or not 0 < len(service_class) <= MAX_TASK_NAME:
            return
        if service_class in self._stated:
            return
        tokens = min(tokens, _MOST_TOKENS)
        of_class = used(self._classes, service_class, _Seen, MAX_CLASSES)
        of_class.add(tokens, ended, self._level)
        if tenant:
            of_tenant = used(self._tenants, (service_class, tenant), _Seen, MAX_TENANTS)
            of_tenant.add(tokens, ended, self._level)


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
        if self._count > LEAST_ENDED and self._count % EVERY:
            return
        known = min(self._count, MEMORY)
        tokens_seen, ended_seen = self._tokens[:known], self._ended[:known]
        self.ended = int(np.count_nonzero(ended_seen))
        if self.ended < LEAST_ENDED:
            tokens_seen = np.append(tokens_seen, np.int32(UNKNOWN_OUTPUT_TOKENS))
            ended_seen = np.append(ended_seen, True)
        self.length = length_of(tokens_seen, ended_seen, level)


def length_of(tokens: NDArray[np.int32], ended: NDArray[np.bool_], level: float) -> OutputLength:
    """What outputs of these lengths say of the next one; of those not ``ended``, that they would
    have been longer.

    The bound is that of split conformal prediction: the ``level * (n + 1) / n`` quantile of ``n``
    known lengths. Where so few are known that it lies beyond them, or where those beyond the
    quantile were cut off, it is :data:`UNSEEN` times the longest. In the mean, what was cut off
    later than all others ended counts as ended there (Efron 1967).

    Args:
        tokens: of each output, at least one of which has ended.
    """
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
