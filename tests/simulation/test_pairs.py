"""Simulated pairs: one replica computes the prompt, another one goes on, and all ends well."""

import numpy as np
import pytest

from sluice.scheduling.batching import make_policy
from sluice.scheduling.request.kernels import TTFT
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import ClusterConfig, EngineConfig, Failure, Resize, Slowdown
from sluice.simulation.replica import Incident
from sluice.simulation.run import Result, simulate
from sluice.simulation.workload import Workload
from tests.simulation.loads import EXACT, MODEL, clustered, ended_well, met, pools, steady, workload

DEFAULT = {"policy": "deadline_triage", "admission": "moore_hodgson"}
PAIR = pools(dispatch_s=0, transfer_s=0.003, transfer_tokens_per_s=100_000)


def test_a_pair_pays_for_its_transfer_and_for_the_last_token_of_the_prompt() -> None:
    load = workload((0.0, 1_000, 3))
    result = clustered(load, PAIR)
    alone = simulate(load, make_policy("fcfs"), EXACT).requests.emitted_s
    again_s = MODEL.fixed_s + MODEL.work_s(1, 999)
    times = result.requests.emitted_s
    # The decode replica makes the first token.
    assert times[0] == pytest.approx(alone[0] + 0.003 + 0.010 + again_s)
    assert np.diff(times) == pytest.approx(np.diff(alone))
    assert result.steps == (1, 3)
    assert result.split == 1
    assert result.computed_tokens == 1_000 + 1 + 2


def test_requests_go_whole_to_a_replica_of_any_role_where_a_role_has_nobody() -> None:
    load = steady(20)
    for dead in (0, 1):
        result = clustered(load, pools(edge_wait_s=9.0), Failure(0.0, dead))
        assert not result.requests.failures
        assert ended_well(result).all()
        assert result.split == 0


def test_mixed_replicas_beside_pairs_take_their_part() -> None:
    load = steady(300, gap_s=0.005)
    result = clustered(load, pools(1, 1, replicas=1))
    assert not result.requests.failures
    assert 30 < result.split < 270


def test_prefill_replicas_stall_while_their_kv_is_being_sent_and_then_go_on() -> None:
    # Six blocks hold one prompt; sending it takes a second.
    cluster = pools(transfer_s=1.0, dispatch_s=0)
    load = workload((0.0, 90, 2), (0.0, 90, 2))
    engine = EngineConfig(kv_blocks=6)
    result = clustered(load, cluster, engine=engine)
    assert not result.requests.failures
    first, second = result.requests.emitted_s[0], result.requests.emitted_s[2]
    assert second - first > 1.0


def test_where_the_kv_in_flight_dies_with_its_replica_the_other_side_computes_the_prompt() -> None:
    cluster = pools(transfer_s=1.0, dispatch_s=0)
    load = workload((0.0, 90, 2))
    result = clustered(load, cluster, Failure(0.5, 0))
    assert not result.requests.failures
    assert (result.split, result.moved) == (0, 0)
    assert result.steps == (1, 2)
    assert result.computed_tokens == 90 + 90 + 1
    assert result.requests.emitted_s[0] > 1.0


def test_where_the_decode_replica_dies_before_the_kv_is_there_a_new_pair_is_chosen() -> None:
    cluster = pools(1, 2, transfer_s=0.2, dispatch_s=0)
    load = workload((0.0, 90, 5))
    for victim in (1, 2):
        result = clustered(load, cluster, Failure(0.1, victim))
        assert not result.requests.failures
        assert result.split == 1
        # It was the target of the pair, or the other one.
        assert (result.moved, result.steps[0]) in ((1, 2), (0, 1))


def test_an_answer_that_a_decode_replica_had_begun_is_resumed_by_another_pair() -> None:
    cluster = pools(1, 2)
    load = workload((0.0, 90, 200))
    died = [clustered(load, cluster, Failure(0.4, victim)) for victim in (1, 2)]
    assert all(ended_well(result).all() for result in died)
    # One of the two had the request. Its prompt and what it had emitted went another way again.
    assert sorted((result.moved, result.split) for result in died) == [(0, 1), (1, 2)]


def test_what_is_resumed_is_promised_again_what_is_left_of_its_objective() -> None:
    # It fails long after its first token was due; the next one is due as soon as that of another.
    slo = SLO(ttft_s=0.1, tpot_s=0.05)
    load = workload((0.0, 90, 200), slo=slo)
    config = ClusterConfig(replicas=1, when_unattainable={"standard": "reject"}, promise_level=None)
    result = clustered(load, config, Failure(0.6, 0, down_s=0.0), **DEFAULT)
    requests = result.requests
    assert (requests.failures, result.moved) == ({}, 1)
    assert not requests.best_effort[0]
    assert requests.promised_s[0] <= 0.1, "of its first token"
    had = int((requests.emitted_s < 0.6).sum())
    gone_s = 0.6 + 0.05 + 0.02
    assert requests.rows[0, TTFT] == pytest.approx(max(0.1 + had * 0.05, gone_s + 0.1))


def test_a_leaving_prefill_replica_stays_until_its_kv_has_been_sent() -> None:
    cluster = pools(2, 1, transfer_s=0.5, dispatch_s=0)
    load = workload((0.0, 90, 200), (0.0, 90, 200))
    result = clustered(load, cluster, Resize(0.1, -1, "prefill"), router="round_robin")
    assert not result.requests.failures
    left_s = result.up_s - 2 * result.end_s
    computed_s = MODEL.fixed_s + MODEL.work_s(90, 0)
    assert left_s == pytest.approx(computed_s + 0.5 + 90 / 200_000)
    assert left_s < result.end_s


PUSH_S = 1.0
"""Between two looks for streams to move."""


def run(load: Workload, incident: Incident, migrate: bool) -> Result:
    cluster = ClusterConfig(replicas=2, push_interval_s=PUSH_S, migrate=migrate)
    return clustered(load, cluster, incident, **DEFAULT)


def test_a_drain_ends_with_the_pauses_of_its_streams() -> None:
    load = workload(*((0.01 * i, 400, 2_000) for i in range(24)), slo=SLO(ttft_s=2, tpot_s=0.05))
    leaves_s = 1.5
    drained_s, gaps_s = {}, {}
    for migrate in (False, True):
        result = run(load, Resize(leaves_s, -1), migrate)
        assert ended_well(result).all() and not result.requests.failures
        (drained_s[migrate],) = result.drains_s
        times_s = result.requests.emitted_s.reshape(len(load), -1)
        gaps_s[migrate] = float(np.diff(times_s).max())
        assert result.migrated == (12 if migrate else 0), "all of the replica's streams"
        assert result.moved == result.split == 0
        assert met(result).all(), "and no promise suffers"
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
        result = run(load, Slowdown(1.0, 0, 4.0), migrate)
        assert ended_well(result).all()
        promised = ~np.isnan(result.requests.promised_s)
        assert promised.sum() >= 12
        kept[migrate] = float(met(result)[promised].mean())
    assert kept[True] > kept[False] + 0.2
