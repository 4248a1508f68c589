"""The simulator against a replica's simulated engine, which share how a step runs and nothing
around it: with one policy, one model and one workload, every token must leave at the same time."""

import numpy as np
import pytest

from sluice.replica.config import SimulatedEngineConfig
from sluice.replica.scheduler.local_scheduler import LocalScheduler, TrackedRequest
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.replica.simulated.core import SimulatedCore, SimulatedSequence
from sluice.scheduling.batching import POLICIES, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Belief, Truth
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival, Workload
from tests.simulation.loads import of

# Powers of two, so that a step's time is exact in whatever order it is summed: a search by
# annealing takes another turn for a difference in the last bit.
MODEL = LinearLatency(a=2**-8, b=2**-14, c=2**-22, d=2**-30)
BELIEF = LinearLatency(a=5 * 2**-10, b=3 * 2**-16, c=2**-22)
LIMITS = {"kv_blocks": 220, "max_batch_tokens": 512, "max_sequences": 12}


class Unlimited(LocalScheduler):
    """Its requests state no most tokens, as those of a workload do not; the replica's engine takes
    the real length for that, and would cap predictions by it."""

    def track(
        self,
        engine_id: str,
        args: RequestArgs,
        key: int,
        prompt_tokens: int,
        max_tokens: int,
        name: str | None = None,
    ) -> TrackedRequest:
        return super().track(engine_id, args, key, prompt_tokens, 1 << 30, name)


def busy(seed: int) -> Workload:
    """Requests of several objectives that overload the engine for a while."""
    rng = np.random.default_rng(seed)
    slos = (
        SLO(ttft_s=0.3, tpot_s=0.02),
        SLO(ttft_s=1.0, tpot_s=0.05, priority=2),
        SLO(e2e_s=2.0),
    )
    times = np.cumsum(rng.exponential(0.03, 120)).tolist()
    return of(
        Arrival(
            when,
            int(rng.integers(5, 900)),
            int(rng.integers(1, 80)),
            slos[int(rng.integers(len(slos)))],
        )
        for when in times
    )


def replica_times(load: Workload, policy: str) -> tuple[list[float], int]:
    """When each token leaves the replica's engine, by request; and the preemptions."""
    config = SimulatedEngineConfig(
        step_s=MODEL.a,
        token_s=MODEL.b,
        context_token_s=MODEL.c,
        quadratic_s=MODEL.d,
        max_model_tokens=LIMITS["kv_blocks"] * 16,
        **LIMITS,
    )
    table = StateTable.create(256)
    core = SimulatedCore(config, Unlimited(make_policy(policy), table, BELIEF), table)
    times: list[list[float]] = [[] for _ in load.arrivals]
    waiting = list(enumerate(load.arrivals))
    now_s, preempted = 0.0, 0

    def emit(sequence: SimulatedSequence) -> None:
        times[sequence.owner].append(now_s)

    while waiting or core.live:
        while waiting and waiting[0][1].arrival_s <= now_s:
            key, arrival = waiting.pop(0)
            core.submit(
                RequestArgs(str(key), arrival.arrival_s, arrival.slo),
                key,
                arrival.prompt_tokens,
                arrival.output_tokens,
                key,
            )
        step = core.begin(now_s)
        if step is None:
            now_s = waiting[0][1].arrival_s
            continue
        now_s += step.seconds
        preempted += len(step.preempted)
        core.complete(step, now_s, emit)
    return [when for own in times for when in own], preempted


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_token_leaves_when_it_leaves_the_replicas_engine(policy: str) -> None:
    load = busy(seed=4)
    expected, preempted = replica_times(load, policy)
    config = EngineConfig(**LIMITS)
    result = simulate(load, make_policy(policy), Truth(MODEL, 0), Belief(BELIEF), config)
    assert not result.requests.failures
    assert result.preemptions == preempted
    assert result.requests.emitted_s.tolist() == expected


def test_the_comparison_is_one_under_pressure() -> None:
    assert replica_times(busy(seed=4), "fcfs")[1] > 0
