"""The simulator against real vLLM: the same requests through the engine and through the simulation
of its profile, compared by median time to first token and median time per output token.

Run with ``python -m sluice.benchmarks.live.engine_vs_simulator [--windows 3] [--seconds 30]
[--json]``. The engine profiles itself first. Two times are not part of a step as the scheduler
measures it. They are measured under a separate load before the comparison, never fitted to it:

- ``request_overhead_s``: a request's time in vLLM's serving layer until its first step, from single
  requests on an idle engine, plus the time from the end of its step to its first token at the
  client, under load. The simulator has no serving layer, so it is added to its TTFTs.
- ``step_overhead_s``: from the end of one step to the start of the next, with a request running in
  both: the scheduler itself and the engine's queues. It is added to the fixed time of the
  simulated steps.

A machine is seldom as fast under load as while it was profiled: vLLM's serving layer and other
processes take processor time. ``drift`` is the median of real over predicted step times in a
window. The second simulation corrects the profile by the drift of the load *before* its window, as
a replica that has served for a while does online.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.options import as_json, number_option, show
from sluice.replica.config import EngineConfig
from sluice.replica.engine import EngineInfo, EngineRequest, ResponseTail
from sluice.replica.vllm.engine import VllmEngine
from sluice.scheduling.batching import POLICIES, make_policy
from sluice.scheduling.latency.model import LatencyModel, LinearLatency, StepSample
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig as SimulatedConfig
from sluice.simulation.run import simulate
from sluice.simulation.summary import summarise
from sluice.simulation.truth import Belief, Truth
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
_GOAL = 0.15


class Served(NamedTuple):
    """A request as the engine served it. ``sent_s`` is monotonic, ``arrival`` counts from the
    window's start, ``offsets_s`` from the sending."""

    name: str
    arrival: Arrival
    sent_s: float
    offsets_s: tuple[float, ...]


@dataclass
class Window:
    """One comparison. Errors are ``simulated / real - 1`` of the medians; the corrected errors are
    of the simulation whose profile was corrected by ``drift_before``."""

    requests: int
    real_ttft_ms: float
    real_tpot_ms: float
    simulated_ttft_ms: float
    simulated_tpot_ms: float
    ttft_error: float
    tpot_error: float
    corrected_ttft_error: float
    corrected_tpot_error: float
    drift_before: float
    drift: float
    load_average: float


@click.command()
@click.option("--policy", default="slidebatching", type=click.Choice(sorted(POLICIES)))
@number_option("--windows", default=3, least=1, most=100)
@number_option("--seconds", default=30.0, least=5, most=600)
@number_option("--rate", default=4.0, least=0.1, most=1000)
@click.option("--seed", default=0, show_default=True)
@as_json
def main(policy: str, windows: int, seconds: float, rate: float, seed: int, as_json: bool) -> None:
    """Compare the two, in several windows of Poisson arrivals at RATE requests per second."""
    say = Console(stderr=True).print
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        config = EngineConfig(
            policy=policy,
            vllm_args=VLLM_ARGS,
            batch_log=Path(directory),
            # Empty, so that the profile is of today.
            cache_dir=Path(directory),
            profile_budget_s=20.0,
        )
        comparison = _Comparison(config, say)
        results = asyncio.run(comparison.run(windows, seconds, rate, seed))
    show(comparison.as_dict(results), [_table(results)], as_json)


