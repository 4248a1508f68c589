"""Step-time models of an engine.

A step is a batch of sequences, each with ``n`` new tokens on ``k`` computed ones. Every family of
models predicts its time as the largest of one or more sums ("pieces") over the sequences, so that
policies and compiled loops need to know one form only. The families differ in which coefficients
they have: :class:`LinearLatency`, :class:`PrefillDecodeLatency` and :class:`RooflineLatency`.
:mod:`sluice.scheduling.latency.fit` fits them to measured steps and
:mod:`sluice.scheduling.latency.profile` stores them. All times are seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, sqrt
from typing import ClassVar, NamedTuple, Self

import numpy as np

from sluice.scheduling.request import kernels
from sluice.scheduling.request.kernels import Floats, Ints, compiled

UNBOUNDED_TOKENS = 1 << 30
"""More tokens than any sequence has: what fits where no term of a model limits it."""


class StepSample(NamedTuple):
    """The work of one engine step and the time that it took.

    The work is in sums over the batch's sequences, in the order of the coefficients of
    :mod:`sluice.scheduling.request.kernels`; every family's prediction can be made of them. A
    sequence with one new token counts as a decode, whatever it is part of, as an engine computes it
    so.

    Attributes:
        prefill_tokens: sum of ``n`` over the prefills, the sequences with ``n > 1``.
        prefill_square: sum of ``n**2`` over them.
        prefill_cross: sum of ``n * k`` over them.
        prefill_context: sum of ``k`` over them.
        prefills: how many they are.
        decodes: how many sequences have one new token.
        decode_context: sum of ``k`` over those.
        spec_steps: steps of a draft model before the step; 0 without speculation.
        seconds: the time that the step took; 0 where it has not run.
    """

    prefill_tokens: float
    prefill_square: float
    prefill_cross: float
    prefill_context: float
    prefills: float
    decodes: float
    decode_context: float
    spec_steps: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(
        cls, sequences: Iterable[tuple[int, int]], seconds: float = 0.0, spec_steps: float = 0.0
    ) -> StepSample:
        """The step of ``sequences``, each given by its new and its computed tokens."""
        new, computed = [], []
        for tokens, before in sequences:
            new.append(tokens)
            computed.append(before)
        return cls(*work_sums(new, computed), spec_steps, seconds)

    @classmethod
    def of_arrays(cls, new: Ints, computed: Ints, spec_steps: float = 0.0) -> StepSample:
        """The same of arrays: per sequence, its new and its computed tokens."""
        sums = _compiled_sums(new.astype(np.float64), computed.astype(np.float64))
        return cls(*sums, spec_steps)

    @property
    def new_tokens(self) -> float:
        """Sum of ``n`` over all sequences."""
        return self.prefill_tokens + self.decodes

    @property
    def context_tokens(self) -> float:
        """Sum of ``k + n`` over all sequences."""
        return self.prefill_context + self.decode_context + self.new_tokens

    @property
    def quadratic(self) -> float:
        """Sum of ``n * (k + n / 2)`` over all sequences."""
        cross = self.prefill_cross + self.decode_context
        return cross + 0.5 * (self.prefill_square + self.decodes)


def work_sums(
    new: Sequence[float] | Floats, computed: Sequence[float] | Floats
) -> tuple[float, float, float, float, float, float, float]:
    """The sums of a :class:`StepSample` over sequences."""
    tokens = square = cross = context = prefills = decodes = decode_context = 0.0
    for sequence in range(len(new)):
        count, before = new[sequence], computed[sequence]
        if count == 1.0:
            decodes += 1.0
            decode_context += before
        elif count > 1.0:
            prefills += 1.0
            tokens += count
            square += count * count
            cross += count * before
            context += before
    return tokens, square, cross, context, prefills, decodes, decode_context


_compiled_sums = compiled(work_sums)


@compiled
def prefill_within(coefficients: Floats, left_s: float, computed_tokens: int) -> int:
    """Most new tokens of one prefill whose work, by one piece, fits ``left_s``. It holds from two
    tokens on: a smaller result only says that two do not fit."""
    left = (
        left_s
        - coefficients[kernels.PREFILL_SEQUENCE]
        - coefficients[kernels.PREFILL_CONTEXT] * computed_tokens
    )
    if left < 0.0:
        return 0
    if left == inf:
        return UNBOUNDED_TOKENS
    linear = (
        coefficients[kernels.PREFILL_TOKENS] + coefficients[kernels.PREFILL_CROSS] * computed_tokens
    )
    square = coefficients[kernels.PREFILL_SQUARE]
    # The root of square n^2 + linear n = left, in the form that also holds without a square.
    divisor = linear + sqrt(linear * linear + 4.0 * square * left)
    if divisor <= 0.0:
        return 0 if square > 0.0 else UNBOUNDED_TOKENS
    if 2.0 * left >= divisor * UNBOUNDED_TOKENS:
        return UNBOUNDED_TOKENS
    # A whole number of tokens must not be lost to rounding.
    return int(2.0 * left / divisor + 1e-9)


@compiled
def tokens_within(
    pieces: Floats, costs: Floats, until_s: float, computed_tokens: int, most: int
) -> int:
    """Most new tokens of one sequence, up to ``most``, that keep every piece of a step's time
    within ``until_s``. ``costs`` holds what the pieces have come to so far. ``O(pieces)``."""
    fit = most
    for piece in range(pieces.shape[0]):
        if fit > 1:
            fit = min(fit, prefill_within(pieces[piece], until_s - costs[piece], computed_tokens))
    if fit > 1 or most < 1:
        return fit
    # One token is a decode, which has a price of its own.
    for piece in range(pieces.shape[0]):
        if kernels.work_s(pieces[piece], 1.0, computed_tokens) > until_s - costs[piece]:
            return 0
    return 1


@dataclass(frozen=True, kw_only=True, repr=False)
class LatencyModel(ABC):
    """Predicts the time of a step: the largest of its pieces, times a correction and a head-room.

    A subclass is a family: its positional fields are its coefficients. Immutable.

    Args:
        correction: learned factor on the work of the sequences.
        fixed_correction: learned factor on what a step costs before any token is counted. For both
            see :class:`~sluice.scheduling.latency.step_correction.StepCorrection`.
        headroom: factor on every prediction that is wanted, at least 1: a planner that believes in
            steps 5 % longer than they are meets objectives where an exact one would miss half.
        spread: relative error of recent predictions without head-room, root mean square; 0 where
            nothing was learned.

    Attributes:
        pieces: ``float64[pieces, COEFFICIENTS]`` of :mod:`sluice.scheduling.request.kernels`, with
            the factors. Of a sequence with ``n`` new tokens on ``k`` computed ones, the part is
            ``PREFILL_TOKENS n + PREFILL_SQUARE n**2 + PREFILL_CROSS n k + PREFILL_CONTEXT k +
            PREFILL_SEQUENCE`` for ``n > 1`` and ``DECODE_SEQUENCE + DECODE_CONTEXT k`` for
            ``n = 1``. Not to be written to.

    Raises:
        ValueError: a negative or non-finite coefficient, all of them zero, or a factor out of
            range.
    """

    family: ClassVar[str]
    source: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    correction: float = 1.0
    fixed_correction: float = 1.0
    headroom: float = 1.0
    spread: float = 0.0
    pieces: Floats = field(init=False, compare=False)
    _bare: Floats = field(init=False, compare=False)

    def __post_init__(self) -> None:
        coefficients = self.coefficients
        if not all(0 <= value < inf for value in coefficients):
            raise ValueError(f"latency coefficients must be finite and >= 0, got {coefficients}")
        if not any(coefficients):
            raise ValueError("a latency model needs at least one coefficient above 0")
        check_factors(self.correction, self.headroom)
        check_factors(self.fixed_correction, self.headroom)
        bare: Floats = np.array(self._rows(), dtype=np.float64)
        object.__setattr__(self, "_bare", bare)
        pieces = self._pieces(self.correction, self.fixed_correction, self.headroom)
        object.__setattr__(self, "pieces", pieces)

    def __repr__(self) -> str:
        named = zip(self.names, self.coefficients, strict=True)
        names = ("correction", "fixed_correction", "headroom")
        factors = ((name, getattr(self, name)) for name in names)
        shown = ", ".join(f"{name}={value:.3g}" for name, value in (*named, *factors))
        return f"{type(self).__name__}({shown})"

    @property
    @abstractmethod
    def coefficients(self) -> tuple[float, ...]:
        """The family's coefficients in the order of ``names``, without the factors."""

    @abstractmethod
    def _rows(self) -> Sequence[Sequence[float]]:
        """:attr:`pieces` without the factors."""

    @classmethod
    def of(cls, coefficients: Sequence[float]) -> Self:
        """The model with these :attr:`coefficients`.

        Raises:
            ValueError: their number is wrong, or one is impossible.
        """
        if len(coefficients) != len(cls.names):
            raise ValueError(
                f"a model of the family {cls.family} has {len(cls.names)} coefficients "
                f"({', '.join(cls.names)}), got {len(coefficients)}"
            )
        return cls(*coefficients)

    @cached_property
    def fixed_s(self) -> float:
        """Time of a step before any token is counted."""
        return float(self.pieces[:, kernels.FIXED].max())

    def work_s(self, new_tokens: int, computed_tokens: int) -> float:
        """Marginal time of ``new_tokens`` (>= 1) of one sequence on ``computed_tokens`` computed
        ones, by the costliest piece."""
        return kernels.most_work_s(self.pieces, float(new_tokens), float(computed_tokens))

    def step_s(self, step: StepSample) -> float:
        """Time of a whole step; its own ``seconds`` are not looked at. ``O(pieces)``."""
        return float((self.pieces @ np.array((1.0, *step[:7]))).max())

    def parts_s(self, step: StepSample) -> tuple[float, float]:
        """Fixed part and work of a whole step by its costliest piece, without the factors: what
        the correction learns from. ``O(pieces)``."""
        work = np.array((1.0, *step[:7]))
        piece = int((self.pieces @ work).argmax()) if len(self.pieces) > 1 else 0
        fixed_s = float(self._bare[piece, kernels.FIXED])
        return fixed_s, max(0.0, float(self._bare[piece] @ work) - fixed_s)

    def tokens_within(self, seconds: float, computed_tokens: int) -> int:
        """Most new tokens of one sequence on ``computed_tokens`` whose work fits ``seconds``."""
        costs = np.zeros(len(self.pieces))
        return tokens_within(self.pieces, costs, float(seconds), computed_tokens, UNBOUNDED_TOKENS)

    def corrected(
        self, correction: float, fixed_correction: float | None = None, spread: float = 0.0
    ) -> Self:
        """The same model with another correction, of its fixed part, too: the same one without
        ``fixed_correction``; and with the spread that is left. Cheap enough for every step."""
        fixed = correction if fixed_correction is None else fixed_correction
        return self._scaled(correction, fixed, self.headroom, spread)

    def with_headroom(self, headroom: float) -> Self:
        """The same model with another head-room."""
        return self._scaled(self.correction, self.fixed_correction, headroom, self.spread)

    def _scaled(
        self, correction: float, fixed_correction: float, headroom: float, spread: float
    ) -> Self:
        check_factors(correction, headroom)
        check_factors(fixed_correction, headroom)
        model = object.__new__(type(self))
        # What the constructor would do, without checking the coefficients again.
        model.__dict__.update(
            self.__dict__,
            correction=correction,
            fixed_correction=fixed_correction,
            headroom=headroom,
            spread=spread,
            pieces=self._pieces(correction, fixed_correction, headroom),
        )
        model.__dict__.pop("fixed_s", None)
        return model

    def _pieces(self, correction: float, fixed_correction: float, headroom: float) -> Floats:
        pieces: Floats = self._bare * (correction * headroom)
        if fixed_correction != correction:
            pieces[:, kernels.FIXED] = self._bare[:, kernels.FIXED] * (fixed_correction * headroom)
        return pieces


