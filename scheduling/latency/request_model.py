"""Seconds of a whole request without waiting: 002 §4.2 and FlowPrefill (003 §6.4)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Self

import numpy as np

from sluice.scheduling.latency.model import LatencyModel, check_factors
from sluice.scheduling.request import kernels
from sluice.scheduling.request.kernels import Floats


class Interaction(NamedTuple):
    """``alpha * b * l + beta * b + gamma * l + delta`` for ``b`` sequences of ``l`` tokens each."""

    alpha: float
    beta: float
    gamma: float
    delta: float

    def seconds(self, batch: float, length: float) -> float:
        """The time at batch size ``batch`` and length ``length``."""
        return self.alpha * batch * length + self.beta * batch + self.gamma * length + self.delta


@dataclass(frozen=True, slots=True)
class InteractionLatency:
    """Prefill, decode and end-to-end time of a request by batch size: 002 §4.2, Eq. 14 to 19,
    stated there for batches below 2,000. Raises ValueError as ``LatencyModel``."""

    prefill: Interaction
    decode: Interaction
    correction: float = 1.0
    headroom: float = 1.0

    def __post_init__(self) -> None:
        _check((*self.prefill, *self.decode), self.correction, self.headroom)

    @classmethod
    def paper(cls) -> Self:
        """The coefficients of 002 Table 2 (Qwen2.5-7B on two V100), in seconds."""
        return cls(
            Interaction(0.0001, 0.0057, 0.000_01, 0.043_67),
            Interaction(0.000_000_2, 0.000_275, 0.000_000_88, 0.015_85),
        )

    @classmethod
    def of_steps(cls, model: LatencyModel) -> Self:
        """For batches of equal sequences, without the square term; the largest coefficients of all
        pieces."""
        piece = model.pieces.max(axis=0)
        fixed_s = float(piece[kernels.FIXED])
        prefill = Interaction(
            float(piece[kernels.PREFILL_TOKENS]),
            float(piece[kernels.PREFILL_SEQUENCE]),
            0.0,
            fixed_s,
        )
        decode = Interaction(
            float(piece[kernels.DECODE_CONTEXT]),
            float(piece[kernels.DECODE_SEQUENCE]),
            0.0,
            fixed_s,
        )
        return cls(prefill, decode)

    @property
    def coefficients(self) -> Floats:
        """``float64[2, 4]`` for compiled loops: prefill and decode, with both factors."""
        scale = self.correction * self.headroom
        scaled: Floats = np.array([self.prefill, self.decode]) * scale
        return scaled

    def prefill_s(self, batch: int, prompt_tokens: float) -> float:
        """Eq. 14, and Eq. 18's TTFT: the prefill of ``batch`` prompts of ``prompt_tokens``."""
        return self.correction * self.headroom * self.prefill.seconds(batch, prompt_tokens)

    def decode_s(self, batch: int, prompt_tokens: float, output_tokens: float) -> float:
        """Eq. 16: the sum of Eq. 15 over the growing context, for which its mean stands."""
        mean_context = prompt_tokens + (output_tokens + 1) / 2
        per_token_s = self.decode.seconds(batch, mean_context)
        return self.correction * self.headroom * output_tokens * per_token_s

    def e2e_s(self, batch: int, prompt_tokens: float, output_tokens: float) -> float:
        """Eq. 17: prefill and decode."""
        return self.prefill_s(batch, prompt_tokens) + self.decode_s(
            batch, prompt_tokens, output_tokens
        )

    def tpot_s(self, batch: int, prompt_tokens: float, output_tokens: float) -> float:
        """Eq. 19: decode time per output token."""
        return self.decode_s(batch, prompt_tokens, output_tokens) / output_tokens


@dataclass(frozen=True, slots=True)
class PolynomialTTFT:
    """``sum coefficients[i] * tokens**i``: the time of a prefill that runs alone (FlowPrefill §6.4,
    no degree stated). Coefficients are >= 0, so that more tokens never take less time. Raises
    ValueError as ``LatencyModel``."""

    coefficients: tuple[float, ...]
    correction: float = 1.0
    headroom: float = 1.0

    def __post_init__(self) -> None:
        _check(self.coefficients, self.correction, self.headroom)

    @classmethod
    def of_steps(cls, model: LatencyModel) -> Self:
        """For one prefill of a fresh prompt; the largest coefficients of all pieces."""
        piece = model.pieces.max(axis=0)
        fixed_s = float(piece[kernels.FIXED] + piece[kernels.PREFILL_SEQUENCE])
        per_token_s = float(piece[kernels.PREFILL_TOKENS])
        return cls((fixed_s, per_token_s, float(piece[kernels.PREFILL_SQUARE])))

    def seconds(self, tokens: float) -> float:
        """TTFT of a prefill of ``tokens`` without waiting."""
        result = 0.0
        for coefficient in reversed(self.coefficients):
            result = result * tokens + coefficient
        return result * self.correction * self.headroom

    def all_seconds(self, tokens: Floats) -> Floats:
        """:meth:`seconds` of many prefills at once."""
        result: Floats = np.zeros(tokens.shape)
        for coefficient in reversed(self.coefficients):
            result = result * tokens + coefficient
        return result * (self.correction * self.headroom)


def _check(coefficients: tuple[float, ...], correction: float, headroom: float) -> None:
    if not all(0 <= value < inf for value in coefficients):
        raise ValueError(f"latency coefficients must be finite and >= 0, got {coefficients}")
    if not any(coefficients):
        raise ValueError("a latency model needs at least one coefficient above 0")
    check_factors(correction, headroom)
