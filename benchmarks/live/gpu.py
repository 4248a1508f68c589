"""One command for one GPU: ``sluice bench gpu``, each of :data:`PARTS` in a process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

import click

from sluice.benchmarks.live.client import Json, LoadError
from sluice.benchmarks.live.gpu_parts import Given, engine_of
from sluice.benchmarks.live.peers import CPU_ARGS, MODEL_TOKENS, Records, engine_args
from sluice.benchmarks.live.report import figures, text
from sluice.benchmarks.live.systems import SLUICE, VLLM_ENVIRONMENT, Bench, campaign, spawned, until
from sluice.benchmarks.options import as_json, choices_option, folder, number_option
from sluice.benchmarks.report import Report, Table
from sluice.deploy.commands.options import Exit, Failure
from sluice.deploy.local import StoppedError
from sluice.replica.vllm.local_model import LLAMA_8B, TINY, shaped_model
from sluice.telemetry.records import whole_lines

_GPU_ARGS: Final[Json] = {"max-model-len": MODEL_TOKENS, "gpu-memory-utilization": 0.9}
_QUIET: Final = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "ERROR"}
_LOAD: Final = """
sent attained attained_interval goodput tokens guaranteed kept ttft_ms tpot_ms cpu_s late_ms
""".split()  # noqa: SIM905
_REASON: Final = re.compile(
    r"^(?:\[\w+\]: )?((?:Error|[\w.]+(?:Error|Exception)): .*)", re.MULTILINE
)
_SHOWN = 300
_MIN_PART_S = 30.0
"""No part begins with less of the budget left, seconds."""
_BUDGET = "For all parts; what is not done by then is left out.  [default: no limit]"
_DEVICE = "cpu: to try the command, a tiny model on vLLM's CPU build. Its figures mean nothing."


def _lines(_: Given, answer: Path) -> list[Json]:
    lines = answer.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in whole_lines(lines)]


class Part(NamedTuple):
    """What a part measures, its limit (seconds), its command, and the rows of what it has printed
    to a file by its end or its limit."""

    words: str
    limit_s: float
    command: Callable[[Given], Sequence[str | Path]]
    rows: Callable[[Given, Path], list[Json]] = _lines


def _own(name: str, words: str, limit_s: float) -> Part:
    program = [sys.executable, "-m", "sluice.benchmarks.live.gpu_parts", name]
    return Part(words, limit_s, lambda given: [*program, given.folder])


def _profile(given: Given) -> Sequence[str | Path]:
    config = Path(given.folder, "engine.json")
    config.write_text(json.dumps({"engine": engine_of(given, given.args)}))
    kept = config.with_name("latency.json")
    return [SLUICE, "profile", "--config", config, "--out", kept, "--json"]


def _errors(_: Given, answer: Path) -> list[Json]:
    found = json.loads(answer.read_text(), parse_constant=lambda _: None)
    fitted = {f"{found['family']}, chosen": found["out_of_sample"]["all"]["mape"]}
    every = fitted | found["out_of_sample_mape_of_others"]
    return [{"model": name, "mean error": error} for name, error in every.items()]


def _runs_of(given: Given) -> Path:
    return Path(given.folder, "load")


def _load(given: Given) -> Sequence[str | Path]:
    systems = [f"--system={name}" for name in ("stock", "sluice", "stock-short-batches")]
    args = ["--model", given.model, "--engine-args", json.dumps(given.args), "--replicas=1"]
    runs = ["--pattern=bursty", "--rounds=1", f"--seconds={given.seconds}", "--json"]
    kept = ["--record", str(_runs_of(given)), "--resume", f"--in-flight={4 * given.decodes}"]
    return [SLUICE, "bench", "peers", *systems, *args, *runs, *kept]


def _rates(given: Given, _: Path) -> list[Json]:
    """Those of all runs that have ended."""
    kept = Records.at(_runs_of(given))
    rows = []
    for run in kept.runs:
        labels, own = run.labels, figures([run])
        rate = labels["load"] * kept.conditions["capacities"][labels["pattern"]]
        when = {"load": "1, after the start" if "warm_up" in labels else text(labels["load"])}
        rows.append(
            {"system": labels["system"], **when, "requests/s": rate}
            | {name: own[name] for name in _LOAD}
        )
    return rows


PARTS: Final[dict[str, Part]] = {
    "load": Part("stock vLLM and Sluice under a mixed load", 3_600.0, _load, _rates),
    "profile": Part("error of the latency model on unseen steps", 900.0, _profile, _errors),
    "start": _own("start", "seconds until a server answers, two starts of each", 1_800.0),
    "async": _own("async", "steps a second with asynchronous scheduling", 600.0),
    "steps": _own("steps", "steps a second, one batch at a time", 600.0),
    "preemption": _own("preemption", "stops of a prefill before its next operator", 900.0),
    "speculation": _own("speculation", "steps whose decodes check drafted tokens", 900.0),
}
"""By name, in the order in which they run: first what is worth most where the time is short."""


@click.command(name="gpu")
@choices_option("--part", "names", of=PARTS, words="[default: all]")
@click.option("--model", help="Path or hub id.  [default: the shape of Llama 3 8B, no weights]")
@click.option("--engine-args", "args", callback=engine_args, help="vLLM's arguments, as JSON.")
@number_option("--seconds", default=60.0, least=0.5, most=3_600, words="Of arrivals, at each load.")
@click.option("--device", type=click.Choice(["gpu", "cpu"]), default="gpu", help=_DEVICE)
@number_option("--budget-seconds", "budget_s", default=None, least=60, most=86_400, words=_BUDGET)
@click.option("--out", type=folder(), default="sluice-gpu", help="For JSON and logs.")
@click.option("--resume", is_flag=True, help="Measure only what the folder of --out lacks.")
@as_json
def gpu(
    names: tuple[str, ...],
    model: str | None,
    args: Json,
    seconds: float,
    device: str,
    budget_s: float | None,
    out: Path,
    resume: bool,
    as_json: bool,
) -> None:
    """Measure Sluice and stock vLLM on one GPU.

    It needs no weights and no network. Both under a mixed load at three rates; the error of the
    latency model, with and without context; the start; steps a second with and without asynchronous
    scheduling; how long a prefill takes to stop; what checking drafted tokens costs. Each result is
    written when it is there, the steps of the engines under load included. A part that fails, or is
    not done in its time, is reported, and the others are measured. Exits with 3 if there is no GPU.

    \b
    Example:
      sluice bench gpu --out sluice-gpu --budget-seconds 600
    """
    conditions, place = _device(device), out.absolute()
    own: Json = {} if model else {"load-format": "dummy"}
    own |= {"max-model-len": MODEL_TOKENS, **CPU_ARGS} if device == "cpu" else _GPU_ARGS
    with campaign() as bench:
        place.mkdir(parents=True, exist_ok=True)
        path = model or str(shaped_model(place, TINY if device == "cpu" else LLAMA_8B))
        given = Given(path, own | args, int(device == "gpu"), seconds, str(place))
        found = _kept(place, given) if resume else {}
        if not resume:
            shutil.rmtree(_runs_of(given), ignore_errors=True)
        (place / "given.json").write_text(json.dumps(given._asdict()))
        chosen = [name for name in PARTS if not names or name in names]
        conditions |= {"Model": Path(path).name, "vLLM's arguments": json.dumps(given.args)}
        ends_s = inf if budget_s is None else time.monotonic() + budget_s
        for name in chosen:
            if name in found and "failed" not in found[name]:
                continue
            found[name] = _measured(bench, name, given, ends_s - time.monotonic())
            report = _report({x: found[x] for x in PARTS if x in found}, conditions)
            (place / "gpu.json").write_text(report.as_json())
            if bench.stop.is_set():
                raise StoppedError(f"stopped in the part {name}")
        report = _report({x: found[x] for x in PARTS if x in found}, conditions)
    click.echo(report.as_json()) if as_json else report.show()
    failed = ", ".join(name for name in chosen if "failed" in found[name])
    if failed:
        raise click.ClickException(f"parts that failed: {failed}; their logs are in {out}")


def _kept(place: Path, given: Given) -> dict[str, Json]:
    """The parts in a folder; raises :class:`LoadError` if something else was measured there."""
    try:
        if json.loads((place / "given.json").read_text()) != given._asdict():
            raise LoadError(f"{place} has results of other options, see its given.json")
        rows = json.loads((place / "gpu.json").read_text())["rows"]
    except FileNotFoundError:
        return {}
    return {row.pop("part"): row for row in rows}


def _device(wanted: str) -> dict[str, str]:
    """What the device is; raises :class:`Failure` where vLLM is not there, or finds another one."""
    if importlib.util.find_spec("vllm"):
        from vllm import __version__
        from vllm.platforms import current_platform as found

        if wanted == "cpu" and found.is_cpu():
            return {"Device": "a CPU: these figures mean nothing", "vLLM": __version__}
        if wanted == "gpu" and found.is_cuda_alike():
            return {"Device": found.get_device_name(), "vLLM": __version__}
    words = f"vLLM finds no {wanted.upper()} here, or is not installed"
    raise Failure(Exit.UNREACHABLE, f"{words}; --device cpu tries this with its CPU build")


def _measured(bench: Bench, name: str, given: Given, left_s: float) -> Json:
    """A part, as far as it comes in its time and in ``left_s``."""
    part, place, began_s = PARTS[name], Path(given.folder), time.monotonic()
    if left_s < _MIN_PART_S:
        return {"seconds": 0.0, "failed": "not begun: the budget is used up"}
    limit_s = min(part.limit_s, left_s)
    bench.say(f"{name}: {part.words}, at most {limit_s:.4g} s")
    log, answer = place / f"{name}.log", place / f"{name}.json"
    environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, **VLLM_ENVIRONMENT, **_QUIET}
    with spawned(part.command(given), log, environment, answer) as process:
        ended = until(lambda: process.poll() is not None, limit_s, bench.stop)
    found: Json = {"seconds": round(time.monotonic() - began_s, 1)}
    if not ended:
        found["failed"] = "stopped" if bench.stop.is_set() else f"not done after {limit_s:.4g} s"
    elif process.returncode:
        said = _REASON.findall(click.unstyle(log.read_text(errors="replace")))
        found["failed"] = said[-1][:_SHOWN] if said else f"it ended with {process.returncode}"
    elif name == "load" and (left_out := json.loads(answer.read_text())["left_out"]):
        found["failed"] = f"left out: {left_out}"[:_SHOWN]
    # A part that failed may have none, or no whole ones.
    with suppress(ValueError, LoadError) if "failed" in found else nullcontext():
        if rows := part.rows(given, answer):
            found["rows"] = rows
    bench.say(f"  {found.get('failed', 'done')} after {found['seconds']:g} s")
    return found


def _report(found: dict[str, Json], conditions: dict[str, str]) -> Report:
    states = [(name, each.get("failed", ""), text(each["seconds"])) for name, each in found.items()]
    tables = [Table("parts", ("part", "failed", "seconds"), states)]
    for name, each in found.items():
        if "rows" in each:
            cells = [[text(value) for value in row.values()] for row in each["rows"]]
            tables.append(Table(f"{name}: {PARTS[name].words}", list(each["rows"][0]), cells))
    question = "What does Sluice cost and win beside stock vLLM on one GPU?"
    ranges = "95 % over requests of a share (Wilson), min and max over rounds of a ratio"
    setting = "; ".join(f"{what}: {words}" for what, words in conditions.items())
    said = "gpu", "this command", question, setting, ranges, "sluice bench gpu"
    return Report(*said, tables, [{"part": name, **each} for name, each in found.items()])