class _Comparison:
    """A running engine, its measured overheads, and its simulation."""

    def __init__(self, config: EngineConfig, say: Any) -> None:
        self._config = config
        self._say = say
        self._serial = 0
        self._steps_read = 0
        self._model: LatencyModel = LinearLatency(1.0, 1.0)
        self._noise = 0.0
        self._drift = 1.0
        self.request_overhead_s = 0.0
        self.step_overhead_s = 0.0

    def as_dict(self, results: list[Window]) -> dict[str, Any]:
        return {
            "policy": self._config.policy,
            "model": repr(self._model),
            "request_overhead_ms": round(1e3 * self.request_overhead_s, 3),
            "step_overhead_ms": round(1e3 * self.step_overhead_s, 3),
            "windows": [asdict(window) for window in results],
        }

    async def run(self, windows: int, seconds: float, rate: float, seed: int) -> list[Window]:
        engine = VllmEngine(self._config, "compared", 1024)
        info = await engine.start()
        try:
            await self._measure_overheads(engine, info, seconds, rate, seed)
            results = []
            for number in range(windows):
                jobs = make_jobs(seconds, rate, f"{seed}/{number}")
                served = await self._serve(engine, jobs)
                drift = self._drift_of(self._new_steps())
                results.append(self._compare(served, info, drift, seed))
                self._drift = drift
                self._say(f"window {number + 1} of {windows}: {results[-1]}")
            return results
        finally:
            await engine.stop()

    async def _measure_overheads(
        self, engine: VllmEngine, info: EngineInfo, seconds: float, rate: float, seed: int
    ) -> None:
        self._model = info.profile.model
        report = info.profile.report
        if report is None or not isinstance(self._model, LinearLatency):
            raise click.ClickException("the engine could not be profiled with the linear model")
        self._noise = report.mape
        self._new_steps()
        ways_in = []
        for _ in range(_SINGLES):
            (single,) = await self._serve(engine, [Arrival(0.0, 200, 1, SLO())])
            step = next(s for s in self._new_steps() if single.name in _names(s))
            ways_in.append(step["now_s"] - single.sent_s)
        served = await self._serve(engine, make_jobs(seconds, rate, f"{seed}/overhead"))
        steps = self._new_steps()
        self.request_overhead_s = median(ways_in) + median(_ways_back(served, steps))
        self.step_overhead_s = median(_gaps(steps))
        self._drift = self._drift_of(steps)
        self._say(
            f"{self._model!r}, mean error {report.mape:.1%}; outside steps: "
            f"{1e3 * self.request_overhead_s:.2f} ms a request, "
            f"{1e3 * self.step_overhead_s:.2f} ms a step"
        )

    async def _serve(self, engine: VllmEngine, jobs: list[Arrival]) -> list[Served]:
        """Send each job at its time; arrivals are when they were really sent."""
        started_s = time.monotonic()

        async def one(job: Arrival) -> Served:
            await asyncio.sleep(max(0.0, started_s + job.arrival_s - time.monotonic()))
            request = self._request(job)
            sent_s = time.monotonic()
            async for item in engine.generate(request):
                if isinstance(item, ResponseTail):
                    arrival = job._replace(arrival_s=sent_s - started_s)
                    return Served(request.request_id, arrival, sent_s, item.token_offsets_s)
            raise click.ClickException("a request ended without its tail")

        served = await asyncio.gather(*(one(job) for job in jobs))
        return sorted(served, key=lambda each: each.arrival.arrival_s)

    def _request(self, job: Arrival) -> EngineRequest:
        self._serial += 1
        chance = random.Random(self._serial)
        body = {
            "model": "local",
            "prompt": [chance.randrange(*_VOCABULARY) for _ in range(job.prompt_tokens)],
            "max_tokens": job.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return EngineRequest(f"compared-{self._serial}", "completions", body, job.slo)

    def _new_steps(self) -> list[dict[str, Any]]:
        """The logged steps since the last call."""
        directory = self._config.batch_log
        assert directory is not None
        lines = (directory / "compared.jsonl").read_text(encoding="utf-8").splitlines()
        new = lines[self._steps_read :]
        self._steps_read = len(lines)
        return [json.loads(line) for line in new]

    def _drift_of(self, steps: list[dict[str, Any]]) -> float:
        ratios: list[float] = []
        for step in steps:
            work = StepSample.of((new, computed) for _, new, computed in step["ran"])
            ratios.append(step["seconds"] / self._model.step_s(work))
        return median(ratios)

    def _compare(self, served: list[Served], info: EngineInfo, drift: float, seed: int) -> Window:
        offsets = [each.offsets_s for each in served]
        ttft_s = median(times[0] for times in offsets)
        tpot_s = median((times[-1] - times[0]) / (len(times) - 1) for times in offsets)
        arrivals = tuple(each.arrival for each in served)
        plain = self._simulate(arrivals, info, 1.0, seed)
        corrected = self._simulate(arrivals, info, self._drift, seed)
        return Window(
            requests=len(served),
            real_ttft_ms=round(1e3 * ttft_s, 2),
            real_tpot_ms=round(1e3 * tpot_s, 2),
            simulated_ttft_ms=round(1e3 * plain[0], 2),
            simulated_tpot_ms=round(1e3 * plain[1], 2),
            ttft_error=round(plain[0] / ttft_s - 1, 4),
            tpot_error=round(plain[1] / tpot_s - 1, 4),
            corrected_ttft_error=round(corrected[0] / ttft_s - 1, 4),
            corrected_tpot_error=round(corrected[1] / tpot_s - 1, 4),
            drift_before=round(self._drift, 3),
            drift=round(drift, 3),
            load_average=round(os.getloadavg()[0], 2),
        )

    def _simulate(
        self, arrivals: tuple[Arrival, ...], info: EngineInfo, correction: float, seed: int
    ) -> tuple[float, float]:
        """Median time to first token and per output token, seconds."""
        model = self._model.corrected(correction)
        assert isinstance(model, LinearLatency)
        real = replace(model, a=model.a + self.step_overhead_s / correction)
        result = simulate(
            Workload("compared", arrivals),
            make_policy(self._config.policy, self._config.policy_options),
            Truth(real, self._noise),
            Belief(model.with_headroom(self._config.headroom), online=False),
            SimulatedConfig(
                kv_blocks=info.kv_blocks,
                block_tokens=info.block_tokens,
                max_batch_tokens=info.max_batch_tokens,
                max_sequences=info.max_sequences,
            ),
            seed,
        )
        summary = summarise(result)
        return summary.ttft_p50_s + self.request_overhead_s, summary.tpot_p50_s


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


def _names(step: dict[str, Any]) -> set[str]:
    return {name for name, _, _ in step["ran"]}


def _gaps(steps: list[dict[str, Any]]) -> list[float]:
    """Times between the end of a step and the start of the next one with the same request in it:
    the engine had work all that time."""
    return [
        after["now_s"] - step["now_s"] - step["seconds"]
        for step, after in pairwise(steps)
        if _names(step) & _names(after)
    ]


def _ways_back(served: list[Served], steps: list[dict[str, Any]]) -> list[float]:
    """Times from the end of the step that ends a prompt until its first token arrives."""
    prompts = {each.name: each.arrival.prompt_tokens for each in served}
    ended_s: dict[str, float] = {}
    for step in steps:
        for name, tokens, computed in step["ran"]:
            if name in prompts and computed + tokens >= prompts[name]:
                ended_s.setdefault(name, step["now_s"] + step["seconds"])
    return [each.sent_s + each.offsets_s[0] - ended_s[each.name] for each in served]


def _table(results: list[Window]) -> Table:
    table = Table(title=f"simulated / real - 1 of the medians; the goal is {_GOAL:.0%}")
    for heading in (
        "requests",
        "TTFT ms\nreal / simulated",
        "error",
        "TPOT ms\nreal / simulated",
        "error",
        "drift\nbefore / in it",
        "errors with the\nprofile corrected",
        "load",
    ):
        table.add_column(heading, justify="right")
    for window in results:
        table.add_row(
            str(window.requests),
            f"{window.real_ttft_ms:.1f} / {window.simulated_ttft_ms:.1f}",
            f"{window.ttft_error:+.1%}",
            f"{window.real_tpot_ms:.2f} / {window.simulated_tpot_ms:.2f}",
            f"{window.tpot_error:+.1%}",
            f"{window.drift_before:.2f} / {window.drift:.2f}",
            f"{window.corrected_ttft_error:+.1%} / {window.corrected_tpot_error:+.1%}",
            f"{window.load_average:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
