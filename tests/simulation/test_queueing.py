"""Waiting times of prefill queues against Pollaczek and Khinchine's formula."""

import numpy as np
import pytest

from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.simulation.config import EngineConfig
from sluice.simulation.metrics import stages
from sluice.simulation.run import simulate
from sluice.simulation.truth import Truth
from sluice.simulation.workload import Arrival, Workload
from tests.simulation.loads import OBJECTIVE

MODEL = LinearLatency(a=0.02, b=1e-4)
ONE_AT_A_TIME = EngineConfig(max_batch_tokens=8_192, max_sequences=1)
REQUESTS = 60_000


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


@pytest.mark.parametrize("load", [0.4, 0.75])
def test_equal_prompts_wait_as_in_an_m_d_1_queue(load: float) -> None:
    service_s = MODEL.a + MODEL.b * 800
    rng = np.random.default_rng(11)
    arriving = poisson(np.full(REQUESTS, 800), load / service_s, rng)
    expected_s = load * service_s / (2 * (1 - load))
    assert mean_wait_s(arriving, noise=0.0) == pytest.approx(expected_s, rel=0.03)


@pytest.mark.parametrize(("load", "noise"), [(0.5, 0.0), (0.7, 0.5)])
def test_mixed_prompts_and_noise_wait_as_in_an_m_g_1_queue(load: float, noise: float) -> None:
    rng = np.random.default_rng(12)
    prompts = rng.choice([50, 400, 6_000], REQUESTS, p=[0.5, 0.4, 0.1])
    sizes, shares = np.array([50, 400, 6_000]), np.array([0.5, 0.4, 0.1])
    service_s = MODEL.a + MODEL.b * sizes
    mean_s = float(service_s @ shares)
    # Log-normal noise of mean 1 has the second moment exp(sigma^2).
    second = float(service_s**2 @ shares) * np.exp(noise**2)
    rate = load / mean_s
    expected_s = rate * second / (2 * (1 - load))
    assert mean_wait_s(poisson(prompts, rate, rng), noise) == pytest.approx(expected_s, rel=0.05)
