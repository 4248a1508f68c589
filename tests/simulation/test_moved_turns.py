"""What it is worth that turns of loops fetch their prefix when they are placed elsewhere."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from sluice.scheduling import admission, routing
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.agents import Loops, agents
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig, EngineConfig, Failure, Resize
from sluice.simulation.generators import Poisson
from sluice.simulation.metrics import stages
from sluice.simulation.workload import Workload

TRUTH = LinearLatency(a=0.006, b=5e-5, c=4e-9)
JOIN_S = 20.0
SEEDS = (1, 2, 3)


class Figures(NamedTuple):
    fetched: int
    computed: int
    ttft_s: np.ndarray


@cache
def load(seed: int) -> Workload:
    """Loops of half of the published lengths that begin within seconds."""
    kind = Loops("agent", SLO(tpot_s=0.1), least=6, most=12, scale=1 / 2, gap_scale=0.3)
    return agents("loops", [kind], Poisson(2.0), 24, seed)


def run(seed: int, fetch: bool, *incidents: Resize | Failure) -> Figures:
    """One replica, and by default another one that joins when the first is full."""
    workload = load(seed)
    result = simulate_cluster(
        workload,
        lambda _: make_policy("deadline_triage"),
        routing.make_policy("most_gain"),
        TRUTH,
        engine=EngineConfig(kv_blocks=200_000, max_batch_tokens=8_192),
        cluster=ClusterConfig(replicas=1, fetch=fetch),
        incidents=incidents or (Resize(JOIN_S, 1),),
        admission=admission.make_policy("moore_hodgson"),
    )
    requests = result.requests
    assert not requests.failures
    after = np.array([bool(each.after) for each in workload.arrivals])
    came_s = np.array([each.arrival_s for each in requests.arrivals])
    outputs = sum(each.output_tokens - 1 for each in workload.arrivals)
    first_s = stages(requests).ttft_s[after & (came_s > JOIN_S)]
    return Figures(result.fetched, result.computed_tokens - outputs, first_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_spread_to_new_replicas_without_computing_their_conversations_again(
    seed: int,
) -> None:
    before, after = run(seed, fetch=False), run(seed, fetch=True)
    for name, each in (("computed", before), ("fetched", after)):
        p50, p95 = np.percentile(each.ttft_s, (50, 95))
        print(
            f"seed {seed} {name}: {each.fetched} fetched, {each.computed} tokens computed, TTFT "
            f"mean {each.ttft_s.mean():.3f} P50 {p50:.3f} P95 {p95:.3f} of {len(each.ttft_s)}"
        )
    assert (before.fetched, after.fetched > 0) == (0, True)
    assert after.computed < before.computed
    assert after.ttft_s.mean() < before.ttft_s.mean()
