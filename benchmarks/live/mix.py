"""Mixed loads for real engines; prompts are of words that are one token in most models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace as changed
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from sluice.benchmarks.experiments.kinds import (
    BURSTS,
    IDLE_TIMES,
    KINDS,
    SHARED_TOKENS,
    Kind,
    generated,
)
from sluice.benchmarks.live.client import Body, End, Json, LoadError, replay, stream_body
from sluice.router.config import ServiceClass
from sluice.scheduling.request.objective import SLO
from sluice.simulation.generators import Gamma, MakeArrivals, Poisson
from sluice.simulation.mixes import MIXES, Mix, workload
from sluice.simulation.traces import TraceError, load, trace_files
from sluice.simulation.workload import Arrival, Workload, stretched, thinned, window

_PUBLISHED: Final = sorted(
    (each.slo for mix in MIXES.values() for each in mix.classes), key=lambda slo: slo.columns[0]
)

LONGEST: Final = max(kind.prompt_tokens[1] + kind.output_tokens[1] for kind in KINDS.values())
"""Tokens of the longest generated request."""

SLACK: Final = 5.0
"""Of published objectives that an idle engine misses: the tightest, as a multiple of its time."""

MIX_REQUESTS: Final = 50_000
"""Requests drawn of a published mix."""

_ALONE = 5
WORDS: Final = """
the of and to in a is that for it as was with be by on not he this are or his from at which but have
an had they you were their one all we can her has there been if more when will would who so she
other its may these what them than some him time into only could new then do first any my such
""".split()  # noqa: SIM905


Classes = dict[str, ServiceClass]


class Pattern(NamedTuple):
    """When requests arrive: as in ``trace``, or ``kinds`` with the process of ``arrivals``. The
    classes are those of ``kinds``, of a published mix with the mean lengths."""

    name: str
    arrivals: MakeArrivals = Poisson
    trace: Workload | None = None
    kinds: Mapping[str, Kind] = KINDS
    mix: Mix | None = None

    def classes(self, idle: Mapping[str, tuple[float, float]], scale: float) -> Classes:
        """The service classes, by the times of :func:`alone`."""
        return classes_of(idle, scale) if self.mix is None else slowed(self.mix, idle, scale)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of prompts that requests share."""
        return SHARED_TOKENS if self.trace is None else self.trace.block_tokens

    def drawn(self, seed: int) -> Iterator[Arrival]:
        """Requests without end; recorded ones in their order from a place drawn by ``seed``."""
        if self.trace is None:
            return generated(seed, self.kinds)
        every = self.trace.arrivals
        place = Random(seed).randrange(len(every))
        return cycle((*every[place:], *every[:place]))

    def workload(self, rate: float, seconds: float, seed: int, slos: Mapping[str, SLO]) -> Workload:
        """The requests of ``seconds`` at a mean ``rate``; recorded ones are thinned or compressed.
        Raises :class:`LoadError` if none arrives."""
        make = self._generated if self.trace is None else self._recorded
        found = make(rate, seconds, seed)
        if not len(found):
            raise LoadError(
                f"{self.name}: no request arrives in {seconds:g} s at {rate:.3g} requests/s: take "
                "more --seconds"
            )
        stated = tuple(
            each._replace(
                slo=slos[each.task if each.task in self.kinds else kind_of(each.prompt_tokens)]
            )
            for each in found.arrivals
        )
        return changed(found, arrivals=stated)

    def _generated(self, rate: float, seconds: float, seed: int) -> Workload:
        chance = np.random.default_rng(seed)
        times = self.arrivals(rate).times(round(2 * rate * seconds) + 100, chance)
        pairs = zip(times[times < seconds].tolist(), self.drawn(seed), strict=False)
        arrivals = tuple(each._replace(arrival_s=time_s) for time_s, each in pairs)
        return Workload(self.name, arrivals, SHARED_TOKENS)

    def _recorded(self, rate: float, seconds: float, seed: int) -> Workload:
        trace = self.trace
        assert trace is not None
        share = rate / trace.rate
        scaled = thinned(trace, share, seed) if share < 1 else stretched(trace, 1 / share)
        start_s = Random(seed).uniform(0.0, max(0.0, scaled.duration_s - seconds))
        return window(scaled, start_s, seconds)


GENERATED: Final = {
    "poisson": Pattern("poisson"),
    "bursty": Pattern("bursty", partial(Gamma, cv=BURSTS)),
}

PATTERNS: Final = (*GENERATED, *MIXES)
"""Names of those that need no trace."""


def kind_of(prompt_tokens: int) -> str:
    """The kind of a recorded request."""
    fitting = (name for name, kind in KINDS.items() if prompt_tokens <= kind.prompt_tokens[1])
    return next(fitting, list(KINDS)[-1])


