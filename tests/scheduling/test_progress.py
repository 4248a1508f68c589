"""What policies do over many steps, on a small engine in virtual time.

The engine takes exactly the model's time for each step, holds KV blocks, and preempts by recompute
what a plan draws on, as the real one does.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.batching import POLICIES, BatchBudget, BatchPolicy, make_policy
from scheduling.latency import LinearLatency
from scheduling.objective import SLO
from scheduling.request import QueueView, RequestView
from tests.scheduling.views import slos

BLOCK = 16


@dataclass
class Job:
    """A request with the output length that policies do not see."""

    name: str
    prompt: int
    output: int
    slo: SLO
    arrival_s: float = 0.0
    computed: int = 0
    blocks: int = 0
    running: bool = False
    emitted_s: list[float] = field(default_factory=list)

    def view(self) -> RequestView:
        return RequestView(
            request_id=self.name,
            slo=self.slo,
            arrival_s=self.arrival_s,
            prompt_tokens=self.prompt,
            computed_tokens=self.computed,
            pending_tokens=self.prompt + len(self.emitted_s) - self.computed,
            emitted_tokens=len(self.emitted_s),
            first_token_s=self.emitted_s[0] if self.emitted_s else None,
            kv_blocks=self.blocks,
            running=self.running,
        )


def run(
    policy: BatchPolicy,
    jobs: list[Job],
    model: LinearLatency,
    tokens: int = 2_048,
    blocks: int = 10_000,
    sequences: int = 64,
) -> tuple[dict[str, Job], int]:
    """Run ``jobs`` to their end; return them by name, and the number of steps."""
    live = sorted(jobs, key=lambda job: job.arrival_s)
    now_s = 0.0
    steps = 0
    while live:
        arrived = [job for job in live if job.arrival_s <= now_s]
        if not arrived:
            now_s = live[0].arrival_s
            continue
        free = blocks - sum(job.blocks for job in live)
        budget = BatchBudget(tokens, sequences, free, BLOCK)
        queue = QueueView(tuple(job.view() for job in arrived))
        plan = policy.plan(queue, now_s, model, budget)
        assert plan.entries, "a queue that can run must not stand still"
        assert steps < 20_000, "no end in sight"
        now_s += plan.predicted_s
        steps += 1
        _apply(plan.entries, arrived, free, now_s)
        live = [job for job in live if len(job.emitted_s) < job.output]
    return {job.name: job for job in jobs}, steps


def _apply(
    entries: tuple[tuple[str, int], ...], arrived: list[Job], free: int, now_s: float
) -> None:
    by_name = {job.name: job for job in arrived}
    planned = dict(entries)
    victims = [job for job in arrived if job.running and job.name not in planned]
    for name, tokens in entries:
        job = by_name[name]
        need = max(0, -(-(job.computed + tokens) // BLOCK) - job.blocks)
        while need > free:
            victim = victims.pop()
            free += victim.blocks
            victim.blocks = victim.computed = 0
            victim.running = False
        free -= need
        job.blocks += need
        job.running = True
        job.computed += tokens
        if job.computed == job.prompt + len(job.emitted_s):
            job.emitted_s.append(now_s)


MODEL = LinearLatency(a=0.005, b=0.0002, c=0.000_000_1)
CHAT = SLO(ttft_s=0.3, tpot_s=0.03)


def long_prompts(count: int) -> list[Job]:
    return [Job(f"long{n}", 4_000, 2, SLO(ttft_s=20.0, tpot_s=1.0)) for n in range(count)]


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
def test_a_tight_request_behind_long_prompts_is_served_in_time(name: str) -> None:
    def first_token(policy: str) -> float:
        jobs = [*long_prompts(5), Job("chat", 100, 5, CHAT, arrival_s=0.01)]
        return run(make_policy(policy), jobs, MODEL)[0]["chat"].emitted_s[0]

    full_step_s = MODEL.step_s(2_048, 4_000)
    assert first_token("fcfs") > 9 * full_step_s, "it waits for all of them"
    # The step that runs when it arrives cannot be interrupted; it is in the next one.
    assert first_token(name) <= 2.1 * full_step_s


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
def test_a_running_answer_keeps_its_pace_while_long_prompts_come_in(name: str) -> None:
    def slowest(policy: str) -> float:
        late = [Job(f"late{n}", 4_000, 2, SLO(ttft_s=20.0), arrival_s=0.2) for n in range(4)]
        jobs = [Job("chat", 100, 120, CHAT), *late]
        emitted = run(make_policy(policy), jobs, MODEL)[0]["chat"].emitted_s
        return max(
            (emitted_s - emitted[0]) / index for index, emitted_s in enumerate(emitted) if index
        )

    assert slowest("fcfs") > 0.03 * 1.2
    assert slowest(name) <= 0.03 * 1.001


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=25)
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
    name: str, data: list[tuple[int, int, SLO, float]], blocks: int, tokens: int
) -> None:
    jobs = [
        Job(f"j{index}", prompt, output, slo, arrival_s)
        for index, (prompt, output, slo, arrival_s) in enumerate(data)
    ]
    # A request alone always fits: 300 + 40 tokens are 22 blocks.
    done, _ = run(make_policy(name), jobs, MODEL, tokens=tokens, blocks=blocks, sequences=4)
    assert {job.name: len(job.emitted_s) for job in done.values()} == {
        job.name: job.output for job in jobs
    }
