"""A backlog whose deadlines have passed is served as fast as the engine can."""

from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Belief, Truth
from sluice.simulation.run import simulate
from tests.simulation.loads import workload

# Of the order of a model of 7B on a GPU with 80 GB.
MODEL = LinearLatency(a=0.010, b=8.1e-5, c=2.9e-8, d=1.5e-9)


def seconds_of(policy: str) -> float:
    """Until 40 long prompts that came at once, of which three can be on time, have ended."""
    load = workload(*[(0.0, 3_000, 300)] * 40, slo=SLO(ttft_s=0.8, tpot_s=0.08))
    engine = EngineConfig(kv_blocks=60_000)
    made = make_policy(policy)
    return simulate(load, made, Truth(MODEL, noise=0.0), Belief(MODEL), engine).end_s


def test_a_late_backlog_takes_hardly_longer_than_in_order_of_arrival() -> None:
    assert seconds_of("deadline_triage") < 1.2 * seconds_of("fcfs")
