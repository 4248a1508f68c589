"""SLOs-Serve: Fig. 9 to 14 (capacity, load, scaling, ablation) and drafts (§3.2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import nan

import numpy as np

from sluice.benchmarks.experiments import grid, loads, systems
from sluice.benchmarks.experiments.disaggregation import RATIOS
from sluice.benchmarks.experiments.loads import QUICK, Search, Span, Sweep, generated, workloads
from sluice.benchmarks.experiments.systems import DEFAULT, SETUPS, Contender, System, colocated
from sluice.scheduling.batching import BatchPlan
from sluice.simulation import settings
from sluice.simulation.config import Speculation
from sluice.simulation.generators import Gamma
from sluice.simulation.settings import SLOS_SERVE_SCENARIOS, slos_serve

SETUP = SETUPS["8b"]
SCENARIO = partial(generated, slos_serve)


def _scenario(name: str) -> loads.Make:
    """``SCENARIO, gamma``: with bursts of as many requests at every rate, unlike the paper's."""
    scenario, _, gamma = name.partition(", ")
    return SCENARIO(scenario, arrivals=partial(Gamma, cv=4.0) if gamma else None)


RATE = "rate_0.9"
ALPHA = 0.7
DRAFT_S = 0.0005
"""A draft step of a 125M-parameter model on 2 TB/s takes some 0.2 ms; this value adds overhead."""

SETTING = (
    "TPOT: the largest mean over 10 tokens, of every stage. SLOs-Serve Tables 1 and 3: TTFT 3 or 5 "
    "times the idle engine's, at least 0.2 s; TPOT 50 or 100 ms; output lengths known to every "
    "policy; bursts for coder and tools with the Azure code trace's burst lengths. Capacity: "
    "bisection over loads from 0.05 to 4 in 5 halvings, then by log odds. "
)

SARATHI_TOKENS = loads.profiled_budget(SETUP, settings.TIGHT_TPOT_S)
FCFS = Contender("fcfs", "fcfs")
SARATHI = Contender("sarathi", "sarathi", {"token_budget": SARATHI_TOKENS})
FAIR = Contender("fairbatching", "fairbatching", {"anchor": "last_token"})
SLOS_SERVE = Contender("slos_serve", "slos_serve")
STRICT = DEFAULT._replace(options={"anchor": "last_token"})


def drafting(setup: systems.Setup, alpha: float, length: int, draft_s: float) -> systems.Setup:
    """The setup with up to ``length`` drafts per decode, right with probability ``alpha``."""
    speculation = Speculation(alpha=alpha, length=length, draft_s=draft_s)
    return setup._replace(engine=setup.engine.model_copy(update={"speculation": speculation}))


def _capacities(
    scenarios: tuple[str, ...],
    *kinds: systems.Kind,
    setup: systems.Setup = SETUP,
    layouts: Sequence[systems.Layout | None] = (None,),
) -> Sweep:
    """The highest rates at which 90 % and 98 % of the requests attain, per replica."""
    return Sweep(
        named=("scenario",),
        workloads=workloads(scenarios, _scenario),
        setups=(setup,),
        layouts=layouts,
        kinds=kinds,
        span=Span(300.0, 100, 600),
        # A request of reasoning lasts minutes; a third of the mix comes in bursts, once a minute.
        spans={"reasoning": Span(900.0, 100, 300), "mixed": Span(300.0, 100, 1_800)},
        loads=(Search("attainment_window", (0.9, 0.98), steps=5),),
        oracle=True,
    )


STATIC = SLOS_SERVE._replace(label="static batch", batch_tokens=SARATHI_TOKENS)
DRAFTED = FCFS._replace(label="fcfs, 3 drafts", all_drafts=True)
ADAPTIVE = SLOS_SERVE._replace(label="slos_serve, adaptive drafts")


REASONING = grid.Experiment(
    "slos_serve_reasoning",
    "SLOs-Serve §6.1, the reasoning scenario; fixed loads are ours",
    "What do long outputs attain where they no longer all run at once?",
    seeds=3,
    setting=SETTING,
    grids=[
        Sweep(
            named=("scenario",),
            workloads=workloads(("reasoning",), SCENARIO),
            layouts=(colocated(1), colocated(4)),
            kinds=(System("round_robin", FCFS), System("slos_serve", SLOS_SERVE)),
            loads=(1.2, 1.4, 1.7, 2.0),
            span=Span(1.0, 300, 300),
            oracle=True,
        )
    ],
    tables=grid.pivots(
        {
            "attainment_window": "Share of the requests that attain",
            "preemptions": "Preemptions per request",
        },
        ("policy", "replicas"),
    ),
)


DISTSERVE = System("least_tokens", FCFS._replace(label="distserve"))


