"""Clusters that change their size while they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from sluice.scheduling.autoscaling import (
    AutoscalingPolicy,
    Decision,
    Load,
    Pool,
    State,
    make_policy,
)
from sluice.scheduling.autoscaling.role_shares import RoleShares
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.cluster import Scaler
from sluice.simulation.config import Autoscaling, ClusterConfig, Failure
from sluice.simulation.mirror import SLOCounter
from sluice.simulation.replica import Events
from sluice.simulation.requests import Requests
from sluice.simulation.run import Result
from sluice.simulation.workload import Arrival, Workload
from tests.simulation.loads import clustered, ended_well, met, pools, workload

MODEL = LinearLatency(a=0.01, b=0.001)
OBJECTIVE = SLO(ttft_s=1.0, tpot_s=0.1)


class Timetable(AutoscalingPolicy):
    """Sizes by the time, and what it was shown."""

    name = "timetable"
    source = "tests"

    def __init__(self, sizes: Mapping[float, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.loads: list[Load] = []

    def decide(self, load: Load, pool: Pool, state: State) -> Decision:
        self.loads.append(load)
        wanted = [size for at_s, size in self.sizes.items() if at_s <= load.now_s]
        return Decision(pool.bounded(wanted[-1] if wanted else pool.target), {}, "as planned")


def arrivals(gaps: Sequence[float], slo: SLO = OBJECTIVE, output: int = 10) -> Workload:
    times = np.cumsum(gaps)
    return Workload("made", tuple(Arrival(float(at), 100, output, slo) for at in times))


def run_with(policy: AutoscalingPolicy, load: Workload, startup_s: float = 30.0) -> Result:
    scaling = Autoscaling(lambda role: policy, 1, 10, 1.0, startup_s)
    one = ClusterConfig(replicas=1)
    return clustered(load, one, router="least_work", truth=MODEL, autoscaling=scaling)


class TestScaler:
    def make(self, sizes: Mapping[float, int]) -> tuple[Events, Scaler, list[tuple[float, int]]]:
        events, changes = Events(), []

        def change(by: int) -> None:
            changes.append((events.now_s, by))

        config = Autoscaling(lambda role: Timetable(sizes), 1, 10, 1.0, startup_s=5.0)
        scaler = Scaler(config, "mixed", events, lambda at: Load(at, 1.0), change, 2)
        return events, scaler, changes

    def run_until(self, events: Events, at_s: float) -> None:
        over: list[bool] = []
        events.at(at_s, lambda: over.append(True))
        while not over:
            events.run_next()

    def test_a_replica_serves_a_while_after_its_order_and_is_paid_for_from_then(self) -> None:
        events, scaler, changes = self.make({3.0: 4})
        self.run_until(events, 6.0)
        assert (scaler.target, changes) == (4, [])
        assert scaler.started_s(6.0) == pytest.approx(2 * 3.0)
        self.run_until(events, 20.0)
        assert changes == [(8.0, 1), (8.0, 1)]
        assert scaler.started_s(20.0) == pytest.approx(2 * 5.0)

    def test_orders_are_given_up_before_replicas_drain(self) -> None:
        events, scaler, changes = self.make({3.0: 4, 5.0: 1})
        self.run_until(events, 20.0)
        assert changes == [(5.0, -1)]
        assert scaler.started_s(20.0) == pytest.approx(2 * 2.0)
        assert [size.replicas for size in scaler.sizes] == [2, 4, 1]


class TestCluster:
    def test_no_request_is_lost_while_replicas_come_and_go(self) -> None:
        sizes = {2.0: 5, 10.0: 1, 15.0: 4, 22.0: 1}
        done = run_with(Timetable(sizes), arrivals([0.05] * 600), startup_s=2.0)
        assert not done.requests.failures
        assert not np.isnan(done.requests.emitted_s).any()
        assert [size.replicas for size in done.sizes["mixed"]] == [1, 5, 1, 4, 1]
        assert len(done.steps) == 1 + 4 + 3

    def test_it_pays_for_what_starts_and_for_what_drains(self) -> None:
        done = run_with(Timetable({2.0: 3, 20.0: 1}), arrivals([0.2] * 200), startup_s=4.0)
        assert done.starting_s == pytest.approx(2 * 4.0)
        # One for the whole run, two from 6 s to 20 s and what they had left.
        least = done.end_s + 2 * 14.0
        assert least <= done.up_s <= least + 2 * 2.0
        assert done.replica_s == done.up_s + done.starting_s

    def test_a_fixed_cluster_pays_for_itself(self) -> None:
        three = ClusterConfig(replicas=3)
        done = clustered(arrivals([0.2] * 20), three, router="least_work", truth=MODEL)
        assert done.replica_s == pytest.approx(3 * done.end_s)
        assert (done.starting_s, done.sizes) == (0.0, {})

    def test_each_role_is_sized_by_itself(self) -> None:
        made: dict[str, Timetable] = {}

        def make(role: str) -> Timetable:
            return made.setdefault(role, Timetable({1.0: 2 if role == "prefill" else 3}))

        done = clustered(
            arrivals([0.1] * 100),
            pools(),
            router="least_work",
            truth=MODEL,
            autoscaling=Autoscaling(make, 1, 4, 1.0, 1.0),
        )
        assert {role: sizes[-1].replicas for role, sizes in done.sizes.items()} == {
            "prefill": 2,
            "decode": 3,
        }
        assert made["prefill"].loads[-1].asked_s > 10 * made["decode"].loads[-1].asked_s
        assert made["decode"].loads[-1].ongoing >= 0

    def test_the_policy_sees_what_was_asked_and_what_was_attained(self) -> None:
        policy = Timetable({})
        done = run_with(policy, arrivals([0.5] * 40))
        last = policy.loads[-1]
        # What replicas report is corrected by what they have learnt of the noise.
        assert last.asked_s == pytest.approx(last.asked * MODEL.work_s(100, 0), rel=0.05)
        assert last.judged <= last.asked <= 40
        assert last.attained <= met(done).sum()

    def test_head_room_follows_a_load_up_and_down(self) -> None:
        gaps = [*[1.0] * 60, *[0.05] * 1000, *[1.0] * 240]
        policy = make_policy("head_room", {"startup_s": 5.0, "down_after_s": 20.0})
        done = run_with(policy, arrivals(gaps), startup_s=5.0)
        sizes = [size.replicas for size in done.sizes["mixed"]]
        assert max(sizes) >= 3
        assert sizes[-1] == 1
        assert not done.requests.failures


def test_requests_without_an_objective_are_not_judged() -> None:
    counted = SLOCounter(Requests(arrivals([0.0], slo=SLO())))
    counted.ended(0)
    assert counted.count == 0


PHASE_S = 15.0


def test_roles_change_with_the_mix_and_no_request_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prompts, then long answers, at a pace of which a step's fixed time takes most; a replica
    dies between the two."""
    monkeypatch.setattr("sluice.scheduling.autoscaling.role_shares.MEMORY_S", 5.0)
    monkeypatch.setattr("sluice.scheduling.autoscaling.role_shares.SMOOTHING_S", 2.0)
    slo = SLO(ttft_s=1.0, tpot_s=0.0055)
    prompts = [(number / 30, 1_500, 60) for number in range(int(30 * PHASE_S))]
    answers = [(PHASE_S + number / 25, 50, 400) for number in range(int(25 * PHASE_S))]
    result = clustered(
        workload(*prompts, *answers, slo=slo),
        ClusterConfig(replicas=4),
        Failure(PHASE_S, 0, down_s=2.0),
        policy="slidebatching",
        router="most_gain",
        admission="moore_hodgson",
        roles=RoleShares(),
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
