"""Shadow policies: does what they predict from recorded traffic come true?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import (
    Experiment,
    Product,
    Rows,
    Scaled,
    first,
    grouped,
    mean,
)
from sluice.benchmarks.experiments.loads import GENERATED, full_load_rate
from sluice.benchmarks.experiments.policies import LOCAL
from sluice.benchmarks.experiments.systems import (
    ADMISSION,
    DEFAULT,
    ROUTER,
    SETUPS,
    Contender,
    System,
    colocated,
)
from sluice.benchmarks.report import Table
from sluice.scheduling import admission as admissions
from sluice.scheduling.request.kernels import Floats
from sluice.simulation.cluster import Node
from sluice.simulation.engine import Belief, Truth
from sluice.simulation.metrics import attained, stages
from sluice.simulation.run import HEADROOM, Result
from sluice.simulation.shadow import (
    FIGURES,
    Estimate,
    Policies,
    Recorded,
    Replicas,
    compared,
    counted,
    estimates,
    sums,
)

SETUP = SETUPS["70b"]
FCFS = System(ROUTER, Contender("fcfs", "fcfs"), ADMISSION)
OURS = System(ROUTER, DEFAULT, ADMISSION)


class Pair(NamedTuple):
    """What is live, what is its shadow, and the number of replicas."""

    live: System
    shadow: System
    replicas: int = 1


PAIRS = {
    "fcfs, shadow deadline_triage": Pair(FCFS, OURS),
    "deadline_triage, shadow fcfs": Pair(OURS, FCFS),
    "admission, shadow none": Pair(OURS, System(ROUTER, DEFAULT)),
    "most_gain, shadow round_robin": Pair(OURS, System("round_robin", DEFAULT, ADMISSION), 2),
}


def policies_of(system: System) -> Policies:
    """A system's policies."""
    name = system.admission
    return Policies(
        lambda role: LOCAL.make(system.local.policy, dict(system.local.options), role=role),
        lambda: systems.make_router(system.router, 0),
        lambda: None if name is None else admissions.make_policy(name, {}),
    )


def records_of(result: Result) -> list[Recorded]:
    """A run as controller and routers would have recorded it."""
    requests = result.requests
    met, promised = attained(requests, stages(requests)), ~np.isnan(requests.promised_s)
    found = []
    for key, each in enumerate(requests.arrivals):
        tokens = 0 if key in requests.failures else each.output_tokens
        arrival = each._replace(output_tokens=tokens, task=each.slo.service_class)
        found.append(Recorded(arrival, bool(met[key]), bool(met[key] and promised[key])))
    return found


def measure(
    seed: int, pair: Pair, load: float, workload: str, seconds: float
) -> Mapping[str, float]:
    """The live policies run, the shadow ones are predicted from their records alone, and then run
    really: on the same arrivals, and on others of the same source (``new``)."""
    make, layout = GENERATED[workload], colocated(pair.replicas)
    rate = load * pair.replicas * full_load_rate(make, SETUP)
    same, other = (make(SETUP, rate, round(rate * seconds), each) for each in (seed, seed + 50_000))
    live = systems.run_cluster(same, pair.live, SETUP, layout, seed).result
    nodes = [
        Node(Truth(each, each.spread), Belief(each.with_headroom(HEADROOM)), SETUP.engine)
        for each in live.learned
    ]
    sides = policies_of(pair.live), policies_of(pair.shadow)
    windows = compared(
        records_of(live), *sides, Replicas(nodes, layout.cluster), same.block_tokens, seed + 1_000
    )
    really = [
        systems.run_cluster(made, pair.shadow, SETUP, layout, seed + 2_000 + place).result
        for place, made in enumerate((same, other))
    ]
    found: dict[str, float] = {}
    for place, (figure, estimate) in enumerate(zip(FIGURES, estimates(windows), strict=True)):
        found |= {f"{figure}_{name}": value for name, value in estimate._asdict().items()}
        for name, result in zip(("real", "new"), really, strict=True):
            change = float(_shares(result)[place]) - estimate.live
            found[f"{figure}_{name}"] = change
            found[f"{figure}_{name}_in"] = float(estimate.low <= change <= estimate.high)
    return found


def _shares(result: Result) -> Floats:
    workload, records = result.requests.workload, records_of(result)
    met, kept = (np.array([getattr(r, name) for r in records]) for name in FIGURES[:2])
    shares: Floats = sums(workload, met, kept).sum(0) / counted(workload).sum(0)
    return shares


def by_pair(rows: Rows) -> Table:
    """How often the interval held what was measured."""
    lines = []
    for (pair, load), own in grouped(rows, "pair", "load").items():
        for figure in FIGURES:
            scale, digits = (1, 0) if figure == "tokens_per_s" else (100, 1)
            said = {n: scale * mean(own, f"{figure}_{n}") for n in (*Estimate._fields, "real")}
            half = (said["high"] - said["low"]) / 2
            held = [round(len(own) * mean(own, f"{figure}_{n}_in")) for n in ("real", "new")]
            clear = sum(float(r[f"{figure}_low"]) * float(r[f"{figure}_high"]) > 0 for r in own)
            shown = [f"{said[name]:.{digits}f}" for name in ("live", "difference", "real")]
            counts = (f"{each} of {len(own)}" for each in (*held, clear))
            lines.append((str(pair), f"{load:g}", figure, *shown, f"{half:.{digits}f}", *counts))
    return Table(
        "What was predicted from the live policies' records, and what it really was",
        (
            *("live and shadow", "load", "figure", "live", "predicted", "real", "half"),
            *("held", "held, new arrivals", "without 0"),
        ),
        lines,
        "Shares in percent. Predicted and real: the change against live, means over runs; half: of "
        "the 95 % interval. Held: runs in which it held the real change on the same arrivals, and "
        "on others of the same source, which it does not claim. Without 0: runs in which it said "
        "in which direction.",
    )


EXPERIMENT = Experiment(
    "shadow",
    "ours",
    "Does what shadow policies predict from recorded traffic come true?",
    seeds=20,
    setting="One replica, two for routing, whose planners begin with a wrong model. The prediction "
    "has the records of the live run only: times, sizes, objectives, outcomes, and the latency "
    "models that the replicas have learned. Then the shadow policies run really, with other noise.",
    grids=[
        Product(
            measure,
            {"pair": first(PAIRS, 2), "load": (1.1,)},
            {"workload": "proserve sharegpt", "seconds": Scaled(90.0, 140.0)},
        )
    ],
    tables=(by_pair,),
)
