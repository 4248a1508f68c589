"""Cost of the controller's decisions: inside the actor's code, over the client's connection to a
real actor, and by calls of that actor.

Run with ``python -m benchmarks.controller_decision [--json] [--no-actor]``. Every replica has a
full queue in the mirror. Half of the decisions come right after a report, as in a running fleet;
what is timed is one call of ``route()`` with one query, checks, reservation and counters included.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from controller.actor import Controller
from controller.client import ControllerClient, ensure_controller, stop_controller
from controller.coalesce import Coalescer
from controller.config import ControllerConfig
from controller.messages import ReplicaDelta, ReplicaHello, RouteDecision, RouteQuery, RouteReply
from scheduling.latency import LinearLatency
from scheduling.latency_profile import LatencyProfile
from scheduling.objective import SLO
from scheduling.routing import POLICIES
from scheduling.state import ROW, RUNNING, SUMMARY, WAITING

FLEET_SIZES = (8, 64, 512)
QUEUED = 64
CHANGED = 16
"""Requests in each replica's queue, and how many of them change from report to report."""

PROFILE = LatencyProfile.of("benchmark", LinearLatency(a=0.004, b=0.000_02, c=0.000_000_02))
LIVE_CONFIG: dict[str, Any] = {"stale_after_s": 3_600.0, "forget_after_s": 7_200.0}
"""The fleet of a benchmark says hello once and must not go stale meanwhile."""

WARM_UP_S = 1.0

Result = TypeVar("Result")
Ask = Callable[[RouteQuery], Awaitable[RouteDecision | None]]
Figures = dict[str, float]


def make_rows(rng: random.Random, first_key: int, count: int) -> np.ndarray:
    """A queue: half of the requests wait or prefill, half decode."""
    rows = np.zeros(count, ROW)
    for index in range(count):
        prompt = rng.randint(32, 4_096)
        decoding = rng.random() < 0.5
        rows[index] = (
            first_key + index,
            -rng.uniform(0, 2),
            -rng.uniform(0, 1) if decoding else nan,
            rng.choice((0.5, 1.0, 5.0)),
            rng.choice((0.03, 0.05, inf)),
            inf,
            rng.randint(1, 3),
            prompt,
            prompt if decoding else 0,
            1 if decoding else prompt,
            rng.randint(1, 400) if decoding else 0,
            -(-prompt // 16) if decoding else 0,
            RUNNING if decoding else WAITING,
        )
    return rows


def make_hello(index: int, rng: random.Random) -> ReplicaHello:
    """Replica ``index`` with a full queue."""
    return ReplicaHello(
        replica_id=f"replica-{index}",
        node_id="node",
        model="model",
        policy="fcfs",
        role="mixed",
        max_batch_tokens=8_192,
        max_sequences=256,
        block_tokens=16,
        capacity=2_048,
        profile=PROFILE,
        seq=0,
        now_s=0.0,
        slots=np.arange(QUEUED, dtype=np.int32),
        rows=make_rows(rng, index * QUEUED, QUEUED),
        summary=make_summary(),
    )


def make_summary() -> np.void:
    """An engine's summary in the middle of its work."""
    summary = np.zeros(1, SUMMARY)
    summary["correction"] = 1.0
    summary["free_kv_blocks"], summary["total_kv_blocks"] = 5_000, 10_000
    record: np.void = summary[0]
    return record


def make_query(key: int, rng: random.Random) -> RouteQuery:
    """A request with objectives."""
    return RouteQuery(key, SLO(ttft_s=1.0, tpot_s=0.05), rng.randint(32, 4_096))


def finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that never waits, as all of the controller's."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    raise RuntimeError("the controller waited in the middle of a call")


class Fleet:
    """A controller with a fleet in its mirror, and the reports of that fleet."""

    def __init__(self, policy: str, replicas: int) -> None:
        self._rng = random.Random(replicas)
        config = ControllerConfig(policy=policy, **LIVE_CONFIG)
        self.controller = Controller(config)
        self._seq = [0] * replicas
        self._changes = make_rows(self._rng, 1 << 40, CHANGED)
        self._slots = np.arange(CHANGED, dtype=np.int32)
        for index in range(replicas):
            finish(self.controller.hello(make_hello(index, self._rng)))
        self._epoch = finish(self.controller.route([])).epoch

    def decide(self, key: int) -> int:
        """Nanoseconds of one decision."""
        queries = [make_query(key, self._rng)]
        started = time.perf_counter_ns()
        reply = finish(self.controller.route(queries))
        took = time.perf_counter_ns() - started
        if reply.decisions[0].replica_id is None:
            raise RuntimeError(f"nothing was placed: {reply.decisions[0].reason}")
        return took

    def report(self, finished: tuple[int, ...]) -> int:
        """Nanoseconds of one report of a random replica, which ends some requests."""
        index = self._rng.randrange(len(self._seq))
        self._seq[index] += 1
        delta = ReplicaDelta(
            replica_id=f"replica-{index}",
            epoch=self._epoch,
            seq=self._seq[index],
            now_s=0.0,
            slots=self._slots,
            rows=self._changes,
            summary=make_summary(),
            finished=finished,
            draining=False,
        )
        started = time.perf_counter_ns()
        reply = finish(self.controller.report(delta))
        took = time.perf_counter_ns() - started
        if reply.resync:
            raise RuntimeError("a report of the benchmark was out of step")
        return took


def figures(times_ns: list[int]) -> Figures:
    """Median and 99th percentile in milliseconds, and how many fit a second."""
    p50, p99 = np.quantile(np.array(times_ns) / 1e6, (0.5, 0.99))
    return {
        "p50_ms": round(float(p50), 4),
        "p99_ms": round(float(p99), 4),
        "per_second": round(1e9 * len(times_ns) / sum(times_ns)),
    }


def inside(policy: str, replicas: int, decisions: int) -> tuple[Figures, Figures]:
    """Cost of a decision, and of a report, in a fleet of ``replicas``."""
    fleet = Fleet(policy, replicas)
    first_key = 1 << 50
    for key in range(200):
        fleet.decide(first_key + key)
    decision_ns, report_ns = [], []
    gc.collect()
    # The collector stays on, as in the actor.
    for step in range(decisions):
        key = first_key + 200 + step
        if step % 2:
            report_ns.append(fleet.report((key - 2, key - 1)))
        decision_ns.append(fleet.decide(key))
    return figures(decision_ns), figures(report_ns)


async def ask_often(ask: Ask, askers: int, seconds: float) -> Figures:
    """Decisions a second that ``askers`` concurrent callers get, and the time that one waits.

    The time before, in which the client connects, is not counted.
    """
    rng = random.Random(askers)
    times_ns: list[int] = []
    begin_s = time.monotonic() + WARM_UP_S
    end_s = begin_s + seconds

    async def caller(asker: int) -> None:
        key = asker << 32
        while time.monotonic() < end_s:
            key += 1
            counted = time.monotonic() >= begin_s
            started = time.perf_counter_ns()
            if await ask(make_query(key, rng)) is None:
                raise RuntimeError("a decision did not come in time")
            if counted:
                times_ns.append(time.perf_counter_ns() - started)

    await asyncio.gather(*(caller(asker) for asker in range(askers)))
    result = figures(times_ns)
    result["per_second"] = round(len(times_ns) / (time.monotonic() - begin_s))
    return result


async def with_actor(
    policy: str, replicas: int, askers: int, seconds: float, by_calls: bool = False
) -> Figures:
    """What callers in one process get from a real actor: through the client, which has a plain
    connection to it, or, ``by_calls``, with the same batches as actor calls."""
    app_name = f"benchmark-{policy.replace('_', '-')}"
    config = ControllerConfig(policy=policy, reservation_ttl_s=1.0, **LIVE_CONFIG)
    client = await asyncio.to_thread(ControllerClient, app_name, config, 10.0)
    rng = random.Random(replicas)

    async def call(queries: list[RouteQuery], _left_s: float) -> Sequence[RouteDecision]:
        reply: RouteReply = await actor.route.remote(queries)
        return reply.decisions

    try:
        actor = await asyncio.to_thread(ensure_controller, app_name, config)
        for index in range(replicas):
            if await client.hello(make_hello(index, rng)) is None:
                raise RuntimeError("the controller did not answer a hello")
        calls: Coalescer[RouteQuery, RouteDecision] = Coalescer(call, lambda *_: None, 10.0)
        return await ask_often(calls.ask if by_calls else client.route, askers, seconds)
    finally:
        await client.close()
        await asyncio.to_thread(stop_controller, app_name)


def with_ray(seconds: float) -> tuple[dict[str, dict[str, Figures]], dict[str, dict[str, Figures]]]:
    """Policy -> concurrent callers -> figures, on a Ray instance of its own, 64 replicas: over the
    connection for every policy, by actor calls for the usual one."""

    def measure(policy: str, by_calls: bool) -> dict[str, Figures]:
        return {
            str(askers): asyncio.run(with_actor(policy, 64, askers, seconds, by_calls))
            for askers in (1, 64, 512)
        }

    usual = ControllerConfig().policy
    root = str(Path(__file__).parent.parent)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": root}},
            _temp_dir=folder,
        )
        try:
            connection = {policy: measure(policy, by_calls=False) for policy in POLICIES}
            return connection, {usual: measure(usual, by_calls=True)}
        finally:
            ray.shutdown()


