"""An engine that suspends prefills: 10 ms a task and 0.1 ms a token, attention beside it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.systems import SETUPS
from sluice.scheduling.latency.model import LinearLatency, StepSample
from sluice.scheduling.request.objective import SLO
from sluice.simulation.engine import Truth
from sluice.simulation.preemption import (
    LLAMA3_8B,
    LLAMA3_70B,
    WHOLE,
    Pass,
    SuspensionConfig,
    simulate_prefills,
)
from sluice.simulation.settings import flowprefill
from sluice.simulation.workload import Arrival, Workload
from tests.examples import examples

MODEL = LinearLatency(a=0.01, b=1e-4, c=1e-7, d=4e-9)
EXACT = Truth(MODEL, 0.0)
PAPER = SuspensionConfig(depth=WHOLE, chunk_tokens=WHOLE, batch_tokens=0, check_s=0.0)


def forward(tokens, granularity="operator", model=LLAMA3_8B, latency=MODEL):
    return Pass(model, latency, StepSample.of([(tokens, 0)]), granularity=granularity)


def load(*requests):
    """Prefills of ``(arrival_s, tokens, ttft_s)``."""
    made = [Arrival(when, tokens, 1, SLO(ttft_s=ttft_s)) for when, tokens, ttft_s in requests]
    return Workload("test", tuple(sorted(made, key=lambda each: each.arrival_s)))


def beside_long(tpot_s, output=5):
    """A decode of a short prompt, beside which a long one comes."""
    short = Arrival(0.0, 100, output, SLO(ttft_s=1.0, tpot_s=tpot_s))
    return Workload("both", (short, Arrival(0.01, 16_000, 1, SLO(ttft_s=60.0))))


def served(workload, config=PAPER, truth=EXACT, seed=0):
    return simulate_prefills(workload, truth, config=config, seed=seed)


def ttft_s(run):
    arrival_s = np.array([each.arrival_s for each in run.requests.arrivals])
    return run.requests.emitted_s - arrival_s


def attainment(run):
    allowed_s = np.array([each.slo.ttft_s for each in run.requests.arrivals])
    return float((ttft_s(run) <= allowed_s).mean())


class TestPass:
    def test_takes_the_time_of_its_step_and_of_its_checks(self):
        step = StepSample.of([(1_000, 0), (200, 300)])
        bare = Pass(LLAMA3_8B, MODEL, step, granularity="off")
        assert bare.seconds == pytest.approx(MODEL.step_s(step))
        assert Pass(LLAMA3_8B, MODEL, step, 1.5, "off").seconds == pytest.approx(1.5 * bare.seconds)
        checked = Pass(LLAMA3_8B, MODEL, step, 1.0, "operator", check_s=1e-6)
        assert bare.next_check_s(0.01) == bare.seconds
        # Five operators in each of 32 layers.
        assert checked.checks == 160
        assert checked.seconds == pytest.approx(bare.seconds + 160e-6)

    def test_operators_take_their_share(self):
        """Linear ones by their weights, attention what depends on the context."""
        one = forward(8_000)
        assert one.next_check_s(0.0) == 0.0
        places = [0.0]
        while places[-1] < one.seconds:
            places.append(one.next_check_s(places[-1] + 1e-9))
        assert len(places) == 161
        seconds = np.diff(places[:6])
        qkv, attention, o, gate_up, down = seconds
        # 4,096 x (4,096 + 2 x 1,024), 4,096^2, 2 x 4,096 x 14,336, and half of that.
        assert gate_up / down == pytest.approx(2.0, abs=1e-3)
        assert gate_up / qkv == pytest.approx(28_672 / 6_144, abs=1e-3)
        assert qkv / o == pytest.approx(1.5, abs=1e-3)
        assert attention * 32 == pytest.approx(4e-9 / 2 * 8_000**2, abs=1e-5)

    @given(st.integers(1, 20_000), st.floats(0, 1), st.sampled_from(["operator", "layer"]))
    def test_the_next_check_is_ahead_and_near(self, tokens, share, granularity):
        one = forward(tokens, granularity)
        done_s = share * one.seconds
        next_s = one.next_check_s(done_s)
        assert done_s <= next_s <= one.seconds
        assert next_s - done_s <= one.seconds / 32 * (1 + 1e-9)
        assert 0 < one.passed(done_s) <= 1
        assert one.passed(done_s) >= share - 1 / 32

    @pytest.mark.parametrize(
        ("setup", "model", "expected"), [("8b", LLAMA3_8B, 3.0), ("70b", LLAMA3_70B, 2.8)]
    )
    def test_operators_block_for_a_third_of_the_time_of_layers(self, setup, model, expected):
        """FlowPrefill Fig. 12 has a quarter (3.5 to 4.2 times less). Here, with the mean prompt of
        its File task, the largest operator alone is half of a layer, which bounds the ratio."""
        mean = {}
        for granularity in ("operator", "layer"):
            one = forward(6_833, granularity, model, SETUPS[setup].truth)
            done_s = np.linspace(0, one.seconds, 20_001)[:-1]
            mean[granularity] = np.mean([one.next_check_s(each) - each for each in done_s])
        assert mean["layer"] / mean["operator"] == pytest.approx(expected, rel=0.02)
        # §6.4: below 4.5 ms.
        assert mean["operator"] < 0.0045


class TestExamples:
    def test_submit_preempt_resume(self):
        """FlowPrefill Fig. 8: A runs, B with the earlier deadline comes, then A goes on."""
        run = served(load((0.0, 8_000, 60.0), (0.3, 500, 0.5)))
        long, short = forward(8_000), forward(500)
        stopped_s = long.next_check_s(0.3)
        first_a_s, first_b_s = run.requests.emitted_s
        assert first_b_s == pytest.approx(stopped_s + 0.0013 + short.seconds)
        assert first_a_s == pytest.approx(long.seconds + 0.0013 + short.seconds)
        counts = run.counts
        assert (counts.suspensions, counts.deepest, counts.tasks) == (1, 1, 2)
        assert counts.blocked_s == pytest.approx([stopped_s - 0.3])
        # §6.4: an arrival and a completion are a round each.
        assert counts.rounds == 4

    def test_nothing_is_stopped_for_a_later_deadline(self):
        run = served(load((0.0, 8_000, 2.0), (0.3, 500, 5.0)))
        assert run.counts.suspensions == 0
        assert run.requests.emitted_s[0] == pytest.approx(forward(8_000).seconds)

    def test_what_came_last_ends_first(self):
        run = served(load((0.0, 8_000, 60.0), (0.1, 6_000, 20.0), (0.2, 4_000, 5.0)))
        assert run.counts.deepest == 2
        assert list(np.argsort(run.requests.emitted_s)) == [2, 1, 0]

    def test_a_short_one_does_not_wait_for_one_that_fills_the_stack(self):
        """With one suspended at most, the second long one runs in chunks that are soon over."""
        queue = load((0.0, 8_000, 60.0), (0.1, 8_000, 20.0), (0.3, 500, 0.5))
        config = replace(PAPER, depth=1)
        run = served(queue, config)
        assert run.counts.deepest == 1
        chunk_s = forward(512, "off").seconds + 8_000 * (1e-7 + 512 * 4e-9)
        assert ttft_s(run)[2] < chunk_s + 0.0013 + forward(500).seconds
        without = served(queue, replace(config, small_chunk_tokens=WHOLE))
        assert ttft_s(without)[2] > 0.5

    def test_late_prefills_run_together_and_are_suspended_for_those_in_time(self):
        run = served(load((0.0, 8_000, 0.1), (0.0, 8_000, 0.1), (0.2, 500, 0.3)))
        assert (run.counts.tasks, run.counts.suspensions) == (2, 1)
        late_s, also_s, urgent_s = ttft_s(run)
        assert urgent_s < 0.3
        assert late_s == also_s

    @pytest.mark.parametrize("tpot_s", [0.1, 0.2])
    def test_a_decode_stops_a_long_prefill_for_each_of_its_tokens(self, tpot_s):
        """It keeps its TPOT since the first token, and each gap is about one."""
        run = served(beside_long(tpot_s=tpot_s))
        *tokens_s, long_s = run.requests.emitted_s
        assert tokens_s[-1] < long_s
        assert run.counts.suspensions == 4
        since_s = np.array(tokens_s[1:]) - tokens_s[0]
        assert (since_s <= tpot_s * np.arange(1, 5)).all()
        operator_s = forward(16_000).seconds / 32 / 2
        assert (np.diff(tokens_s) > (1 - 2 * 0.1) * tpot_s - operator_s).all()

    def test_a_decode_without_a_tpot_has_a_step_after_the_configured_gap(self):
        """And after the next operator and the suspension."""
        *tokens_s, _ = served(beside_long(tpot_s=None)).requests.emitted_s
        operator_s = forward(16_000).seconds / 32 / 2
        assert (np.abs(np.diff(tokens_s) - 0.06) < operator_s + 2e-3).all()

    def test_decodes_keep_a_pace_that_stops_of_long_tasks_leave_no_time_for(self):
        """Operators of 16,000 tokens take 33 ms, and a token is due every 40."""
        run = served(beside_long(tpot_s=0.04, output=40))
        *tokens_s, long_s = run.requests.emitted_s
        assert tokens_s[-1] - tokens_s[0] <= 39 * 0.04
        assert tokens_s[-1] < long_s < tokens_s[-1] + forward(16_000).seconds

    def test_a_step_that_would_come_due_in_a_task_that_cannot_be_stopped_is_first(self):
        """200 tokens take 30 ms, and come 10 ms before a step of the decode begins."""
        decode = Arrival(0.0, 100, 3, SLO(ttft_s=1.0, tpot_s=0.05))
        whole_s = forward(100).seconds
        long = Arrival(whole_s + 0.001, 2_000, 1, SLO(ttft_s=60.0))
        short = Arrival(whole_s + 0.025, 200, 1, SLO(ttft_s=0.2))
        run = served(Workload("three", (decode, long, short)))
        first_s, second_s, _, _, short_s = run.requests.emitted_s
        assert second_s < short_s
        assert second_s - first_s <= 0.05

    def test_decodes_run_together_where_no_prefill_waits(self):
        each = Arrival(0.0, 100, 4, SLO(ttft_s=1.0))
        run = served(Workload("decodes", (each, each)))
        assert run.counts.suspensions == 0
        assert run.counts.tasks == 2 + 3


requests = st.tuples(
    st.floats(0, 2), st.integers(1, 6_000), st.sampled_from([0.1, 0.5, 2.0, 10.0, 1e6])
)
configs = st.builds(
    SuspensionConfig,
    granularity=st.sampled_from(["off", "layer", "operator"]),
    depth=st.sampled_from([1, 2, 3, WHOLE]),
    chunk_tokens=st.sampled_from([500, 2_000, WHOLE]),
    small_chunk_tokens=st.sampled_from([300, WHOLE]),
    batch_tokens=st.sampled_from([0, 1_000, 4_000]),
    foresight=st.sampled_from(["slack", "deadline", "none"]),
)


class TestProperties:
    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(requests, min_size=1, max_size=12), configs)
    def test_everything_is_served_within_the_bounds(self, made, config):
        run = served(load(*made), config)
        counts, arrivals = run.counts, run.requests.arrivals
        alone_s = np.array([MODEL.step_s(StepSample.of([(a.prompt_tokens, 0)])) for a in arrivals])
        # Nobody is lost, and nobody is faster than alone: all of its work is done.
        assert (ttft_s(run) >= alone_s - 1e-9).all()
        assert counts.deepest <= config.depth
        assert len(counts.blocked_s) >= counts.suspensions
        # One task computes at a time, and none does twice.
        assert counts.busy_s + counts.suspensions * config.switch_s <= counts.end_s + 1e-9

    @settings(max_examples=examples(60), deadline=None)
    @given(
        st.lists(st.tuples(st.floats(0, 2), st.integers(1, 6_000)), min_size=1, max_size=10),
        st.sampled_from(["operator", "layer"]),
    )
    def test_a_resumed_prefill_does_what_was_left(self, made, granularity):
        """Who comes later is due earlier, and all can be: many suspensions, and not a moment of
        work more than without."""
        queue = load(*((when, tokens, 1e4 / (1 + when)) for when, tokens in made))
        config = replace(PAPER, granularity=granularity)
        run = served(queue, config)
        whole_s = sum(forward(a.prompt_tokens).seconds for a in queue.arrivals)
        assert run.counts.busy_s == pytest.approx(whole_s)
        assert run.counts.tasks == len(queue)
        assert run.counts.rounds <= 2 * len(queue)


class TestPaperWorkload:
    WORKLOAD = flowprefill("llama3-8b", 4.5, 250, 1_000)
    TRUTH = Truth(SETUPS["8b"].truth)

    def run(self, **changes):
        return served(self.WORKLOAD, SuspensionConfig(**changes), self.TRUTH, seed=1)

    def test_a_finer_grain_attains_no_less(self):
        found = [attainment(self.run(granularity=grain)) for grain in ("off", "layer", "operator")]
        assert all(finer >= coarser for coarser, finer in pairwise(found))
        assert found[-1] > found[0]

    def test_runs_repeat_themselves(self):
        assert (self.run().requests.emitted_s == self.run().requests.emitted_s).all()
