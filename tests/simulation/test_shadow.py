"""Recorded traffic under other policies."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import make_policy as make_routing
from sluice.simulation.cluster import Node, simulate_cluster
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.engine import Belief, Truth
from sluice.simulation.run import Result
from sluice.simulation.shadow import (
    FIGURES,
    SEEDS,
    WARM_UP_S,
    WINDOW_S,
    Policies,
    Recorded,
    Replicas,
    compared,
    estimates,
    outcomes,
    sums,
)
from sluice.simulation.workload import Arrival, Workload

MODEL = LinearLatency(a=0.02, b=2e-4, c=5e-8)
SLOW = SLO(ttft_s=1.0, tpot_s=0.1)
ENGINE = EngineConfig(kv_blocks=2_048)


def policies(batching: str, admission: str | None = "moore_hodgson") -> Policies:
    return Policies(
        lambda role: make_policy(batching, {}, role=role),
        lambda: make_routing("most_gain", {}),
        lambda: None if admission is None else make_admission(admission, {}),
    )


def replicas(noise: float) -> Replicas:
    node = Node(Truth(MODEL, noise), Belief(MODEL, online=noise > 0), ENGINE)
    return Replicas([node], ClusterConfig())


def traffic(seed: int, seconds: float, rate: float) -> Workload:
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, round(rate * seconds)))
    sizes = rng.integers(50, 1_200, len(at_s)), rng.integers(5, 150, len(at_s))
    rows = zip(at_s.tolist(), *(each.tolist() for each in sizes), strict=True)
    return Workload("live", tuple(Arrival(*row, SLOW) for row in rows))


def run(workload: Workload, side: Policies, noise: float, seed: int) -> Result:
    (node,), cluster = replicas(noise)
    return simulate_cluster(
        workload,
        side.batching,
        side.routing(),
        *node,
        cluster,
        seed=seed,
        admission=side.admission(),
    )


def records(result: Result) -> list[Recorded]:
    found = zip(*(each.tolist() for each in outcomes(result.requests)), strict=True)
    return [Recorded(a, *of) for a, of in zip(result.requests.arrivals, found, strict=True)]


def test_without_noise_the_replay_of_the_live_policies_is_what_was_measured() -> None:
    live = policies("fcfs")
    lasts_s = 2 * WARM_UP_S + 2.4 * WINDOW_S
    found = records(run(traffic(1, lasts_s, 9.0), live, 0.0, 1))
    windows = compared(found, live, live, replicas(0.0), 16)
    assert windows.shape == (2, 2 + 2 * SEEDS, len(FIGURES))
    attained_, kept, tokens = estimates([windows])
    assert 0 < attained_.live < 1 and kept.live > 0 and tokens.live > 0
    for each in (attained_, kept, tokens):
        # A replay learns lengths of outputs from the start, the live run on its way.
        assert each.replayed == pytest.approx(each.live, rel=0.05)
        assert each.difference == pytest.approx(0.0, abs=1e-12), "the same seeds on both sides"
        assert each.low <= 0 <= each.high


def test_the_interval_holds_what_the_other_policies_really_change() -> None:
    live, shadow = policies("deadline_triage"), policies("fcfs", None)
    made = traffic(2, 2 * WARM_UP_S + 6 * WINDOW_S, 7.0)
    found = records(run(made, live, 0.05, 1))
    windows = compared(found, live, shadow, replicas(0.05), 16, seed=9)
    (change, _, _) = estimates([windows])
    other = outcomes(run(made, shadow, 0.05, 77).requests)
    really = sums(made, *other).sum(0)[0] / windows[:, 0].sum(0)[0] - change.live
    assert change.low <= really <= change.high
    assert change.high < 0, "without deadlines fewer are in time, and the interval says so"


def test_a_request_without_an_answer_has_the_length_of_another_of_its_task() -> None:
    def one(at_s: float, tokens: int, tenant: int) -> Recorded:
        return Recorded(Arrival(at_s, 10, tokens, SLOW, f"standard {tenant}"), False, False)

    found = [one(5, 7, 1), one(26, 0, 1), one(27, 90, 2), one(28, 0, 2), one(65, 7, 1)]
    windows = compared(found, policies("fcfs"), policies("fcfs"), replicas(0.0), 16)
    assert len(windows) == 1 and windows[0, 0].tolist() == [3.0, 3.0, 20.0]
    assert set(windows[0, 2:, 2]) == {7.0 + 90.0 + 90.0}


def test_no_windows_and_windows_without_requests_give_no_figures() -> None:
    short = compared(
        records(run(traffic(3, 5.0, 2.0), policies("fcfs"), 0, 1)),
        policies("fcfs"),
        policies("fcfs"),
        replicas(0.0),
        16,
    )
    assert len(short) == 0
    assert all(isnan(each.difference) for each in estimates([short]))
    empty = np.zeros((3, 2 + 2 * SEEDS, len(FIGURES)))
    assert all(isnan(each.difference) for each in estimates([empty]))
