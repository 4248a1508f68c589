"""The engine-independent half of the local scheduler, with a clock in the test's hand."""

from __future__ import annotations

import gc
import json
import logging
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.requests import Turn
from sluice.replica.scheduler.local_scheduler import GarbageCollector, LocalScheduler, StepTimes
from sluice.replica.scheduler.state_table import NO_ROWS, StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.scheduling.batching import BatchBudget, BatchPlan, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.kernels import PROGRAM
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from sluice.scheduling.request.stages import Stage
from sluice.telemetry.records import RecordLog
from tests.replica.rows import running
from tests.scheduling.views import decode, prefill, queue_of, queues

MODEL = LinearLatency(a=0.010, b=0.001)
BUDGET = BatchBudget(tokens=100, sequences=8, kv_blocks=1000, block_tokens=16)


@pytest.fixture
def table():
    return StateTable.create(4)


def view(request_id, pending=10):
    return RequestView(request_id, SLO(), 0.0, pending, 0, pending)


class Engine:
    """A local scheduler, around batches of the request ``e1`` that take as long as a test says."""

    def __init__(self, table, log=None):
        self.scheduler = LocalScheduler(make_policy("fcfs"), table, MODEL, log)
        self.table, self.now_s = table, 0.0

    def plan(self, *views, budget=BUDGET):
        return self.scheduler.plan(QueueView(views), self.now_s, budget)

    def end(self, step, changed=NO_ROWS, **end):
        self.scheduler.end_step(step, self.now_s, changed, 0, 0, 1000, 1000, **end)

    def step(self, seconds=0.02, tokens=10, views=None, ran=None, fetched=(), **end):
        """Plan, run and end a batch. Returns what was planned."""
        plan = self.plan(*([view("e1", tokens)] if views is None else views))
        ran = [("e1", tokens, 0)] if ran is None else ran
        step = self.scheduler.begin_step(plan, ran, self.now_s, fetched=fetched)
        self.now_s += seconds
        self.end(step, **end)
        return plan

    @property
    def summary(self):
        return self.table.read().summary


@pytest.fixture
def engine(table):
    return Engine(table)


@pytest.mark.parametrize(("policy", "replaced"), [("slidebatching", True), ("fcfs", False)])
def test_a_role_changes_the_policy_where_its_options_depend_on_it(table, policy, replaced):
    made, planned = [], []

    def of_role(role):
        chosen = make_policy(policy, role=role)
        plan = chosen.plan
        chosen.plan = lambda *args: planned.append(role) or plan(*args)
        made.append(role)
        return chosen

    table.set_role("decode")
    scheduler = LocalScheduler(of_role("decode"), table, MODEL, of_role=of_role)
    for role in ("decode", "prefill", "prefill"):
        table.set_role(role)
        assert scheduler.plan(QueueView([view("e1")]), 0.0, BUDGET).entries == (("e1", 10),)
    assert made == ["decode", "prefill"]
    assert planned == ["decode", *["prefill" if replaced else "decode"] * 2]


def test_a_step_is_planned_run_and_published(table, tmp_path):
    engine = Engine(table, RecordLog(tmp_path / "log" / "r.jsonl"))
    engine.scheduler.track("e1", RequestArgs("fleet-1", 0.0, SLO()), 1, 10, 50)
    slot = engine.scheduler.requests["e1"].slot
    plan = engine.plan(view("e1"))
    assert plan.entries == (("e1", 10),)
    step = engine.scheduler.begin_step(plan, [("e1", 10, 0)], 0.0)
    engine.now_s = 0.02
    engine.end(step, running(slot, 10, 1, 1, 0.02))

    state = table.read()
    assert state.rows[0]["computed_tokens"] == 10
    assert (state.summary["steps"], state.summary["plan_mismatches"]) == (1, 0)
    assert state.summary["last_step_s"] == state.summary["predicted_step_s"] == pytest.approx(0.02)
    for histogram in ("plan_histogram", "step_ratio_histogram"):
        assert sum(state.summary[histogram]) == 1
    (record,) = map(json.loads, (tmp_path / "log" / "r.jsonl").read_text().splitlines())
    assert record["plan"] == [["fleet-1", 10]]
    assert record["ran"] == [["fleet-1", 10, 0]]


@pytest.mark.parametrize(
    ("ran", "mismatches"),
    [([("e1", 10, 0)], 0), ([("e1", 9, 0)], 1), ([], 1), ([("e1", 10, 0), ("e2", 1, 5)], 1)],
)
def test_what_the_engine_ran_otherwise_is_counted(engine, ran, mismatches):
    engine.step(ran=ran)
    assert engine.summary["plan_mismatches"] == mismatches


