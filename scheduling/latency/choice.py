"""Which form of latency model an engine gets: the one that predicts steps best that its fit has not
seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sluice.scheduling.latency.fit import best_of_each_kind, fit, fit_without_context
from sluice.scheduling.latency.model import LatencyModel, PrefillDecodeLatency, StepSample
from sluice.scheduling.latency.profile import FitReport

FOLDS = 5
"""Each step is predicted by a fit to the other parts of this many."""

LEAST_GAIN = 0.1
"""By at least this share its error must be less. A smaller difference is chance on a disturbed
machine, and ``linear`` has fewer coefficients to extrapolate with."""

LEAST_PRICE = 0.1
"""Of the price of ``linear``. With less, budgets in tokens would be nearly infinite, such as
FairBatching's prefill admission budget."""


def best_fit(samples: Sequence[StepSample], trim: float = 0.1) -> tuple[LatencyModel, FitReport]:
    """The ``linear`` or the ``prefill_decode`` model of ``samples``: the latter where its mean
    error on held-out steps is clearly less (:data:`LEAST_GAIN`), if it has a price for each new
    token (:data:`LEAST_PRICE`).

    ProServe §4.1 prices prefills and decodes apart (Eq. 4 to 7), FairBatching §3.2 by the same
    terms: which one fits is a property of the engine. The roofline is left out: policies plan with
    the marginal time of a token, which it makes zero in a part of its range.

    The report has the held-out errors of the chosen form, and of ``linear`` without its context
    terms; ``None`` with too few samples to hold any out. Deterministic.

    Raises:
        ValueError: as :func:`~sluice.scheduling.latency.fit.fit` of the family ``linear``.
    """
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
    """Mean of ``|predicted - real| / real`` over the steps, each predicted by a fit without it; the
    worst ``trim`` share of each kind is left out, as in fits. ``None`` with too few steps."""
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
