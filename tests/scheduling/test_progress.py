"""What policies do over many steps, on a small engine in virtual time."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.policies import LOCAL
from sluice.scheduling.batching import BatchBudget, make_policy
from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.request.objective import SLO
from tests.examples import examples
from tests.scheduling.steps import run
from tests.scheduling.test_plan_invariants import VARIANTS
from tests.scheduling.views import prefill, slos

MODEL = LinearLatency(a=0.005, b=0.0002, c=0.000_000_1)
BUDGET = BatchBudget(tokens=2_048, sequences=64, kv_blocks=10_000, block_tokens=16)
CHAT = SLO(ttft_s=0.3, tpot_s=0.03)
DUE_LATE = SLO(ttft_s=20.0, tpot_s=1.0)


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
def test_a_tight_request_behind_long_prompts_is_served_in_time(name: str) -> None:
    def first_token(policy: str) -> float:
        jobs = [(prefill(f"long{n}", 4_000, DUE_LATE), 2) for n in range(5)]
        jobs.append((prefill("chat", 100, CHAT, arrival_s=0.01), 5))
        return run(make_policy(policy), jobs, MODEL, BUDGET).tokens_s["chat"][0]

    full_step_s = MODEL.step_s(StepSample.of([(2_048, 1_952)]))
    assert first_token("fcfs") > 9 * full_step_s, "it waits for all of them"
    # The step that runs when it arrives cannot be interrupted; it is in the next one.
    assert first_token(name) <= 2.1 * full_step_s


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
def test_a_running_answer_keeps_its_pace_while_long_prompts_come_in(name: str) -> None:
    def slowest(policy: str) -> float:
        jobs = [(prefill(f"late{n}", 4_000, DUE_LATE, arrival_s=0.2), 2) for n in range(4)]
        jobs.append((prefill("chat", 100, CHAT), 120))
        first_s, *later_s = run(make_policy(policy), jobs, MODEL, BUDGET).tokens_s["chat"]
        return max((time_s - first_s) / n for n, time_s in enumerate(later_s, 1))

    assert slowest("fcfs") > 0.03 * 1.2
    assert slowest(name) <= 0.03 * 1.001


@cache
def prompts_beside_tight_decodes(
    name: str, tpot_s: float, decodes: int = 1, output: int = 2_000
) -> tuple[float, float]:
    """Slowest TTFT of eight prompts, and slowest TPOT of the decodes that run when they come."""
    model = LinearLatency(a=0.004, b=0.000_2, c=0.000_001)
    tight, slo = SLO(ttft_s=1.0, tpot_s=tpot_s), SLO(ttft_s=2.0, priority=2)
    jobs = [(prefill(f"d{n}", 16, tight), output) for n in range(decodes)]
    jobs += [(prefill(f"p{n}", 1_000, slo, arrival_s=0.5), 1) for n in range(8)]
    times_s = run(make_policy(name), jobs, model, BUDGET).tokens_s
    tpots_s = [(own[-1] - own[0]) / (output - 1) for own in times_s.values() if len(own) > 1]
    return max(times_s[f"p{n}"][0] for n in range(8)) - 0.5, max(tpots_s)


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
@pytest.mark.parametrize("tpot_s", [0.0045, 0.005, 0.006, 0.008])
def test_one_tight_decode_does_not_stop_prefill(name: str, tpot_s: float) -> None:
    ttft_s, _ = prompts_beside_tight_decodes(name, tpot_s)
    relaxed_s, _ = prompts_beside_tight_decodes(name, 0.05)
    assert ttft_s < 4 * relaxed_s


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
@pytest.mark.parametrize(("tpot_s", "decodes"), [(0.02, 1), (0.02, 10), (0.03, 30)])
def test_tight_decodes_that_can_be_held_keep_their_tpot(
    name: str, tpot_s: float, decodes: int
) -> None:
    _, slowest_s = prompts_beside_tight_decodes(name, tpot_s, decodes, output=100)
    assert slowest_s <= tpot_s * 1.001


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
@pytest.mark.parametrize("tpot_s", [0.005, 0.008, 0.02])
@pytest.mark.parametrize("prompt", [pytest.param(1_000, marks=pytest.mark.release), 7_000])
def test_an_endless_stream_of_tight_decodes_does_not_stop_a_prefill(
    name: str, tpot_s: float, prompt: int
) -> None:
    # About 20 at a time, and new ones for far longer than the prompt may take.
    model = LinearLatency(a=0.004, b=0.000_2, c=0.000_001)
    slo = SLO(ttft_s=0.5, tpot_s=tpot_s, priority=10)
    jobs = [(prefill(f"d{n}", 16, slo, arrival_s=n * 0.025), 50) for n in range(2_000)]
    jobs.append((prefill("prompt", prompt, SLO(ttft_s=2.0), arrival_s=1.0), 1))
    times_s = run(make_policy(name), jobs, model, BUDGET, until="prompt").tokens_s
    assert len(times_s["d1999"]) < 50, "the stream must outlast the prompt"


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@settings(max_examples=examples(15))
@given(
    data=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 40), slos, st.floats(0, 2)),
        min_size=1,
        max_size=10,
    ),
    blocks=st.integers(22, 60),
    tokens=st.integers(8, 256),
)
def test_every_request_ends_also_where_memory_is_short(
    name: str,
    options: dict[str, object],
    data: list[tuple[int, int, SLO, float]],
    blocks: int,
    tokens: int,
) -> None:
    jobs = [
        (prefill(f"j{index}", prompt, slo, arrival_s=arrival_s), output)
        for index, (prompt, output, slo, arrival_s) in enumerate(data)
    ]
    # A request alone always fits: 300 + 40 tokens are 22 blocks.
    budget = BUDGET._replace(tokens=tokens, kv_blocks=blocks, sequences=4)
    times_s = run(LOCAL.make(name, options), jobs, MODEL, budget).tokens_s
    assert [len(own) for own in times_s.values()] == [output for _, output in jobs]


PASSED = {
    *("d_edf", "deadline_triage", "edf", "fairbatching"),
    *("s_edf", "sarathi_priority", "sjf", "slidebatching"),
}
"""Policies that serve by deadline, priority or size, promised or not: docs/policies/predictions.md
says when that matters."""


def first_token_s(name: str, best_effort: bool) -> float:
    """When a promised prompt of 0.6 s has its first token, while for 2.5 s four times of what the
    engine can do comes later: shorter, more urgent, and of higher priority."""
    slo = SLO(ttft_s=2.0, tpot_s=0.1)
    promised = prefill("promised", 6_000, slo)._replace(promised=True)
    urgent = SLO(ttft_s=0.3, priority=10)
    stream = [
        prefill(f"r{n}", 400, urgent, arrival_s=0.001 + 0.01 * n)._replace(best_effort=best_effort)
        for n in range(250)
    ]
    jobs = [(promised, 1), *((view, 1) for view in stream)]
    model = LinearLatency(a=0.01, b=1e-4)
    return run(LOCAL.make(name), jobs, model, BUDGET).tokens_s["promised"][0]


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_best_effort_requests_make_no_promised_one_late(name: str) -> None:
    assert first_token_s(name, best_effort=True) <= 1.0


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_requests_of_neither_tier_make_it_late_under_some_policies(name: str) -> None:
    assert (first_token_s(name, best_effort=False) > 2.0) == (name in PASSED)
