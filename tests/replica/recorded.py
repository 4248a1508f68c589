"""Stock vLLM on an H100, as it was recorded, beside the simulator and real systems with the timed
device, which get the same requests at the same times.

Run with ``python -m tests.replica.recorded [--load 0.5] [--system stock] [--scale 4]`` from the
root of the repository. Without ``--system`` only the simulator runs, and vLLM's core in virtual
time, which no other work on this machine can change. Times are those of the client; of real systems
they are divided by ``--scale``, by which arrivals and objectives are stretched, too. ``cpu`` is
processor time by kind of process, not divided: launches take ``--scale`` times as much of it, a
request's way no more, so that only ``--scale 1`` compares what is beside the engine with it."""

from __future__ import annotations

import heapq
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import inf
from pathlib import Path
from typing import Final

import click
import numpy as np
from numpy.typing import ArrayLike

from sluice.benchmarks.experiments.systems import (
    ADMISSION,
    DEFAULT,
    ROUTER,
    Setup,
    System,
    colocated,
    run_cluster,
)
from sluice.benchmarks.live import mix, systems
from sluice.benchmarks.live.client import End, Outcome
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.peers import CPU_ARGS, SYSTEMS, Setting
from sluice.benchmarks.live.report import Json, Run, table
from sluice.benchmarks.options import choices_option, show
from sluice.replica.vllm.local_model import local_model
from sluice.router.config import ServiceClass
from sluice.scheduling.batching import make_policy
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Belief, Truth, VirtualEngine
from sluice.simulation.metrics import TPOTMetric, stages
from sluice.simulation.requests import Requests
from sluice.simulation.workload import Arrival, Workload
from tests.replica.gpu_device import H100

SEEDS: Final = {0.5: 7, 1.0: 8, 1.5: 9}
"""The seed of the arrivals at each load."""

RECORDED: Final[dict[float, dict[str, float]]] = {
    0.5: {
        **{"sent": 461, "attained": 0.820, "ttft_p50": 100.2, "ttft_p95": 358.6},
        **{"tpot_p50": 11.9, "tpot_p95": 32.0},
    },
    1.0: {
        **{"sent": 928, "attained": 0.073, "ttft_p50": 676.0, "ttft_p95": 1157.3},
        **{"tpot_p50": 106.8, "tpot_p95": 185.2},
    },
    1.5: {
        **{"sent": 1295, "attained": 0.008, "ttft_p50": 5796.8, "ttft_p95": 10413.6},
        **{"tpot_p50": 173.2, "tpot_p95": 205.0},
    },
}
"""By load: requests, share within objectives, and milliseconds."""

RATE: Final = 128 / 3
"""Requests a second of load 1."""

SECONDS: Final = 20.0
OBJECTIVES_MS: Final = {
    "chat": (172.3, 32.22),
    "code": (290.0, 66.45),
    "document": (1186.1, 69.62),
}
"""TTFT and TPOT."""

LIMITS: Final = EngineConfig(kv_blocks=27_400, max_batch_tokens=8_192, max_sequences=1_024)
"""Of vLLM on that machine; the number of KV blocks is fitted."""

WARM_UP: Final = (1.0, 8.0, 1_000_000)
"""Load, seconds and seed of what a server gets first."""

START_S: Final = 10.0
"""Of arrivals, right after a start."""

_STARTS = "Only these arrivals, each at a system that was just started, for 10 s."
_KEPT = "Starts but the first one find the profile of the step times."


_NOISE = 0.01  # of a step's time


def figures(
    ttft_s: ArrayLike, tpot_s: ArrayLike, slos: Sequence[SLO], promised: ArrayLike | None = None
) -> dict[str, float]:
    """As :data:`RECORDED`, of requests with these times and objectives; and the promises."""
    times_s: dict[str, Floats] = {"ttft": np.asarray(ttft_s), "tpot": np.asarray(tpot_s)}
    limits = np.array([slo.columns[:2] for slo in slos])
    met = (np.column_stack(list(times_s.values())) <= limits).all(axis=1)
    found: dict[str, float] = {"sent": len(met), "attained": round(float(met.mean()), 3)}
    for name, share in product(times_s, (50, 95)):
        found[f"{name}_p{share}"] = round(1e3 * float(np.percentile(times_s[name], share)), 1)
    if promised is not None:
        flags = np.asarray(promised)
        found |= {"promised": int(flags.sum()), "kept": int(met[flags].sum())}
    return found


def workload(
    load: float, scale: float = 1.0, seconds: float = SECONDS, seed: int | None = None
) -> Workload:
    """The requests of a load, with times ``scale`` as long."""
    slos, own = systems.objectives(classes(scale)), SEEDS[load] if seed is None else seed
    return mix.GENERATED["bursty"].workload(load * RATE / scale, seconds * scale, own, slos)


