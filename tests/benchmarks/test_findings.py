"""What experiments measure and make of their rows, on cases small enough to check by hand."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from sluice.benchmarks.experiments import autoscaling, disaggregation
from sluice.benchmarks.experiments.autoscaling import (
    OURS,
    Scaling,
    changing,
    peak_load,
    surges,
)
from sluice.benchmarks.experiments.disaggregation import (
    RATIO,
    demand_of,
    of_scenario,
    split_in,
)
from sluice.benchmarks.experiments.flowprefill import bounded, mix, setup_of, tightest
from sluice.benchmarks.experiments.grid import Row
from sluice.benchmarks.experiments.loads import (
    GENERATED,
    Conditions,
    Search,
    Span,
    at_load,
    full_load_rate,
    measure,
)
from sluice.benchmarks.experiments.promises import (
    AGAIN,
    GONE,
    MARGINS,
    NONE,
    NOT_RESERVED,
    ORACLE,
    WRONG,
    Wrong,
    costs,
    counts,
    moments,
    retry_counts,
    sums_of,
    targets,
)
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.engine import Truth
from sluice.simulation.requests import Requests, Retry
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival, Workload
from tests.simulation.loads import MODEL, batch, workload

CHAT_RATE = full_load_rate(GENERATED["proserve sharegpt"], autoscaling.SETUP)


def at(*times_s: float) -> Workload:
    return Workload("times", tuple(Arrival(time_s, 10, 2, SLO(ttft_s=1.0)) for time_s in times_s))


def test_the_peak_is_the_largest_rate_over_a_while() -> None:
    workload = at(0.0, 10.0, 10.5, 11.0, 11.9, 40.0)
    assert peak_load(workload, full_rate=1.0, over_s=2.0) == 4 / 2.0
    assert peak_load(workload, full_rate=2.0, over_s=100.0) == pytest.approx(6 / 100 / 2)


def test_the_changing_mix_has_its_load_and_two_kinds_of_objectives() -> None:
    workload = changing(600.0, autoscaling.SETUP, 2.0 * CHAT_RATE, round(2.0 * CHAT_RATE * 600), 1)
    assert workload.duration_s == pytest.approx(600.0, rel=0.1)
    assert {arrival.slo.ttft_s for arrival in workload.arrivals} == {0.8, 4.0}
    documents = [a.arrival_s for a in workload.arrivals if a.slo.ttft_s == 4.0]
    chats = [a.arrival_s for a in workload.arrivals if a.slo.ttft_s == 0.8]
    night = sum(time_s < 150 for time_s in documents) / len(documents)
    day = sum(time_s < 150 for time_s in chats) / len(chats)
    assert night > 0.3 > 0.15 > day


def test_a_fixed_pool_and_one_that_scales_serve_the_same_requests() -> None:
    fixed = autoscaling.measure(1, (surges, CHAT_RATE), Scaling(peak=True), 1.0, 30.0)
    scaled = autoscaling.measure(1, (surges, CHAT_RATE), OURS, 1.0, 30.0)
    assert fixed["changes"] == 0
    assert fixed["rate"] == scaled["rate"]
    assert fixed["replica_hours"] >= fixed["most_replicas"] * 25 / 3600
    assert 0 < scaled["attainment_mean"] <= 1


def row(workload: str, layout: str, rate: float) -> Row:
    return {"workload": workload, "policy": "p", "layout": layout, "seed": 1, "rate_0.9": rate}


def test_layouts_are_named_by_their_roles() -> None:
    assert split_in(2, 1).name == "2P 1D"
    mixed = split_in(2, 1, mixed=3)
    assert (mixed.name, mixed.size) == ("3 both + 2P 1D", 6)
    assert mixed.cluster.counts == {"mixed": 3, "prefill": 2, "decode": 1}


def test_capacity_is_over_that_of_an_even_split_with_the_formula_beside_it() -> None:
    layouts = {"1P 1D": 4.0, "2P 1D": 5.0, "1P 2D": 3.0, "co-located": 8.0}
    rows = [row("coder", layout, rate) for layout, rate in layouts.items()]
    relative, rates, formula = RATIO.findings(rows)
    assert relative.rows == [("coder", "p", "1.00", "1.25", "0.75", "2.00")]
    assert rates.rows == [("coder", "p", "4.00", "5.00", "3.00", "8.00")]
    # Prefill decides: of 3 devices two serve twice, or one as much, as one of 2 does.
    (line,) = formula.rows
    assert line[2:] == ("1.00", "1.33", "0.67", "2P 1D")


def test_the_formula_puts_the_papers_workloads_far_apart() -> None:
    chat, coder, reasoning = map(demand_of, ("chatbot", "coder", "reasoning"))
    assert coder.ratio > 5 * chat.ratio > 50 * reasoning.ratio
    assert chat.split(8) == (4, 4)
    assert coder.split(8) == (7, 1)
    assert reasoning.split(8) == (1, 7)
    # Its ideal replicas waste the fixed part of steps on neither side, as those of load 1.
    assert chat.best_goodput == pytest.approx(
        full_load_rate(of_scenario("chatbot"), disaggregation.SETUP), rel=0.1
    )


LASTING = Span(40.0, 40, 120)
PREFILLER = setup_of("8b")


def test_the_goodput_and_the_tightest_objectives_are_at_90_percent() -> None:
    ours = bounded("ours")
    case = Conditions(mix(1.0), PREFILLER)
    search = Search("attainment_mean")
    rate = at_load(ours, 1, case, case.full_rate, search, LASTING)["rate_0.9"]
    assert measure(ours, 1, case, rate, LASTING.requests(rate))["attainment_mean"] >= 0.9
    scale = tightest(1, ours, PREFILLER, 0.5, LASTING)["tightest"]
    assert 0.25 <= scale < 1.0


def rows_of(load: float, **kept: tuple[int, int]) -> list[Row]:
    """Rows of one cell: promised and kept of 1,000 requests, by system."""
    model = {ORACLE: "-"}
    return [
        {
            "workload": "chat",
            "setup": "8b",
            "load": load,
            "model": model.get(system, "all x 1.3"),
            "system": system,
            "seed": seed,
            "requests": 1_000.0,
            "promised": float(promised),
            "kept": float(count),
            "attained": float(count),
        }
        for system, (promised, count) in (
            (ORACLE, kept["oracle"]),
            (NONE, kept["none"]),
            (MARGINS, kept["margins"]),
        )
        for seed in (1, 2)
    ]


def verdicts(rows: list[Row]) -> list[str]:
    return [line[-1] for line in targets(sums_of(rows)).rows]


def test_targets_hold_where_enough_is_kept_and_no_goodput_is_lost() -> None:
    good = rows_of(0.9, oracle=(950, 950), none=(900, 850), margins=(880, 875))
    assert verdicts(good) == ["yes"] * 4


def test_each_target_fails_by_itself() -> None:
    missed = rows_of(0.9, oracle=(950, 950), none=(900, 850), margins=(900, 875))
    assert verdicts(missed) == ["NO", "yes", "yes", "yes"]
    good = rows_of(0.9, oracle=(950, 950), none=(900, 850), margins=(880, 875))
    loses = rows_of(1.3, oracle=(850, 850), none=(850, 850), margins=(824, 824))
    assert verdicts(good + loses) == ["yes", "NO", "yes", "NO"]
    far = rows_of(0.9, oracle=(990, 990), none=(850, 850), margins=(880, 880))
    assert verdicts(far) == ["yes", "yes", "NO", "yes"]


def test_cells_of_few_promises_say_nothing_of_the_share_kept() -> None:
    few = rows_of(0.9, oracle=(50, 50), none=(60, 48), margins=(60, 50))
    assert len(verdicts(few)) == 3


def test_a_wrong_model_believes_less_than_is_true_by_its_factors() -> None:
    true = LinearLatency(a=0.009, b=9e-5, c=9e-8)
    assert Wrong(1.5, 3.0).believed(true).coefficients == pytest.approx((0.006, 3e-5, 3e-8, 0.0))
    for wrong in WRONG.values():
        assert wrong.believed(true).fixed_s * wrong.fixed == pytest.approx(true.fixed_s)


def test_what_is_kept_is_counted() -> None:
    slo = SLO(ttft_s=0.02, tpot_s=0.004, e2e_s=10.0)
    load = workload((0.0, 10, 1), (5.0, 10, 5), (9.0, 3_000, 1), slo=slo)
    result = simulate(load, batch("fcfs")("mixed"), Truth(MODEL, 0.0))
    result.requests.promised_s[:] = [0.01, 0.01, 0.01]
    found = counts(result)
    # The second is off its pace, and the third one's first token is late.
    assert found["promised"] == 3 and found["kept"] == found["attained"] == 1
    assert found["late_p95"] > 1
    result.requests.promised_s[1:] = np.nan
    found = counts(result)
    assert found["promised"] == found["kept"] == 1
    assert found["late_p95"] == 0


def four_served() -> Requests:
    """Four requests, the last of which is late; all are promised but the first."""
    load = workload(
        (0.0, 10, 1), (4.0, 10, 1), (13.0, 10, 1), (19.0, 3_000, 1), slo=SLO(ttft_s=0.02)
    )
    requests = simulate(load, batch("fcfs")("mixed"), Truth(MODEL, 0.0)).requests
    requests.promised_s[:] = [nan, 0.01, 0.01, 0.01]
    return requests


def test_the_warm_up_and_what_comes_after_the_last_new_request_are_left_out() -> None:
    requests = four_served()
    requests.retries += [
        Retry(1, 4.0, 9.0, False),
        Retry(2, 12.0, 1.0, False),
        Retry(2, 13.0, 2.0, True),
        Retry(3, 25.0, 9.0, True),
    ]
    found = retry_counts(requests, 20.0)
    # The first third of so short a run.
    assert (found["returns"], found["held"]) == (2, 1)
    assert found["retry_after_p95"] == pytest.approx(1.95)
    assert found["promised"] == 0.75
    assert found["goodput"] == pytest.approx(1 / (20.0 - 20.0 / 3))


def of_clients(returns: float, held: float) -> list[Row]:
    figures = {"retry_after_p95": 1.0, "promised": 1.0, "goodput": 9.0}
    cell: Row = {"workload": "chat", "load": 1.2, "seed": 1}
    return [
        {**cell, "clients": AGAIN, "returns": returns, "held": held, **figures},
        {**cell, "clients": GONE, "goodput": 9.9},
        {**cell, "clients": NOT_RESERVED, "goodput": 10.0},
    ]


@pytest.mark.parametrize(
    ("returns", "held", "verdict"),
    [(100, 80, "yes"), (100, 79, "NO"), (49, 0, "-"), (0, 0, "-")],
)
def test_a_cell_holds_where_four_fifths_are_promised(
    returns: float, held: float, verdict: str
) -> None:
    assert moments(of_clients(returns, held)).rows[0][4] == verdict
    assert costs(of_clients(returns, held)).rows[0][-1] == "0.990"
