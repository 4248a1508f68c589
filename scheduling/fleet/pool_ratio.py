"""How many devices to give to prefill and how many to decode, where each does only one of them.

Source: SLOs-Serve §2.3 and appendix A. It takes prefill devices as always busy at full
throughput, and decode devices as running the largest batch that a time per token allows; so it is
the ratio of an ideal run, in which nothing waits for chance. Bursts and a TTFT objective need more
prefill devices than that.

The ratio follows from the mean lengths and from the objective. So one ratio is right for one mix of
requests only, which is the paper's argument against a fixed split.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple


class PoolDemand(NamedTuple):
    """Devices of each role that a rate of one request per second keeps busy.

    Attributes:
        prefill: of those that prefill, > 0.
        decode: of those that decode, > 0.
    """

    prefill: float
    decode: float

    @property
    def ratio(self) -> float:
        """Prefill devices per decode device at which neither side waits for the other (§2.3)."""
        return self.prefill / self.decode

    @property
    def best_goodput(self) -> float:
        """Requests per second and device at that ratio (Eq. 4)."""
        return 1.0 / (self.prefill + self.decode)

    def goodput(self, prefillers: int, decoders: int) -> float:
        """Requests per second and device with this many of each, both >= 1: the scarcer side limits
        it."""
        served = min(prefillers / self.prefill, decoders / self.decode)
        return served / (prefillers + decoders)

    def least(self, rate: float) -> tuple[int, int]:
        """Whole devices of each role, at least one, that a rate of requests per second needs."""
        return max(1, ceil(rate * self.prefill)), max(1, ceil(rate * self.decode))

    def split(self, devices: int) -> tuple[int, int]:
        """``devices`` (>= 2) of both roles in the whole numbers that serve the most."""
        splits = ((devices - decoders, decoders) for decoders in range(1, devices))
        return max(splits, key=lambda split: self.goodput(*split))


def demand_of_tokens(
    prompt_tokens: float,
    output_tokens: float,
    tokens_per_s: float,
    tpot_s: float,
    overhead_s: float,
) -> PoolDemand:
    """The demand by the paper's model of a step, ``tokens / tokens_per_s + overhead_s``.

    Args:
        prompt_tokens, output_tokens: mean lengths of a request.
        tokens_per_s: greatest throughput of a device.
        tpot_s: the time per token that decodes must keep; infinite if none is stated.
        overhead_s: fixed time of a step.

    Raises:
        ValueError: see :func:`demand_of_work`, or a throughput that is not positive.
    """
    if not 0 < tokens_per_s < inf:
        raise ValueError(f"tokens_per_s must be positive and finite, got {tokens_per_s}")
    prefill_s, token_s = prompt_tokens / tokens_per_s, 1.0 / tokens_per_s
    return demand_of_work(prefill_s, output_tokens, token_s, tpot_s, overhead_s)


def demand_of_work(
    prefill_s: float,
    output_tokens: float,
    token_s: float,
    tpot_s: float,
    overhead_s: float,
    most_decodes: float = inf,
) -> PoolDemand:
    """The same where tokens differ in their time, as with attention over a long context.

    A step of ``tpot_s`` has ``tpot_s - overhead_s`` for its decodes. Where fewer find room, a step
    is shorter, and each token has a larger part of the overhead; the paper takes room as ample.

    Args:
        prefill_s: device time of a mean request's prompt, beyond the fixed time of steps.
        output_tokens: mean length of an output.
        token_s: device time of one output token, likewise.
        tpot_s, overhead_s: as in :func:`demand_of_tokens`.
        most_decodes: how many a device has room for, by its KV or by its places.

    Raises:
        ValueError: a number that is not positive and finite, or a step that takes ``tpot_s`` before
            any token is in it, so that no number of devices keeps the pace.
    """
    for name, value in (
        ("prefill_s", prefill_s),
        ("output_tokens", output_tokens),
        ("token_s", token_s),
    ):
        if not 0 < value < inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if not 0 <= overhead_s < inf:
        raise ValueError(f"overhead_s must be finite and >= 0, got {overhead_s}")
    if not most_decodes > 0:
        raise ValueError(f"most_decodes must be positive, got {most_decodes}")
    if not tpot_s > overhead_s:
        raise ValueError(
            f"a time per token of {tpot_s} s cannot be kept by steps whose fixed time is "
            f"{overhead_s} s; it must be longer"
        )
    decodes = min((tpot_s - overhead_s) / token_s, most_decodes)
    return PoolDemand(prefill_s, output_tokens * (token_s + overhead_s / decodes))
