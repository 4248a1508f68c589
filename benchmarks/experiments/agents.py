"""Agents' loops among others: how long short ones take in a backlog, and what of their KV is still
there when a tool has its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from heapq import heappop, heappush
from itertools import takewhile
from math import inf, isnan, nan
from typing import NamedTuple

import numpy as np
from msgspec import structs

from sluice.benchmarks.experiments.grid import (
    Experiment,
    Product,
    Row,
    Rows,
    Scaled,
    Value,
    first,
    having,
    means,
)
from sluice.benchmarks.experiments.systems import (
    ADMISSION,
    DEFAULT,
    ROUTER,
    SETUPS,
    Contender,
    Setup,
    System,
    colocated,
    run_cluster,
)
from sluice.benchmarks.report import Table
from sluice.scheduling.request.kernels import Ints
from sluice.scheduling.request.objective import MAX_PRIORITY, MIN_PRIORITY, SLO
from sluice.simulation.agents import NO_OBJECTIVE, Loops, agents
from sluice.simulation.config import ClusterConfig, LoopDeadline
from sluice.simulation.generators import Poisson, Task, always, generate
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.requests import Requests
from sluice.simulation.run import Result
from sluice.simulation.settings import SLOS_SERVE_OUTPUTS, SLOS_SERVE_PROMPTS
from sluice.simulation.workload import Arrival, Workload, merged

FCFS, LLM_D, BEFORE, AFTER = "FCFS", "llm-d's queue", "Sluice without sessions", "Sluice"
BY_TURN, LRU = "vLLM, priority by turn", "Sluice, least recently used"


class Contestant(NamedTuple):
    """A system, whether it gets to know which session a turn is of and what it calls, and how many
    requests may be in flight for each replica while others wait in its router; the objective of
    turns in a backlog; whether turns state their number as a priority, and engines keep KV by
    worth."""

    label: str
    system: System
    sessions: bool = True
    in_flight: int = 0
    slo: SLO = NO_OBJECTIVE
    by_turn: bool = False
    keep: bool = True


_STOCK = System("min_load", Contender("fcfs", "fcfs"))
_PRIORITIES = System("min_load", Contender("sarathi_priority", "sarathi_priority"))
_SLUICE = System(ROUTER, DEFAULT, ADMISSION)
_PACED = SLO(tpot_s=0.1, service_class="agent")
CONTESTANTS = (
    Contestant(FCFS, _STOCK),
    Contestant(BY_TURN, _PRIORITIES, by_turn=True),
    *(Contestant(f"{LLM_D}, {limit} in flight", _STOCK, in_flight=limit) for limit in (4, 16)),
    Contestant(BEFORE, _SLUICE, sessions=False),
    Contestant(AFTER, _SLUICE),
    Contestant(f"{BEFORE}, TPOT", _SLUICE, sessions=False, slo=_PACED),
    Contestant(f"{AFTER}, TPOT", _SLUICE, slo=_PACED),
)
BY_MEMORY = (
    *(each for each in CONTESTANTS if each.label in (FCFS, BY_TURN, BEFORE, AFTER)),
    Contestant(LRU, _SLUICE, keep=False),
)

SHORT_TURNS, LONG_TURNS = 5, 40
"""Most turns of a short loop, and fewest of a long one."""

BATCH_TOKENS = 2_048
"""Of the engine: with as many as usual a backlog's step takes most of a second."""


def engine(setup: str, kv_tokens: int) -> Setup:
    """An engine of a setup, with this memory."""
    own = SETUPS[setup]
    limits = {
        "kv_blocks": kv_tokens // own.engine.block_tokens,
        "max_batch_tokens": BATCH_TOKENS,
    }
    return own._replace(engine=own.engine.model_copy(update=limits))


def anonymous(workload: Workload) -> Workload:
    """The same requests at the same times, none of which says what it is a turn of."""
    made = [
        each
        if each.turn is None
        else each._replace(turn=each.turn._replace(session=0, parent=0, tool=""))
        for each in workload.arrivals
    ]
    return replace(workload, arrivals=tuple(made))


def prioritised(workload: Workload) -> Workload:
    """The same requests, of which earlier turns are more important, the first ten by number."""
    turns, made = Counter[int](), list[Arrival]()
    for each in workload.arrivals:
        if each.turn is not None:
            turns[each.turn.session] += 1
            priority = max(MIN_PRIORITY, MAX_PRIORITY + 1 - turns[each.turn.session])
            each = each._replace(slo=structs.replace(each.slo, priority=priority))
        made.append(each)
    return replace(workload, arrivals=tuple(made))