def test_with_two_steps_in_flight_each_is_charged_its_own_time(engine):
    plan = engine.plan(view("e1"))
    first = engine.scheduler.begin_step(plan, [("e1", 10, 0)], 0.0)
    second = engine.scheduler.begin_step(plan, [("e1", 10, 10)], 0.001)
    for step, end_s in ((first, 0.020), (second, 0.045)):
        engine.now_s = end_s
        engine.end(step)
    samples = [sample.seconds for sample in engine.table.samples()]
    assert samples == pytest.approx([0.020, 0.025])


def test_overlapping_batches_of_a_pipeline_are_not_charged_twice(table):
    engine = Engine(table)
    engine.scheduler.times = StepTimes(stages=2)
    plan = engine.plan(view("e1"))
    first = engine.scheduler.begin_step(plan, [("e1", 10, 0)], 0.0)
    second = engine.scheduler.begin_step(plan, [("e2", 10, 0)], 0.001)
    for step, end_s in ((first, 0.020), (second, 0.030)):
        engine.now_s = end_s
        engine.end(step)
    assert engine.summary["busy_s"] == pytest.approx(0.030)
    assert engine.table.read().accounts["seconds"].sum() == pytest.approx(0.030)


def test_steps_slower_than_predicted_correct_the_model(engine):
    for _ in range(200):
        engine.step(0.030)
    summary = engine.summary
    assert summary["correction"] == summary["fixed_correction"] == pytest.approx(1.5, rel=0.01)
    assert summary["step_spread"] < 0.02
    assert engine.plan(view("e1")).predicted_s == pytest.approx(0.030, rel=0.01)
    engine.table.set_model(LinearLatency(a=0.030, b=0.0))
    assert engine.plan(view("e1")).predicted_s == pytest.approx(0.030)


def test_plans_tell_slower_tokens_from_a_slower_step(engine):
    errors = []
    for step in range(120):
        tokens = 50 if step % 3 == 0 else 1
        seconds = 0.010 + 0.001 * tokens * (2 if step >= 60 else 1)
        errors.append(abs(engine.step(seconds, tokens).predicted_s / seconds - 1))
    assert errors[60] > 0.4
    assert max(errors[75:]) < 0.05
    assert engine.summary["correction"] == pytest.approx(2, rel=0.05)
    assert engine.summary["fixed_correction"] == pytest.approx(1, rel=0.1)


def test_steps_beside_other_work_teach_nothing_unless_all_are(engine):
    for _ in range(30):
        engine.step(0.060, disturbed=True)
    assert engine.summary["correction"] == 1.0
    assert not engine.table.samples()
    assert sum(engine.summary["step_ratio_histogram"]) == 30
    for _ in range(300):
        engine.step(0.060, disturbed=True)
    assert engine.summary["correction"] > 2.0


def test_a_request_whose_kv_is_fetched_is_no_mismatch_and_alone_no_step(engine):
    engine.step(views=[view("e1"), view("e2", 1)], fetched=["e2"])
    engine.step(views=[view("e2")], ran=[], fetched=["e2"])
    assert (engine.summary["steps"], engine.summary["plan_mismatches"]) == (1, 0)


def test_kv_transfers_are_published(engine):
    engine.scheduler.kv_arrived("a", 1.0, 1.5, 70, 1000)
    engine.scheduler.kv_arrived("b", 1.0, 1.25, 30, 500)
    engine.scheduler.kv_failed()
    engine.step(views=[], ran=[])
    names = [f"transfer{name}" for name in ("s", "_seconds", "_tokens", "_bytes", "_failures")]
    assert engine.summary[names].tolist() == (2, 0.75, 100, 1500, 1)


def test_an_empty_batch_that_was_planned_empty_is_no_step(table, tmp_path):
    engine = Engine(table, RecordLog(tmp_path / "r.jsonl"))
    engine.step(5.0, views=[], ran=[])
    assert (engine.summary["steps"], engine.summary["updated_s"]) == (0, 5.0)
    assert (tmp_path / "r.jsonl").read_text() == ""
    assert table.samples() == []
    engine.step(0.03)
    engine.step(0.001, views=[], ran=[])
    assert (engine.summary["steps"], engine.summary["step_started_s"]) == (1, 5.0)
    assert engine.summary["updated_s"] == pytest.approx(5.031)
    assert engine.summary["last_step_s"] == pytest.approx(0.03)
    assert engine.summary["predicted_step_s"] == pytest.approx(0.02)


