"""Whether tenants' shares of an engine are all of its time, and right: ``sluice bench usage``.

The engines' batch logs, which the accounts do not use, say what ran and when."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.mix import body_of
from sluice.benchmarks.live.promises import CLASSES, KINDS, PATTERN, SLOS
from sluice.benchmarks.live.report import table
from sluice.benchmarks.live.systems import (
    IN_FLIGHT,
    campaign,
    capacity,
    metrics,
    router,
    sluice,
    until,
)
from sluice.benchmarks.options import as_json, number_option, show
from sluice.replica.config import SimulatedEngineConfig
from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.replica.simulated.core import SimulatedCore
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.telemetry.records import RecordLog, whole_lines

Json = dict[str, Any]

_RATE = 5.0  # requests a second, which the simulated engine just serves
_ABORTED, _PUSHED_S = 0.1, 3.0


@click.command(name="usage")
@click.option("--real", is_flag=True, help="One vLLM replica here, saturated, no simulation.")
@number_option("--seconds", default=60.0, least=2, most=3_600, words="Of arrivals.")
@number_option("--seeds", default=5, least=1, most=1_000)
@as_json
def usage(real: bool, seconds: float, seeds: int, as_json: bool) -> None:
    """Compare the accounts of engines with their batch logs.

    \b
    Examples:
      sluice bench usage
      sluice bench usage --real --seconds 30
    """
    rows = [_real(seconds)] if real else [_simulated(seed, seconds) for seed in range(seeds)]
    columns = [name for name in rows[0] if name != "run"]
    show(rows, [table(rows, "run", *columns, title="seconds of the engine, and errors")], as_json)


def _busy_s(steps: Iterable[Json]) -> float:
    """Time in which at least one batch ran, by a batch log in the order of ends."""
    busy_s = last_s = 0.0
    for step in steps:
        if step["ran"]:
            busy_s += step["end_s"] - max(step["now_s"], last_s)
            last_s = step["end_s"]
    return busy_s


def _steps(folder: Path) -> list[Json]:
    (log,) = folder.glob("*.jsonl")
    with log.open() as lines:
        return [json.loads(line) for line in whole_lines(lines)]


def _simulated(seed: int, seconds: float) -> Json:
    """A simulated engine in virtual time. It believes steps to cost twice as much without tokens
    and half as much for each, and corrects that; a tenth of the requests are aborted, and KV is
    short."""
    config = SimulatedEngineConfig(quadratic_s=1e-8, kv_blocks=600)
    coefficients = config.step_s, config.token_s, config.context_token_s, config.quadratic_s
    truth, rng, table = LinearLatency(*coefficients), random.Random(seed), StateTable.create(4_096)
    belief = LinearLatency(2 * config.step_s, config.token_s / 2, config.context_token_s / 2)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "batches.jsonl"
        scheduler = LocalScheduler(make_policy("deadline_triage"), table, belief, RecordLog(log))
        core, now_s = SimulatedCore(config, scheduler, table), 0.0
        left = [*PATTERN.workload(_RATE, seconds, seed, SLOS).arrivals][::-1]
        aborts: list[tuple[float, Any]] = []
        while left or core.live:
            while left and (left[-1].arrival_s <= now_s or not core.live):
                arrival = left.pop()
                now_s = max(now_s, arrival.arrival_s)
                name = arrival.slo.service_class
                args = RequestArgs(f"{name} {len(left)}", now_s, arrival.slo, client=name)
                tokens = arrival.prompt_tokens, arrival.output_tokens
                sequence = core.submit(args, len(left), *tokens)
                if rng.random() < _ABORTED:
                    aborts.append((now_s + rng.expovariate(1.0), sequence))
            step = core.begin(now_s)
            assert step is not None
            now_s += step.seconds
            core.complete(step, now_s, lambda _: None)
            for each in [each for each in aborts if each[0] <= now_s]:
                aborts.remove(each)
                core.abort(each[1], now_s)
        steps = _steps(log.parent)
    used = {each["client"].decode(): float(each["seconds"]) for each in table.read().accounts}
    true = _by_truth(steps, truth)
    errors = [abs(used[name] / true[name] - 1) for name in KINDS]
    busy_s, by_accounts = _busy_s(steps), sum(used.values())
    return _row(f"seed {seed}", busy_s, by_accounts, used) | {"worst_share": max(errors)}


def _by_truth(steps: Sequence[Json], truth: LatencyModel) -> dict[str, float]:
    """Seconds of each tenant, which begins the names of its requests."""
    found = dict.fromkeys(KINDS, 0.0)
    for step in steps:
        for name, tokens, computed in step["ran"]:
            share_s = truth.work_s(tokens, computed) + truth.fixed_s / len(step["ran"])
            found[name.split()[0]] += share_s
    return found


def _row(run: str, busy_s: float, by_accounts: float, used: Json) -> Json:
    shares = {f"{name}_s": round(used.get(name, 0.0), 3) for name in KINDS}
    error = abs(by_accounts / busy_s - 1)
    return {"run": run, "busy_s": round(busy_s, 3), "error": error, **shares}


def _real(seconds: float) -> Json:
    """One vLLM replica on this machine."""
    with campaign() as bench:
        logs = bench.folder / "batches"
        parts: Json = {"engine": {"served_model_name": MODEL, "batch_log": str(logs)}}
        parts["replica"] = {"count": 1}
        start = sluice("sluice", lambda _, port: {**parts, "router": router(port, CLASSES)})
        with start(bench) as system:
            (url,) = system.urls
            drawn = (each._replace(slo=SLOS[each.task]) for each in PATTERN.drawn(1))
            capacity(bench, system, drawn, body_of("usage"), IN_FLIGHT, 1.0, seconds)

            def counted() -> tuple[float, float]:
                return _busy_s(_steps(logs)), metrics(url)["sluice_engine_busy_seconds_total"]

            until(lambda: abs(counted()[0] / counted()[1] - 1) < 1e-4, _PUSHED_S, bench.stop)
            used = {
                name: metrics(url, 10.0, **{"class": name}).get("sluice_engine_seconds_total", 0.0)
                for name in (*KINDS, "none")
            }
            return _row("vLLM", counted()[0], sum(used.values()), used)
