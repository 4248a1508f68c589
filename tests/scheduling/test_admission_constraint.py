"""Which constraint an admission policy names where it promises nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import POLICIES, make_policy
from sluice.scheduling.admission.base import Constraint
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.examples import examples
from tests.scheduling.fleets import fleet_of, job, report, row

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
    worthier_s=st.sampled_from([0.0, 0.2, 5.0]),
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
    worthier_s: float,
) -> None:
    rows = [
        row(SLO(1.0, 0.1), size, key=key + 1, emitted=decodes, first_token_s=0.0)
        for key, (size, decodes) in enumerate(queue)
    ]
    fleet = fleet_of(report(*rows, free_blocks=free_blocks, places=places), report())
    query = RouteQuery(99, SLO(ttft_s, tpot_s), prompt)
    asked = job(fleet, query)._replace(reserve_tokens=reserve, worthier_s=worthier_s)
    made = make_policy(policy).promises(asked, fleet)
    assert np.array_equal(made.binds == Constraint.NONE, made.holds)
