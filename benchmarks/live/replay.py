"""A recorded trace replayed over real HTTP on real Ray and Serve, with simulated engines: is every
request served as guaranteed and predicted, under the default controller and under plain ones?

Run with ``sluice bench replay``. Each setting of the controller gets a Ray instance of its own and
the same requests at the same times, one setting after the other. Client, cluster and engines share
this machine: check how busy it was and how late the client was before you trust a figure.

The exit status is 1 if an answer was lost: neither complete nor ended by an error, or cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.live.application import application, metrics, simulated
from sluice.benchmarks.live.client import End, Outcome
from sluice.benchmarks.live.loads import (
    CLASSES,
    ENGINE,
    SHARES,
    fitting,
    objectives,
    trace_files,
)
from sluice.benchmarks.live.processes import in_own_process
from sluice.benchmarks.live.report import (
    Json,
    by_class,
    class_table,
    milliseconds,
    quantiles,
    reasons,
    table,
)
from sluice.benchmarks.live.resources import Usage
from sluice.benchmarks.options import as_json, number_option, seed, show
from sluice.controller.config import NO_ADMISSION
from sluice.deploy.config import SluiceConfig
from sluice.simulation.workload import Workload, merged, stretched, window, with_objectives
from sluice.simulation.workloads.arrivals import Poisson
from sluice.simulation.workloads.settings import fairbatching
from sluice.simulation.workloads.traces import TraceError, load

PLAIN: Final = ("round_robin", "min_load")
"""Routing policies that the default is compared with, without admission."""

DECILES: Final = 10
_WARM_UP_S = 5.0
_STEP_RATIO = "sluice_step_time_ratio"


@click.command(name="replay")
@click.option("--traces", multiple=True, type=click.Path(exists=True, path_type=Path))
@number_option("--minutes", default=3.0, least=0.02, most=600)
@number_option("--replicas", default=8, least=1, most=256)
@number_option(
    "--rate", default=1.0, least=0.001, most=1_000, words="Requests a second for each replica."
)
@seed
@as_json
def replay(
    traces: tuple[Path, ...], minutes: float, replicas: int, rate: float, seed: int, as_json: bool
) -> None:
    """Replay a trace on real Ray with simulated engines, for several controllers.

    Each of --traces is a file, or a folder of files; several are replayed together. Without any the
    load is generated.

    \b
    Example:
      sluice bench replay --traces DIR
    """
    say = Console(stderr=True).print
    try:
        workload = make_load(traces, rate * replicas, 60 * minutes, seed)
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    results = {}
    for name, controller in settings().items():
        say(f"{name}: starting")
        results[name] = in_own_process(_measure, config(controller, replicas), workload)
        ends = results[name]["classes"]["all"]
        say(f"{name}: {ends['answered']} of {ends['sent']} answered")
    words = f"{workload.description} {workload.scaling}"
    show({"workload": words, "settings": results}, tables(results), as_json, words)
    every = [result["classes"]["all"] for result in results.values()]
    raise SystemExit(any(ends["silent"] or ends["cut"] for ends in every))


def settings() -> dict[str, dict[str, Any]]:
    """Label -> configuration of the controller. Plain policies give no guarantees."""
    return {"default": {}} | {name: {"policy": name, "admission": NO_ADMISSION} for name in PLAIN}


def config(controller: dict[str, Any], replicas: int) -> SluiceConfig:
    """An application with this controller and two routers."""
    return simulated(ENGINE, replicas, CLASSES, {"replicas": 2}, controller=controller)


def _measure(config: SluiceConfig, workload: Workload) -> Json:
    """Serve ``config``, replay the workload's first seconds to warm up, and then all of it."""
    with application(config) as served:
        served.send(window(workload, 0.0, _WARM_UP_S))
        before = metrics(served.url)
        outcomes, usage = served.send_metered(workload)
        after = metrics(served.url)
    seconds, steps = (
        after.get(f"{_STEP_RATIO}_{part}", 0.0) - before.get(f"{_STEP_RATIO}_{part}", 0.0)
        for part in ("sum", "count")
    )
    policies = config.controller.model_dump(include={"policy", "admission"})
    return {**policies, **summary(outcomes, usage, seconds / max(1.0, steps))}


# The load.


