"""Prefill/decode disaggregation: against co-located replicas, and in which ratio (SLOs-Serve Fig. 4
and appendix A)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from sluice.benchmarks.experiments.capacity import Loads
from sluice.benchmarks.experiments.grid import (
    Cell,
    Curves,
    Experiment,
    Pivot,
    Plan,
    Rows,
    Value,
    by_label,
    estimate,
    grouped,
)
from sluice.benchmarks.experiments.loads import (
    CLUSTER_WORDS,
    SAMPLE,
    Make,
    Span,
    alone_s,
    capacity,
    full_load_rate,
    sweep,
)
from sluice.benchmarks.experiments.systems import (
    DEFAULT,
    ROUTER,
    SETUPS,
    Contender,
    Layout,
    Setup,
    System,
    colocated,
    of_roles,
)
from sluice.scheduling.fleet.pool_ratio import PoolDemand
from sluice.simulation.capacity import pool_demand
from sluice.simulation.planning.plots import Table
from sluice.simulation.workload import Workload, with_objectives
from sluice.simulation.workloads.arrivals import Poisson
from sluice.simulation.workloads.settings import slos_serve

SETUP = SETUPS["8b"]

LOCAL = DEFAULT.policy
STRICT = Contender(f"{LOCAL}, last token", LOCAL, {"anchor": "last_token"})
"""Its pace counts from each token to the next, so that no window of tokens is late: shows what it
attains at the same objectives when TPOT is judged by windows."""

METRICS = {
    "attainment_mean": "SLO attainment, mean TPOT",
    "attainment_window": "SLO attainment, TPOT by 10-token windows",
    "tdg": "TDG ratio",
    "goodput": "requests/s in time (mean TPOT) of a replica",
    "split": "share of the requests that P/D pairs served",
}

DISTSERVE = System("least_tokens", Contender("fcfs", "fcfs"))
"""First come, first served on both sides; the prefill replica with the shortest queue."""

SHARE = 0.9
TIGHT_TPOT_S = 0.015
TIGHT = f"coder, {1e3 * TIGHT_TPOT_S:g} ms"
"""A workload of our own: the TPOT leaves little time for prefill beside a step's fixed time."""

LOADS = Loads(0.15, 1.35, 5)

SETTING = {
    "TPOT": "as each table says",
    "Arrivals": "generated, Poisson for every workload, so that bursts do not hide the ratio; "
    f"{CLUSTER_WORDS}",
    "Objectives and priorities": "SLOs-Serve Tables 1 and 3: TTFT 3 or 5 times the idle engine's, "
    "at least 0.2 s; TPOT 50 or 100 ms; one priority",
    "Latency": "setup 8b of benchmarks/experiments/systems.py; nothing ran on an accelerator",
    "Transfer": "2 ms to notify the decode replica, 1 ms and 5 us per prompt token to fetch the "
    "KV; the decode replica recomputes the last prompt token and generates every output token",
}


