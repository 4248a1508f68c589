"""A fitted step-time model as stored in a file and sent to the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from sluice.scheduling.latency.model import FAMILIES, LatencyModel, LinearLatency, StepSample

KINDS = ("prefill", "decode", "mixed")
"""Kinds of steps, as :func:`kind_of` names them."""


class StepErrors(NamedTuple):
    """Relative errors, ``|predicted - real| / real``, over all the steps that were given. ``bias``:
    all predicted seconds over all real ones, less 1."""

    steps: int
    mape: float
    median: float
    p90: float
    bias: float


def kind_of(step: StepSample) -> str:
    """``decode`` for a step without prefills, ``prefill`` for one without decodes, else
    ``mixed``."""
    if not step.prefills:
        return "decode"
    return "mixed" if step.decodes else "prefill"


def step_errors(model: LatencyModel, steps: Sequence[StepSample]) -> StepErrors:
    """The errors of ``model``, with its factors, on ``steps``.

    Raises:
        ValueError: there are no steps, or one has no time.
    """
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
    """How well a fitted model explains its samples.

    ``mape`` and ``p90_error`` are of ``|predicted - real| / real``; ``r2`` is of the seconds;
    ``dropped`` counts outliers left out of all three. ``held_out`` is the mean error on steps that
    a fit had not seen, ``held_out_without_context`` that of ``a + b * new tokens``; ``None``:
    unknown.
    """

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
    """A fitted model with what it was fitted on, as stored in a JSON file. ``key`` names model,
    engine version and hardware, for which alone the profile holds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    key: str
    family: str
    coefficients: tuple[float, ...]
    report: FitReport | None = None

    @property
    def model(self) -> LatencyModel:
        """The model, uncorrected and without head-room.

        Raises:
            ValueError: there is no such family, or a coefficient is impossible.
        """
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
        """Parse a profile, also one of the older form that has the linear coefficients in fields.

        Raises:
            ValueError: not JSON, a missing, unknown or mistyped field, or an impossible
                coefficient; the text says which."""
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
