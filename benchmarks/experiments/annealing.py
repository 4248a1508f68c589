"""Simulated-annealing priority mapping (002): G, time to decide, and its effect in an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from sluice.benchmarks.experiments import grid
from sluice.benchmarks.experiments.systems import SETUPS, Contender, run
from sluice.benchmarks.report import Table
from sluice.scheduling.batching.annealing import Interaction, Jobs, Schedule, anneal, predict
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import row_of
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.settings import chat_and_code

REPEATS = 5
MAX_EXHAUSTIVE = 6
"""Requests for which an exhaustive search takes a second."""

PAPER = (
    Interaction(0.0001, 0.0057, 0.000_01, 0.043_67),
    Interaction(0.000_000_2, 0.000_275, 0.000_000_88, 0.015_85),
)
"""Prefill and decode of Table 2 (Qwen2.5-7B on two V100), seconds."""

Batches = Sequence[Sequence[int]]


def make_jobs(
    requests: int,
    most: int,
    seed: int,
    tighten: float = 1.0,
    error: float = 0.0,
    phases: Sequence[Interaction] = PAPER,
) -> Jobs:
    """``requests`` as a planner sees them, with a relative ``error`` (deviation) of output
    lengths."""
    rng = np.random.default_rng((seed, requests))
    code = SLO(e2e_s=30.0 / tighten)
    chat = SLO(ttft_s=10.0 / tighten, tpot_s=0.05)
    lengths = np.minimum(rng.lognormal(np.log(200), 0.9, (requests, 2)).round() + 1, 2_000)
    kinds = rng.permutation(requests)
    lengths[:, 1] = np.maximum(1.0, lengths[:, 1] * (1.0 + error * rng.standard_normal(requests)))
    rows = [
        row_of((code, chat)[kind % 2], 0.0, int(prompt), float(output))
        for kind, (prompt, output) in zip(kinds, lengths, strict=True)
    ]
    return Jobs(predict(np.array(rows), np.array(phases), 0.0, most, 0))


def score(jobs: Jobs, batches: Batches) -> tuple[int, float]:
    """Met requests and summed latency of ``batches``; running requests are part of the first."""
    met, latency_s, wait_s = 0, jobs.waited_s, 0.0
    for index, batch in enumerate(batches):
        own = (jobs.joining or jobs.waiting) if index == 0 else jobs.waiting
        members = [(own, job) for job in batch]
        if index == 0 and jobs.running is not None:
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


def mapping(
    seed: int,
    requests: int,
    batch: int,
    objectives: float = 1.0,
    error: float = 0.0,
    coefficient: str = "alpha",
    deviation: float = 0.0,
) -> Mapping[str, float]:
    """The G found where output lengths have an ``error`` and a ``coefficient`` of the model a
    relative ``deviation``."""
    jobs = make_jobs(requests, batch, seed, objectives)
    phases = [
        phase._replace(**{coefficient: getattr(phase, coefficient) * (1.0 + deviation)})
        for phase in PAPER
    ]
    believed = make_jobs(requests, batch, seed, objectives, error, phases)
    schedule = Schedule.paper()
    times_ms = []
    # The first call may load the compiled loops.
    for _ in range(1 + REPEATS):
        started = time.perf_counter_ns()
        found = anneal(believed, schedule)
        times_ms.append((time.perf_counter_ns() - started) / 1e6)
    batches = [part.tolist() for part in np.split(found.order, np.cumsum(found.sizes)[:-1])]
    met, latency_s = score(jobs, batches)
    met_fcfs, fcfs_s = score(jobs, in_order(requests, batch))
    figures = {
        "decide_ms": float(np.median(times_ms[1:])),
        "g": met / latency_s,
        "g_fcfs": met_fcfs / fcfs_s,
        "kept": met / latency_s / max(anneal(jobs, schedule).g, 1e-12),
    }
    if requests <= MAX_EXHAUSTIVE:
        figures["g_exhaustive"] = exhaustive(jobs)
    return figures


def engine(seed: int, requests: int, batch: int, policy: Contender) -> Mapping[str, float]:
    """Figures of the same mix in a simulated engine, all requests at once."""
    setup = SETUPS["8b"]
    config = setup.engine.model_copy(update={"max_sequences": batch})
    setup = setup._replace(engine=config)
    result = run(chat_and_code(requests, seed), policy, setup, seed, oracle=True).result
    measured = stages(result.requests)
    met = attained(result.requests, measured, TPOTMetric.MEAN)
    latency_s = float(measured.e2e_s.sum())
    return {"g": float(met.sum()) / latency_s, "attained": float(met.mean())}


def compared(rows: grid.Rows) -> grid.Rows:
    """G over that of FCFS, and over that of an exhaustive search where there is one."""
    found = []
    for row in rows:
        row = {**row, "batch size": f"{row.get('objectives')}, batch {row.get('batch')}"}
        g, fcfs, best = (float(row.get(name, 0.0)) for name in ("g", "g_fcfs", "g_exhaustive"))
        if fcfs > 0:
            row |= {"over_fcfs": g / max(fcfs, 1e-12), "gains": "yes"}
        if best > 0:
            row |= {"share": g / best, "searched": "yes"}
        found.append(row)
    return found


def against_exhaustive(rows: grid.Rows) -> Table:
    """G over that of an exhaustive search."""
    searched = grid.having(rows, {"searched": "yes"})
    shares = [float(row["share"]) for row in searched]
    exact = sum(share > 1 - 1e-9 for share in shares)
    worst = f"Worst case {min(shares, default=1.0):.4f}"
    note = f"{worst}; the greatest G in {exact} of {len(shares)} cases."
    title = "G over that of an exhaustive search"
    return grid.Pivot(title, "share", ("objectives", "batch"), "requests", 4, note)(searched)


MAPPED = {"what": "mapping", "gains": "yes"}
ENGINE = {"what": "engine"}
IN_ENGINE = [Contender(name, name) for name in ("fcfs", "annealing", "sjf", "deadline_triage")]
NOISY = "On a shared machine; measure with --jobs 1 on a quiet one."

EXPERIMENT = grid.Experiment(
    "annealing",
    "SLO-Aware Scheduling (arXiv 2504.14966), Fig. 7 and 9 to 11, and Table 1",
    "How near does annealing come to the best mapping, how much does it gain over FCFS, and how "
    "long does it take?",
    seeds=10,
    setting="All requests at once: half chat (TTFT 10 s, TPOT 50 ms), half code (30 s end to end), "
    "divided by 4 where named (TPOT stays). The mapping is predicted by the paper's Table 2.",
    grids=[
        grid.Product(
            mapping,
            {
                "requests": grid.first((4, 6, 10, 20, 40), 3),
                "batch": grid.first((1, 2, 4)),
                "objectives": {"paper": 1.0, "paper / 4": 4.0},
            },
            labels={"what": "mapping"},
        ),
        grid.Product(
            engine,
            {
                "requests": grid.first((40, 100)),
                "batch": grid.first((4, 16)),
                "policy": IN_ENGINE,
            },
            labels={"what": "engine"},
        ),
        grid.Product(
            mapping,
            {
                "requests": grid.first((10, 20, 40)),
                "batch": grid.first((1, 2, 4)),
                "error": (0.0, 0.025, 0.05, 0.1, 0.5),
            },
            labels={"what": "lengths"},
        ),
        grid.Product(
            mapping,
            {
                "coefficient": Interaction._fields,
                "deviation": grid.first((-0.5, -0.2, 0.0, 0.2, 0.5), 2),
            },
            fixed={"requests": 10, "batch": 4},
            labels={"what": "latency"},
        ),
    ],
    derive=compared,
    tables=(
        grid.Pivot("G over that of FCFS", "over_fcfs", ("batch size",), "requests", where=MAPPED),
        grid.Pivot(
            "Table 1: time to decide, ms", *("decide_ms", ("batch",), "requests", 3, NOISY, MAPPED)
        ),
        against_exhaustive,
        grid.Pivot(
            "In a simulated engine, all requests at once: met requests per second of latency",
            *("g", ("requests", "batch"), "policy", 4),
            where=ENGINE,
        ),
        grid.Pivot(
            "The same: attainment", "attained", ("requests", "batch"), "policy", where=ENGINE
        ),
        grid.Pivot(
            "§5.3: G over that with known output lengths, by their error",
            *("kept", ("requests", "batch"), "error"),
            where={"what": "lengths"},
        ),
        grid.Pivot(
            "§5.4: G over that with the true coefficients, by the deviation of one",
            *("kept", ("coefficient",), "deviation"),
            where={"what": "latency"},
        ),
    ),
)
