"""What classes gain that accept a smaller model, on two real engines and in the simulator.

Run with ``python -m tests.replica.consented [--scale 3] [--seeds 2]`` from the root of the
repository: Sluice with Ray, its router and its vLLM engines, over HTTP. These have timed devices
with the step times of ``sluice bench accepts``, and get the arrivals of its seeds. All times are
``--scale`` times as long; at 8 two engines and all beside them take half a core."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import click

from sluice.benchmarks.experiments.consent import MODEL as SMALLER
from sluice.benchmarks.experiments.consent import NONE, SETUP, SMALL, measure, objectives, peers_mix
from sluice.benchmarks.experiments.kinds import KINDS
from sluice.benchmarks.experiments.loads import Span, full_load_rate
from sluice.benchmarks.live import mix, systems
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.report import Json, table
from sluice.benchmarks.options import number_option, show
from sluice.replica.vllm.local_model import local_model
from sluice.router.config import Alternative, ServiceClass
from sluice.simulation.engine import Launches
from sluice.simulation.workload import Workload, stretched

from .gpu_device import Device
from .recorded import ARGS, WARM_UP
from .timed_device import TimedDevice

LOAD, ENGINES = 1.5, 2
SMALL_MODEL: Final = "small"


class Large(TimedDevice):
    """Has the step times of the simulated engines."""

    times = TimedDevice.times._replace(device=Device(SETUP.truth, Launches(0.0, 0.0, 0.0)))


class Small(TimedDevice):
    """Has those of the smaller model."""

    times = TimedDevice.times._replace(device=Device(SMALL.truth, Launches(0.0, 0.0, 0.0)))


def config(accepts: str, scale: float, models: Path, _: systems.Bench, port: int) -> Json:
    """Two engines with the large model, or one with each."""
    limits = SETUP.engine
    own = {
        "max-num-batched-tokens": limits.max_batch_tokens,
        "max-num-seqs": limits.max_sequences,
        "num-gpu-blocks-override": limits.kv_tokens // ARGS["block-size"],
    }

    def engine(device: type[TimedDevice]) -> Json:
        # The path of a model is in the key of its profile of step times.
        path = local_model(models / device.__name__, layers=1, hidden=64)
        backend = {"distributed-executor-backend": f"tests.replica.consented.{device.__name__}"}
        return {"model": str(path), "vllm_args": {**ARGS, **own, **backend}}

    made = {MODEL: {"engine": engine(Large)}}
    if accepts == SMALLER:
        made[SMALL_MODEL] = {"engine": engine(Small)}
    alternatives = (Alternative(model=SMALL_MODEL),) if accepts == SMALLER else ()
    classes = {
        name: ServiceClass(
            ttft_ms=scale * 1e3 * (slo.ttft_s or 0.0),
            tpot_ms=scale * 1e3 * (slo.tpot_s or 0.0),
            accepts=alternatives,
        )
        for name, slo in objectives(SETUP).items()
    }
    replica = {"count": ENGINES // len(made), "num_cpus": 0.1}
    return {"models": made, "replica": replica, "router": systems.router(port, classes)}


def workload(load: float, span: Span, seed: int, scale: float) -> Workload:
    """The arrivals of the simulated experiment, ``scale`` times as slow."""
    rate = ENGINES * load * full_load_rate(peers_mix, SETUP)
    made = stretched(peers_mix(SETUP, rate, span.requests(rate), seed), scale)
    slower = (
        each._replace(
            slo=each.slo.with_times([time_s and scale * time_s for time_s in each.slo.times_s])
        )
        for each in made.arrivals
    )
    return replace(made, arrivals=tuple(slower))


def degraded(url: str) -> float:
    """Requests that were served with an alternative so far."""
    return systems.metrics(url).get("sluice_degraded_total", 0.0)


def run(bench: systems.Bench, system: systems.System, made: Workload, name: str) -> Json:
    """The shares of a run, as :func:`measure` has them, and the cores that the system used."""
    bodies = mix.body_of(name, made.block_tokens)
    before, seconds = degraded(system.urls[0]), made.duration_s
    how: Json = {"grace_s": 120.0, "body": bodies, "exact": False}
    done = systems.run(bench, system, {}, seconds, made, system.processes, **how)
    met = [each.attained for each in done.outcomes]
    kept = [each.attained for each in done.outcomes if each.admission == "guaranteed"]
    shares: dict[str, list[bool]] = {"in_time": met, "kept": kept}
    for kind in KINDS:
        shares[kind] = [x.attained for x in done.outcomes if x.slo.service_class == kind]
    found = {name: sum(each) / max(1, len(each)) for name, each in shares.items()}
    found["degraded"] = (degraded(system.urls[0]) - before) / len(met)
    cores = sum(used.cpu_s for used in done.usage.kinds.values()) / seconds
    return {"sent": len(met), "cores": cores, **found}


@click.command()
@number_option("--scale", default=3.0, least=0.5, most=100.0)
@number_option("--seconds", default=60.0, least=1.0, most=3_600.0)
@number_option("--seeds", default=2, least=1, most=100)
@number_option("--first-seed", default=0, least=0, most=2**31)
def main(scale: float, seconds: float, seeds: int, first_seed: int) -> None:
    """Compare."""
    os.environ["SLUICE_TIMED_DEVICE"] = json.dumps({"scale": scale})
    os.environ["PYTHONPATH"] = str(Path.cwd())
    rows: list[Json] = []

    def add(seed: int, where: str, accepts: str, found: Mapping[str, object]) -> None:
        rows.append({"accepts": accepts, "seed": seed, "where": where, **found})
        click.echo(str(rows[-1]), err=True)

    span = Span(seconds, 1, 100_000)
    chosen = range(first_seed, first_seed + seeds)
    for accepts in (NONE, SMALLER):
        for seed in chosen:
            add(seed, "simulator", accepts, measure(seed, LOAD, accepts, ENGINES, span))
        with tempfile.TemporaryDirectory() as name, systems.campaign() as bench:
            start = systems.sluice("sluice", partial(config, accepts, scale, Path(name)))
            with start(bench) as system:
                load, warm_up_s, warm_up_seed = WARM_UP
                first = workload(load, span._replace(seconds=warm_up_s), warm_up_seed, scale)
                add(warm_up_seed, "warm-up", accepts, run(bench, system, first, "warm-up"))
                for seed in chosen:
                    made = workload(LOAD, span, seed, scale)
                    add(seed, "real", accepts, run(bench, system, made, str(seed)))
    rows = [{n: round(x, 3) if isinstance(x, float) else x for n, x in row.items()} for row in rows]
    columns = dict.fromkeys(name for row in rows for name in row)
    show(rows, [table(rows, *columns, title="")], False)


if __name__ == "__main__":
    main()
