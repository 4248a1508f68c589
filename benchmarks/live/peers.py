"""Sluice, stock vLLM behind routers, vLLM's priorities and Ray Serve LLM on real engines of one
model, with the same requests: ``sluice bench peers``."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec
import psutil
from rich.table import Table

from sluice.benchmarks.experiments.consent import TPOT_TIMES, TTFT_TIMES
from sluice.benchmarks.live import mix
from sluice.benchmarks.live import systems as live
from sluice.benchmarks.live.client import End, Json, LoadError
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.report import CORES, Run, processes, single, summary, table
from sluice.benchmarks.live.systems import (
    IN_FLIGHT,
    VLLM_ENVIRONMENT,
    Bench,
    LeftOutError,
    Server,
    Start,
    System,
    campaign,
    capacity,
    completions,
    engines,
    metrics,
    objectives,
    router,
    served,
    sluice,
    vllm_command,
)
from sluice.benchmarks.options import as_json, choices_option, folder, number_option, seed, show
from sluice.controller.config import NO_ADMISSION
from sluice.replica.config import EngineConfig
from sluice.replica.vllm.local_model import local_model
from sluice.router.config import Alternative, ServiceClass
from sluice.scheduling.request.objective import SLO
from sluice.telemetry.records import whole_lines

CPU_ARGS: Final[Json] = {
    "enforce-eager": True,
    "kv-cache-memory-bytes": 256 << 20,
    "dtype": "float32",
}
"""vLLM's arguments on CPUs; it would choose bfloat16, slow there, and take most memory."""

SCHEDULER: Final = "sluice.benchmarks.live.step_log.make_scheduler"
"""vLLM's own scheduler, which notes its steps: ``scheduler-cls``."""

STEP_LOG: Final = "SLUICE_STEP_LOG"
"""The variable with the path of the log that it writes."""

_STOCK_ARGS: Final[Json] = {"disable-log-stats": True, "disable-uvicorn-access-log": True}
_CPU_ENVIRONMENT: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Without it the model is in one more process, behind one more queue; Sluice has neither."""


class Setting(NamedTuple):
    """What all systems share: the model's path or hub id, vLLM's arguments by command-line name
    without dashes, the engines, the GPUs of this machine, and the service classes, which only
    Sluice can use."""

    model: str
    args: Json
    replicas: int
    gpus: int
    classes: Mapping[str, ServiceClass]
    record: Path | None = None
    """Folder for the engines' logs of their steps, and Sluice's of its decisions."""

    @property
    def gpus_each(self) -> float:
        """GPUs of an engine; a share of one where engines share it."""
        wanted = int(self.args.get("tensor-parallel-size", 1))
        return min(float(wanted), self.gpus / self.replicas)

    def devices(self, number: int) -> str:
        """The GPUs of engine ``number``, as CUDA names them."""
        each = max(1, int(self.gpus_each))
        return ",".join(str((number * each + own) % self.gpus) for own in range(each))


class Peer(NamedTuple):
    """A system: words, what starts it, whether requests state vLLM's priorities, its reference."""

    words: str
    start: Callable[[Setting], Start]
    priorities: bool = False
    reference: str = "stock-round-robin"


def stock(policy: str, more: Json, setting: Setting) -> Start:
    """vLLM's own servers behind vllm-router; an empty policy: one server without a router."""

    def engine_on(_: Bench, port: int, number: int) -> Server:
        args, variables = {**setting.args, **_STOCK_ARGS, **more}, dict(VLLM_ENVIRONMENT)
        if setting.record is not None:
            args["scheduler-cls"] = SCHEDULER
            variables[STEP_LOG] = str(setting.record / f"{number}.jsonl")
        if setting.gpus > 1:
            variables["CUDA_VISIBLE_DEVICES"] = setting.devices(number)
        elif not setting.gpus:
            args = {"distributed-executor-backend": "uni", **args}
            variables |= _CPU_ENVIRONMENT
        command = vllm_command(setting.model, MODEL, port, args)
        return Server(command, variables, live.START_LIMIT_S)

    @contextmanager
    def start(bench: Bench) -> Iterator[System]:
        if not policy and setting.replicas > 1:
            raise LeftOutError("it has one server and no router: take --replicas 1")
        # In front of a single engine all policies are one, and some refuse to start.
        chosen = policy if setting.replicas > 1 else "round_robin"
        router = served("vllm-router", partial(live.vllm_router, policy=chosen))
        with engines(bench, engine_on, setting.replicas) as found:
            own = dict.fromkeys(found, "")
            if not setting.gpus:
                _pin(own)
            if not policy:
                yield System(tuple(found.values()), own)
                return
            with router(bench._replace(engines=found)) as system:
                yield system._replace(processes={**system.processes, **own})

    return start


