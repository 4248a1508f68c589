"""Latency profiles: step-time models fitted to measured steps, stored and sent to the controller.

Least squares on relative errors, as a plan of 5 ms needs its 5 % as much as one of 200 ms;
coefficients >= 0; the worst samples of each kind left out, as a shared machine makes outliers that
are not the engine's. Deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple, overload

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from sluice.scheduling.latency.model import (
    FAMILIES,
    LatencyModel,
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
    StepSample,
)
from sluice.scheduling.latency.request_model import Interaction, InteractionLatency, PolynomialTTFT
from sluice.scheduling.request.kernels import COEFFICIENTS, Floats, Ints

KINDS = ("prefill", "decode", "mixed")
"""Kinds of steps, as :func:`kind_of` names them."""


class StepErrors(NamedTuple):
    """Relative errors ``|predicted - real| / real``; ``bias``: total predicted over total real,
    less 1."""

    steps: int
    mape: float
    median: float
    p90: float
    bias: float


def kind_of(step: StepSample) -> str:
    """``prefill``, ``decode`` or ``mixed``."""
    if not step.prefills:
        return "decode"
    return "mixed" if step.decodes else "prefill"


def step_errors(model: LatencyModel, steps: Sequence[StepSample]) -> StepErrors:
    """The errors of ``model``, with its factors. Raises ValueError without steps or with a timeless
    one."""
    if not steps:
        raise ValueError("errors need at least one step")
    real = np.array([step.seconds for step in steps])
    if not (real > 0).all():
        raise ValueError("every step must have taken some time")
    predicted = np.array([model.step_s(step) for step in steps])
    errors = np.abs(predicted / real - 1)
    return StepErrors(
        steps=len(steps),
        mape=float(errors.mean()),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        bias=float(predicted.sum() / real.sum() - 1),
    )


def errors_by_kind(model: LatencyModel, steps: Sequence[StepSample]) -> dict[str, StepErrors]:
    """The errors on all steps, under ``all``, and on those of each kind that there is."""
    parts = {kind: [step for step in steps if kind_of(step) == kind] for kind in KINDS}
    found = {kind: step_errors(model, part) for kind, part in parts.items() if part}
    return {"all": step_errors(model, steps)} | found


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well a fit explains its samples, without the ``dropped`` outliers: relative errors, and
    ``r2`` of the seconds. ``held_out``: mean error on steps that a fit had not seen;
    ``held_out_without_context``: that of ``a + b * new tokens``; None: unknown."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    samples: int
    dropped: int
    mape: float
    p90_error: float
    r2: float
    held_out: float | None = None
    held_out_without_context: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """A fitted model as stored in JSON, valid for the model, engine and hardware of ``key``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    key: str
    family: str
    coefficients: tuple[float, ...]
    report: FitReport | None = None

    @property
    def model(self) -> LatencyModel:
        """The model without correction or head-room. Raises ValueError if it is impossible."""
        if self.family not in FAMILIES:
            raise ValueError(
                f"unknown family {self.family!r}; known: {', '.join(sorted(FAMILIES))}"
            )
        return FAMILIES[self.family].of(self.coefficients)

    @classmethod
    def of(cls, key: str, model: LatencyModel, report: FitReport | None = None) -> LatencyProfile:
        """The profile of a fitted ``model``; its correction and its head-room are not stored."""
        return cls(key, model.family, model.coefficients, report)

    def to_json(self) -> str:
        """JSON text, readable by :meth:`from_json`."""
        return TypeAdapter(LatencyProfile).dump_json(self, indent=2).decode()

    @classmethod
    def from_json(cls, text: str) -> LatencyProfile:
        """Parse a profile, also of the older form with the linear coefficients in fields. Raises
        ValueError, whose text says what is wrong."""
        try:
            fields = TypeAdapter(Any).validate_json(text)
            named = isinstance(fields, dict) and "family" not in fields and "a" in fields
            stored: type[Any] = _NamedLinear if named else cls
            profile: LatencyProfile | _NamedLinear = TypeAdapter(stored).validate_json(text)
            if isinstance(profile, _NamedLinear):
                profile = profile.profile
            _ = profile.model
        except ValidationError as error:
            details = "; ".join(
                f"{'.'.join(map(str, part['loc'])) or 'text'}: {part['msg']}"
                for part in error.errors(include_url=False)
            )
            raise ValueError(f"not a latency profile: {details}") from error
        except ValueError as error:
            raise ValueError(f"not a latency profile: {error}") from error
        return profile


