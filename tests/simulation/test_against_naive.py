"""The simulator against an engine in plain Python that was written from the rules alone: no table,
no compiled loop, no policy object. Every batch must hold the same tokens at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.batching import BatchPlan, make_policy
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Truth
from sluice.simulation.metrics import stages
from sluice.simulation.run import TOO_LONG, simulate
from sluice.simulation.workload import Arrival, Workload
from sluice.simulation.wrapped import Noted
from tests.examples import examples
from tests.simulation.loads import OBJECTIVE, of

# Powers of two, so that a step's time is exact in whatever order it is summed.
MODEL = LinearLatency(a=2**-8, b=2**-14, c=2**-22, d=2**-30)

Batch = tuple[float, list[tuple[int, int]]]
"""When a batch begins, and its requests with their tokens, in order."""


@dataclass
class Sequence:
    """A live request of the naive engine."""

    key: int
    arrival: Arrival
    computed: int = 0
    emitted: int = 0
    blocks: int = 0
    admitted: int = -1
    """Number of its admission; -1 while it waits."""

    @property
    def running(self) -> bool:
        return self.admitted >= 0

    @property
    def pending(self) -> int:
        return self.arrival.prompt_tokens + self.emitted - self.computed

    @property
    def due_s(self) -> float:
        """FairBatching §3.1's envelope."""
        slo = self.arrival.slo
        if slo.ttft_s is None or slo.tpot_s is None:
            return inf
        return self.arrival.arrival_s + slo.ttft_s + self.emitted * slo.tpot_s


Order = Callable[[list[Sequence]], list[Sequence]]

ORDERS: dict[str, Order] = {
    "fcfs": lambda live: sorted(live, key=lambda s: not s.running),
    "sarathi": lambda live: sorted(
        live, key=lambda s: (not s.running, s.emitted == 0 or s.pending > 1)
    ),
    "edf": lambda live: sorted(live, key=lambda s: s.due_s),
}


class Naive:
    """The engine: running requests may take the blocks of those that the batch leaves out, the
    waiting ones only what is free, and whole prompts only."""

    def __init__(self, load: Workload, order: Order, config: EngineConfig) -> None:
        self.batches: list[Batch] = []
        self.times: list[list[float]] = [[] for _ in load.arrivals]
        self.preempted = 0
        self.lost_tokens = 0
        self._order = order
        self._config = config
        self._live: list[Sequence] = []
        self._free = config.kv_blocks
        self._admissions = 0
        waiting = [
            Sequence(key, arrival)
            for key, arrival in enumerate(load.arrivals)
            if arrival.prompt_tokens + arrival.output_tokens <= config.kv_tokens
        ]
        now_s = 0.0
        while waiting or self._live:
            while waiting and waiting[0].arrival.arrival_s <= now_s:
                self._live.append(waiting.pop(0))
            now_s = self._step(now_s) if self._live else waiting[0].arrival.arrival_s

    def _step(self, now_s: float) -> float:
        plan = self._plan(self._order) or self._plan(ORDERS["fcfs"])
        self.batches.append((now_s, [(s.key, tokens) for s, tokens in plan]))
        planned = [s.key for s, _ in plan]
        for s, tokens in plan:
            more = self._more(s, tokens)
            s.blocks += more
            self._free -= more
            if not s.running:
                s.admitted = self._admissions
                self._admissions += 1
        while self._free < 0:
            outside = [s for s in self._live if s.running and s.key not in planned]
            loser = max(outside, key=lambda s: s.admitted)
            self._free += loser.blocks
            self.preempted += 1
            self.lost_tokens += loser.computed
            loser.computed, loser.blocks, loser.admitted = 0, 0, -1
        seconds = MODEL.a
        for s, n in plan:
            after = s.computed + n
            seconds += MODEL.b * n + MODEL.c * after + MODEL.d * n * (s.computed + n / 2)
        now_s += seconds
        for s, tokens in plan:
            s.computed += tokens
            if not s.pending:
                s.emitted += 1
                self.times[s.key].append(now_s)
            if s.emitted == s.arrival.output_tokens:
                self._free += s.blocks
                self._live.remove(s)
        return now_s

    def _more(self, s: Sequence, tokens: int) -> int:
        return max(0, ceil((s.computed + tokens) / self._config.block_tokens) - s.blocks)

    def _plan(self, order: Order) -> list[tuple[Sequence, int]]:
        config, free = self._config, self._free
        running = [s for s in self._live if s.running]
        tokens_left, closed, admitted = config.max_batch_tokens, False, 0
        plan: list[tuple[Sequence, int]] = []
        for s in order(self._live):
            tokens = min(s.pending, tokens_left)
            if not tokens:
                break
            if s.running:
                planned = [other for other, _ in plan]
                room = free
                if not admitted:
                    room += sum(o.blocks for o in running if o not in planned and o is not s)
                tokens = min(tokens, (s.blocks + room) * config.block_tokens - s.computed)
                if room < 0 or tokens <= 0:
                    continue
            elif closed or free < 0 or len(running) + admitted >= config.max_sequences:
                continue
            elif ceil(s.pending / config.block_tokens) > free:
                # First come, first served, also where nothing runs that would hold blocks.
                closed = bool(running) or (bool(plan) and order is ORDERS["fcfs"])
                continue
            else:
                admitted += 1
            plan.append((s, tokens))
            free -= self._more(s, s.pending if not s.running else tokens)
            tokens_left -= tokens
        return plan


