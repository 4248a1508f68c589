"""The best-effort tier: its cost for guaranteed requests, and the throughput of the tier."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from sluice.benchmarks.experiments.grid import Cell, Experiment, Pivot, Plan
from sluice.benchmarks.experiments.loads import GENERATED, LOAD_WORDS, full_load_rate
from sluice.benchmarks.experiments.systems import SETUPS, node_of
from sluice.scheduling.batching import make_policy
from sluice.scheduling.request.objective import SLO
from sluice.simulation.engine import Engine
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.requests import Requests
from sluice.simulation.run import drive
from sluice.simulation.workload import Workload, merged, with_objectives

SETUP = SETUPS["8b-short"]
WORKLOAD = "proserve sharegpt"
BEHIND_LOAD = 0.5
BEHIND = "behind"
TIERS = ("alone", "two tiers", "one tier")
"""Without background work; with it as best effort; with it in the same tier as all requests."""


def cells(plan: Plan) -> list[Cell]:
    """Policies x loads of guaranteed requests x tiers."""
    make = GENERATED[WORKLOAD]
    # By time, with ample KV: the KV of 8b-short, filled by decodes at their slowest, would bound
    # load 1 far lower.
    full = full_load_rate(make, SETUPS["8b"])
    seconds = plan.pick(2.0, 60.0, 300.0)
    policies = plan.pick(
        ("fcfs",),
        ("fcfs", "fairbatching", "deadline_triage"),
        ("fcfs", "sarathi", "fairbatching", "slidebatching", "slos_serve", "deadline_triage"),
    )
    return [
        Cell(
            {"policy": policy, "served": tier, "load": load},
            partial(measure, policy, tier, load * full, BEHIND_LOAD * full, seconds),
        )
        for policy in policies
        for tier in TIERS
        for load in plan.pick((0.9,), (0.5, 0.7, 0.9, 1.1), (0.5, 0.7, 0.9, 1.0, 1.1, 1.3))
    ]


def workload(rate: float, behind_rate: float, seconds: float, seed: int) -> Workload:
    """Requests with objectives, and others without, with lengths of the same distribution."""
    make = GENERATED[WORKLOAD]
    ours = make(SETUP, rate, max(2, round(rate * seconds)), seed)
    others = make(SETUP, behind_rate, max(2, round(behind_rate * seconds)), seed + 1_000)
    others = with_objectives(others, lambda _: SLO(service_class=BEHIND), "No objective.")
    return merged("two tiers", (ours, others))


def measure(
    policy: str, tier: str, rate: float, behind_rate: float, seconds: float, seed: int
) -> Mapping[str, float]:
    """One run: attainment of the requests with objectives; the others' tokens a second while those
    arrive, and their longest wait for a first token; the share of computed tokens that evictions
    threw away."""
    load = workload(rate, behind_rate, seconds, seed)
    if tier == "alone":
        arrivals = tuple(a for a in load.arrivals if a.slo.service_class != BEHIND)
        load = Workload(load.name, arrivals, load.block_tokens)
    behind = np.array([arrival.slo.service_class == BEHIND for arrival in load.arrivals])
    requests = Requests(load)
    for key in np.flatnonzero(behind).tolist():
        requests.serve_as(key, tier == "two tiers")
    node = node_of(SETUP)
    engine = Engine(
        SETUP.engine,
        make_policy(policy),
        node.belief,
        node.truth,
        requests,
        np.random.default_rng(seed),
    )
    drive(engine, requests)
    measured = stages(requests)
    met = attained(requests, measured, TPOTMetric.MEAN)
    owner = np.repeat(np.arange(len(requests)), np.diff(requests.offsets))
    early = behind[owner] & (requests.emitted_s < seconds)
    return {
        "attainment": float(met[~behind].mean()),
        "behind_tokens_per_s": float(early.sum()) / seconds,
        "behind_longest_wait_s": float(measured.ttft_s[behind].max(initial=0.0)),
        "evicted_share": engine.evicted_tokens / max(engine.done_tokens, 1),
    }


FIGURES = (
    ("SLO attainment of the guaranteed requests", "attainment", 3),
    ("output tokens a second of the background work", "behind_tokens_per_s", 0),
    ("longest wait of the background work for a first token, s", "behind_longest_wait_s", 0),
    ("share of the computed tokens that evictions discarded", "evicted_share", 3),
)

EXPERIMENT = Experiment(
    name="best_effort",
    source="SLOs-Serve §4.1 has the idea of the tier; the rules are ours",
    question="What does best-effort work cost the guaranteed requests, and how much of it is "
    "served beside them?",
    setting={
        "TPOT": "mean since the first token",
        "Arrivals": f"generated, Poisson, of guaranteed requests for a minute (`full`: five), at "
        f"the load shown; {LOAD_WORDS}. Background work: requests without objectives, their "
        f"lengths of the same distribution, at load {BEHIND_LOAD:g}",
        "Objectives and priorities": "ProServe's, see simulation/workloads/settings.py; every "
        "request that states one counts as guaranteed, also above capacity, where a controller "
        "would guarantee fewer",
        "Latency": "setup 8b-short of benchmarks/experiments/systems.py",
    },
    seeds=3,
    cells=cells,
    tables=[
        Pivot(f"{words}, by load", figure, ("policy", "served"), digits=digits)
        for words, figure, digits in FIGURES
    ],
)
