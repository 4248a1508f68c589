"""Loops of agents: turns over a growing prefix, with the times of tools between them.

Published, as of 28 November 2026: in TraceLab (arXiv 2606.30560; tracelab.cs.washington.edu, 4,265
sessions of Claude Code and Codex) a step has 154,000 input tokens, 95.8 % of them cached, and 523
of output on average; it appends 800 at the median and 6,000 at P90; a session has 15 steps at the
median, 135 at P90. vLLM's AgentX: median 43 turns, 142,000 tokens in, 444 out, more than 96 %
cached, sub-agents in 44 % of the sessions. Spreads follow from these quantiles. Assumed: the tools'
shares and times (file reads 50 ms, test runs minutes), longer results of slower tools, system
prompts of 20,000 tokens, loops of 8 turns for sub-agents, of which up to 3 run at once, and that a
conversation is compacted to a tenth where it would pass the context of 272,000 tokens. All lengths
are scaled by one factor, so that their ratios stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import exp, log
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from sluice.scheduling.request.objective import SLO
from sluice.simulation.generators import ArrivalProcess
from sluice.simulation.workload import Arrival, Turn, Workload

HASHED_TOKENS: Final = 64
"""Tokens of a block of prompts that turns share."""

CONTEXT_TOKENS: Final = 272_000
SYSTEM_TOKENS: Final = 20_000
APPENDED_TOKENS: Final = 5_200
"""Mean of a tool's result: with the output before it 4 % of AgentX's 142,000 tokens."""

OUTPUT_TOKENS: Final = 444
COMPACTED: Final = 0.1
SUB_TURNS: Final = 8.0
MAX_SUB_AGENTS: Final = 3

TURNS_SIGMA: Final = log(135 / 15) / 1.2816
APPENDED_SIGMA: Final = log(6_000 / 800) / 1.2816
OUTPUT_SIGMA: Final = (2 * log(523 / 444)) ** 0.5
"""Deviations of logarithms, from two quantiles or from median and mean."""


class Tool(NamedTuple):
    """Its share of calls; the median and the logarithm's deviation of its time; and how long its
    results are, relative to the others'."""

    name: str
    share: float
    median_s: float
    sigma: float
    results: float


TOOLS: Final = (
    Tool("read", 0.42, 0.05, 0.7, 1.2),
    Tool("search", 0.14, 0.3, 1.0, 0.8),
    Tool("edit", 0.17, 0.1, 0.7, 0.3),
    Tool("shell", 0.21, 2.0, 1.5, 1.0),
    Tool("test", 0.06, 60.0, 0.7, 2.5),
)
AGENT: Final = "agent"
"""The tool that is sub-agents: it takes as long as their loops."""

AGENT_S: Final = 0.05

NO_OBJECTIVE: Final = SLO()

_SHARES: Final = [tool.share for tool in TOOLS]
_RESULTS: Final = sum(tool.share * tool.results for tool in TOOLS)


@dataclass(frozen=True, slots=True)
class Loops:
    """One kind of loops, whose turns have a log-normal number within ``least`` and ``most``.
    ``scale`` multiplies lengths, ``gap_scale`` the times of tools; ``systems``: different system
    prompts; ``sub_agents``: share of loops that have some."""

    name: str = "agent"
    slo: SLO = NO_OBJECTIVE
    turns: float = 43.0
    least: int = 1
    most: int = 1_000
    scale: float = 1 / 16
    gap_scale: float = 1.0
    systems: int = 4
    sub_agents: float = 0.44
    share: float = 1.0


class _Loop:
    """Draws the turns of one loop."""

    def __init__(self, kind: Loops, number: int, first: int, rng: np.random.Generator) -> None:
        self.turns: list[Arrival] = []
        self.kind = kind
        self.rng = rng
        self._first = first
        self._session = number * (MAX_SUB_AGENTS + 1)

    def draw(self, systems: Sequence[Sequence[int]], hashes: Iterator[int]) -> list[Arrival]:
        """All turns, at time 0, each behind those that it follows."""
        kind, rng = self.kind, self.rng
        turns = self._within(kind.turns, kind.least, kind.most)
        at, helpers = 0, 0
        if turns > 1 and rng.random() < kind.sub_agents:
            at, helpers = int(rng.integers(1, turns)), int(rng.integers(1, MAX_SUB_AGENTS + 1))
        system = int(rng.integers(kind.systems))
        main = _Session(self, Turn(self._session), systems[system], hashes)
        before: tuple[int, ...] = ()
        for turn in range(1, turns + 1):
            helping = range(1, helpers + 1) if turn == at else ()
            before = main.speak(before, turn == turns, AGENT if helping else "")
            if helping:
                before = tuple(
                    self._sub_agent(helper, before, systems[kind.systems + system], hashes)
                    for helper in helping
                )
        return self.turns

    def _sub_agent(
        self, number: int, before: tuple[int, ...], system: Sequence[int], hashes: Iterator[int]
    ) -> int:
        """The last turn of a sub-agent, which begins after the turn that calls it."""
        session = _Session(self, Turn(self._session + number, self._session), system, hashes)
        turns = self._within(SUB_TURNS, 1, self.kind.most)
        for turn in range(1, turns + 1):
            before = session.speak(before, turn == turns)
        return before[0]

    def _within(self, median: float, least: int, most: int) -> int:
        """A log-normal number of turns between bounds."""
        logs = NormalDist(log(median), TURNS_SIGMA)
        low, high = logs.cdf(log(least - 0.5)), logs.cdf(log(most + 0.5))
        drawn = exp(logs.inv_cdf(low + (high - low) * self.rng.random()))
        return min(max(round(drawn), least), most)

    def append(self, turn: Arrival) -> int:
        """The index of a new turn in the workload."""
        self.turns.append(turn)
        return self._first + len(self.turns) - 1


