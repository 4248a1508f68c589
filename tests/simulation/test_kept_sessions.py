"""What sessions' blocks that are evicted by worth save, beside time of use, in the simulator."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import numpy as np

from sluice.scheduling import routing
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.cluster import simulate_cluster
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.workload import Arrival, Turn, Workload

BLOCK = 64
LOOPS, TURNS, TOKENS, NEW = 24, 12, 2048, 128


class Figures(NamedTuple):
    computed: int
    ttft_p95_s: float


def loops(gap_s: float, sigma: float, seed: int) -> Workload:
    """Loops over conversations of 2,048 tokens and more, with a tool of one kind between turns."""
    rng, hashes, turns = np.random.default_rng(seed), count(), dict[int, list[int]]()
    arrivals: list[Arrival] = []
    for session in range(1, LOOPS + 1):
        blocks = [next(hashes) for _ in range(TOKENS // BLOCK)]
        for number in range(TURNS):
            took_s = float(gap_s * np.exp(sigma * rng.standard_normal()))
            after = (len(arrivals) - 1,) if number else ()
            tool = "shell" if number < TURNS - 1 else ""
            turn = Turn(session, 0, tool, after, took_s)
            tokens = len(blocks) * BLOCK + 1
            arrivals.append(Arrival(0.0, tokens, 20, SLO(), "", tuple(blocks), turn=turn))
            turns.setdefault(session, []).append(len(arrivals) - 1)
            blocks += [next(hashes) for _ in range(NEW // BLOCK)]
    return Workload("loops", tuple(arrivals), BLOCK)


def run(workload: Workload, by_worth: bool, share: float = 1 / 3) -> Figures:
    """On one engine with memory for a share of the loops."""
    mean = float(np.mean([arrival.prompt_tokens for arrival in workload.arrivals]))
    engine = EngineConfig(
        kv_blocks=int(share * LOOPS * mean / 16), max_batch_tokens=2048, keep_sessions=by_worth
    )
    result = simulate_cluster(
        workload,
        lambda _: make_policy("deadline_triage"),
        routing.make_policy("min_load"),
        LinearLatency(a=0.006, b=2e-5, c=4e-9),
        engine=engine,
        cluster=ClusterConfig(replicas=1),
    )
    requests = result.requests
    first_s = requests.emitted_s[requests.offsets[requests.first_stage[:-1]]]
    waits_s = [
        first_s[key] - arrival.arrival_s
        for key, arrival in enumerate(requests.arrivals)
        if arrival.after
    ]
    assert not requests.failures
    outputs = sum(arrival.output_tokens - 1 for arrival in workload.arrivals)
    return Figures(result.computed_tokens - outputs, float(np.percentile(waits_s, 95)))


def test_loops_that_take_turns_compute_less_than_by_time_of_use() -> None:
    workload = loops(10.0, 0.2, seed=1)
    before, after = run(workload, by_worth=False), run(workload, by_worth=True)
    print(f"computed {before.computed} {after.computed} p95 {before.ttft_p95_s} {after.ttft_p95_s}")
    assert after.computed < 0.8 * before.computed
    assert after.ttft_p95_s < before.ttft_p95_s


def test_with_memory_for_all_the_order_changes_nothing() -> None:
    workload = loops(1.0, 1.0, seed=2)
    assert run(workload, True, share=2.0) == run(workload, False, share=2.0)


def test_gaps_that_say_nothing_cost_nothing() -> None:
    """They vary so much that a long wait says little: any order is about as good."""
    workload = loops(5.0, 1.2, seed=3)
    before, after = run(workload, by_worth=False), run(workload, by_worth=True)
    print(f"computed {before.computed} {after.computed} p95 {before.ttft_p95_s} {after.ttft_p95_s}")
    assert after.computed < 1.05 * before.computed
