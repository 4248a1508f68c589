"""One engine: against closed forms and conservation laws, with every registered policy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.batching import (
    POLICIES,
    BatchBuilder,
    BatchPolicy,
    BestEffortOptions,
    make_policy,
)
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.scheduling.latency.speculation import AllDrafts
from sluice.scheduling.placement.output_lengths import OracleLengths
from sluice.scheduling.request.kernels import EXPECTED
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView
from sluice.simulation.config import EngineConfig, Speculation
from sluice.simulation.engine import Belief, Launches, StuckError, Truth, VirtualEngine
from sluice.simulation.requests import Requests
from sluice.simulation.rows import (
    DONE_TOKENS,
    EVICTED_TOKENS,
    EVICTIONS,
    FREE_BLOCKS,
    LOST_TOKENS,
    PREEMPTIONS,
)
from sluice.simulation.run import TOO_LONG, Result, drive, simulate
from sluice.simulation.workload import Arrival, Stage, Workload
from tests.examples import examples
from tests.simulation.loads import (
    EXACT,
    MODEL,
    OBJECTIVE,
    configs,
    families,
    of,
    workload,
    workloads,
)


class Idle(BatchPolicy):
    """Plans nothing, ever."""

    name = "idle"
    source = "a policy that does not work"
    local_order = SLIDE

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        """Nothing."""


class Watching(BatchPolicy):
    """First come, first served, and keeps what it was shown."""

    name = "watching"
    source = "a spy"
    local_order = SLIDE

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, np.ndarray, list[SLO]]] = []

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        self.seen.append((now_s, queue.table.copy(), [view.slo for view in queue.requests]))
        batch.take(np.arange(len(queue)))


def step_s(new: int, computed: int, model: LinearLatency = MODEL) -> float:
    """FairBatching's formula for a step of one sequence, with the attention term."""
    work = model.b * new + model.c * (computed + new)
    return model.a + work + model.d * new * (computed + new / 2)


@settings(max_examples=examples(150))
@given(
    load=st.one_of(workloads, families()),
    config=configs,
    name=st.sampled_from(sorted(POLICIES)),
    patience_s=st.sampled_from([0.05, 30.0]),
    speculation=st.sampled_from([None, None, Speculation(alpha=0.7, length=3)]),
    launches=st.sampled_from([None, Launches(0.001, 0.01, 0.02, 64)]),
    data=st.data(),
)
def test_nothing_is_lost_and_everything_is_given_back(
    load: Workload,
    config: EngineConfig,
    name: str,
    patience_s: float,
    speculation: Speculation | None,
    launches: Launches | None,
    data: st.DataObject,
) -> None:
    """Of both tiers, of one stage or several, with shared prefixes and drafts, also planned one
    step ahead."""
    config = config.model_copy(update={"speculation": speculation})
    policy = make_policy(name, {}, BestEffortOptions(patience_s=patience_s, aged_share=0.2))
    requests = Requests(load)
    flags = data.draw(st.lists(st.booleans(), min_size=len(load), max_size=len(load)))
    for key, best_effort in enumerate(flags):
        requests.serve_as(key, best_effort)
    belief, rng = Belief(MODEL.with_headroom(1.05)), np.random.default_rng(7)
    truth = Truth(MODEL, 0.1, launches)
    engine = VirtualEngine(config, policy, belief, truth, requests, rng)
    drive(engine, requests)
    assert engine.live == engine.running == engine.held_blocks == 0
    assert engine.free_blocks == config.kv_blocks
    assert engine.cache is None or engine.cache.idle_blocks <= config.kv_blocks
    needed = 0
    for key, arrival in enumerate(load.arrivals):
        first, last = requests.first_stage[key], requests.first_stage[key + 1]
        times = requests.emitted_s[requests.offsets[first] : requests.offsets[last]]
        assert len(times) == arrival.output_tokens
        if requests.whole_tokens(key) > config.kv_tokens:
            assert requests.failures[key] == TOO_LONG
            assert np.isnan(times).all()
            continue
        assert key not in requests.failures
        needed += requests.whole_tokens(key) - 1
        # Every token left, in order, after the arrival; nan would compare as false.
        assert times[0] > arrival.arrival_s
        gaps_s = np.diff(times)
        assert (gaps_s >= 0).all() if speculation else (gaps_s > 0).all()
    lost = engine.counters[LOST_TOKENS]
    assert engine.counters[DONE_TOKENS] + engine.hit_tokens == needed + lost
    assert 0 <= engine.counters[EVICTED_TOKENS] <= lost
    assert engine.counters[EVICTIONS] <= engine.counters[PREEMPTIONS]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_runs_a_loaded_engine_without_help_and_by_the_seed(name: str) -> None:
    rng = np.random.default_rng(5)
    load = of(
        Arrival(when, int(rng.integers(10, 1_000)), int(rng.integers(1, 60)), OBJECTIVE)
        for when in np.cumsum(rng.exponential(0.02, 150)).tolist()
    )
    config = EngineConfig(kv_blocks=300, max_batch_tokens=512, max_sequences=16)
    result, again, other = (
        simulate(load, make_policy(name), MODEL, config=config, seed=seed) for seed in (1, 1, 2)
    )
    assert not result.requests.failures
    assert not np.isnan(result.requests.emitted_s).any()
    assert result.fallbacks == result.dropped == 0
    assert same(result, again) and not same(result, other)


