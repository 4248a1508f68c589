"""Whether tenants' shares of an engine are all of its time, and right: ``sluice bench usage``.

The engines' batch logs, which the accounts do not use, say what ran and when."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.mix import Kind, Pattern, body_of
from sluice.benchmarks.live.report import table
from sluice.benchmarks.live.systems import (
    IN_FLIGHT,
    campaign,
    capacity,
    metrics,
    objectives,
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
from sluice.router.config import ServiceClass
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.simulation.generators import Gamma
from sluice.telemetry.records import RecordLog, whole_lines

Json = dict[str, Any]

KINDS: Final = {
    "chat": Kind(0.6, (10, 250), (8, 120)),
    "code": Kind(0.2, (150, 1_200), (4, 50)),
    "document": Kind(0.2, (700, 1_900), (16, 150)),
}
CLASSES: Final = {"chat": ServiceClass(ttft_ms=600, tpot_ms=120)} | dict.fromkeys(
    ("code", "document"), ServiceClass()
)
_ABORTED, _LOAD, _PUSHED_S = 0.1, 0.9, 3.0


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


def _steps(logs: Iterable[Path]) -> Iterator[list[Json]]:
    for log in logs:
        with log.open() as lines:
            yield [json.loads(line) for line in whole_lines(lines)]


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
        pattern = Pattern("usage", partial(Gamma, cv=2**0.5), kinds=KINDS)
        arrivals = pattern.workload(_rate(truth), seconds, seed, objectives(CLASSES)).arrivals
        left, aborts = list(arrivals)[::-1], list[tuple[float, Any]]()
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
        (steps,) = _steps([log])
    used = {each["client"].decode(): float(each["seconds"]) for each in table.read().accounts}
    true = _by_truth(steps, truth)
    errors = [abs(used[name] / true[name] - 1) for name in KINDS]
    busy_s, by_accounts = _busy_s(steps), sum(used.values())
    return _row(f"seed {seed}", busy_s, by_accounts, used) | {"worst_share": max(errors)}


def _rate(truth: LatencyModel) -> float:
    """Requests a second that load the engine, if each had it alone in a batch of eight."""
    each_s = sum(
        kind.share
        * (truth.work_s(sum(kind.prompt_tokens) // 2, 0) + sum(kind.output_tokens) / 2 * each)
        for kind in KINDS.values()
        for each in [truth.work_s(1, 500) + truth.fixed_s / 8]
    )
    return _LOAD / each_s


def _by_truth(steps: Sequence[Json], truth: LatencyModel) -> Counter[str]:
    """Seconds of each tenant, which begins the names of its requests."""
    found = Counter[str]()
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
    pattern = Pattern("usage", partial(Gamma, cv=2**0.5), kinds=KINDS)
    with campaign() as bench:
        logs = bench.folder / "batches"
        parts: Json = {"engine": {"served_model_name": MODEL, "batch_log": str(logs)}}
        parts["replica"] = {"count": 1}
        start = sluice("sluice", lambda _, port: {**parts, "router": router(port, CLASSES)})
        with start(bench) as system:
            (url,), slos = system.urls, objectives(CLASSES)
            drawn = (each._replace(slo=slos[each.task]) for each in pattern.drawn(1))
            capacity(bench, system, drawn, body_of("usage"), IN_FLIGHT, 1.0, seconds)

            def counted() -> tuple[float, float]:
                (steps,) = _steps(logs.glob("*.jsonl"))
                return _busy_s(steps), metrics(url)["sluice_engine_busy_seconds_total"]

            until(lambda: abs(counted()[0] / counted()[1] - 1) < 1e-4, _PUSHED_S, bench.stop)
            used = {
                name: metrics(url, **{"class": name}).get("sluice_engine_seconds_total", 0.0)
                for name in (*KINDS, "none")
            }
            return _row("vLLM", counted()[0], sum(used.values()), used)
