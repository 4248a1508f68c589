"""The prefill admission budget: by hand, from state rows, and what must raise or lower it."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.admission.pab import pab_tokens, replica_pab_tokens, rows_due_s
from sluice.scheduling.fleet.state import ROW, RUNNING, WAITING
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO, Anchor
from sluice.scheduling.request.queue import QueueView, RequestView
from tests.scheduling.views import decode, latencies, prefill, queues

MODEL = LinearLatency(a=0.010, b=0.001, c=0.000_01)


def rows_of(*requests: RequestView) -> np.ndarray:
    """State rows of ``requests``, as an engine writes them."""
    rows = np.zeros(len(requests), dtype=ROW)
    for row, request in zip(rows, requests, strict=True):
        slo = request.slo
        row["arrival_s"] = request.arrival_s
        row["first_token_s"] = nan if request.first_token_s is None else request.first_token_s
        row["ttft_s"] = slo.ttft_s or inf
        row["tpot_s"] = slo.tpot_s or inf
        row["e2e_s"] = slo.e2e_s or inf
        row["priority"] = slo.priority
        row["prompt_tokens"] = request.prompt_tokens
        row["computed_tokens"] = request.computed_tokens
        row["pending_tokens"] = request.pending_tokens
        row["emitted_tokens"] = request.emitted_tokens
        row["kv_blocks"] = request.kv_blocks
        row["phase"] = RUNNING if request.running else WAITING
    return rows


def arrays(*values: list[float]) -> list[np.ndarray]:
    return [np.array(value, dtype=np.float64) for value in values]


def test_the_budget_by_hand() -> None:
    # Horizon 1 s. Decode 1: slack 0.5 s at 0.1 s a token, 5 steps; decode 2: 0.9 s at 0.05 s, 2.
    # Overhead 10 ms * (5 + 1) = 60 ms; work 5 * (1 + 1) + 2 * (1 + 2) = 16 ms; left 924 ms,
    # at 1.01 ms a token; less the 300 tokens that are queued.
    slack, tpot, context = arrays([0.5, 0.9], [0.1, 0.05], [100, 200])
    budget = pab_tokens(slack, tpot, context, 300, MODEL, 1.0)
    assert budget == pytest.approx(0.924 / 0.00101 - 300)


def test_an_idle_replica_can_take_the_horizon_less_one_step() -> None:
    none = np.empty(0)
    assert pab_tokens(none, none, none, 0, MODEL, 1.0) == pytest.approx(0.99 / 0.00101)
    assert replica_pab_tokens(rows_of(), 5.0, MODEL, 1.0, 0.1) == pytest.approx(0.99 / 0.00101)


def test_a_correction_scales_the_model() -> None:
    none = np.empty(0)
    slow = pab_tokens(none, none, none, 0, MODEL.corrected(2.0), 1.0)
    assert slow == pytest.approx(0.98 / 0.00202)


def test_where_tokens_are_free_only_the_steps_count() -> None:
    free = LinearLatency(a=0.4, b=0.0)
    none = np.empty(0)
    assert pab_tokens(none, none, none, 50, free, 1.0) == inf
    slack, tpot, context = arrays([0.0], [0.5], [10])
    assert pab_tokens(slack, tpot, context, 50, free, 1.0) == -inf


def test_a_replica_by_hand() -> None:
    # At t = 10 s: the decode's 3rd token is due at 9 + 1 + 2 * 0.25 = 10.5 s by the envelope and
    # at 9.4 + 0.5 = 9.9 s, so now, since its first token.
    slo = SLO(ttft_s=1.0, tpot_s=0.25)
    rows = rows_of(
        decode("d", slo, emitted=2, context=99, arrival_s=9.0, first_token_s=9.4),
        prefill("waiting", 100, slo, arrival_s=9.9),
        prefill("begun", 50, slo, arrival_s=9.9, computed=20),
    )
    envelope = 1.0 - 0.010 * (2 + 1) - 2 * (0.001 + 0.00001 * 100)
    budget = replica_pab_tokens(rows, 10.0, MODEL, 1.0, 0.1, Anchor.ENVELOPE)
    assert budget == pytest.approx(envelope / 0.00101 - 130)
    first_token = 1.0 - 0.010 * (4 + 1) - 4 * (0.001 + 0.00001 * 100)
    assert replica_pab_tokens(rows, 10.0, MODEL, 1.0, 0.1) == pytest.approx(
        first_token / 0.00101 - 130
    )


def test_one_hopeless_decode_cannot_empty_the_budget_without_bound() -> None:
    hopeless = SLO(ttft_s=0.001, tpot_s=0.000_001)
    late = decode("d", hopeless, emitted=2, context=99, arrival_s=-1e6, first_token_s=-1e6)
    # It runs in every step of 10 + 1 + 1 ms and no more often: 1000 / 12 steps of the horizon.
    steps = 1.0 / 0.012
    left = 1.0 - 0.010 * (steps + 1) - steps * 0.002
    budget = replica_pab_tokens(rows_of(late), 10.0, MODEL, 1.0, 0.1)
    assert budget == pytest.approx(left / 0.00101)


def test_a_decode_without_a_tpot_runs_at_the_reference_pace() -> None:
    rows = rows_of(decode("d", SLO(), context=99))
    # Next in 0.2 s: 4 steps of 0.2 s.
    left = 1.0 - 0.010 * (4 + 1) - 4 * 0.002
    assert replica_pab_tokens(rows, 10.0, MODEL, 1.0, 0.2) == pytest.approx(left / 0.00101)


@given(
    latency=latencies,
    decodes=st.lists(
        st.tuples(st.floats(-1, 5), st.floats(0.01, 1), st.integers(1, 9_999)), max_size=8
    ),
    prefill_tokens=st.integers(0, 10_000),
    more=st.floats(0, 3),
)
def test_more_work_never_raises_the_budget_and_more_slack_never_lowers_it(
    latency: LinearLatency,
    decodes: list[tuple[float, float, int]],
    prefill_tokens: int,
    more: float,
) -> None:
    slack, tpot, context = np.array(decodes, dtype=float).reshape(-1, 3).T
    budget = pab_tokens(slack, tpot, context, prefill_tokens, latency, 1.0)
    tolerance = 1e-6 * max(1.0, abs(budget)) if np.isfinite(budget) else 0.0

    def other(
        slack: np.ndarray = slack, context: np.ndarray = context, tokens: float = prefill_tokens
    ) -> float:
        return pab_tokens(slack, tpot, context, tokens, latency, 1.0)

    assert other(slack=slack + more) >= budget - tolerance
    assert other(context=context + more) <= budget + tolerance
    assert other(tokens=prefill_tokens + more) <= budget + tolerance


@given(queue=queues(), anchor=st.sampled_from(Anchor))
def test_rows_and_views_agree(queue: QueueView, anchor: Anchor) -> None:
    requests = queue.requests
    rows = rows_of(*requests)
    prefill, due_s = rows_due_s(rows, anchor.code)
    assert prefill.tolist() == [request.is_prefill for request in requests]
    # Rows do not hold when the last token left.
    expected = [r._replace(last_token_s=None).next_deadline_s(anchor) for r in requests]
    # Objectives are single precision in a row.
    assert due_s.tolist() == pytest.approx(expected, rel=1e-6)