def same(one: Result, other: Result) -> bool:
    return (
        np.array_equal(one.requests.emitted_s, other.requests.emitted_s, equal_nan=True)
        and one.steps == other.steps
        and one.busy_s == other.busy_s
    )


def test_a_policy_that_plans_nothing_is_replaced_step_by_step() -> None:
    load = workload((0.0, 100, 5), (0.1, 50, 5))
    idle = simulate(load, Idle(), EXACT)
    assert idle.fallbacks == idle.steps[0] > 0
    assert same(idle, simulate(load, make_policy("fcfs"), EXACT))


def test_an_engine_that_can_run_nothing_says_so() -> None:
    requests = Requests(workload((0.0, 100, 5)))
    config = EngineConfig(kv_blocks=10)
    rng = np.random.default_rng(0)
    engine = VirtualEngine(config, make_policy("fcfs"), Belief(MODEL), EXACT, requests, rng)
    assert engine.submit(0)
    # No block is free, and none is held: a fault in the accounting.
    engine.counters[FREE_BLOCKS] = 0
    with pytest.raises(StuckError, match=r"1 requests are live at 0\.000 s, 0 KV blocks are free"):
        engine.begin(0.0)


def test_what_policies_see_follows_the_engine() -> None:
    policy = Watching()
    load = workload((0.0, 48, 3), (0.001, 16, 1))
    simulate(load, policy, EXACT, config=EngineConfig(max_batch_tokens=32))
    shown = [table[:, [5, 6, 7, 8, 9, 10]].astype(int).tolist() for _, table, _ in policy.seen]
    # Prompt, computed, pending, emitted, blocks, running.
    assert shown[0] == [[48, 0, 48, 0, 0, 0]]
    assert shown[1] == [[48, 32, 16, 0, 2, 1], [16, 0, 16, 0, 0, 0]]
    assert shown[2] == [[48, 48, 1, 1, 3, 1]]
    assert shown[3] == [[48, 49, 1, 2, 4, 1]]
    assert len(shown) == 4


def test_a_stage_begins_with_its_own_objective_and_its_context_computed() -> None:
    thinking, answering = SLO(ttft_s=2.0, tpot_s=0.1), SLO(tpot_s=0.03)
    tool = SLO(ttft_s=0.4, tpot_s=0.05)
    stages = [Stage(3, thinking), Stage(2, answering), Stage(2, tool, prompt_tokens=20)]
    policy = Watching()
    load = of([Arrival.of_stages(1.0, 30, stages)])
    result = simulate(load, policy, EXACT)
    times = result.requests.emitted_s
    assert not np.isnan(times).any()
    rows = [table[0] for _, table, _ in policy.seen]
    slos = [slos[0] for _, _, slos in policy.seen]
    assert slos[:3] == [thinking] * 3
    # It goes on decoding, so its first token keeps the pace.
    assert slos[3:5] == [SLO(ttft_s=0.03, tpot_s=0.03)] * 2
    assert slos[5:] == [tool, tool]
    # Arrival, TTFT, prompt, computed, pending, emitted.
    assert rows[3][[0, 1, 5, 6, 7, 8]].tolist() == [times[2], 0.03, 33, 32, 1, 0]
    assert rows[4][[0, 1, 5, 6, 7, 8]].tolist() == [times[2], 0.03, 33, 33, 1, 1]
    assert rows[5][[0, 1, 5, 6, 7, 8]].tolist() == [times[4], 0.4, 55, 34, 21, 0]
    assert result.computed_tokens == 30 + 20 + 7 - 1


