"""Speculation lengths against a search of all of them, and acceptance rates against chance."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.latency import LatencyModel, LinearLatency, RooflineLatency
from scheduling.speculation import (
    MAX_CLASSES,
    MEMORY_TRIALS,
    MOST_LENGTH,
    PRIOR_ACCEPTANCE,
    AcceptanceRates,
    DecodeTier,
    accepted_tokens,
    speculation_lengths,
)

MODEL = LinearLatency(a=0.02, b=0.0001)


def prefill_rate(
    tiers: list[DecodeTier],
    lengths: tuple[int, ...],
    alpha: float,
    latency: LatencyModel,
    draft_s: float,
) -> float:
    """Prefill tokens per second by the definition, for a model without attention."""
    paces = zip(tiers, lengths, strict=True)
    batch_s = min(tier.tpot_s * accepted_tokens(n, alpha) for tier, n in paces if tier.requests)
    tokens = sum(tier.requests * n for tier, n in zip(tiers, lengths, strict=True))
    left_s = batch_s - draft_s * (max(lengths) - 1)
    fits = min(
        (left_s - piece[0]) / piece[1] - tokens for piece in latency.pieces.tolist() if piece[1] > 0
    )
    return fits / batch_s


tiers_of = st.lists(
    st.builds(DecodeTier, requests=st.integers(0, 60), tpot_s=st.floats(0.02, 0.3)),
    min_size=1,
    max_size=3,
).filter(lambda tiers: any(tier.requests for tier in tiers))


@settings(max_examples=60)
@given(
    tiers=tiers_of,
    alpha=st.floats(0, 0.95),
    draft_s=st.sampled_from([0.0, 0.001, 0.01]),
    latency=st.sampled_from(
        [MODEL, LinearLatency(a=0.0, b=0.001), LinearLatency(a=0.05, b=0.00001)]
    ),
)
def test_no_other_lengths_leave_more_prefill(
    tiers: list[DecodeTier], alpha: float, draft_s: float, latency: LinearLatency
) -> None:
    found = speculation_lengths(tiers, alpha, latency, draft_s)
    rate = prefill_rate(tiers, found.lengths, alpha, latency, draft_s)
    assert found.prefill_tokens_per_s == pytest.approx(rate)
    lengths = range(1, MOST_LENGTH + 1)
    best = max(
        prefill_rate(tiers, every, alpha, latency, draft_s)
        for every in product(lengths, repeat=len(tiers))
    )
    assert rate >= best - 1e-6 * abs(best)
    for tier, length in zip(tiers, found.lengths, strict=True):
        if tier.requests:
            assert tier.tpot_s * accepted_tokens(length, alpha) >= found.batch_s - 1e-12


def test_expected_tokens_of_a_step() -> None:
    assert accepted_tokens(1, 0.7) == pytest.approx(1)
    assert accepted_tokens(3, 0.5) == pytest.approx(1.75)
    assert accepted_tokens(10, 0.0) == 1


def test_it_speculates_for_the_tight_tier_where_the_step_is_mostly_fixed_time() -> None:
    # 30 ms against 20 ms of fixed time leave little; two tokens of the tight tier's step allow
    # 54 ms and leave more. The loose tier keeps its pace without.
    tiers = [DecodeTier(5, 0.03), DecodeTier(5, 0.2)]
    found = speculation_lengths(tiers, 0.8, MODEL)
    assert found.lengths[0] > 1
    assert found.lengths[1] == 1
    plain = prefill_rate(tiers, (1, 1), 0.8, MODEL, 0.0)
    assert found.prefill_tokens_per_s > 1.5 * plain


def test_it_does_not_where_nothing_is_accepted_or_drafting_is_dear() -> None:
    tiers = [DecodeTier(5, 0.03), DecodeTier(5, 0.2)]
    assert speculation_lengths(tiers, 0.0, MODEL).lengths == (1, 1)
    assert speculation_lengths(tiers, 0.8, MODEL, draft_s=0.05).lengths == (1, 1)


def test_both_lines_of_a_roofline_count() -> None:
    # Reading the weights takes 40 ms: one token within a 30 ms TPOT cannot be, two can.
    roofline = RooflineLatency(0.0001, 0.0, 0.0, 0.0, 0.0, 0.04)
    found = speculation_lengths([DecodeTier(10, 0.03)], 0.9, roofline)
    assert found.lengths[0] >= 2
    assert found.batch_s >= 0.04


def test_decodes_that_cannot_be_held_leave_less_than_nothing() -> None:
    found = speculation_lengths([DecodeTier(1_000, 0.03)], 0.5, MODEL)
    assert found.prefill_tokens_per_s < 0


def test_impossible_inputs_are_refused() -> None:
    some = [DecodeTier(1, 0.05)]
    with pytest.raises(ValueError, match="alpha must be from 0 to below 1, got 1"):
        speculation_lengths(some, 1.0, MODEL)
    with pytest.raises(ValueError, match="draft_s must be finite and >= 0"):
        speculation_lengths(some, 0.5, MODEL, -0.1)
    with pytest.raises(ValueError, match="at least one request"):
        speculation_lengths([DecodeTier(0, 0.05)], 0.5, MODEL)
    with pytest.raises(ValueError, match="tpot_s must be positive"):
        DecodeTier(1, 0.0)
    with pytest.raises(ValueError, match="requests and context_tokens"):
        DecodeTier(-1, 0.05)


def check(rates: AcceptanceRates, name: str, alpha: float, steps: int, checked: int) -> None:
    """``steps`` steps that check ``checked`` tokens, each right with probability ``alpha``."""
    chance = random.Random(steps)
    for _ in range(steps):
        accepted = 0
        while accepted < checked and chance.random() < alpha:
            accepted += 1
        rates.observe(name, checked, accepted)


@settings(max_examples=40)
@given(alpha=st.floats(0, 0.97), checked=st.integers(1, 9))
def test_the_rate_becomes_that_of_the_class_whatever_is_checked(alpha: float, checked: int) -> None:
    rates = AcceptanceRates()
    check(rates, "chat", 0.5, 40, 3)
    check(rates, "chat", alpha, 1_500, checked)
    # Four deviations of a mean of as many trials as are remembered, and the prior's pull.
    assert rates.rate("chat") == pytest.approx(alpha, abs=4 * 0.5 / MEMORY_TRIALS**0.5 + 0.03)
    assert 0 < rates.rate("chat") < 1
    assert rates.rate("another") == PRIOR_ACCEPTANCE


def test_a_class_that_is_no_longer_checked_is_tried_again() -> None:
    rates = AcceptanceRates()
    check(rates, "chat", 0.0, 300, 1)
    assert rates.rate("chat") < 0.05
    for _ in range(6_000):
        rates.observe("chat", 0, 0)
    assert rates.rate("chat") > 0.4


def test_a_bounded_number_of_classes_is_followed() -> None:
    rates = AcceptanceRates()
    for number in range(MAX_CLASSES + 1):
        rates.observe(f"class-{number}", 1, 1)
    assert rates.rate("class-0") == PRIOR_ACCEPTANCE
    assert rates.rate("class-1") > PRIOR_ACCEPTANCE


def test_more_accepted_than_checked_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to checked, got 3 and 2 checked"):
        AcceptanceRates().observe("chat", 2, 3)
