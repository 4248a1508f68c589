"""Sluice beside what is used in its place: stock vLLM behind several routers, vLLM's priorities,
and Ray Serve LLM, on real engines of one model, with the same requests at the same times from one
client: ``sluice bench peers``.

On stock vLLM the command first measures each kind of request on an idle engine, from which the
objectives follow, and the capacity, which is load 1. Then each system is started, warmed up, driven
at every load and stopped, one after the other, in every second round in the reverse order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Final

import click
import psutil
from rich.table import Table

from sluice.benchmarks.experiments.tables import grouped
from sluice.benchmarks.live import drive, mix
from sluice.benchmarks.live.application import metrics, objectives
from sluice.benchmarks.live.client import End, Json, LoadError
from sluice.benchmarks.live.drive import IN_FLIGHT, campaign, capacity, completions
from sluice.benchmarks.live.gateway.engine import MODEL
from sluice.benchmarks.live.peers.systems import CPU_ARGS, DEFAULT, SYSTEMS, Peer, Setting
from sluice.benchmarks.live.processes import LeftOutError
from sluice.benchmarks.live.report import Run, single, summary, table
from sluice.benchmarks.live.systems import Bench, System
from sluice.benchmarks.options import as_json, choices_option, folder, number_option, seed, show
from sluice.benchmarks.report import Chart, Point, draw, require_matplotlib
from sluice.replica.config import EngineConfig
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.request.objective import SLO

LOCAL: Final = "local"
MODEL_TOKENS: Final = 8_192
"""Maximum tokens of a request where --engine-args has no ``max-model-len``."""

WARM_UP_S: Final = 10.0
"""How long a system is driven before it is measured, and stock vLLM before its capacity is."""

CAPACITY_S: Final = 30.0
"""How long the capacity is measured for each pattern: all requests in flight begin together, so
that they also end in waves."""

GRACE_S: Final = 120.0
"""How long after the last arrival the client waits for answers, seconds."""

CELL: Final = ("pattern", "load", "system")
_WARM_SEED = 1_000_000
_ENGINE = "sluice_engine", "sluice_latency", "sluice_plan", "sluice_step"  # since the start


def engine_args(_: click.Context, __: click.Parameter, value: str | None) -> Json:
    """The callback of ``--engine-args``: vLLM's arguments by their names on the command line."""
    try:
        given = json.loads(value or "{}")
    except ValueError as error:
        raise click.BadParameter(f"is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise click.BadParameter('must be a JSON object, such as {"max-model-len": 8192}')
    longest = given.get("max-model-len", MODEL_TOKENS)
    if type(longest) is not int or longest < mix.LONGEST:
        raise click.BadParameter(
            f"max-model-len must be at least {mix.LONGEST} tokens, those of the longest request"
        )
    return given


_IN_FLIGHT = "Concurrent requests of an engine while the capacity, load 1, is measured."
_ENGINES = "Engines of each system.  [default: one for each GPU; on CPUs one less than cores]"


@click.command(name="peers")
@choices_option("--system", "names", of=SYSTEMS, words=f"[default: {', '.join(DEFAULT)}]")
@choices_option("--pattern", "patterns", of=mix.GENERATED, words="[default: all, unless --traces]")
@click.option("--traces", type=folder(exists=True), help="Folder of recorded traces, as patterns.")
@number_option("--load", "loads", default=(0.5, 1.0, 1.5), least=0.05, most=10, multiple=True)
@number_option("--seconds", default=60.0, least=0.5, most=3_600, words="Of arrivals, in each run.")
@number_option("--rounds", default=3, least=1, most=100)
@click.option("--model", default=LOCAL, show_default=True, help="Path or hub id of the model.")
@click.option("--engine-args", "args", callback=engine_args, help="vLLM's arguments, as JSON.")
@number_option("--replicas", default=None, least=1, most=64, words=_ENGINES)
@number_option("--in-flight", default=IN_FLIGHT, least=1, most=1_024, words=_IN_FLIGHT)
@number_option("--slo-scale", "scale", default=1.0, least=0.1, most=100, words="Of objectives.")
@seed
@click.option("--plots", type=folder(), help="Folder for plots (SVG) of attainment, and the JSON.")
@as_json
def peers(
    names: tuple[str, ...],
    patterns: tuple[str, ...],
    traces: Path | None,
    loads: tuple[float, ...],
    seconds: float,
    rounds: int,
    model: str,
    args: Json,
    replicas: int | None,
    in_flight: int,
    scale: float,
    seed: int,
    plots: Path | None,
    as_json: bool,
) -> None:
    """Measure Sluice, stock vLLM behind routers, and Ray Serve LLM on real engines.

    Objectives are multiples of the times of a single request on idle stock vLLM, the same for all
    systems; Sluice knows them, the others have no way to state them. Load 1 is the rate that
    saturates stock vLLM. Missing routers are installed from PyPI into the user's cache. A system
    that cannot be installed or started is left out, and the output says so.

    \b
    Example:
      sluice bench peers --system stock-power-of-two --system sluice --pattern bursty --rounds 1
    """
    with campaign() as bench:
        if plots is not None:
            require_matplotlib()
            plots.mkdir(parents=True, exist_ok=True)
        setting = _setting(model, args, replicas)
        chosen = {name: mix.GENERATED[name] for name in patterns}
        if traces is not None:
            chosen |= mix.recorded(traces, setting.args["max-model-len"])
        chosen = chosen or mix.GENERATED
        found = _Campaign(bench, setting, chosen, loads, seconds, seed, in_flight)
        systems = list(dict.fromkeys(names or DEFAULT))
        found.prepare(systems, scale)
        for number in range(rounds):
            for name in systems[:: -1 if number % 2 else 1]:
                found.measure(name, number)
        if not found.runs:
            raise LoadError(f"no system could be started: {found.left_out}")
        rows, every = summary(found.runs, *CELL), single(found.runs)
        shown = {"left_out": found.left_out, **found.conditions(), "summary": rows, "runs": every}
        if plots is not None:
            (plots / "peers.json").write_text(json.dumps(shown, indent=1), encoding="utf-8")
            for name, chart in attainment(rows).items():
                draw(chart, plots / f"{name}.svg")
    lines = [f"{what}: {words}" for what, words in found.conditions().items()]
    lines += [f"{name} was left out: {reason}" for name, reason in found.left_out.items()]
    show(shown, tables(rows), as_json, *lines)


def _setting(model: str, args: Json, replicas: int | None) -> Setting:
    import torch

    gpus = torch.cuda.device_count()
    # A core is left for everything else, as a GPU machine has cores that no engine needs.
    replicas = replicas or gpus or max(1, len(psutil.Process().cpu_affinity()) - 1)
    given = {"max-model-len": MODEL_TOKENS, **({} if gpus else CPU_ARGS), **args}
    path = str(local_model(EngineConfig().cache_dir)) if model == LOCAL else model
    return Setting(path, given, replicas, gpus, {})


@dataclass
class _Campaign:
    """All measurements of one call of the command."""

    bench: Bench
    setting: Setting
    patterns: Mapping[str, mix.Pattern]
    loads: Sequence[float]
    seconds: float
    seed: int
    in_flight: int
    slos: Mapping[str, SLO] = field(default_factory=dict)
    capacities: dict[str, float] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    reference: str = ""

    def conditions(self) -> Json:
        """What was measured under: model, arguments, objectives and load 1 by pattern."""
        return {
            "model": Path(self.setting.model).name,
            "engine_args": self.setting.args,
            "replicas": self.setting.replicas,
            "seed": self.seed,
            "seconds": self.seconds,
            "objectives_ms": {
                name: {"ttft": each.ttft_ms, "tpot": each.tpot_ms}
                for name, each in self.setting.classes.items()
            },
            "measured_on": self.reference,
            "load_1": {name: round(rate, 3) for name, rate in self.capacities.items()},
            "traces": {
                name: each.trace.description for name, each in self.patterns.items() if each.trace
            },
        }

    def prepare(self, names: Sequence[str], scale: float) -> None:
        """Measure the objectives and the capacity on the first system's reference, or on the first
        of the systems that starts.

        Raises:
            LoadError: none starts, or a request is not answered.
        """
        for name in dict.fromkeys((SYSTEMS[names[0]].reference, *names)):
            self.bench.say(f"{name}: idle times and capacity")
            try:
                with SYSTEMS[name].start(self.setting)(self.bench) as system:
                    self._prepare_on(system, scale)
            except LeftOutError as error:
                self._leave_out(name, error)
            else:
                self.reference, shown = name, self.conditions()
                self.bench.say(f"objectives {shown['objectives_ms']}, load 1 {shown['load_1']}")
                return
        raise LoadError(f"no system could be started: {self.left_out}")

    def _prepare_on(self, system: System, scale: float) -> None:
        classes = mix.classes_of(mix.alone(completions(system), MODEL), scale)
        for name, pattern in self.patterns.items():
            body = mix.body_of(f"capacity {name}", pattern.block_tokens)
            in_flight = self.in_flight * self.setting.replicas
            # Sluice has no classes yet.
            drawn = (each._replace(slo=SLO()) for each in pattern.drawn(self.seed))
            load = (drawn, body, in_flight, WARM_UP_S, CAPACITY_S)
            self.capacities[name] = capacity(self.bench, system, *load)
        self.setting = self.setting._replace(classes=classes)
        self.slos = objectives(classes)

    def _leave_out(self, name: str, error: Exception) -> None:
        self.left_out[name] = str(error)
        self.bench.say(f"{name} is left out: {error}")

    def measure(self, name: str, number: int) -> None:
        """Start a system, warm it up, drive it with every pattern and load, and stop it."""
        if name in self.left_out:
            return
        peer, begun_s, seed = SYSTEMS[name], time.monotonic(), self.seed + number
        self.bench.say(f"round {number + 1}: {name}: {peer.words}")
        try:
            with peer.start(self.setting)(self.bench) as system:
                self.bench.say(f"  started in {time.monotonic() - begun_s:.0f} s")
                warm_up = {"pattern": next(iter(self.patterns)), "load": 1.0}
                self._run(system, peer, warm_up, WARM_UP_S, seed + _WARM_SEED)
                for pattern, load in product(self.patterns, self.loads):
                    labels = {"pattern": pattern, "load": load, "system": name, "round": number}
                    run = self._run(system, peer, labels, self.seconds, seed)
                    self.runs.append(run)
                    met, sent = sum(each.attained for each in run.outcomes), len(run.outcomes)
                    self.bench.say(f"  {pattern} {load:g}: {met} of {sent} attained")
                    if name.startswith("sluice"):
                        own = metrics(system.urls[0]).items()
                        labels["engine"] = {x: value for x, value in own if x.startswith(_ENGINE)}
        except (LeftOutError, OSError, psutil.Error) as error:  # the others are measured still
            self._leave_out(name, error)

    def _run(self, system: System, peer: Peer, labels: Json, seconds: float, seed: int) -> Run:
        pattern, load = labels["pattern"], labels["load"]
        rate = load * self.capacities[pattern]
        workload = self.patterns[pattern].workload(rate, seconds, seed, self.slos)
        make = mix.body_of(f"{pattern} {load} {seed}", workload.block_tokens, peer.priorities)
        # Before the first is sent: the client has no time for it later.
        bodies = [make(MODEL, number, each) for number, each in enumerate(workload.arrivals)]
        options: Json = {"grace_s": GRACE_S, "body": lambda *at: bodies[at[1]], "exact": False}
        roots = system.processes
        return drive.run(self.bench, system, labels, seconds, workload, roots, **options)


def tables(rows: Sequence[Json]) -> list[Table]:
    """The summary as tables."""
    classes = [f"classes.{name}" for name in rows[0]["classes"]]
    met = ("attained", "range.attained", "attained_interval", "objectives.ttft", "objectives.tpot")
    good = ("goodput", "range.goodput", "goodput_tokens", "tokens", "ttft_ms", "tpot_ms")
    ends = [end.value for end in End if end not in (End.ANSWERED, End.LEFT)]
    rest = ("guaranteed", "kept", "ttft_error_ms", "cpu_s", "engine_cpu_s", "busy", "late_ms")
    return [
        table(rows, *CELL, "sent", *met, *classes, title="share of requests within objectives"),
        table(rows, *CELL, *good, "worst_tpot_ms", title="goodput; P50 / P95 / P99"),
        table(rows, *CELL, *ends, *rest, title="refusals, promises and processor time"),
    ]


def attainment(rows: Sequence[Json]) -> dict[str, Chart]:
    """By name: attainment against load for each pattern of the summary, with half of the interval
    over requests."""
    charts = {}
    for (pattern,), own in grouped(rows, "pattern").items():
        lines = {
            system: [_point(row) for row in sorted(line, key=lambda row: row["load"])]
            for (system,), line in grouped(own, "system").items()
        }
        title = f"Requests within all objectives, {pattern}"
        axes = "load, 1 is the capacity of stock vLLM", "share of sent requests"
        charts[f"attainment-{pattern}"] = Chart(title, *axes, lines)
    return charts


def _point(row: Json) -> Point:
    low, high = row["attained_interval"]
    return Point(row["load"], row["attained"], (high - low) / 2)
