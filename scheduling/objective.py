"""What a request is promised and what keeping the promise is worth.

Times are seconds on one monotonic clock of the caller's choice; nothing here reads a clock.

Sources: the per-token deadline is FairBatching §3.1 and ProServe Eq. 3; the second anchor is
ProServe's footnote 2; the token-level deadline gain (TDG) is ProServe Eq. 3.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from math import inf

MIN_PRIORITY = 1
MAX_PRIORITY = 10


class Anchor(enum.StrEnum):
    """Where the deadlines of the tokens after the first one start from.

    ``ENVELOPE``: ``arrival + TTFT + (i - 1) * TPOT``. It does not depend on progress, so an early
    first token buys slack for the later ones. Right for TDG.

    ``FIRST_TOKEN``: ``min(first token time, arrival + TTFT) + (i - 1) * TPOT``. An early first
    token starts the TPOT clock early. Right where TPOT is measured as the running mean or maximum
    since the first token.

    ``LAST_TOKEN``: one TPOT after the token before. Time won earlier is not slack. Right where the
    time between tokens, or TPOT over a short window of tokens, is the objective.
    """

    ENVELOPE = "envelope"
    FIRST_TOKEN = "first_token"
    LAST_TOKEN = "last_token"

    @property
    def code(self) -> int:
        """Its number in compiled loops, see :mod:`scheduling.kernels`."""
        return _ANCHOR_CODES[self]


_ANCHOR_CODES = {Anchor.ENVELOPE: 0, Anchor.FIRST_TOKEN: 1, Anchor.LAST_TOKEN: 2}


@dataclass(frozen=True, slots=True)
class SLO:
    """The latency objective of one request, and its worth.

    Args:
        ttft_s: time to first token, seconds from arrival; ``None`` means no objective.
        tpot_s: time per output token after the first, seconds; ``None`` means no objective.
        e2e_s: time to the last token, seconds from arrival; ``None`` means no objective.
        priority: weight of the request's tokens in the gain, an integer from 1 to 10: a token of
            priority 2 is worth two of priority 1 (ProServe's ``w_prio``).
        service_class: the name of the service class it is served as.

    Attributes:
        columns: TTFT, TPOT, end-to-end and priority as numbers, infinite where not stated.

    Raises:
        ValueError: an objective that is not positive and finite, or a priority out of range.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    priority: int = 1
    service_class: str = "standard"
    columns: tuple[float, float, float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not (type(self.priority) is int and MIN_PRIORITY <= self.priority <= MAX_PRIORITY):
            raise ValueError(
                f"priority must be an integer from {MIN_PRIORITY} to {MAX_PRIORITY}, "
                f"got {self.priority!r}"
            )
        objectives = (self.ttft_s, self.tpot_s, self.e2e_s)
        ttft_s, tpot_s, e2e_s = (inf if value is None else value for value in objectives)
        object.__setattr__(self, "columns", (ttft_s, tpot_s, e2e_s, float(self.priority)))

    @property
    def stated(self) -> bool:
        """Whether it states any objective: without one there is nothing to promise."""
        return min(self.columns[:3]) < inf

    def deadline_s(
        self,
        token: int,
        arrival_s: float,
        first_token_s: float | None = None,
        anchor: Anchor = Anchor.ENVELOPE,
        last_token_s: float | None = None,
    ) -> float:
        """Deadline of output token ``token`` (1-based), on the clock of ``arrival_s``.

        Our reading where an objective is missing: without TTFT the first token is due by the
        end-to-end deadline, and the later ones start from the first token's real time; without
        TPOT the later tokens are due by the end-to-end deadline; no token is due after the
        end-to-end deadline. With no objective at all the deadline is infinite.
        """
        ttft_s, e2e_s = self.ttft_s, self.e2e_s
        due_s = inf if ttft_s is None else arrival_s + ttft_s
        if token > 1:
            tpot_s = self.tpot_s
            if tpot_s is None:
                return inf if e2e_s is None else arrival_s + e2e_s
            if anchor is Anchor.LAST_TOKEN and last_token_s is not None:
                due_s = last_token_s + tpot_s
            else:
                if (
                    first_token_s is not None
                    and first_token_s < due_s
                    and (ttft_s is None or anchor is not Anchor.ENVELOPE)
                ):
                    due_s = first_token_s
                due_s += (token - 1) * tpot_s
        if e2e_s is not None and arrival_s + e2e_s < due_s:
            return arrival_s + e2e_s
        return due_s


@dataclass(frozen=True, slots=True)
class GainWeights:
    """Weights of a first and of a later token in the TDG gain (ProServe's ``w_p`` and ``w_d``).

    The paper sets ``first : later`` to the data set's mean input : mean output length, so that a
    prompt's work counts in its first token.
    """

    first: float = 1.0
    later: float = 1.0


class TokenClock:
    """Follows one request's emissions against its objective: TTFT, TPOT, gain and attainment.

    ``O(1)`` per token and per request in memory. Feed it with :meth:`emit` as tokens leave.
    """

    __slots__ = (
        "_anchor",
        "_weights",
        "arrival_s",
        "first_token_s",
        "gain",
        "ideal_gain",
        "last_token_s",
        "slo",
        "tokens",
    )

    def __init__(
        self,
        slo: SLO,
        arrival_s: float,
        weights: GainWeights | None = None,
        anchor: Anchor = Anchor.ENVELOPE,
    ) -> None:
        self.slo = slo
        self.arrival_s = arrival_s
        self.tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gain = 0.0
        self.ideal_gain = 0.0
        self._weights = weights or GainWeights()
        self._anchor = anchor

    def emit(self, tokens: int, now_s: float) -> None:
        """Count ``tokens`` (>= 0) that left at ``now_s``.

        Several at once, as speculation gives them, each have the deadline of their place in the
        output; with :attr:`Anchor.LAST_TOKEN`, which knows no places, a group has one TPOT for each
        of its tokens.
        """
        last_s = self.last_token_s
        if last_s is not None and self.slo.tpot_s is not None:
            last_s += (tokens - 1) * self.slo.tpot_s
        for _ in range(tokens):
            self.tokens += 1
            if self.first_token_s is None:
                self.first_token_s = now_s
            weight = self._weights.first if self.tokens == 1 else self._weights.later
            weight *= self.slo.priority
            self.ideal_gain += weight
            due_s = self.slo.deadline_s(
                self.tokens, self.arrival_s, self.first_token_s, self._anchor, last_s
            )
            if now_s < due_s:
                self.gain += weight
            last_s = now_s if last_s is None else last_s
            self.last_token_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, or ``None`` before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, or ``None`` with fewer than two tokens."""
        if self.tokens < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)

    def attained(self, finished_s: float) -> bool:
        """Whether every stated objective was met: TTFT, mean TPOT and end to end.

        A request without any token attains only if it states no objective.
        """
        return not self.missed(finished_s)

    def missed(self, finished_s: float) -> tuple[str, ...]:
        """The stated objectives that were not met, of ``ttft``, ``tpot`` and ``e2e``: all of them
        where there was no token."""
        (ttft_due_s, tpot_due_s, e2e_due_s, _), none = self.slo.columns, self.tokens == 0
        took_s = finished_s - self.arrival_s
        found = (
            ("ttft", inf if self.ttft_s is None else self.ttft_s, ttft_due_s),
            ("tpot", inf if none else self.tpot_s or 0.0, tpot_due_s),
            ("e2e", inf if none else took_s, e2e_due_s),
        )
        return tuple([name for name, real_s, due_s in found if real_s > due_s])