def check_factors(correction: float, headroom: float) -> None:
    """Raise ``ValueError`` unless both are possible factors of a prediction."""
    if not 0 < correction < inf:
        raise ValueError(f"correction must be positive and finite, got {correction}")
    if not 1 <= headroom < inf:
        raise ValueError(f"headroom must be finite and >= 1, got {headroom}")


@dataclass(frozen=True, repr=False)
class LinearLatency(LatencyModel):
    """``a + b * new + c * context + d * quadratic``, where ``new = sum n``, ``context =
    sum (k + n)`` and ``quadratic = sum n * (k + n / 2)``.

    FairBatching §3.2 is the model without ``d``; the last term is the attention of long prefills,
    which ProServe Eq. 5 has too.

    Args:
        a: seconds per step.
        b: seconds per new token.
        c: seconds per context token.
        d: seconds per unit of the quadratic term.
    """

    family = "linear"
    source = "FairBatching §3.2, with an attention term"
    names = ("a", "b", "c", "d")

    a: float
    b: float
    c: float = 0.0
    d: float = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """``a, b, c, d``."""
        return (self.a, self.b, self.c, self.d)

    def _rows(self) -> Sequence[Sequence[float]]:
        a, b, c, d = self.coefficients
        return [(a, b + c, d / 2, d, c, 0.0, b + c + d / 2, c + d)]


