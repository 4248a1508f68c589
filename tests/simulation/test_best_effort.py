"""Two tiers on one simulated engine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.batching import BatchPolicy, BestEffortOptions, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Belief, Truth, VirtualEngine
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.requests import Requests
from sluice.simulation.rows import DONE_TOKENS, EVICTED_TOKENS, EVICTIONS, LOST_TOKENS, PREEMPTIONS
from sluice.simulation.run import drive
from sluice.simulation.workload import Arrival, Workload
from tests.examples import examples
from tests.simulation.loads import MODEL, of

CHAT = SLO(ttft_s=0.5, tpot_s=0.05)


def serve(
    load: Workload,
    best_effort: list[bool],
    policy: BatchPolicy,
    config: EngineConfig,
) -> tuple[VirtualEngine, Requests]:
    """Run ``load``, of whose requests those marked are best effort."""
    requests = Requests(load)
    for key, flag in enumerate(best_effort):
        requests.serve_as(key, flag)
    belief = Belief(MODEL.with_headroom(1.05))
    rng = np.random.default_rng(7)
    engine = VirtualEngine(config, policy, belief, Truth(MODEL, 0.0), requests, rng)
    drive(engine, requests)
    return engine, requests


def two_tiers(rate: float, behind: int, seed: int = 3) -> tuple[Workload, list[bool]]:
    """Chat at ``rate`` a second for 20 s, and long work without an objective: ``behind``
    requests, all there from the start."""
    rng = np.random.default_rng(seed)
    count = int(20 * rate)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    chat = [
        Arrival(t, int(rng.integers(100, 1_500)), int(rng.integers(10, 150)), CHAT, task="chat")
        for t in times
    ]
    batch = [
        Arrival(0.0, int(rng.integers(200, 2_000)), int(rng.integers(50, 400)), SLO(), task="batch")
        for _ in range(behind)
    ]
    load = of([*chat, *batch])
    return load, [arrival.task == "batch" for arrival in load.arrivals]


CONFIG = EngineConfig(kv_blocks=1_200, max_batch_tokens=2_048, max_sequences=48)


def shares(requests: Requests, flags: list[bool]) -> tuple[float, float]:
    """Attainment of the promised requests, and the last time at which one of them emitted."""
    met = attained(requests, stages(requests), TPOTMetric.MEAN)
    promised = ~np.array(flags)
    last = max(
        requests.emitted_s[requests.offsets[key + 1] - 1] for key in np.flatnonzero(promised)
    )
    return float(met[promised].mean()), float(last)


@pytest.mark.parametrize(
    "name",
    [
        "fcfs",
        "deadline_triage",
        pytest.param("slos_serve", marks=pytest.mark.release),
    ],
)
def test_promised_requests_hardly_notice_a_backlog_behind_them(name: str) -> None:
    load, flags = two_tiers(rate=6.0, behind=150)
    alone = of([arrival for arrival in load.arrivals if arrival.task == "chat"])
    _, quiet = serve(alone, [False] * len(alone), make_policy(name), CONFIG)
    engine, requests = serve(load, flags, make_policy(name), CONFIG)
    before, _ = shares(quiet, [False] * len(alone))
    with_backlog, _ = shares(requests, flags)
    assert with_backlog >= before - 0.03
    assert engine.fallbacks == engine.dropped == 0
    # The backlog is served beside them, not after.
    done = sum(
        requests.emitted_s[requests.offsets[key + 1] - 1] < 30.0 for key in np.flatnonzero(flags)
    )
    assert done > 10
    assert engine.counters[EVICTIONS] > 0
    assert engine.counters[EVICTED_TOKENS] < 0.15 * engine.counters[DONE_TOKENS]


@pytest.mark.parametrize("name", ["fcfs", "deadline_triage"])
def test_the_backlog_goes_on_while_promises_overload_the_engine(name: str) -> None:
    load, flags = two_tiers(rate=40.0, behind=12)
    options = BestEffortOptions(patience_s=2.0, aged_share=0.05)
    engine, requests = serve(load, flags, make_policy(name, {}, options), CONFIG)
    _, last = shares(requests, flags)
    first = sorted(requests.first_token_s(key) for key in np.flatnonzero(flags))
    assert last > 35.0, "the promised work must outlast its arrivals"
    # One by one, each after the answer of the one before it.
    assert first[0] < 20.0
    assert first[5] < last
    assert engine.counters[EVICTED_TOKENS] < 0.05 * engine.counters[DONE_TOKENS]


SLOW = LinearLatency(a=0.010, b=0.001)
BLOCKS = 100


def served(
    prompt: int, others: int, patience_s: float, share: float, until_s: float
) -> tuple[VirtualEngine, float]:
    """A prompt that is late from the start, among prompts of ``others`` tokens, more of which can
    be on time than the engine has time for; both do not fit 1,600 tokens at once. The engine, and
    when the first token of the late one left."""
    objective = SLO(ttft_s=6 * others * SLOW.b)
    # It is almost done when the first of them arrives.
    stream = np.arange(0.9 * prompt * SLOW.b, until_s, 0.8 * others * SLOW.b)
    load = of(
        [Arrival(0.0, prompt, 1, SLO(ttft_s=1e-3))]
        + [Arrival(float(when), others, 1, objective) for when in stream]
    )
    requests = Requests(load)
    policy = make_policy("deadline_triage", {"patience_s": patience_s, "aged_share": share})
    config = EngineConfig(kv_blocks=BLOCKS, prefix_cache=False)
    rng = np.random.default_rng(0)
    engine = VirtualEngine(config, policy, Belief(SLOW), Truth(SLOW, 0.0), requests, rng)
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
    work_s = prompt * SLOW.b
    bound_s = patience_s + work_s / share
    _, first_s = served(prompt, others, patience_s, share, 1.5 * bound_s + 10)
    # Then it has half of each batch, after those that hold memory have ended.
    assert first_s <= bound_s + 4 * (work_s + others * SLOW.b)


def test_it_does_lose_its_memory() -> None:
    engine, _ = served(1_200, 800, 2.0, 0.02, 60.0)
    assert engine.counters[PREEMPTIONS] > 0
    assert engine.counters[LOST_TOKENS] < engine.counters[DONE_TOKENS] / 4


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.release)])
def test_chat_hardly_notices_a_backlog_of_less_worth(seed: int) -> None:
    """The P95 of its TTFT, beside a backlog without an objective, over that alone."""
    rng = np.random.default_rng(seed)

    def request(arrival_s: float, objective: SLO) -> Arrival:
        prompt, output = int(rng.integers(120, 480)), int(rng.integers(16, 64))
        return Arrival(arrival_s, prompt, output, objective)

    times_s = np.cumsum(rng.exponential(0.5, 80)).tolist()
    chat = [request(time_s, SLO()) for time_s in times_s]
    backlog = [request(0.0, SLO()) for _ in range(600)]
    # An engine on a processor: 4 ms a step, 0.16 ms a token.
    model = LinearLatency(a=0.004, b=1.6e-4, c=1e-6, d=0.0)

    def ttft_s(priority: int, behind: list[Arrival]) -> tuple[float, int]:
        slo = SLO(ttft_s=2.0, tpot_s=0.1, priority=priority)
        mine = [each._replace(slo=slo) for each in chat]
        load = of([*mine, *behind])
        flags = [not each.slo.stated for each in load.arrivals]
        requests = Requests(load)
        for key, flag in enumerate(flags):
            requests.serve_as(key, flag)
        config = EngineConfig(kv_blocks=4_000, max_batch_tokens=2_048, max_sequences=64)
        noise, drawn = Truth(model, 0.03), np.random.default_rng(7)
        policy = make_policy("deadline_triage")
        drive(VirtualEngine(config, policy, Belief(model), noise, requests, drawn), requests)
        first = requests.emitted_s[requests.offsets[:-1]]
        last = requests.emitted_s[requests.offsets[1:] - 1]
        waits = [first[k] - load.arrivals[k].arrival_s for k, flag in enumerate(flags) if not flag]
        done = sum(flag and last[k] <= times_s[-1] for k, flag in enumerate(flags))
        return float(np.percentile(waits, 95)), done

    alone, _ = ttft_s(2, [])
    equal, most = ttft_s(1, backlog)
    beside, done = ttft_s(2, backlog)
    assert equal > 1.5 * alone
    assert beside < 1.15 * alone
    assert done > 0.3 * most