def _pin(roots: Mapping[int, str]) -> None:
    """Pin each engine's leaf process, which computes, to a core, as Sluice does."""
    cores = sorted(os.sched_getaffinity(0))
    found = [pid for pid, each in processes(roots).items() if each.kind == CORES]
    parents = {psutil.Process(pid).ppid() for pid in found}
    for number, pid in enumerate(pid for pid in found if pid not in parents):
        os.sched_setaffinity(pid, {cores[number % len(cores)]})


def _serve_llm(prefix_aware: bool, setting: Setting) -> Start:
    def server_on(bench: Bench, port: int) -> Server:
        file = bench.folder / "serve-llm.json"
        arguments = {name.replace("-", "_"): value for name, value in setting.args.items()}
        given = {"model": setting.model, "args": arguments, "gpus": min(1.0, setting.gpus_each)}
        file.write_text(json.dumps({**given, "prefix_aware": prefix_aware}))
        options = ("--replicas", str(setting.replicas), "--vllm", str(file))
        return live.serve_llm(bench, port, *options)

    @contextmanager
    def start(bench: Bench) -> Iterator[System]:
        with served("ray-serve-llm", server_on)(bench) as system:
            if not setting.gpus:
                _pin(system.processes)
            yield system

    return start


def _sluice(engine: Json, controller: Json, setting: Setting) -> Start:
    return sluice("sluice", lambda _, port: sluice_config(engine, controller, setting, port))


def _accepting(engine: Json, controller: Json, setting: Setting) -> Start:
    """Sluice where each class accepts times that are longer as in ``sluice bench accepts``."""
    classes = {}
    for name, each in setting.classes.items():
        longer = Alternative(
            ttft_ms=TTFT_TIMES * (each.ttft_ms or 1.0), tpot_ms=TPOT_TIMES * (each.tpot_ms or 1.0)
        )
        classes[name] = each.model_copy(update={"accepts": (longer,)})
    return _sluice(engine, controller, setting._replace(classes=classes))


def sluice_config(engine: Json, controller: Json, setting: Setting, port: int) -> Json:
    """The configuration of Sluice with these fields of its engine and controller."""
    model = {"model": setting.model, "served_model_name": MODEL, "vllm_args": setting.args}
    if setting.record is not None:
        engine = {**engine, "batch_log": str(setting.record)}
        controller = {**controller, "decision_log": str(setting.record / DECISIONS)}
    replica: Json = {"count": setting.replicas, "num_cpus": 0.1}
    if setting.gpus:
        replica["num_gpus"] = setting.gpus_each
    parts = {"controller": controller, "replica": replica, "router": router(port, setting.classes)}
    return {"engine": {**model, **engine}, **parts}


def _paper(batching: str, policy: str, admission: str = NO_ADMISSION) -> Peer:
    words = f"Sluice with the batching policy {batching}, routing {policy}, admission {admission}"
    controller = {"policy": policy, "admission": admission}
    return Peer(words, partial(_sluice, {"policy": batching}, controller))


def _router(policy: str) -> Peer:
    return Peer(f"vLLM, vllm-router {policy}", partial(stock, policy, {}))


SYSTEMS: Final[dict[str, Peer]] = {
    "stock": Peer("vLLM's own server, alone", partial(stock, "", {}), reference="stock"),
    "stock-round-robin": _router("round_robin"),
    "stock-power-of-two": _router("power_of_two"),
    "stock-cache-aware": _router("cache_aware"),
    "stock-priority": Peer(
        "vLLM with priorities by class, vllm-router power_of_two",
        partial(stock, "power_of_two", {"scheduling-policy": "priority"}),
        priorities=True,
    ),
    "stock-short-batches": Peer(
        "vLLM's own server, alone, with priorities by class and batches of 1,024 tokens",
        partial(stock, "", {"scheduling-policy": "priority", "max-num-batched-tokens": 1_024}),
        priorities=True,
        reference="stock",
    ),
    "serve-llm": Peer("Ray Serve LLM, power of two", partial(_serve_llm, False)),
    "serve-llm-prefix": Peer("Ray Serve LLM, prefix-aware", partial(_serve_llm, True)),
    "sluice": Peer("Sluice with its defaults", partial(_sluice, {}, {})),
    "sluice-accepts": Peer("Sluice, classes accept longer times", partial(_accepting, {}, {})),
    "sluice-proserve": _paper("slidebatching", "go_routing"),
    "sluice-fairbatching": _paper("fairbatching", "pab", "pab"),
    "sluice-slos-serve": _paper("slos_serve", "slos_serve", "slos_serve"),
    "sluice-annealing": _paper("annealing", "least_memory"),
    "sluice-flowprefill": Peer(
        "prefills that are preempted at operators (FlowPrefill), Sluice's router",
        partial(_sluice, {"preemption": True}, {}),
    ),
}
"""By name."""

