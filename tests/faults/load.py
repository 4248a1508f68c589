"""What clients ask while something breaks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sluice.benchmarks.live.systems import objectives
from sluice.simulation.workload import Arrival, Workload
from tests.faults.kinds import CLASSES, SHARES


@dataclass(frozen=True)
class Load:
    """Poisson arrivals in three classes, ``rate`` a second; one in ``plain`` is not streamed."""

    rate: float = 6.0
    prompt_tokens: tuple[int, int] = (20, 200)
    output_tokens: tuple[int, int] = (20, 80)
    plain: int = 5
    seed: int = 1

    def make(self, seconds: float) -> Workload:
        draw = random.Random(self.seed)
        known = objectives(CLASSES)
        arrivals = []
        at_s = 0.0
        while (at_s := at_s + draw.expovariate(self.rate)) < seconds:
            (name,) = draw.choices(list(SHARES), list(SHARES.values()))
            prompt, output = draw.randint(*self.prompt_tokens), draw.randint(*self.output_tokens)
            arrivals.append(Arrival(at_s, prompt, output, known[name]))
        return Workload("faults", tuple(arrivals))