def best_split(rows: grid.Rows) -> grid.Rows:
    """Of each system and seed the best layout."""
    every = grid.grouped(rows, "scenario", "policy", "seed").values()
    return [max(own, key=lambda row: float(row[RATE])) for own in every]


OVER = {
    "slos_serve over the best of fcfs and sarathi": (SLOS_SERVE, FCFS, SARATHI),
    "over distserve": (SLOS_SERVE, DISTSERVE.local),
    "with drafts over the best of fcfs with and without, and sarathi": (
        *(ADAPTIVE, FCFS, DRAFTED, SARATHI),
    ),
    "slos_serve with drafts over without": (ADAPTIVE, SLOS_SERVE),
}


def over_others(rows: grid.Rows) -> grid.Rows:
    """How many times the others' capacity is served, and the geometric mean over scenarios."""
    found: list[grid.Row] = []
    for (seed,), own in grid.grouped(rows, "seed").items():
        rates = {(row["scenario"], row["policy"]): float(row[RATE]) for row in own}
        for name, (ours, *rivals) in OVER.items():
            times: dict[grid.Value, float] = {}
            for (scenario,) in grid.grouped(own, "scenario"):
                rate, *others = (rates.get((scenario, each.label), 0.0) for each in (ours, *rivals))
                if rate and any(others):
                    times[scenario] = rate / max(others)
            times["geometric mean"] = float(np.exp(np.mean(np.log(list(times.values()) or [1.0]))))
            found += [
                {"scenario": scenario, "over": name, "seed": seed, "times": ratio}
                for scenario, ratio in times.items()
            ]
    return found


CAPACITY = grid.Experiment(
    "slos_serve_capacity",
    "SLOs-Serve Fig. 1, 9 and 14 (fairbatching: no admission; static batch: Sarathi's budget)",
    "Which rate does an engine serve with 90 % and 98 % of the requests in time?",
    seeds=3,
    setting=f"{SETTING}DistServe: separate replicas, first come, first served, 1:1, 2:1 or 1:2, "
    f"the best of these, per replica. Drafts: acceptance {ALPHA:g}, {DRAFT_S * 1e3:g} ms for each "
    "drafted token of the longest; adaptive is the paper's, 3 is an engine's own fixed length.",
    grids=[
        _capacities(SLOS_SERVE_SCENARIOS, FCFS, SARATHI, FAIR, SLOS_SERVE, STRICT),
        _capacities(("chatbot", "coder", "summarizer"), STATIC),
        _capacities(SLOS_SERVE_SCENARIOS[:5], DISTSERVE, layouts=RATIOS),
        _capacities(SLOS_SERVE_SCENARIOS[:4], DRAFTED, setup=drafting(SETUP, ALPHA, 3, DRAFT_S)),
        _capacities(SLOS_SERVE_SCENARIOS[:4], ADAPTIVE, setup=drafting(SETUP, ALPHA, 9, DRAFT_S)),
    ],
    derive=best_split,
    tables=[
        *grid.pivots(
            {RATE: "90", "rate_0.98": "98"},
            *(("scenario",), "policy", 2),
            title="Fig. 9: capacity at {} % attainment, requests/s",
        ),
        grid.Pivot(
            "Capacity at 90 % over that of others",
            *("times", ("scenario",), "over", 2),
            derive=over_others,
        ),
    ],
)


def over_one(rows: grid.Rows) -> grid.Rows:
    """Total capacity over that of one replica; nan where one attains at no rate."""
    found = []
    for own in grid.grouped(rows, "scenario", "policy", "router", "seed").values():
        one = next(float(row[RATE]) for row in own if row["replicas"] == 1)
        for row in own:
            times = float(row[RATE]) * float(row["replicas"]) / one if one else nan
            found.append({**row, "system": f"{row['policy']}, {row['router']}", "times": times})
    return found


SCALING = grid.Experiment(
    "slos_serve_scaling",
    "SLOs-Serve Fig. 13",
    "Does capacity grow more than in proportion to the replicas?",
    seeds=3,
    setting=f"{SETTING}The router slos_serve forwards declined requests (Fig. 7).",
    grids=[
        _capacities(
            ("chatbot", "coder", "coder, gamma"),
            System("round_robin", FCFS),
            *(System(router, SLOS_SERVE) for router in ("round_robin", "slos_serve")),
            layouts=(colocated(1), colocated(4)),
        )
    ],
    derive=over_one,
    tables=grid.pivots(
        {
            "times": "Fig. 13: capacity of all replicas at 90 % over that of one",
            RATE: "Capacity per replica, requests/s",
        },
        *(("scenario", "system"), "replicas", 2),
    ),
)


# What the batches and the tiers look like under load.


