"""The requests of ``sluice bench peers``, for real engines and the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Final, NamedTuple

from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival


class Kind(NamedTuple):
    """Requests of one service class: share, ranges of lengths, and number of common prompts."""

    share: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    common: int = 0


KINDS: Final = {
    "chat": Kind(0.6, (160, 640), (16, 128), common=8),
    "code": Kind(0.25, (256, 2_048), (8, 64)),
    "document": Kind(0.15, (1_024, 4_096), (16, 128)),
}

IDLE_TIMES: Final = {"chat": (5.0, 5.0), "code": (5.0, 10.0), "document": (10.0, 10.0)}
"""Objectives as multiples of an idle engine's TTFT and TPOT, after SLOs-Serve Table 3."""

SHARED_TOKENS: Final = 128
"""Tokens of a common prompt, a block of vLLM's on CPUs."""

BURSTS: Final = 2.0
"""Standard deviation over mean of the gaps between bursty arrivals."""


def generated(seed: int, kinds: Mapping[str, Kind] = KINDS) -> Iterator[Arrival]:
    """Requests of ``kinds`` without end, at time 0; each names its kind as its task."""
    chance = Random(seed)
    names, shares = list(kinds), [kind.share for kind in kinds.values()]
    while True:
        (name,) = chance.choices(names, shares)
        kind = kinds[name]
        prompt, output = (
            chance.randint(*span) for span in (kind.prompt_tokens, kind.output_tokens)
        )
        shared = (chance.randrange(kind.common),) if kind.common else ()
        yield Arrival(0.0, prompt, output, SLO(service_class=name), name, shared)
