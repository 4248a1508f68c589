"""S-EDF by example: 10 ms a step, 0.1 ms a token, chunks of 1,000 tokens."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.batching import BatchBudget, make_policy
from sluice.scheduling.batching.s_edf import chunked_work_s
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.kernels import COMPUTED, PENDING
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from tests.scheduling.steps import run
from tests.scheduling.views import NOW_S, ROOMY, decode, order, planned, prefill, queue_of
from tests.scheduling.views import prefill_due_in as due_in

MODEL = LinearLatency(a=0.010, b=0.0001)


plan = partial(planned, "s_edf", latency=MODEL, chunk_tokens=1_000)


def ranking(*requests: RequestView) -> list[str]:
    """The order in which tasks of one request each are decided on."""
    left, ranked = list(requests), []
    while left:
        ranked.append(order(plan(*left, batch_tokens=0))[0])
        left = [request for request in left if request.request_id != ranked[-1]]
    return ranked


QUEUE = (
    prefill("free", 100),
    due_in("past", -100, 100),
    due_in("long-past", -900, 100),
    due_in("later", 900, 100),
    # 2 chunks: 2 * (10 + 100) ms, against 200 ms.
    due_in("hopeless", 200, 2_000),
    due_in("sooner", 300, 100),
)


def test_feasible_by_deadline_then_without_deadline_then_hopeless_the_latest_first() -> None:
    assert ranking(*QUEUE) == ["sooner", "later", "free", "hopeless", "past", "long-past"]


def test_others_join_the_head_while_its_time_and_the_token_budget_allow() -> None:
    # The head has 100 ms. With `a`: 10 + 40 + 30 = 80 ms. `b` would make it 101, `c` 95: in.
    queue = (
        due_in("head", 100, 400),
        due_in("a", 200, 300),
        due_in("b", 300, 210),
        due_in("c", 400, 150),
    )
    assert plan(*queue).entries == (("head", 400), ("a", 300), ("c", 150))
    # The sum of tokens must stay below the budget: 700 is not below 700, so `a` is passed over.
    assert plan(*queue, batch_tokens=700).entries == (("head", 400), ("b", 210))
    assert plan(*queue, batch_tokens=701).entries == (("head", 400), ("a", 300))


def test_a_batch_that_takes_more_chunks_costs_their_fixed_time() -> None:
    # 600 + 600 tokens take two chunks: 20 + 120 ms, which is not less than 140 but less than 141.
    assert plan(due_in("h", 139.9, 600), due_in("a", 900, 600)).entries == (("h", 600),)
    result = plan(due_in("h", 141, 600), due_in("a", 900, 600))
    assert result.entries == (("h", 600), ("a", 400))


def test_a_chunk_is_not_padded_and_a_late_head_runs_alone() -> None:
    assert plan(due_in("h", 30, 100), due_in("long", 900, 5_000)).entries == (("h", 100),)
    late = (due_in("h", -10, 100), due_in("later", -20, 100))
    assert plan(*late).entries == (("h", 100),)


def test_decodes_run_beside_the_task() -> None:
    queue = (decode("d1"), due_in("h", 900, 2_500), decode("d2", SLO(tpot_s=0.001)))
    assert plan(*queue).entries == (("d1", 1), ("d2", 1), ("h", 1_000))


def test_two_requests_with_different_priorities() -> None:
    """FlowPrefill Fig. 8, with chunks in place of operators. The drawing is lost; by the text A
    (low priority) is submitted, B (high) arrives and preempts it, B completes, A is resumed and
    completes. Lengths and times are ours."""
    low = prefill("A", 4_000, SLO(ttft_s=5.0), arrival_s=0.0)
    high = prefill("B", 1_000, SLO(ttft_s=0.5), arrival_s=0.050)
    policy = make_policy("s_edf", {"chunk_tokens": 1_000, "batch_tokens": 4_096})
    result = run(policy, [(low, 1), (high, 1)], MODEL)
    assert [entries for _, entries in result.batches] == [
        (("A", 1_000),),
        (("B", 1_000),),
        (("A", 1_000),),
        (("A", 1_000),),
        (("A", 1_000),),
    ]
    assert result.tokens_s["B"] == [pytest.approx(0.220)]
    assert result.tokens_s["A"] == [pytest.approx(0.550)]


def test_a_decision_stands_until_the_next_event() -> None:
    # At first `a` is feasible (330 ms of 400) and `b` due later.
    a, b = due_in("a", 400, 3_000), due_in("b", 2_000, 1_000)
    policy = make_policy("s_edf", {"chunk_tokens": 1_000})
    assert policy.plan(queue_of(a, b), NOW_S, MODEL, ROOMY).entries == (("a", 1_000),)
    # The machine stood still, `a` cannot be met any more; but nothing arrived or completed.
    stalled_s = NOW_S + 0.300
    a = a._replace(computed_tokens=1_000, pending_tokens=2_000, running=True)
    assert policy.plan(queue_of(a, b), stalled_s, MODEL, ROOMY).entries == (("a", 1_000),)
    # An arrival is an event, and so is a completion (or an abortion).
    c = due_in("c", 3_000, 1_000)
    assert policy.plan(queue_of(a, b, c), stalled_s, MODEL, ROOMY).entries == (("b", 1_000),)
    assert policy.plan(queue_of(a, c), stalled_s, MODEL, ROOMY).entries == (("c", 1_000),)


def test_a_head_that_goes_on_keeps_its_batch_without_those_that_completed() -> None:
    head, a = due_in("head", 900, 1_500), due_in("a", 950, 400)
    policy = make_policy("s_edf", {"chunk_tokens": 1_000})
    assert policy.plan(queue_of(head, a), NOW_S, MODEL, ROOMY).entries == (("head", 1_000),)
    head = head._replace(computed_tokens=1_000, pending_tokens=500, running=True)
    later = due_in("later", 990, 50)
    result = policy.plan(queue_of(head, a, later), NOW_S, MODEL, ROOMY)
    assert result.entries == (("head", 500), ("a", 400)), "`later` was not there at the decision"
    result = policy.plan(queue_of(head, later), NOW_S, MODEL, ROOMY)
    assert result.entries == (("head", 500),), "`a` was aborted"


def test_a_head_without_room_does_not_stop_the_engine() -> None:
    budget = BatchBudget(tokens=1_000, sequences=8, kv_blocks=10, block_tokens=16)
    policy = make_policy("s_edf")
    queue = queue_of(due_in("huge", 900, 2_000), due_in("small", 1_900, 100))
    assert policy.plan(queue, NOW_S, MODEL, budget).entries == (("small", 100),)
    assert policy.plan(queue, NOW_S, MODEL, budget).entries == (("small", 100),)


@given(computed=st.integers(0, 5_000), pending=st.integers(1, 5_000), chunk=st.integers(16, 3_000))
def test_the_time_in_chunks_is_the_sum_of_the_chunks(
    computed: int, pending: int, chunk: int
) -> None:
    model = LinearLatency(a=0.01, b=1e-4, c=1e-6, d=1e-8)
    by_chunk, done = 0.0, 0
    while done < pending:
        tokens = min(chunk, pending - done)
        by_chunk += model.work_s(tokens, computed + done)
        done += tokens
    view = prefill("p", computed + pending, computed=computed)
    result = chunked_work_s(queue_of(view).table, model.pieces, chunk)
    assert result.shape == (1, 1)
    assert result[0, 0] == pytest.approx(by_chunk)


def test_when_one_of_a_task_is_aborted_no_other_request_takes_its_place() -> None:
    views = (
        due_in("head", 5_000, 1_500),
        due_in("joined", 6_000, 100),
        due_in("big", 7_000, 5_000),
    )
    table = queue_of(*views).table
    policy = make_policy("s_edf", {"chunk_tokens": 1_000})

    def chunk(*rows: int) -> list[tuple[str, int]]:
        keys = np.array(rows) + 1
        queue = QueueView.of_table(keys, table[list(rows)], [SLO(), *(v.slo for v in views)])
        return list(policy.plan(queue, NOW_S, MODEL, ROOMY).entries)

    assert chunk(0, 1, 2) == [("1", 1_000)]
    table[0, COMPUTED], table[0, PENDING] = 1_000, 500
    assert chunk(0, 2) == [("1", 500)]
