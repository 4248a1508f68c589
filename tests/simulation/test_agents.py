"""Loops of agents have the published shapes, and each turn arrives when its tool is done."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling import routing
from sluice.scheduling.batching import make_policy
from sluice.simulation.agents import (
    AGENT,
    CONTEXT_TOKENS,
    HASHED_TOKENS,
    OUTPUT_TOKENS,
    TOOLS,
    Loops,
    agents,
)
from sluice.simulation.cluster import LOOP_ENDED, simulate_cluster
from sluice.simulation.config import ClusterConfig, EngineConfig, Failure
from sluice.simulation.generators import AtOnce, Poisson
from sluice.simulation.run import TOO_LONG, Result, simulate
from sluice.simulation.workload import Arrival, Turn, Workload, merged, stretched, thinned, window
from tests.examples import examples
from tests.simulation.loads import EXACT, MODEL

SMALL = Loops(most=20, scale=1 / 64, gap_scale=0.1)


@pytest.fixture(scope="module")
def many() -> Workload:
    return agents("many", [Loops()], Poisson(1.0), 250, seed=11)


def run(workload: Workload, replicas: int = 1, *incidents: Failure) -> Result:
    return simulate_cluster(
        workload,
        lambda _: make_policy("fcfs"),
        routing.make_policy("min_load"),
        EXACT,
        MODEL,
        EngineConfig(max_batch_tokens=1024),
        ClusterConfig(replicas=replicas),
        incidents,
    )


def test_loops_have_the_published_shapes(many: Workload) -> None:
    turns = Counter(arrival.turn.session for arrival in many.arrivals if not arrival.turn.parent)
    assert 30 < np.median(list(turns.values())) < 60
    helped = {arrival.turn.parent for arrival in many.arrivals if arrival.turn.parent}
    assert 0.35 < len(helped) / 250 < 0.53
    prompts = np.array([arrival.prompt_tokens for arrival in many.arrivals])
    outputs = np.array([arrival.output_tokens for arrival in many.arrivals])
    assert 120_000 < 16 * np.median(prompts) < 160_000
    assert prompts.max() <= CONTEXT_TOKENS / 16
    assert np.median(outputs) == pytest.approx(OUTPUT_TOKENS / 16, rel=0.05)
    known, cached = set[int](), 0
    for arrival in many.arrivals:
        new = next((n for n, x in enumerate(arrival.block_hashes) if x not in known), None)
        cached += len(arrival.block_hashes[:new]) * HASHED_TOKENS
        known |= set(arrival.block_hashes)
    assert 0.95 < cached / prompts.sum() < 0.98


def test_tools_take_their_times(many: Workload) -> None:
    took_s = defaultdict(list)
    for arrival in many.arrivals:
        for before in arrival.after:
            tool = many.arrivals[before].turn.tool
            took_s[tool].append(arrival.turn.gap_s)
    called = sum(len(each) for name, each in took_s.items() if name != AGENT)
    for tool in TOOLS:
        assert np.median(took_s[tool.name]) == pytest.approx(tool.median_s, rel=0.2)
        assert len(took_s[tool.name]) / called == pytest.approx(tool.share, rel=0.1)


def test_system_prompts_are_shared_and_sessions_are_not(many: Workload) -> None:
    owners = defaultdict(set)
    for arrival in many.arrivals:
        for place, block in enumerate(arrival.block_hashes):
            owners[block].add((arrival.turn.session, place))
    system = [block for block, of in owners.items() if len({session for session, _ in of}) > 1]
    assert all(len({place for _, place in of}) == 1 for of in owners.values())
    # Four prompts of agents and four of sub-agents.
    assert len(system) == 8 * round(20_000 / 16 / HASHED_TOKENS)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.sampled_from([0.0, 1.0]), st.integers(1, 2))
def test_each_turn_arrives_when_its_tool_is_done(
    seed: int, loops: int, sub_agents: float, replicas: int
) -> None:
    kinds = [Loops(most=20, scale=1 / 64, gap_scale=0.1, sub_agents=sub_agents)]
    workload = agents("drawn", kinds, Poisson(1.0), loops, seed)
    result = run(workload, replicas)
    requests = result.requests
    assert not requests.failures
    ended_s = requests.emitted_s[requests.offsets[1:] - 1]
    for key, arrival in enumerate(requests.arrivals):
        known_s = workload.arrivals[key].arrival_s
        if arrival.after:
            known_s = max(ended_s[each] for each in arrival.after) + arrival.turn.gap_s
        assert arrival.arrival_s == pytest.approx(known_s)
    for session in {arrival.turn.session for arrival in workload.arrivals}:
        own = [each for each in workload.arrivals if each.turn.session == session]
        assert [not each.turn.tool for each in own] == [False] * (len(own) - 1) + [True]
        for before, after in pairwise(own):
            longer = after.prompt_tokens > before.prompt_tokens + before.output_tokens
            same = after.block_hashes[: len(before.block_hashes)] == before.block_hashes
            compacted = after.prompt_tokens + before.output_tokens > 0.1 * CONTEXT_TOKENS / 64
            assert (longer and same) or compacted


def test_a_turn_waits_for_all_sub_agents_and_a_loop_ends_with_a_failed_turn() -> None:
    def turn(*after: int, gap_s: float = 0.0, prompt: int = 100) -> Arrival:
        return Arrival(0.0, prompt, 5, SMALL.slo, turn=Turn(1, after=after, gap_s=gap_s))

    # Two sub-agents, the second of which takes longer.
    shape = (turn(), turn(0), turn(0, gap_s=3.0), turn(1, 2, gap_s=1.0))
    requests = run(Workload("waits", shape)).requests
    ended_s = requests.emitted_s[requests.offsets[1:] - 1]
    assert requests.arrivals[3].arrival_s == pytest.approx(ended_s[2] + 1.0)
    assert ended_s[2] > ended_s[1] + 2.5
    # One that can never run.
    fails = (*shape[:2], turn(0, prompt=10**6), shape[3], turn(3), turn())
    assert run(Workload("fails", fails)).requests.failures == {
        2: TOO_LONG,
        3: LOOP_ENDED,
        4: LOOP_ENDED,
    }


def test_loops_survive_the_failure_of_a_replica() -> None:
    workload = agents("survives", [SMALL], Poisson(2.0), 8, seed=3)
    result = run(workload, 2, Failure(2.0, 0, down_s=1.0))
    assert result.moved
    assert not result.requests.failures


def test_one_seed_gives_the_same_loops_at_every_rate() -> None:
    slow, fast = (agents("x", [SMALL], Poisson(rate), 9, seed=5) for rate in (1.0, 4.0))
    assert [each._replace(arrival_s=0.0) for each in slow.arrivals] == [
        each._replace(arrival_s=0.0) for each in fast.arrivals
    ]
    assert slow.arrivals != agents("x", [SMALL], Poisson(1.0), 9, seed=6).arrivals
    assert stretched(slow, 0.25).arrivals[-1].arrival_s == pytest.approx(
        fast.arrivals[-1].arrival_s
    )


def test_loops_beside_other_requests_stay_whole() -> None:
    loops = agents("loops", [SMALL], Poisson(1.0), 5, seed=1)
    chats = Workload("chats", (Arrival(0.0, 9, 3, SMALL.slo), Arrival(2.0, 9, 3, SMALL.slo)), 64)
    both = merged("both", [chats, loops, loops])
    sizes = Counter(each.turn.session for each in both.arrivals if each.turn)
    once = Counter(each.turn.session for each in loops.arrivals)
    assert sorted(sizes.values()) == sorted([*once.values(), *once.values()])
    for each in both.arrivals:
        family = {each.turn.session, each.turn.parent} if each.turn else set()
        for before in each.after:
            other = both.arrivals[before].turn
            assert family & {other.session, other.parent}


def test_what_would_break_loops_is_refused() -> None:
    loops = agents("loops", [SMALL], AtOnce(), 3, seed=1)
    with pytest.raises(ValueError, match="belong together"):
        thinned(loops, 0.5, seed=1)
    with pytest.raises(ValueError, match="belong together"):
        window(loops, 0.0, 1.0)
    with pytest.raises(ValueError, match="on a cluster"):
        simulate(loops, make_policy("fcfs"), EXACT)
    own = Arrival(0.0, 9, 3, SMALL.slo, turn=Turn(1, after=(0,)))
    with pytest.raises(ValueError, match="request 0: follows the requests"):
        Workload("of itself", (own,))
    with pytest.raises(ValueError, match="one scale"):
        agents("two", [SMALL, Loops()], AtOnce(), 3, seed=1)
