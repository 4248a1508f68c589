"""Weighted Moore-Hodgson against exhaustive search and its published example."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.batching.base import fitting
from sluice.scheduling.batching.deadline_triage import before, keep

jobs = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(0, 40)), min_size=0, max_size=8
)


def columns(rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sizes, weights and capacities of jobs, by capacity."""
    table = np.array(sorted(rows, key=lambda row: row[2]), dtype=np.float64).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def feasible(size: np.ndarray, capacity: np.ndarray, chosen: list[int]) -> bool:
    return bool((np.cumsum(size[chosen]) <= capacity[chosen]).all())


def test_the_fewest_jobs_are_late() -> None:
    # With all six in order of deadline the third is the first to be late; the longest up to it,
    # 10, goes. Then the fifth is late, and 8 goes. Four of six are on time.
    size = np.array([10.0, 3.0, 4.0, 8.0, 10.0, 6.0])
    due = np.array([15.0, 6.0, 9.0, 23.0, 20.0, 30.0])
    order = np.argsort(due)
    kept = keep(size[order], np.ones(6), due[order])
    assert size[order][kept].tolist() == [3.0, 4.0, 8.0, 6.0]


@given(jobs)
def test_the_kept_fit_their_capacities_and_with_equal_weights_none_could_be_more(
    rows: list[tuple[int, int, int]],
) -> None:
    size, weight, capacity = columns(rows)
    for weights in (weight, np.ones(len(size))):
        kept = np.flatnonzero(keep(size, weights, capacity)).tolist()
        assert feasible(size, capacity, kept)
    best = max(
        len(chosen)
        for count in range(len(size) + 1)
        for chosen in combinations(range(len(size)), count)
        if feasible(size, capacity, list(chosen))
    )
    assert len(kept) == best


def test_the_job_of_least_weight_per_size_goes() -> None:
    size, due = np.array([4.0, 4.0]), np.array([4.0, 6.0])
    assert keep(size, np.array([1.0, 2.0]), due).tolist() == [False, True]
    assert keep(size, np.array([2.0, 1.0]), due).tolist() == [True, False]


def test_a_job_that_could_never_be_on_time_costs_no_other_its_place() -> None:
    kept = keep(np.array([3.0, 50.0]), np.array([1.0, 1000.0]), np.array([5.0, 40.0]))
    assert kept.tolist() == [True, False]


@given(st.lists(st.floats(0, 10), max_size=10), st.floats(-5, 30))
def test_what_fits_in_turn_stays_within_the_room_and_skips_only_what_does_not(
    sizes: list[float], room: float
) -> None:
    taken = fitting(np.array(sizes), room)
    left = room
    for size, has in zip(sizes, taken, strict=True):
        assert has == (size <= left)
        left -= size if has else 0.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=12),
    st.lists(st.integers(0, 10), max_size=8),
)
def test_late_jobs_go_as_far_to_the_front_as_makes_no_other_late(
    jobs: list[tuple[int, int]], late: list[int]
) -> None:
    size = np.array([float(work) for work, _ in jobs])
    room = np.cumsum(size) + np.cumsum([float(slack) for _, slack in jobs])
    places = before(size, room, np.array(late, np.float64))
    for number, place in enumerate(places.tolist()):
        so_far = [(places[other], late[other]) for other in range(number + 1)]

        def is_held(
            moved: int, so_far: list[tuple[int, int]] = so_far, number: int = number
        ) -> bool:
            ahead = [*so_far[:number], (moved, late[number])]
            done = [
                size[: job + 1].sum() + sum(work for at, work in ahead if at <= job)
                for job in range(len(size))
            ]
            return bool((np.array(done) <= room + 1e-9).all())

        assert is_held(place)
        assert place == 0 or not is_held(place - 1) or late[number] == 0
