"""SLOs-Serve §3.2.3: how many drafted tokens to check."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.benchmarks.experiments import loads, systems
from sluice.benchmarks.experiments.grid import Axes, Experiment, Planned, Product, Scaled
from sluice.benchmarks.experiments.loads import Span
from sluice.benchmarks.experiments.slos_serve import SCENARIO, SETTING, drafting
from sluice.benchmarks.experiments.systems import SETUPS, Contender
from sluice.benchmarks.experiments.tables import Rows, grouped, pivots

DRAFTS = {"3": 3, "5": 5, "adaptive": 9}
JUDGED = {"slos_serve": "attainment_window", "deadline_triage": "attainment_mean"}
"""By policy, the TPOT metric that it targets."""


def drafts_at_capacity(
    seed: int, setup: str, policy: str, drafts: str, acceptance: float, span: Span
) -> Mapping[str, float]:
    """The highest rate of chat at which 90 % of the requests attain, and the drafted tokens checked
    and accepted at that rate, per output token."""
    make, own = SCENARIO("chatbot"), SETUPS[setup]
    if drafts in DRAFTS:
        own = drafting(own, acceptance, DRAFTS[drafts], 0.0)
    kind = Contender("", policy, all_drafts=drafts in ("3", "5"))
    full = loads.full_load_rate(make, own)

    def served(load: float) -> tuple[float, float, float]:
        rate = load * full
        workload = make(own, rate, span.requests(rate), seed)
        done = systems.run(workload, kind, own, seed, oracle=True)
        output, result = workload.mean_output_tokens * len(workload), done.result
        shares = result.checked_drafts / output, result.accepted_drafts / output
        return systems.figures(done)[JUDGED[policy]], *shares

    load = loads.greatest_loads(lambda load: served(load)[0], (0.9,), 0.5, 1.8, 5)[0.9]
    checked, accepted = served(load)[1:] if load else (0.0, 0.0)
    return {"rate": load * full, "checked": checked, "accepted": accepted}


def _drafts(drafts: tuple[str, ...], acceptance: Planned[Mapping[str, float]]) -> Product:
    axes: Axes = {
        "setup": Scaled(("8b",), ("8b", "70b")),
        "policy": tuple(JUDGED),
        "acceptance": acceptance,
        "drafts": drafts,
    }
    span = Scaled(Span(3.0, 10, 20), Span(60.0, 100, 200))
    return Product(drafts_at_capacity, axes, {"span": span})


def _by_policy(rows: Rows) -> Rows:
    return [row for own in grouped(rows, "setup", "policy").values() for row in own]


LENGTHS = Experiment(
    "speculation_lengths",
    "SLOs-Serve §3.2.3 and appendix D, with lengths by request; the comparison is ours",
    "How much capacity does choosing the number of drafted tokens to check gain, at equal "
    "attainment?",
    seeds=2,
    setting={
        **{name: SETTING[name] for name in ("Objectives and priorities", "Output lengths")},
        "TPOT": "slos_serve: the largest mean over 10 tokens; deadline_triage: the mean",
        "Arrivals": "chatbot of SLOs-Serve, generated, Poisson",
        "Latency": "setups 8b and 70b; checking a drafted token costs as much as a prompt token",
        "Drafts": "each is right with the stated probability if all before it are; `adaptive` "
        "drafts up to 9 and does not know the probability; drafting costs nothing",
        "Capacity": "bisection over loads from 0.5 to 1.8 in 5 halvings, within 4 %",
    },
    grids=[
        _drafts(("none",), {"-": 0.0}),
        _drafts(tuple(DRAFTS), Scaled({"0.7": 0.7}, {"0.3": 0.3, "0.6": 0.6, "0.9": 0.9})),
    ],
    derive=_by_policy,
    tables=pivots(
        {
            "rate": "Capacity at 90 % attainment by acceptance, requests/s",
            "checked": "Drafted tokens checked per token of output, at that rate",
            "accepted": "Drafted tokens accepted per token of output, at that rate",
        },
        *(("setup", "policy", "drafts"), "acceptance", 2),
    ),
)
