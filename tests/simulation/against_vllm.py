"""The simulator against real vLLM: the same requests through the engine and through the simulation
of its profile, compared by median time to first token and median time per output token.

Run with ``python -m tests.simulation.against_vllm [--windows 3] [--seconds 30]
[--json]``. The engine profiles itself first. Two times are not part of a step as the scheduler
measures it. They are measured under a separate load before the comparison, never fitted to it:

- ``request_overhead``: a request's time in vLLM's serving layer until its first step, from single
  requests on an idle engine, plus the time from the end of its step to its first token at the
  client, under load. The simulator has no serving layer, so it is added to its TTFTs.
- ``step_overhead``: from the end of one step to the start of the next, with a request running in
  both. It is added to the fixed time of the simulated steps.

A machine is seldom as fast under load as while it was profiled. ``drift`` is the median of real
over predicted step times in a window. The second simulation corrects the profile by the drift of
the load *before* its window, as a replica that has served for a while does online.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np

from sluice.benchmarks.live.report import Json, table
from sluice.benchmarks.options import as_json, number_option, show
from sluice.protocol.requests import EngineRequest, ResponseTail
from sluice.replica import profiling
from sluice.replica.config import EngineConfig
from sluice.replica.engine import EngineInfo
from sluice.replica.vllm.engine import VllmEngine
from sluice.scheduling.batching import POLICIES, make_policy
from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig as SimulatedConfig
from sluice.simulation.engine import Belief, Truth
from sluice.simulation.metrics import judged_tpot_s, stages
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival, Workload

VLLM_ARGS: dict[str, Any] = {
    "max-model-len": 2048,
    "max-num-batched-tokens": 512,
    "max-num-seqs": 64,
    "block-size": 32,
    "enable-prefix-caching": False,
}
_PROMPT_TOKENS = (50, 800)
_OUTPUT_TOKENS = (16, 64)
_OBJECTIVES = (SLO(ttft_s=1.0, tpot_s=0.1, priority=2), SLO(ttft_s=3.0, tpot_s=0.2), SLO())
_SINGLES = 20
_VOCABULARY = (300, 1000)
_NAME = "compared"


class Served(NamedTuple):
    """A request as the engine served it. ``sent_s`` is monotonic, ``arrival`` counts from the
    window's start, ``offsets_s`` from the sending."""

    name: str
    arrival: Arrival
    sent_s: float
    offsets_s: tuple[float, ...]


@click.command()
@click.option("--policy", default="slidebatching", type=click.Choice(sorted(POLICIES)))
@number_option("--windows", default=3, least=1, most=100)
@number_option("--seconds", default=30.0, least=5, most=600)
@number_option("--rate", default=4.0, least=0.1, most=1000)
@click.option("--seed", default=0, show_default=True)
@as_json
def main(policy: str, windows: int, seconds: float, rate: float, seed: int, as_json: bool) -> None:
    """Compare the two, in several windows of Poisson arrivals at RATE requests per second."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        config = EngineConfig(
            policy=policy,
            vllm_args=VLLM_ARGS,
            batch_log=Path(directory),
            # Empty, so that the profile is of today.
            cache_dir=Path(directory),
        )
        found = asyncio.run(compare(config, windows, seconds, rate, seed))
    columns = ("requests", "real_ms", "simulated_ms", "errors", "corrected_errors")
    title = "medians of TTFT / TPOT; errors: simulated / real - 1, the goal is 0.15"
    show(found, [table(found["windows"], *columns, "drift", "load_average", title=title)], as_json)


async def compare(
    config: EngineConfig, windows: int, seconds: float, rate: float, seed: int
) -> Json:
    """Both overheads, and for each window the medians of TTFT and TPOT and the errors of the
    simulation, without and with the profile corrected.

    Raises:
        ClickException: the engine could not be profiled with the linear model.
    """
    profiling.BUDGET_S = 20.0
    engine = VllmEngine(config, _NAME, 1024)
    info = await engine.start()
    try:
        model, report = info.profile.model, info.profile.report
        if report is None or not isinstance(model, LinearLatency):
            raise click.ClickException("the engine could not be profiled with the linear model")
        run = _Engine(engine, config)
        run.new_steps()
        ways_in = []
        for _ in range(_SINGLES):
            (single,) = await run.serve([Arrival(0.0, 200, 1, SLO())])
            step = next(each for each in run.new_steps() if single.name in _names(each))
            ways_in.append(step["now_s"] - single.sent_s)
        served = await run.serve(make_jobs(seconds, rate, f"{seed}/overhead"))
        steps = run.new_steps()
        request_s, step_s = (
            median(ways_in) + median(_ways_back(served, steps)),
            median(_gaps(steps)),
        )
        drifts, results = [_drift(model, steps)], []
        for number in range(windows):
            served = await run.serve(make_jobs(seconds, rate, f"{seed}/{number}"))
            arrivals = tuple(each.arrival for each in served)
            offsets = [each.offsets_s for each in served]
            real = (
                median(times[0] for times in offsets),
                median((times[-1] - times[0]) / (len(times) - 1) for times in offsets),
            )
            plain, corrected = (
                _simulated(
                    config, arrivals, info, model.corrected(factor), report.mape, gap_s, seed
                )
                for factor, gap_s in ((1.0, step_s), (drifts[-1], step_s / drifts[-1]))
            )
            plain, corrected = ((ttft + request_s, tpot) for ttft, tpot in (plain, corrected))
            drifts.append(_drift(model, run.new_steps()))
            results.append(
                {
                    "requests": len(served),
                    "real_ms": [round(1e3 * each, 2) for each in real],
                    "simulated_ms": [round(1e3 * each, 2) for each in plain],
                    "errors": _errors(plain, real),
                    "corrected_errors": _errors(corrected, real),
                    "drift": [round(each, 3) for each in drifts[-2:]],
                    "load_average": round(os.getloadavg()[0], 2),
                }
            )
            click.echo(f"window {number + 1} of {windows}: {results[-1]}", err=True)
    finally:
        await engine.stop()
    overheads = {"request_overhead_ms": 1e3 * request_s, "step_overhead_ms": 1e3 * step_s}
    rounded = {name: round(each, 3) for name, each in overheads.items()}
    return {"policy": config.policy, "model": repr(model), **rounded, "windows": results}


class _Engine:
    """The running engine, and the log of its steps."""

    def __init__(self, engine: VllmEngine, config: EngineConfig) -> None:
        assert config.batch_log is not None
        self._engine = engine
        self._log = config.batch_log / f"{_NAME}.jsonl"
        self._serial = self._steps_read = 0

    async def serve(self, jobs: list[Arrival]) -> list[Served]:
        """Send each job at its time; arrivals are when they were really sent."""
        started_s = time.monotonic()

        async def one(job: Arrival) -> Served:
            await asyncio.sleep(max(0.0, started_s + job.arrival_s - time.monotonic()))
            request = self._request(job)
            sent_s = time.monotonic()
            async for item in self._engine.generate(request):
                if isinstance(item, ResponseTail):
                    arrival = job._replace(arrival_s=sent_s - started_s)
                    return Served(request.request_id, arrival, sent_s, item.token_offsets_s)
            raise click.ClickException("a request ended without its tail")

        served = await asyncio.gather(*(one(job) for job in jobs))
        return sorted(served, key=lambda each: each.arrival.arrival_s)

    def _request(self, job: Arrival) -> EngineRequest:
        self._serial += 1
        chance = random.Random(self._serial)
        prompt = [chance.randrange(*_VOCABULARY) for _ in range(job.prompt_tokens)]
        body = {"model": "local", "prompt": prompt, "max_tokens": job.output_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        return EngineRequest(f"{_NAME}-{self._serial}", "completions", body, job.slo)

    def new_steps(self) -> list[Json]:
        """The logged steps since the last call."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        new, self._steps_read = lines[self._steps_read :], len(lines)
        return [json.loads(line) for line in new]


