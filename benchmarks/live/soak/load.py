"""Load and application of a soak: every kind of request, at a steady rate with bursts above the
engines' capacity, and clients that disconnect midway.

As in a replay, the engines are slow and their steps cost no processor time: client, cluster and
engines share the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from sluice.benchmarks.live.application import simulated
from sluice.benchmarks.live.replay.kinds import KINDS, Kind
from sluice.benchmarks.live.replay.load import CLASSES, LIGHT_ENGINE, SHARES, objectives
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

_SHARES: Final = {name: 0.8 * share for name, share in SHARES.items()} | {
    "patient": 0.1,
    "strict": 0.1,
}

LOAD: Final = 0.65
"""Load between bursts, as a share of the engines' capacity: with bursts it is about 80 %."""

LOAD_WITH_FAULTS: Final = 0.5
"""The same with faults, while parts are missing at times."""

BURST: Final = 1.4
"""The same in a burst, without faults: above capacity."""

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
    """All requests of a soak, by number.

    Attributes:
        kinds: of each request.
        leaves: the pieces of text after which its client disconnects, if it does.
    """

    workload: Workload
    kinds: list[Kind]
    leaves: list[int | None]

    def body(self, model: str, number: int, arrival: Arrival) -> dict[str, Any]:
        """The request with this number."""
        return self.kinds[number].body(model, number, arrival)


def make_load(seconds: float, rate: float, seed: int) -> Load:
    """Requests for ``seconds``, at ``rate`` a second between bursts."""
    chance = np.random.default_rng(seed)
    times = _times(chance, seconds, rate)
    count = len(times)
    prompts = _lengths(chance, count, _MEAN_PROMPT, _MOST_PROMPT)
    outputs = _lengths(chance, count, _MEAN_OUTPUT, _MOST_OUTPUT)
    names = chance.choice(list(_SHARES), size=count, p=list(_SHARES.values()))
    objective_of = objectives(ALL_CLASSES)
    arrivals = tuple(
        Arrival(float(time_s), int(prompt), int(output), objective_of[str(name)])
        for time_s, prompt, output, name in zip(times, prompts, outputs, names, strict=True)
    )
    shares = np.array([kind.share for kind in KINDS])
    kinds = [KINDS[index] for index in chance.choice(len(KINDS), count, p=shares / shares.sum())]
    leaves = [
        int(chance.integers(1, arrival.output_tokens))
        if kind.streams and arrival.output_tokens > 1 and chance.random() < LEAVING
        else None
        for kind, arrival in zip(kinds, arrivals, strict=True)
    ]
    return Load(Workload("soak", arrivals), kinds, leaves)


def _times(chance: np.random.Generator, seconds: float, rate: float) -> np.ndarray:
    """Poisson arrivals of two rates, by thinning the higher one."""
    most = rate * BURST / LOAD
    every = np.cumsum(chance.exponential(1 / most, size=round(1.2 * most * seconds) + 50))
    every = every[every < seconds]
    in_burst = every % BURST_EVERY_S >= BURST_EVERY_S - BURST_S
    times: np.ndarray = every[in_burst | (chance.random(len(every)) < LOAD / BURST)]
    return times


def _lengths(chance: np.random.Generator, count: int, mean: float, most: float) -> np.ndarray:
    return np.clip(np.ceil(chance.exponential(mean, size=count)), 1, most)


def configuration(replicas: int, routers: int, batches: Path) -> SluiceConfig:
    """The application's configuration; ``batches`` is its folder of files and batches."""
    router = {"replicas": routers, "batches": {"directory": str(batches)}}
    return simulated(LIGHT_ENGINE, replicas, ALL_CLASSES, router)