def test_no_best_effort_request_waits_once_all_have_left(engine):
    engine.scheduler.track("e1", RequestArgs("r1", 0.0, SLO(), best_effort=True), 1, 10, 50)
    engine.now_s = 5.0
    full = BUDGET._replace(kv_blocks=0)
    plan = engine.plan(view("e1")._replace(best_effort=True), budget=full)
    engine.end(engine.scheduler.begin_step(plan, [], 5.0))
    assert engine.summary["best_effort_wait_s"] == 5.0
    # Aborted: the engine has nothing left to plan.
    engine.scheduler.forget("e1")
    engine.end(engine.scheduler.begin_step(BatchPlan.empty(), [], 6.0))
    assert engine.summary["best_effort_wait_s"] == 0.0


def test_a_batch_begins_behind_those_in_flight_at_the_earliest_now(engine):
    for next_begins_s, expected_s in ((0.01, 0.02), (0.05, 0.05)):
        engine.now_s = 0.0
        engine.step(next_begins_s=next_begins_s)
        assert engine.summary["next_begins_s"] == expected_s


def test_a_full_disk_ends_the_batch_log_and_nothing_else(table, caplog):
    engine = Engine(table, RecordLog(Path("/dev/full")))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            engine.step()
    assert engine.summary["steps"] == 3
    (record,) = caplog.records
    assert "full ends after 0 records" in record.getMessage()


def test_requests_beyond_the_table_run_without_a_row(engine, caplog):
    scheduler, table = engine.scheduler, engine.table
    names = [f"e{index}" for index in range(6)]
    with caplog.at_level(logging.WARNING):
        for key, name in enumerate(names):
            scheduler.track(name, RequestArgs(name, 0.0, SLO()), key, 10, 50)
    assert len(caplog.records) == 1
    assert len(table.read().rows) == 4
    plan = engine.plan(*map(view, names))
    assert len(plan.entries) == 6
    step = scheduler.begin_step(plan, [(name, 10, 0) for name in names], 0.0)
    slots = [scheduler.requests[name].slot for name in names]
    engine.end(step, running(slots, 10, 1, 1, 0.1))
    assert np.all(table.read().rows["computed_tokens"] == 10)
    for name in names * 2:
        scheduler.forget(name)
    assert len(table.read().rows) == 0
    scheduler.track("e9", RequestArgs("r9", 0.0, SLO()), 9, 10, 50)
    assert len(table.read().rows) == 1


CHAT = SLO(service_class="chat")


def test_an_expected_length_counts_until_outputs_of_such_an_expectation_are_known(engine):
    scheduler = engine.scheduler

    def expected(tokens, most=1_000, tenant=0):
        turn = Turn(expected_tokens=tokens) if tokens else None
        args = RequestArgs("x", 0.0, CHAT, turn=turn, tenant=tenant)
        tracked = scheduler.track("x", args, 1, 10, most)
        scheduler.forget("x")
        return tracked.expected_tokens

    assert (expected(100), expected(100, most=60)) == (100, 60)
    assert isnan(expected(0))
    scheduler.track("y", RequestArgs("y", 0.0, CHAT, turn=Turn(expected_tokens=100)), 1, 10, 900)
    scheduler.forget("y", 300)
    assert (expected(100), expected(127), expected(128)) == (300, 300, 128)
    assert expected(0) == 300  # it is of the class, too
    assert expected(100, tenant=1) == 100  # what other tenants expect says nothing


def test_the_row_of_a_turn_names_the_program_that_its_work_counts_for(engine):
    def program(turn):
        tracked = engine.scheduler.track("x", RequestArgs("x", 0.0, CHAT, turn=turn), 1, 10, 99)
        engine.scheduler.forget("x")
        return np.array(tracked.row(10))[PROGRAM]

    assert program(Turn(session=5, program=1 << 62)) == 1 << 62
    assert (program(Turn(session=5)), program(None)) == (0, 0)


def test_outputs_are_expected_to_be_as_long_as_those_of_their_class_before(engine):
    scheduler = engine.scheduler

    def expected(engine_id, slo=CHAT, most=1000):
        scheduler.track(engine_id, RequestArgs(engine_id, 0.0, slo), 1, 10, most)
        return scheduler.requests[engine_id].expected_tokens

    assert np.isnan(expected("first"))
    scheduler.forget("first", 100)
    assert expected("second") == 100
    scheduler.forget("second", 200)
    assert expected("capped", most=20) == 20
    assert expected("third") == 150
    assert np.isnan(expected("other", SLO(service_class="batch")))
    # Of one token, as of a prompt that is computed for another replica, there is nothing to guess.
    assert expected("one", SLO(service_class="batch"), most=1) == 1
    # One that was aborted says nothing of how long it would have been.
    scheduler.forget("third")
    assert expected("fourth") == 150


