"""Speculation lengths by TPOT objective: how many tokens of each decode to check in a step.

Source: SLOs-Serve §3.2.3 and appendix D. More tokens per decode step let a batch take longer within
the decodes' TPOT, so that more of it is prefill, at the price of tokens that are not accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np

from scheduling.kernels import FIXED, PREFILL_TOKENS, work_s
from scheduling.latency import LatencyModel

MOST_LENGTH = 10
"""Most tokens of one decode in a step, as in appendix D."""

PRIOR_ACCEPTANCE = 0.5
"""Taken for the acceptance of which nothing is known, so that something gets known."""

PRIOR_TRIALS = 8.0
"""As many drafted tokens that were right or wrong weigh as much as the prior."""

MEMORY_TRIALS = 256.0
"""About how many of the latest trials of a class count."""

FADING_STEPS = 1000
"""A class of which nothing is checked loses that much of its evidence, as a number of steps of a
request: ``exp(-1)`` of it is left after as many. So it is tried again, and costs little while it is
hopeless."""

MAX_CLASSES = 1024
"""Most service classes that are followed; the one heard of longest ago goes first."""


class AcceptanceRates:
    """Probability that a drafted token is right if those before it are, learned by service class.

    In a step that checks drafted tokens the wrong one is the last that was tried: those behind it
    say nothing. So ``k`` accepted of more are ``k`` successes and one failure, and the rate is the
    share of successes, beside a prior of :data:`PRIOR_ACCEPTANCE`. ``O(1)`` per call; memory is
    bounded by :data:`MAX_CLASSES`. Not thread-safe.
    """

    def __init__(self) -> None:
        self._learned: OrderedDict[str, list[float]] = OrderedDict()

    def rate(self, service_class: str) -> float:
        """The rate, above 0 and below 1; :data:`PRIOR_ACCEPTANCE` for an unknown class."""
        accepted, trials = self._learned.get(service_class, (0.0, 0.0))
        return (PRIOR_ACCEPTANCE * PRIOR_TRIALS + accepted) / (PRIOR_TRIALS + trials)

    def observe(self, service_class: str, checked: int, accepted: int) -> None:
        """One step of a decode for which something was drafted.

        Args:
            service_class: of the request.
            checked: drafted tokens that were checked, >= 0. With 0 what is known fades, so that a
                class whose speculation is off is tried again.
            accepted: how many of them were right, the first ones.

        Raises:
            ValueError: not ``0 <= accepted <= checked``.
        """
        if not 0 <= accepted <= checked:
            raise ValueError(
                f"accepted must be from 0 to checked, got {accepted} and {checked} checked"
            )
        known = self._learned.get(service_class)
        if known is None:
            if not checked:
                return
            known = self._learned[service_class] = [0.0, 0.0]
            if len(self._learned) > MAX_CLASSES:
                self._learned.popitem(last=False)
        else:
            self._learned.move_to_end(service_class)
        trials = accepted + (accepted < checked) if checked else 0
        kept = 1 - (trials / MEMORY_TRIALS if trials else 1 / FADING_STEPS)
        known[0] = kept * known[0] + accepted
        known[1] = kept * known[1] + trials


def accepted_tokens(length: int, alpha: float) -> float:
    """Expected output of a step that checks ``length`` tokens of a decode, ``Acc(length)``: the
    first is certain, and each later one is accepted with probability ``alpha`` if those before it
    were. ``(1 - alpha**length) / (1 - alpha)``."""
    return (1.0 - alpha**length) / (1.0 - alpha)


@dataclass(frozen=True, slots=True)
class DecodeTier:
    """Decodes of one TPOT objective.

    Args:
        requests: how many, >= 0.
        tpot_s: their objective, seconds.
        context_tokens: their mean context.

    Raises:
        ValueError: a negative number, or a TPOT that is not positive and finite.
    """

    requests: int
    tpot_s: float
    context_tokens: float = 0.0

    def __post_init__(self) -> None:
        if self.requests < 0 or not 0 <= self.context_tokens < inf:
            raise ValueError(
                "requests and context_tokens must be finite and >= 0, got "
                f"{self.requests} and {self.context_tokens}"
            )
        if not 0 < self.tpot_s < inf:
            raise ValueError(f"tpot_s must be positive and finite, got {self.tpot_s}")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to decode.

    Attributes:
        lengths: tokens to check per step, by tier; 1 is no speculation.
        batch_s: time of a batch, ``T``, in which every tier keeps its TPOT.
        prefill_tokens_per_s: what is left for prefill, tokens per second; below zero where the
            decodes alone take longer than ``batch_s``.
    """

    lengths: tuple[int, ...]
    batch_s: float
    prefill_tokens_per_s: float