def make_load(traces: Sequence[Path], rate: float, seconds: float, seed: int) -> Workload:
    """The requests of one replay for ``seconds``, on average ``rate`` a second, each with its
    class's objective. Traces are files, or folders of them, replayed together on their own clocks,
    from a position drawn by ``seed``; their time is stretched to the rate, so bursts stay bursts.
    Without any: Poisson arrivals with the lengths of FairBatching's row "azure".

    Raises:
        TraceError: a trace cannot be read, or is too short.
    """
    count = max(2, round(rate * seconds))
    if not traces:
        return _classified(_fitting(fairbatching("azure", rate, count, seed, Poisson)), seed)
    whole = _fitting(_read(traces))
    if len(whole) < count:
        raise TraceError(
            f"the traces have {len(whole)} requests of at most {ENGINE['max_model_tokens']} "
            f"tokens; {seconds:g} s at {rate:g} requests/s need {count}"
        )
    start = int(np.random.default_rng(seed).integers(len(whole) - count + 1))
    chosen = whole.arrivals[start : start + count]
    begin_s = chosen[0].arrival_s
    moved = tuple(each._replace(arrival_s=each.arrival_s - begin_s) for each in chosen)
    words = f"{whole.description} Requests {start} to {start + count - 1}."
    part = changed(whole, arrivals=moved, description=words)
    return _classified(stretched(part, part.rate / rate), seed)


def _read(paths: Sequence[Path]) -> Workload:
    files: list[Path] = []
    for path in paths:
        found = [path]
        if path.is_dir():
            found = trace_files(path)
        files += found
    # Nothing here caches prefixes, and traces of different block sizes can then be merged.
    plain = []
    for trace in map(load, files):
        arrivals = tuple(each._replace(block_hashes=()) for each in trace.arrivals)
        plain.append(changed(trace, arrivals=arrivals, block_tokens=512))
    return plain[0] if len(plain) == 1 else merged("+".join(each.name for each in plain), plain)


def _fitting(workload: Workload) -> Workload:
    return fitting(workload, ENGINE["max_model_tokens"])


def _classified(workload: Workload, seed: int) -> Workload:
    """``workload`` with a class drawn for each request."""
    known, chance = objectives(), np.random.default_rng(seed)
    names = iter(chance.choice(list(SHARES), size=len(workload), p=list(SHARES.values())))
    shares = ", ".join(f"{share:.0%} {name}" for name, share in SHARES.items())
    words = f"Classes drawn independently: {shares}."
    return with_objectives(workload, lambda _: known[str(next(names))], words)


# The report.


def summary(outcomes: Sequence[Outcome], usage: Usage, step_ratio: float) -> Json:
    """The report of one setting, as plain data; ``step_ratio`` is the mean of real over predicted
    step time in the engines."""
    bad = (End.REFUSED, End.FAILED, End.CUT, End.SILENT)
    return {
        "classes": by_class(outcomes),
        **{end.value: reasons(outcomes, end) for end in bad},
        "predictions": predictions(outcomes),
        "late_ms": milliseconds([each.late_s for each in outcomes], (0.5, 0.99, 1.0)),
        "step_ratio": round(step_ratio, 3),
        "machine_busy": usage.machine_busy,
        "processes": {kind: used._asdict() for kind, used in usage.kinds.items()},
    }


def predictions(outcomes: Sequence[Outcome]) -> list[Json]:
    """Observed minus predicted TTFT of the guaranteed requests, by decile of the prediction."""
    pairs = sorted(
        (each.predicted_ttft_s, each.ttft_s)
        for each in outcomes
        if each.predicted_ttft_s is not None and each.ttft_s is not None
    )
    if not pairs:
        return []
    parts = np.array_split(1e3 * np.array(pairs), min(DECILES, len(pairs)))
    return [
        {
            "requests": len(part),
            "predicted_ms": quantiles(part[:, 0], (0.0, 0.5, 1.0)),
            "observed_ms": quantiles(part[:, 1], (0.1, 0.5, 0.9)),
            "error_ms": quantiles(part[:, 1] - part[:, 0], (0.1, 0.5, 0.9)),
        }
        for part in parts
    ]


def tables(found: dict[str, Json]) -> list[Table]:
    """The summaries of all settings as tables: classes, predictions by decile, and resources."""
    shown = []
    for name, entry in found.items():
        title = f"{name} (policy {entry['policy']}, admission {entry['admission']})"
        shown.append(class_table(entry["classes"], title))
        if entry["predictions"]:
            columns = ("predicted_ms", "requests", "observed_ms", "error_ms")
            title = f"{name}: TTFT, and observed minus predicted, by decile of the prediction"
            shown.append(table(entry["predictions"], *columns, title=title))
    kinds = sorted({kind for entry in found.values() for kind in entry["processes"]})
    rows = [{"setting": name, **entry} for name, entry in found.items()]
    checks = ("setting", "machine_busy", "late_ms", "step_ratio")
    cores = [f"processes.{kind}.cores" for kind in kinds]
    return [
        *shown,
        table(rows, *checks, *cores, title="resources, until the last request was sent"),
    ]