def compared(load: Workload, name: str, config: EngineConfig) -> Naive:
    """Run both engines; they must agree."""
    naive = Naive(load, ORDERS[name], config)
    batches: list[Batch] = []

    def note(plan: BatchPlan, queue: QueueView, now_s: float, _: LatencyModel) -> None:
        keys = queue.keys[plan.rows].tolist()
        batches.append((now_s, list(zip(keys, plan.tokens.tolist(), strict=True))))

    policy = Noted(make_policy(name), note)
    result = simulate(load, policy, Truth(MODEL, 0), config=config)
    requests = result.requests
    assert (result.fallbacks, result.dropped) == (0, 0)
    for ours, theirs in zip(batches, naive.batches, strict=True):
        assert ours == theirs
    for key, times in enumerate(naive.times):
        left = requests.emitted_s[requests.offsets[key] : requests.offsets[key + 1]]
        assert left.tolist() == times or (requests.failures[key] == TOO_LONG and not times)
    assert result.preemptions == naive.preempted
    assert result.recomputed_tokens == naive.lost_tokens
    return naive


slos = st.sampled_from([SLO(ttft_s=0.1, tpot_s=0.01), SLO(ttft_s=0.5, tpot_s=0.03), SLO()])
small = st.tuples(st.floats(0, 0.5), st.integers(1, 150), st.integers(1, 60), slos)
loads = st.lists(small, min_size=1, max_size=14).map(
    lambda drawn: of(Arrival(*own) for own in drawn)
)


@settings(max_examples=examples(150))
@given(
    load=loads,
    name=st.sampled_from(sorted(ORDERS)),
    config=st.builds(
        EngineConfig,
        kv_blocks=st.integers(8, 60),
        block_tokens=st.sampled_from([1, 4, 16]),
        max_batch_tokens=st.integers(16, 120),
        max_sequences=st.integers(1, 8),
    ),
)
def test_every_batch_is_that_of_the_naive_engine(
    load: Workload, name: str, config: EngineConfig
) -> None:
    compared(load, name, config)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_they_agree_under_chunks_and_preemptions(name: str) -> None:
    kinds = [SLO(ttft_s=0.1, tpot_s=0.01), SLO(ttft_s=0.5, tpot_s=0.03), SLO()]
    load = of(
        Arrival(0.01 * i, 10 + 37 * i % 170, 5 + 23 * i % 70, kinds[i % 3]) for i in range(60)
    )
    config = EngineConfig(kv_blocks=40, max_batch_tokens=64, max_sequences=8)
    naive = compared(load, name, config)
    assert naive.preempted > 5
    chunks = [
        tokens
        for _, batch in naive.batches
        for key, tokens in batch
        if 1 < tokens < load.arrivals[key].prompt_tokens
    ]
    assert len(chunks) > 20


