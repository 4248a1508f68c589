"""Promises: tenants' shares under overload, retries at Retry-After, and margins with wrong
models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from statistics import fmean
from typing import NamedTuple

import numpy as np

from sluice.benchmarks.experiments import grid, loads, systems
from sluice.benchmarks.experiments.systems import (
    ADMISSION,
    DEFAULT,
    ROUTER,
    SETUPS,
    System,
    colocated,
)
from sluice.benchmarks.report import Table
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.tenancy.fair_shares import water_level
from sluice.simulation.config import ClusterConfig, Slowdown
from sluice.simulation.metrics import Flags, TPOTMetric, attained, column, stages
from sluice.simulation.requests import Requests
from sluice.simulation.run import Result
from sluice.simulation.workload import Workload, merged

REPLICAS, SETUP = 2, SETUPS["8b"]


# Tenants under overload: does each get its fair share of promised capacity, and at what cost?

OVERLOAD = 3.0
WINDOW_S = 30.0
WARM_UP_S = 20.0
"""Decaying counters, whose time constants are some seconds, and the queues begin empty."""

BURST_S, SILENCE_S = 3.0, 7.0


class Tenant(NamedTuple):
    """The weight of a tenant's share, its demand over that, and whether it arrives in bursts."""

    weight: float
    demand: float
    bursty: bool = False


GROUPS: dict[str, tuple[Tenant, ...]] = {
    "one greedy": (Tenant(1, 0.5), Tenant(1, 5.5)),
    "weights 1, 1, 2": (Tenant(1, 0.2), Tenant(1, 9.8), Tenant(2, 1.0)),
    "all greedy": (Tenant(1, 2.0), Tenant(1, 4.0), Tenant(2, 3.0)),
    "a burst": (Tenant(1, 0.5, bursty=True), Tenant(1, 3.0), Tenant(2, 4.25)),
    "five": (Tenant(1, 0.2), Tenant(1, 0.6), Tenant(2, 1.0), Tenant(1, 1.5), Tenant(2, 20.0)),
}

SHARE_MAKE = loads.GENERATED["proserve sharegpt"]


def tenants_workload(tenants: Sequence[Tenant], rate: float, seconds: float, seed: int) -> Workload:
    """The requests of all tenants, ``rate`` a second in total."""
    demand = sum(tenant.weight * tenant.demand for tenant in tenants)
    parts = []
    for index, tenant in enumerate(tenants):
        own = rate * tenant.weight * tenant.demand / demand
        part = SHARE_MAKE(SETUP, own, max(2, round(own * seconds)), 10 * seed + index)
        arrivals = tuple(
            arrival._replace(
                arrival_s=_in_bursts(arrival.arrival_s) if tenant.bursty else arrival.arrival_s,
                tenant=index + 1,
                weight=tenant.weight,
            )
            for arrival in part.arrivals
        )
        parts.append(replace(part, arrivals=arrivals))
    return merged("tenants", parts)


def _in_bursts(time_s: float) -> float:
    """The same mean rate, on a clock that runs only in bursts, and faster there."""
    period_s = BURST_S + SILENCE_S
    whole, rest_s = divmod(time_s, period_s)
    return whole * period_s + rest_s * BURST_S / period_s