def classes(scale: float = 1.0) -> dict[str, ServiceClass]:
    """The objectives, ``scale`` as long."""
    return {
        name: ServiceClass(ttft_ms=scale * ttft_ms, tpot_ms=scale * tpot_ms)
        for name, (ttft_ms, tpot_ms) in OBJECTIVES_MS.items()
    }


class FrontEnd:
    """vLLM's server process and its client: one thing at a time, in order. A request takes two
    turns until the engine has it; so its way is longer while tokens wait to be sent."""

    REQUEST_S = 1.8e-3
    TOKEN_S = 97e-6
    WAY_S = 3e-3
    """Between it and the engine; half of it back."""

    TURN_TOKENS = 128
    """That vLLM's server handles in one turn."""

    def __init__(self, arrivals_s: Sequence[float]) -> None:
        self._jobs: list[tuple[float, int, int, tuple[int, ...]]] = [
            (time_s, number, 2, (number,)) for number, time_s in enumerate(arrivals_s)
        ]
        self._added = len(self._jobs)
        self._free_s = 0.0
        self._entered: list[tuple[float, int]] = []
        self.sent_s: dict[int, float] = {}
        """When the client has a token, by its place among all."""

    def emitted(self, tokens: Sequence[int], now_s: float) -> None:
        """A step has ended with these tokens."""
        for first in range(0, len(tokens), self.TURN_TOKENS):
            self._add(now_s + self.WAY_S / 2, 0, tuple(tokens[first : first + self.TURN_TOKENS]))

    def arrived(self, until_s: float) -> Iterator[int]:
        """The requests that the engine gets by then."""
        self._run(until_s)
        while self._entered and self._entered[0][0] <= until_s:
            yield heapq.heappop(self._entered)[1]

    def next_s(self) -> float:
        """When the engine gets the next request, if it emits nothing before; inf: never."""
        while self._jobs and not self._entered:
            self._run(max(self._free_s, self._jobs[0][0]))
        return self._entered[0][0] if self._entered else inf

    def _add(self, ready_s: float, turns: int, what: tuple[int, ...]) -> None:
        heapq.heappush(self._jobs, (ready_s, self._added, turns, what))
        self._added += 1

    def _run(self, until_s: float) -> None:
        while self._jobs and max(self._free_s, self._jobs[0][0]) <= until_s:
            ready_s, _, turns, what = heapq.heappop(self._jobs)
            self._free_s = max(self._free_s, ready_s)
            if turns:
                self._free_s += self.REQUEST_S / 2
                if turns > 1:
                    self._add(self._free_s, turns - 1, what)
                else:
                    heapq.heappush(self._entered, (self._free_s + self.WAY_S, what[0]))
                continue
            for token in what:
                self._free_s += self.TOKEN_S
                self.sent_s[token] = self._free_s


def simulated(load: float) -> dict[str, float]:
    """The simulator with the same device behind :class:`FrontEnd`, first come, first served."""
    requests = Requests(workload(load))
    truth = Truth(H100.model, _NOISE, H100.launches)
    engine = VirtualEngine(
        LIMITS, make_policy("fcfs"), Belief(H100.model), truth, requests, np.random.default_rng(0)
    )
    front, now_s = FrontEnd([each.arrival_s for each in requests.arrivals]), 0.0
    while True:
        for key in front.arrived(now_s):
            requests.predict(key)
            assert engine.submit(key)
        if engine.live:
            now_s += engine.begin(now_s)
            engine.complete(now_s)
            front.emitted(np.flatnonzero(requests.emitted_s == now_s).tolist(), now_s)
        elif (next_s := front.next_s()) < inf:
            now_s = next_s
        else:
            break
    return seen(front, requests.arrivals)


