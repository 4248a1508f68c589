"""How many further attempts there may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.router.config import RetryBudgetConfig
from sluice.router.dispatch.retries import RetryBudget
from tests.router.far_side import Clock


def budget(clock: Clock, **config: float) -> RetryBudget:
    return RetryBudget(RetryBudgetConfig.model_validate(config), clock)


def test_a_share_of_the_requests_and_a_floor() -> None:
    clock = Clock()
    some = budget(clock, ratio=0.5, floor=2, window_s=10)
    assert [some.take() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        some.count_request()
    assert [some.take() for _ in range(3)] == [True, True, False]


def test_what_is_past_does_not_count() -> None:
    clock = Clock()
    some = budget(clock, ratio=0, floor=1, window_s=10)
    assert some.take() and not some.take()
    clock.now_s += 9
    assert not some.take()
    clock.now_s += 1
    assert some.take()


@given(
    st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=200),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.2, 1.0]),
)
def test_no_window_has_more_than_its_share(
    events: list[tuple[float, bool]], floor: int, ratio: float
) -> None:
    """Of any window that ends with a further attempt, to the slot that it is counted in."""
    clock = Clock()
    some = budget(clock, ratio=ratio, floor=floor, window_s=10)
    requests: list[float] = []
    taken: list[float] = []
    for pause_s, is_request in events:
        clock.now_s += pause_s
        if is_request:
            some.count_request()
            requests.append(clock.now_s)
        elif some.take():
            taken.append(clock.now_s)
            recent = sum(clock.now_s - 9.5 < at for at in taken)
            asked = sum(clock.now_s - 10 <= at for at in requests)
            assert recent <= floor + ratio * asked + 1
    assert len(some._slots) <= 21
