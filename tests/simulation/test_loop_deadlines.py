"""Loops with a deadline on a simulated cluster: promises are kept, turns stay with their KV."""

from __future__ import annotations

import pytest

from sluice.scheduling import admission, routing
from sluice.scheduling.batching import make_policy
from sluice.scheduling.placement.loops import MIN_ENDED
from sluice.scheduling.request.objective import SLO
from sluice.simulation.agents import HASHED_TOKENS, Loops, agents
from sluice.simulation.cluster import REFUSED, simulate_cluster
from sluice.simulation.config import ClusterConfig, EngineConfig, LoopDeadline
from sluice.simulation.generators import Poisson
from sluice.simulation.run import Result
from sluice.simulation.workload import Workload
from tests.simulation.loads import EXACT, MODEL

AGENT = Loops(
    slo=SLO(service_class="agent"), turns=6, least=4, most=9, scale=1 / 32, gap_scale=0.05
)


def run(workload: Workload, deadline_s: float, replicas: int = 2, when: str = "reject") -> Result:
    return simulate_cluster(
        workload,
        lambda _: make_policy("deadline_triage"),
        routing.make_policy("most_gain"),
        EXACT,
        MODEL,
        EngineConfig(max_batch_tokens=2048),
        ClusterConfig(
            replicas=replicas,
            loops={"agent": LoopDeadline(deadline_s=deadline_s, idle_s=15.0)},
            when_unattainable={"agent": when},
        ),
        admission=admission.make_policy("moore_hodgson"),
    )


def test_promised_loops_are_kept_and_others_refused() -> None:
    workload = agents("loops", [AGENT], Poisson(1.0), 120, seed=2)
    result = run(workload, 60.0)
    promised = {each.kept: count for each, count in result.loops.items() if each.promised}
    assert promised[True] > 50
    assert promised.get(False, 0) == 0
    # Turns end by their parts of the deadline.
    stated = [slo.columns[2] for slo in result.requests.stage_slos]
    assert max(stated) == pytest.approx(60.0) and min(stated) < 30.0
    # With a deadline that too few of them keep, none is promised: some are served to learn.
    result = run(workload, 8.0)
    assert not any(each.promised for each in result.loops)
    assert sum(result.loops.values()) >= MIN_ENDED
    assert REFUSED in result.requests.failures.values()


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_turns_of_loops_stay_with_their_kv(replicas: int) -> None:
    workload = agents("loops", [AGENT], Poisson(1.5), 80, seed=4)
    result = run(workload, 60.0, replicas, "best_effort")
    assert not result.requests.failures
    known, most = set[int](), 0
    for arrival in workload.arrivals:
        most += HASHED_TOKENS * sum(block in known for block in arrival.block_hashes)
        known |= set(arrival.block_hashes)
    # Nearly what one cache for all replicas would have.
    assert result.hit_tokens >= 0.97 * most