@dataclass(frozen=True, repr=False)
class PrefillDecodeLatency(LatencyModel):
    """``t_c + sum over prefills (a_p n**2 + b_p n k + c_p n) + sum over decodes (a_d k + b_d)``.

    ProServe §4.1, Eq. 4 to 7, with ``l_q = n``. We read ``l_kv`` as the tokens computed before the
    step, ``k``; for a decode the other reading moves ``b_d`` by ``a_d``.

    Args:
        a_p, b_p, c_p: seconds of a prefill per ``n**2``, per ``n * k`` and per new token.
        a_d, b_d: seconds of a decode per computed token and per sequence.
        t_c: seconds per step.
    """

    family = "prefill_decode"
    source = "ProServe §4.1, Eq. 4-7"
    names = ("a_p", "b_p", "c_p", "a_d", "b_d", "t_c")

    a_p: float
    b_p: float
    c_p: float
    a_d: float
    b_d: float
    t_c: float

    @property
    def coefficients(self) -> tuple[float, ...]:
        """``a_p, b_p, c_p, a_d, b_d, t_c``."""
        return (self.a_p, self.b_p, self.c_p, self.a_d, self.b_d, self.t_c)

    def _rows(self) -> Sequence[Sequence[float]]:
        return [(self.t_c, self.c_p, self.a_p, self.b_p, 0.0, 0.0, self.b_d, self.a_d)]


