"""Speculative decoding around an engine: its configuration, how much is drafted, what that takes,
and what becomes of it."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.config import EngineConfig
from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.scheduler.speculation import (
    BY_BATCH_SIZE,
    FREE_METHODS,
    MAX_DRAFTED,
    DraftLength,
    DraftTime,
    with_all_lengths,
)
from sluice.replica.scheduler.state_table import NO_ROWS, StateTable
from sluice.scheduling.batching import BatchBudget, make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "given", [NGRAM, json.dumps(NGRAM), {"method": "ngram", "num-speculative-tokens": 3}]
)
def test_vllm_is_told_every_length(given):
    config = with_all_lengths(given)
    assert config == NGRAM | {BY_BATCH_SIZE: [[1, 1, 0], [2, 2, 1], [3, 3, 2], [4, 4, 3]]}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("ngram", "no JSON"),
        ("[1]", "must be a mapping"),
        (7, "must be a mapping"),
        ({"method": "ngram"}, "needs num_speculative_tokens.*got None"),
        (NGRAM | {"num_speculative_tokens": 0}, f"1 to {MAX_DRAFTED}, got 0"),
        (NGRAM | {"num_speculative_tokens": MAX_DRAFTED + 1}, "got 33"),
        (NGRAM | {"num_speculative_tokens": True}, "got True"),
        (NGRAM | {BY_BATCH_SIZE: [[1, 8, 2]]}, "the plan chooses the lengths"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(given, reason):
    with pytest.raises(ValueError, match=reason):
        with_all_lengths(given)


def test_only_n_grams_are_drafted_beside_suspended_prefills():
    model = {"model": "small", "num_speculative_tokens": 3}
    eagle = {**model, "method": "eagle3"}
    for config in (eagle, json.dumps(eagle), model):
        for name in ("speculative-config", "speculative_config"):
            with pytest.raises(ValueError, match=r"drafts by (eagle3|a draft model), or"):
                EngineConfig(vllm_args={name: config}, preemption=True)
    for none in ({}, {"speculative-config": None}):
        assert EngineConfig(vllm_args=none, preemption=True).draft_method is None
    found = EngineConfig(vllm_args={"speculative_config": NGRAM}, preemption=True)
    assert found.draft_method == "ngram"


steps = st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=60)


@given(st.sampled_from([*FREE_METHODS, "draft_model", "eagle3"]), st.integers(1, 10), steps)
def test_as_much_is_drafted_as_the_next_plan_may_take(method, most, plans):
    """``plans``: whether a step has decodes, and which share of what was drafted it checks."""
    drafts = DraftLength(method, most)
    for decodes, share in plans:
        drafted = drafts.length
        taken = round(share * drafted) if decodes else 0
        drafts.planned(decodes, decodes and drafted > 0, taken)
        assert drafts[1] == drafts[1000] == drafts.length
        if method in FREE_METHODS or not decodes:
            assert drafts.length == drafted
        elif drafted:
            assert drafts.length == (min(most, taken + 1) if taken else 0)
        else:
            assert drafts.length in (0, most)


def test_a_model_that_nobody_listens_to_is_asked_every_eighth_step():
    drafts = DraftLength("draft_model", 4)
    lengths = []
    for _ in range(30):
        drafts.planned(True, drafts.length > 0, 0)
        lengths.append(drafts.length)
    assert lengths == ([0] * 8 + [4]) * 3 + [0] * 3
    # Steps without decodes say nothing.
    drafts.planned(False, False, 0)
    assert drafts.length == 0


@pytest.mark.parametrize("factor", [0.7, 1.0, 2.0])
def test_what_drafting_takes_is_told_from_what_the_rest_takes(factor):
    chance = random.Random(1)
    time = DraftTime()
    for number in range(400):
        predicted_s = chance.uniform(0.005, 0.05)
        drafted = chance.choice((0, 0, 1, 3, 4))
        seconds = (factor * predicted_s + 0.002 * drafted) * chance.uniform(0.95, 1.05)
        # Now and then the machine holds a step up.
        time.observe(predicted_s, drafted, 30.0 if number % 150 == 149 else seconds)
    for _ in range(200):
        predicted_s = chance.uniform(0.005, 0.05)
        drafted = chance.choice((0, 1, 4))
        time.observe(predicted_s, drafted, factor * predicted_s + 0.002 * drafted)
    assert time.seconds == pytest.approx(0.002, rel=0.1)


def test_steps_that_are_all_alike_say_nothing_of_drafting():
    time = DraftTime()
    for _ in range(100):
        time.observe(0.01, 3, 0.013)
    assert time.seconds == 0


def test_drafting_is_charged_to_no_other_work():
    """An engine whose steps are as predicted, and which drafts in every second one."""
    table = StateTable.create(4)
    scheduler = LocalScheduler(make_policy("fcfs"), table, LinearLatency(a=0.010, b=0.001))
    budget = BatchBudget(tokens=100, sequences=8, kv_blocks=1000, block_tokens=16)
    queue = QueueView([RequestView("e1", SLO(), 0.0, 10, 0, 10)])
    now_s = 0.0
    for number in range(400):
        drafted = 4 * (number % 2)
        plan = scheduler.plan(queue, now_s, budget)
        step = scheduler.begin_step(plan, [("e1", 10, 0)], now_s, (), {}, drafted)
        now_s += 0.020 + 0.002 * drafted
        scheduler.end_step(step, now_s, NO_ROWS, 0, 0, 1000, 1000)
    summary = table.read().summary
    assert scheduler.draft_s == summary["draft_s"] == pytest.approx(0.002, rel=0.05)
    assert summary["correction"] == pytest.approx(1.0, rel=0.02)
    assert summary["predicted_step_s"] == pytest.approx(0.028, rel=0.02)
    assert {sample.spec_steps for sample in table.samples()} == {0, 4}
