"""Whether requests that come later can make a promised one late, policy by policy."""

import pytest

from sluice.benchmarks.experiments.policies import LOCAL
from sluice.scheduling.batching import BatchBudget
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from tests.scheduling.steps import run
from tests.scheduling.views import prefill

MODEL = LinearLatency(a=0.01, b=1e-4)
BUDGET = BatchBudget(tokens=2_048, sequences=64, kv_blocks=100_000, block_tokens=16)
PROMISED_SLO = SLO(ttft_s=2.0, tpot_s=0.1)

PASSED = {
    "d_edf",
    "deadline_triage",
    "edf",
    "fairbatching",
    "s_edf",
    "sarathi_priority",
    "sjf",
    "slidebatching",
}
"""Policies that serve by deadline, priority or size, promised or not: docs/policies/predictions.md
says when that matters."""


def first_token_s(name: str, best_effort: bool) -> float:
    """When a promised prompt of 0.6 s has its first token, while for 2.5 s four times of what the
    engine can do comes later: shorter, more urgent, and of higher priority."""
    promised = prefill("promised", 6_000, PROMISED_SLO)._replace(promised=True)
    urgent = SLO(ttft_s=0.3, priority=10)
    stream = [
        prefill(f"r{n}", 400, urgent, arrival_s=0.001 + 0.01 * n)._replace(best_effort=best_effort)
        for n in range(250)
    ]
    jobs = [(promised, 1), *((view, 1) for view in stream)]
    return run(LOCAL.make(name), jobs, MODEL, BUDGET).tokens_s["promised"][0]


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_best_effort_requests_make_no_promised_one_late(name: str) -> None:
    assert first_token_s(name, best_effort=True) <= 1.0


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_requests_of_neither_tier_make_it_late_under_some_policies(name: str) -> None:
    assert (first_token_s(name, best_effort=False) > 2.0) == (name in PASSED)
