"""The time that KV takes between replicas, learnt from sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.fleet.transfer import FIXED_S, TOKEN_S, Transfers, TransferTime
from tests.scheduling.fleets import fleet_of, report


def test_until_something_was_seen_it_is_what_is_documented() -> None:
    assert TransferTime().seconds(1_000) == FIXED_S + 1_000 * TOKEN_S


def test_it_learns_both_numbers_from_prompts_of_different_sizes() -> None:
    learns = TransferTime()
    for turn in range(200):
        count, tokens = 1 + turn % 4, 200 + turn % 7 * 1_500
        learns.see(count, count * (0.02 + 5e-5 * tokens), count * tokens)
    assert learns.fixed_s == pytest.approx(0.02, rel=0.1)
    assert learns.token_s == pytest.approx(5e-5, rel=0.1)


def test_it_follows_a_change() -> None:
    learns = TransferTime()
    for seconds in (0.01, 0.3):
        for turn in range(1_000):
            learns.see(1, seconds, 500 + turn % 2 * 1_000)
    assert learns.seconds(1_000) == pytest.approx(0.3, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(1, 10_000), st.floats(0, 1e4), st.integers(0, 10**9)), max_size=30
    )
)
def test_it_is_never_negative(seen: list[tuple[int, float, int]]) -> None:
    learns = TransferTime()
    for count, seconds, tokens in seen:
        learns.see(count, seconds, tokens)
        assert learns.fixed_s >= 0
        assert learns.token_s >= 0


def test_a_fleet_learns_from_what_comes_between_reports_and_from_one_that_starts_anew() -> None:
    told = report(role="decode", transfers=Transfers(10, 5.0, 10_000))
    fleet = fleet_of(told)
    first_s = fleet.transfer.seconds(1_000)
    assert FIXED_S < first_s < 0.5
    fleet.report("0", told, 0.1)
    assert fleet.transfer.seconds(1_000) == first_s
    fleet.report("0", told._replace(transfers=Transfers(2, 1.0, 2_000)), 0.2)
    again_s = fleet.transfer.seconds(1_000)
    assert again_s > first_s
    fleet.report("0", told._replace(transfers=Transfers(40, 20.0, 40_000)), 0.3)
    assert again_s < fleet.transfer.seconds(1_000) < 0.5
