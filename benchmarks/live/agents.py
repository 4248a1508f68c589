"""Agents' loops on a real vLLM engine: ``sluice bench agents --real``.

A turn is a chat with all messages before it: answers and results are words of the stated lengths,
so that what an engine has cached stays a prefix, and no model's text matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, nan
from random import Random
from typing import Final, NamedTuple

import click
import numpy as np
from rich.table import Table

from sluice.benchmarks.experiments.agents import (
    AFTER,
    BACKLOG,
    BEFORE,
    FCFS,
    SHORT_TURNS,
    Backlog,
    compared,
)
from sluice.benchmarks.experiments.grid import Row, Rows, means
from sluice.benchmarks.live import systems as live
from sluice.benchmarks.live.client import End, Json, Outcome
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.mix import WORDS
from sluice.benchmarks.live.peers import LOCAL, Setting, setting_of, stock
from sluice.benchmarks.live.peers import SYSTEMS as PEERS
from sluice.benchmarks.live.systems import Bench, Start, System, campaign, objectives
from sluice.benchmarks.options import choices_option, number_option, show
from sluice.router.config import ServiceClass
from sluice.simulation.agents import AGENT, TOOLS
from sluice.simulation.workload import Arrival, Workload


class Rival(NamedTuple):
    """A system: what starts it, whether each turn states its number in its session as a priority of
    vLLM's, and whether it names its session."""

    start: Callable[[Setting], Start]
    priorities: bool = False
    sessions: bool = False


PRIORITIES: Final = "vLLM, priority by turn"
RIVALS: Final = {
    FCFS: Rival(PEERS["stock"].start),
    PRIORITIES: Rival(partial(stock, "", {"scheduling-policy": "priority"}), priorities=True),
    BEFORE: Rival(PEERS["sluice"].start),
    AFTER: Rival(PEERS["sluice"].start, sessions=True),
}
"""By name. FCFS is vLLM's own server."""

CLASSES: Final = {"agent": ServiceClass(tpot_ms=300)}
SLOS: Final = objectives(CLASSES)

ARGS: Final = {"kv-cache-memory-bytes": 64 << 20, "max-model-len": 7_168}
"""vLLM's: the local model's KV of half of what the long loops have."""

LOAD: Final = Backlog(6, 10, 0.15, 41, 5.0, scale=1 / 48, gaps=0.05, sub_agents=0.0)
WARM_UP: Final = Backlog(1, 2, 1.0, 40, 1.0, scale=1 / 96, gaps=0.0, sub_agents=0.0)


OPTIONS: Final = (
    click.option("--real", is_flag=True, help="The backlog on a vLLM engine here, no simulation."),
    choices_option("--system", "names", of=RIVALS, words="With --real.  [default: all]"),
    number_option(
        "--seconds",
        default=150.0,
        least=5,
        most=3_600,
        words="With --real: turns that have not ended by then are not answered.",
    ),
)
"""Of :func:`measure`, for ``options.with_real``."""


def measure(names: Sequence[str], seconds: float, seeds: Sequence[int], as_json: bool) -> None:
    """Run the backlog on every system, or those of ``names``, one after another."""
    setting = setting_of(LOCAL, ARGS, 1)._replace(classes=CLASSES)
    rows: list[Row] = []
    with campaign() as bench:
        for name in names or RIVALS:
            bench.say(f"starting {name}")
            with RIVALS[name].start(setting)(bench) as system:
                run(bench, system, RIVALS[name], WARM_UP.workload(SLOS["agent"], 0), seconds)
                for seed in seeds:
                    workload = LOAD.workload(SLOS["agent"], seed)
                    outcomes = run(bench, system, RIVALS[name], workload, seconds)
                    figures = figures_of(workload, outcomes)
                    rows.append({"scenario": BACKLOG, "system": name, "seed": seed, **figures})
                    bench.say(f"  {rows[-1]}")
    known = [{name: each for name, each in row.items() if each == each} for row in rows]  # no nan
    show(known, (table(each) for each in (compared(rows),)), as_json)


def run(
    bench: Bench, system: System, rival: Rival, workload: Workload, seconds: float
) -> Sequence[Outcome]:
    """The outcomes of one run; no other run has its texts."""
    conversations = Conversations(f"{rival} {workload.scaling}", rival.priorities)
    # Before the first is sent: the client has no time for it later.
    bodies = [conversations.body(each) for each in workload.arrivals]
    options: Json = {
        "grace_s": seconds - workload.duration_s,
        "body": lambda _, number, __: bodies[number],
        "exact": False,
        "headers": headers if rival.sessions else lambda _: {},
    }
    return live.run(bench, system, {}, seconds, workload, system.processes, **options).outcomes


