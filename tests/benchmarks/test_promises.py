"""The simulated benchmark of promises: its targets and its counts."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.benchmarks.experiments.grid import Row
from sluice.benchmarks.experiments.promises import (
    MARGINS,
    NONE,
    ORACLE,
    WRONG,
    Wrong,
    counts,
    sums_of,
    targets,
)
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.engine import Truth
from sluice.simulation.run import simulate
from tests.simulation.loads import MODEL, batch, workload


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