def test_a_resumed_output_is_expected_to_be_shorter_by_what_another_engine_made(engine):
    scheduler = engine.scheduler

    def tracked(resumed=0):
        return scheduler.track("x", RequestArgs("x", 0.0, CHAT, resumed=resumed), 1, 10, 999)

    for resumed in (0, 60) * 10:
        tracked(resumed)
        scheduler.forget("x", 100 - resumed)
    for resumed, rest in ((0, 100), (60, 40), (100, 1)):
        request = tracked(resumed)
        assert request.expected_tokens == pytest.approx(rest)
        assert request.least_tokens == pytest.approx(100 - resumed)
        scheduler.prolong(request, 50)
        assert request.expected_tokens == pytest.approx(max(100 - resumed, 51), abs=12)
        scheduler.forget("x")


def test_an_output_that_goes_on_is_expected_to_be_longer_up_to_its_limit(engine):
    scheduler = engine.scheduler
    for name in ("a", "b", "c"):
        scheduler.track(name, RequestArgs(name, 0.0, CHAT), 1, 10, 1000)
        scheduler.forget(name, 100)
    tracked = scheduler.track("long", RequestArgs("long", 0.0, CHAT), 9, 10, 160)
    prolonged = 0
    for emitted in range(1, 160):
        if emitted >= tracked.expected_tokens:
            scheduler.prolong(tracked, emitted)
            prolonged += 1
        assert emitted < tracked.expected_tokens <= 160
    assert tracked.expected_tokens == 160
    assert prolonged < 12


STAGED = SLO.of_stages(
    (Stage(2.0, 0.2), Stage(tpot_s=0.05, tokens=3), Stage(0.5, 0.1)), 9.0, service_class="chat"
)
"""Thinks, begins its answer quickly, and ends it at leisure."""


def staged(table):
    scheduler = Engine(table).scheduler
    args = RequestArgs("r1", 10.0, STAGED, reasoning_ends=frozenset({7}))
    return scheduler, scheduler.track("e1", args, 1, 100, 50)


def test_the_objective_of_a_request_is_that_of_its_stage(table):
    scheduler, tracked = staged(table)
    assert (tracked.slo, tracked.begun) == (SLO(2.0, 0.2, 9.0, service_class="chat"), 0)
    row = table.read().rows[0]
    # The controller reserves for the tightest TPOT to come.
    assert row[["ttft_s", "tpot_s", "later_stages"]].tolist() == (2.0, pytest.approx(0.05), 2)

    assert not scheduler.follow_stages(tracked, 1, 12.0)
    assert scheduler.follow_stages(tracked, 1, 13.0, reasoned=1)
    # It continues decoding at one TPOT, and 3 s of the whole time are gone.
    assert tracked.slo == SLO(0.05, 0.05, 6.0, service_class="chat")
    assert (tracked.arrival_s, tracked.begun, tracked.stages.position.tokens) == (13.0, 2, 0)
    row = table.read().rows[0]
    assert row[["arrival_s", "ttft_s", "e2e_s"]].tolist() == (13.0, pytest.approx(0.05), 6.0)
    assert row[["prompt_tokens", "emitted_tokens", "later_stages"]].tolist() == (102, 0, 1)
    assert np.isnan(row["first_token_s"])


def test_tokens_that_leave_together_begin_the_stage_that_the_last_is_of(table):
    scheduler, tracked = staged(table)
    # One token of thoughts, the three that the second stage has, and two of the last.
    assert scheduler.follow_stages(tracked, 6, 12.0, reasoned=1)
    assert (tracked.slo.times_s, tracked.begun) == ((0.5, 0.1, 7.0), 4)
    assert tracked.stages.position.tokens == 2
    assert table.read().rows["later_stages"] == [0]


def test_a_request_without_a_row_follows_its_stages(table):
    for key in range(table.capacity):
        table.allocate(key, SLO(), 0.0, 1)
    scheduler, tracked = staged(table)
    assert scheduler.follow_stages(tracked, 1, 12.0, reasoned=1)
    assert tracked.slo.tpot_s == 0.05


PACED = SLO(ttft_s=1.0, tpot_s=0.1)
STEP_S = 0.03