def _poisson(scenario: str, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    alone = alone_s(setup.truth)
    return slos_serve(scenario, rate, requests, seed, alone, arrivals=Poisson)


def _tight(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    made = _poisson("coder", setup, rate, requests, seed)
    words = f"TPOT {1e3 * TIGHT_TPOT_S:g} ms."
    return with_objectives(made, lambda arrival: replace(arrival.slo, tpot_s=TIGHT_TPOT_S), words)


def of_scenario(scenario: str) -> Make:
    """A scenario of SLOs-Serve without its bursts, or :data:`TIGHT`."""
    return _tight if scenario == TIGHT else partial(_poisson, scenario)


def _span(plan: Plan, scenario: str) -> Span:
    """Several times as long as a request lasts: before that, the number of decodes still grows, and
    a short run favours policies that delay decodes."""
    if scenario == "reasoning":
        return plan.pick(Span(1.0, 3, 3), Span(240.0, 20, 100), Span(900.0, 100, 400))
    return plan.pick(Span(1.0, 5, 8), Span(45.0, 100, 600), Span(180.0, 100, 4_000))


def ratio_name(prefillers: int, decoders: int) -> str:
    """A layout of two roles, as shown in tables."""
    return f"{prefillers}P {decoders}D"


def split_in(prefillers: int, decoders: int, mixed: int = 0) -> Layout:
    """Prefill and decode replicas, beside ``mixed`` co-located ones."""
    name = ratio_name(prefillers, decoders)
    return of_roles(f"{mixed} both + {name}" if mixed else name, mixed, prefillers, decoders)


def demand_of(make: Make) -> PoolDemand:
    """A workload's demand by the formula, on the experiments' replicas."""
    return pool_demand(make(SETUP, 1.0, SAMPLE, 0), SETUP.truth, SETUP.engine)


def layout_cells(plan: Plan) -> list[Cell]:
    """Workloads x layouts of the same size x loads x policies."""
    size = plan.pick(4, 4, 8)
    half = size // 2
    splits = [(size - own, own) for own in plan.pick((1,), (1, 2, 3), (1, 2, 3, 4, 5, 6))]
    layouts = [colocated(size), *(split_in(*own) for own in splits)]
    layouts.append(split_in(half - half // 2, half // 2, mixed=half))
    systems = [System(ROUTER, local) for local in plan.pick((DEFAULT,), (DEFAULT, STRICT))]
    loads = plan.pick([0.6], [0.6, 0.9], [0.4, 0.6, 0.8, 1.0, 1.2])
    scenarios = plan.pick(
        ("chatbot",),
        ("chatbot", "coder", "mixed", TIGHT),
        ("chatbot", "coder", "mixed", TIGHT, "summarizer"),
    )
    grid = []
    for scenario in scenarios:
        span = _span(plan, scenario)
        make = of_scenario(scenario)
        own_loads = [*loads, 1.4] if scenario == TIGHT else loads
        for layout in layouts:
            labels: dict[str, Value] = {"workload": scenario, "layout": layout.name}
            grid += sweep(labels, make, SETUP, own_loads, systems, span, layout)
    return grid


def formula(rows: Rows) -> Table:
    """The ratios by the formula."""
    lines = []
    for (scenario,) in grouped(rows, "workload"):
        make = of_scenario(str(scenario))
        demand = demand_of(make)
        lines.append(
            (
                *(str(scenario), f"{demand.ratio:.2f}", ratio_name(*demand.split(8))),
                *(f"{demand.best_goodput:.2f}", f"{full_load_rate(make, SETUP):.2f}"),
            )
        )
    return Table(
        "The formula (SLOs-Serve appendix A) with this setup's step times",
        ("workload", "prefill per decode", "of 8", "requests/s of a replica", "load 1, requests/s"),
        lines,
    )


def _capacity(
    plan: Plan, scenario: str, system: System, layout: Layout
) -> Callable[[int], Mapping[str, float]]:
    make, span = of_scenario(scenario), _span(plan, scenario)
    return partial(
        capacity, make, SETUP, system, span, "attainment_window", loads=LOADS, layout=layout
    )


def ratio_cells(plan: Plan) -> list[Cell]:
    """Workloads x ratios x systems."""
    layouts = [split_in(*own) for own in plan.pick(RATIOS[:1], RATIOS, RATIOS)]
    systems = [DISTSERVE, System(ROUTER, STRICT)]
    return [
        Cell(
            {
                "workload": scenario,
                "policy": f"{system.local.label} + {system.router}",
                "layout": layout.name,
            },
            _capacity(plan, scenario, system, layout),
        )
        for scenario in plan.pick(SCENARIOS[:1], SCENARIOS[:3], SCENARIOS)
        for system in plan.pick(systems[:1], systems, systems)
        for layout in [*layouts, colocated(layouts[-1].size)]
    ]


RATIOS = ((1, 1), (2, 1), (1, 2))
SCENARIOS = ("chatbot", "coder", "reasoning", "summarizer")
"""The first two are those of the figure."""


def over_even(rows: Rows) -> Rows:
    """Capacity over that of an even split."""
    found = []
    for own in grouped(rows, "workload", "policy", "seed").values():
        even = next((float(row["rate_0.9"]) for row in own if _is_even(str(row["layout"]))), 0.0)
        found += [{**row, "times": float(row["rate_0.9"]) / max(even, 1e-9)} for row in own]
    return found


def formula_goodput(rows: Rows) -> Table:
    """The same by the formula, and the best that was measured."""
    layouts = [str(name) for (name,) in grouped(rows, "layout") if "P" in str(name)]
    lines = []
    for (scenario,), own in grouped(rows, "workload").items():
        demand = demand_of(of_scenario(str(scenario)))
        goodputs = {name: demand.goodput(*_counts(name)) for name in layouts}
        even = next(goodputs[name] for name in layouts if _is_even(name))
        rates = {
            name: estimate(cell, "rate_0.9").mean for name, cell in by_label(own, "layout").items()
        }
        best = max(layouts, key=lambda name: rates[name])
        shown = [f"{goodputs[name] / even:.2f}" for name in layouts]
        lines.append((str(scenario), f"{demand.ratio:.2f}", *shown, best))
    return Table(
        "The same by the formula (SLOs-Serve appendix A), and the best that was measured",
        ("workload", "prefill per decode", *layouts, "best measured"),
        lines,
    )


def _counts(name: str) -> tuple[int, int]:
    prefillers, decoders = (int(part[:-1]) for part in name.split())
    return prefillers, decoders


def _is_even(name: str) -> bool:
    return "P" in name and len(set(_counts(name))) == 1


LAYOUTS = Experiment(
    name="disaggregation",
    source="ours; SLOs-Serve §2.3",
    question="Do separate prefill and decode replicas serve more than as many co-located ones?",
    setting={
        **SETTING,
        "Replicas": "4, behind the default router",
        TIGHT: "the coder's requests with a TPOT that leaves 6 ms of a step beside its fixed time",
    },
    seeds=2,
    cells=layout_cells,
    tables=(
        *(
            Pivot(
                f"{words}; {policy}",
                *(figure, ("workload", "load"), "layout"),
                where={"policy": policy},
            )
            for policy in (LOCAL, STRICT.label)
            for figure, words in METRICS.items()
        ),
        formula,
    ),
    charts=[
        Curves(words, figure, words, "layout", where={"policy": LOCAL})
        for figure, words in METRICS.items()
    ],
)

RATIO = Experiment(
    name="disaggregation_ratio",
    source="SLOs-Serve Fig. 4 and appendix A",
    question="Which ratio of prefill to decode replicas is right for which workload?",
    setting={
        **SETTING,
        "TPOT": "the largest mean over 10 tokens",
        "Capacity": f"{SHARE:.0%} of the requests attain; by halving the logarithm of loads from "
        f"{LOADS.least:g} to {LOADS.most:g} {LOADS.steps} times, within 7 %",
        "Replicas": "2 or 3, as in the paper, which has OPT-13B on H100; 3 co-located",
        "DistServe": "first come, first served on both sides, routed to the shortest queue",
    },
    seeds=1,
    cells=ratio_cells,
    derive=over_even,
    tables=(
        Pivot(
            "Fig. 4: capacity over that of an even split",
            *("times", ("workload", "policy"), "layout", 2),
        ),
        Pivot(
            "Capacity per replica, requests/s",
            *("rate_0.9", ("workload", "policy"), "layout", 2),
        ),
        formula_goodput,
    ),
)
