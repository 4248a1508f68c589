"""A late prompt that loses its memory to others, over and over, is answered within its bound."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Belief, Truth, VirtualEngine
from sluice.simulation.requests import Requests
from sluice.simulation.rows import DONE_TOKENS, LOST_TOKENS, PREEMPTIONS
from sluice.simulation.run import drive
from sluice.simulation.workload import Arrival
from tests.examples import examples
from tests.simulation.loads import of

MODEL = LinearLatency(a=0.010, b=0.001)
BLOCKS = 100


def served(
    prompt: int, others: int, patience_s: float, share: float, until_s: float
) -> tuple[VirtualEngine, float]:
    """A prompt that is late from the start, among prompts of ``others`` tokens, more of which can
    be on time than the engine has time for; both do not fit 1,600 tokens at once. The engine, and
    when the first token of the late one left."""
    objective = SLO(ttft_s=6 * others * MODEL.b)
    # It is almost done when the first of them arrives.
    stream = np.arange(0.9 * prompt * MODEL.b, until_s, 0.8 * others * MODEL.b)
    load = of(
        [Arrival(0.0, prompt, 1, SLO(ttft_s=1e-3))]
        + [Arrival(float(when), others, 1, objective) for when in stream]
    )
    requests = Requests(load)
    policy = make_policy("deadline_triage", {"patience_s": patience_s, "aged_share": share})
    config = EngineConfig(kv_blocks=BLOCKS, prefix_cache=False)
    rng = np.random.default_rng(0)
    engine = VirtualEngine(config, policy, Belief(MODEL), Truth(MODEL, 0.0), requests, rng)
    drive(engine, requests)
    assert engine.free_blocks == BLOCKS
    return engine, float(requests.emitted_s[0])


@settings(max_examples=examples(20), deadline=None)
@given(
    prompt=st.integers(900, 1_500),
    others=st.integers(700, 900),
    patience_s=st.sampled_from([2.0, 10.0]),
    share=st.sampled_from([0.02, 0.1]),
)
def test_the_wait_is_bounded(prompt: int, others: int, patience_s: float, share: float) -> None:
    work_s = prompt * MODEL.b
    bound_s = patience_s + work_s / share
    _, first_s = served(prompt, others, patience_s, share, 1.5 * bound_s + 10)
    # Then it has half of each batch, after those that hold memory have ended.
    assert first_s <= bound_s + 4 * (work_s + others * MODEL.b)


def test_it_does_lose_its_memory() -> None:
    engine, _ = served(1_200, 800, 2.0, 0.02, 60.0)
    assert engine.counters[PREEMPTIONS] > 0
    assert engine.counters[LOST_TOKENS] < engine.counters[DONE_TOKENS] / 4