DEFAULT: Final = (
    "stock-round-robin",
    "stock-power-of-two",
    "stock-cache-aware",
    "stock-priority",
    "serve-llm",
    "serve-llm-prefix",
    "sluice",
)


LOCAL: Final = "local"
MODEL_TOKENS: Final = 8_192
"""Maximum tokens of a request where --engine-args has no ``max-model-len``."""

WARM_UP_S: Final = 10.0
"""How long a system is driven before it is measured, and stock vLLM before its capacity is."""

CAPACITY_S: Final = 30.0
"""How long capacity is measured: requests that begin together also end in waves."""

GRACE_S: Final = 120.0
"""How long after the last arrival the client waits for answers, seconds."""

CELL: Final = ("pattern", "load", "system")
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
_PATTERNS = "Of arrivals, or a published mix.  [default: poisson, bursty, unless --traces]"
_RECORD = "Folder for each run as it ends, and for all steps of the engines."
_ENGINES = "Engines of each system.  [default: one for each GPU; on CPUs one less than cores]"


@click.command(name="peers")
@choices_option("--system", "names", of=SYSTEMS, words=f"[default: {', '.join(DEFAULT)}]")
@choices_option("--pattern", "patterns", of=mix.PATTERNS, words=_PATTERNS)
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
@click.option("--record", type=folder(), help=_RECORD)
@click.option("--resume", is_flag=True, help="Run only what the folder of --record lacks.")
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
    record: Path | None,
    resume: bool,
    as_json: bool,
) -> None:
    """Measure Sluice, stock vLLM and Ray Serve LLM on real engines.

    Stock vLLM is behind routers. Objectives are multiples of the times of a single request on idle
    stock vLLM, the same for all systems; Sluice knows them, the others have no way to state them.
    Load 1 is the rate that saturates stock vLLM. Missing routers are installed from PyPI into the
    user's cache. A system that cannot be installed or started is left out, and the output says so.

    \b
    Example:
      sluice bench peers --system stock-power-of-two --system sluice --pattern bursty --rounds 1
    """
    if resume and record is None:
        raise click.UsageError("--resume needs the folder of --record")
    with campaign() as bench:
        setting = setting_of(model, args, replicas)
        longest = setting.args["max-model-len"]
        chosen = {
            name: mix.GENERATED.get(name) or mix.published(name, longest) for name in patterns
        }
        if traces is not None:
            chosen |= mix.recorded(traces, longest)
        chosen = chosen or mix.GENERATED
        kept = None if record is None else Records.at(record, resume)
        found = _Campaign(bench, setting, chosen, loads, seconds, seed, in_flight, scale, kept)
        systems = list(dict.fromkeys(names or DEFAULT))
        found.prepare(systems)
        for number in range(rounds):
            for name in systems[:: -1 if number % 2 else 1]:
                found.measure(name, number)
        runs = [run for run in found.runs if "warm_up" not in run.labels]
        if not runs:
            raise LoadError(f"no system could be started: {found.left_out}")
        warm_ups = [run for run in found.runs if "warm_up" in run.labels]
        rows, own = summary(runs, *CELL), {"runs": single(runs), "warm_ups": single(warm_ups)}
        shown = {"left_out": found.left_out, **found.conditions(), "summary": rows, **own}
    lines = [f"{what}: {words}" for what, words in found.conditions().items()]
    lines += [f"{name} was left out: {reason}" for name, reason in found.left_out.items()]
    show(shown, tables(rows), as_json, *lines)


def setting_of(model: str, args: Json, replicas: int | None) -> Setting:
    """What all systems share on this machine; ``replicas``: by default one for each GPU."""
    import torch

    gpus = torch.cuda.device_count()
    # A core is left for everything else, as a GPU machine has cores that no engine needs.
    replicas = replicas or gpus or max(1, len(psutil.Process().cpu_affinity()) - 1)
    given = {"max-model-len": MODEL_TOKENS, **({} if gpus else CPU_ARGS), **args}
    path = str(local_model(EngineConfig().cache_dir)) if model == LOCAL else model
    return Setting(path, given, replicas, gpus, {})


DECISIONS: Final = "decisions"
_RUNS: Final = "runs.jsonl"


