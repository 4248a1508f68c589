"""Running streams move between simulated replicas: what that wins, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.request.objective import SLO
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig, Resize, Slowdown
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.run import Result
from tests.simulation.clusters import EXACT, batch, ended_well, route
from tests.simulation.loads import workload

PUSH_S = 1.0
"""Between two looks for streams to move."""


def run(load: Any, incidents: list[Any], migrate: bool, **config: Any) -> Result:
    cluster = ClusterConfig(replicas=2, push_interval_s=PUSH_S, migrate=migrate, **config)
    return simulate_cluster(
        load,
        batch("deadline_triage"),
        route(),
        EXACT,
        cluster=cluster,
        incidents=incidents,
        admission=make_admission("moore_hodgson"),
    )


def test_a_drain_ends_with_the_pauses_of_its_streams() -> None:
    load = workload(*((0.01 * i, 400, 2_000) for i in range(24)), slo=SLO(ttft_s=2, tpot_s=0.05))
    leaves_s = 1.5
    drained_s, gaps_s = {}, {}
    for migrate in (False, True):
        result = run(load, [Resize(leaves_s, -1)], migrate)
        assert ended_well(result).all() and not result.requests.failures
        (drained_s[migrate],) = result.drains_s
        times_s = result.requests.emitted_s.reshape(len(load), -1)
        gaps_s[migrate] = float(np.diff(times_s).max())
        assert result.migrated == (12 if migrate else 0), "all of the replica's streams"
        assert result.moved == result.split == 0
        met = attained(result.requests, stages(result.requests), TPOTMetric.MEAN)
        assert met.all(), "and no promise suffers"
    # Streams last for ten seconds and more; a push later all have left.
    assert drained_s[False] > 8.0
    assert drained_s[True] < PUSH_S + 1.0
    # A transfer of 400 to 800 tokens takes 5 ms at most; a prefill of them would take 20 to 40.
    assert gaps_s[True] < gaps_s[False] + 0.06


def test_streams_leave_a_replica_that_has_become_too_slow() -> None:
    """Steps of one replica take four times as long from 1 s on."""
    load = workload(*((0.02 * i, 100, 1_500) for i in range(16)), slo=SLO(ttft_s=1, tpot_s=0.012))
    kept = {}
    for migrate in (False, True):
        result = run(load, [Slowdown(1.0, 0, 4.0)], migrate)
        assert ended_well(result).all()
        requests = result.requests
        promised = ~np.isnan(requests.promised_s)
        assert promised.sum() >= 12
        met = attained(requests, stages(requests), TPOTMetric.MEAN)
        kept[migrate] = float(met[promised].mean())
    assert kept[True] > kept[False] + 0.2