def measure_shares(
    seed: int, tenants: str, shares: str, replicas: int, seconds: float
) -> Mapping[str, float]:
    """Promised tokens of tenants against weighted max-min. ``error``: mean distance over all
    promised tokens; ``worst``: the largest; ``below``: lowest promised part of a demand within its
    share."""
    group, layout = GROUPS[tenants], systems.colocated(replicas)
    load = tenants_workload(
        group, OVERLOAD * loads.Conditions(SHARE_MAKE, SETUP, layout).full_rate, seconds, seed
    )
    submitted = load
    if shares == "none":
        submitted = replace(load, arrivals=tuple(a._replace(tenant=0) for a in load.arrivals))
    served = System(ROUTER, DEFAULT, ADMISSION, "reject")
    requests = systems.run_cluster(submitted, served, SETUP, layout, seed).result.requests
    arrival_s = np.array([arrival.arrival_s for arrival in load.arrivals])
    owner = np.array([arrival.tenant for arrival in load.arrivals]) - 1
    tokens = np.array([float(a.prompt_tokens + a.output_tokens) for a in load.arrivals])
    promised = ~np.isnan(requests.promised_s)
    met = attained(requests, stages(requests), TPOTMetric.MEAN)
    begin_s = min(WARM_UP_S, seconds / 3)
    counted = (arrival_s >= begin_s) & (arrival_s < seconds)

    def by_tenant(chosen: Flags) -> Floats:
        sums: Floats = np.bincount(owner[chosen], tokens[chosen], len(group)).astype(np.float64)
        return sums

    errors, below = [], []
    weights = np.array([tenant.weight for tenant in group], np.float64)
    window = np.floor((arrival_s - begin_s) / WINDOW_S)
    for number in np.unique(window[counted]):
        here = counted & (window == number)
        wanted, got = by_tenant(here), by_tenant(here & promised)
        fair = np.minimum(wanted, weights * water_level(wanted, weights, float(got.sum())))
        errors.append(np.abs(got - fair) / got.sum())
        modest = (fair >= wanted) & (wanted > 0.0)
        if modest.any():
            below.append(float((got[modest] / wanted[modest]).min()))
    span_s = seconds - begin_s
    return {
        "error": float(np.mean(errors)),
        "worst": float(np.max(errors)),
        "below": float(np.mean(below)) if below else 1.0,
        "tokens_per_s": float(tokens[counted & promised].sum()) / span_s,
        "goodput": float(tokens[counted & met].sum()) / span_s,
        "kept": float(met[counted & promised].mean()),
    }


SHARE_FIGURES = {
    "error": "distance from the share, over all promised tokens",
    "worst": "the largest of any tenant in any window",
    "below": "lowest promised part of the demand of a tenant below its share",
    "kept": "share of the promised requests that met their objective",
}


def _compared(rows: grid.Rows) -> list[str]:
    none, fair = (grid.having(rows, {"shares": on}) for on in ("none", "fair"))
    pairs = [
        (grid.mean(none, name), grid.mean(fair, name))
        for name in (*SHARE_FIGURES, "tokens_per_s", "goodput")
    ]
    both = [f"{before:.3f} -> {after:.3f}" for before, after in pairs[: len(SHARE_FIGURES)]]
    return [*both, *(f"{after / max(before, 1e-9):.3f}" for before, after in pairs[-2:])]


FAIR_SHARES = grid.Experiment(
    "fair_shares",
    "ours; weighted max-min fairness, trunk reservation",
    "Under overload, does each tenant get its fair share of promised capacity, and what does "
    "that cost?",
    setting=f"ProServe's ShareGPT lengths at load {OVERLOAD:g}, to which the demands are scaled "
    f"together. Shares: weighted max-min of the promised tokens of prompt and output, in windows "
    f"of {WINDOW_S:g} s after the first {WARM_UP_S:g} s. What cannot be promised is refused.",
    grids=[
        grid.Product(
            measure_shares,
            {"tenants": grid.first(tuple(GROUPS)), "shares": ("none", "fair")},
            {"replicas": grid.Scaled(1, 4), "seconds": grid.Scaled(6.0, WARM_UP_S + 3 * WINDOW_S)},
        )
    ],
    tables=[
        grid.Lines(
            "Without fair shares -> with them",
            ("tenants",),
            (*SHARE_FIGURES, "promised tokens", "goodput"),
            _compared,
            "; ".join(f"{name}: {words}" for name, words in SHARE_FIGURES.items())
            + "; promised (promised) tokens, goodput: with fair shares over without.",
        )
    ],
)


# Whether refused requests are promised when they retry after exactly ``Retry-After``.

WORKLOADS = ("proserve sharegpt", "proserve azure", "chat and code", "proserve bursty")
AGAIN, GONE, NOT_RESERVED = "retry", "leave", "leave, nothing reserved"
COME_BACKS = {AGAIN: 10, GONE: 0, NOT_RESERVED: 0}
"""Max retries of a refused client, by what clients do."""

WANTED = 0.8
"""Target share of the retries, sent exactly at ``Retry-After``, that are promised."""

MIN_RETURNS = 50
"""A cell with fewer retries, over all seeds, is not judged by that share."""

RETRY_WARM_UP_S = 10.0
"""This start of a run does not count; of a short run, its first third."""


