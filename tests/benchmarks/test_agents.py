"""``sluice bench agents`` on the simulator: loops are whole, timed and compared by seed."""

from __future__ import annotations

import numpy as np

from sluice.benchmarks.experiments.agents import (
    AFTER,
    BACKLOG,
    CONTESTANTS,
    CROWD,
    FCFS,
    LRU,
    Backlog,
    Crowd,
    Stream,
    anonymous,
    compared,
    engine,
    least_missing,
    loop_times,
    measure_deadlines,
    prefilled,
    prioritised,
    run,
)
from sluice.benchmarks.experiments.grid import Row
from sluice.benchmarks.live.agents import Conversations, figures_of, headers, table
from sluice.benchmarks.live.client import End, Outcome
from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Turn, Workload

ENGINE = engine("8b", 131_072)


def test_a_loop_lasts_until_its_last_turn_and_sub_agents_are_turns_of_it() -> None:
    def turn(at_s: float, session: int, *after: int, parent: int = 0, prompt: int = 9) -> Arrival:
        stated = Turn(session, parent, after=after, gap_s=2.0 if after else 0.0)
        return Arrival(at_s, prompt, 3, SLO(), turn=stated)

    loops = (
        turn(1.0, 4),
        turn(1.0, 5, 0, parent=4),
        turn(1.0, 4, 1),
        turn(3.0, 8),
        # Longer than the engine's memory: its loop fails.
        turn(9.0, 12),
        turn(9.0, 12, 4, prompt=10**6),
    )
    result = run(Workload("three", loops), CONTESTANTS[0], ENGINE, 1, seed=1)
    found = loop_times(Workload("three", loops), result)
    assert [turns for turns, _ in found] == [3, 1]
    # Two tools of two seconds each.
    assert 4.0 < found[0][1] < 4.5
    assert found[1][1] < 0.5


def test_without_sessions_requests_and_times_are_the_same() -> None:
    workload = Backlog(2, 3, 1.0, 41).workload(SLO(), seed=3)
    unnamed = anonymous(workload)
    assert {each.turn.program for each in unnamed.arrivals} == {0}
    assert {each.turn.tool for each in unnamed.arrivals} == {""}
    results = [run(each, CONTESTANTS[0], ENGINE, 1, seed=3) for each in (workload, unnamed)]
    np.testing.assert_array_equal(*(each.requests.emitted_s for each in results))


def test_a_crowd_has_a_third_of_its_memory() -> None:
    crowd = Crowd(12, 30, 1.0)
    assert crowd.kv_tokens == 32_000
    workload = crowd.workload(seed=1)
    kinds = [each.slo.service_class for each in workload.arrivals]
    assert kinds.count("chat") == 30
    assert len({each.turn.program for each in workload.arrivals if each.turn}) == 12


def test_earlier_turns_of_a_loop_are_more_important() -> None:
    workload = prioritised(Backlog(1, 3, 1.0, 41).workload(SLO(), seed=3))
    turns: dict[int, list[int]] = {}
    for each in workload.arrivals:
        turns.setdefault(each.turn.session, []).append(each.slo.priority)
    assert max(map(len, turns.values())) > 10
    for priorities in turns.values():
        assert priorities == [max(1, 10 - n) for n in range(len(priorities))]


def test_no_eviction_computes_less_than_one_that_knows_the_future() -> None:
    workload = Crowd(4, 10, 1.0, 41).workload(seed=1)
    tokens = np.array([each.prompt_tokens for each in workload.arrivals])
    turns = [each.turn is not None for each in workload.arrivals]
    blocks = {block for each in workload.arrivals for block in each.block_hashes}
    partial = (tokens[turns] % workload.block_tokens).sum()
    computed = {}
    for memory in (20_000, 1_000_000):
        result = run(workload, CONTESTANTS[0], engine("8b", memory), 1, seed=1)
        least = least_missing(workload, result.requests, memory).sum()
        computed[memory] = least, prefilled(result) - tokens[~np.array(turns)].sum()
    assert computed[1_000_000][0] <= len(blocks) * workload.block_tokens + partial
    assert computed[1_000_000][0] < computed[20_000][0] < computed[20_000][1]


def test_systems_are_compared_with_the_same_loops() -> None:
    def row(scenario: str, system: str, seed: int, figure: str, value: float) -> Row:
        return {"scenario": scenario, "system": system, "seed": seed, figure: value}

    rows = [
        row(BACKLOG, FCFS, 1, "short_s", 60.0),
        row(BACKLOG, FCFS, 2, "short_s", 90.0),
        row(BACKLOG, AFTER, 1, "short_s", 10.0),
        row(BACKLOG, AFTER, 2, "short_s", 9.0),
        row(CROWD, LRU, 1, "prefilled", 100.0),
        row(CROWD, AFTER, 1, "prefilled", 70.0),
    ]
    found = {(each["system"], each["scenario"], each["seed"]): each for each in compared(rows)}
    assert found[AFTER, BACKLOG, 1]["short_s_faster"] == 6.0
    assert found[AFTER, BACKLOG, 2]["short_s_faster"] == 10.0
    assert found[FCFS, BACKLOG, 2]["short_s_faster"] == 1.0
    assert found[AFTER, CROWD, 1]["prefilled_ratio"] == 0.7


def test_a_real_turn_brings_all_messages_before_it_and_names_its_session() -> None:
    workload = Backlog(2, 4, 1.0, 41, scale=1 / 48).workload(SLO(), seed=3)
    conversations = Conversations("run", priorities=True)
    before: dict[int, list[dict[str, object]]] = {}
    for arrival in workload.arrivals:
        body = conversations.body(arrival)
        messages = body["messages"]
        known = before.get(arrival.turn.session, [])
        compacted = len(messages) == 2
        assert compacted or (messages[:-2] == known and messages[-1]["role"] == "tool")
        assert body["priority"] == 1 or known
        words = sum(len(each["content"].split()) for each in messages)
        assert abs(words - arrival.prompt_tokens) <= 1
        before[arrival.turn.session] = messages
        parent = {"x-parent-session-id": f"loop-{arrival.turn.parent}"}
        named = {"x-session-id": f"loop-{arrival.turn.session}"}
        assert headers(arrival) == (named | parent if arrival.turn.parent else named)


def test_only_whole_loops_have_a_time() -> None:
    workload = Backlog(1, 3, 1.0, 41, sub_agents=0.0).workload(SLO(), seed=3)
    outcomes = [
        Outcome(SLO(), each.prompt_tokens, 1, sent_s=2.0 * number, late_s=0.0, end=End.ANSWERED)
        for number, each in enumerate(workload.arrivals)
    ]
    for each in outcomes:
        each.ended_s, each.ttft_s = each.sent_s + 1.0, 0.5
    found = figures_of(workload, outcomes)
    last_s = 2.0 * (len(outcomes) - 1) + 1.0
    assert found["turns_per_s"] == len(outcomes) / last_s
    assert found["unanswered"] == 0.0
    assert found["long_s"] < last_s
    outcomes[-1].end = End.FAILED
    found = figures_of(workload, outcomes)
    assert found["unanswered"] == 1.0
    assert np.isnan(found["long_s"])
    (row,) = table([{"system": "Sluice", "seed": 1, **found}]).columns[0].cells
    assert row == "Sluice"


def test_loops_with_a_deadline_are_counted() -> None:
    found = measure_deadlines(3, 0.5, Stream(40, 5))
    assert found["loops"] >= 40
    assert 0.0 <= found["promised"] <= 1.0
    assert found["met"] > 0.9
