"""The engine-independent half of the local scheduler, with a clock in the test's hand."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.scheduler.local_scheduler import BatchLog, GarbageCollector, LocalScheduler
from sluice.replica.scheduler.state_table import NO_ROWS, StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.scheduling.batching import BatchBudget, BatchPlan, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from sluice.scheduling.request.stages import Stage
from tests.replica.rows import running
from tests.scheduling.views import decode, prefill, queue_of, queues

MODEL = LinearLatency(a=0.010, b=0.001)
BUDGET = BatchBudget(tokens=100, sequences=8, kv_blocks=1000, block_tokens=16)


@pytest.fixture
def table():
    return StateTable.create(4)


def make_scheduler(table, log=None, model=MODEL):
    return LocalScheduler(make_policy("fcfs"), table, model, log)


def view(request_id, pending=10):
    return RequestView(request_id, SLO(), 0.0, pending, 0, pending)


def queue(request_id, pending=10):
    return QueueView([view(request_id, pending)])


def finish(scheduler, step, now_s):
    scheduler.end_step(step, now_s, NO_ROWS, 0, 0, 1000, 1000)


@pytest.mark.parametrize(("policy", "replaced"), [("slidebatching", True), ("fcfs", False)])
def test_a_role_changes_the_policy_where_its_options_depend_on_it(table, policy, replaced):
    table.set_role("decode")
    made = []

    def of_role(role):
        made.append((role, make_policy(policy, role=role)))
        return made[-1][1]

    first = of_role("decode")
    scheduler = LocalScheduler(first, table, MODEL, of_role=of_role)
    scheduler.plan(queue("e1"), 0.0, BUDGET)
    table.set_role("prefill")
    for _ in range(2):
        assert scheduler.plan(queue("e1"), 0.0, BUDGET).entries == (("e1", 10),)
    assert [role for role, _ in made] == ["decode", "prefill"]
    assert (scheduler._policy is not first) is replaced


def test_a_step_is_planned_run_and_published(table, tmp_path):
    scheduler = make_scheduler(table, BatchLog(tmp_path / "log" / "r.jsonl"))
    scheduler.track("e1", RequestArgs("fleet-1", 0.0, SLO()), 1, 10, 50)
    plan = scheduler.plan(queue("e1"), 1.0, BUDGET)
    assert plan.entries == (("e1", 10),)
    step = scheduler.begin_step(plan, [("e1", 10, 0)], 1.0)
    slot = scheduler.requests["e1"].slot
    scheduler.end_step(step, 1.02, running(slot, 10, 1, 1, 1.02), 0, 1, 999, 1000)

    state = table.read()
    assert state.rows[0]["computed_tokens"] == 10
    assert state.summary["steps"] == 1
    assert state.summary["plan_mismatches"] == 0
    assert state.summary["last_step_s"] == pytest.approx(0.02)
    assert state.summary["predicted_step_s"] == pytest.approx(0.02)
    assert sum(state.summary["plan_histogram"]) == 1
    assert sum(state.summary["step_ratio_histogram"]) == 1
    (record,) = map(json.loads, (tmp_path / "log" / "r.jsonl").read_text().splitlines())
    assert record["plan"] == [["fleet-1", 10]]
    assert record["ran"] == [["fleet-1", 10, 0]]


@pytest.mark.parametrize(
    ("ran", "mismatches"),
    [([("e1", 10, 0)], 0), ([("e1", 9, 0)], 1), ([], 1), ([("e1", 10, 0), ("e2", 1, 5)], 1)],
)
def test_what_the_engine_ran_otherwise_is_counted(table, ran, mismatches):
    scheduler = make_scheduler(table)
    step = scheduler.begin_step(scheduler.plan(queue("e1"), 0.0, BUDGET), ran, 0.0)
    finish(scheduler, step, 0.02)
    assert table.read().summary["plan_mismatches"] == mismatches


def test_with_two_steps_in_flight_each_is_charged_its_own_time(table):
    scheduler = make_scheduler(table)
    plan = scheduler.plan(queue("e1"), 0.0, BUDGET)
    first = scheduler.begin_step(plan, [("e1", 10, 0)], 0.0)
    second = scheduler.begin_step(plan, [("e1", 10, 10)], 0.001)
    finish(scheduler, first, 0.020)
    finish(scheduler, second, 0.045)
    assert [sample.seconds for sample in table.samples()] == pytest.approx([0.020, 0.025])


def test_steps_slower_than_predicted_correct_the_model(table):
    scheduler = make_scheduler(table)
    now_s = 0.0
    for _ in range(200):
        plan = scheduler.plan(queue("e1"), now_s, BUDGET)
        step = scheduler.begin_step(plan, [("e1", 10, 0)], now_s)
        now_s += 0.030
        finish(scheduler, step, now_s)
    summary = table.read().summary
    assert summary["correction"] == summary["fixed_correction"] == pytest.approx(1.5, rel=0.01)
    assert summary["step_spread"] < 0.02
    assert scheduler.plan(queue("e1"), now_s, BUDGET).predicted_s == pytest.approx(0.030, rel=0.01)

    table.set_model(LinearLatency(a=0.030, b=0.0))
    assert scheduler.plan(queue("e1"), now_s, BUDGET).predicted_s == pytest.approx(0.030)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 8), (8, 1)])
def test_plans_follow_a_change_of_the_machine_s_speed_after_four_steps(table, before, after):
    scheduler = make_scheduler(table)
    now_s = 0.0

    def run(slowdown):
        """One step; how long it was predicted to be, over how long it took."""
        nonlocal now_s
        plan = scheduler.plan(queue("e1"), now_s, BUDGET)
        step = scheduler.begin_step(plan, [("e1", 10, 0)], now_s)
        seconds = 0.020 * slowdown
        now_s += seconds
        finish(scheduler, step, now_s)
        return plan.predicted_s / seconds

    for _ in range(200):
        run(before)
    errors = [abs(run(after) - 1) for _ in range(100)]
    assert errors[0] > 0.2
    assert max(errors[4:]) <= 0.2


def test_plans_tell_slower_tokens_from_a_slower_step(table):
    scheduler = make_scheduler(table)
    errors = []
    for step in range(120):
        tokens = 50 if step % 3 == 0 else 1
        plan = scheduler.plan(queue("e1", tokens), 0.0, BUDGET)
        flight = scheduler.begin_step(plan, [("e1", tokens, 0)], 0.0)
        seconds = 0.010 + 0.001 * tokens * (2 if step >= 60 else 1)
        scheduler.end_step(flight, 0.0, NO_ROWS, 0, 0, 9, 9, seconds=seconds)
        errors.append(abs(plan.predicted_s / seconds - 1))
    assert errors[60] > 0.4
    assert max(errors[75:]) < 0.05
    summary = table.read().summary
    assert summary["correction"] == pytest.approx(2, rel=0.05)
    assert summary["fixed_correction"] == pytest.approx(1, rel=0.1)


def test_steps_beside_other_work_teach_nothing_unless_all_are(table):
    scheduler = make_scheduler(table)

    def run(steps, disturbed):
        for _ in range(steps):
            plan = scheduler.plan(queue("e1"), 0.0, BUDGET)
            step = scheduler.begin_step(plan, [("e1", 10, 0)], 0.0)
            scheduler.end_step(step, 0.0, NO_ROWS, 0, 0, 9, 9, seconds=0.060, disturbed=disturbed)

    run(30, disturbed=True)
    assert table.read().summary["correction"] == 1.0
    assert not table.samples()
    assert sum(table.read().summary["step_ratio_histogram"]) == 30
    run(300, disturbed=True)
    assert table.read().summary["correction"] > 2.0


def test_a_request_whose_kv_is_fetched_is_no_mismatch_and_alone_no_step(table):
    scheduler = make_scheduler(table)
    plan = scheduler.plan(QueueView([view("e1"), view("e2", 1)]), 0.0, BUDGET)
    step = scheduler.begin_step(plan, [("e1", 10, 0)], 0.0, fetched=["e2"])
    finish(scheduler, step, 0.02)
    plan = scheduler.plan(queue("e2"), 0.02, BUDGET)
    finish(scheduler, scheduler.begin_step(plan, [], 0.02, fetched=["e2"]), 0.021)
    summary = table.read().summary
    assert (summary["steps"], summary["plan_mismatches"]) == (1, 0)


def test_what_is_taken_over_is_published(table):
    scheduler = make_scheduler(table)
    scheduler.kv_arrived(0.5, 70, 1000)
    scheduler.kv_arrived(0.25, 30, 500)
    scheduler.kv_failed()
    finish(scheduler, scheduler.begin_step(BatchPlan.empty(), [], 0.0), 0.0)
    summary = table.read().summary
    assert summary["transfers"] == 2
    assert summary["transfer_seconds"] == 0.75
    assert (summary["transfer_tokens"], summary["transfer_bytes"]) == (100, 1500)
    assert summary["transfer_failures"] == 1


def test_an_empty_batch_that_was_planned_empty_is_no_step(table, tmp_path):
    scheduler = make_scheduler(table, BatchLog(tmp_path / "r.jsonl"))
    step = scheduler.begin_step(scheduler.plan(QueueView(), 0.0, BUDGET), [], 0.0)
    scheduler.end_step(step, 5.0, NO_ROWS, 3, 0, 7, 8)
    summary = table.read().summary
    assert (summary["steps"], summary["updated_s"], summary["waiting"]) == (0, 5.0, 3)
    assert (tmp_path / "r.jsonl").read_text() == ""
    assert table.samples() == []


def test_nobody_waits_once_all_have_left(table):
    scheduler = make_scheduler(table)
    scheduler.track("e1", RequestArgs("fleet-1", 0.0, SLO(), best_effort=True), 1, 10, 50)
    waiting = QueueView([view("e1")._replace(best_effort=True)])
    full = BUDGET._replace(kv_blocks=0)
    finish(scheduler, scheduler.begin_step(scheduler.plan(waiting, 5.0, full), [], 5.0), 5.0)
    assert table.read().summary["best_effort_wait_s"] == 5.0
    # Aborted: the engine has nothing left to plan.
    scheduler.forget("e1")
    finish(scheduler, scheduler.begin_step(BatchPlan.empty(), [], 6.0), 6.0)
    assert table.read().summary["best_effort_wait_s"] == 0.0


def test_an_empty_batch_leaves_the_times_of_the_last_step(table):
    scheduler = make_scheduler(table)
    plan = scheduler.plan(queue("e1"), 1.0, BUDGET)
    finish(scheduler, scheduler.begin_step(plan, [("e1", 10, 0)], 1.0), 1.03)
    finish(
        scheduler, scheduler.begin_step(scheduler.plan(QueueView(), 2.0, BUDGET), [], 2.0), 2.001
    )
    summary = table.read().summary
    assert summary["updated_s"] == 2.001
    assert summary["step_started_s"] == 1.0
    assert summary["last_step_s"] == pytest.approx(0.03)
    assert summary["predicted_step_s"] == pytest.approx(0.02)


def test_a_batch_begins_behind_those_in_flight_at_the_earliest_now(table):
    scheduler = make_scheduler(table)
    found = []
    for now_s, next_begins_s in ((1.03, 1.0), (2.03, 2.05)):
        plan = scheduler.plan(queue("e1"), now_s - 0.03, BUDGET)
        step = scheduler.begin_step(plan, [("e1", 10, 0)], now_s - 0.03)
        scheduler.end_step(step, now_s, NO_ROWS, 0, 0, 9, 9, next_begins_s=next_begins_s)
        found.append(table.read().summary["next_begins_s"])
    assert found == [1.03, 2.05]


def test_a_full_disk_ends_the_batch_log_and_nothing_else(table, caplog):
    log = BatchLog(Path("/dev/full"))
    scheduler = make_scheduler(table, log)
    with caplog.at_level(logging.WARNING):
        for now_s in (0.0, 1.0, 2.0):
            plan = scheduler.plan(queue("e1"), now_s, BUDGET)
            finish(scheduler, scheduler.begin_step(plan, [("e1", 10, 0)], now_s), now_s + 0.5)
    assert table.read().summary["steps"] == 3
    (record,) = caplog.records
    assert "the batch log ends after 0 batches" in record.getMessage()


def test_requests_beyond_the_table_run_without_a_row(table, caplog):
    scheduler = make_scheduler(table)
    with caplog.at_level(logging.WARNING):
        for index in range(6):
            scheduler.track(f"e{index}", RequestArgs(f"r{index}", 0.0, SLO()), index, 10, 50)
    assert len(caplog.records) == 1
    assert len(table.read().rows) == 4
    views = [view(f"e{index}") for index in range(6)]
    plan = scheduler.plan(QueueView(views), 0.0, BUDGET)
    assert len(plan.entries) == 6
    step = scheduler.begin_step(plan, [(f"e{index}", 10, 0) for index in range(6)], 0.0)
    slots = [scheduler.requests[f"e{index}"].slot for index in range(6)]
    scheduler.end_step(step, 0.1, running(slots, 10, 1, 1, 0.1), 0, 6, 0, 10)
    assert np.all(table.read().rows["computed_tokens"] == 10)
    for index in range(6):
        scheduler.forget(f"e{index}")
        scheduler.forget(f"e{index}")
    assert len(table.read().rows) == 0
    scheduler.track("e9", RequestArgs("r9", 0.0, SLO()), 9, 10, 50)
    assert len(table.read().rows) == 1


CHAT = SLO(service_class="chat")


def test_outputs_are_expected_to_be_as_long_as_those_of_their_class_before(table):
    scheduler = make_scheduler(table)

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


def test_an_output_that_goes_on_is_expected_to_be_longer_up_to_its_limit(table):
    scheduler = make_scheduler(table)
    for index, tokens in enumerate((100, 100, 100)):
        scheduler.track(f"e{index}", RequestArgs(f"r{index}", 0.0, CHAT), index, 10, 1000)
        scheduler.forget(f"e{index}", tokens)
    scheduler.track("long", RequestArgs("long", 0.0, CHAT), 9, 10, 160)
    tracked = scheduler.requests["long"]
    asked = 0
    for emitted in range(1, 160):
        if emitted >= tracked.expected_tokens:
            scheduler.prolong(tracked, emitted)
            asked += 1
        assert emitted < tracked.expected_tokens <= 160
    assert tracked.expected_tokens == 160
    assert asked < 12


STAGED = SLO.of_stages(
    (Stage(2.0, 0.2), Stage(tpot_s=0.05, tokens=3), Stage(0.5, 0.1)), 9.0, service_class="chat"
)
"""Thinks, begins its answer quickly, and ends it at leisure."""


def staged(table, slo=STAGED):
    scheduler = make_scheduler(table)
    scheduler.track("e1", RequestArgs("r1", 10.0, slo, reasoning_ends=frozenset({7})), 1, 100, 50)
    return scheduler, scheduler.requests["e1"]


def test_the_objective_of_a_request_is_that_of_its_stage(table):
    scheduler, tracked = staged(table)
    assert (tracked.slo, tracked.begun) == (SLO(2.0, 0.2, 9.0, service_class="chat"), 0)
    row = table.read().rows[0]
    # The controller reserves for the tightest pace to come.
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


def test_the_end_of_a_stage_of_known_length_is_a_pace(table):
    _, tracked = staged(table, SLO.of_stages((Stage(e2e_s=3.0, tokens=11), Stage(e2e_s=4.0))))
    assert tracked.slo.times_s == (1.5, pytest.approx(0.15), 7.0)


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