@dataclass(frozen=True, slots=True)
class _NamedLinear:
    """The stored form from before there were families."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    key: str
    a: float
    b: float
    c: float
    d: float
    report: FitReport | None = None

    @property
    def profile(self) -> LatencyProfile:
        coefficients = (self.a, self.b, self.c, self.d)
        return LatencyProfile(self.key, LinearLatency.family, coefficients, self.report)


MIN_FIT_SAMPLES = 8
"""Fewest samples of a fit; one with more than four coefficients needs twice their number."""

MOST_ROUNDS = 50
"""Most reassignments of samples to lines in a roofline fit. It settles in a few."""

_START_SHARES = (0.25, 0.5, 0.75)

BatchFamily = Literal["linear", "prefill_decode", "roofline"]
RequestFamily = Literal["interaction", "polynomial_ttft"]
Solver = Callable[[Floats, Floats], Floats]


class _Fit(NamedTuple):
    """``lines``: the prediction is the largest of their products with a row of the design."""

    lines: Floats
    predicted_s: Floats
    seconds: Floats
    dropped: int


@overload
def fit(
    samples: Sequence[StepSample], family: Literal["linear"] = "linear", trim: float = 0.1
) -> tuple[LinearLatency, FitReport]: ...
@overload
def fit(
    samples: Sequence[StepSample], family: Literal["prefill_decode"], trim: float = 0.1
) -> tuple[PrefillDecodeLatency, FitReport]: ...
@overload
def fit(
    samples: Sequence[StepSample], family: Literal["roofline"], trim: float = 0.1
) -> tuple[RooflineLatency, FitReport]: ...
@overload
def fit(
    samples: Sequence[StepSample], family: Literal["interaction"], trim: float = 0.1
) -> tuple[InteractionLatency, FitReport]: ...
@overload
def fit(
    samples: Sequence[StepSample], family: Literal["polynomial_ttft"], trim: float = 0.1
) -> tuple[PolynomialTTFT, FitReport]: ...
def fit(
    samples: Sequence[StepSample],
    family: BatchFamily | RequestFamily = "linear",
    trim: float = 0.1,
) -> tuple[LatencyModel | InteractionLatency | PolynomialTTFT, FitReport]:
    """The model of ``family`` that explains ``samples`` best, without the worst ``trim`` share of
    each kind, and how well it does. ``interaction`` is fitted to steps of fresh prefills or decodes
    alone (002 §4.2), ``polynomial_ttft`` to single fresh prefills (FlowPrefill). Raises ValueError
    for an unknown family, too few usable samples, or ``trim`` outside [0, 0.5]."""
    if not 0 <= trim <= 0.5:
        raise ValueError(f"trim must be from 0 to 0.5, got {trim}")
    known = (*FAMILIES, "interaction", "polynomial_ttft")
    if family not in known:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(known)}")
    data = _usable(samples)
    if family == "interaction":
        return _fit_interaction(data, trim)
    if family == "polynomial_ttft":
        return _fit_polynomial(data, trim)
    if family == "roofline":
        return _fit_roofline(data, trim)
    return _fit_one_piece(FAMILIES[family], data, trim)


def fit_without_context(
    samples: Sequence[StepSample], trim: float = 0.1
) -> tuple[LinearLatency, FitReport]:
    """The ``linear`` model with ``a`` and ``b`` alone: FairBatching §3.2 compares its own to it."""
    found = _fit_one_piece(LinearLatency, _usable(samples), trim, 2)
    return LinearLatency.of(found[0].coefficients), found[1]


def _usable(samples: Sequence[StepSample]) -> Floats:
    usable = [s for s in samples if s.new_tokens > 0 and 0 < s.seconds < inf]
    data: Floats = np.array(usable, dtype=np.float64).reshape(len(usable), len(StepSample._fields))
    return data


def _fit_one_piece(
    family: type[LatencyModel], data: Floats, trim: float, count: int | None = None
) -> tuple[LatencyModel, FitReport]:
    """With the first ``count`` coefficients only, the others 0; default: with all."""
    if family is PrefillDecodeLatency:
        for kind in ("prefills", "decodes"):
            if not _column(data, kind).any():
                raise ValueError(f"no sample has {kind}, so their time cannot be fitted")
    # What one second of each coefficient adds to the piece.
    units = [family.of(unit.tolist()).pieces[0] for unit in np.eye(len(family.names))[:count]]
    work = np.column_stack([np.ones(len(data)), data[:, : COEFFICIENTS - 1]])
    found = _trimmed(work @ np.array(units).T, data, trim)
    coefficients = np.zeros(len(family.names))
    coefficients[:count] = found.lines[0]
    return family.of(coefficients.tolist()), _report(found)


def _fit_roofline(data: Floats, trim: float) -> tuple[RooflineLatency, FitReport]:
    tokens = _column(data, "prefill_tokens") + _column(data, "decodes")
    design = np.column_stack([tokens, _column(data, "spec_steps"), np.ones(len(data))])
    found = _trimmed(design, data, trim, _two_lines, 6)
    return RooflineLatency.of([*found.lines.ravel().tolist(), 0.0]), _report(found)


def _fit_interaction(data: Floats, trim: float) -> tuple[InteractionLatency, FitReport]:
    prefills, decodes = _column(data, "prefills"), _column(data, "decodes")
    fresh = (decodes == 0) & (_column(data, "prefill_context") == 0)
    fits = []
    for chosen, sequences, tokens in (
        (fresh, prefills, _column(data, "prefill_tokens")),
        (prefills == 0, decodes, _column(data, "decode_context")),
    ):
        own, batch = data[chosen], sequences[chosen]
        # 002 has one length per batch: the mean stands for it.
        length = tokens[chosen] / batch
        design = np.column_stack([batch * length, batch, length, np.ones(len(batch))])
        fits.append(_trimmed(design, own, trim))
    prefill, decode = (Interaction(*each.lines[0].tolist()) for each in fits)
    return InteractionLatency(prefill, decode), _report(*fits)


def _fit_polynomial(data: Floats, trim: float) -> tuple[PolynomialTTFT, FitReport]:
    alone = (_column(data, "prefills") == 1) & (_column(data, "decodes") == 0)
    alone &= _column(data, "prefill_context") == 0
    tokens = _column(data, "prefill_tokens")[alone]
    design = np.vander(tokens, 3, increasing=True)
    found = _trimmed(design, data[alone], trim)
    return PolynomialTTFT(tuple(found.lines[0].tolist())), _report(found)


def _column(data: Floats, name: str) -> Floats:
    column: Floats = data[:, StepSample._fields.index(name)]
    return column


def _trimmed(
    design: Floats,
    data: Floats,
    trim: float,
    solve: Solver | None = None,
    coefficients: int = 0,
) -> _Fit:
    """Fit, leave the worst out, and fit again."""
    solve, seconds = solve or _one_line, _column(data, "seconds")
    least = max(MIN_FIT_SAMPLES, 2 * (coefficients or design.shape[1]))
    if len(design) < least:
        raise ValueError(f"a latency fit needs at least {least} samples, got {len(design)}")
    errors = np.abs(_predict(solve(design, seconds), design) / seconds - 1)
    kept = best_of_each_kind(errors, _column(data, "prefills"), min(trim, 1 - least / len(design)))
    design, real = design[kept], seconds[kept]
    lines = solve(design, real)
    return _Fit(lines, _predict(lines, design), real, len(seconds) - len(kept))


def best_of_each_kind(errors: Floats, prefills: Floats, trim: float) -> Ints:
    """The steps' indices without the worst ``trim`` share of those with and without prefills."""
    kept = []
    for kind in (np.flatnonzero(prefills > 0), np.flatnonzero(prefills == 0)):
        order = kind[np.argsort(errors[kind], kind="stable")]
        kept.append(order[: round(len(kind) * (1 - trim))])
    return np.concatenate(kept)