def speculation_lengths(
    tiers: Sequence[DecodeTier], alpha: float, latency: LatencyModel, draft_s: float = 0.0
) -> Speculation:
    """The lengths, up to :data:`MOST_LENGTH`, that leave most prefill tokens per second.

    Maximises ``(time2bs(T) - sum n_l sl_l) / T`` with ``T = min_l TPOT_l Acc(sl_l)``. Some tier
    binds ``T``; each other one takes the least length that keeps its pace at that ``T``, as longer
    ones only cost. So it tries each tier and length as the binding one: ``O(tiers**2)``.

    Our readings: the tokens that fit ``T`` are those of the latency model, in which a decode's
    tokens cost what a prefill chunk of that length on its context costs; the model's overhead of
    speculation, ``k2 #SpecStep``, is ``draft_s`` for each drafted token of the longest length.

    Args:
        tiers: those that decode; one without requests has length 1 and binds nothing.
        alpha: probability that a drafted token is accepted, from 0 to below 1.
        latency: of the checking model.
        draft_s: time of one step of the drafting model, seconds.

    Raises:
        ValueError: ``alpha`` or ``draft_s`` out of range, or no tier with a request.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be from 0 to below 1, got {alpha}")
    if not 0 <= draft_s < inf:
        raise ValueError(f"draft_s must be finite and >= 0, got {draft_s}")
    if not any(tier.requests for tier in tiers):
        raise ValueError("speculation needs a tier with at least one request")
    accepted = [accepted_tokens(length, alpha) for length in range(1, MOST_LENGTH + 1)]
    best: Speculation | None = None
    paces = [[tier.tpot_s * tokens for tokens in accepted] for tier in tiers]
    for binding, index in product(range(len(tiers)), range(MOST_LENGTH)):
        batch_s = paces[binding][index]
        lengths = _keeping(tiers, paces, batch_s)
        if not tiers[binding].requests or lengths is None:
            continue
        tokens = _prefill_tokens(tiers, lengths, batch_s, latency, draft_s)
        found = Speculation(lengths, batch_s, tokens / batch_s)
        if best is None or found.prefill_tokens_per_s > best.prefill_tokens_per_s:
            best = found
    # The tightest tier at length 1 is kept by every tier.
    assert best is not None
    return best


def _keeping(
    tiers: Sequence[DecodeTier], paces: Sequence[Sequence[float]], batch_s: float
) -> tuple[int, ...] | None:
    """Per tier, the least length that keeps its pace in batches of ``batch_s``; ``None`` where one
    has none."""
    lengths = [
        1 + int(np.searchsorted(pace, batch_s)) if tier.requests else 1
        for tier, pace in zip(tiers, paces, strict=True)
    ]
    return tuple(lengths) if max(lengths) <= MOST_LENGTH else None


def _prefill_tokens(
    tiers: Sequence[DecodeTier],
    lengths: Sequence[int],
    batch_s: float,
    latency: LatencyModel,
    draft_s: float,
) -> float:
    """Prefill tokens that fit beside the decodes; negative where the decodes do not fit."""
    left_s = batch_s - draft_s * (max(lengths) - 1)
    fewest = inf
    for piece in latency.pieces:
        decodes_s = sum(
            tier.requests * work_s(piece, float(length), tier.context_tokens)
            for tier, length in zip(tiers, lengths, strict=True)
        )
        spare_s = left_s - piece[FIXED] - decodes_s
        per_token_s = piece[PREFILL_TOKENS]
        if per_token_s > 0:
            fewest = min(fewest, spare_s / per_token_s)
        elif spare_s < 0:
            fewest = -inf
    return float(fewest)
