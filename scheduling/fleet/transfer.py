"""How long the KV of a prompt takes from the replica that computed it to the one that decodes, and
what TTFT that leaves to the first of them."""

from __future__ import annotations

from typing import NamedTuple

FIXED_S = 0.005
"""Fixed time of a transfer, seconds, while none was seen."""

TOKEN_S = 5e-6
"""Time per token, seconds, while none was seen: 128 KiB of KV per token, as of an 8B model with
grouped queries in 16 bits, over 200 Gbit/s."""

PRIOR_TRANSFERS = 4.0
"""The values above count as this many observed transfers."""

PRIOR_TOKENS = 1_000.0
"""Tokens of one of them, as far as the time per token is concerned."""

MEMORY = 200.0
"""Transfers after which what was seen counts ``1/e`` of what it did."""


MIN_SHARE = 0.1
"""Minimum share of the TTFT objective that is left for the prefill of a P/D pair."""


def prompt_ttft_s(ttft_s: float, kv_transfer_s: float) -> float:
    """The TTFT objective of the prefill, if the request's first token comes ``kv_transfer_s`` after
    it, seconds."""
    return max(ttft_s - kv_transfer_s, MIN_SHARE * ttft_s)


class Transfers(NamedTuple):
    """How many KV transfers a replica has done since its start, their seconds and their prompts'
    tokens."""

    done: int = 0
    seconds: float = 0.0
    tokens: int = 0


NO_TRANSFERS = Transfers()


class TransferTime:
    """Predicts ``fixed + tokens * per token``, fitted online. ``O(1)`` a report.

    Least squares over the mean size and time of the transfers since the last report, weighted by
    their number, older ones less, pulled towards the defaults where little was seen. Neither is
    below 0."""

    def __init__(self) -> None:
        # Sums over transfers seen: count, tokens, tokens squared, seconds, seconds times tokens.
        self._count = self._tokens = self._squares = self._seconds = self._products = 0.0
        self.fixed_s = FIXED_S
        self.token_s = TOKEN_S

    def seconds(self, tokens: float) -> float:
        """The predicted time of a prompt's KV."""
        return self.fixed_s + self.token_s * tokens

    def learn(self, before: Transfers, now: Transfers) -> None:
        """Learn from the transfers since ``before``, of a total of ``now`` since the replica's
        start, or from all of ``now`` if the replica has restarted."""
        if any(new < old for new, old in zip(now, before, strict=True)):
            before = NO_TRANSFERS
        if now.done > before.done:
            self.see(
                now.done - before.done, now.seconds - before.seconds, now.tokens - before.tokens
            )

    def see(self, count: int, seconds: float, tokens: int) -> None:
        """Learn from ``count`` > 0 transfers that took ``seconds`` for ``tokens`` together."""
        keep = (1.0 - 1.0 / MEMORY) ** min(count, 10.0 * MEMORY)
        size = tokens / count
        self._count = keep * self._count + count
        self._tokens = keep * self._tokens + tokens
        self._squares = keep * self._squares + tokens * size
        self._seconds = keep * self._seconds + seconds
        self._products = keep * self._products + seconds * size
        self._fit()

    def _fit(self) -> None:
        # The normal equations of both numbers, each pulled towards its prior.
        fixed_weight, token_weight = PRIOR_TRANSFERS, PRIOR_TRANSFERS * PRIOR_TOKENS**2
        a, b, c = self._count + fixed_weight, self._tokens, self._squares + token_weight
        d = self._seconds + fixed_weight * FIXED_S
        e = self._products + token_weight * TOKEN_S
        # Above 0: the sums' part is not below it, by Cauchy and Schwarz, and the rest is positive.
        determinant = a * c - b * b
        fixed_s, token_s = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        if fixed_s < 0.0:
            fixed_s, token_s = 0.0, e / c
        elif token_s < 0.0:
            fixed_s, token_s = d / a, 0.0
        self.fixed_s, self.token_s = fixed_s, token_s