def run(workload: Workload, by: Contestant, setup: Setup, replicas: int, seed: int) -> Result:
    """One run of a contestant."""
    known = workload if by.sessions else anonymous(workload)
    if by.by_turn:
        known = prioritised(known)
    setup = setup._replace(engine=setup.engine.model_copy(update={"keep_sessions": by.keep}))
    layout = colocated(replicas, in_flight=replicas * by.in_flight)
    return run_cluster(known, by.system, setup, layout, seed).result


GAPS = 0.3
"""Factor on the times of tools in the backlog: an engine that is scaled down is faster, too."""


class Backlog(NamedTuple):
    """How much of a backlog there is: long loops, which begin together, and short ones, which come
    while these last."""

    long: int
    short: int
    per_s: float
    most_turns: int = 60
    begin_s: float = 30.0
    scale: float = 1 / 16
    gaps: float = GAPS
    sub_agents: float = 0.44

    def workload(self, slo: SLO, seed: int) -> Workload:
        """Both kinds; they share nothing."""
        every = Loops("agent", slo, scale=self.scale, gap_scale=self.gaps)
        short = replace(every, least=1, most=SHORT_TURNS, sub_agents=0.0)
        long = replace(every, least=LONG_TURNS, most=self.most_turns, sub_agents=self.sub_agents)
        parts = (
            agents("short", [short], Poisson(self.per_s), self.short, seed),
            agents("long", [long], Poisson(self.long / self.begin_s), self.long, seed),
        )
        return merged("backlog", parts)


BACKLOG_KV_TOKENS = 131_072


def measure_backlog(seed: int, system: Contestant, backlog: Backlog) -> Mapping[str, float]:
    """Mean times of short and long loops, seconds, and turns a second until the last has ended."""
    workload = backlog.workload(system.slo, seed)
    result = run(workload, system, engine("8b", BACKLOG_KV_TOKENS), 1, seed)
    short: list[float] = []
    long: list[float] = []
    for turns, seconds in loop_times(workload, result):
        (short if turns <= SHORT_TURNS else long).append(seconds)
    return {
        "short_s": float(np.mean(short)),
        "short_p95_s": float(np.percentile(short, 95)),
        "long_s": float(np.mean(long)),
        "turns_per_s": len(workload) / result.end_s,
        "prefilled": float(prefilled(result)),
    }


def prefilled(result: Result) -> int:
    """Tokens that were computed and are no later token of an output."""
    outputs = sum(arrival.output_tokens - 1 for arrival in result.requests.arrivals)
    return result.computed_tokens - outputs


