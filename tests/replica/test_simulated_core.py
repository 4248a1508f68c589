"""The simulated engine's core in virtual time."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.replica.config import SimulatedEngineConfig
from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.replica.simulated.core import SimulatedCore, SimulatedSequence
from sluice.scheduling.batching import POLICIES, BatchBuilder, BatchPolicy, make_policy
from sluice.scheduling.batching.token_budget import FCFS
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.scheduling.request.kernels import COMPUTED, KV_BLOCKS, PENDING, RUNNING, TPOT
from sluice.scheduling.request.objective import SLO, Anchor
from sluice.scheduling.request.queue import QueueView
from sluice.scheduling.request.stages import Stage
from tests.compiled_loops import run
from tests.examples import examples

TRUTH = {"step_s": 0.01, "token_s": 0.001, "context_token_s": 0.0001}


class Bench:
    """A core, its table, and virtual time."""

    def __init__(
        self, policy: str | BatchPolicy = "fcfs", capacity: int = 64, **simulated: Any
    ) -> None:
        config = SimulatedEngineConfig(**{**TRUTH, **simulated})
        self.config = config
        self.table = StateTable.create(capacity)
        model = LinearLatency(config.step_s, config.token_s, config.context_token_s)
        if isinstance(policy, str):
            policy = make_policy(policy)
        self.core = SimulatedCore(config, LocalScheduler(policy, self.table, model), self.table)
        self.now_s = 0.0
        self.emissions: list[tuple[float, Any]] = []

    def submit(
        self, name: Any, prompt: int, output: int, slo: SLO | None = None, **more: Any
    ) -> SimulatedSequence:
        args = RequestArgs(str(name), self.now_s, slo or SLO())
        return self.core.submit(args, hash(name) % 1000, prompt, output, name, **more)

    def emit(self, sequence: SimulatedSequence) -> None:
        self.emissions.append((self.now_s, sequence.owner))

    def step(self) -> list[tuple[Any, int]]:
        """Run one step; return what ran."""
        step = self.core.begin(self.now_s)
        assert step is not None
        ran = [(sequence.owner, tokens) for sequence, tokens in step.ran]
        self.now_s += step.seconds
        self.core.complete(step, self.now_s, self.emit)
        return ran

    def run(self) -> None:
        """Run until nothing is live."""
        for _ in range(100_000):
            if not self.core.live:
                return
            self.step()
        raise AssertionError("requests are live for ever")

    def first_token_s(self, name: Any) -> float:
        return next(at for at, owner in self.emissions if owner == name)

    def check_blocks(self) -> None:
        core, config = self.core, self.config
        table = core.rows.table[: core.rows.live]
        blocks, computed, running = table[:, KV_BLOCKS], table[:, COMPUTED], table[:, RUNNING] > 0
        assert set(core.rows.keys[: len(table)].tolist()) == core.live.keys()
        assert core.rows.free_blocks >= 0
        assert core.rows.free_blocks + blocks.sum() == config.kv_blocks
        assert (blocks * config.block_tokens >= computed).all()
        assert (running | ((blocks == 0) & (computed == 0))).all()
        assert (table[:, PENDING] >= 1).all()
        assert running.sum() == core.rows.sequences <= config.max_sequences


def test_times_are_those_of_the_latency_model() -> None:
    bench = Bench()
    bench.submit("a", 10, 3)
    bench.run()
    # 10 new tokens on a context of 10; then one on a context of 11, and of 12.
    took_s = [0.01 + 0.001 * new + 0.0001 * all_ for new, all_ in ((10, 10), (1, 11), (1, 12))]
    assert [at for at, _ in bench.emissions] == pytest.approx(list(accumulate(took_s)))
    summary = bench.table.read().summary
    assert summary["correction"] == pytest.approx(1.0)
    assert summary["last_step_s"] == pytest.approx(took_s[-1])


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    bench = Bench(max_batch_tokens=4)
    bench.submit("a", 10, 2)
    assert [bench.step() for _ in range(4)] == [[("a", each)] for each in (4, 4, 2, 1)]
    assert not bench.core.live


def test_the_state_table_follows_a_request() -> None:
    bench = Bench(kv_blocks=8, block_tokens=4)
    summary = bench.table.read().summary
    assert (summary["free_kv_blocks"], summary["total_kv_blocks"]) == (8, 8)
    bench.submit("a", 6, 3)
    state = bench.table.read()
    assert state.rows["pending_tokens"].tolist() == [6]
    bench.step()
    state = bench.table.read()
    row = state.rows[0]
    assert (row["computed_tokens"], row["pending_tokens"], row["emitted_tokens"]) == (6, 1, 1)
    assert row["kv_blocks"] == 2
    assert row["first_token_s"] == pytest.approx(bench.now_s)
    assert (state.summary["running"], state.summary["free_kv_blocks"]) == (1, 6)
    bench.run()
    state = bench.table.read()
    assert len(state.rows) == 0
    assert (state.summary["running"], state.summary["free_kv_blocks"]) == (0, 8)


def test_a_plan_follows_the_stage_that_a_request_is_in() -> None:
    seen: list[tuple[object, ...]] = []

    class Watched(FCFS):
        def fill(
            self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
        ) -> None:
            (each,) = queue.requests
            token, anchor = each.emitted_tokens + 1, Anchor.FIRST_TOKEN
            deadline_s = each.slo.deadline_s(
                token, each.arrival_s, each.first_token_s, anchor, each.last_token_s
            )
            seen.append((each.prompt_tokens, each.emitted_tokens, deadline_s - each.arrival_s))
            assert queue.table[0, TPOT] == each.slo.tpot_s
            super().fill(batch, queue, now_s, latency)

    bench = Bench(Watched())
    sequence = bench.submit("a", 20, 5, SLO.of_stages((Stage(1.0, 0.2, tokens=3), Stage(0.5, 0.1))))
    bench.run()
    # Prompt, tokens since, and the next deadline since the begin: of the first stage, its first
    # token was at 0.03 s; the second begins with the third token.
    first_s = bench.first_token_s("a")
    assert seen[1][2] == pytest.approx(first_s + 0.2)
    assert [each[:2] for each in seen] == [(20, 0), (20, 1), (20, 2), (23, 0), (23, 1)]
    assert (seen[0][2], seen[3][2]) == (1.0, 0.5)
    assert sequence.emitted == 5
    assert not sequence.live
    assert bench.table.read().rows.size == 0


def test_an_abort_between_steps_is_published_at_once() -> None:
    bench = Bench(kv_blocks=8)
    sequence = bench.submit("a", 4, 8)
    bench.step()
    bench.core.abort(sequence, bench.now_s)
    state = bench.table.read()
    assert len(state.rows) == 0
    assert (state.summary["running"], state.summary["free_kv_blocks"]) == (0, 8)


def test_an_abort_during_a_step_does_not_touch_the_slot_of_a_later_request() -> None:
    bench = Bench()
    sequence = bench.submit("a", 4, 8)
    step = bench.core.begin(0.0)
    assert step is not None
    bench.core.abort(sequence, 0.0)
    bench.submit("b", 7, 1)
    bench.core.complete(step, step.seconds, bench.emit)
    assert bench.emissions == []
    rows = bench.table.read().rows
    assert (rows["prompt_tokens"].tolist(), rows["computed_tokens"].tolist()) == ([7], [0])


def test_every_second_of_the_engine_is_some_tenants_whatever_becomes_of_its_requests() -> None:
    """Requests end, are aborted, lose their KV to others, and have no slot or no client."""
    bench = Bench(kv_blocks=24, capacity=6)
    made, busy_s = [], 0.0
    for number in range(12):
        args = RequestArgs(
            str(number), bench.now_s, SLO(), client="" if number == 3 else f"c{number % 3}"
        )
        made.append(bench.core.submit(args, number, 40 + number, 30, number))
        for _ in range(3):
            before_s = bench.now_s
            bench.step()
            busy_s += bench.now_s - before_s
        if number % 4 == 0:
            bench.core.abort(made[number // 2], bench.now_s)
        bench.now_s += 0.5  # nobody's
    while bench.core.live:
        before_s = bench.now_s
        bench.step()
        busy_s += bench.now_s - before_s
    state = bench.table.read()
    assert state.summary["preemptions"] > 0
    assert state.summary["busy_s"] == pytest.approx(busy_s)
    assert state.accounts["seconds"].sum() == pytest.approx(busy_s)
    assert sorted(state.accounts["client"]) == [b"", b"c0", b"c1", b"c2"]
    assert (state.accounts["seconds"] > 0).all()
    # At no time more than the KV cache.
    assert 0 < state.accounts["kv_block_seconds"].sum() <= 24 * busy_s


def test_what_can_never_run_is_refused() -> None:
    bench = Bench(kv_blocks=8, block_tokens=2, max_model_tokens=100)
    assert bench.core.max_model_tokens == 16
    with pytest.raises(ValueError, match="more than the 16 tokens"):
        bench.submit("a", 10, 7)
    with pytest.raises(ValueError, match="at least one"):
        bench.submit("a", 10, 0)


class PlansNothing(BatchPolicy):
    name = "nothing"
    source = "this test"
    local_order = SLIDE

    def fill(
        self, batch: BatchBuilder, queue: QueueView, now_s: float, latency: LatencyModel
    ) -> None:
        return


def test_a_policy_that_plans_nothing_does_not_stop_the_engine() -> None:
    bench = Bench(PlansNothing())
    bench.submit("a", 4, 3)
    bench.run()
    assert len(bench.emissions) == 3
    assert bench.table.read().summary["plan_mismatches"] == 3


@pytest.mark.parametrize("policy", ["slidebatching", "fairbatching"])
def test_a_tight_deadline_overtakes_long_prefills(policy: str) -> None:
    first_token_s = {}
    for name in ("fcfs", policy):
        bench = Bench(name, max_batch_tokens=64)
        for index in range(6):
            bench.submit(index, 500, 2, SLO(ttft_s=60.0, tpot_s=0.5))
        bench.submit("tight", 20, 2, SLO(ttft_s=0.2, tpot_s=0.5))
        bench.run()
        first_token_s[name] = bench.first_token_s("tight")
    assert first_token_s[policy] < 0.2 < first_token_s["fcfs"]


class Event(NamedTuple):
    """After ``wait`` steps a request comes; ``doomed``: it may be aborted in a step."""

    wait: int
    prompt: int
    output: int
    ttft_s: float | None
    doomed: bool


class Load(NamedTuple):
    """A random engine and what happens to it."""

    policy: str
    limits: dict[str, int]
    script: list[Event]


limits = st.fixed_dictionaries(
    {
        "kv_blocks": st.integers(8, 24),
        "block_tokens": st.integers(1, 4),
        "max_batch_tokens": st.integers(1, 24),
        "max_sequences": st.integers(1, 6),
    }
)
event = st.builds(
    Event,
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(1, 12),
    st.none() | st.floats(0.01, 2.0),
    st.booleans(),
)
loads = st.builds(
    Load,
    st.sampled_from(sorted(POLICIES)),
    limits,
    st.lists(event, max_size=14),
)


def play(load: Load) -> tuple[list[tuple[float, Any]], list[Any]]:
    """What was emitted and what ran under a load."""
    bench = Bench(load.policy, max_model_tokens=32, **load.limits)
    ran = []

    def step() -> None:
        begun = bench.core.begin(bench.now_s)
        assert begun is not None
        ran.append([(sequence.owner, tokens) for sequence, tokens in begun.ran])
        assert 0 < sum(tokens for _, tokens in begun.ran) <= bench.config.max_batch_tokens
        bench.check_blocks()
        if doomed and doomed[-1].live:
            bench.core.abort(doomed.pop(), bench.now_s)
        bench.now_s += begun.seconds
        bench.core.complete(begun, bench.now_s, bench.emit)
        bench.check_blocks()

    doomed: list[SimulatedSequence] = []
    submitted: dict[int, SimulatedSequence] = {}
    for name, (wait, prompt, output, ttft_s, is_doomed) in enumerate(load.script):
        for _ in range(wait):
            if bench.core.live:
                step()
        try:
            slo = SLO(ttft_s=ttft_s, tpot_s=ttft_s)
            if name % 2:
                first = Stage(ttft_s, ttft_s, tokens=1 + name % 5)
                slo = SLO.of_stages((first, first, Stage(ttft_s)))
            sequence = bench.submit(name, prompt, output, slo)
        except ValueError:
            assert prompt + output > bench.core.max_model_tokens
            continue
        submitted[name] = sequence
        if is_doomed:
            doomed.append(sequence)
    while bench.core.live:
        assert len(ran) < 5_000, "requests are live for ever"
        step()
    for name, sequence in submitted.items():
        emitted = sum(owner == name for _, owner in bench.emissions)
        assert not sequence.live
        assert emitted == sequence.emitted
    state = bench.table.read()
    assert len(state.rows) == 0
    assert bench.core.rows.free_blocks == bench.config.kv_blocks
    assert state.summary["steps"] == len(ran)
    assert state.summary["plan_mismatches"] == 0
    unfinished = {n for n, s in submitted.items() if s.emitted < s.output_tokens}
    assert unfinished <= {n for n, entry in enumerate(load.script) if entry.doomed}
    return bench.emissions, ran


@settings(max_examples=examples(150))
@given(loads)
def test_every_request_ends_once_and_everything_returns(load: Load) -> None:
    assert play(load) == play(load)


# In a process of its own, which has loaded no loop yet.
_STEPS_AFTER_COMPILING = """
from sluice.scheduling.batching.warm_up import warm_up
from sluice.simulation.rows import compile_now
from tests.compiled_loops import loaded
from tests.replica.test_simulated_core import Bench

warm_up("fcfs")
compile_now()
before = loaded()
# Too little memory for all of them, and one is aborted: requests are preempted and dropped.
bench = Bench(kv_blocks=8, block_tokens=16)
sequences = [bench.submit(name, 40, 30) for name in range(6)]
bench.step()
bench.core.abort(sequences[3], bench.now_s)
bench.run()
assert len(bench.emissions) >= 150
after = loaded()
assert after == before, {key: n for key, n in after.items() if n != before.get(key)}
"""


def test_no_step_waits_for_the_compiler() -> None:
    run(_STEPS_AFTER_COMPILING)
