"""Cost of the controller's decisions, for every routing policy: ``sluice bench decision``.

The floor is round robin without admission. The time line (Poisson queries, steady reports) is
computed from measured processor times, so that other processes hardly affect it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
import random
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing, redirect_stdout
from functools import partial
from typing import Any

import click
from rich.table import Table

from sluice.benchmarks.live.report import table
from sluice.benchmarks.micro.decision_fleet import FleetMessages, figures
from sluice.benchmarks.options import as_json, choices_option, number_option, show
from sluice.controller.config import NO_ADMISSION, ControllerConfig
from sluice.scheduling.placement.placer import MAX_TOGETHER
from sluice.scheduling.routing import POLICIES

SIZES = (64, 512)
"""Of the fleets."""

ACTOR_REPLICAS = 64
QUERIES_PER_S = 500.0
REPORTS_PER_S = 64 * 50.0
"""Of all replicas together."""


BATCH = 64
"""Queries in a call, where they are batched."""

TOGETHER = "slos_serve, together"
CONNECTION = "connection"
LASTING_S = 7_200.0
"""A benchmark's fleet says hello only once, and must not go stale during the measurement."""

Cell = dict[str, Any]


class Inside:
    """A controller with a fleet in its mirror, called in this process."""

    def __init__(self, config: ControllerConfig, replicas: int) -> None:
        # It imports Ray, which must not happen before `sluice serve` has set Ray's environment.
        from sluice.controller.actor import Controller

        self._rng = random.Random(replicas)
        self._messages = FleetMessages(replicas)
        self._controller = Controller(config)
        self._keys = itertools.count(1 << 50)
        self._placed: list[int] = []
        self._epoch = 0

    async def hello(self) -> Inside:
        """Register the fleet."""
        for index in range(self._messages.replicas):
            reply = await self._controller.hello(self._messages.hello(index))
            self._epoch = reply.epoch
        return self

    async def decide(self, queries: int = 1) -> int:
        """Nanoseconds of processor time of one call with ``queries`` queries."""
        queries_sent = [self._messages.query(key) for key in itertools.islice(self._keys, queries)]
        started = time.thread_time_ns()
        reply = await self._controller.route(queries_sent)
        took = time.thread_time_ns() - started
        for query, decision in zip(queries_sent, reply.decisions, strict=True):
            if decision.replica_id is None:
                raise RuntimeError(f"no replica was chosen: {decision.reason}")
            self._placed.append(query.key)
        return took

    async def report(self) -> int:
        """Nanoseconds of processor time of one report; it ends all requests placed until now."""
        ended, self._placed = tuple(self._placed), []
        index = self._rng.randrange(self._messages.replicas)
        delta = self._messages.delta(index, self._epoch, ended)
        started = time.thread_time_ns()
        reply = await self._controller.report(delta)
        took = time.thread_time_ns() - started
        if reply.resync:
            raise RuntimeError("a report of the benchmark was out of step")
        return took

    async def release(self) -> None:
        """Release all requests placed until now, as routers do."""
        placed, self._placed = self._placed, []
        await self._controller.release(placed)

    async def reservations(self) -> int:
        """Decisions that no replica has confirmed and no router has released."""
        return (await self._controller.figures()).reservations

    async def scrape(self) -> int:
        """Nanoseconds of processor time that a scrape of /metrics takes of the actor."""
        started = time.thread_time_ns()
        pickle.dumps(await self._controller.figures())
        return time.thread_time_ns() - started

    async def line(self, decisions: int, reports: bool) -> tuple[list[int], list[int], list[int]]:
        """Nanoseconds on the time line of decisions, from arrival to answer, and of ``reports``."""
        query_s, report_s, free_s = 0.0, 0.0, 0.0
        decision_ns: list[int] = []
        answer_ns: list[int] = []
        report_ns: list[int] = []
        while len(decision_ns) < decisions:
            if reports and report_s < query_s:
                report_ns.append(await self.report())
                free_s = max(free_s, report_s) + report_ns[-1] / 1e9
                report_s += 1 / REPORTS_PER_S
                continue
            decision_ns.append(await self.decide())
            free_s = max(free_s, query_s) + decision_ns[-1] / 1e9
            answer_ns.append(round((free_s - query_s) * 1e9))
            query_s += self._rng.expovariate(QUERIES_PER_S)
            if not reports:
                await self.release()
        return decision_ns, answer_ns, report_ns


