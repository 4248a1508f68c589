"""The prefill admission budget: by hand, and against the sums of the appendix in plain loops."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import POLICIES, make_policy
from sluice.scheduling.admission.base import Constraint, Promises
from sluice.scheduling.assumptions import UNKNOWN_OUTPUT_TOKENS
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.report import Reservation
from sluice.scheduling.fleet.rows import spare_after_s
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.scheduling.request.deadline import FIRST, needs_prefill, next_due_s, paced
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.examples import examples
from tests.scheduling.fleets import MODEL, QUERY, fleet_of, job, report, row
from tests.scheduling.test_fleet import ROOFLINE, prompts, slos, tables

# Which constraint an admission policy names where it promises nothing.

WALKS = ("moore_hodgson", "slos_serve")
TIGHT = SLO(ttft_s=0.3)


def bound(policy: str, fleet: Fleet, query: RouteQuery) -> Constraint:
    """The constraint at the only replica of ``fleet``."""
    made = make_policy(policy).promises(job(fleet, query), fleet)
    return Constraint(made.binds[0])


@pytest.mark.parametrize("policy", WALKS)
def test_each_constraint_is_named(policy: str) -> None:
    ask = RouteQuery(99, SLO(ttft_s=5.0, tpot_s=0.1), 1_000)
    assert bound(policy, fleet_of(report()), ask) is Constraint.NONE
    # A step takes 10 ms and a prompt of 1,000 tokens 100 ms, also where nothing else is.
    for slo, expected in (
        (SLO(ttft_s=0.05), Constraint.TTFT),
        (SLO(ttft_s=5.0, tpot_s=0.005), Constraint.TPOT),
    ):
        assert bound(policy, fleet_of(report()), RouteQuery(99, slo, 1_000)) is expected
    busy = fleet_of(report(row(SLO(ttft_s=0.2), 1_900)))
    assert bound(policy, busy, RouteQuery(99, SLO(ttft_s=0.25), 1_000)) is Constraint.TTFT
    # One that is due first would make those late that have their guarantee.
    full = fleet_of(report(row(SLO(ttft_s=1.0), 9_000)))
    assert bound(policy, full, RouteQuery(99, TIGHT, 2_000)) is Constraint.GUARANTEES
    decodes = [
        row(SLO(ttft_s=1.0, tpot_s=0.02), 4_000, key=key, emitted=2, first_token_s=0.0)
        for key in range(1, 3)
    ]
    paced = fleet_of(report(*decodes))
    assert bound(policy, paced, RouteQuery(99, SLO(tpot_s=0.02), 4_000)) is Constraint.TPOT
    assert bound(policy, fleet_of(report(free_blocks=3)), ask) is Constraint.KV_MEMORY
    assert bound(policy, fleet_of(report(places=0)), ask) is Constraint.SEQUENCES


def test_the_prefill_budget_names_itself() -> None:
    fleet = fleet_of(report(row(SLO(ttft_s=1.0), 50_000)))
    query = RouteQuery(99, SLO(ttft_s=1.0), 1_000)
    assert bound("pab", fleet, query) is Constraint.PREFILL_BUDGET


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(60))
@given(
    queue=st.lists(st.tuples(st.integers(1, 9_000), st.booleans()), max_size=6),
    prompt=st.integers(1, 20_000),
    ttft_s=st.sampled_from([0.05, 0.3, 2.0, None]),
    tpot_s=st.sampled_from([0.005, 0.02, 0.2, None]),
    free_blocks=st.sampled_from([0, 100, 10_000]),
    places=st.sampled_from([0, 2, 256]),
    reserve=st.sampled_from([0.0, 500.0]),
    overtaking_s=st.sampled_from([0.0, 0.2, 5.0]),
)
def test_a_constraint_is_named_where_nothing_is_promised_and_nowhere_else(
    policy: str,
    queue: list[tuple[int, bool]],
    prompt: int,
    ttft_s: float | None,
    tpot_s: float | None,
    free_blocks: int,
    places: int,
    reserve: float,
    overtaking_s: float,
) -> None:
    rows = [
        row(SLO(1.0, 0.1), size, key=key + 1, emitted=decodes, first_token_s=0.0)
        for key, (size, decodes) in enumerate(queue)
    ]
    fleet = fleet_of(report(*rows, free_blocks=free_blocks, places=places), report())
    query = RouteQuery(99, SLO(ttft_s, tpot_s), prompt)
    asked = job(fleet, query)._replace(reserve_tokens=reserve, overtaking_s=overtaking_s)
    made = make_policy(policy).promises(asked, fleet)
    assert np.array_equal(made.binds == Constraint.NONE, made.holds)


SLOW = LinearLatency(a=0.010, b=0.001, c=0.000_01)
TOKEN_S = 0.00101
EIGHTH = SLO(ttft_s=0.25, tpot_s=0.125)


def promised(fleet: Fleet, prompt: int, ttft_s: float | None, reserve: float = 0.0) -> Promises:
    query = QUERY._replace(slo=SLO(ttft_s=ttft_s), prompt_tokens=prompt)
    asked = job(fleet, query)._replace(reserve_tokens=reserve)
    return make_policy("pab").promises(asked, fleet)


def fits(fleet: Fleet, prompt: int, ttft_s: float | None, reserve: float = 0.0) -> bool:
    return bool(promised(fleet, prompt, ttft_s, reserve).holds[0])


def budget_s(fleet: Fleet, within_s: float, now_s: float = 0.0) -> float:
    own, nothing = np.zeros(1, np.int64), np.zeros(1)
    found = spare_after_s(fleet.arrays, own, now_s, now_s + within_s, nothing, nothing)
    return float(found[0])


def appendix() -> Fleet:
    """One TPOT, P = 125 ms, for all. Decodes with a slack of 0.5 s and a context of 100, and 0.75 s
    and 200; a prompt of 299 tokens that is due in 0.25 s, so its second token in 0.375 s."""
    return fleet_of(
        report(
            row(EIGHTH, 96, emitted=4, arrival_s=-0.25, first_token_s=0.0),
            row(EIGHTH, 194, emitted=6, arrival_s=-0.25, first_token_s=0.0),
            row(EIGHTH, 299),
            latency=SLOW,
        )
    )


def test_the_appendix_by_number() -> None:
    # A.1: 1 s. A.2: the most urgent decode is that of the pending prompt, (1 - 0.375) / 0.125 = 5
    # steps and one more of 10 ms. A.3: 4 steps of 1 + 1 ms, 2 of 1 + 2 ms, 5 of 1 + 3 ms.
    left_s = 1.0 - 0.010 * (5 + 1) - (4 * 0.002 + 2 * 0.003 + 5 * 0.004)
    assert left_s == pytest.approx(0.906)
    # A.5 and A.6: at 1.01 ms a token, less the 299 tokens of the pending prompt, 598.03 tokens.
    tokens = left_s / TOKEN_S - 299
    assert budget_s(appendix(), 1.0) / TOKEN_S == pytest.approx(tokens)
    assert fits(appendix(), 598, 1.0)
    assert not fits(appendix(), 599, 1.0)


def test_the_horizon_is_the_ttft_of_the_request() -> None:
    # Within 0.5 s only the pending prompt has to decode, once: 500 - 20 - 4 ms.
    assert budget_s(appendix(), 0.5) == pytest.approx(0.476 - 299 * TOKEN_S)
    assert fits(appendix(), 172, 0.5)
    assert not fits(appendix(), 173, 0.5)
    # What is queued takes longer than the shortest of three TTFTs.
    assert budget_s(appendix(), 0.25) == pytest.approx(-0.06199)


def test_a_refusal_tells_the_constraint_and_the_wait() -> None:
    refused = promised(appendix(), 172 + 100, 0.5)
    assert refused.binds.tolist() == [Constraint.PREFILL_BUDGET]
    assert refused.wait_s[0] == pytest.approx((272 + 299) * TOKEN_S - 0.476)
    # An idle replica prefills 485 tokens within 0.5 s, never 486.
    assert promised(appendix(), 485, 0.5).wait_s[0] < inf
    assert promised(appendix(), 486, 0.5).wait_s[0] == inf


def test_an_idle_replica_can_take_the_horizon_less_one_step() -> None:
    idle = fleet_of(report(latency=SLOW))
    assert budget_s(idle, 1.0) == pytest.approx(0.99)
    assert budget_s(idle, 1.0, now_s=7.0) == pytest.approx(0.99), "idle time is not saved up"
    assert budget_s(fleet_of(report(latency=SLOW.corrected(2.0))), 1.0) == pytest.approx(0.98)
    assert fits(idle, 980, 1.0) and not fits(idle, 981, 1.0)


def test_a_request_without_a_ttft_always_fits() -> None:
    assert fits(appendix(), 100_000, None)


def test_a_reserve_is_kept_where_something_is_guaranteed() -> None:
    assert not fits(appendix(), 598, 1.0, reserve=100.0)
    assert fits(appendix(), 498, 1.0, reserve=100.0)
    assert fits(fleet_of(report(latency=SLOW)), 980, 1.0, reserve=100.0)


def test_one_hopeless_decode_cannot_empty_the_budget_without_bound() -> None:
    hopeless = SLO(ttft_s=0.001, tpot_s=0.000_001)
    late = row(hopeless, 98, emitted=2, arrival_s=-1e6, first_token_s=-1e6)
    # It runs in every step of 10 + 1 + 1 ms and no more often: 1000 / 12 steps of the horizon.
    left_s = 1.0 - 0.010 - 1.0 / 0.012 * (0.010 + 0.002)
    assert budget_s(fleet_of(report(late, latency=SLOW)), 1.0) == pytest.approx(left_s)


def test_a_decode_without_a_tpot_takes_nothing() -> None:
    decode = row(SLO(), 99, emitted=1, arrival_s=-1.0, first_token_s=-0.5)
    assert budget_s(fleet_of(report(decode, latency=SLOW)), 1.0) == pytest.approx(0.99)


def naive_budget_s(rows: list[np.ndarray], latency: LatencyModel, horizon_s: float) -> float:
    """The appendix in plain loops, at time 0; with several paces, steps come as often as the
    tightest of the decodes that are due asks for. ``O(n^2)``."""
    queued_s, decodes = 0.0, []
    for each in rows:
        if each["best_effort"]:
            continue
        length = max(UNKNOWN_OUTPUT_TOKENS, each["emitted_tokens"] + 1)
        stated = [float(each[name]) for name in ("ttft_s", "tpot_s", "e2e_s")]
        arrival_s, first_s = float(each["arrival_s"]), float(each["first_token_s"])
        ttft_s, tpot_s = paced(*stated, length)
        emitted, computed = int(each["emitted_tokens"]), int(each["computed_tokens"])
        due_s = next_due_s(emitted, arrival_s, ttft_s, tpot_s, stated[2], first_s, nan, FIRST)
        if needs_prefill(emitted, int(each["pending_tokens"])):
            queued_s += latency.work_s(int(each["pending_tokens"]), computed)
            computed += int(each["pending_tokens"])
            due_s += tpot_s
        own_s = latency.work_s(1, computed)
        if tpot_s < inf:
            decodes.append((max(0.0, due_s), max(tpot_s, latency.fixed_s + own_s), own_s))
    decode_s = sum(max(0.0, horizon_s - due_s) / pace_s * own_s for due_s, pace_s, own_s in decodes)
    times = sorted({0.0, horizon_s, *(due_s for due_s, _, _ in decodes if due_s < horizon_s)})
    steps = 1.0
    for begin_s, end_s in pairwise(times):
        paces = [pace_s for due_s, pace_s, _ in decodes if due_s <= begin_s]
        steps += (end_s - begin_s) / min(paces, default=inf)
    return horizon_s - latency.fixed_s * steps - decode_s - queued_s


@given(
    rows=tables,
    latency=st.sampled_from([MODEL, ROOFLINE]),
    horizon_s=st.sampled_from([0.125, 0.5, 1.0, 3.0, 20.0]),
)
def test_the_budget_is_that_of_the_guaranteed_rows(
    rows: list[np.ndarray], latency: LatencyModel, horizon_s: float
) -> None:
    fleet = fleet_of(report(*rows, latency=latency))
    expected = naive_budget_s(rows, latency, horizon_s)
    assert budget_s(fleet, horizon_s) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(rows=tables, asked=st.lists(st.tuples(slos, prompts), max_size=12))
def test_admission_never_exceeds_the_capacity(
    rows: list[np.ndarray], asked: list[tuple[SLO, int]]
) -> None:
    fleet = fleet_of(report(*rows, latency=MODEL))
    for key, (slo, prompt) in enumerate(asked):
        ttft_s, tpot_s = paced(*slo.columns[:3], UNKNOWN_OUTPUT_TOKENS)
        query = QUERY._replace(key=key, slo=slo, prompt_tokens=prompt)
        found = job(fleet, query)._replace(due_s=ttft_s)
        holds = bool(make_policy("pab").promises(found, fleet).holds[0])
        if ttft_s < inf:
            left_s = naive_budget_s(rows, MODEL, ttft_s) - MODEL.work_s(prompt, 0)
            assert abs(left_s) < 1e-9 or holds == (left_s > 0)
        if holds:
            fleet.reserve(
                key,
                Reservation(
                    "0", 0.0, True, prompt, 0, prompt, ttft_s, tpot_s, slo.priority,
                    UNKNOWN_OUTPUT_TOKENS,
                ),
            )  # fmt: skip
            rows = [*rows, row(slo, prompt)]
