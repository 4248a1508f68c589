"""Simulated-annealing priority mapping (002): G against FCFS and an exhaustive search, time to
decide, and what the policy does inside an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from sluice.benchmarks.experiments.grid import Experiment, Product, Scaled
from sluice.benchmarks.experiments.systems import SETUPS, Contender, run
from sluice.benchmarks.experiments.tables import Pivot, Rows, having
from sluice.scheduling.batching.annealing import AnnealingOptions
from sluice.scheduling.batching.priority_mapping import Jobs, Schedule, anneal, predict
from sluice.scheduling.latency.request_model import InteractionLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import row_of
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.planning.plots import Table
from sluice.simulation.workloads.settings import chat_and_code

REPEATS = 5
MOST_EXHAUSTIVE = 6
"""Requests for which an exhaustive search takes a second."""

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


def mapping(seed: int, requests: int, batch: int, objectives: float) -> Mapping[str, float]:
    """Figures of the best mapping found for one set of requests, predicted by the paper's model."""
    jobs = make_jobs(requests, batch, seed, objectives)
    chosen = AnnealingOptions()
    schedule = Schedule.of(
        *(chosen.initial_temperature, chosen.threshold, chosen.iterations, chosen.decay),
        chosen.seed,
    )
    times_ms = []
    # The first call may load the compiled loops.
    for _ in range(1 + REPEATS):
        started = time.perf_counter_ns()
        found = anneal(jobs, schedule)
        times_ms.append((time.perf_counter_ns() - started) / 1e6)
    met, latency_s = score(jobs, in_order(requests, batch))
    figures = {
        "decide_ms": float(np.median(times_ms[1:])),
        "g": found.g,
        "g_fcfs": met / latency_s,
    }
    if requests <= MOST_EXHAUSTIVE:
        figures["g_exhaustive"] = exhaustive(jobs)
    return figures


def engine(seed: int, requests: int, batch: int, policy: str) -> Mapping[str, float]:
    """Figures of the same mix in a simulated engine, all requests at once."""
    setup = SETUPS["8b"]
    config = setup.engine.model_copy(update={"max_sequences": batch})
    setup, kind = setup._replace(engine=config), Contender(policy, policy)
    result = run(chat_and_code(requests, seed), kind, setup, seed, oracle=True).result
    measured = stages(result.requests)
    met = attained(result.requests, measured, TPOTMetric.MEAN)
    latency_s = float(measured.e2e_s.sum())
    return {"g": float(met.sum()) / latency_s, "attained": float(met.mean())}


def compared(rows: Rows) -> Rows:
    """G over that of FCFS, and over that of an exhaustive search where there is one."""
    found = []
    for row in rows:
        row = {**row, "batch size": f"{row.get('objectives')}, batch {row['batch']:g}"}
        g, fcfs, best = (float(row.get(name, 0.0)) for name in ("g", "g_fcfs", "g_exhaustive"))
        if fcfs > 0:
            row |= {"over_fcfs": g / max(fcfs, 1e-12), "gains": "yes"}
        if best > 0:
            row |= {"share": g / best, "searched": "yes"}
        found.append(row)
    return found


def against_exhaustive(rows: Rows) -> Table:
    """G over that of an exhaustive search."""
    searched = having(rows, {"searched": "yes"})
    shares = [float(row["share"]) for row in searched]
    exact = sum(share > 1 - 1e-9 for share in shares)
    worst = f"Worst case {min(shares, default=1.0):.4f}"
    note = f"{worst}; the greatest G in {exact} of {len(shares)} cases."
    title = "G over that of an exhaustive search"
    return Pivot(title, "share", ("objectives", "batch"), "requests", 4, note)(searched)


MAPPED = {"gains": "yes"}
ENGINE = {"what": "engine"}
NOISY = "On a shared machine; measure with --jobs 1 on a quiet one."

EXPERIMENT = Experiment(
    "annealing",
    "002 (simulated annealing), Fig. 7 and Table 1",
    "How near does annealing come to the best mapping, how much does it gain over FCFS, and how "
    "long does it take?",
    seeds=10,
    setting={
        "TPOT": "mapping: predicted decode time over output tokens, as in the paper; engine: mean "
        "since the first token",
        "Arrivals": "all at once",
        "Load": "as many requests as the tables say",
        "Objectives and priorities": "half chat (TTFT 10 s, TPOT 50 ms), half code (30 s end to "
        "end), in random order; divided by 4 where named (TPOT stays); one priority",
        "Latency": "mapping: the paper's Table 2 (2 V100, Qwen2.5-7B); engine: setup 8b of "
        "benchmarks/experiments/systems.py, the policy's predictor derived from its step times",
        "Output lengths": "known",
    },
    grids=[
        Product(
            mapping,
            {
                "requests": Scaled((4, 10), (4, 6, 10, 20, 40)),
                "batch": Scaled((2,), (1, 2, 4)),
                "objectives": {"paper": 1.0, "paper / 4": 4.0},
            },
            labels={"what": "mapping"},
        ),
        Product(
            engine,
            {
                "requests": Scaled((10,), (40, 100)),
                "batch": Scaled((4,), (4, 16)),
                "policy": ("fcfs", "annealing", "sjf", "deadline_triage"),
            },
            labels={"what": "engine"},
        ),
    ],
    derive=compared,
    tables=(
        Pivot("G over that of FCFS", "over_fcfs", ("batch size",), "requests", where=MAPPED),
        Pivot(
            "Table 1: time to decide, ms",
            *("decide_ms", ("batch",), "requests", 3, NOISY, MAPPED),
        ),
        against_exhaustive,
        Pivot(
            "In a simulated engine, all requests at once: met requests per second of latency",
            *("g", ("requests", "batch"), "policy", 4),
            where=ENGINE,
        ),
        Pivot("The same: attainment", "attained", ("requests", "batch"), "policy", where=ENGINE),
    ),
)
