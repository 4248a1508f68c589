"""Output lengths, learned from how requests ended."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.placement.output_lengths import (
    EVERY,
    LEAST_ENDED,
    MAX_CLASSES,
    MAX_TENANTS,
    MEMORY,
    UNKNOWN,
    UNSEEN,
    LengthRange,
    OutputLength,
    OutputLengths,
    length_of,
)
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO

OUTPUTS = st.lists(st.tuples(st.integers(1, 10_000), st.booleans()), max_size=2 * MEMORY)


def expected(
    lengths: OutputLengths, service_class: str, tenant: int = 0, most_tokens: int = 0
) -> OutputLength:
    slo = SLO(service_class=service_class)
    return lengths.of(RouteQuery(1, slo, 1, tenant=tenant, output_tokens=most_tokens))


def learned(*tokens: int, level: float = 0.99, tenant: int = 0) -> OutputLengths:
    lengths = OutputLengths(level)
    for each in tokens:
        lengths.observe("chat", tenant, each, ended=True)
    return lengths


def test_nothing_known_is_bounded_by_the_most_that_may_come() -> None:
    lengths = OutputLengths()
    assert expected(lengths, "chat") == UNKNOWN == (256, 512)
    assert expected(lengths, "chat", most_tokens=300) == (256, 300)
    assert expected(lengths, "chat", most_tokens=40) == (40, 40)


def test_a_class_has_the_lengths_that_it_had() -> None:
    lengths = learned(*[100] * 150)
    assert expected(lengths, "chat") == (pytest.approx(100), 100)
    assert expected(lengths, "other") == UNKNOWN
    # Most are short, one in fifty is long: a promise counts with the long ones.
    lengths = learned(*([10] * 49 + [1_000]) * 4)
    mean, bound = expected(lengths, "chat")
    assert mean == pytest.approx((49 * 10 + 1_000) / 50)
    assert bound == 1_000


def test_few_outputs_do_not_bound_the_next_one() -> None:
    one = expected(learned(10), "chat")
    assert one == (pytest.approx((256 + 10) / 2), UNSEEN * 256)
    assert expected(learned(*[10] * LEAST_ENDED), "chat") == (pytest.approx(10), UNSEEN * 10)
    # So many that the 0.9 quantile is one of them.
    assert expected(learned(*range(1, 21), level=0.9), "chat").bound == 19


def test_what_was_cut_off_does_not_teach_that_outputs_are_short() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.observe("chat", 0, 16, ended=False)
    assert expected(lengths, "chat") == UNKNOWN
    # Half of them are cut off at 16 tokens: of the others, the lengths are those without any limit.
    chance = random.Random(5)
    real = [chance.randint(1, 100) for _ in range(400)]
    for tokens in real:
        cut = chance.random() < 0.5 and tokens > 16
        lengths.observe("chat", 0, 16 if cut else tokens, ended=not cut)
    mean, bound = expected(lengths, "chat")
    assert mean == pytest.approx(50, rel=0.15)
    assert 90 <= bound <= 200


def test_the_share_within_the_bound_is_the_level() -> None:
    chance = random.Random(7)
    lengths, within = OutputLengths(0.95), 0
    for number in range(4_000):
        tokens = 1 + int(chance.lognormvariate(4.0, 1.0))
        if number >= 200:
            within += tokens <= expected(lengths, "chat").bound
        lengths.observe("chat", 0, tokens, ended=True)
    assert within / 3_800 == pytest.approx(0.95, abs=0.015)


def test_it_follows_a_change() -> None:
    lengths = learned(*[1_000] * 300, *[10] * (MEMORY + EVERY))
    assert expected(lengths, "chat") == (pytest.approx(10), 10)


def test_a_tenant_is_told_from_its_class_when_enough_is_known_of_it() -> None:
    lengths = learned(*[20] * 200)
    for number in range(LEAST_ENDED):
        assert expected(lengths, "chat", 7).mean < 100, number
        assert expected(lengths, "chat", 7) == expected(lengths, "chat")
        lengths.observe("chat", 7, 500, ended=True)
    assert expected(lengths, "chat", 7) == (pytest.approx(500), UNSEEN * 500)
    assert expected(lengths, "chat", 8) == expected(lengths, "chat")
    assert expected(lengths, "code", 7) == UNKNOWN


def test_a_stated_range_is_what_counts() -> None:
    lengths = OutputLengths(0.9, {"chat": LengthRange(11, 20)})
    assert expected(lengths, "chat") == (15.5, 19)
    lengths.observe("chat", 7, 5_000, ended=True)
    assert expected(lengths, "chat", 7) == (15.5, 19)
    assert len(lengths) == 0


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, 2.0])
def test_a_level_that_is_none_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        OutputLengths(level)


def test_memory_is_bounded_and_the_latest_stay() -> None:
    lengths = OutputLengths()
    for tenant in range(1, 3 * MAX_TENANTS):
        lengths.observe(f"class-{tenant % (2 * MAX_CLASSES)}", tenant, 10, ended=True)
    assert len(lengths) == MAX_CLASSES + MAX_TENANTS
    for _ in range(LEAST_ENDED):
        lengths.observe("chat", 5, 10, ended=True)
    assert expected(lengths, "chat", 5) == (pytest.approx(10), 20)
    for name, tokens in (("", 10), ("x" * 300, 10), ("empty", 0)):
        lengths.observe(name, 0, tokens, ended=True)
        assert expected(lengths, name) == UNKNOWN
    # More than any model gives, from a router that is out of order.
    lengths.observe("huge", 0, 10**30, ended=True)
    assert expected(lengths, "huge").bound < 1 << 32


@given(OUTPUTS, st.integers(0, 1 << 20), st.floats(0.01, 0.999))
def test_the_bound_is_at_least_the_mean_and_never_above_the_most(
    outputs: list[tuple[int, bool]], most: int, level: float
) -> None:
    lengths = OutputLengths(level)
    for tokens, ended in outputs:
        lengths.observe("chat", 7, tokens, ended)
    for tenant in (0, 7):
        mean, bound = expected(lengths, "chat", tenant, most)
        assert 0 < mean <= bound
        assert not most or bound <= most
        free = expected(lengths, "chat", tenant)
        assert (mean, bound) == (min(free.mean, most or mean), min(free.bound, most or bound))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=MEMORY), st.floats(0.01, 0.999))
def test_without_cuts_the_mean_is_the_mean_and_enough_are_within_the_bound(
    tokens: list[int], level: float
) -> None:
    mean, bound = length_of(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_), level)
    assert mean == pytest.approx(np.mean(tokens))
    assert np.mean(np.array(tokens) <= bound) >= level - 1e-9