@dataclass(frozen=True, repr=False)
class RooflineLatency(LatencyModel):
    """The larger of two lines ``k1 * new tokens + k2 * spec_steps + b``.

    SLOs-Serve §3.1.1 with its ``l = 2``: one line for computing, one for reading the weights. The
    paper counts the draft model's steps per batch; policies plan without it, so the steps are a
    number of the model here, the same for every batch.

    Args:
        k1, k2, b: seconds per new token, per draft step and per step, of the first line.
        k1_other, k2_other, b_other: the same of the second one.
        spec_steps: draft steps before each batch; 0 without speculation.
    """

    family = "roofline"
    source = "SLOs-Serve §3.1.1"
    names = ("k1", "k2", "b", "k1_other", "k2_other", "b_other", "spec_steps")

    k1: float
    k2: float
    b: float
    k1_other: float
    k2_other: float
    b_other: float
    spec_steps: float = 0.0

    @property
    def lines(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """``k1, k2, b`` of both lines."""
        return ((self.k1, self.k2, self.b), (self.k1_other, self.k2_other, self.b_other))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The first line, the second one, and the draft steps."""
        return (*self.lines[0], *self.lines[1], self.spec_steps)

    def _rows(self) -> Sequence[Sequence[float]]:
        return [
            (b + k2 * self.spec_steps, k1, 0.0, 0.0, 0.0, 0.0, k1, 0.0) for k1, k2, b in self.lines
        ]


FAMILIES: dict[str, type[LatencyModel]] = {
    model.family: model for model in (LinearLatency, PrefillDecodeLatency, RooflineLatency)
}
"""Every family of step-time models by name."""
