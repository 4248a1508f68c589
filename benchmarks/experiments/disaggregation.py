"""Disaggregation against co-location, its ratios (SLOs-Serve Fig. 4, appendix A), changing
roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from sluice.benchmarks.experiments import grid, loads, systems
from sluice.benchmarks.report import Table
from sluice.scheduling.autoscaling.role_shares import PoolDemand, RoleShares
from sluice.simulation.capacity import pool_demand
from sluice.simulation.generators import Poisson
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.settings import slos_serve
from sluice.simulation.workload import Workload, merged, with_objectives

SETUP = systems.SETUPS["8b"]
LOCAL = systems.DEFAULT.policy
STRICT = systems.Contender(f"{LOCAL}, last token", LOCAL, {"anchor": "last_token"})
"""Its TPOT counts from each token to the next, so that no window of tokens is late."""

METRICS = {
    "attainment_mean": "SLO attainment, mean TPOT",
    "attainment_window": "SLO attainment, TPOT by 10-token windows",
    "split": "share of the requests that P/D pairs served",
}
TIGHT_TPOT_S = 0.015
TIGHT = f"coder, {1e3 * TIGHT_TPOT_S:g} ms"
"""A workload of our own: the TPOT leaves little time for prefill beside a step's fixed time."""

SPAN = loads.Span(45.0, 100, 600)
"""Several times a request's life: a short run favours policies that delay decodes."""

SETTING = (
    "SLOs-Serve's objectives, Poisson arrivals. Transfer: 2 ms to notify the decode replica, 1 ms "
    "and 5 us per prompt token to fetch the KV. "
)


def with_tpot(make: loads.Make, tpot_s: float, *drawn: Any) -> Workload:
    """The workload of ``make`` with another TPOT."""
    words = f"TPOT {1e3 * tpot_s:g} ms."
    return with_objectives(
        make(*drawn), lambda arrival: structs.replace(arrival.slo, tpot_s=tpot_s), words
    )


def of_scenario(scenario: str) -> loads.Make:
    """A scenario of SLOs-Serve without its bursts, or :data:`TIGHT`."""
    if scenario == TIGHT:
        return partial(with_tpot, of_scenario("coder"), TIGHT_TPOT_S)
    return loads.generated(slos_serve, scenario, arrivals=Poisson)


def split_in(prefillers: int, decoders: int, mixed: int = 0) -> systems.Layout:
    """Prefill and decode replicas, beside ``mixed`` co-located ones."""
    name = f"{prefillers}P {decoders}D"
    return systems.of_roles(
        f"{mixed} both + {name}" if mixed else name, mixed, prefillers, decoders
    )


def demand_of(scenario: str) -> PoolDemand:
    """A workload's demand by the formula, on the experiments' replicas."""
    return pool_demand(
        of_scenario(scenario)(SETUP, 1.0, loads.SAMPLE, 0), SETUP.truth, SETUP.engine
    )


def formula(rows: grid.Rows) -> Table:
    """The ratios by the formula."""
    lines = []
    for name in (str(scenario) for (scenario,) in grid.grouped(rows, "workload")):
        demand = demand_of(name)
        rates = demand.best_goodput, loads.full_load_rate(of_scenario(name), SETUP)
        lines.append((name, f"{demand.ratio:.2f}", *(f"{rate:.2f}" for rate in rates)))
    return Table(
        "The formula (SLOs-Serve appendix A) with this setup's step times",
        ("workload", "prefill per decode", "requests/s of a replica", "load 1, requests/s"),
        lines,
    )


FOUR = (systems.colocated(4), split_in(3, 1), split_in(2, 2), split_in(1, 3))


def _side_by_side(scenarios: tuple[str, ...], *at: float) -> loads.Sweep:
    return loads.Sweep(
        workloads=loads.workloads(scenarios, of_scenario),
        layouts=(*FOUR, split_in(1, 1, mixed=2)),
        loads=at,
        kinds=(
            systems.System(systems.ROUTER, systems.DEFAULT),
            systems.System(systems.ROUTER, STRICT),
        ),
        span=SPAN,
    )


LAYOUTS = grid.Experiment(
    "disaggregation",
    "ours; SLOs-Serve §2.3",
    "Do separate prefill and decode replicas serve more than as many co-located ones?",
    setting=f"{SETTING}{TIGHT}: leaves 6 ms of a step beside its fixed time.",
    grids=[
        _side_by_side(("chatbot", "coder", "mixed"), 0.6, 0.9),
        _side_by_side((TIGHT,), 0.6, 0.9, 1.4),
    ],
    tables=[
        *(
            table
            for policy in (LOCAL, STRICT.label)
            for table in grid.pivots(
                METRICS,
                *(("workload", "load"), "layout"),
                title=f"{{}}; {policy}",
                where={"policy": policy},
            )
        ),
        formula,
    ],
)

# Ratios.

RATIOS = (split_in(1, 1), split_in(2, 1), split_in(1, 2))
EVEN = RATIOS[0].name
RATE = "rate_0.9"
DISTSERVE = systems.System("least_tokens", systems.Contender("fcfs + least_tokens", "fcfs"))
"""First come, first served on both sides; the prefill replica with the shortest queue."""

OURS = systems.System(systems.ROUTER, STRICT._replace(label=f"{STRICT.label} + {systems.ROUTER}"))


