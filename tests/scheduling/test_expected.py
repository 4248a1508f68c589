"""What an expected output makes of a request."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.request.deadline import paced
from sluice.scheduling.request.expected import claim

times = st.one_of(st.just(inf), st.floats(0.01, 60))


@given(ttft_s=times, tpot_s=times, e2e_s=times, tokens=st.integers(1, 2_000))
def test_the_pace_holds_all_three_times(
    ttft_s: float, tpot_s: float, e2e_s: float, tokens: int
) -> None:
    first_s, pace_s = paced(ttft_s, tpot_s, e2e_s, float(tokens))
    assert first_s <= ttft_s
    assert pace_s <= tpot_s * (1 + 1e-9)
    if e2e_s == inf:
        assert (first_s, pace_s) == (ttft_s, tpot_s)
    elif tokens > 1:
        assert first_s + (tokens - 1) * pace_s <= e2e_s * (1 + 1e-9)
        assert first_s >= min(ttft_s, e2e_s / 2)
    else:
        assert first_s <= e2e_s


def test_half_of_the_time_is_for_the_first_token_and_more_where_the_others_need_less() -> None:
    assert paced(inf, inf, 10.0, 101.0) == pytest.approx((5.0, 0.05))
    assert paced(1.0, inf, 11.0, 101.0) == pytest.approx((1.0, 0.1))
    assert paced(inf, 0.02, 10.0, 101.0) == pytest.approx((8.0, 0.02))
    assert paced(1.0, 0.02, 10.0, 101.0) == (1.0, 0.02)


def test_a_claim_is_for_the_whole_output_and_for_as_much_again_where_that_has_left() -> None:
    assert claim(100, 60, 0, 0, 16, 1_000) == 10
    assert claim(100, 60, 59, 9, 16, 1_000) == 1
    assert claim(100, 60, 60, 10, 16, 1_000) == 4
    assert claim(100, 6_000, 0, 3, 16, 50) == 47
