"""SLOs-Serve appendix A against figures worked by hand, and against a search of all splits."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.autoscaling.role_shares import PoolDemand, demand_of_tokens, demand_of_work

# 10,000 tokens a second, and steps of 50 ms of which 10 ms are fixed: 400 tokens in each, so that a
# decode device makes 8,000 of them a second.
CHAT = demand_of_tokens(800, 200, 10_000, tpot_s=0.05, overhead_s=0.01)
CODER = demand_of_tokens(800, 25, 10_000, tpot_s=0.05, overhead_s=0.01)
REASONING = demand_of_tokens(100, 4_000, 10_000, tpot_s=0.05, overhead_s=0.01)


def test_the_ratio_is_that_of_the_paper() -> None:
    # (1 - 0.01 / 0.05) * E[prompt] / E[output].
    assert pytest.approx((0.08, 0.025)) == CHAT
    assert CHAT.ratio == pytest.approx(0.8 * 800 / 200) == pytest.approx(3.2)
    assert CODER.ratio == pytest.approx(0.8 * 800 / 25) == pytest.approx(25.6)
    assert REASONING.ratio == pytest.approx(0.8 * 100 / 4_000) == pytest.approx(0.02)


def test_the_goodput_is_that_of_the_paper() -> None:
    # 10,000 / (200 / 0.8 + 800) = 10,000 / 1,050.
    assert CHAT.best_goodput == pytest.approx(9.5238, abs=1e-4)
    # Two of three prefill 25 requests a second, and one could decode 40.
    assert CHAT.goodput(2, 1) == pytest.approx(25 / 3)
    # One of three prefills 12.5.
    assert CHAT.goodput(1, 2) == pytest.approx(12.5 / 3)


def test_one_ratio_is_right_for_one_mix_only() -> None:
    assert CHAT.split(8) == (6, 2)
    assert CODER.split(8) == (7, 1)
    assert REASONING.split(8) == (1, 7)
    # Each loses most of its rate on the devices that are right for the other.
    assert CODER.goodput(1, 7) < 0.15 * CODER.goodput(7, 1)
    assert REASONING.goodput(7, 1) < 0.15 * REASONING.goodput(1, 7)


def test_a_tighter_pace_moves_devices_to_decode() -> None:
    ratios = [demand_of_tokens(800, 200, 10_000, tpot, 0.01).ratio for tpot in (0.011, 0.05, inf)]
    assert ratios == pytest.approx([4 / 11, 3.2, 4.0])


def test_devices_for_a_rate_are_whole() -> None:
    assert CHAT.least(0.001) == (1, 1)
    assert CHAT.least(50) == (4, 2)
    assert CHAT.least(51) == (5, 2)


def test_where_few_decodes_find_room_each_token_has_more_of_the_overhead() -> None:
    # Steps of 10 ms and 0.1 ms a token: 400 tokens in 50 ms, or 100 in 20 ms.
    ample = demand_of_work(0.08, 200, 1e-4, tpot_s=0.05, overhead_s=0.01)
    assert ample == pytest.approx(CHAT)
    assert demand_of_work(0.08, 200, 1e-4, 0.05, 0.01, most_decodes=1_000) == ample
    short = demand_of_work(0.08, 200, 1e-4, 0.05, 0.01, most_decodes=100)
    assert short == pytest.approx((0.08, 200 * 0.02 / 100))


@given(
    demand=st.builds(PoolDemand, prefill=st.floats(0.001, 10), decode=st.floats(0.001, 10)),
    devices=st.integers(2, 40),
    rate=st.floats(0.01, 50),
)
def test_splits_serve_what_they_say(demand: PoolDemand, devices: int, rate: float) -> None:
    prefillers, decoders = demand.split(devices)
    assert prefillers >= 1
    assert decoders >= 1
    assert prefillers + decoders == devices
    assert demand.goodput(prefillers, decoders) <= demand.best_goodput * (1 + 1e-9)
    least = demand.least(rate)
    assert demand.goodput(*least) * sum(least) >= rate * (1 - 1e-9)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("prefill_s must be positive and finite, got 0", (0.0, 1.0, 1.0, 0.05, 0.01)),
        ("output_tokens must be positive and finite, got inf", (1.0, inf, 1.0, 0.05, 0.01)),
        ("token_s must be positive and finite, got 0", (1.0, 1.0, 0.0, 0.05, 0.01)),
        ("overhead_s must be finite and >= 0, got -0.1", (1.0, 1.0, 1.0, 0.05, -0.1)),
        ("most_decodes must be positive, got 0", (1.0, 1.0, 1.0, 0.05, 0.01, 0)),
        ("a time per token of 0.01 s cannot be kept", (1.0, 1.0, 1.0, 0.01, 0.01)),
    ],
)
def test_what_cannot_be_is_refused(words: str, arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=words):
        demand_of_work(*arguments)


def test_a_device_has_a_throughput() -> None:
    with pytest.raises(ValueError, match="tokens_per_s must be positive and finite, got 0"):
        demand_of_tokens(1, 1, 0, 0.05, 0.01)