class Records:
    """Measurements as they are made, as lines of ``runs.jsonl``: the conditions, then each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conditions: Json = {}
        self.runs: list[Run] = []
        """Warm-ups included."""

    @classmethod
    def at(cls, folder: Path, resume: bool = True) -> Records:
        """Those in ``folder``, if there may be any. Raises :class:`LoadError`: they are others, or
        not to be continued; OSError."""
        found, path = cls(folder), folder / _RUNS
        if not resume and path.exists():
            raise LoadError(f"{folder} has runs: take --resume, or another folder")
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = list(whole_lines(lines))
            path.write_text("".join(whole), encoding="utf-8")
            try:
                found.conditions = json.loads(whole[0]) if whole else {}
                found.runs = [msgspec.json.decode(line, type=Run) for line in whole[1:]]
            except ValueError as error:
                raise LoadError(f"{path} has no runs: {error}") from None
        for place in folder.glob(f"*/{DECISIONS}"):
            compress(place.parent)
        return found

    def keep(self, record: Any) -> None:
        """Append the conditions, or a run."""
        with (self.folder / _RUNS).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def logs_of(self, name: str) -> Path:
        """A new folder for the logs of a start of a system."""
        every = (self.folder / f"{name}-{number}" for number in count(1))
        place = next(each for each in every if not each.exists())
        (place / DECISIONS).mkdir(parents=True)
        return place


def compress(place: Path) -> None:
    """Compress the logs of a system's steps and decisions."""
    for log in (*place.glob("*.jsonl"), *place.glob(f"{DECISIONS}/*.jsonl")):
        with log.open("rb") as plain, gzip.open(f"{log}.gz", "wb", compresslevel=1) as packed:
            shutil.copyfileobj(plain, packed)
        log.unlink()


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
    scale: float = 1.0
    records: Records | None = None
    slos: Mapping[str, SLO] = field(default_factory=dict)
    capacities: dict[str, float] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    """Warm-ups included."""
    left_out: dict[str, str] = field(default_factory=dict)
    reference: str = ""

    def conditions(self) -> Json:
        traces = {name: each.trace for name, each in self.patterns.items() if each.trace}
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
            "traces": {name: each.description for name, each in traces.items()},
        }

    def prepare(self, names: Sequence[str]) -> None:
        """Measure objectives and capacity on the reference, and stock vLLM's first round while it
        runs; raises :class:`LoadError`."""
        if self.records is not None and self.records.conditions:
            self._restore(self.records)
            return
        for name in dict.fromkeys((SYSTEMS[names[0]].reference, *names)):
            measured = name in names and name.startswith("stock")
            prepare = partial(self._prepare_on, name, measured)
            self._on(name, f"{name}: idle times and capacity", prepare)
            if self.reference:
                return
        raise LoadError(f"no system could be started: {self.left_out}")

    def _prepare_on(self, name: str, measured: bool, system: System) -> None:
        classes: dict[str, ServiceClass] = {}
        rates: dict[str, float] = {}
        for pattern in self.patterns.values():
            if not pattern.kinds.keys() <= classes.keys():
                idle = mix.alone(completions(system), MODEL, pattern.kinds)
                classes |= pattern.classes(idle, self.scale)
        for pattern_name, pattern in self.patterns.items():
            body = mix.body_of(f"capacity {pattern_name}", pattern.block_tokens)
            # Sluice has no classes yet.
            drawn = (each._replace(slo=SLO()) for each in pattern.drawn(self.seed))
            load = drawn, body, self.in_flight * self.setting.replicas, WARM_UP_S, CAPACITY_S
            rates[pattern_name] = capacity(self.bench, system, *load)
        self._found(name, classes, rates)
        shown = self.conditions()
        self.bench.say(f"objectives {shown['objectives_ms']}, load 1 {shown['load_1']}")
        if self.records is not None:
            dumped = {name: each.model_dump(mode="json") for name, each in classes.items()}
            own = {"scale": self.scale, "classes": dumped, "capacities": self.capacities}
            self.records.keep(shown | own)
        if measured:
            self._measure_on(name, 0, system)

    def _found(
        self, reference: str, classes: Mapping[str, ServiceClass], rates: dict[str, float]
    ) -> None:
        self.reference, self.capacities = reference, rates
        self.setting = self.setting._replace(classes=classes)
        self.slos = objectives(classes)

    def _restore(self, records: Records) -> None:
        kept = records.conditions
        asked = {**self.conditions(), "scale": self.scale}
        for name in ("model", "engine_args", "replicas", "seed", "seconds", "scale"):
            if kept.get(name) != asked[name]:
                raise LoadError(
                    f"{records.folder} was recorded with {name} {kept.get(name)}, not {asked[name]}"
                )
        if missing := set(self.patterns) - set(kept["capacities"]):
            raise LoadError(f"{records.folder} has no capacity for {', '.join(sorted(missing))}")
        made = {name: ServiceClass.model_validate(x) for name, x in kept["classes"].items()}
        self._found(kept["measured_on"], made, kept["capacities"])
        self.runs = list(records.runs)

    def measure(self, name: str, number: int) -> None:
        if name not in self.left_out and self._missing(name, number):
            words = f"round {number + 1}: {name}: {SYSTEMS[name].words}"
            self._on(name, words, partial(self._measure_on, name, number))

    def _on(self, name: str, words: str, do: Callable[[System], None]) -> None:
        """Start a system and measure; its logs are compressed when it has ended. One that cannot be
        started or measured is left out, and the others are measured still."""
        begun_s, setting, place = time.monotonic(), self.setting, None
        self.bench.say(words)
        if self.records is not None:
            place = self.records.logs_of(name)
            setting = setting._replace(record=place)
        try:
            with SYSTEMS[name].start(setting)(self.bench) as system:
                self.bench.say(f"  started in {time.monotonic() - begun_s:.0f} s")
                do(system)
        except (LeftOutError, OSError, psutil.Error) as error:
            self.left_out[name] = str(error)
            self.bench.say(f"{name} is left out: {error}")
        finally:
            if place is not None:
                compress(place)

    def _missing(self, name: str, number: int) -> list[tuple[str, float]]:
        """Pattern and load of each run that a system lacks in a round."""
        labels = [run.labels for run in self.runs if "warm_up" not in run.labels]
        known = {tuple(each[key] for key in (*CELL, "round")) for each in labels}
        every = product(self.patterns, self.loads)
        return [each for each in every if (*each, name, number) not in known]

    def _measure_on(self, name: str, number: int, system: System) -> None:
        """The runs that are missing, after one that warms up."""
        seed, own = self.seed + number, {"system": name, "round": number}
        warm_up = {"pattern": next(iter(self.patterns)), "load": 1.0, **own, "warm_up": True}
        self._run(system, warm_up, WARM_UP_S, seed + 1_000_000)
        for pattern, load in self._missing(name, number):
            self._run(system, {"pattern": pattern, "load": load, **own}, self.seconds, seed)

    def _run(self, system: System, labels: Json, seconds: float, seed: int) -> None:
        """One run; Sluice's engines' counters are kept with it."""
        pattern, load, name = (labels[key] for key in CELL)
        rate = load * self.capacities[pattern]
        workload = self.patterns[pattern].workload(rate, seconds, seed, self.slos)
        run = f"{pattern} {load} {seed}"
        make = mix.body_of(run, workload.block_tokens, SYSTEMS[name].priorities)
        # Before the first is sent: the client has no time for it later.
        bodies = [make(MODEL, number, each) for number, each in enumerate(workload.arrivals)]
        labels["began_s"] = time.monotonic()  # as the engines' steps
        options: Json = {"grace_s": GRACE_S, "body": lambda *at: bodies[at[1]], "exact": False}
        found = live.run(self.bench, system, labels, seconds, workload, system.processes, **options)
        if "warm_up" not in labels:
            if name.startswith("sluice"):
                counted = metrics(system.urls[0]).items()
                labels["engine"] = {x: value for x, value in counted if x.startswith(_ENGINE)}
            met = sum(each.attained for each in found.outcomes)
            self.bench.say(f"  {pattern} {load:g}: {met} of {len(found.outcomes)} attained")
        self.runs.append(found)
        if self.records is not None:
            self.records.keep(found)


def tables(rows: Sequence[Json]) -> list[Table]:
    """The summary as tables."""
    classes = [f"classes.{name}" for name in rows[0]["classes"]]
    met = ("attained", "range.attained", "attained_interval", "objectives.ttft", "objectives.tpot")
    good = ("goodput", "range.goodput", "goodput_tokens", "tokens", "ttft_ms", "tpot_ms")
    ends = [end.value for end in End if end not in (End.ANSWERED, End.LEFT)]
    rest = ("guaranteed", "kept", "cpu_s", "engine_cpu_s", "busy", "late_ms")
    return [
        table(rows, *CELL, "sent", *met, *classes, title="share of requests within objectives"),
        table(rows, *CELL, *good, title="goodput; P50 / P95 / P99"),
        table(rows, *CELL, *ends, *rest, title="refusals, promises and processor time"),
    ]
