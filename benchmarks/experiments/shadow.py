"""Shadow policies: does what they predict from recorded traffic come true?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

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
    Layout,
    System,
    colocated,
)
from sluice.benchmarks.report import Table
from sluice.scheduling import admission as admissions
from sluice.simulation.cluster import Node
from sluice.simulation.config import Slowdown
from sluice.simulation.engine import Belief, Truth
from sluice.simulation.run import HEADROOM
from sluice.simulation.shadow import (
    FIGURES,
    Estimate,
    Policies,
    Recorded,
    Replicas,
    compared,
    estimates,
    outcomes,
    sums,
)
from sluice.simulation.workload import Workload

SETUP = SETUPS["70b"]
IN_ORDER = Contender("fcfs", "fcfs")
FCFS = System(ROUTER, IN_ORDER, ADMISSION)
OURS = System(ROUTER, DEFAULT, ADMISSION)
LEAD_S = 40.0
"""A recording begins after this: planners have learned, and requests are running."""

UNEQUAL = colocated(2)._replace(incidents=(Slowdown(0.0, 1, 2.0),))


class Pair(NamedTuple):
    """What is live, what is its shadow, and on which replicas."""

    live: System
    shadow: System
    layout: Layout = colocated(1)


PAIRS = {
    "fcfs, shadow deadline_triage": Pair(FCFS, OURS),
    "deadline_triage, shadow fcfs": Pair(OURS, FCFS),
    "admission, shadow none": Pair(OURS, System(ROUTER, DEFAULT)),
    "round_robin, shadow most_gain": Pair(
        System("round_robin", IN_ORDER), System("most_gain", IN_ORDER), UNEQUAL
    ),
}


def policies_of(system: System) -> Policies:
    """A system's policies."""
    name = system.admission
    return Policies(
        lambda role: LOCAL.make(system.local.policy, dict(system.local.options), role=role),
        lambda: systems.make_router(system.router, 0),
        lambda: None if name is None else admissions.make_policy(name, {}),
    )


def recorded(made: Workload) -> Workload:
    """What of a workload a recording has that begins with the first request after the lead."""
    first = next(key for key, each in enumerate(made.arrivals) if each.arrival_s >= LEAD_S)
    kept, first_s = made.arrivals[first:], made.arrivals[first].arrival_s
    moved = (each._replace(arrival_s=each.arrival_s - first_s) for each in kept)
    return replace(made, arrivals=tuple(moved))


def measure(
    seed: int, pair: Pair, load: float, workload: str, seconds: float
) -> Mapping[str, float]:
    """The live policies run, the shadow ones are predicted from a recording alone, and then run
    really on the same arrivals, with other noise."""
    make, layout = GENERATED[workload], pair.layout
    rate = load * full_load_rate(make, SETUP)
    made = make(SETUP, rate, round(rate * (LEAD_S + seconds)), seed)
    live = systems.run_cluster(made, pair.live, SETUP, layout, seed).result
    nodes = [
        Node(Truth(each, each.spread), Belief(each.with_headroom(HEADROOM)), SETUP.engine)
        for each in live.learned
    ]
    part = recorded(made)
    first, failures = len(made) - len(part), live.requests.failures
    outcome = zip(*(each[first:].tolist() for each in outcomes(live.requests)), strict=True)
    records = []
    for key, (each, of) in enumerate(zip(part.arrivals, outcome, strict=True), first):
        tokens = 0 if key in failures else each.output_tokens
        known = each._replace(output_tokens=tokens, task=each.slo.service_class)
        records.append(Recorded(known, *of))
    sides = policies_of(pair.live), policies_of(pair.shadow)
    replicas = Replicas(nodes, layout.cluster)
    windows = compared(records, *sides, replicas, made.block_tokens, seed + 1_000)
    real = systems.run_cluster(made, pair.shadow, SETUP, layout, seed + 2_000).result
    shares = sums(part, *(each[first:] for each in outcomes(real.requests))).sum(0)
    shares /= windows[:, 0].sum(0)
    found: dict[str, float] = {}
    for figure, share, said in zip(FIGURES, shares, estimates([windows]), strict=True):
        change = float(share) - said.live
        found |= {f"{figure}_{name}": value for name, value in said._asdict().items()}
        found[f"{figure}_real"] = change
        found[f"{figure}_held"] = float(said.low <= change <= said.high)
    return found


def by_pair(rows: Rows) -> Table:
    """How often the interval held what was measured."""
    lines = []
    for (pair,), own in grouped(rows, "pair").items():
        for figure in FIGURES:
            scale, digits = (1, 0) if figure == "tokens_per_s" else (100, 1)
            said = {n: scale * mean(own, f"{figure}_{n}") for n in (*Estimate._fields, "real")}
            said["half"] = (said["high"] - said["low"]) / 2
            columns = ("live", "replayed", "difference", "real", "half")
            shown = [f"{said[name]:.{digits}f}" for name in columns]
            held = round(sum(float(row[f"{figure}_held"]) for row in own))
            clear = sum(float(r[f"{figure}_low"]) * float(r[f"{figure}_high"]) > 0 for r in own)
            counts = (f"{each} of {len(own)}" for each in (held, clear))
            lines.append((str(pair), figure, *shown, *counts))
    return Table(
        "What was predicted from the live policies' records, and what it really was",
        (
            *("live and shadow", "figure", "live", "replayed", "predicted", "real", "half"),
            *("held", "without 0"),
        ),
        lines,
        "Shares in percent, means over runs. Predicted and real: the change against live; half: of "
        "the 95 % interval. Held: runs in which it held the real change. Without 0: runs in which "
        "it said in which direction.",
    )


EXPERIMENT = Experiment(
    "shadow",
    "ours",
    "Does what shadow policies predict from recorded traffic come true?",
    seeds=20,
    setting="One replica, for routing two of which one is half as fast. The prediction has a "
    "recording of the live run only: times, sizes, objectives, outcomes, and the latency models "
    "that the replicas have learned. It begins 40 s after the run. Then the shadow policies run "
    "really, with other noise, on the same arrivals.",
    grids=[
        Product(
            measure,
            {"pair": first(PAIRS, 2)},
            {"load": 1.1, "workload": "proserve sharegpt", "seconds": Scaled(90.0, 120.0)},
        )
    ],
    tables=(by_pair,),
)