def measure_retries(
    seed: int, workload: loads.Make, load: float, clients: str, span: loads.Span
) -> Mapping[str, float]:
    """The counts of one run."""
    rate = load * loads.Conditions(workload, SETUP, colocated(REPLICAS)).full_rate
    made = workload(SETUP, rate, span.requests(rate), seed)
    lasts_s = made.arrivals[-1].arrival_s
    if clients == NOT_RESERVED:
        # Only new requests of the same API key respect a reservation, and here each request has
        # its own key.
        alone = tuple(each._replace(tenant=key) for key, each in enumerate(made.arrivals))
        made = replace(made, arrivals=alone)
    system = systems.System(ROUTER, DEFAULT, ADMISSION, "reject")
    layout = colocated(REPLICAS, retries=COME_BACKS[clients])
    return retry_counts(
        systems.run_cluster(made, system, SETUP, layout, seed).result.requests, lasts_s
    )


def retry_counts(requests: Requests, lasts_s: float) -> dict[str, float]:
    """Of the retries after the warm-up: ``returns``, ``held`` ones, P95 of ``Retry-After`` in
    seconds; ``promised``: share of all requests in the end; ``goodput`` per second."""
    begin_s = min(RETRY_WARM_UP_S, lasts_s / 3)
    returns = [each for each in requests.retries if begin_s < each.at_s <= lasts_s]
    came_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    promised = ~np.isnan(requests.promised_s)
    kept = promised & attained(requests, stages(requests), TPOTMetric.MEAN)
    inside = (came_s > begin_s) & (came_s <= lasts_s)
    advised_s = [each.retry_after_s for each in returns]
    return {
        "returns": float(len(returns)),
        "held": float(sum(each.promised for each in returns)),
        "retry_after_p95": float(np.percentile(advised_s, 95)) if returns else nan,
        "promised": float(promised.mean()),
        "goodput": float((kept & inside).sum()) / (lasts_s - begin_s),
    }


def _moments(rows: grid.Rows) -> list[str]:
    again = grid.having(rows, {"clients": AGAIN})
    returns, held = (sum(float(row[each]) for row in again) for each in ("returns", "held"))
    holds = "yes" if held >= WANTED * returns else "NO"
    share = f"{held / returns:.3f}" if returns else "-"
    rest = [
        grid.estimate(again, each).shown(2) for each in ("retry_after_p95", "promised", "goodput")
    ]
    return [f"{returns:.0f}", share, holds if returns >= MIN_RETURNS else "-", *rest]


def _costs(rows: grid.Rows) -> list[str]:
    kept, none = (
        grid.mean(grid.having(rows, {"clients": each}), "goodput") for each in (GONE, NOT_RESERVED)
    )
    return [f"{kept:.2f}", f"{none:.2f}", f"{kept / none:.3f}" if none else "-"]


moments = grid.Lines(
    f"All clients retry, and {WANTED:g} of the retries are to be promised",
    ("workload", "load"),
    ("retries", "held", "holds", "retry-after, P95, s", "promised", "goodput, 1/s"),
    _moments,
    f"-: fewer than {MIN_RETURNS} retries. Promised: share of all requests, in the end.",
)
"""How good the retry times are."""

costs = grid.Lines(
    "No client retries: goodput, requests a second",
    ("workload", "load"),
    ("reserved", "not reserved", "ratio"),
    _costs,
)
"""What unused reservations cost."""

RETRY_AFTER = grid.Experiment(
    "retry_after",
    "ours; reservation with backfilling is Lifka 1995",
    "Is a refused request promised when it retries at its Retry-After, and what does the "
    "capacity reserved for it cost?",
    setting=f"{REPLICAS} replicas, default policies; what cannot be promised is refused. {AGAIN}: "
    f"exactly at Retry-After, up to {COME_BACKS[AGAIN]} times, under one id; {GONE}: never, which "
    f"the controller has to learn; {NOT_RESERVED}: the same, each request with its own API key, so "
    "that no new request respects a reservation.",
    grids=[
        grid.Product(
            measure_retries,
            {
                "workload": grid.first({name: loads.GENERATED[name] for name in WORKLOADS}),
                "load": grid.first((0.9, 1.2, 1.5)),
                "clients": tuple(COME_BACKS),
            },
            {"span": grid.Scaled(loads.Span(6.0, 20, 60), loads.Span(60.0, 200, 4_000))},
        )
    ],
    tables=(moments, costs),
)


LEVEL = ClusterConfig().promise_level or 0.99
CELL = ("workload", "setup", "load", "model")
MARGINS, NONE, ORACLE = "margins", "no margins", "oracle"

MIN_PROMISES = 200
"""A cell with fewer promises, over all seeds, is not judged by the share that is kept."""

KEPT_BELOW, GOODPUT_BELOW, OF_ORACLE = 0.01, 0.03, 0.9
"""Tolerances of the share kept and of goodput without margins; required share of the oracle's."""