def _report(*fits: _Fit) -> FitReport:
    predicted = np.concatenate([each.predicted_s for each in fits])
    seconds = np.concatenate([each.seconds for each in fits])
    errors = np.abs(predicted / seconds - 1)
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    return FitReport(
        samples=len(seconds),
        dropped=sum(each.dropped for each in fits),
        mape=float(errors.mean()),
        p90_error=float(np.quantile(errors, 0.9)),
        r2=1 - float(np.sum((predicted - seconds) ** 2)) / spread if spread > 0 else 0.0,
    )


def _predict(lines: Floats, design: Floats) -> Floats:
    predicted: Floats = (design @ lines.T).max(axis=1)
    return predicted


def _two_lines(design: Floats, seconds: Floats) -> Floats:
    """The best of fits that split at a quartile, and reassign samples until none moves."""
    line = _one_line(design, seconds)
    best = np.concatenate([line, line])
    least = _squares(best, design, seconds)
    for share in _START_SHARES:
        upper = design[:, 0] > np.quantile(design[:, 0], share)
        for _ in range(MOST_ROUNDS):
            if min(upper.sum(), (~upper).sum()) < design.shape[1]:
                break
            sides = [_one_line(design[side], seconds[side]) for side in (upper, ~upper)]
            lines = np.concatenate(sides)
            error = _squares(lines, design, seconds)
            if error < least:
                best, least = lines, error
            higher = design @ lines[0] > design @ lines[1]
            if (higher == upper).all():
                break
            upper = higher
    return best