def least_missing(workload: Workload, requests: Requests, kv_tokens: int) -> Ints:
    """Tokens that each turn computes of its prompt, in order, where blocks are evicted by who knows
    the future (Belady), and only chats' KV takes memory beside: none does with fewer that runs the
    turns in the order of their first tokens."""
    offsets = requests.offsets[requests.first_stage]
    began_s, ended_s = requests.emitted_s[offsets[:-1]], requests.emitted_s[offsets[1:] - 1]
    arrivals, size = workload.arrivals, workload.block_tokens
    alone = np.array([each.turn is None for each in arrivals])
    tokens = np.array([each.prompt_tokens for each in arrivals])
    turns = [key for key in np.argsort(began_s).tolist() if not alone[key]]
    blocks = [arrivals[key].block_hashes[: tokens[key] // size] for key in turns]
    uses: dict[int, list[int]] = {}
    for turn in range(len(turns) - 1, -1, -1):
        for block in blocks[turn]:
            uses.setdefault(block, []).append(turn)
    # The next use of each block that is held; on top of the heap the latest, of a deeper block.
    held: dict[int, float] = {}
    latest: list[tuple[float, int, int]] = []
    missing = np.zeros(len(arrivals), np.int64)
    for turn, key in enumerate(turns):
        found = takewhile(held.__contains__, blocks[turn])
        missing[key] = tokens[key] - size * sum(1 for _ in found)
        for depth, block in enumerate(blocks[turn]):
            uses[block].pop()
            held[block] = uses[block][-1] if uses[block] else inf
            heappush(latest, (-held[block], -depth, block))
        beside = tokens[alone & (began_s <= began_s[key]) & (ended_s > began_s[key])].sum()
        while len(held) > (kv_tokens - beside) // size:
            until, _, block = heappop(latest)
            if held.get(block) == -until:
                del held[block]
    return missing


def loop_times(workload: Workload, result: Result) -> list[tuple[int, float]]:
    """Turns, sub-agents' included, and seconds of each loop; those with a failed turn are left
    out."""
    requests = result.requests
    ended_s = requests.emitted_s[requests.offsets[requests.first_stage[1:]] - 1]
    loops: dict[int, list[int]] = {}
    for key, arrival in enumerate(workload.arrivals):
        if arrival.turn is not None:
            loops.setdefault(arrival.turn.program, []).append(key)
    begun_s = [workload.arrivals[own[0]].arrival_s for own in loops.values()]
    took_s = [
        (len(own), float(ended_s[own].max()) - begin_s)
        for own, begin_s in zip(loops.values(), begun_s, strict=True)
    ]
    return [each for each in took_s if not isnan(each[1])]


class Crowd(NamedTuple):
    """Loops that live at the same time, on an engine with memory for a ``third`` of them, and chats
    beside them."""

    loops: int
    chats: int
    chats_per_s: float
    most_turns: int = 60
    third: float = 1 / 3

    @property
    def kv_tokens(self) -> int:
        """The engine's memory: this share of what the live loops have, which is at the mean half of
        a context."""
        return int(self.third * self.loops * MEAN_TOKENS)

    def workload(self, seed: int) -> Workload:
        """Loops and chats."""
        kind = Loops("agent", _PACED, least=LONG_TURNS, most=self.most_turns)
        loops = agents("loops", [kind], Poisson(self.loops / 30), self.loops, seed)
        prompt, output = (
            SLOS_SERVE_PROMPTS["chatbot"].lengths,
            SLOS_SERVE_OUTPUTS["chatbot"].lengths,
        )
        chat = Task("chat", prompt, output, always(CHAT))
        chats = generate("chats", [chat], Poisson(self.chats_per_s), self.chats, seed)
        return merged("crowd", (loops, replace(chats, block_tokens=loops.block_tokens)))


MEAN_TOKENS = 8_000
CHAT = SLO(ttft_s=1.0, tpot_s=0.1, service_class="chat")


def measure_crowd(seed: int, system: Contestant, crowd: Crowd) -> Mapping[str, float]:
    """P95 of the TTFT of turns with a tool's result, seconds; prefill tokens, and the least of them
    for turns in this order; and of the chats the shares that were promised, and that kept it."""
    workload = crowd.workload(seed)
    result = run(workload, system, engine("8b", crowd.kv_tokens), 1, seed)
    requests, measured = result.requests, stages(result.requests)
    after = np.array([bool(each.after) for each in workload.arrivals])
    chats = np.array([each.turn is None for each in workload.arrivals])
    promised = ~np.isnan(requests.promised_s) & chats
    met = attained(requests, measured, TPOTMetric.MEAN)
    loops = loop_times(workload, result)
    least = least_missing(workload, requests, crowd.kv_tokens)
    tokens = np.array([each.prompt_tokens for each in workload.arrivals])
    return {
        "ttft_p50_s": float(np.percentile(measured.ttft_s[after], 50)),
        "ttft_p95_s": float(np.percentile(measured.ttft_s[after], 95)),
        "prefilled": float(prefilled(result)),
        "least": float(least.sum() + tokens[chats].sum()),
        "least_p95": float(np.percentile(least[after], 95)),
        "loop_s": float(np.mean([seconds for _, seconds in loops])),
        "promised": float(promised.sum() / chats.sum()),
        "kept": float(met[promised].mean()) if promised.any() else nan,
        "met": float(met[chats].mean()),
    }


class Stream(NamedTuple):
    """Loops of all lengths that come one after another."""

    loops: int
    most_turns: int = 60

    def workload(self, per_s: float, seed: int) -> Workload:
        """The loops; their median is TraceLab's."""
        kind = Loops("agent", _PACED, turns=15.0, most=self.most_turns, gap_scale=GAPS)
        return agents("stream", [kind], Poisson(per_s), self.loops, seed)


DEADLINE = LoopDeadline(deadline_s=300.0, idle_s=100.0)


def measure_deadlines(seed: int, per_s: float, stream: Stream) -> Mapping[str, float]:
    """Loops that were promised their deadline, of all; and kept it, of the promised and of all."""
    layout = colocated(1, loops={"agent": DEADLINE})
    setup = engine("8b", SETUPS["8b"].engine.kv_tokens)
    result = run_cluster(stream.workload(per_s, seed), _SLUICE, setup, layout, seed).result
    total = sum(result.loops.values())
    promised = sum(number for ending, number in result.loops.items() if ending.promised)
    kept = [number for ending, number in result.loops.items() if ending.kept and ending.promised]
    met = sum(number for ending, number in result.loops.items() if ending.kept)
    return {
        "loops": float(total),
        "promised": promised / total,
        "kept": sum(kept) / promised if promised else nan,
        "met": met / total,
    }


# How each run compares with another one of the same workload.

BACKLOG, CROWD, DEADLINES = "backlog", "short of KV", "deadlines"
_BESIDE = {BACKLOG: FCFS, CROWD: LRU}


def compared(rows: Rows) -> Rows:
    """The rows with ratios to first come, first served, or to KV kept by time of use."""
    return [{**row, **_ratios(row, _other(rows, row))} for row in rows]


def _other(rows: Rows, row: Row) -> Row:
    same: dict[str, Value] = {name: row[name] for name in ("scenario", "seed")}
    found = having(rows, same | {"system": _BESIDE.get(str(row["scenario"]), "")})
    return found[0] if found else {}


def _ratios(row: Row, other: Row) -> Row:
    over = {name: float(row[name]) / float(other[name]) for name in other if name in _FIGURES}
    if "least" in row and other:
        over["least"] = float(row["least"]) / float(other["prefilled"])
    faster = {f"{name}_faster": 1 / over[name] for name in ("short_s", "long_s") if name in over}
    return {**{f"{name}_ratio": value for name, value in over.items()}, **faster}


_FIGURES = ("short_s", "long_s", "turns_per_s", "ttft_p95_s", "prefilled", "loop_s")


def by_loop(rows: Rows) -> Table:
    """What a backlog does to short and to long loops."""
    figures = {
        "short_s": ("short, s", 1),
        "short_s_faster": ("faster", 2),
        "short_p95_s": ("P95, s", 1),
        "long_s": ("long, s", 1),
        "long_s_ratio": ("over FCFS", 3),
        "turns_per_s_ratio": ("turns/s over FCFS", 3),
        "prefilled_ratio": ("prefill tokens over FCFS", 3),
    }
    note = (
        f"Mean time of loops of up to {SHORT_TURNS} turns, and of {LONG_TURNS} or more; faster: "
        "that of FCFS over its own. TPOT: turns state one of 0.1 s."
    )
    table = means("A backlog of loops", ("system",), figures, note)
    return table(having(rows, {"scenario": BACKLOG}))


def by_memory(rows: Rows) -> Table:
    """What too little KV memory does to turns after a tool, and to chats."""
    figures = {
        "ttft_p50_s": ("TTFT P50, s", 2),
        "ttft_p95_s": ("P95, s", 2),
        "ttft_p95_s_ratio": ("P95 over LRU", 3),
        "prefilled_ratio": ("prefill tokens over LRU", 3),
        "least_ratio": ("least by any eviction", 3),
        "loop_s_ratio": ("loops' time over LRU", 3),
        "promised": ("chats promised", 3),
        "kept": ("kept", 4),
        "met": ("chats met", 3),
    }
    note = f"TTFT of turns that bring a tool's result. LRU: {LRU}."
    table = means("KV memory for a third of the loops", ("system",), figures, note)
    return table(having(rows, {"scenario": CROWD}))


def by_deadline(rows: Rows) -> Table:
    """How many loops are promised their class's deadline, and keep it."""
    figures = {
        "loops": ("loops", 0),
        "promised": ("promised", 3),
        "kept": ("kept, of these", 4),
        "met": ("in time, of all", 3),
    }
    note = f"Deadline of a loop: {DEADLINE.deadline_s:g} s; level {ClusterConfig().promise_level}."
    table = means("Loops with a deadline", ("per_s",), figures, note)
    return table(having(rows, {"scenario": DEADLINES}))


EXPERIMENT = Experiment(
    "agents",
    "ours; lengths and turns of TraceLab (arXiv 2606.30560) and vLLM's AgentX",
    "Do short loops of agents wait behind long ones, and is their KV there when their tools have "
    "results?",
    setting="Closed loops: a turn arrives when the tool has taken its time after the last answer. "
    f"Lengths are 1/16 of the published ones, on one engine (8b, batches of {BATCH_TOKENS:,}"
    f" tokens). {BACKLOG}: long loops all begin within half a minute, short ones come while these "
    f"last; times of tools x {GAPS:g}. {CROWD}: memory for a third of the live loops, chats beside "
    f"them. {DEADLINES}: loops of a class that gives each {DEADLINE.deadline_s:g} s.",
    grids=[
        Product(
            measure_backlog,
            {"system": CONTESTANTS},
            {"backlog": Scaled(Backlog(2, 2, 0.5, 41), Backlog(60, 60, 0.06))},
            {"scenario": BACKLOG},
        ),
        Product(
            measure_crowd,
            {"system": BY_MEMORY},
            {"crowd": Scaled(Crowd(8, 10, 1.0, 41), Crowd(48, 1_500, 3.0))},
            {"scenario": CROWD},
        ),
        Product(
            measure_deadlines,
            {"per_s": first((0.2, 0.4, 0.6))},
            {"stream": Scaled(Stream(30, 5), Stream(400))},
            {"scenario": DEADLINES},
        ),
    ],
    tables=(by_loop, by_memory, by_deadline),
    derive=compared,
    seeds=3,
)