def over_even(rows: grid.Rows) -> grid.Rows:
    """Capacity over that of an even split."""
    found = []
    for own in grid.grouped(rows, "workload", "policy", "seed").values():
        even = sum(float(row[RATE]) for row in grid.having(own, {"layout": EVEN}))
        found += [{**row, "times": float(row[RATE]) / max(even, 1e-9)} for row in own]
    return found


def _by_formula(rows: grid.Rows) -> Sequence[str]:
    demand = demand_of(str(rows[0]["workload"]))
    rates = {
        str(name): grid.mean(own, RATE) for (name,), own in grid.grouped(rows, "layout").items()
    }
    best = max((each.name for each in RATIOS if each.name in rates), key=lambda name: rates[name])
    goodputs = [demand.goodput(of.cluster.prefillers, of.cluster.decoders) for of in RATIOS]
    return f"{demand.ratio:.2f}", *(f"{each / goodputs[0]:.2f}" for each in goodputs), best


RATIO = grid.Experiment(
    "disaggregation_ratio",
    "SLOs-Serve Fig. 4 and appendix A",
    "Which ratio of prefill to decode replicas is right for which workload?",
    seeds=1,
    setting=f"{SETTING}TPOT by 10-token windows. Capacity: 90 % attain, within 7 %. DistServe: "
    "first come, first served on both sides, routed to the shortest queue.",
    grids=[
        loads.Sweep(
            workloads=loads.workloads(("chatbot", "coder", "reasoning"), of_scenario),
            layouts=(*RATIOS, systems.colocated(3)),
            kinds=(DISTSERVE, OURS),
            span=SPAN,
            spans={"reasoning": loads.Span(240.0, 20, 100)},
            loads=(loads.Search("attainment_window", (0.9,), 0.15, 1.35, 5),),
        )
    ],
    derive=over_even,
    tables=[
        *grid.pivots(
            {
                "times": "Fig. 4: capacity over that of an even split",
                RATE: "Capacity per replica, requests/s",
            },
            *(("workload", "policy"), "layout", 2),
        ),
        grid.Lines(
            "The same by the formula (SLOs-Serve appendix A), and the best that was measured",
            ("workload",),
            ("prefill per decode", *(layout.name for layout in RATIOS), "best measured"),
            _by_formula,
        ),
    ],
)

# Roles that follow the load.

FLEETS: dict[str, tuple[systems.Layout, RoleShares | None]] = {
    **{layout.name: (layout, None) for layout in FOUR},
    "elastic": (FOUR[0], RoleShares()),
}
"""The replicas at the start, and how their roles change; ``None``: not at all."""


def day(
    seed: int,
    tpot: tuple[float, float],
    fleet: tuple[systems.Layout, RoleShares | None],
    parts: Sequence[loads.Make],
    seconds: float,
) -> Mapping[str, float]:
    """The figures of a day of ``parts``, of ``seconds`` each, at a TPOT and a load."""
    (tpot_s, load), (layout, roles) = tpot, fleet
    made = []
    for number, part in enumerate(parts):
        make = partial(with_tpot, part, tpot_s)
        rate = load * loads.Conditions(make, SETUP, layout).full_rate
        own = make(SETUP, rate, round(rate * seconds), seed)
        later = (a._replace(arrival_s=a.arrival_s + number * seconds) for a in own.arrivals)
        made.append(replace(own, arrivals=tuple(later)))
    served = systems.System(systems.ROUTER, systems.DEFAULT, systems.ADMISSION)
    done = systems.run_cluster(merged("a day", made), served, SETUP, layout, seed, roles=roles)
    requests = done.result.requests
    met = attained(requests, stages(requests), TPOTMetric.MEAN)
    ends = np.cumsum([len(own) for own in made])[:-1]
    by_part = {f"part {n}": own.mean() for n, own in enumerate(np.split(met, ends), 1)}
    counts = [[size.replicas for size in own] for own in done.result.sizes.values()]
    changes = sum(np.abs(np.diff(own)).sum() for own in counts) / 2
    return {**systems.cluster_figures(done), **by_part, "changes": float(changes)}


def _parts(plan: grid.Plan) -> Sequence[loads.Make]:
    traces = loads.recorded_stretched(plan.traces)
    return [*traces.values()] or [of_scenario(name) for name in ("coder", "chatbot", "summarizer")]


ELASTIC = grid.Experiment(
    "elastic_roles",
    "ours; ProServe appendix A",
    "Do roles that follow the load beat the best fixed split?",
    seeds=1,
    setting=f"{SETTING}A third of the day each: the traces by name, stretched, or coder, chatbot "
    "and summarizer. 4 replicas behind the default router and admission; elastic: mixed at first.",
    grids=[
        grid.Product(
            day,
            {
                "tpot": grid.first({"15 ms": (0.015, 1.0), "50 ms": (0.05, 0.9)}),
                "fleet": FLEETS,
            },
            {"parts": _parts, "seconds": grid.Scaled(10.0, 150.0)},
        )
    ],
    tables=[
        grid.means(
            "A day by fleet",
            ("tpot", "fleet"),
            {
                "attainment_mean": ("attainment", 4),
                "tdg": ("TDG ratio", 4),
                **{f"part {number}": (f"part {number}", 4) for number in (1, 2, 3)},
                "changes": ("role changes", 1),
            },
        )
    ],
)