def _squares(lines: Floats, design: Floats, seconds: Floats) -> float:
    return float(np.sum((_predict(lines, design) / seconds - 1) ** 2))


def _one_line(design: Floats, seconds: Floats) -> Floats:
    """Relative least squares with coefficients >= 0, ``float64[1, columns]``: the best of the free
    optima, one per set of columns, that are >= 0."""
    relative = design / seconds[:, None]
    scale = relative.max(axis=0)
    columns = np.flatnonzero(scale > 0).tolist()
    relative[:, columns] /= scale[columns]
    augmented = np.column_stack([relative, np.ones(len(design))])
    factor: Floats = np.asarray(np.linalg.qr(augmented, mode="r"))
    matrix, target = factor[:, :-1], factor[:, -1]
    best = np.zeros((1, design.shape[1]))
    least = inf
    for size in range(1, len(columns) + 1):
        for chosen in map(list, combinations(columns, size)):
            solution = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            error = float(np.sum((matrix[:, chosen] @ solution - target) ** 2))
            if error < least and solution.min() >= 0:
                least = error
                best[:] = 0
                best[0, chosen] = solution / scale[chosen]
    return best


FOLDS = 5
"""Each step is predicted by a fit to the other parts of this many."""

LEAST_GAIN = 0.1
"""By at least this share its error must be less: a smaller difference is chance."""

LEAST_PRICE = 0.1
"""Of the price of ``linear``. With less, budgets in tokens would be nearly infinite."""


def best_fit(samples: Sequence[StepSample], trim: float = 0.1) -> tuple[LatencyModel, FitReport]:
    """The ``linear`` model, or ``prefill_decode`` where its held-out error is clearly less and it
    has a price for each new token. No roofline: it can make a token's marginal time zero. Raises
    ValueError as ``fit``."""
    model, report = fit(samples, trim=trim)
    chosen: tuple[LatencyModel, FitReport] = (model, report)
    error = held_out_error(samples, fit, trim)
    if error is None:
        return chosen
    apart = held_out_error(samples, _fit_apart, trim)
    if apart is not None and apart < (1 - LEAST_GAIN) * error:
        rival, own = _fit_apart(samples, trim)
        if rival.c_p > LEAST_PRICE * model.b:
            chosen, error = (rival, own), apart
    without = held_out_error(samples, fit_without_context, trim)
    return chosen[0], replace(chosen[1], held_out=error, held_out_without_context=without)


def held_out_error(
    samples: Sequence[StepSample], fitted: Callable[..., tuple[LatencyModel, Any]], trim: float
) -> float | None:
    """Mean relative error, each step predicted by a fit without it; None with too few steps."""
    usable = [step for step in samples if step.new_tokens > 0 and 0 < step.seconds < np.inf]
    part = np.random.default_rng(0).permutation(len(usable)) % FOLDS
    errors = np.zeros(len(usable))
    for held in range(FOLDS):
        seen = [step for step, own in zip(usable, part, strict=True) if own != held]
        try:
            model, _ = fitted(seen, trim=trim)
        except ValueError:
            return None
        for place in np.flatnonzero(part == held):
            step = usable[place]
            errors[place] = abs(model.step_s(step) / step.seconds - 1)
    prefills = np.array([step.prefills for step in usable])
    return float(errors[best_of_each_kind(errors, prefills, trim)].mean())


def _fit_apart(
    samples: Sequence[StepSample], trim: float
) -> tuple[PrefillDecodeLatency, FitReport]:
    return fit(samples, "prefill_decode", trim)
