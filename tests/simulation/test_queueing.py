"""Waiting times of prefill queues against Pollaczek and Khinchine's formula."""

import numpy as np
import pytest

from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Truth
from sluice.simulation.metrics import stages
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival, Workload
from tests.simulation.loads import OBJECTIVE

MODEL = LinearLatency(a=0.02, b=1e-4)
ONE_AT_A_TIME = EngineConfig(max_batch_tokens=8_192, max_sequences=1)
MANY = 60_000
release = pytest.mark.release


def poisson(prompts: np.ndarray, rate: float, rng: np.random.Generator) -> Workload:
    times = np.cumsum(rng.exponential(1 / rate, len(prompts)))
    pairs = zip(times.tolist(), prompts.tolist(), strict=True)
    return Workload("queue", tuple(Arrival(when, size, 1, OBJECTIVE) for when, size in pairs))


def mean_wait_s(load: Workload, noise: float) -> float:
    """Mean time from arrival to the first step. A request is one step: its prompt, one token."""
    result = simulate(load, make_policy("fcfs"), Truth(MODEL, noise), config=ONE_AT_A_TIME, seed=9)
    assert result.steps == (len(load),)
    measured = stages(result.requests)
    return float(measured.ttft_s.mean()) - result.busy_s / len(load)


def test_each_waits_for_those_before_it() -> None:
    """Lindley's recursion, of which the formula is the mean."""
    rng = np.random.default_rng(10)
    load = poisson(rng.choice([50, 400, 6_000], 2_000, p=[0.5, 0.4, 0.1]), 6.0, rng)
    result = simulate(load, make_policy("fcfs"), Truth(MODEL, 0.0), config=ONE_AT_A_TIME)
    free_s, waited = 0.0, 0
    for arrival, emitted_s in zip(load.arrivals, result.requests.emitted_s, strict=True):
        waited += free_s > arrival.arrival_s
        free_s = max(free_s, arrival.arrival_s) + MODEL.a + MODEL.b * arrival.prompt_tokens
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
    service_s = MODEL.a + MODEL.b * 800
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
    service_s = MODEL.a + MODEL.b * sizes
    mean_s = float(service_s @ shares)
    # Log-normal noise of mean 1 has the second moment exp(sigma^2).
    second = float(service_s**2 @ shares) * np.exp(noise**2)
    rate = load / mean_s
    expected_s = rate * second / (2 * (1 - load))
    assert mean_wait_s(poisson(prompts, rate, rng), noise) == pytest.approx(expected_s, rel=0.05)
