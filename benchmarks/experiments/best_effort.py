"""The best-effort tier: its cost for guaranteed requests, and the throughput of the tier."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sluice.benchmarks.experiments.grid import Experiment, Product, Scaled
from sluice.benchmarks.experiments.loads import GENERATED, full_load_rate
from sluice.benchmarks.experiments.systems import SETUPS, node_of
from sluice.benchmarks.experiments.tables import Pivot
from sluice.scheduling.batching import make_policy
from sluice.scheduling.request.objective import SLO
from sluice.simulation.engine import Engine
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.requests import Requests
from sluice.simulation.run import drive
from sluice.simulation.workload import Workload, merged, with_objectives

SETUP = SETUPS["8b-short"]
MAKE = GENERATED["proserve sharegpt"]
BEHIND_LOAD = 0.5
BEHIND = "behind"
TIERS = ("alone", "two tiers", "one tier")
"""Without background work; with it as best effort; with it in the same tier as all requests."""


def workload(rate: float, behind_rate: float, seconds: float, seed: int) -> Workload:
    """Requests with objectives, and others without, with lengths of the same distribution."""
    ours = MAKE(SETUP, rate, max(2, round(rate * seconds)), seed)
    others = MAKE(SETUP, behind_rate, max(2, round(behind_rate * seconds)), seed + 1_000)
    others = with_objectives(others, lambda _: SLO(service_class=BEHIND), "No objective.")
    return merged("two tiers", (ours, others))


def measure(
    seed: int, policy: str, served: str, load: float, seconds: float
) -> Mapping[str, float]:
    """One run: attainment of the requests with objectives; the others' tokens a second while those
    arrive, and their longest wait for a first token; the share of computed tokens that evictions
    threw away."""
    # By time, with ample KV: the KV of 8b-short, filled by decodes at their slowest, would bound
    # load 1 far lower.
    full = full_load_rate(MAKE, SETUPS["8b"])
    made = workload(load * full, BEHIND_LOAD * full, seconds, seed)
    if served == "alone":
        arrivals = tuple(a for a in made.arrivals if a.slo.service_class != BEHIND)
        made = Workload(made.name, arrivals, made.block_tokens)
    behind = np.array([arrival.slo.service_class == BEHIND for arrival in made.arrivals])
    requests = Requests(made)
    for key in np.flatnonzero(behind).tolist():
        requests.serve_as(key, served == "two tiers")
    node, rng = node_of(SETUP), np.random.default_rng(seed)
    engine = Engine(SETUP.engine, make_policy(policy), node.belief, node.truth, requests, rng)
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


EXPERIMENT = Experiment(
    "best_effort",
    "SLOs-Serve §4.1 has the idea of the tier; the rules are ours",
    "What does best-effort work cost the guaranteed requests, and how much of it is served beside "
    "them?",
    seeds=3,
    setting={
        "Arrivals": "guaranteed requests for a minute at the load shown, beside requests without "
        f"objectives, their lengths of the same distribution, at load {BEHIND_LOAD:g}",
        "Objectives and priorities": "ProServe's; every request that states one counts as "
        "guaranteed, also above capacity, where a controller would guarantee fewer",
        "Latency": "setup 8b-short of benchmarks/experiments/systems.py",
    },
    grids=[
        Product(
            measure,
            {
                "policy": Scaled(("fcfs",), ("fcfs", "fairbatching", "deadline_triage")),
                "served": TIERS,
                "load": Scaled((0.9,), (0.5, 0.7, 0.9, 1.1)),
            },
            {"seconds": Scaled(2.0, 60.0)},
        )
    ],
    tables=[
        Pivot(f"{words}, by load", figure, ("policy", "served"), digits=digits)
        for figure, words, digits in (
            ("attainment", "SLO attainment of the guaranteed requests", 3),
            ("behind_tokens_per_s", "output tokens a second of the background work", 0),
            (
                "behind_longest_wait_s",
                "longest wait of the background work for a first token, s",
                0,
            ),
            ("evicted_share", "share of the computed tokens that evictions discarded", 3),
        )
    ],
)