class Wrong(NamedTuple):
    """How real step times differ from the belief: factors on fixed cost and tokens, log deviation,
    and a factor on one replica in the middle third."""

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
    workload: loads.Make,
    setup: str,
    load: float,
    model: Wrong | None,
    system: float | None,
    span: loads.Span,
) -> Mapping[str, float]:
    """The counts of one run; ``system`` is the level of the margins, without a wrong model an
    oracle."""
    own = SETUPS[setup]
    rate = load * loads.full_load_rate(workload, own)
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
    """Counts of requests: ``kept``: promised and attained; ``attained``: promised or not;
    ``late_p95``: lateness of late promised first tokens over the objective."""
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
    of: Mapping[str, grid.Rows]

    def sum(self, system: str, figure: str) -> float:
        """The sum of a count."""
        return sum(float(row[figure]) for row in self.of[system])

    def share(self, system: str, figure: str, of: str = "requests", other: str = "") -> float:
        """One count over another, of ``other`` if that is given; 1 if that is 0."""
        whole = self.sum(other or system, of)
        return self.sum(system, figure) / whole if whole else 1.0


def sums_of(rows: grid.Rows) -> list[Sums]:
    """Every cell of a wrong model, with the oracle of its workload."""
    oracles = grid.grouped([row for row in rows if row["system"] == ORACLE], *CELL[:3])
    others = grid.grouped([row for row in rows if row["system"] != ORACLE], *CELL)
    found = []
    for labels, own in others.items():
        systems = {str(name): list(part) for (name,), part in grid.grouped(own, "system").items()}
        found.append(Sums(tuple(map(grid.shown, labels)), {**systems, ORACLE: oracles[labels[:3]]}))
    return found


_SHARES = (("promised",), ("kept", "promised"), ("kept", "kept", ORACLE), ("attained",))


def by_model(rows: grid.Rows) -> Table:
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
    checks: list[tuple[str, Mapping[tuple[str, ...], float], float, float]] = [
        (f"kept, cells of {MIN_PROMISES} promises or more", kept, least, -np.inf),
        ("goodput over that without margins", to_none, 1 - GOODPUT_BELOW, 1.0),
        ("goodput over the oracle's", to_oracle, OF_ORACLE, -np.inf),
        ("attained, minus that without margins", points, -np.inf, 0.0),
    ]
    lines = []
    for words, values, floor, mean_floor in (check for check in checks if check[1]):
        middle, cell = fmean(values.values()), min(values, key=lambda at: values[at])
        below = sum(value < floor for value in values.values())
        named = (("each", floor), ("mean", mean_floor))
        wanted = ", ".join(f"{what} >= {least:.3f}" for what, least in named if least > -np.inf)
        worst = f"{values[cell]:.3f} ({', '.join(cell)})"
        held = "yes" if not below and middle >= mean_floor else "NO"
        lines.append((words, wanted, f"{middle:.4f}", worst, f"{below} of {len(values)}", held))
    return Table(
        f"Targets at level {LEVEL:g}",
        ("figure", "wanted", "mean", "worst cell", "cells below", "holds"),
        lines,
    )


AXES: grid.Axes = {
    "workload": lambda plan: grid.few(loads.GENERATED, plan) | loads.recorded(plan.traces),
    "setup": grid.first(("8b", "70b-short")),
    "load": grid.first((0.9, 1.3)),
}
SYSTEMS = {NONE: None, MARGINS: LEVEL}
SPAN = {"span": grid.Scaled(loads.QUICK, loads.Span(45.0, 150, 500))}

EXPERIMENT = grid.Experiment(
    "promises",
    "ours; adaptive conformal inference is Gibbs and Candès 2021",
    "Are promises kept where the engine's latency model is wrong, and what do the margins cost?",
    setting=f"{REPLICAS} replicas behind the default router and admission. all x 1.3: steps take "
    "1.3 times the predicted time at the start; fixed x 1.5: their fixed part 1.5 times; noise, "
    "drift: 15 % noise, and one replica is 1.3 times slower in the middle third. The oracle has an "
    "exact model and known lengths, and promises exactly the requests that it keeps.",
    grids=[
        grid.Product(measure, {**AXES, "model": {"-": None}, "system": {ORACLE: None}}, SPAN),
        grid.Product(measure, {**AXES, "model": WRONG, "system": SYSTEMS}, SPAN),
    ],
    tables=(lambda rows: targets(sums_of(rows)), by_model),
)
