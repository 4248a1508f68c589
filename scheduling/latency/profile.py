"""Latency profiles: step-time models fitted to measured steps, stored and sent to the controller.

Least squares on relative errors, as a plan of 5 ms needs its 5 % as much as one of 200 ms;
coefficients >= 0; the worst samples of each kind left out, as a shared machine makes outliers that
are not the engine's. Deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import inf
from typing import Any, ClassVar, NamedTuple

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
        """Parse a profile. Raises ValueError, whose text says what is wrong."""
        try:
            profile: LatencyProfile = TypeAdapter(cls).validate_json(text)
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


MIN_FIT_SAMPLES = 8
"""Fewest samples of a fit; one with more than four coefficients needs twice their number."""


def fit(
    samples: Sequence[StepSample], family: str = "linear", trim: float = 0.1
) -> tuple[LatencyModel, FitReport]:
    """The model of ``family`` that explains ``samples`` best, without the worst ``trim`` share of
    each kind, and how well it does. Raises ValueError for an unknown family, too few usable
    samples, or ``trim`` outside [0, 0.5]."""
    if not 0 <= trim <= 0.5:
        raise ValueError(f"trim must be from 0 to 0.5, got {trim}")
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    data = _usable(samples)
    if family == "roofline":
        return _fit_roofline(data, trim)
    return _fit_one_piece(FAMILIES[family], data, trim)


def fit_without_context(
    samples: Sequence[StepSample], trim: float = 0.1
) -> tuple[LatencyModel, FitReport]:
    """The ``linear`` model with ``a`` and ``b`` alone: FairBatching §3.2 compares its own to it."""
    return _fit_one_piece(LinearLatency, _usable(samples), trim, 2)


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
    lines, report = _trimmed(work @ np.array(units).T, data, trim)
    coefficients = np.zeros(len(family.names))
    coefficients[:count] = lines[0]
    return family.of(coefficients.tolist()), report


def _fit_roofline(data: Floats, trim: float) -> tuple[RooflineLatency, FitReport]:
    tokens = _column(data, "prefill_tokens") + _column(data, "decodes")
    design = np.column_stack([tokens, _column(data, "spec_steps"), np.ones(len(data))])
    lines, report = _trimmed(design, data, trim, _two_lines, 6)
    return RooflineLatency.of([*lines.ravel().tolist(), 0.0]), report


def _column(data: Floats, name: str) -> Floats:
    column: Floats = data[:, StepSample._fields.index(name)]
    return column


def _trimmed(
    design: Floats,
    data: Floats,
    trim: float,
    solve: Callable[[Floats, Floats], Floats] | None = None,
    coefficients: int = 0,
) -> tuple[Floats, FitReport]:
    """Fit, leave the worst out, and fit again: the lines, the largest of whose products with a row
    of the design is the prediction."""
    solve, seconds = solve or _one_line, _column(data, "seconds")
    least = max(MIN_FIT_SAMPLES, 2 * (coefficients or design.shape[1]))
    if len(design) < least:
        raise ValueError(f"a latency fit needs at least {least} samples, got {len(design)}")
    errors = np.abs(_predict(solve(design, seconds), design) / seconds - 1)
    kept = best_of_each_kind(errors, _column(data, "prefills"), min(trim, 1 - least / len(design)))
    design, real = design[kept], seconds[kept]
    lines = solve(design, real)
    predicted_s = _predict(lines, design)
    errors = np.abs(predicted_s / real - 1)
    spread = float(np.sum((real - real.mean()) ** 2))
    return lines, FitReport(
        samples=len(real),
        dropped=len(seconds) - len(real),
        mape=float(errors.mean()),
        p90_error=float(np.quantile(errors, 0.9)),
        r2=1 - float(np.sum((predicted_s - real) ** 2)) / spread if spread > 0 else 0.0,
    )


def best_of_each_kind(errors: Floats, prefills: Floats, trim: float) -> Ints:
    """The steps' indices without the worst ``trim`` share of those with and without prefills."""
    kept = []
    for kind in (np.flatnonzero(prefills > 0), np.flatnonzero(prefills == 0)):
        order = kind[np.argsort(errors[kind], kind="stable")]
        kept.append(order[: round(len(kind) * (1 - trim))])
    return np.concatenate(kept)


def _predict(lines: Floats, design: Floats) -> Floats:
    predicted: Floats = (design @ lines.T).max(axis=1)
    return predicted


def _two_lines(design: Floats, seconds: Floats) -> Floats:
    """The best of fits that split at a quartile, and reassign samples until none moves."""
    line = _one_line(design, seconds)
    best = np.concatenate([line, line])
    least = _squares(best, design, seconds)
    for share in (0.25, 0.5, 0.75):
        upper = design[:, 0] > np.quantile(design[:, 0], share)
        for _ in range(50):  # it settles in a few
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


def best_fit(samples: Sequence[StepSample], trim: float = 0.1) -> tuple[LatencyModel, FitReport]:
    """The ``linear`` model, or ``prefill_decode`` where its held-out error is clearly less and it
    has a price for each new token. No roofline: it can make a token's marginal time zero. Raises
    ValueError as ``fit``."""
    model, report = fit(samples, trim=trim)
    error = held_out_error(samples, fit, trim)
    if error is None:
        return model, report
    apart = partial(fit, family="prefill_decode")
    error_apart = held_out_error(samples, apart, trim)
    # A smaller difference is chance.
    if error_apart is not None and error_apart < 0.9 * error:
        rival, own = apart(samples, trim=trim)
        c_p, b = rival.coefficients[2], model.coefficients[1]
        # With a smaller price of a token, budgets in tokens would be nearly infinite.
        if c_p > 0.1 * b:
            model, report, error = rival, own, error_apart
    without = held_out_error(samples, fit_without_context, trim)
    return model, replace(report, held_out=error, held_out_without_context=without)


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