def batch_sizes(seed: int, policy: Contender, load: float, span: Span) -> dict[str, float]:
    """The share of the engine's time in batches above Sarathi's budget."""
    make, seen = SCENARIO("summarizer"), list[tuple[int, float]]()
    rate = load * loads.full_load_rate(make, SETUP)
    workload = make(SETUP, rate, span.requests(rate), seed)

    def note(plan: BatchPlan, *_: object) -> None:
        seen.append((int(plan.tokens.sum()), plan.predicted_s))

    systems.run(workload, policy, SETUP, seed, oracle=True, note=note)
    tokens, cost_s = np.array(seen).T
    return {"above": float(cost_s[tokens > SARATHI_TOKENS].sum() / cost_s.sum())}


LOAD = grid.Experiment(
    "slos_serve_load",
    "SLOs-Serve Fig. 10a, 11 and 12",
    "How large are the batches, and what keeps the requests of the standard tier in time?",
    seeds=3,
    setting=f"{SETTING}Standard tier: all but best effort. Sarathi's budget is {SARATHI_TOKENS} "
    "tokens; the paper's is 512.",
    grids=[
        grid.Product(
            batch_sizes,
            {"policy": (SARATHI, SLOS_SERVE), "load": grid.first((0.6, 0.8, 1.0))},
            {"span": grid.Scaled(QUICK, Span(60.0, 100, 600))},
            {"scenario": "summarizer"},
        ),
        Sweep(
            named=("scenario",),
            workloads=workloads(("coder", "mixed"), SCENARIO),
            layouts=(colocated(1),),
            kinds=(
                *(System("round_robin", each) for each in (FCFS, SARATHI)),
                System("slos_serve", SLOS_SERVE, "slos_serve"),
            ),
            loads=(0.1, 0.2, 0.4, 0.6, 0.8),
            span=Span(300.0, 100, 1_500),
            oracle=True,
        ),
    ],
    tables=[
        grid.Pivot(
            "Fig. 10a: share of the time in batches above Sarathi's budget",
            *("above", ("policy",), "load"),
            where={"scenario": "summarizer"},
        ),
        *grid.pivots(
            {
                "standard_most": "Fig. 11: most requests of the standard tier at a time",
                "best_effort_most": "and of best effort",
                "standard_ttft": "Fig. 12: P99 of the standard tier's TTFT over its objective",
                "standard_tpot": "and of its TPOT",
                "attainment_window": "share of all requests that attain",
            },
            ("scenario", "policy"),
            where={"scenario": ("coder", "mixed")},
        ),
    ],
)

# How many drafted tokens are checked.

JUDGED = {"deadline_triage": "attainment_mean", "slos_serve": "attainment_window"}
"""By policy, the TPOT metric that it targets."""

DRAFTS = {"3": 3, "5": 5, "adaptive": 9}
_DRAFTING = [("none", "-", 0.0), *((n, f"{a:g}", a) for a in (0.3, 0.6, 0.9) for n in DRAFTS)]


def _drafts(policy: str, drafts: str, shown: str, acceptance: float) -> Sweep:
    """Chat with drafts that are right with the probability ``acceptance``."""
    setups = [SETUPS[name] for name in ("8b", "70b")]
    if drafts in DRAFTS:
        setups = [drafting(each, acceptance, DRAFTS[drafts], 0.0) for each in setups]
    return Sweep(
        workloads={"chatbot": SCENARIO("chatbot")},
        setups=setups,
        kinds=[Contender(policy, policy, all_drafts=drafts in ("3", "5"))],
        span=Span(60.0, 100, 200),
        loads=(Search(JUDGED[policy], (0.9,), 0.5, 1.8, 5, ("checked",)),),
        labels={"drafts": drafts, "acceptance": shown},
        oracle=True,
    )


def _by_policy(rows: grid.Rows) -> grid.Rows:
    return [row for own in grid.grouped(rows, "setup", "policy").values() for row in own]


LENGTHS = grid.Experiment(
    "speculation_lengths",
    "SLOs-Serve §3.2.3 and appendix D, with lengths by request; the comparison is ours",
    "How much capacity does choosing the number of drafted tokens to check gain, at equal "
    "attainment?",
    setting="SLOs-Serve's chatbot, lengths known. TPOT: slos_serve: the largest mean over 10 "
    "tokens; deadline_triage: the mean. Each draft is right with the stated probability if all "
    "before it are; `adaptive` drafts up to 9 and does not know it; drafting costs nothing. "
    "Capacity: bisection over loads from 0.5 to 1.8 in 5 halvings.",
    grids=[_drafts(policy, *each) for policy in JUDGED for each in _DRAFTING],
    derive=_by_policy,
    tables=grid.pivots(
        {
            RATE: "Capacity at 90 % attainment by acceptance, requests/s",
            "checked": "Drafted tokens checked per token of output, at that rate",
        },
        *(("setup", "policy", "drafts"), "acceptance", 2),
    ),
)
