"""What the experiments on prefill and decode apart make of their rows, and of the formula."""

from __future__ import annotations

import pytest

from sluice.benchmarks.experiments.disaggregation import (
    RATIO,
    SETUP,
    demand_of,
    of_scenario,
    split_in,
)
from sluice.benchmarks.experiments.grid import Row
from sluice.benchmarks.experiments.loads import full_load_rate


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
    (relative, rates, formula), _ = RATIO.findings(rows)
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
        full_load_rate(of_scenario("chatbot"), SETUP), rel=0.1
    )
