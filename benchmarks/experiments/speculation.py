"""Speculative decoding: the policies' choice of how many drafted tokens to check, against fixed
numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from sluice.benchmarks.experiments.base import Cell, Experiment, Findings, Plan, Row, pivot
from sluice.benchmarks.experiments.capacity import Loads, greatest_loads
from sluice.benchmarks.experiments.engines import SETUPS, Contender, Setup, figures, run
from sluice.benchmarks.experiments.loads import Make, Span, alone_s, full_load_rate
from sluice.benchmarks.experiments.slos_serve import drafting
from sluice.simulation.workload import Workload
from sluice.simulation.workloads.settings import slos_serve

SHARE = 0.9
LOADS = Loads(0.5, 1.8, 5)
MOST_DRAFTS = 9
NONE, ADAPTIVE = "none", "adaptive"

JUDGED = {"slos_serve": "window", "deadline_triage": "mean"}
"""By policy, the TPOT metric that it targets."""


def _chat(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    return slos_serve("chatbot", rate, requests, seed, alone_s(setup.truth))


def capacity(
    make: Make, setup: Setup, span: Span, contender: Contender, seed: int
) -> Mapping[str, float]:
    """The highest rate at which 90 % of the requests attain, and the drafted tokens checked and
    accepted at that rate, per output token."""
    full = full_load_rate(make, setup)
    figure = f"attainment_{JUDGED[contender.policy]}"

    def served(load: float) -> tuple[float, float, float]:
        rate = load * full
        workload = make(setup, rate, span.requests(rate), seed)
        done = run(workload, contender, setup, seed, oracle=True)
        output = workload.mean_output_tokens * len(workload)
        result = done.result
        return (
            figures(done)[figure],
            result.checked_drafts / output,
            result.accepted_drafts / output,
        )

    load = greatest_loads(lambda load: served(load)[0], (SHARE,), LOADS)[SHARE]
    checked, accepted = served(load)[1:] if load else (0.0, 0.0)
    return {"rate": load * full, "checked": checked, "accepted": accepted}


def cells(plan: Plan) -> list[Cell]:
    """Engines x policies x acceptance x numbers of drafts."""
    span = plan.pick(Span(3.0, 10, 20), Span(60.0, 100, 200), Span(300.0, 300, 4_000))
    found = []
    for name in plan.pick(("8b",), ("8b", "70b"), ("8b", "70b")):
        setup = SETUPS[name]
        for policy in JUDGED:
            variants: list[tuple[str, str, Setup, bool]] = [("-", NONE, setup, False)]
            for alpha in plan.pick((0.7,), (0.3, 0.6, 0.9), (0.3, 0.5, 0.7, 0.9)):
                for drafts in (3, 5):
                    fixed = drafting(setup, alpha, drafts, 0.0)
                    variants.append((f"{alpha:g}", str(drafts), fixed, True))
                adaptive = drafting(setup, alpha, MOST_DRAFTS, 0.0)
                variants.append((f"{alpha:g}", ADAPTIVE, adaptive, False))
            found += [
                Cell(
                    {"setup": name, "policy": policy, "drafts": drafts, "acceptance": alpha},
                    partial(
                        capacity, _chat, own, span, Contender("", policy, all_drafts=all_drafts)
                    ),
                )
                for alpha, drafts, own, all_drafts in variants
            ]
    return found


def findings(rows: Sequence[Row]) -> Findings:
    """Capacity, and the drafted tokens checked and accepted at it."""
    down = ["setup", "policy", "drafts"]
    words = {
        "rate": "Capacity at 90 % attainment by acceptance, requests/s",
        "checked": "Drafted tokens checked per token of output, at that rate",
        "accepted": "Drafted tokens accepted per token of output, at that rate",
    }
    return Findings(
        [pivot(title, rows, down, "acceptance", figure, 2) for figure, title in words.items()]
    )


EXPERIMENT = Experiment(
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
        "Latency": "setups 8b and 70b of benchmarks/experiments/engines.py; nothing ran on an "
        "accelerator. Checking a drafted token costs as much as a prompt token, drafting nothing",
        "Drafts": "each is right with the stated probability if all before it are; `adaptive` "
        f"drafts up to {MOST_DRAFTS} and does not know the probability",
        "Output lengths": "known",
        "Capacity": f"bisection over loads from {LOADS.least:g} to {LOADS.most:g} in {LOADS.steps} "
        "halvings, within 4 %; each seed has its own",
    },
    seeds=2,
    cells=cells,
    findings=findings,
)
