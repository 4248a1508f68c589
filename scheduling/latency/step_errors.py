"""How far a latency model is off for measured steps: all of them, and by kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sluice.scheduling.latency.model import LatencyModel, StepSample

KINDS = ("prefill", "decode", "mixed")
"""Kinds of steps, as :func:`kind_of` names them."""


class StepErrors(NamedTuple):
    """Relative errors, ``|predicted - real| / real``, over all the steps that were given: no
    outlier is left out.

    Attributes:
        steps: how many.
        mape: the mean.
        median: half of the steps stay below it, whatever the others do.
        p90: what nine steps of ten stay below; the worst tenth lies above.
        bias: all predicted seconds over all real ones, less 1: above 0 the model is too slow.
    """

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
    """The errors on all steps, under ``all``, and on those of each kind that there is.

    Raises:
        ValueError: as :func:`step_errors`.
    """
    parts = {kind: [step for step in steps if kind_of(step) == kind] for kind in KINDS}
    found = {kind: step_errors(model, part) for kind, part in parts.items() if part}
    return {"all": step_errors(model, steps)} | found
