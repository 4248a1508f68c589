"""The experiment on ``Retry-After``: what it counts."""

from __future__ import annotations

from math import nan

import pytest

from sluice.benchmarks.experiments.grid import Row
from sluice.benchmarks.experiments.promises import (
    AGAIN,
    GONE,
    NOT_RESERVED,
    costs,
    moments,
    retry_counts,
)
from sluice.scheduling.request.objective import SLO
from sluice.simulation.engine import Truth
from sluice.simulation.requests import Requests, Retry
from sluice.simulation.run import simulate
from tests.simulation.loads import MODEL, batch, workload


def served() -> Requests:
    """Four requests, the last of which is late; all are promised but the first."""
    load = workload(
        (0.0, 10, 1), (4.0, 10, 1), (13.0, 10, 1), (19.0, 3_000, 1), slo=SLO(ttft_s=0.02)
    )
    requests = simulate(load, batch("fcfs")("mixed"), Truth(MODEL, 0.0)).requests
    requests.promised_s[:] = [nan, 0.01, 0.01, 0.01]
    return requests


def test_the_warm_up_and_what_comes_after_the_last_new_request_are_left_out() -> None:
    requests = served()
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


def rows(returns: float, held: float) -> list[Row]:
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
    assert moments(rows(returns, held)).rows[0][4] == verdict
    assert costs(rows(returns, held)).rows[0][-1] == "0.990"
