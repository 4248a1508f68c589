"""The load of a replay, a recorded or generated workload in service classes, and its engines.

Client, cluster and engines share the machine, and a simulated engine's steps must take their stated
time. So these engines are slow: steps of tens of milliseconds, which cost no processor time, and
few tokens a second. The classes' objectives are longer in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from sluice.router.config import ServiceClass
from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Workload, merged, stretched, with_objectives
from sluice.simulation.workloads.arrivals import Poisson
from sluice.simulation.workloads.settings import fairbatching
from sluice.simulation.workloads.traces import TraceError, load

ENGINE: Final[dict[str, Any]] = {
    "step_s": 0.06,
    "token_s": 0.0005,
    "context_token_s": 1e-7,
    "kv_blocks": 4096,
    "block_tokens": 16,
    "max_model_tokens": 8192,
    "max_batch_tokens": 2048,
    "max_sequences": 64,
}
"""The simulated engine: about the steps of a model of 70B parameters on two older GPUs. None of it
was measured."""

LIGHT_ENGINE: Final[dict[str, Any]] = {
    "step_s": 0.05,
    "token_s": 0.0004,
    "context_token_s": 1e-7,
    "kv_blocks": 4096,
    "block_tokens": 16,
    "max_model_tokens": 4096,
    "max_batch_tokens": 1024,
    "max_sequences": 16,
}
"""An engine that few requests saturate, for overload runs: its steps are long compared with their
delays."""

CLASSES: Final = {
    "interactive": ServiceClass(ttft_ms=2_000, tpot_ms=150, priority=4),
    "standard": ServiceClass(ttft_ms=6_000, tpot_ms=250, priority=2),
    "batch": ServiceClass(priority=1),
}
SHARES: Final = {"interactive": 0.5, "standard": 0.35, "batch": 0.15}
"""Share of each class in the requests, drawn independently of their lengths."""


def objectives(classes: Mapping[str, ServiceClass] = CLASSES) -> dict[str, SLO]:
    """The objective of each class, as a router reads it."""
    return {name: entry.objective(name) for name, entry in classes.items()}


def make_load(traces: Sequence[Path], rate: float, seconds: float, seed: int) -> Workload:
    """The requests of one replay, each with its class's objective.

    Args:
        traces: files, or folders of them, replayed together on their own clocks, from a position
            drawn by ``seed``; their time is stretched to the rate, so bursts stay bursts. Without
            any: Poisson arrivals with the lengths of FairBatching's row "azure".
        rate: mean requests per second.
        seconds: how long arrivals last.
        seed: of everything drawn.

    Raises:
        TraceError: a trace cannot be read, or is too short.
    """
    count = max(2, round(rate * seconds))
    most = ENGINE["max_model_tokens"]
    if traces:
        whole = _fitting(_read(traces), most)
        if len(whole) < count:
            raise TraceError(
                f"the traces have {len(whole)} requests of at most {most} tokens; "
                f"{seconds:g} s at {rate:g} requests/s need {count}"
            )
        start = int(np.random.default_rng(seed).integers(len(whole) - count + 1))
        chosen = whole.arrivals[start : start + count]
        begin_s = chosen[0].arrival_s
        moved = tuple(each._replace(arrival_s=each.arrival_s - begin_s) for each in chosen)
        words = f"{whole.description} Requests {start} to {start + count - 1}."
        part = replace(whole, arrivals=moved, description=words)
        workload = stretched(part, part.rate / rate)
    else:
        workload = _fitting(fairbatching("azure", rate, count, seed, Poisson), most)
    return _classified(workload, seed)


def _read(paths: Sequence[Path]) -> Workload:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(each for each in path.iterdir() if each.suffix in (".csv", ".jsonl"))
            if not found:
                raise TraceError(f"{path}: has no .csv or .jsonl file")
            files += found
        else:
            files.append(path)
    # Nothing here caches prefixes, and traces of different block sizes can then be merged.
    plain = [_without_hashes(load(file)) for file in files]
    return plain[0] if len(plain) == 1 else merged("+".join(each.name for each in plain), plain)


def _without_hashes(trace: Workload) -> Workload:
    arrivals = tuple(each._replace(block_hashes=()) for each in trace.arrivals)
    return replace(trace, arrivals=arrivals, block_tokens=512)


def _fitting(workload: Workload, most: int) -> Workload:
    """``workload`` without the requests that exceed the engine's context."""
    kept = tuple(
        each for each in workload.arrivals if each.prompt_tokens + each.output_tokens <= most
    )
    words = f"{workload.description} Left out {len(workload) - len(kept)} over {most} tokens."
    return replace(workload, arrivals=kept, description=words)


def _classified(workload: Workload, seed: int) -> Workload:
    """``workload`` with a class drawn for each request."""
    known = objectives()
    names = iter(
        np.random.default_rng(seed).choice(
            list(SHARES), size=len(workload), p=list(SHARES.values())
        )
    )
    words = ", ".join(f"{share:.0%} {name}" for name, share in SHARES.items())
    return with_objectives(
        workload, lambda _: known[str(next(names))], f"Classes drawn independently: {words}."
    )