LINEAR = LinearLatency(a=0.02, b=1e-4)
ONE_AT_A_TIME = EngineConfig(max_batch_tokens=8_192, max_sequences=1)
MANY = 60_000
release = pytest.mark.release


def poisson(prompts: np.ndarray, rate: float, rng: np.random.Generator) -> Workload:
    times = np.cumsum(rng.exponential(1 / rate, len(prompts)))
    pairs = zip(times.tolist(), prompts.tolist(), strict=True)
    return Workload("queue", tuple(Arrival(when, size, 1, OBJECTIVE) for when, size in pairs))


def mean_wait_s(load: Workload, noise: float) -> float:
    """Mean time from arrival to the first step. A request is one step: its prompt, one token."""
    result = simulate(load, make_policy("fcfs"), Truth(LINEAR, noise), config=ONE_AT_A_TIME, seed=9)
    assert result.steps == (len(load),)
    measured = stages(result.requests)
    return float(measured.ttft_s.mean()) - result.busy_s / len(load)


def test_each_waits_for_those_before_it() -> None:
    """Lindley's recursion, of which the formula is the mean."""
    rng = np.random.default_rng(10)
    load = poisson(rng.choice([50, 400, 6_000], 2_000, p=[0.5, 0.4, 0.1]), 6.0, rng)
    result = simulate(load, make_policy("fcfs"), Truth(LINEAR, 0.0), config=ONE_AT_A_TIME)
    free_s, waited = 0.0, 0
    for arrival, emitted_s in zip(load.arrivals, result.requests.emitted_s, strict=True):
        waited += free_s > arrival.arrival_s
        free_s = max(free_s, arrival.arrival_s) + LINEAR.a + LINEAR.b * arrival.prompt_tokens
        assert emitted_s == pytest.approx(free_s)
    assert 500 < waited < 1_500


@pytest.mark.parametrize(
    ("load", "count"),
    [
        (0.4, 15_000),
        pytest.param(0.4, MANY, marks=release),
        pytest.param(0.75, MANY, marks=release),
    ],
)
def test_equal_prompts_wait_as_in_an_m_d_1_queue(load: float, count: int) -> None:
    service_s = LINEAR.a + LINEAR.b * 800
    rng = np.random.default_rng(11)
    arriving = poisson(np.full(count, 800), load / service_s, rng)
    expected_s = load * service_s / (2 * (1 - load))
    # Over seeds, the deviation of the mean of 15,000 is 2 %.
    near = 0.03 if count == MANY else 0.07
    assert mean_wait_s(arriving, noise=0.0) == pytest.approx(expected_s, rel=near)


@release
@pytest.mark.parametrize(("load", "noise"), [(0.5, 0.0), (0.7, 0.5)])
def test_mixed_prompts_and_noise_wait_as_in_an_m_g_1_queue(load: float, noise: float) -> None:
    rng = np.random.default_rng(12)
    prompts = rng.choice([50, 400, 6_000], MANY, p=[0.5, 0.4, 0.1])
    sizes, shares = np.array([50, 400, 6_000]), np.array([0.5, 0.4, 0.1])
    service_s = LINEAR.a + LINEAR.b * sizes
    mean_s = float(service_s @ shares)
    # Log-normal noise of mean 1 has the second moment exp(sigma^2).
    second = float(service_s**2 @ shares) * np.exp(noise**2)
    rate = load / mean_s
    expected_s = rate * second / (2 * (1 - load))
    assert mean_wait_s(poisson(prompts, rate, rng), noise) == pytest.approx(expected_s, rel=0.05)
