"""Sluice beside what is used in its place: stock vLLM behind several routers, vLLM's priorities,
and Ray Serve LLM. All have real engines of one model, the same requests at the same times, one
client.

Run with ``sluice bench peers``. On stock vLLM the command first measures each kind of request on an
idle engine, from which the objectives follow, and the capacity, which is load 1. Then each system
is started, warmed up, driven at every load and stopped, one after the other, in each round in the
reverse order of the round before. Client and systems share this machine: check the client's
lateness before you trust a figure.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import psutil
from rich.console import Console

from sluice.benchmarks.live.client import Body, Json, LoadError, Outcome, replay, saturated
from sluice.benchmarks.live.gateway.engine import MODEL
from sluice.benchmarks.live.peers.load import (
    GENERATED,
    LONGEST,
    Pattern,
    alone,
    body_of,
    classes_of,
    recorded,
)
from sluice.benchmarks.live.peers.report import (
    Run,
    attainment,
    figures,
    first_tokens,
    summary,
    tables,
)
from sluice.benchmarks.live.peers.systems import CPU_ARGS, DEFAULT, FIRST, SYSTEMS, Setting
from sluice.benchmarks.live.processes import LeftOutError
from sluice.benchmarks.live.resources import processes, spent
from sluice.benchmarks.live.systems import Bench, System
from sluice.benchmarks.options import as_json, choices_option, number_option, seed, show
from sluice.deploy.local import StoppedError, stop_signals
from sluice.replica.config import EngineConfig
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.request.objective import SLO
from sluice.simulation.planning.plots import ReportError, draw, require_matplotlib
from sluice.simulation.workloads.traces import TraceError

LOCAL: Final = "local"
MODEL_TOKENS: Final = 8_192
"""Maximum tokens of a request where --engine-args has no ``max-model-len``."""

IN_FLIGHT: Final = 16
"""Concurrent requests that saturate an engine."""

WARM_UP_S: Final = 10.0
"""How long a system is driven before it is measured, and stock vLLM before its capacity is."""

CAPACITY_S: Final = 30.0
"""How long the capacity is measured for each pattern: all requests in flight begin together, so
that they also end in waves."""

GRACE_S: Final = 120.0
"""How long after the last arrival the client waits for answers, seconds."""

_WARM_SEED = 1_000_000
T = TypeVar("T")


def _engine_args(_: click.Context, __: click.Parameter, value: str | None) -> Json:
    try:
        given = json.loads(value or "{}")
    except ValueError as error:
        raise click.BadParameter(f"is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise click.BadParameter('must be a JSON object, such as {"max-model-len": 8192}')
    longest = given.get("max-model-len", MODEL_TOKENS)
    if type(longest) is not int or longest < LONGEST:
        raise click.BadParameter(
            f"max-model-len must be at least {LONGEST} tokens, those of the longest request"
        )
    return given


@click.command(name="peers")
@choices_option("--system", "names", of=SYSTEMS, words=f"[default: {', '.join(DEFAULT)}]")
@choices_option("--pattern", "patterns", of=GENERATED, words="[default: all, unless --traces]")
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of recorded traces; each is a pattern of arrivals.",
)
@number_option("--load", "loads", default=(0.5, 1.0, 1.5), least=0.05, most=10, multiple=True)
@number_option("--seconds", default=60.0, least=0.5, most=3_600, words="Of arrivals, in each run.")
@number_option("--rounds", default=3, least=1, most=100)
@click.option("--model", default=LOCAL, show_default=True, help="Path or hub id of the model.")
@click.option("--engine-args", "args", callback=_engine_args, help="vLLM's arguments, as JSON.")
@number_option(
    "--replicas",
    default=None,
    least=1,
    most=64,
    words="Engines of each system.  [default: one for each GPU; on CPUs one less than cores]",
)
@number_option(
    "--slo-scale", "scale", default=1.0, least=0.1, most=100, words="Factor on all objectives."
)
@seed
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for plots (SVG) of attainment and TTFT, and for the JSON.",
)
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
    # What servers say may look like markup.
    say = Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print
    try:
        if plots is not None:
            require_matplotlib()
            plots.mkdir(parents=True, exist_ok=True)
        setting = _setting(model, args, replicas)
        longest = setting.args["max-model-len"]
        chosen = [GENERATED[name] for name in patterns or (GENERATED if traces is None else ())]
        if traces is not None:
            chosen += recorded(traces, longest).values()
        with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="sluice-") as folder:
            bench = Bench({}, Path(folder), say, stop, 0.0)
            found = _Campaign(bench, setting, chosen, loads, seconds, seed)
            systems = list(dict.fromkeys(names or DEFAULT))
            found.prepare(systems, scale)
            for number in range(rounds):
                for name in systems[:: -1 if number % 2 else 1]:
                    found.measure(name, number)
        runs = found.runs
        if not runs:
            raise LoadError(f"no system could be started: {found.left_out}")
        rows = summary(runs)
        every = [{**_labels(run), **figures([run])} for run in runs]
        shown = {"left_out": found.left_out, **found.conditions(), "summary": rows, "runs": every}
        if plots is not None:
            (plots / "peers.json").write_text(json.dumps(shown, indent=1), encoding="utf-8")
            for name, chart in {**attainment(rows), **first_tokens(runs)}.items():
                draw(chart, plots / f"{name}.svg")
    except (LeftOutError, LoadError, ReportError, TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    except StoppedError:
        raise click.Abort from None
    show(shown, tables(rows), as_json)
    if not as_json:
        for what, words in found.conditions().items():
            click.echo(f"{what}: {words}")
        for name, reason in found.left_out.items():
            click.echo(f"{name} was left out: {reason}")


def _labels(run: Run) -> Json:
    return {name: getattr(run, name) for name in ("pattern", "load", "system", "round")}


def _setting(model: str, args: Json, replicas: int | None) -> Setting:
    import torch

    gpus = torch.cuda.device_count()
    # A core is left for everything else, as a GPU machine has cores that no engine needs.
    replicas = replicas or gpus or max(1, len(psutil.Process().cpu_affinity()) - 1)
    given = {"max-model-len": MODEL_TOKENS, **({} if gpus else CPU_ARGS), **args}
    path = str(local_model(EngineConfig().cache_dir)) if model == LOCAL else model
    return Setting(path, given, replicas, gpus, {})


class _Campaign:
    """All measurements of one call of the command."""

    def __init__(
        self,
        bench: Bench,
        setting: Setting,
        patterns: Sequence[Pattern],
        loads: Sequence[float],
        seconds: float,
        seed: int,
    ) -> None:
        self._bench = bench
        self._setting = setting
        self._patterns = patterns
        self._loads = loads
        self._seconds = seconds
        self._seed = seed
        self._slos: Mapping[str, SLO] = {}
        self._capacities: dict[str, float] = {}
        self.runs: list[Run] = []
        self.left_out: dict[str, str] = {}
        self._reference = ""

    def conditions(self) -> Json:
        """What was measured under: model, arguments, objectives and load 1 by pattern."""
        return {
            "model": Path(self._setting.model).name,
            "engine_args": self._setting.args,
            "replicas": self._setting.replicas,
            "seed": self._seed,
            "seconds": self._seconds,
            "objectives_ms": {
                name: {"ttft": each.ttft_ms, "tpot": each.tpot_ms}
                for name, each in self._setting.classes.items()
            },
            "measured_on": self._reference,
            "load_1": {name: round(rate, 3) for name, rate in self._capacities.items()},
            "traces": {
                each.name: each.trace.description
                for each in self._patterns
                if each.trace is not None
            },
        }

    def prepare(self, names: Sequence[str], scale: float) -> None:
        """Measure the objectives and the capacity on stock vLLM, or on the first of the systems
        that starts.

        Raises:
            LoadError: none starts, or a request is not answered.
        """
        for name in dict.fromkeys((FIRST, *names)):
            self._bench.say(f"{name}: idle times and capacity")
            try:
                with SYSTEMS[name].start(self._setting)(self._bench) as system:
                    self._prepare_on(system, scale)
            except LeftOutError as error:
                self._leave_out(name, error)
                continue
            self._reference = name
            shown = self.conditions()
            self._bench.say(f"objectives {shown['objectives_ms']}, load 1 {shown['load_1']}")
            return
        raise LoadError(f"no system could be started: {self.left_out}")

    def _prepare_on(self, system: System, scale: float) -> None:
        url = _completions(system)
        classes = classes_of(alone(url, MODEL), scale)
        for pattern in self._patterns:
            body = body_of(f"capacity {pattern.name}", pattern.block_tokens)
            drawn, in_flight = pattern.drawn(self._seed), IN_FLIGHT * self._setting.replicas
            self._capacities[pattern.name] = self._stoppable(
                saturated(url, MODEL, drawn, body, in_flight, WARM_UP_S, CAPACITY_S)
            )
        self._setting = self._setting._replace(classes=classes)
        self._slos = {name: each.objective(name) for name, each in classes.items()}

    def _leave_out(self, name: str, error: Exception) -> None:
        self.left_out[name] = str(error)
        self._bench.say(f"{name} is left out: {error}")

    def measure(self, name: str, number: int) -> None:
        """Start a system, warm it up, drive it with every pattern and load, and stop it."""
        if name in self.left_out:
            return
        peer, begun_s, seed = SYSTEMS[name], time.monotonic(), self._seed + number
        self._bench.say(f"round {number + 1}: {name}: {peer.words}")
        try:
            with peer.start(self._setting)(self._bench) as system:
                self._bench.say(f"  started in {time.monotonic() - begun_s:.0f} s")
                send = partial(self._send, system, peer.priorities)
                send(self._patterns[0], 1.0, WARM_UP_S, seed + _WARM_SEED)
                for pattern, load in product(self._patterns, self._loads):
                    gc.collect()
                    before = processes(system.processes)
                    psutil.cpu_percent()
                    outcomes = send(pattern, load, self._seconds, seed)
                    busy = psutil.cpu_percent() / 100
                    cpu_s = spent(before, processes(system.processes))
                    at = (pattern.name, load, name, number, self._seconds)
                    self.runs.append(Run(*at, outcomes, cpu_s, busy))
                    met = sum(each.attained for each in outcomes)
                    self._bench.say(f"  {pattern.name} {load:g}: {met} of {len(outcomes)} attained")
        except (LeftOutError, OSError, psutil.Error) as error:  # the others are measured still
            self._leave_out(name, error)

    def _send(
        self,
        system: System,
        priorities: bool,
        pattern: Pattern,
        load: float,
        seconds: float,
        seed: int,
    ) -> list[Outcome]:
        rate = load * self._capacities[pattern.name]
        workload = pattern.workload(rate, seconds, seed, self._slos)
        make = body_of(f"{pattern.name} {load} {seed}", workload.block_tokens, priorities)
        # Before the first is sent: the client has no time for it later.
        bodies = [make(MODEL, number, each) for number, each in enumerate(workload.arrivals)]
        made: Body = lambda _, number, __: bodies[number]  # noqa: E731
        where = (_completions(system), MODEL)
        return self._stoppable(replay(*where, workload, GRACE_S, body=made, exact=False))

    def _stoppable(self, load: Coroutine[Any, Any, T]) -> T:
        """The result of a load, unless this process is to end."""

        async def until_stopped() -> T:
            task = asyncio.create_task(load)
            while not task.done():
                await asyncio.wait([task], timeout=1.0)
                if self._bench.stop.is_set():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    raise StoppedError("stopped in the middle of a run")
            return task.result()

        return asyncio.run(until_stopped())


def _completions(system: System) -> str:
    return f"{system.urls[0]}/v1/completions"