class _Session:
    """A conversation as it grows."""

    def __init__(
        self, loop: _Loop, turn: Turn, system: Sequence[int], hashes: Iterator[int]
    ) -> None:
        self._loop = loop
        self._turn = turn
        self._system = system
        self._hashes = hashes
        self._blocks = list(system)
        self._tokens = len(system) * HASHED_TOKENS
        self._gap_s = 0.0
        self._new = self._length(1.0)

    def speak(self, after: tuple[int, ...], ends: bool, tool: str = "") -> tuple[int]:
        """Append a turn, which calls ``tool`` or one that is drawn; its index."""
        kind, rng = self._loop.kind, self._loop.rng
        if self._tokens + self._new > kind.scale * CONTEXT_TOKENS:
            self._blocks = list(self._system)
            self._tokens = len(self._system) * HASHED_TOKENS
            self._tokens += round(COMPACTED * kind.scale * CONTEXT_TOKENS)
        self._tokens += self._new
        while len(self._blocks) < self._tokens // HASHED_TOKENS:
            self._blocks.append(next(self._hashes))
        output = kind.scale * OUTPUT_TOKENS * exp(OUTPUT_SIGMA * rng.standard_normal())
        called = TOOLS[int(rng.choice(len(TOOLS), p=_SHARES))]
        name = "" if ends else tool or called.name
        turn = self._turn._replace(tool=name, after=after, gap_s=self._gap_s)
        arrival = Arrival(0.0, self._tokens, max(1, round(output)), kind.slo, kind.name)
        index = self._loop.append(arrival._replace(block_hashes=tuple(self._blocks), turn=turn))
        self._tokens += arrival.output_tokens
        self._new = self._length(called.results / _RESULTS)
        took_s = called.median_s * exp(called.sigma * rng.standard_normal())
        self._gap_s = AGENT_S if tool else kind.gap_scale * took_s
        return (index,)

    def _length(self, share: float) -> int:
        kind, rng = self._loop.kind, self._loop.rng
        drawn = exp(APPENDED_SIGMA * rng.standard_normal() - APPENDED_SIGMA**2 / 2)
        mean = share * kind.scale * APPENDED_TOKENS
        return max(1, round(min(mean * drawn, kind.scale * CONTEXT_TOKENS / 4)))


def agents(
    name: str, kinds: Sequence[Loops], arrivals: ArrivalProcess, loops: int, seed: int
) -> Workload:
    """``loops`` loops of kinds drawn by share; with one seed, another rate brings the same loops at
    other times. The kinds share system prompts, so they have one scale. Raises ValueError."""
    scale, systems = kinds[0].scale, max(kind.systems for kind in kinds)
    if any(kind.scale != scale or kind.systems != systems for kind in kinds):
        raise ValueError(f"workload {name}: its kinds must have one scale and number of systems")
    clock, chooser, *streams = np.random.default_rng(seed).spawn(2 + loops)
    shares = np.array([kind.share for kind in kinds])
    chosen = chooser.choice(len(kinds), size=loops, p=shares / shares.sum())
    hashes = count()
    blocks = max(1, round(scale * SYSTEM_TOKENS / HASHED_TOKENS))
    prompts = [[next(hashes) for _ in range(blocks)] for _ in range(2 * systems)]
    found: list[Arrival] = []
    times = arrivals.times(loops, clock).tolist()
    for number, (at_s, kind, rng) in enumerate(zip(times, chosen, streams, strict=True), 1):
        turns = _Loop(kinds[kind], number, len(found), rng).draw(prompts, hashes)
        found += [turn._replace(arrival_s=at_s) for turn in turns]
    scaling = f"generated: loops {arrivals.description} (seed {seed})"
    words = f"Loops after TraceLab and AgentX, lengths times {scale:g}."
    return Workload(name, tuple(found), HASHED_TOKENS, scaling, words)