async def measure_inside(config: ControllerConfig, replicas: int, decisions: int) -> Cell:
    """The cell of one policy and fleet."""
    fleet = await Inside(config, replicas).hello()
    await fleet.line(200, reports=True)
    gc.collect()
    # The collector stays on, as in the actor.
    alone = figures((await fleet.line(decisions, reports=False))[0])
    busy, answers, reports = map(figures, await fleet.line(decisions, reports=True))
    batches_ns = []
    for _ in range(max(1, decisions // BATCH)):
        batches_ns.append(await fleet.decide(BATCH))
        await fleet.release()
    tens_ns = []
    for _ in range(max(1, decisions // MAX_TOGETHER)):
        tens_ns.append(await fleet.decide(MAX_TOGETHER))
        await fleet.release()
    return {
        **alone,
        "ten": figures(tens_ns),
        "per_second": round(len(batches_ns) * BATCH * 1e9 / sum(batches_ns)),
        "with_reports": busy,
        "with_its_wait": answers,
        "report": reports,
        "scrape": figures([await fleet.scrape() for _ in range(50)]),
    }


def contenders(names: Sequence[str], cells: int = 1) -> dict[str, ControllerConfig]:
    """Label -> configuration; the floor first."""
    make = partial(ControllerConfig, cells=cells, stale_after_s=LASTING_S)
    floor = {"floor": make(policy="round_robin", admission=NO_ADMISSION)}
    found = floor | {name: make(policy=name) for name in names or sorted(POLICIES)}
    if "slos_serve" in found:
        found[TOGETHER] = make(policy="slos_serve", admission="slos_serve")
    return found


def measure_actor(
    configs: dict[str, ControllerConfig],
    results: dict[str, dict[str, Cell]],
    seconds: float,
    sizes: Sequence[int],
) -> None:
    """Add the figures of a real actor's callers."""
    from sluice.benchmarks.micro.decision_actor import Session, own_ray

    async def ask(label: str, config: ControllerConfig, replicas: int) -> None:
        async with aclosing(Session(label, config, replicas)) as session:
            results[label][str(replicas)][CONNECTION] = await session.measure(seconds)

    with redirect_stdout(sys.stderr), own_ray():
        for label, config in configs.items():
            for size in sizes or (ACTOR_REPLICAS,):
                asyncio.run(ask(label, config, size))


@click.command(name="decision")
@as_json
@number_option("--decisions", default=3_000, least=100, most=1_000_000)
@click.option(
    "--actor/--no-actor", default=True, help="Also query a real actor, in its own Ray instance."
)
@number_option("--seconds", default=2.0, least=0.1, most=60, words="Of each query of the actor.")
@choices_option("--policy", "names", of=POLICIES, words="Routing policies.  [default: all]")
@click.option(
    "--replicas", "sizes", multiple=True, type=click.IntRange(1, 4096), help="Of a fleet."
)
@number_option("--cells", default=1, least=1, most=64, words="Actors that share a fleet.")
def decision(
    as_json: bool,
    decisions: int,
    actor: bool,
    seconds: float,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    cells: int,
) -> None:
    """Time the controller's decisions.

    Each replica has 64 requests.

    The JSON maps policy -> replicas -> p50_ms and p99_ms of a decision, ten: of a call with ten
    queries, per_second of batched decisions; the same with reports from the fleet, and over the
    connection to a real actor; scrape: of what a page of /metrics takes of the actor.

    \b
    Example:
      sluice bench decision --no-actor
    """
    configs = contenders(names, cells)
    results: dict[str, dict[str, Cell]] = {
        label: {
            str(size): asyncio.run(measure_inside(config, size, decisions))
            for size in sizes or SIZES
        }
        for label, config in configs.items()
    }
    if actor:
        measure_actor(configs, results, seconds, sizes)
    found = {(label, size): cell for label, own in results.items() for size, cell in own.items()}
    tables = [_table(f"inside the actor, {REPORTS_PER_S:,.0f} reports/s", found)]
    asked = {labels: cell[CONNECTION] for labels, cell in found.items() if CONNECTION in cell}
    if asked:
        tables.append(_table("callers over the connection to a real actor", asked))
    show(results, tables, as_json)


def _table(title: str, cells: dict[tuple[str, str], Cell]) -> Table:
    rows = [
        {"policy": policy, "replicas": replicas}
        | {name: _shown(value) for name, value in cell.items() if name != CONNECTION}
        for (policy, replicas), cell in cells.items()
    ]
    return table(rows, *rows[0], title=f"{title}: p50 / p99 ms")


def _shown(value: Any) -> Any:
    times = isinstance(value, dict)
    return f"{value['p50_ms']:.3f} / {value['p99_ms']:.3f}" if times else value
