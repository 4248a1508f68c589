"""SLOs-Serve: Fig. 9 (capacity), 13 (scaling with replicas), 14 (ablation); and how many drafted
tokens to check (§3.2.3): the policies' choice against fixed numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from sluice.benchmarks.experiments.capacity import ALL_LOADS, CAPACITY_WORDS, Loads, greatest_loads
from sluice.benchmarks.experiments.grid import Cell, Experiment, Pivot, Plan, Rows, grouped
from sluice.benchmarks.experiments.loads import (
    Make,
    Span,
    alone_s,
    capacity,
    full_load_rate,
    profiled_budget,
)
from sluice.benchmarks.experiments.systems import (
    DEFAULT,
    SETUPS,
    Contender,
    Kind,
    Layout,
    Setup,
    System,
    colocated,
    figures,
    run,
)
from sluice.simulation.config import Speculation
from sluice.simulation.workload import Workload
from sluice.simulation.workloads.settings import SLOS_SERVE_SCENARIOS, TIGHT_TPOT_S, slos_serve

SETUP = SETUPS["8b"]
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
    "Latency": "setup 8b of benchmarks/experiments/systems.py in place of OPT-7B to 30B on A100; "
    "nothing ran on an accelerator",
    "Output lengths": "known to every policy, as in the paper",
    "Capacity": CAPACITY_WORDS,
    "Not repeated": "DistServe and larger models",
}

SARATHI_TOKENS = profiled_budget(SETUP, TIGHT_TPOT_S)
FCFS = Contender("fcfs", "fcfs")
SARATHI = Contender("sarathi", "sarathi", {"token_budget": SARATHI_TOKENS})
FAIR = Contender("fairbatching", "fairbatching", {"anchor": "last_token"})
SLOS_SERVE = Contender("slos_serve", "slos_serve")
STRICT = DEFAULT._replace(options={"anchor": "last_token"})


def _span(plan: Plan, scenario: str) -> Span:
    if scenario == "reasoning":
        # A request alone takes minutes.
        return plan.pick(Span(1.0, 3, 3), Span(120.0, 30, 60), Span(600.0, 100, 400))
    if scenario in ("coder", "tools"):
        # Some bursts, which come once a minute.
        return plan.pick(Span(3.0, 10, 20), Span(300.0, 100, 600), Span(900.0, 300, 4_000))
    return plan.pick(Span(3.0, 10, 20), Span(60.0, 100, 600), Span(300.0, 300, 4_000))


def _make(scenario: str, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return slos_serve(scenario, rate, requests, seed, alone_s(setup.truth))


def of_scenario(name: str) -> Make:
    """A scenario of Table 1."""
    return partial(_make, name)


def _capacity(
    plan: Plan, scenario: str, setup: Setup, kind: Kind, layout: Layout | None = None
) -> Callable[[int], Mapping[str, float]]:
    """The highest rates at which 90 % and 98 % of the requests attain, per replica."""
    run = of_scenario(scenario), setup, kind, _span(plan, scenario), FIGURE
    loads = plan.pick(Loads(0.5, 1.0, 1), ALL_LOADS)
    return partial(capacity, *run, shares=SHARES, loads=loads, layout=layout, oracle=True)


def capacity_cells(plan: Plan) -> list[Cell]:
    """Scenarios x policies on one engine."""
    return [
        Cell({"scenario": name, **kind.labels}, _capacity(plan, name, SETUP, kind))
        for name in plan.pick(("chatbot",), tuple(SLOS_SERVE_SCENARIOS))
        for kind in (FCFS, SARATHI, FAIR, SLOS_SERVE, STRICT)
    ]


def scaling_cells(plan: Plan) -> list[Cell]:
    """Scenarios x replicas x routers; `slos_serve` forwards declined requests (Fig. 7)."""
    systems = [System("round_robin", FCFS)]
    systems += [System(router, SLOS_SERVE) for router in ("round_robin", "slos_serve", "pab")]
    return [
        Cell(
            {
                "scenario": name,
                "system": f"{system.local.label}, {system.router}",
                "replicas": float(replicas),
            },
            _capacity(plan, name, SETUP, system, colocated(replicas)),
        )
        for name in plan.pick(("chatbot",), ("chatbot", "coder"), SLOS_SERVE_SCENARIOS[:5])
        for system in systems
        for replicas in plan.pick((1, 2), (1, 2, 4), (1, 2, 3, 4))
    ]


def over_one(rows: Rows) -> Rows:
    """Total capacity over that of one replica."""
    found = []
    for own in grouped(rows, "scenario", "system", "seed").values():
        one = next(float(row["rate_0.9"]) for row in own if row["replicas"] == 1)
        found += [
            {**row, "times": float(row["rate_0.9"]) * float(row["replicas"]) / max(one, 1e-9)}
            for row in own
        ]
    return found


def drafting(setup: Setup, alpha: float, length: int, draft_s: float) -> Setup:
    """The setup with up to ``length`` drafted tokens per decode, right with probability
    ``alpha``."""
    speculation = Speculation(alpha=alpha, length=length, draft_s=draft_s)
    return setup._replace(engine=setup.engine.model_copy(update={"speculation": speculation}))


def ablation_cells(plan: Plan) -> list[Cell]:
    """The optimisations removed one after the other."""
    static = SLOS_SERVE._replace(batch_tokens=SARATHI_TOKENS)
    variants = {
        "adaptive drafts": (SLOS_SERVE, drafting(SETUP, ALPHA, 9, DRAFT_S)),
        "3 drafts": (SLOS_SERVE._replace(all_drafts=True), drafting(SETUP, ALPHA, 3, DRAFT_S)),
        "slos_serve": (SLOS_SERVE, SETUP),
        "static batch": (static, SETUP),
        "no admission": (FAIR, SETUP),
        "neither (sarathi)": (SARATHI, SETUP),
    }
    return [
        Cell({"scenario": scenario, "variant": name}, _capacity(plan, scenario, own, kind))
        for scenario in plan.pick(("chatbot",), ("chatbot", "coder", "summarizer"), ("mixed",))
        for name, (kind, own) in variants.items()
    ]


CAPACITY = Experiment(
    name="slos_serve_capacity",
    source="SLOs-Serve Fig. 9",
    question="Which rate does an engine serve with 90 % and 98 % of the requests in time?",
    setting=SETTING,
    seeds=3,
    cells=capacity_cells,
    tables=[
        Pivot(
            f"Fig. 9: capacity at {share * 100:g} % attainment, requests/s",
            *(f"rate_{share:g}", ("scenario",), "policy", 2),
        )
        for share in SHARES
    ],
)

SCALING = Experiment(
    name="slos_serve_scaling",
    source="SLOs-Serve Fig. 13",
    question="Does capacity grow more than in proportion to the replicas?",
    setting=SETTING,
    seeds=3,
    cells=scaling_cells,
    derive=over_one,
    tables=[
        Pivot(title, figure, ("scenario", "system"), "replicas", 2)
        for title, figure in (
            ("Fig. 13: capacity of all replicas at 90 % over that of one", "times"),
            ("Capacity per replica, requests/s", "rate_0.9"),
        )
    ],
)

ABLATION = Experiment(
    name="slos_serve_ablation",
    source="SLOs-Serve Fig. 14; the text of §6.3 is not in our copy, the variants are our reading",
    question="What does each optimisation of SLOs-Serve add to capacity?",
    setting=SETTING,
    seeds=4,
    cells=ablation_cells,
    tables=[
        Pivot(
            "Fig. 14: capacity at 90 % attainment, requests/s",
            *("rate_0.9", ("scenario",), "variant", 2),
            f"Drafts: acceptance {ALPHA:g}, {DRAFT_S * 1e3:g} ms for each drafted token of the "
            "longest; adaptive is the paper's, 3 is an engine's own fixed length. Static batch: "
            "the engine's token limit is Sarathi's budget. No admission: earliest deadlines in a "
            "time budget, by FairBatching with last-token deadlines.",
        )
    ],
)

# How many drafted tokens to check.

DRAFT_LOADS = Loads(0.5, 1.8, 5)
MOST_DRAFTS = 9
NONE, ADAPTIVE = "none", "adaptive"

JUDGED = {"slos_serve": "window", "deadline_triage": "mean"}
"""By policy, the TPOT metric that it targets."""


def drafts_at_capacity(setup: Setup, span: Span, kind: Contender, seed: int) -> Mapping[str, float]:
    """The highest rate of chat at which 90 % of the requests attain, and the drafted tokens checked
    and accepted at that rate, per output token."""
    make = of_scenario("chatbot")
    full = full_load_rate(make, setup)
    figure = f"attainment_{JUDGED[kind.policy]}"

    def served(load: float) -> tuple[float, float, float]:
        rate = load * full
        workload = make(setup, rate, span.requests(rate), seed)
        done = run(workload, kind, setup, seed, oracle=True)
        output = workload.mean_output_tokens * len(workload)
        result = done.result
        return (
            figures(done)[figure],
            result.checked_drafts / output,
            result.accepted_drafts / output,
        )

    load = greatest_loads(lambda load: served(load)[0], (0.9,), DRAFT_LOADS)[0.9]
    checked, accepted = served(load)[1:] if load else (0.0, 0.0)
    return {"rate": load * full, "checked": checked, "accepted": accepted}


def draft_cells(plan: Plan) -> list[Cell]:
    """Engines x policies x acceptance x numbers of drafts."""
    span = plan.pick(Span(3.0, 10, 20), Span(60.0, 100, 200), Span(300.0, 300, 4_000))
    found = []
    for name in plan.pick(("8b",), ("8b", "70b")):
        setup = SETUPS[name]
        variants: list[tuple[str, str, Setup]] = [("-", NONE, setup)]
        for alpha in plan.pick((0.7,), (0.3, 0.6, 0.9), (0.3, 0.5, 0.7, 0.9)):
            for drafts, words in ((3, "3"), (5, "5"), (MOST_DRAFTS, ADAPTIVE)):
                variants.append((f"{alpha:g}", words, drafting(setup, alpha, drafts, 0.0)))
        for policy in JUDGED:
            for alpha_words, words, own in variants:
                kind = Contender("", policy, all_drafts=words not in (NONE, ADAPTIVE))
                labels = {"setup": name, "policy": policy, "drafts": words}
                measure = partial(drafts_at_capacity, own, span, kind)
                found.append(Cell({**labels, "acceptance": alpha_words}, measure))
    return found


LENGTHS = Experiment(
    name="speculation_lengths",
    source="SLOs-Serve §3.2.3 and appendix D, with lengths by request; the comparison is ours",
    question="How much capacity does choosing the number of drafted tokens to check gain, at equal "
    "attainment?",
    setting={
        "TPOT": "slos_serve: the largest mean over 10 tokens; deadline_triage: the mean",
        "Arrivals": "chatbot of SLOs-Serve, generated, Poisson; a rate is reached by generating at "
        "it",
        "Objectives and priorities": "SLOs-Serve Tables 1 and 3: TTFT 3 or 5 times the idle "
        "engine's, at least 0.2 s; TPOT 50 or 100 ms; one priority",
        "Latency": "setups 8b and 70b of benchmarks/experiments/systems.py; nothing ran on an "
        "accelerator. Checking a drafted token costs as much as a prompt token, drafting nothing",
        "Drafts": "each is right with the stated probability if all before it are; `adaptive` "
        f"drafts up to {MOST_DRAFTS} and does not know the probability",
        "Output lengths": "known",
        "Capacity": f"bisection over loads from {DRAFT_LOADS.least:g} to {DRAFT_LOADS.most:g} in "
        f"{DRAFT_LOADS.steps} halvings, within 4 %; each seed has its own",
    },
    seeds=2,
    cells=draft_cells,
    tables=[
        Pivot(title, figure, ("setup", "policy", "drafts"), "acceptance", 2)
        for figure, title in {
            "rate": "Capacity at 90 % attainment by acceptance, requests/s",
            "checked": "Drafted tokens checked per token of output, at that rate",
            "accepted": "Drafted tokens accepted per token of output, at that rate",
        }.items()
    ],
)
