"""The load of the real experiment on guarantees: an open loop in bursts, of three classes."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from sluice.benchmarks.live.client import Body, Json, stream_body
from sluice.benchmarks.live.loads import objectives
from sluice.router.config import ServiceClass
from sluice.simulation.workload import Arrival, Workload


class Kind(NamedTuple):
    """Requests of one class: their share, and the ranges of their uniform lengths."""

    share: float
    objective: ServiceClass
    prompt_words: tuple[int, int]
    output_tokens: tuple[int, int]


KINDS: Final = {
    "chat": Kind(0.6, ServiceClass(ttft_ms=600, tpot_ms=120), (10, 250), (8, 120)),
    "code": Kind(0.2, ServiceClass(ttft_ms=2_500, tpot_ms=150), (150, 1_200), (4, 50)),
    "document": Kind(0.2, ServiceClass(ttft_ms=9_000, tpot_ms=300), (700, 1_900), (16, 150)),
}
NO_OBJECTIVE: Final = "no-objective"
"""The class of requests that are never guaranteed: no margin is learned from them."""

CLASSES: Final = {name: kind.objective for name, kind in KINDS.items()} | {
    NO_OBJECTIVE: ServiceClass()
}
SLOS: Final = objectives(CLASSES)

_SHAPE = 0.5  # of the gamma distribution of the times between arrivals: their variation is 1.4
_WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "mint", "oak", "sun"]


def make_load(rate: float, seconds: float, seed: int) -> Workload:
    """Arrivals in bursts for ``seconds``, of classes and lengths drawn by ``seed``.

    Raises:
        ValueError: no request arrives in that time.
    """
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    now_s = chance.gammavariate(_SHAPE, 1 / (_SHAPE * rate))
    while now_s < seconds:
        arrivals.append(draw(chance, now_s))
        now_s += chance.gammavariate(_SHAPE, 1 / (_SHAPE * rate))
    if not arrivals:
        raise ValueError(f"no request arrives in {seconds:g} s at {rate:g} requests/s")
    return Workload("promises", tuple(arrivals))


def draw(chance: random.Random, arrival_s: float) -> Arrival:
    """A request of a class and with lengths drawn by ``chance``."""
    name = chance.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
    prompt, output = KINDS[name].prompt_words, KINDS[name].output_tokens
    return Arrival(arrival_s, chance.randint(*prompt), chance.randint(*output), SLOS[name])


def body_of(run: str) -> Body:
    """A function that makes the requests of a run. Their words are drawn by the run's name, so that
    no engine has cached a prompt's prefix from another run."""

    def body(model: str, number: int, arrival: Arrival) -> Json:
        words = random.Random(f"{run} {number}").choices(_WORDS, k=arrival.prompt_tokens)
        tokens = arrival.output_tokens
        return stream_body(model, " ".join(words), tokens, ignore_eos=True, temperature=0)

    return body