def test_lengths_are_predicted_at_arrival_and_learnt_at_the_end() -> None:
    policy = Watching()
    load = of([Arrival(0.0, 10, 7, OBJECTIVE, "chat"), Arrival(5.0, 10, 9, OBJECTIVE, "chat")])
    simulate(load, policy, EXACT)
    expected = [table[0][EXPECTED] for _, table, _ in policy.seen]
    assert np.isnan(expected[:7]).all()
    # With its seventh token the second outlives the only length that was seen.
    assert expected[7:14] == [7.0] * 7
    assert expected[14:] == [8.0, 9.0]


def test_a_prediction_covers_all_stages_and_shrinks_with_each() -> None:
    policy = Watching()
    stages = [Stage(3, OBJECTIVE), Stage(5, OBJECTIVE)]
    load = of([Arrival.of_stages(0.0, 10, stages, "think")])
    predictor = OracleLengths([6], error=0.0, seed=0)
    simulate(load, policy, EXACT, predictor=predictor)
    expected = [table[0][EXPECTED] for _, table, _ in policy.seen]
    assert expected[:6] == [6.0, 6.0, 6.0, 3.0, 3.0, 3.0]
    # Six tokens are out: a sixteenth more is expected, then of seven.
    assert expected[6:] == pytest.approx([6 * 17 / 16 - 3, 7 * 17 / 16 - 3])


def test_the_belief_learns_the_truth_and_keeps_its_headroom() -> None:
    load = workload(*((0.05 * i, 60, 30) for i in range(100)))
    slow = LinearLatency(a=0.008, b=1e-4, c=4e-7, d=2e-9)
    belief = Belief(MODEL.with_headroom(1.1))
    result = simulate(load, make_policy("fairbatching"), Truth(slow, 0.03), belief)
    assert result.correction == pytest.approx(2.0, rel=0.03)
    fixed = Belief(MODEL, online=False)
    assert simulate(load, make_policy("fairbatching"), slow, fixed).correction == 1.0


def everything_checked(name: str) -> BatchPolicy:
    policy = make_policy(name)
    policy.speculation = AllDrafts()
    return policy


def test_accepted_drafts_leave_in_one_step() -> None:
    speculation = Speculation(alpha=0.8, length=4, draft_s=0.001)
    config = EngineConfig(speculation=speculation)
    load = workload((0.0, 100, 20_001))
    result = simulate(load, everything_checked("fcfs"), Truth(MODEL, 0), config=config, seed=2)
    # Acc(s) = 1 + alpha + ... + alpha^s tokens per step (SLOs-Serve, appendix D).
    mean = 20_000 / (result.steps[0] - 1)
    assert mean == pytest.approx(sum(0.8**k for k in range(5)), rel=0.01)
    assert result.checked_drafts == pytest.approx(4 * (result.steps[0] - 1), abs=4)
    assert result.accepted_drafts == pytest.approx(20_000 - (result.steps[0] - 1), abs=4)
    # Such a step costs a prefill of five tokens, and four draft steps.
    steps = np.diff(np.unique(result.requests.emitted_s))
    assert steps[0] == pytest.approx(step_s(5, 100) + 0.004)


def test_lengths_follow_the_acceptance_that_an_engine_learns() -> None:
    def checked(alpha: float) -> float:
        config = EngineConfig(speculation=Speculation(alpha=alpha))
        load = workload((0.0, 100, 2_000))
        result = simulate(load, make_policy("deadline_triage"), MODEL, config=config, seed=2)
        assert not result.requests.failures
        return result.checked_drafts / result.steps[0]

    assert checked(0.0) < 0.2 < 2 < checked(0.6) < checked(0.9)


def test_a_loop_plans_while_a_step_runs_and_a_step_is_as_long_as_its_launch() -> None:
    launches = Launches(0.001, 0.005, 0.02, graph_tokens=64)
    truth = Truth(LinearLatency(0.002, 1e-5), 0.0, launches)
    # The second one comes in the first step, when the next has been planned.
    load = workload((0.0, 65, 4), (0.01, 40, 2))
    times = simulate(load, make_policy("fcfs"), truth).requests.emitted_s
    decode_s = 0.002 + 1e-5
    first = [0.02, 0.02 + decode_s, 0.025 + decode_s, 0.025 + 2 * decode_s + 1e-5]
    assert times[:4] == pytest.approx(first)
    assert times[4:] == pytest.approx(first[2:])


def test_impossible_engines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens \(8\) must be at least one block"):
        EngineConfig(max_batch_tokens=8)
    with pytest.raises(ValueError, match="less than 1"):
        Speculation(alpha=1.0, length=2)
    with pytest.raises(ValueError, match="noise must be finite and >= 0, got -1"):
        Truth(MODEL, noise=-1)
