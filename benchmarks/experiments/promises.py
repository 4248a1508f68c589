"""Promises with margins, against those without and an oracle, under a wrong latency model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import (
    Axes,
    Experiment,
    Product,
    Rows,
    Scaled,
    few,
    first,
    grouped,
    shown,
)
from sluice.benchmarks.experiments.loads import (
    GENERATED,
    QUICK,
    Make,
    Span,
    full_load_rate,
    recorded,
)
from sluice.benchmarks.experiments.systems import ADMISSION, DEFAULT, ROUTER, SETUPS, System
from sluice.benchmarks.report import Table
from sluice.scheduling.latency.model import LatencyModel
from sluice.simulation.config import ClusterConfig, Slowdown
from sluice.simulation.metrics import TPOTMetric, attained, column, stages
from sluice.simulation.run import Result

LEVEL = ClusterConfig().promise_level or 0.99
CELL = ("workload", "setup", "load", "model")
MARGINS, NONE, ORACLE = "margins", "no margins", "oracle"
REPLICAS = 2

MIN_PROMISES = 200
"""A cell with fewer promises, over all seeds, is not judged by the share that is kept."""

KEPT_BELOW, GOODPUT_BELOW, OF_ORACLE = 0.01, 0.03, 0.9
"""Tolerances: of the share kept below its level, and of a cell's goodput below the one without
margins; and the required share of the oracle's goodput."""


class Wrong(NamedTuple):
    """How real step times differ from what planners believe: factors on the fixed cost of a step
    and on the cost of its tokens, standard deviation of the logarithm of a step's time, and a
    factor on all steps of one replica in the middle third of the arrivals."""

    fixed: float = 1.0
    tokens: float = 1.0
    noise: float = 0.03
    drift: float = 1.0

    def believed(self, model: LatencyModel) -> LatencyModel:
        """The planners' model with this error, where ``model`` has none."""
        fixed, *others = model.coefficients
        return type(model).of([fixed / self.fixed, *(each / self.tokens for each in others)])


WRONG = {
    "all x 1.3": Wrong(1.3, 1.3),
    "fixed x 1.5": Wrong(fixed=1.5),
    "noise, drift": Wrong(noise=0.15, drift=1.3),
}


def measure(
    seed: int,
    workload: Make,
    setup: str,
    load: float,
    model: Wrong | None,
    system: float | None,
    span: Span,
) -> Mapping[str, float]:
    """The counts of one run with admission, where ``system`` is the level of the margins; without a
    wrong model, of an oracle that knows the future, see :data:`EXPERIMENT`."""
    own = SETUPS[setup]
    rate = load * full_load_rate(workload, own)
    made = workload(own, rate * REPLICAS, span.requests(rate) * REPLICAS, seed)
    layout = systems.colocated(REPLICAS, promise_level=system)
    if model is None:
        own = own._replace(noise=0.0, exact=True)
        kinds = (System(ROUTER, DEFAULT, admission) for admission in (ADMISSION, None))
        runs = [systems.run_cluster(made, kind, own, layout, seed, True) for kind in kinds]
        best = max(counts(each.result)["attained"] for each in runs)
        every = dict.fromkeys(("promised", "kept", "attained"), best)
        return {"requests": len(made), **every, "late_p95": 0.0}
    own = own._replace(noise=model.noise, believed=model.believed(own.believed))
    lasts_s = made.arrivals[-1].arrival_s
    drift = Slowdown(lasts_s / 3, 0, model.drift), Slowdown(lasts_s * 2 / 3, 0, 1.0)
    kind, layout = System(ROUTER, DEFAULT, ADMISSION), layout._replace(incidents=drift)
    return counts(systems.run_cluster(made, kind, own, layout, seed).result)


def counts(result: Result) -> dict[str, float]:
    """Counts of requests: ``kept``: promised and within every objective; ``attained``: the same,
    promised or not. ``late_p95``: P95 of the lateness of late promised first tokens, over the
    objective."""
    requests = result.requests
    measured = stages(requests)
    promised = ~np.isnan(requests.promised_s)
    met = attained(requests, measured, TPOTMetric.MEAN)
    late = measured.ttft_s / column(requests, 0) - 1
    late = late[promised[measured.request] & (late > 0)]
    return {
        "requests": float(len(requests)),
        "promised": float(promised.sum()),
        "kept": float((met & promised).sum()),
        "attained": float(met.sum()),
        "late_p95": float(np.percentile(late, 95)) if len(late) else 0.0,
    }


class Sums(NamedTuple):
    """One cell over all seeds: the rows of each system."""

    labels: tuple[str, ...]
    of: Mapping[str, Rows]

    def sum(self, system: str, figure: str) -> float:
        """The sum of a count."""
        return sum(float(row[figure]) for row in self.of[system])

    def share(self, system: str, figure: str, of: str = "requests", other: str = "") -> float:
        """One count over another, of ``other`` if that is given; 1 if that is 0."""
        whole = self.sum(other or system, of)
        return self.sum(system, figure) / whole if whole else 1.0