def headers(arrival: Arrival) -> Mapping[str, str]:
    """What an agent sends with a turn."""
    turn = arrival.turn
    if turn is None:
        return {}
    parent = {"x-parent-session-id": f"loop-{turn.parent}"} if turn.parent else {}
    return {"x-session-id": f"loop-{turn.session}", **parent}


class Conversations:
    """The chats of a run's sessions as they grow; turns are taken in order."""

    def __init__(self, run: str, priorities: bool = False) -> None:
        self._run = run
        self._priorities = priorities
        self._messages: dict[int, list[Json]] = {}
        self._last: dict[int, Arrival] = {}
        self._turns: dict[int, int] = {}

    def body(self, arrival: Arrival) -> Json:
        """The request of a session's next turn."""
        turn = arrival.turn
        assert turn is not None
        last = self._last.get(turn.session)
        before = inf if last is None else last.prompt_tokens + last.output_tokens
        if last is None or last.turn is None or arrival.prompt_tokens <= before:
            messages = self._begun(arrival)
        else:
            name, number = last.turn.tool, self._turns[turn.session]
            call: Json = {"id": f"call-{number}", "type": "function"}
            call["function"] = {"name": name, "arguments": "{}"}
            said = self._words(f"{turn.session} {number} said", last.output_tokens)
            result = self._words(
                f"{turn.session} {number} result", int(arrival.prompt_tokens - before)
            )
            messages = [
                *self._messages[turn.session],
                {"role": "assistant", "content": said, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": result},
            ]
        self._messages[turn.session], self._last[turn.session] = messages, arrival
        number = self._turns[turn.session] = self._turns.get(turn.session, 0) + 1
        more = {"priority": number} if self._priorities else {}
        return {
            "model": MODEL,
            "messages": messages,
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": {}}}
                for name in (*(tool.name for tool in TOOLS), AGENT)
            ],
            "tool_choice": "none",
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }

    def _begun(self, arrival: Arrival) -> list[Json]:
        """A new conversation, or one that was compacted. Half of it is the system prompt, which all
        with the same first block share."""
        turn, (first, *_) = arrival.turn, arrival.block_hashes
        assert turn is not None
        half = arrival.prompt_tokens // 2
        own = self._words(f"{turn.session} {self._turns.get(turn.session)}", half)
        return [
            {"role": "system", "content": self._words(f"system {first}", half)},
            {"role": "user", "content": own},
        ]

    def _words(self, name: str, count: int) -> str:
        return " ".join(Random(f"{self._run} {name}").choices(WORDS, k=max(1, count)))


def figures_of(workload: Workload, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Mean times of the loops that were answered to the end, P95 of the TTFT after a tool, turns a
    second until the last answer, and turns without an answer."""
    loops: dict[int, list[int]] = {}
    for number, arrival in enumerate(workload.arrivals):
        if arrival.turn is not None:
            loops.setdefault(arrival.turn.program, []).append(number)
    short: list[float] = []
    long: list[float] = []
    for own in loops.values():
        ends_s = [outcomes[each].ended_s for each in own if outcomes[each].end is End.ANSWERED]
        if len(ends_s) == len(own):
            took_s = max(end_s or 0.0 for end_s in ends_s) - outcomes[own[0]].sent_s
            (short if len(own) <= SHORT_TURNS else long).append(took_s)
    answered = [each for each in outcomes if each.end is End.ANSWERED]
    after = [
        outcome.ttft_s
        for arrival, outcome in zip(workload.arrivals, outcomes, strict=True)
        if arrival.after and outcome.ttft_s is not None
    ]
    lasted_s = max((each.ended_s or 0.0 for each in answered), default=inf)
    return {
        "short_s": float(np.mean(short)) if short else nan,
        "long_s": float(np.mean(long)) if long else nan,
        "ttft_p50_s": float(np.percentile(after, 50)) if after else nan,
        "ttft_p95_s": float(np.percentile(after, 95)) if after else nan,
        "turns_per_s": len(answered) / lasted_s,
        "unanswered": float(len(outcomes) - len(answered)),
    }


def table(rows: Rows) -> Table:
    """The figures by system."""
    figures = {
        "short_s": ("short, s", 1),
        "short_s_faster": ("faster", 2),
        "long_s": ("long, s", 1),
        "ttft_p50_s": ("TTFT after a tool: P50, s", 2),
        "ttft_p95_s": ("P95, s", 2),
        "turns_per_s": ("turns/s", 2),
        "unanswered": ("turns without an answer", 0),
    }
    every = [{"short_s_faster": nan, **row} for row in rows]
    return means("A backlog of loops on a vLLM engine", ("system",), figures)(every).shown()
