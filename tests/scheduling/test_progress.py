"""What policies do over many steps, on a small engine in virtual time.

The engine takes exactly the model's time for each step, holds KV blocks, and preempts by recompute
what a plan draws on, as the real one does.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.batching import POLICIES, BatchBudget, BatchPolicy, make_policy
from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from tests.examples import examples
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
    until: Job | None = None,
) -> tuple[dict[str, Job], int]:
    """Run ``jobs``, or only ``until`` one, to the end; return them by name, and the steps."""
    live = sorted(jobs, key=lambda job: job.arrival_s)
    now_s = 0.0
    steps = 0
    while live and (until is None or until in live):
        arrived = live[: bisect_right(live, now_s, key=attrgetter("arrival_s"))]
        if not arrived:
            now_s = live[0].arrival_s
            continue
        free = blocks - sum(job.blocks for job in arrived)
        budget = BatchBudget(tokens, sequences, free, BLOCK)
        queue = QueueView(tuple(job.view() for job in arrived))
        plan = policy.plan(queue, now_s, model, budget)
        assert plan.entries, "a queue that can run must not stand still"
        assert steps < 20_000, "no end in sight"
        now_s += plan.predicted_s
        steps += 1
        _apply(plan.entries, arrived, free, now_s)
        for job in arrived:
            if len(job.emitted_s) == job.output:
                live.remove(job)
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

    full_step_s = MODEL.step_s(StepSample.of([(2_048, 1_952)]))
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


@cache
def prompts_beside_tight_decodes(
    name: str, tpot_s: float, decodes: int = 1, output: int = 2_000
) -> tuple[float, float]:
    """Slowest TTFT of eight prompts, and slowest TPOT of the decodes that run when they come."""
    model = LinearLatency(a=0.004, b=0.000_2, c=0.000_001)
    tight = [Job(f"d{n}", 16, output, SLO(ttft_s=1.0, tpot_s=tpot_s)) for n in range(decodes)]
    slo = SLO(ttft_s=2.0, priority=2)
    prompts = [Job(f"p{n}", 1_000, 1, slo, arrival_s=0.5) for n in range(8)]
    run(make_policy(name), [*tight, *prompts], model)
    paces = [(job.emitted_s[-1] - job.emitted_s[0]) / (output - 1) for job in tight]
    return max(job.emitted_s[0] for job in prompts) - 0.5, max(paces)


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
@pytest.mark.parametrize("tpot_s", [0.0045, 0.005, 0.006, 0.008])
def test_one_tight_decode_does_not_stop_prefill(name: str, tpot_s: float) -> None:
    ttft_s, _ = prompts_beside_tight_decodes(name, tpot_s)
    relaxed_s, _ = prompts_beside_tight_decodes(name, 0.05)
    assert ttft_s < 4 * relaxed_s


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
@pytest.mark.parametrize(("tpot_s", "decodes"), [(0.02, 1), (0.02, 10), (0.03, 30)])
def test_tight_decodes_that_can_be_held_keep_their_pace(
    name: str, tpot_s: float, decodes: int
) -> None:
    _, pace_s = prompts_beside_tight_decodes(name, tpot_s, decodes, output=100)
    assert pace_s <= tpot_s * 1.001


@pytest.mark.parametrize("name", ["fairbatching", "slidebatching"])
@pytest.mark.parametrize("tpot_s", [0.005, 0.008, 0.02])
@pytest.mark.parametrize("prompt", [pytest.param(1_000, marks=pytest.mark.release), 7_000])
def test_an_endless_stream_of_tight_decodes_does_not_stop_a_prefill(
    name: str, tpot_s: float, prompt: int
) -> None:
    # About 20 at a time, and new ones for far longer than the prompt may take.
    model = LinearLatency(a=0.004, b=0.000_2, c=0.000_001)
    slo = SLO(ttft_s=0.5, tpot_s=tpot_s, priority=10)
    stream = [Job(f"d{n}", 16, 50, slo, arrival_s=n * 0.025) for n in range(2_000)]
    target = Job("prompt", prompt, 1, SLO(ttft_s=2.0), arrival_s=1.0)
    run(make_policy(name), [*stream, target], model, until=target)
    others = [job for job in stream if len(job.emitted_s) < job.output]
    assert others, "the stream must outlast the prompt"


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=examples(25))
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
