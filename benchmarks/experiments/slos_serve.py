"""SLOs-Serve: Fig. 9 (capacity), 13 (scaling with replicas), 14 (ablation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sluice.benchmarks.experiments.base import Cell, Experiment, Findings, Plan, Row, grouped, pivot
from sluice.benchmarks.experiments.capacity import CAPACITY_WORDS, greatest_loads
from sluice.benchmarks.experiments.engines import NOISE, SETUPS, Contender, Run, Setup, figures
from sluice.benchmarks.experiments.engines import run as run_engine
from sluice.benchmarks.experiments.loads import (
    Span,
    alone_s,
    full_load_rate,
    profiled_budget,
)
from sluice.scheduling.batching import BatchPolicy, make_policy
from sluice.scheduling.length import OracleLengths
from sluice.scheduling.roles import Role
from sluice.scheduling.routing import make_policy as make_router
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig, Speculation
from sluice.simulation.run import HEADROOM
from sluice.simulation.truth import Belief, Truth
from sluice.simulation.workload import Workload
from sluice.simulation.workloads.settings import SLOS_SERVE_SCENARIOS, TIGHT_TPOT_S, slos_serve

SHARES = (0.9, 0.98)
FIGURE = "attainment_window"
ALPHA = 0.7
DRAFT_S = 0.0005
"""A draft step of a 125M-parameter model on 2 TB/s takes some 0.2 ms; this value adds overhead."""

SETTING = {
    "TPOT": "the largest mean over 10 tokens, of every stage",
    "Arrivals": "generated: Poisson, or bursts for coder and tools with the Azure code trace's "
    "burst lengths (the paper replays the Azure traces); a rate is reached by generating at it",
    "Objectives and priorities": "SLOs-Serve Tables 1 and 3: TTFT 3 or 5 times the idle engine's, "
    "at least 0.2 s; TPOT 50 or 100 ms; one priority",
    "Latency": "setup 8b of benchmarks/experiments/engines.py in place of OPT-7B to 30B on A100; "
    "nothing ran on an accelerator",
    "Output lengths": "known to every policy, as in the paper",
    "Capacity": CAPACITY_WORDS,
    "Not repeated": "DistServe and larger models",
}

OURS = Contender("deadline_triage", "deadline_triage", {"anchor": "last_token"})


def _sarathi(setup: Setup) -> Contender:
    budget = profiled_budget(setup, TIGHT_TPOT_S)
    return Contender("sarathi", "sarathi", {"token_budget": budget})


def _contenders(setup: Setup) -> list[Contender]:
    return [
        Contender("fcfs", "fcfs"),
        _sarathi(setup),
        Contender("fairbatching", "fairbatching", {"anchor": "last_token"}),
        Contender("slos_serve", "slos_serve"),
        OURS,
    ]


def _span(plan: Plan, scenario: str) -> Span:
    if scenario == "reasoning":
        # A request alone takes minutes.
        return plan.pick(Span(1.0, 3, 3), Span(120.0, 30, 60), Span(600.0, 100, 400))
    if scenario in ("coder", "tools"):
        # Some bursts, which come once a minute.
        return plan.pick(Span(3.0, 10, 20), Span(300.0, 100, 600), Span(900.0, 300, 4_000))
    return plan.pick(Span(3.0, 10, 20), Span(60.0, 100, 600), Span(300.0, 300, 4_000))


Serve = Callable[[Workload, int], Run]
"""Runs a workload with a seed."""


def capacity(
    scenario: str, setup: Setup, span: Span, replicas: int, serve: Serve, seed: int
) -> Mapping[str, float]:
    """The highest rates at which 90 % and 98 % of the requests attain, per replica."""
    full = full_load_rate(_generated(scenario), setup)

    def attainment(load: float) -> float:
        rate = load * full * replicas
        requests = span.requests(load * full) * replicas
        workload = slos_serve(scenario, rate, requests, seed, alone_s(setup.truth))
        return figures(serve(workload, seed))[FIGURE]

    found = greatest_loads(attainment, SHARES)
    return {f"rate_{share:g}": load * full for share, load in found.items()}


def _generated(scenario: str) -> Callable[[Setup, float, int, int], Workload]:
    def make(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
        return slos_serve(scenario, rate, requests, seed, alone_s(setup.truth))

    return make


def _alone(setup: Setup, contender: Contender, workload: Workload, seed: int) -> Run:
    return run_engine(workload, contender, setup, seed, oracle=True)


def capacity_cells(plan: Plan) -> list[Cell]:
    """Scenarios x policies on one engine."""
    setup = SETUPS["8b"]
    return [
        Cell(
            {"scenario": scenario, "policy": contender.label},
            partial(
                capacity,
                scenario,
                setup,
                _span(plan, scenario),
                1,
                partial(_alone, setup, contender),
            ),
        )
        for scenario in plan.pick(("chatbot",), SLOS_SERVE_SCENARIOS, SLOS_SERVE_SCENARIOS)
        for contender in _contenders(setup)
    ]


def capacity_findings(rows: Sequence[Row]) -> Findings:
    """Fig. 9: requests per second."""
    return Findings(
        [
            pivot(
                f"Fig. 9: capacity at {share * 100:g} % attainment, requests/s",
                rows,
                ["scenario"],
                "policy",
                f"rate_{share:g}",
                2,
            )
            for share in SHARES
        ]
    )


def _cluster(
    setup: Setup, policy: str, router: str, replicas: int, workload: Workload, seed: int
) -> Run:
    def make_batch(role: Role) -> BatchPolicy:
        return make_policy(policy)

    lengths = (arrival.output_tokens for arrival in workload.arrivals)
    result = simulate_cluster(
        workload,
        make_batch,
        make_router(router),
        Truth(setup.truth, NOISE),
        Belief(setup.believed.with_headroom(HEADROOM)),
        setup.engine,
        ClusterConfig(replicas=replicas),
        seed=seed,
        predictor=OracleLengths(lengths, 0.0, seed),
    )
    return Run(result)


def scaling_cells(plan: Plan) -> list[Cell]:
    """Scenarios x replicas x routers; `slos_serve` forwards declined requests (Fig. 7)."""
    setup = SETUPS["8b"]
    systems = (
        ("fcfs", "round_robin"),
        ("slos_serve", "round_robin"),
        ("slos_serve", "slos_serve"),
        ("slos_serve", "pab"),
    )
    return [
        Cell(
            {"scenario": scenario, "system": f"{policy}, {router}", "replicas": float(replicas)},
            partial(
                capacity,
                scenario,
                setup,
                _span(plan, scenario),
                replicas,
                partial(_cluster, setup, policy, router, replicas),
            ),
        )
        for scenario in plan.pick(("chatbot",), ("chatbot", "coder"), SLOS_SERVE_SCENARIOS[:5])
        for policy, router in systems
        for replicas in plan.pick((1, 2), (1, 2, 4), (1, 2, 3, 4))
    ]


def scaling_findings(rows: Sequence[Row]) -> Findings:
    """Fig. 13: total capacity over that of one replica."""
    relative: list[Row] = []
    for own in grouped(rows, "scenario", "system", "seed").values():
        one = next(float(row["rate_0.9"]) for row in own if row["replicas"] == 1)
        relative += [
            {**row, "times": float(row["rate_0.9"]) * float(row["replicas"]) / max(one, 1e-9)}
            for row in own
        ]
    down = ["scenario", "system"]
    return Findings(
        [
            pivot(
                "Fig. 13: capacity of all replicas at 90 % over that of one",
                relative,
                down,
                "replicas",
                "times",
                2,
            ),
            pivot("Capacity per replica, requests/s", rows, down, "replicas", "rate_0.9", 2),
        ]
    )


def drafting(setup: Setup, alpha: float, length: int, draft_s: float) -> Setup:
    """The setup with up to ``length`` drafted tokens per decode, right with probability
    ``alpha``."""
    speculation = Speculation(alpha=alpha, length=length, draft_s=draft_s)
    return setup._replace(engine=setup.engine.model_copy(update={"speculation": speculation}))


def ablation_cells(plan: Plan) -> list[Cell]:
    """The optimisations removed one after the other."""
    setup = SETUPS["8b"]
    sarathi = _sarathi(setup)
    static = profiled_budget(setup, TIGHT_TPOT_S)
    variants = [
        ("adaptive drafts", Contender("", "slos_serve"), drafting(setup, ALPHA, 9, DRAFT_S)),
        (
            "3 drafts",
            Contender("", "slos_serve", all_drafts=True),
            drafting(setup, ALPHA, 3, DRAFT_S),
        ),
        ("slos_serve", Contender("", "slos_serve"), setup),
        ("static batch", Contender("", "slos_serve", batch_tokens=static), setup),
        ("no admission", Contender("", "fairbatching", {"anchor": "last_token"}), setup),
        ("neither (sarathi)", sarathi, setup),
    ]
    return [
        Cell(
            {"scenario": scenario, "variant": name},
            partial(
                capacity, scenario, setup, _span(plan, scenario), 1, partial(_alone, own, contender)
            ),
        )
        for scenario in plan.pick(("chatbot",), ("chatbot", "coder", "summarizer"), ("mixed",))
        for name, contender, own in variants
    ]


def ablation_findings(rows: Sequence[Row]) -> Findings:
    """Fig. 14: capacity without each optimisation."""
    note = (
        f"Drafts: acceptance {ALPHA:g}, {DRAFT_S * 1e3:g} ms for each drafted token of the "
        "longest; adaptive is the paper's, 3 is an engine's own fixed length. Static batch: the "
        "engine's token limit is Sarathi's budget. No "
        "admission: earliest deadlines in a time budget, by FairBatching with last-token deadlines."
    )
    title = "Fig. 14: capacity at 90 % attainment, requests/s"
    return Findings([pivot(title, rows, ["scenario"], "variant", "rate_0.9", 2, note)])


CAPACITY = Experiment(
    name="slos_serve_capacity",
    source="SLOs-Serve Fig. 9",
    question="Which rate does an engine serve with 90 % and 98 % of the requests in time?",
    setting=SETTING,
    seeds=3,
    cells=capacity_cells,
    findings=capacity_findings,
)

SCALING = Experiment(
    name="slos_serve_scaling",
    source="SLOs-Serve Fig. 13",
    question="Does capacity grow more than in proportion to the replicas?",
    setting=SETTING,
    seeds=3,
    cells=scaling_cells,
    findings=scaling_findings,
)

ABLATION = Experiment(
    name="slos_serve_ablation",
    source="SLOs-Serve Fig. 14; the text of §6.3 is not in our copy, the variants are our reading",
    question="What does each optimisation of SLOs-Serve add to capacity?",
    setting=SETTING,
    seeds=4,
    cells=ablation_cells,
    findings=ablation_findings,
)
