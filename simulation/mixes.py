"""Traffic that others have published, by name: each class's lengths, objective and share.

``fairbatching-*``: Table 2 of FairBatching (2025): means, P90 and objectives of parts of BurstGPT,
Qwen-Bailian and Azure 2024. ``llm-d-planner``: use cases of llm-d-incubation/llm-d-planner at
ed2142f, ``src/planner/data/configuration/usecase_slo_workload.json``; targets are the middle of
each range, as for medium latency priority (``docs/traffic_and_slos.md``), its ITL is our TPOT, and
shares are those of equally many users of each. ``inference-perf-chat``: lengths of
kubernetes-sigs/inference-perf at 892bb9a, ``workload-catalog/interactive-chat/config.json``. That
catalogue states no objectives: these are the planner's for a chatbot, and prompts share nothing.
Both as of 28 November 2026. No arrivals are published: they are Poisson at 1 request/s."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from sluice.scheduling.request.objective import SLO
from sluice.simulation.generators import (
    Distribution,
    LengthDistribution,
    Lengths,
    Poisson,
    Task,
    always,
    generate,
)
from sluice.simulation.settings import FAIRBATCHING
from sluice.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class Clipped:
    """A normal or log-normal distribution of this mean and deviation before it is clipped."""

    mean: float
    std: float
    least: int
    most: int
    log_normal: bool = False

    def draw(self, count: int, rng: np.random.Generator) -> Lengths:
        """``count`` independent lengths, tokens."""
        if self.log_normal:
            variance = log(1 + (self.std / self.mean) ** 2)
            drawn = rng.lognormal(log(self.mean) - variance / 2, sqrt(variance), count)
        else:
            drawn = rng.normal(self.mean, self.std, count)
        tokens: Lengths = np.rint(np.clip(drawn, self.least, self.most)).astype(np.int64)
        return tokens


class Published(NamedTuple):
    """The requests of one class; ``share``: relative to the others'."""

    slo: SLO
    prompt: Distribution
    output: Distribution
    share: float = 1.0

    @property
    def name(self) -> str:
        """Of the class."""
        return self.slo.service_class


class Mix(NamedTuple):
    """Classes, and where they were published."""

    source: str
    classes: tuple[Published, ...]


def _use_case(
    name: str,
    ttft_ms: tuple[int, int],
    itl_ms: tuple[int, int],
    prompt: int,
    output: int,
    share: float,
) -> Published:
    slo = SLO(ttft_s=sum(ttft_ms) / 2e3, tpot_s=sum(itl_ms) / 2e3, service_class=name)
    lengths = LengthDistribution.fixed(prompt), LengthDistribution.fixed(output)
    return Published(slo, *lengths, share)


# The share: how many users are active, times the requests of each in a minute.
_PLANNER: Final = (
    _use_case("chatbot", (100, 500), (15, 50), 512, 256, 0.2 * 0.4),
    _use_case("code-completion", (50, 200), (10, 35), 512, 256, 0.25 * 2.0),
    _use_case("code-generation", (150, 600), (15, 45), 1_024, 1_024, 0.15 * 0.3),
    _use_case("translation", (200, 800), (20, 50), 512, 256, 0.15 * 0.2),
    _use_case("content-generation", (200, 800), (20, 50), 512, 256, 0.2 * 0.5),
    _use_case("short-summary", (200, 800), (20, 50), 4_096, 512, 0.15 * 0.2),
    _use_case("document-rag", (400, 1_200), (25, 60), 4_096, 512, 0.2 * 1.0),
    _use_case("long-summary", (800, 3_000), (30, 70), 10_240, 1_536, 0.1 * 0.1),
    _use_case("research", (1_500, 5_000), (30, 80), 10_240, 1_536, 0.1 * 0.03),
)

MIXES: Final = {
    **{
        f"fairbatching-{name}": Mix(
            "Means, P90 and objectives of FairBatching, Table 2.",
            (Published(structs.replace(row.slo, service_class=name), row.prompt, row.output),),
        )
        for name, row in FAIRBATCHING.items()
    },
    "llm-d-planner": Mix("Use cases of llm-d-planner, medium latency priority.", _PLANNER),
    "inference-perf-chat": Mix(
        "Lengths of inference-perf's interactive-chat, objectives of llm-d-planner's chatbot.",
        (
            Published(
                structs.replace(_PLANNER[0].slo, service_class="interactive-chat"),
                Clipped(4_000, 2_500, 500, 15_000, log_normal=True),
                Clipped(300, 150, 10, 1_000),
            ),
        ),
    ),
}
"""By name."""


def workload(name: str, requests: int, seed: int) -> Workload:
    """``requests`` requests of a mix, 1 a second."""
    source, classes = MIXES[name]
    tasks = [
        Task(each.name, each.prompt, each.output, always(each.slo), each.share) for each in classes
    ]
    return generate(name, tasks, Poisson(1.0), requests, seed, source)