def seen(front: FrontEnd, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """The figures of requests whose tokens have all been sent."""
    sent_s = np.array([front.sent_s[token] for token in range(len(front.sent_s))])
    tokens = np.array([each.output_tokens for each in arrivals])
    last = np.cumsum(tokens) - 1
    first_s = sent_s[last - tokens + 1]
    ttft_s = first_s - np.array([each.arrival_s for each in arrivals])
    tpot_s = (sent_s[last] - first_s) / (tokens - 1)
    return figures(ttft_s, tpot_s, [each.slo for each in arrivals])


def scheduled(load: float, ideal: bool = False) -> dict[str, float]:
    """Sluice's default policies in the simulator, without a front end; ``ideal``: they know each
    output's length and the time of each step."""
    setup = Setup("h100", H100.model, H100.model, LIMITS, _NOISE, ideal, H100.launches)
    system = System(ROUTER, DEFAULT, ADMISSION)
    done = run_cluster(workload(load), system, setup, colocated(1), seed=0, oracle=ideal)
    requests = done.result.requests
    seen, slos = stages(requests), [each.slo for each in requests.arrivals]
    promised = ~np.isnan(requests.promised_s)
    return figures(seen.ttft_s, seen.tpot_s[TPOTMetric.MEAN], slos, promised)


ARGS: Final[Json] = {
    **CPU_ARGS,
    "distributed-executor-backend": "tests.replica.timed_device.TimedDevice",
    "max-model-len": 8_192,
    "max-num-batched-tokens": LIMITS.max_batch_tokens,
    "max-num-seqs": LIMITS.max_sequences,
    "block-size": 32,
    "num-gpu-blocks-override": LIMITS.kv_tokens // 32,
}
"""Of vLLM with the timed device."""


@contextmanager
def started(name: str, scale: float, model: Path) -> Iterator[Callable[[Workload, str], Json]]:
    """What sends a load to a system in front of one engine with the timed device, over HTTP."""
    os.environ["SLUICE_TIMED_DEVICE"] = json.dumps({"scale": scale})
    os.environ["PYTHONPATH"] = str(Path.cwd())
    with systems.campaign() as bench:
        setting = Setting(str(model), ARGS, 1, 0, classes(scale))
        with SYSTEMS[name].start(setting)(bench) as system:

            def drive(load: Workload, run: str) -> Json:
                make = mix.body_of(run, load.block_tokens, SYSTEMS[name].priorities)
                bodies = [make(MODEL, number, each) for number, each in enumerate(load.arrivals)]
                how: Json = {"grace_s": 120.0, "body": lambda *at: bodies[at[1]], "exact": False}
                seconds, parts = load.duration_s, system.processes
                done = systems.run(bench, system, {}, seconds, load, parts, **how)
                return {**measured(done.outcomes, scale), **spent(done, scale)}

            yield drive


def spent(run: Run, scale: float) -> Json:
    """Output tokens of a run, those a second until its last answer, and its processor time."""
    done = [each for each in run.outcomes if each.end is End.ANSWERED]
    ended_s = max([run.seconds, *(each.ended_s or 0.0 for each in done)])
    tokens = sum(each.output_tokens for each in done)
    cpu_s = {kind: round(used.cpu_s, 1) for kind, used in run.usage.kinds.items()}
    return {"tokens": tokens, "tokens_s": round(tokens * scale / ended_s), "cpu": cpu_s}


def measured(outcomes: Sequence[Outcome], scale: float) -> dict[str, float]:
    """The figures of a run. An unanswered request has endless times."""
    ttft_s = [inf if each.ttft_s is None else each.ttft_s / scale for each in outcomes]
    tpot_s = [inf if each.tpot_s is None else each.tpot_s / scale for each in outcomes]
    slos = systems.objectives(classes())
    own = [slos[each.slo.service_class] for each in outcomes]
    return figures(ttft_s, tpot_s, own, [each.admission == "guaranteed" for each in outcomes])


@click.command()
@choices_option("--load", "loads", of=[str(load) for load in SEEDS], words="[default: all]")
@choices_option("--system", "names", of=SYSTEMS, words="[default: none]")
@click.option("--scale", default=4.0, show_default=True, type=click.FloatRange(0.1, 100))
@click.option("--start-seed", "starts", multiple=True, type=int, help=_STARTS)
@click.option("--kept-profile", is_flag=True, help=_KEPT)
def main(
    loads: Sequence[str],
    names: Sequence[str],
    scale: float,
    starts: Sequence[int],
    kept_profile: bool,
) -> None:
    """Compare."""
    chosen, rows = [float(load) for load in loads] or list(SEEDS), list[Json]()

    def add(row: Json) -> None:
        click.echo(str(row), err=True)
        rows.append(row)

    if not starts:
        from .virtual_core import VirtualCore

        core = VirtualCore()
        for load in chosen:
            rows.append({"load": load, "system": "recorded", **RECORDED[load]})
            rows.append({"load": load, "system": "simulator", **simulated(load)})
            rows.append({"load": load, "system": "vLLM, virtual time", **core.run(load)})
            rows.append({"load": load, "system": "sluice, simulated", **scheduled(load)})
            rows.append({"load": load, "system": "ideal, simulated", **scheduled(load, ideal=True)})
    with tempfile.TemporaryDirectory() as folder:
        for place, (name, load, seed) in enumerate(product(names, chosen, starts)):
            # The path of a model is in the key of its profile.
            model = local_model(Path(folder, str(place * (not kept_profile))), layers=1, hidden=64)
            with started(name, scale, model) as drive:
                row = {"load": load, "system": name, "seed": seed}
                add({**row, **drive(workload(load, scale, START_S, seed), str(seed))})
        for name in names if not starts else ():
            with started(name, scale, local_model(Path(folder), layers=1, hidden=64)) as drive:
                began = drive(workload(WARM_UP[0], scale, *WARM_UP[1:]), "warm-up")
                add({"load": WARM_UP[0], "system": f"{name}, started", **began})
                for load in chosen:
                    add({"load": load, "system": name, **drive(workload(load, scale), str(load))})
    rows.sort(key=lambda row: float(row["load"]))
    columns = dict.fromkeys(name for row in rows for name in row)
    show(rows, [table(rows, *columns, title="")], False)


if __name__ == "__main__":
    main()