def _table(title: str, column: str, results: dict[str, dict[str, Figures]]) -> Table:
    table = Table(title=title)
    table.add_column("policy")
    for size in next(iter(results.values())):
        table.add_column(f"{size} {column}\np50 / p99 ms, per second", justify="right")
    for policy, row in results.items():
        cells = [
            f"{cell['p50_ms']:.3f} / {cell['p99_ms']:.3f}, {cell['per_second']:,.0f}"
            for cell in row.values()
        ]
        table.add_row(policy, *cells)
    return table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--actor/--no-actor", default=True, help="Also measure through a real actor.")
@click.option("--decisions", default=4_000, show_default=True, type=click.IntRange(10, 1_000_000))
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(0.1, 600))
def main(as_json: bool, actor: bool, decisions: int, seconds: float) -> None:
    """Measure the decisions of every routing policy."""
    decision: dict[str, dict[str, Figures]] = {}
    report: dict[str, dict[str, Figures]] = {}
    for policy in POLICIES:
        decision[policy], report[policy] = {}, {}
        for replicas in FLEET_SIZES:
            size = str(replicas)
            decision[policy][size], report[policy][size] = inside(policy, replicas, decisions)
    results: dict[str, Any] = {"decision": decision, "report": report}
    if actor:
        results["connection"], results["actor_calls"] = with_ray(seconds)
    if as_json:
        click.echo(json.dumps(results, indent=2))
        return
    console = Console()
    console.print(_table(f"A decision, {QUEUED} requests a replica", "replicas", decision))
    console.print(_table(f"A report of {CHANGED} changed requests", "replicas", report))
    if actor:
        for title, part in (
            ("Over the client's connection, 64 replicas", "connection"),
            ("By actor calls, 64 replicas", "actor_calls"),
        ):
            console.print(_table(title, "callers", results[part]))


if __name__ == "__main__":
    main()
