"""Simulated-annealing priority mapping (002 §5.2): time to decide, and quality of the mapping.

Run with ``python -m sluice.benchmarks.annealing [--json]``. The setting follows the paper where it
states one: half of the requests are chat (TTFT 10 s, TPOT 50 ms), half code (end to end 30 s), all
arrive at once, and times are predicted with Table 2. Lengths are seeded lognormal ones, cut at
2,000 tokens, as the data sets are not part of this project. ``--tighten`` divides the TTFT and
end-to-end objectives; the TPOT depends on the batch size alone. G over that of FCFS is a mean over
the cases in which FCFS meets any objective, as its G is 0 in the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from sluice.scheduling.batching.annealing import AnnealingOptions
from sluice.scheduling.batching.priority_mapping import Jobs, Schedule, anneal, predict
from sluice.scheduling.latency_request import InteractionLatency
from sluice.scheduling.objective import SLO
from sluice.scheduling.request import row_of

REQUESTS = (10, 20, 40)
BATCH_SIZES = (1, 2, 4, 32)
EXHAUSTIVE_REQUESTS = (4, 6)
"""An exhaustive search over 8 requests takes seconds a case in plain Python, over 10 minutes."""

Batches = Sequence[Sequence[int]]


def make_jobs(requests: int, most: int, seed: int, tighten: float = 1.0) -> Jobs:
    """``requests`` in random order, for batches of up to ``most``."""
    rng = np.random.default_rng((seed, requests))
    code = SLO(e2e_s=30.0 / tighten)
    chat = SLO(ttft_s=10.0 / tighten, tpot_s=0.05)
    lengths = np.minimum(rng.lognormal(np.log(200), 0.9, (requests, 2)).round() + 1, 2_000)
    rows = [
        row_of((code, chat)[kind % 2], 0.0, int(prompt), float(output))
        for kind, (prompt, output) in zip(rng.permutation(requests), lengths, strict=True)
    ]
    return Jobs(predict(np.array(rows), 0.0, InteractionLatency.paper(), most, 256.0))


def score(jobs: Jobs, batches: Batches) -> tuple[int, float]:
    """Met requests and summed latency of ``batches`` of waiting requests, in plain Python. Running
    requests are part of the first batch."""
    met, latency_s, wait_s = 0, jobs.waited_s, 0.0
    for index, batch in enumerate(batches):
        members = [(jobs.waiting, job) for job in batch]
        if index == 0:
            members = [(jobs.joining or jobs.waiting, job) for job in batch]
            if jobs.running is not None:
                members += [(jobs.running, job) for job in range(len(jobs.running.exec_s))]
        column = len(members) - 1
        longest_s = 0.0
        for times, job in members:
            exec_s = float(times.exec_s[job, column])
            met += bool(wait_s <= times.latest_s[job, column])
            latency_s += wait_s + exec_s
            longest_s = max(longest_s, exec_s)
        wait_s += longest_s
    return met, latency_s


def all_mappings(jobs: Jobs) -> Iterator[Batches]:
    """Every sequence of batches of the waiting requests. Exponential."""
    running = 0 if jobs.running is None else len(jobs.running.exec_s)
    waiting, most = jobs.waiting.exec_s.shape

    def split(left: tuple[int, ...], least: int, room: int) -> Iterator[list[tuple[int, ...]]]:
        for size in range(least, min(len(left), room) + 1):
            for batch in combinations(left, size):
                others = tuple(job for job in left if job not in batch)
                if not others:
                    yield [batch]
                for later in split(others, 1, most):
                    yield [batch, *later]

    yield from split(tuple(range(waiting)), 0 if running else 1, most - running)


def exhaustive(jobs: Jobs) -> float:
    """The greatest G of all mappings."""
    return max(met / latency_s for met, latency_s in (score(jobs, m) for m in all_mappings(jobs)))


def in_order(requests: int, most: int) -> Batches:
    """Full batches in order of arrival, as FCFS has them."""
    return [range(start, min(start + most, requests)) for start in range(0, requests, most)]


def measure(
    requests: int, most: int, schedule: Schedule, seeds: int, repeats: int, tighten: float
) -> dict[str, float]:
    """Time to decide in milliseconds, and G over that of FCFS."""
    cases = [make_jobs(requests, most, seed, tighten) for seed in range(seeds)]
    anneal(cases[0], schedule)
    times, gains, attained, attained_fcfs = [], [], [], []
    for jobs in cases:
        for _ in range(repeats):
            started = time.perf_counter_ns()
            found = anneal(jobs, schedule)
            times.append((time.perf_counter_ns() - started) / 1e6)
        met, latency_s = score(jobs, in_order(requests, most))
        attained.append(found.met / requests)
        attained_fcfs.append(met / requests)
        if met:
            gains.append(found.g / (met / latency_s))
    median, p99 = np.quantile(times, (0.5, 0.99))
    return {
        "median_ms": round(float(median), 3),
        "p99_ms": round(float(p99), 3),
        "g_over_fcfs": round(float(np.mean(gains)), 3) if gains else float("nan"),
        "attained": round(float(np.mean(attained)), 3),
        "attained_fcfs": round(float(np.mean(attained_fcfs)), 3),
    }


def ends_early(jobs: Jobs) -> bool:
    """Whether the search returns the ascending order at once because it meets every objective."""
    requests, most = jobs.waiting.exec_s.shape
    ascending = np.argsort(jobs.waiting.exec_s[:, -1], kind="stable")
    batches = [[int(ascending[job]) for job in batch] for batch in in_order(requests, most)]
    met, _ = score(jobs, batches)
    return bool(met == requests)


def against_exhaustive(
    requests: int, most: int, schedule: Schedule, seeds: int, tighten: float
) -> dict[str, dict[str, float]]:
    """G over the optimum, mean and worst case, of the annealed cases and of the cases that ended in
    the early exit."""
    ratios: dict[str, list[float]] = {"annealed": [], "ended_early": []}
    for seed in range(seeds):
        jobs = make_jobs(requests, most, seed, tighten)
        best = exhaustive(jobs)
        if best > 0:
            kind = "ended_early" if ends_early(jobs) else "annealed"
            ratios[kind].append(anneal(jobs, schedule).g / best)
    return {
        kind: {
            "mean": round(float(np.mean(found)), 4),
            "worst": round(min(found), 4),
            "cases": len(found),
        }
        for kind, found in ratios.items()
        if found
    }


def _print(results: dict[str, Any]) -> None:
    console = Console()
    decide = Table(title="Annealing with the paper's hyperparameters")
    for name in ("requests", "batch", "median ms", "p99 ms", "G / FCFS", "attained", "by FCFS"):
        decide.add_column(name, justify="right")
    for requests, by_size in results["decide"].items():
        for most, row in by_size.items():
            decide.add_row(requests, most, *(str(value) for value in row.values()))
    console.print(decide)
    compared = Table(title="G over that of an exhaustive search")
    for name in ("requests", "batch", "search", "mean", "worst", "cases"):
        compared.add_column(name, justify="right")
    for requests, by_size in results["exhaustive"].items():
        for most, by_kind in by_size.items():
            for kind, row in by_kind.items():
                compared.add_row(requests, most, kind, *(str(value) for value in row.values()))
    console.print(compared)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--seeds", default=20, show_default=True, type=click.IntRange(1, 1_000))
@click.option("--repeats", default=10, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--tighten", default=1.0, show_default=True, type=click.FloatRange(0.01, 100.0))
def main(as_json: bool, seeds: int, repeats: int, tighten: float) -> None:
    """Measure the time to decide, and G against FCFS and an exhaustive search."""
    options = AnnealingOptions()
    schedule = Schedule.of(
        options.initial_temperature,
        options.threshold,
        options.iterations,
        options.decay,
        options.seed,
    )
    results: dict[str, Any] = {
        "seeds": seeds,
        "tighten": tighten,
        "decide": {
            str(requests): {
                str(most): measure(requests, most, schedule, seeds, repeats, tighten)
                for most in BATCH_SIZES
            }
            for requests in REQUESTS
        },
        "exhaustive": {
            str(requests): {
                str(most): against_exhaustive(requests, most, schedule, seeds, tighten)
                for most in BATCH_SIZES
            }
            for requests in EXHAUSTIVE_REQUESTS
        },
    }
    if as_json:
        click.echo(json.dumps(results, indent=2))
        return
    _print(results)


if __name__ == "__main__":
    main()
