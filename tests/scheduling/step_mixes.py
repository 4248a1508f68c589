"""Synthetic engines for tests of the online correction: batches, and what they really take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import numpy as np

from sluice.scheduling.latency.model import LinearLatency, StepCorrection, StepSample
from sluice.scheduling.request.kernels import Floats

PROFILE = LinearLatency(a=0.004, b=1.8e-4, c=8e-7, d=2e-8)

Parts = tuple[float, float]
Factors = Callable[[int], Parts]
"""By number of the step: the engine's real factors on the fixed part and on the work."""


class Learner(Protocol):
    def predicted_s(self, fixed_s: float, work_s: float) -> float: ...

    def observe(self, fixed_s: float, work_s: float, real_s: float) -> None: ...


class OneFactor:
    """One factor on the whole step: an exponential average over 20 steps, each of which counts as
    twice too long or too short at most."""

    def __init__(self) -> None:
        self.factor = 1.0

    def predicted_s(self, fixed_s: float, work_s: float) -> float:
        return self.factor * (fixed_s + work_s)

    def observe(self, fixed_s: float, work_s: float, real_s: float) -> None:
        off = min(max(real_s / self.predicted_s(fixed_s, work_s), 0.5), 2.0)
        self.factor *= 0.95 + 0.05 * off


@cache
def decodes(count: int, seed: int = 0, prefill_share: float = 0.0) -> list[Parts]:
    """Batches of 1 to 32 decodes, whose number changes slowly; that share of them has a prefill
    chunk, too."""
    draw = np.random.default_rng(seed)
    running, parts = 8, []
    for _ in range(count):
        running = int(np.clip(running + draw.integers(-1, 2), 1, 32))
        batch = [(1, context) for context in draw.integers(16, 2_000, running).tolist()]
        if draw.random() < prefill_share:
            batch.append((int(draw.integers(2, 513)), int(draw.integers(0, 2_001))))
        parts.append(PROFILE.parts_s(StepSample.of(batch)))
    return parts


@cache
def mixed(count: int, seed: int = 0) -> list[Parts]:
    """Batches of any up to 32 decodes and up to two prefill chunks."""
    draw = np.random.default_rng(seed)
    parts = []
    for _ in range(count):
        contexts = draw.integers(16, 2_000, draw.integers(0, 33))
        batch = [(1, context) for context in contexts.tolist()]
        chunks = draw.integers(0 if batch else 1, 3)
        batch += [(int(draw.integers(2, 513)), int(draw.integers(0, 2_001))) for _ in range(chunks)]
        parts.append(PROFILE.parts_s(StepSample.of(batch)))
    return parts


def errors(
    learner: Learner,
    batches: list[Parts],
    real: Factors,
    noise: float = 0.0,
    outliers: float = 0.0,
    seed: int = 1,
) -> Floats:
    """Relative error of each prediction against the engine's mean time, before its step is seen.

    Args:
        learner: what predicts and learns.
        batches: by the parts of their predictions.
        real: the engine.
        noise: standard deviation of the logarithm of single steps.
        outliers: share of the steps that take ten times as long.
        seed: of both.
    """
    draw = np.random.default_rng(seed)
    noises = np.exp(noise * draw.standard_normal(len(batches)))
    noises[draw.random(len(batches)) < outliers] *= 10.0
    found = []
    for step, (fixed_s, work_s) in enumerate(batches):
        on_fixed, on_work = real(step)
        mean_s = on_fixed * fixed_s + on_work * work_s
        found.append(abs(learner.predicted_s(fixed_s, work_s) / mean_s - 1.0))
        learner.observe(fixed_s, work_s, mean_s * noises[step])
    return np.array(found)


def until_close(errors: Floats) -> int:
    """Steps until every later prediction is within 20 %."""
    wrong = np.flatnonzero(errors > 0.2)
    return int(wrong[-1]) + 1 if len(wrong) else 0


def main() -> None:
    """Print the table of docs/policies/predictions.md: mean errors after a change of one part."""
    mixes = {
        "mostly decodes": [decodes(800, seed, prefill_share=0.05) for seed in range(4)],
        "mostly prefills": [mixed(800, seed) for seed in range(4)],
    }
    changes = {
        "fixed cost 2 times": (2.0, 1.0),
        "tokens 1.5 times": (1.0, 1.5),
        "fixed cost half": (0.5, 1.0),
        "both 1.3 times": (1.3, 1.3),
    }
    print("| the engine's | batches | one factor | two factors |\n|---|---|---|---|")
    for change, to in changes.items():
        for mix, runs in mixes.items():
            one, two = (
                100.0 * np.mean([errors(of(), run, _later(to), 0.05)[400:] for run in runs])
                for of in (OneFactor, StepCorrection)
            )
            print(f"| {change} | {mix} | {one:.1f} % | {two:.1f} % |")


def _later(to: Parts) -> Factors:
    return lambda step: to if step >= 400 else (1.0, 1.0)


if __name__ == "__main__":
    main()