def _simulated(
    config: EngineConfig,
    arrivals: tuple[Arrival, ...],
    info: EngineInfo,
    model: LinearLatency,
    noise: float,
    gap_s: float,
    seed: int,
) -> tuple[float, float]:
    """Median time to first token and per output token, seconds, with ``gap_s`` between steps."""
    result = simulate(
        Workload(_NAME, arrivals),
        make_policy(config.policy, config.policy_options),
        Truth(replace(model, a=model.a + gap_s), noise),
        Belief(model.with_headroom(config.headroom), online=False),
        SimulatedConfig(
            kv_blocks=info.kv_blocks,
            block_tokens=info.block_tokens,
            max_batch_tokens=info.max_batch_tokens,
            max_sequences=info.max_sequences,
        ),
        seed,
    )
    measured = stages(result.requests)
    tpot_s = judged_tpot_s(result.requests, measured)
    return float(np.nanmedian(measured.ttft_s)), float(np.nanmedian(tpot_s))


def _errors(simulated: Sequence[float], real: Sequence[float]) -> list[float]:
    return [round(ours / theirs - 1, 4) for ours, theirs in zip(simulated, real, strict=True)]


def make_jobs(seconds: float, rate: float, seed: str) -> list[Arrival]:
    """Poisson arrivals with prompt lengths even on a logarithmic scale, and three objectives."""
    chance = random.Random(seed)
    jobs = []
    now_s = chance.expovariate(rate)
    while now_s < seconds:
        low, high = _PROMPT_TOKENS
        prompt = round(low * (high / low) ** chance.random())
        output = chance.randint(*_OUTPUT_TOKENS)
        jobs.append(Arrival(now_s, prompt, output, chance.choice(_OBJECTIVES)))
        now_s += chance.expovariate(rate)
    return jobs


def _drift(model: LinearLatency, steps: list[Json]) -> float:
    works = (StepSample.of((new, computed) for _, new, computed in step["ran"]) for step in steps)
    times = zip(works, steps, strict=True)
    ratios = [step["seconds"] / model.step_s(work) for work, step in times]
    return float(median(ratios))


def _names(step: Json) -> set[str]:
    return {name for name, _, _ in step["ran"]}


def _gaps(steps: list[Json]) -> list[float]:
    """Times between the end of a step and the start of the next one with the same request in it:
    the engine had work all that time."""
    return [
        after["now_s"] - step["now_s"] - step["seconds"]
        for step, after in pairwise(steps)
        if _names(step) & _names(after)
    ]


def _ways_back(served: list[Served], steps: list[Json]) -> list[float]:
    """Times from the end of the step that ends a prompt until its first token arrives."""
    prompts = {each.name: each.arrival.prompt_tokens for each in served}
    ended_s: dict[str, float] = {}
    for step in steps:
        for name, tokens, computed in step["ran"]:
            if name in prompts and computed + tokens >= prompts[name]:
                ended_s.setdefault(name, step["now_s"] + step["seconds"])
    return [each.sent_s + each.offsets_s[0] - ended_s[each.name] for each in served]


if __name__ == "__main__":
    main()
