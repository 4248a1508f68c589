"""Clients that come again at once when they are refused, in virtual time: what that changes by the
decisions alone, where refusals cost nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sluice.benchmarks.live.mix import Kind, Pattern
from sluice.controller.config import ControllerConfig
from sluice.replica.config import EngineConfig as ReplicaEngineConfig
from sluice.router.config import RouterConfig
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.kernels import ARRIVAL
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from sluice.simulation.cluster import Cluster
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.engine import Belief, Truth, VirtualEngine
from sluice.simulation.requests import Requests
from tests.light_engine import LIGHT_ENGINE

REPLICAS = 2
RATE = 3.6  # about what one engine can guarantee, requests a second
SECONDS = 35.0
WARM_UP_S = 5.0
PATIENCE_S = 5.0
STRICT = SLO(ttft_s=1.5, tpot_s=0.15, priority=2, service_class="strict")
PATTERN = Pattern("overload", kinds={"strict": Kind(1.0, (150, 450), (20, 60))})
SEEDS = (1, 2)
MODEL = LinearLatency(
    LIGHT_ENGINE["step_s"], LIGHT_ENGINE["token_s"], LIGHT_ENGINE["context_token_s"]
)
LIMITS = ("kv_blocks", "block_tokens", "max_batch_tokens", "max_sequences")


class Impatient(Cluster):
    """Clients send a refused request again when the refusal has left, at the router's pace, for
    ``patience_s``. Each attempt is a new request to the router: its time counts anew.

    Decisions know the most tokens that a request may have, as at a real router.
    """

    patience_s = 0.0
    refusals = 0
    _turn_s = -1.0

    def _query(self, key: int) -> RouteQuery:
        if not self._requests.begun(key):
            now_s, arrivals = self.events.now_s, self._requests.arrivals
            self._requests.rows[key, ARRIVAL] = now_s
            arrivals[key] = arrivals[key]._replace(arrival_s=now_s)
        most = self._requests.arrivals[key].output_tokens
        return super()._query(key)._replace(output_tokens=most)

    def _wait(self, key: int, limit_s: float, failure: str) -> None:
        self.refusals += 1
        now_s = self.events.now_s
        self._turn_s = max(self._turn_s, now_s - 1.0) + 1 / RouterConfig().refusals_per_s
        back_s = max(self._turn_s, now_s) + 0.005
        if back_s - self._waiting_since.setdefault(key, now_s) < self.patience_s:
            self.events.at(back_s, partial(self._place, key))
        else:
            self._end(key, failure)


def served(load: float, seed: int, patience_s: float) -> tuple[int, int, int]:
    """Requests and tokens that were served in time after the warm-up, and how often one was
    refused."""
    workload = PATTERN.workload(load * RATE * REPLICAS, SECONDS, seed, {"strict": STRICT})
    requests = Requests(workload)
    limits: dict[str, Any] = {name: LIGHT_ENGINE[name] for name in LIMITS}

    def make_engine(role: Role, number: int) -> VirtualEngine:
        policy = make_policy(ReplicaEngineConfig().policy)
        belief = Belief(MODEL.with_headroom(1.05))
        rng = np.random.default_rng(number)
        return VirtualEngine(
            EngineConfig(**limits), policy, belief, Truth(MODEL, 0.0), requests, rng
        )

    control = ControllerConfig()
    config = ClusterConfig(replicas=REPLICAS, when_unattainable={"strict": "reject"})
    run = Impatient(
        requests,
        make_engine,
        control.make_routing(),
        config,
        np.random.default_rng(0),
        control.make_admission(),
    )
    run.patience_s = patience_s
    run.run()
    count = tokens = 0
    for key in range(len(requests)):
        times = requests.emitted_s[requests.offsets[key] : requests.offsets[key + 1]]
        if key in requests.failures or not WARM_UP_S <= times[-1] < SECONDS:
            continue
        ttft_s = times[0] - requests.rows[key, ARRIVAL]
        pace_s = (times[-1] - times[0]) / max(1, len(times) - 1)
        if ttft_s <= (STRICT.ttft_s or 0.0) and pace_s <= (STRICT.tpot_s or 0.0):
            count += 1
            tokens += len(times)
    return count, tokens, run.refusals


@pytest.mark.parametrize("load", [pytest.param(3.0, marks=pytest.mark.release), 10.0])
def test_who_comes_again_at_once_takes_the_place_of_others_and_as_much_is_served(
    load: float,
) -> None:
    once = np.sum([served(load, seed, 0.0) for seed in SEEDS], axis=0)
    again = np.sum([served(load, seed, PATIENCE_S) for seed in SEEDS], axis=0)
    # The storm was one: as many refusals as the pace lets leave.
    assert again[2] > 0.9 * RouterConfig().refusals_per_s * SECONDS * len(SEEDS)
    assert again[:2] == pytest.approx(once[:2], rel=0.08)
    per_s = once[0] / len(SEEDS) / (SECONDS - WARM_UP_S)
    assert per_s == pytest.approx(REPLICAS * RATE, rel=0.1)