class Process:
    """A process whose collections take ``pause_s``, just after one."""

    def __init__(self, monkeypatch, pause_s=0.01):
        self.now_s, self.pause_s, self.collections = 0.0, pause_s, 0
        monkeypatch.setattr(gc, "collect", self.collect)
        for name in ("disable", "freeze"):
            monkeypatch.setattr(gc, name, lambda: None)
        self.collector = GarbageCollector(lambda: self.now_s)
        self.collector.before_batch(QueueView(), STEP_S)
        assert self.collects(5.01, lambda now_s: queue_of())  # its pause counts from now on

    def collect(self):
        self.collections += 1
        self.now_s += self.pause_s

    def collects(self, since_s, queue, step_s=STEP_S):
        """Whether garbage is collected before a batch of ``queue(now_s)``, after ``since_s``."""
        self.now_s, before = self.now_s + since_s, self.collections
        self.collector.before_batch(queue(self.now_s), step_s)
        return self.collections > before


def decoding(due_in_s):
    """A queue of one decode whose next token is due in ``due_in_s``."""

    def queue(now_s):
        first_s = now_s + due_in_s - PACED.tpot_s
        return queue_of(decode("d", PACED, arrival_s=first_s - 0.5, first_token_s=first_s))

    return queue


def always(*views):
    return lambda now_s: queue_of(*views)


@pytest.mark.parametrize(
    ("since_s", "queue", "collects"),
    [
        (4.9, always(), False),
        (5.01, always(), True),
        (5.01, always(decode("free")), True),
        (5.01, always(prefill("waits", 10)), False),
        (5.01, always(decode("free"), prefill("begun", 10, computed=5)), False),
        # 30 ms of the slack go to the batch itself; four times 10 ms must be left.
        (5.01, decoding(0.071), True),
        (5.01, decoding(0.069), False),
        (5.01, decoding(-1.0), False),
        (59.9, decoding(-1.0), False),
        (60.01, decoding(-1.0), True),
        (60.01, always(prefill("waits", 10)), True),
    ],
)
def test_a_collection_waits_for_slack_but_at_most_a_minute(since_s, queue, collects, monkeypatch):
    assert Process(monkeypatch).collects(since_s, queue) is collects


def test_the_last_pause_says_how_much_slack_is_enough(monkeypatch):
    process = Process(monkeypatch, pause_s=0.08)
    assert not process.collects(5.01, decoding(0.2))
    assert process.collects(0.2, decoding(0.5))


@given(queues(), st.floats(0, 200), st.floats(0, 1))
def test_never_twice_in_a_short_time_and_always_within_a_long_one(queue, since_s, step_s):
    with pytest.MonkeyPatch.context() as patch:
        collects = Process(patch).collects(since_s, lambda now_s: queue, step_s)
    assert not (collects and since_s < 4.99)
    assert collects or since_s < 60.01


class Cycle:
    """Unreachable as soon as it is made, but only for a collector."""

    made = 0

    def __init__(self):
        self.me = self
        Cycle.made += 1

    def __del__(self):
        Cycle.made -= 1


def test_garbage_is_kept_until_it_is_time_and_pythons_collector_comes_back():
    times_s = [100.0]
    collector = GarbageCollector(lambda: times_s[-1])
    collector.before_batch(QueueView(), STEP_S)
    try:
        assert not gc.isenabled()
        for _ in range(2000):
            Cycle()
        busy = queue_of(prefill("waits", 10))
        for time_s in (101.0, 105.0, 159.9):
            times_s.append(time_s)
            collector.before_batch(busy, STEP_S)
            assert Cycle.made == 2000
        times_s.append(160.0)
        collector.before_batch(busy, STEP_S)
        assert Cycle.made == 0
    finally:
        collector.stop()
    assert gc.isenabled()
    collector.stop()
    assert gc.isenabled()


def test_blocks_of_a_preempted_request_are_no_longer_its_where_no_batch_follows(engine):
    for number, (name, client) in enumerate((("e1", "a"), ("e2", "b")), start=1):
        engine.scheduler.track(name, RequestArgs(name, 0.0, SLO(), client=client), number, 32, 50)
    engine.step(ran=[("e1", 32, 0), ("e2", 32, 0)], seconds=1.0)
    idle = engine.scheduler.begin_step(BatchPlan.empty(), [], engine.now_s, ["e1"])
    engine.end(idle)
    engine.step(ran=[("e2", 1, 32)], seconds=1.0)
    held = {each["client"]: each["kv_block_seconds"] for each in engine.table.read().accounts}
    assert held == {b"a": pytest.approx(2.0), b"b": pytest.approx(2.0 + 3.0)}
