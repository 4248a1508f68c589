"""What an expected output makes of a request."""

import random
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.request.deadline import paced
from sluice.scheduling.request.expected import CLAIM, claim, peak

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


BLOCK = 16
served = st.tuples(
    st.integers(1, 200), st.integers(1, 120), st.floats(0, 1), st.sampled_from([0.05, 0.1, 0.2])
)


@given(requests=st.lists(served, min_size=1, max_size=8), chance=st.randoms())
def test_requests_that_keep_their_paces_never_need_more_than_the_peak(
    requests: list[tuple[int, int, float, float]], chance: random.Random
) -> None:
    """Those of the tightest TPOT run in every batch, each other one as often as chance has it."""
    tightest_s = min(tpot_s for *_, tpot_s in requests)
    lengths, ends, skips = [], [], []
    claims = np.empty(len(requests), CLAIM)
    for place, (prompt, tokens, share, tpot_s) in enumerate(requests):
        emitted = min(int(share * tokens), tokens - 1)
        held = ceil((prompt + emitted) / BLOCK)
        blocks = claim(prompt, tokens, emitted, held, BLOCK, 1_000)
        claims[place] = (blocks, held, tokens - emitted, tpot_s)
        lengths.append(prompt + emitted)
        ends.append(prompt + tokens)
        skips.append(round((tokens - emitted) * (tpot_s / tightest_s - 1)))
    found = peak(claims, BLOCK)
    assert found <= claims["blocks"].sum()
    while any(map(int.__lt__, lengths, ends)):
        # What ends in a batch holds its blocks until then.
        there = [place for place, end in enumerate(ends) if lengths[place] < end]
        for place, end in enumerate(ends):
            if skips[place] and chance.random() < 0.5:
                skips[place] -= 1
            elif lengths[place] < end:
                lengths[place] += 1
        needed = sum(ceil(lengths[place] / BLOCK) for place in there)
        assert needed - claims["held"].sum() <= found


def test_without_a_pace_all_claims_count() -> None:
    claims = np.array([(10, 5, 160, inf), (3, 1, 48, 0.05)], CLAIM)
    assert peak(claims, BLOCK) == 13
    assert peak(claims[1:], BLOCK) == 3
    assert peak(claims[:0], BLOCK) == 0
