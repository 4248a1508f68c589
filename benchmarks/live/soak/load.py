"""Load and application of a soak: every kind of request, at a steady rate with bursts above the
engines' capacity, and clients that disconnect midway."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sluice.benchmarks.live.application import simulated
from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.loads import CLASSES, KINDS, LIGHT_ENGINE, SHARES, Kind, objectives
from sluice.deploy.config import SluiceConfig
from sluice.router.config import ServiceClass
from sluice.simulation.workload import Arrival, Workload

ALL_CLASSES: Final = {
    **CLASSES,
    "patient": ServiceClass(
        ttft_ms=3_000, tpot_ms=200, when_unattainable="queue", queue_limit_s=5.0
    ),
    "strict": ServiceClass(ttft_ms=1_500, tpot_ms=150, when_unattainable="reject"),
}
"""The classes of a replay, one that waits in the admission queue for a guarantee, and one that is
refused without a guarantee."""

_SHARES: Final = {
    **{name: 0.8 * share for name, share in SHARES.items()},
    **{"patient": 0.1, "strict": 0.1},
}

LOAD: Final = 0.65
LOAD_WITH_FAULTS: Final = 0.5
BURST: Final = 1.4
"""Load as a share of the engines' capacity: between bursts, the same with faults, and in a burst
without faults."""

BURST_EVERY_S: Final = 60.0
BURST_S: Final = 8.0

LEAVING: Final = 0.05
"""Share of the streams whose client disconnects midway."""

_MEAN_PROMPT, _MOST_PROMPT = 300, 1_500
_MEAN_OUTPUT, _MOST_OUTPUT = 40, 160

CAPACITY: Final = 1 / (
    _MEAN_OUTPUT
    * (LIGHT_ENGINE["step_s"] / LIGHT_ENGINE["max_sequences"] + LIGHT_ENGINE["token_s"])
    + _MEAN_PROMPT * LIGHT_ENGINE["token_s"]
)
"""Approximate capacity of one replica with full batches, requests a second."""


class Load(NamedTuple):
    """All requests of a soak: by number their kinds, and the pieces of text after which their
    clients disconnect, if they do."""

    workload: Workload
    kinds: list[Kind]
    leaves: list[int | None]

    def body(self, model: str, number: int, arrival: Arrival) -> Json:
        """The request with this number."""
        return self.kinds[number].body(model, number, arrival)


def make_load(seconds: float, rate: float, seed: int) -> Load:
    """Requests for ``seconds``, at ``rate`` a second between bursts."""
    chance = np.random.default_rng(seed)
    # Poisson arrivals of two rates, by thinning the higher one.
    most = rate * BURST / LOAD
    times = np.cumsum(chance.exponential(1 / most, size=round(1.2 * most * seconds) + 50))
    times = times[times < seconds]
    in_burst = times % BURST_EVERY_S >= BURST_EVERY_S - BURST_S
    times = times[in_burst | (chance.random(len(times)) < LOAD / BURST)]
    count = len(times)
    prompts = np.clip(np.ceil(chance.exponential(_MEAN_PROMPT, size=count)), 1, _MOST_PROMPT)
    outputs = np.clip(np.ceil(chance.exponential(_MEAN_OUTPUT, size=count)), 1, _MOST_OUTPUT)
    names = chance.choice(list(_SHARES), size=count, p=list(_SHARES.values()))
    objective_of = objectives(ALL_CLASSES)
    arrivals = tuple(
        Arrival(float(time_s), int(prompt), int(output), objective_of[str(name)])
        for time_s, prompt, output, name in zip(times, prompts, outputs, names, strict=True)
    )
    shares = np.array([kind.share for kind in KINDS])
    drawn = chance.choice(len(KINDS), count, p=shares / shares.sum())
    kinds = [KINDS[index] for index in drawn]
    leaves = [
        int(chance.integers(1, arrival.output_tokens))
        if kind.streams and arrival.output_tokens > 1 and chance.random() < LEAVING
        else None
        for kind, arrival in zip(kinds, arrivals, strict=True)
    ]
    return Load(Workload("soak", arrivals), kinds, leaves)


def configuration(replicas: int, routers: int) -> SluiceConfig:
    """The application's configuration."""
    return simulated(LIGHT_ENGINE, replicas, ALL_CLASSES, {"replicas": routers})
