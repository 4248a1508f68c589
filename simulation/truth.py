"""The real time of a simulated step, and its planner's belief.

The two differ on purpose: the truth has noise and its own constants, while the belief is another
model with a head-room, corrected online from the times that it sees, as in production.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.latency.step_correction import StepCorrection, caution
from sluice.scheduling.request.kernels import Floats

_DRAWS = 4096


class Truth:
    """Real step times: a model's prediction times log-normal noise of mean 1.

    Args:
        model: its predictions are taken as the real times, its factors included.
        noise: standard deviation of the logarithm; 0.03 is about 3 %.

    Raises:
        ValueError: a negative or non-finite noise.
    """

    def __init__(self, model: LatencyModel, noise: float = 0.03) -> None:
        if not 0 <= noise < inf:
            raise ValueError(f"noise must be finite and >= 0, got {noise}")
        self.model = model
        self.noise = noise


class Noise:
    """The factors of one engine's steps, in order: a pure function of the generator's seed."""

    def __init__(self, sigma: float, rng: np.random.Generator) -> None:
        self._sigma = sigma
        self._rng = rng
        self._factors: list[float] = []

    def next(self) -> float:
        """The factor of the next step."""
        if not self._sigma:
            return 1.0
        if not self._factors:
            # Many at once: a draw of one costs as much as a hundred.
            normal = self._rng.standard_normal(_DRAWS)
            factors = np.exp(self._sigma * normal - self._sigma**2 / 2)
            self._factors = factors[::-1].tolist()
        return self._factors.pop()


@dataclass(frozen=True, slots=True)
class Belief:
    """The latency model given to planners.

    Attributes:
        model: latency model, head-room included.
        online: whether real times correct it, by
            :class:`~sluice.scheduling.latency.step_correction.StepCorrection`.
    """

    model: LatencyModel
    online: bool = True


class Planner:
    """One engine's belief as it learns, as a replica's local scheduler does it."""

    def __init__(self, belief: Belief) -> None:
        self.latency = belief.model
        """The model to plan with now."""
        self.pieces: Floats = belief.model.corrected(1.0).with_headroom(1.0).pieces
        """Its pieces without correction and head-room."""
        self._correction = StepCorrection() if belief.online else None

    @property
    def reported(self) -> LatencyModel:
        """The model used for guarantees: without head-room, as production reports it."""
        model = self.latency.with_headroom(1.0)
        if self._correction is None:
            return model
        careful = caution(self._correction.spread)
        return model.corrected(model.correction * careful, model.fixed_correction * careful)

    def observe(self, fixed_s: float, work_s: float, real_s: float) -> None:
        """Learn from one step; its predicted parts come from :attr:`pieces`."""
        if self._correction is None:
            return
        learned = self._correction
        learned.observe(fixed_s, work_s, real_s)
        self.latency = self.latency.corrected(learned.work, learned.fixed, learned.spread)
