"""Simulated replicas that change their roles with the mix of requests."""

from __future__ import annotations

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.autoscaling.role_shares import RoleShares, RoleSharesOptions
from sluice.scheduling.request.objective import SLO
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig, Failure
from tests.simulation.clusters import EXACT, batch, ended_well, route
from tests.simulation.loads import workload

PHASE_S = 15.0
QUICK = RoleShares(RoleSharesOptions(memory_s=5.0, smoothing_s=2.0))


def test_roles_change_with_the_mix_and_no_request_is_lost() -> None:
    """Many prompts, then long answers, at a pace of which a step's fixed time takes most; a replica
    dies between the two."""
    slo = SLO(ttft_s=1.0, tpot_s=0.0055)
    prompts = [(number / 30, 1_500, 60) for number in range(int(30 * PHASE_S))]
    answers = [(PHASE_S + number / 25, 50, 400) for number in range(int(25 * PHASE_S))]
    result = simulate_cluster(
        workload(*prompts, *answers, slo=slo),
        batch("slidebatching"),
        route("most_gain"),
        EXACT,
        cluster=ClusterConfig(replicas=4),
        incidents=[Failure(PHASE_S, 0, down_s=2.0)],
        admission=make_admission("moore_hodgson"),
        roles=QUICK,
    )
    assert not result.requests.failures
    assert ended_well(result).all()
    assert result.split > 50
    sizes = {
        role: [(size.at_s, size.replicas) for size in own] for role, own in result.sizes.items()
    }
    most = {
        role: max((n for at_s, n in own if at_s < PHASE_S), default=0)
        for role, own in sizes.items()
    }
    assert most["prefill"] >= 2
    assert sizes["prefill"][-1][1] < most["prefill"], sizes