def sums_of(rows: Rows) -> list[Sums]:
    """Every cell of a wrong model, with the oracle of its workload."""
    oracles = grouped([row for row in rows if row["system"] == ORACLE], *CELL[:3])
    others = grouped([row for row in rows if row["system"] != ORACLE], *CELL)
    found = []
    for labels, own in others.items():
        systems = {str(name): list(part) for (name,), part in grouped(own, "system").items()}
        found.append(Sums(tuple(map(shown, labels)), {**systems, ORACLE: oracles[labels[:3]]}))
    return found


_SHARES = (("promised",), ("kept", "promised"), ("kept", "kept", ORACLE), ("attained",))


def by_model(rows: Rows) -> Table:
    """Means over the cells of each wrong model."""
    sums = sums_of(rows)
    lines = []
    for model in dict.fromkeys(each.labels[3] for each in sums):
        cells = [each for each in sums if each.labels[3] == model]
        for system in (NONE, MARGINS, ORACLE):
            late = max(float(row["late_p95"]) for own in cells for row in own.of[system])
            shares = ([own.share(system, *part) for own in cells] for part in _SHARES)
            means = (f"{100 * fmean(share):.1f} %" for share in shares)
            lines.append((model, system, *means, f"{late:.2f}"))
    return Table(
        "By model error, mean over cells",
        ("model", "system", "promised", "kept", "goodput", "attained", "late, P95"),
        lines,
        "Kept: share of the promised; goodput: "
        "promised and kept, over the oracle's; late: lateness of late promised first tokens, "
        "in multiples of the objective.",
    )


def targets(sums: Sequence[Sums]) -> Table:
    """The targets, and whether they hold."""
    many = [each for each in sums if each.sum(MARGINS, "promised") >= MIN_PROMISES]
    kept = {each.labels: each.share(MARGINS, "kept", "promised") for each in many}
    to_none = {each.labels: each.share(MARGINS, "kept", "kept", NONE) for each in sums}
    to_oracle = {each.labels: each.share(MARGINS, "kept", "kept", ORACLE) for each in sums}
    points = {
        each.labels: each.share(MARGINS, "attained") - each.share(NONE, "attained") for each in sums
    }
    least = LEVEL - KEPT_BELOW
    checks: list[tuple[str, Mapping[tuple[str, ...], float], float, float | None]] = [
        (f"kept, cells of {MIN_PROMISES} promises or more", kept, least, None),
        ("goodput over that without margins", to_none, 1 - GOODPUT_BELOW, 1.0),
        ("goodput over the oracle's", to_oracle, OF_ORACLE, None),
        ("attained, minus that without margins", points, -np.inf, 0.0),
    ]
    lines = []
    for words, values, floor, mean_floor in checks:
        if not values:
            continue
        mean, cell = fmean(values.values()), min(values, key=lambda at: values[at])
        below = sum(value < floor for value in values.values())
        held = not below and (mean_floor is None or mean >= mean_floor)
        wanted = [f"each >= {floor:.3f}"] if floor > -np.inf else []
        wanted += [f"mean >= {mean_floor:.3f}"] if mean_floor is not None else []
        worst = f"{values[cell]:.3f} ({', '.join(cell)})"
        line = words, ", ".join(wanted), f"{mean:.4f}", worst, f"{below} of {len(values)}"
        lines.append((*line, "yes" if held else "NO"))
    return Table(
        f"Targets at level {LEVEL:g}",
        ("figure", "wanted", "mean", "worst cell", "cells below", "holds"),
        lines,
    )


AXES: Axes = {
    "workload": lambda plan: few(GENERATED, plan) | recorded(plan.traces),
    "setup": first(("8b", "70b-short")),
    "load": first((0.9, 1.3)),
}
SYSTEMS = {NONE: None, MARGINS: LEVEL}
SPAN = {"span": Scaled(QUICK, Span(45.0, 150, 500))}

EXPERIMENT = Experiment(
    "promises",
    "ours; adaptive conformal inference is Gibbs and Candès 2021",
    "Are promises kept where the engine's latency model is wrong, and what do the margins cost?",
    setting=f"{REPLICAS} replicas behind the default router and admission. all x 1.3: steps take "
    "1.3 times the predicted time at the start; fixed x 1.5: their fixed part 1.5 times; noise, "
    "drift: 15 % noise, and one replica is 1.3 times slower in the middle third. The oracle has an "
    "exact model and known lengths, and promises exactly the requests that it keeps.",
    grids=[
        Product(measure, {**AXES, "model": {"-": None}, "system": {ORACLE: None}}, SPAN),
        Product(measure, {**AXES, "model": WRONG, "system": SYSTEMS}, SPAN),
    ],
    tables=(lambda rows: targets(sums_of(rows)), by_model),
)
