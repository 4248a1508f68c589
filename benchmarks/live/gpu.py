"""One command for one GPU: ``sluice bench gpu``, each of :data:`PARTS` in a process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.gpu_parts import Given, engine_of
from sluice.benchmarks.live.peers import CPU_ARGS, MODEL_TOKENS, engine_args
from sluice.benchmarks.live.report import text
from sluice.benchmarks.live.systems import SLUICE, VLLM_ENVIRONMENT, Bench, campaign, spawned, until
from sluice.benchmarks.options import as_json, choices_option, folder, number_option
from sluice.benchmarks.report import Report, Table
from sluice.deploy.commands.options import Exit, Failure
from sluice.deploy.local import StoppedError
from sluice.replica.vllm.local_model import LLAMA_8B, TINY, shaped_model

_GPU_ARGS: Final[Json] = {"max-model-len": MODEL_TOKENS, "gpu-memory-utilization": 0.9}
_QUIET: Final = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "ERROR"}
_LOAD: Final = """
load system sent attained attained_interval goodput tokens kept ttft_ms tpot_ms late_ms
""".split()  # noqa: SIM905
_REASON: Final = re.compile(
    r"^(?:\[\w+\]: )?((?:Error|[\w.]+(?:Error|Exception)): .*)", re.MULTILINE
)
_SHOWN = 300
_DEVICE = "cpu: to try the command, a tiny model on vLLM's CPU build. Its figures mean nothing."


class Part(NamedTuple):
    """What a part measures, its limit (seconds), its command that prints JSON, and its rows."""

    words: str
    limit_s: float
    command: Callable[[Given], Sequence[str | Path]]
    rows: Callable[[Any], list[Json]] = lambda found: found


def _own(name: str, words: str, limit_s: float) -> Part:
    program = [sys.executable, "-m", "sluice.benchmarks.live.gpu_parts", name]
    return Part(words, limit_s, lambda given: [*program, given.folder])


def _plots(option: str, place: Path) -> Sequence[str | Path]:
    return [option, place] if importlib.util.find_spec("matplotlib") else []


def _profile(given: Given) -> Sequence[str | Path]:
    config = Path(given.folder, "engine.json")
    config.write_text(json.dumps({"engine": engine_of(given, given.args)}))
    kept, plot = config.with_name("latency.json"), config.with_name("profile.png")
    plots = _plots("--plot", plot)
    return [SLUICE, "profile", "--config", config, "--out", kept, *plots, "--json"]


def _errors(found: Json) -> list[Json]:
    fitted = {f"{found['family']}, chosen": found["out_of_sample"]["all"]["mape"]}
    every = fitted | found["out_of_sample_mape_of_others"]
    return [{"model": name, "mean error": error} for name, error in every.items()]


def _load(given: Given) -> Sequence[str | Path]:
    systems = ["--system=stock", "--system=sluice", "--replicas=1", "--model", given.model]
    args = ["--engine-args", json.dumps(given.args), f"--in-flight={4 * given.decodes}"]
    runs = ["--pattern=bursty", "--rounds=1", f"--seconds={given.seconds}", "--json"]
    plots = _plots("--plots", Path(given.folder))
    return [SLUICE, "bench", "peers", *systems, *args, *runs, *plots]


def _rates(found: Json) -> list[Json]:
    (rate,) = found["load_1"].values()  # there is one pattern
    every = found["summary"]
    return [{"requests/s": rate * row["load"], **{x: row[x] for x in _LOAD}} for row in every]


PARTS: Final[dict[str, Part]] = {
    "start": _own("start", "seconds until a server answers, two starts of each", 1_800.0),
    "profile": Part("error of the latency model on unseen steps", 900.0, _profile, _errors),
    "load": Part("stock vLLM and Sluice under a mixed load", 3_600.0, _load, _rates),
    "preemption": _own("preemption", "stops of a prefill before its next operator", 900.0),
    "speculation": _own("speculation", "steps whose decodes check drafted tokens", 900.0),
    "steps": _own("steps", "steps a second, one batch at a time", 600.0),
    "async": _own("async", "steps a second with asynchronous scheduling", 600.0),
}
"""By name, in the order in which they run."""


@click.command(name="gpu")
@choices_option("--part", "names", of=PARTS, words="[default: all]")
@click.option("--model", help="Path or hub id.  [default: the shape of Llama 3 8B, no weights]")
@click.option("--engine-args", "args", callback=engine_args, help="vLLM's arguments, as JSON.")
@number_option("--seconds", default=60.0, least=0.5, most=3_600, words="Of arrivals, at each load.")
@click.option("--device", type=click.Choice(["gpu", "cpu"]), default="gpu", help=_DEVICE)
@click.option("--out", type=folder(), default="sluice-gpu", help="For JSON, Markdown, plots, logs.")
@as_json
def gpu(
    names: tuple[str, ...],
    model: str | None,
    args: Json,
    seconds: float,
    device: str,
    out: Path,
    as_json: bool,
) -> None:
    """Measure Sluice and stock vLLM on one GPU, without weights and without a network.

    The start; the error of the latency model, with and without context; both under a mixed load at
    three rates; how long a prefill takes to stop; what checking drafted tokens costs; steps a
    second with and without asynchronous scheduling. A part that fails, or is not done in its time,
    is reported, and the others are measured. Exits with 3 if there is no GPU.

    \b
    Example:
      sluice bench gpu --out sluice-gpu
    """
    conditions, place = _device(device), out.absolute()
    own: Json = {} if model else {"load-format": "dummy"}
    own |= {"max-model-len": MODEL_TOKENS, **CPU_ARGS} if device == "cpu" else _GPU_ARGS
    with campaign() as bench:
        place.mkdir(parents=True, exist_ok=True)
        path = model or str(shaped_model(place, TINY if device == "cpu" else LLAMA_8B))
        given = Given(path, own | args, int(device == "gpu"), seconds, str(place))
        (place / "given.json").write_text(json.dumps(given._asdict()))
        chosen = [name for name in PARTS if not names or name in names]
        found = {name: _measured(bench, name, given) for name in chosen}
        conditions |= {"Model": Path(path).name, "vLLM's arguments": json.dumps(given.args)}
        report = _report(found, conditions)
        report.write(place, plots=False)
    click.echo(report.as_json()) if as_json else report.show()
    failed = ", ".join(name for name in chosen if "failed" in found[name])
    if failed:
        raise click.ClickException(f"parts that failed: {failed}; their logs are in {out}")


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


def _measured(bench: Bench, name: str, given: Given) -> Json:
    part, place, began_s = PARTS[name], Path(given.folder), time.monotonic()
    bench.say(f"{name}: {part.words}, at most {part.limit_s:g} s")
    log, answer = place / f"{name}.log", place / f"{name}.json"
    environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, **VLLM_ENVIRONMENT, **_QUIET}
    with spawned(part.command(given), log, environment, answer) as process:
        ended = until(lambda: process.poll() is not None, part.limit_s, bench.stop)
    if bench.stop.is_set():
        raise StoppedError(f"stopped in the part {name}")
    found: Json = {"seconds": round(time.monotonic() - began_s, 1)}
    if not ended:
        found["failed"] = f"not done after {part.limit_s:g} s"
    elif process.returncode:
        said = _REASON.findall(click.unstyle(log.read_text(errors="replace")))
        found["failed"] = said[-1][:_SHOWN] if said else f"it ended with {process.returncode}"
    else:
        shown = json.loads(answer.read_text(), parse_constant=lambda _: None)
        found["rows"] = part.rows(shown)
        if name == "load" and shown["left_out"]:
            found["failed"] = f"left out: {shown['left_out']}"[:_SHOWN]
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
    return Report(*said, tables, (), [{"part": name, **each} for name, each in found.items()])