def recorded(folder: Path, most_tokens: int) -> dict[str, Pattern]:
    """A pattern per trace of a folder, up to ``most_tokens``; raises :class:`TraceError`."""
    traces = [_fitting(load(path), most_tokens, str(path)) for path in trace_files(folder)]
    return {trace.name: Pattern(trace.name, trace=trace) for trace in traces}


def published(name: str, most_tokens: int) -> Pattern:
    """One of the published mixes, up to ``most_tokens``; raises :class:`TraceError`."""
    trace = _fitting(workload(name, MIX_REQUESTS, 0), most_tokens, name)
    present = {each.task for each in trace.arrivals}
    kinds = {}
    for each in MIXES[name].classes:
        if each.name in present:
            prompt, output = round(each.prompt.mean), round(each.output.mean)
            kinds[each.name] = Kind(each.share, (prompt, prompt), (output, output))
    return Pattern(name, trace=trace, kinds=kinds, mix=MIXES[name])


def _fitting(whole: Workload, most_tokens: int, where: str) -> Workload:
    every = whole.arrivals
    kept = [each for each in every if each.prompt_tokens + each.output_tokens <= most_tokens]
    if len(kept) < 2:
        raise TraceError(f"{where}: has no two requests of at most {most_tokens} tokens")
    words = f"{whole.description} Left out {len(whole) - len(kept)} over {most_tokens} tokens."
    return changed(whole, arrivals=tuple(kept), description=words)


def body_of(run: str, block_tokens: int = SHARED_TOKENS, priorities: bool = False) -> Body:
    """Makes requests with words drawn by the run's name, so that no engine has cached them."""
    order = [*KINDS, *(slo.service_class for slo in _PUBLISHED)]  # less TTFT is more urgent

    def body(model: str, number: int, arrival: Arrival) -> Json:
        words: list[str] = []
        for block in arrival.block_hashes:
            words += Random(f"{run} block {block}").choices(WORDS, k=block_tokens)
        own = arrival.prompt_tokens - len(words)
        words += Random(f"{run} {number}").choices(WORDS, k=max(0, own))
        text = " ".join(words[: arrival.prompt_tokens])
        more: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
        if priorities:
            more["priority"] = order.index(arrival.slo.service_class)
        return stream_body(model, text, arrival.output_tokens, **more)

    return body


def alone(
    url: str, model: str, kinds: Mapping[str, Kind] = KINDS
) -> dict[str, tuple[float, float]]:
    """Median TTFT and TPOT, seconds, of each kind's longest request. Raises :class:`LoadError`."""
    found = {}
    for name, kind in kinds.items():
        arrival = Arrival(0.0, kind.prompt_tokens[1], kind.output_tokens[1], SLO(), name)
        seen = []
        for number in range(_ALONE + 1):
            one, body = Workload("one", (arrival,)), body_of(f"alone {name} {number}")
            (outcome,) = asyncio.run(replay(url, model, one, body=body, exact=False))
            if outcome.end is not End.ANSWERED:
                raise LoadError(f"a request was not answered: {outcome.reason}")
            if not outcome.ttft_s or not outcome.tpot_s:
                raise LoadError("all tokens of a request came together: its TPOT is unknown")
            seen.append((outcome.ttft_s, outcome.tpot_s))
        ttfts_s, tpots_s = zip(*seen[1:], strict=True)  # the first one warms up
        found[name] = (median(ttfts_s), median(tpots_s))
    return found


def classes_of(idle: Mapping[str, tuple[float, float]], scale: float = 1.0) -> Classes:
    """The service class of each kind, by the times of :func:`alone`; ``scale``: factor on all."""
    return {
        name: ServiceClass(
            ttft_ms=round(1e3 * scale * ttft_times * idle[name][0], 1),
            tpot_ms=round(1e3 * scale * tpot_times * idle[name][1], 2),
        )
        for name, (ttft_times, tpot_times) in IDLE_TIMES.items()
    }


def slowed(mix: Mix, idle: Mapping[str, tuple[float, float]], scale: float = 1.0) -> Classes:
    """The service class of each class of a published mix: its objectives, unless an idle engine
    misses one. Then all TTFT, or all TPOT, are one factor longer, and their ratios remain."""
    stated = {each.name: each.slo.columns[:2] for each in mix.classes if each.name in idle}
    worst = [
        max(idle[name][number] / each[number] for name, each in stated.items())
        for number in range(2)
    ]
    ttft_times, tpot_times = (scale * (1.0 if each <= 1 else SLACK * each) for each in worst)
    return {
        name: ServiceClass(
            ttft_ms=round(1e3 * ttft_s * ttft_times, 1), tpot_ms=round(1e3 * tpot_s * tpot_times, 2)
        )
        for name, (ttft_s, tpot_s) in stated.items()
    }
