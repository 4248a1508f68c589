"""The priority mapping of 002: its predictor, its objective, and what the search finds.

The numbers of the paper's Figures 3 to 5 are in drawings only; the worked examples have numbers of
their own that show what its text says of each figure.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.annealing import all_mappings, exhaustive, make_jobs, score
from sluice.scheduling.batching.annealing import (
    Jobs,
    Mapping,
    Schedule,
    Times,
    acceptance,
    anneal,
    levels,
    predict,
)
from sluice.scheduling.latency.request_model import InteractionLatency
from sluice.scheduling.request.kernels import COMPUTED, EMITTED, FIRST_TOKEN, PENDING, RUNNING
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import row_of
from tests.examples import examples

PAPER = Schedule.of(500.0, 20.0, 100, 0.95, seed=0)
TABLE_2 = InteractionLatency.paper()


def jobs_of(exec_s: list[list[float]], slo_s: list[float], **more: object) -> Jobs:
    """Jobs with an end-to-end objective; ``exec_s`` has a row per job, a column per batch size."""
    times = np.array(exec_s)
    return Jobs(Times(times, np.array(slo_s)[:, np.newaxis] - times), **more)  # type: ignore[arg-type]


def batches_of(mapping: Mapping) -> list[set[int]]:
    ends = np.cumsum(mapping.sizes)
    return [set(batch.tolist()) for batch in np.split(mapping.order, ends[:-1])]


def g(jobs: Jobs, batches: list[list[int]]) -> float:
    met, latency_s = score(jobs, batches)
    return met / latency_s


def test_figure_3_the_order_of_execution_times_is_not_the_best_one() -> None:
    jobs = jobs_of([[1.0], [2.0], [3.0]], slo_s=[10.0, 10.0, 3.0])
    assert g(jobs, [[0], [1], [2]]) == 2 / (1 + 3 + 6), "shortest first: the last misses"
    found = anneal(jobs, PAPER)
    assert batches_of(found) == [{2}, {0}, {1}]
    assert (found.met, found.latency_s) == (3, 3 + 4 + 6)


def test_figure_4_a_loose_request_is_put_off_so_that_strict_ones_share_a_smaller_batch() -> None:
    jobs = jobs_of([[1.5, 2.0, 2.5]] * 3, slo_s=[2.0, 2.0, 5.0])
    assert g(jobs, [[0, 1, 2]]) == 1 / 7.5, "in one batch all slow down"
    found = anneal(jobs, PAPER)
    assert batches_of(found) == [{0, 1}, {2}]
    assert (found.met, found.latency_s) == (3, 2 + 2 + 3.5)


def test_figure_5_a_request_that_cannot_make_it_is_put_off_for_one_that_can() -> None:
    jobs = jobs_of([[2.0], [3.0]], slo_s=[1.0, 4.0])
    assert g(jobs, [[0], [1]]) == 0.0, "both miss, in 7 s"
    found = anneal(jobs, PAPER)
    assert batches_of(found) == [{1}, {0}]
    assert (found.met, found.latency_s) == (1, 8.0), "at a slightly greater latency"


def test_where_all_are_met_in_order_of_time_that_order_is_taken_at_full_batches() -> None:
    # Smaller batches would be better here, but the paper ends the search at once.
    jobs = jobs_of([[2.0, 9.0], [1.0, 8.0], [3.0, 9.5]], slo_s=[99.0] * 3)
    found = anneal(jobs, PAPER)
    assert found.order.tolist() == [1, 0, 2] and found.sizes.tolist() == [2, 1]
    assert found.g < exhaustive(jobs)


def test_requests_under_way_stay_in_the_first_batch_and_count() -> None:
    # The running one has 1 s left and 1.5 s to go, which a second request beside it would break.
    running = Times(np.array([[1.0, 2.0]]), np.array([[0.5, -0.5]]))
    jobs = jobs_of([[1.0, 2.0]], slo_s=[5.0], running=running, waited_s=3.0)
    found = anneal(jobs, PAPER)
    assert found.sizes.tolist() == [0, 1], "nothing joins it"
    assert (found.met, found.latency_s) == (2, 3.0 + 1.0 + 2.0)
    loose = jobs._replace(running=Times(running.exec_s, running.latest_s + 9.0))
    quick = Times(np.array([[0.1, 0.1]]), np.array([[4.9, 4.9]]))
    joined = anneal(loose._replace(joining=quick), PAPER)
    assert joined.sizes.tolist() == [1] and joined.latency_s == pytest.approx(3.0 + 2.0 + 0.1)


def test_more_running_than_a_batch_has_is_refused() -> None:
    running = Times(np.ones((3, 2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="at most 2 requests can run in a batch, 3 run already"):
        anneal(jobs_of([[1.0, 2.0]], [5.0], running=running), PAPER)


@st.composite
def some_jobs(draw: st.DrawFn, most_requests: int) -> Jobs:
    """Jobs of any kind, some under way, whose times grow with the batch."""
    most = draw(st.integers(1, 4))
    running = draw(st.integers(0, min(2, most)))
    waiting = draw(st.integers(0 if running else 1, most_requests))

    def times(count: int) -> Times:
        one = np.array(draw(st.lists(st.floats(0.1, 9), min_size=count, max_size=count)))
        more = np.array(draw(st.lists(st.floats(0, 2), min_size=count, max_size=count)))
        due = np.array(draw(st.lists(st.floats(0, 20), min_size=count, max_size=count)))
        exec_s = one[:, np.newaxis] + more[:, np.newaxis] * np.arange(most)
        return Times(exec_s, due[:, np.newaxis] - exec_s)

    first = times(running) if running else None
    joining = times(waiting) if running and draw(st.booleans()) else None
    return Jobs(times(waiting), first, joining, draw(st.floats(0, 5)))


@settings(max_examples=examples(100))
@given(jobs=some_jobs(most_requests=12), seed=st.integers(0, 3))
def test_a_mapping_is_complete_within_the_batch_size_and_worth_what_it_says(
    jobs: Jobs, seed: int
) -> None:
    schedule = Schedule.of(500.0, 20.0, 20, 0.9, seed)
    found = anneal(jobs, schedule)
    waiting, most = jobs.waiting.exec_s.shape
    running = 0 if jobs.running is None else len(jobs.running.exec_s)
    assert sorted(found.order.tolist()) == list(range(waiting))
    assert found.sizes.sum() == waiting
    assert found.sizes[0] + running <= most and (found.sizes[1:] <= most).all()
    assert (found.sizes[0 if not running else 1 :] > 0).all()
    met, latency_s = score(jobs, np.split(found.order, np.cumsum(found.sizes)[:-1]))
    assert found.met == met and found.latency_s == pytest.approx(latency_s)
    again = anneal(jobs, schedule)
    assert again.order.tolist() == found.order.tolist()
    assert again.sizes.tolist() == found.sizes.tolist()


@settings(max_examples=examples(60))
@given(jobs=some_jobs(most_requests=4))
def test_no_mapping_is_better_than_the_exhaustive_one(jobs: Jobs) -> None:
    assert anneal(jobs, PAPER).g <= exhaustive(jobs) * (1 + 1e-9)


def test_it_comes_close_to_the_exhaustive_search() -> None:
    cases = [
        make_jobs(6, most, seed, tighten)
        for most in (1, 2, 3, 6)
        for tighten in (2.0, 5.0)
        for seed in range(4)
    ]
    ratios = []
    for jobs in cases:
        best = exhaustive(jobs)
        ratios.append(anneal(jobs, PAPER).g / best if best else 1.0)
    assert np.mean(ratios) >= 0.98 and min(ratios) >= 0.9


def test_the_reference_visits_every_ordered_partition_once() -> None:
    jobs = make_jobs(4, 4, seed=0)
    found = [tuple(frozenset(batch) for batch in mapping) for mapping in all_mappings(jobs)]
    assert len(found) == len(set(found)) == 75, "the fourth Fubini number"
    assert len(list(all_mappings(make_jobs(4, 1, seed=0)))) == 24


def test_acceptance_falls_with_temperature_and_with_loss() -> None:
    assert len(PAPER.temperatures) == levels(500.0, 20.0, 0.95) == 63
    assert PAPER.temperatures[0] == 500.0 and 20.0 <= PAPER.temperatures[-1] < 20.0 / 0.95
    one_of_ten = [acceptance(-0.1, 10, temperature) for temperature in PAPER.temperatures]
    assert all(hot > cold for hot, cold in pairwise(one_of_ten))
    assert one_of_ten[0] == pytest.approx(np.exp(-1)) and one_of_ten[-1] < 1e-9
    losses = [acceptance(-loss, 10, 100.0) for loss in (0.0, 0.01, 0.1, 1.0)]
    assert all(small > great for small, great in pairwise(losses))
    assert acceptance(0.0, 10, 20.0) == acceptance(0.5, 10, 20.0) == 1.0


def test_cooling_beats_a_random_walk_of_as_many_steps() -> None:
    walk = PAPER._replace(temperatures=np.full_like(PAPER.temperatures, 1e9))
    ratios = [
        anneal(jobs, PAPER).g / anneal(jobs, walk).g
        for jobs in (make_jobs(40, most, seed, tighten=3.0) for most in (1, 4) for seed in range(5))
    ]
    assert min(ratios) > 1.0


def test_a_schedule_is_its_seed() -> None:
    same = Schedule.of(500.0, 20.0, 100, 0.95, seed=0)
    other = Schedule.of(500.0, 20.0, 100, 0.95, seed=1)
    assert (same.draws == PAPER.draws).all() and (other.draws != PAPER.draws).any()
    assert levels(20.0, 20.0, 0.5) == 1 and levels(19.0, 20.0, 0.5) == 0


def test_prediction_is_that_of_table_2() -> None:
    # 4 * 1,000 * 0.1 + 4 * 5.7 + 1,000 * 0.01 + 43.67 = 476.47 ms, and 100 tokens of
    # 4 * 1,050.5 * 0.0002 + 4 * 0.275 + 1,050.5 * 0.00088 + 15.85 = 18.71484 ms.
    row = row_of(SLO(ttft_s=10.0, tpot_s=0.0188, e2e_s=30.0), 5.0, 1_000, expected_tokens=100)
    exec_s, latest_s = predict(np.array([row]), 7.0, TABLE_2, 5, expected_tokens=1.0)
    assert exec_s[0, 3] == pytest.approx(0.47647 + 1.871484)
    assert latest_s[0, 3] == pytest.approx(10.0 - 2.0 - 0.47647)
    assert latest_s[0, 4] == -np.inf, "five would break its TPOT"
    for batch in range(1, 6):
        assert exec_s[0, batch - 1] == pytest.approx(TABLE_2.e2e_s(batch, 1_000, 100))


def test_code_is_judged_by_its_end_and_an_unknown_length_by_the_default() -> None:
    table = np.array([row_of(SLO(e2e_s=30.0), 0.0, 500), row_of(SLO(), 0.0, 500)])
    exec_s, latest_s = predict(table, 1.0, TABLE_2, 2, expected_tokens=200.0)
    assert exec_s[0, 1] == pytest.approx(TABLE_2.e2e_s(2, 500, 200))
    assert latest_s[0].tolist() == pytest.approx((29.0 - exec_s[0]).tolist())
    assert (latest_s[1] == np.inf).all(), "no objective is always met"


def test_of_a_request_under_way_only_what_is_left_counts() -> None:
    row = row_of(SLO(ttft_s=1.0, tpot_s=0.1), 0.0, 500, expected_tokens=50)
    row[EMITTED], row[COMPUTED], row[PENDING], row[RUNNING] = 20, 519, 1, 1
    row[FIRST_TOKEN] = 0.9
    late = row.copy()
    late[FIRST_TOKEN] = 1.1
    long = row.copy()
    long[EMITTED] = 80
    preempted = row.copy()
    preempted[COMPUTED], preempted[PENDING], preempted[RUNNING] = 0, 520, 0
    exec_s, latest_s = predict(np.array([row, late, long, preempted]), 3.0, TABLE_2, 1, 1.0)
    assert exec_s[0, 0] == pytest.approx(TABLE_2.decode_s(1, 520, 30))
    assert latest_s[0, 0] == pytest.approx(0.9 + 49 * 0.1 - 3.0 - exec_s[0, 0])
    assert latest_s[1, 0] == -np.inf, "its first token was late"
    assert exec_s[2, 0] == pytest.approx(TABLE_2.decode_s(1, 520, 1)), "one more than expected"
    prefill_s = TABLE_2.prefill_s(1, 520)
    assert exec_s[3, 0] == pytest.approx(prefill_s + TABLE_2.decode_s(1, 520, 30))


def test_those_that_decode_take_no_part_in_a_prefill() -> None:
    table = np.array([row_of(SLO(), 0.0, 500, expected_tokens=50)])
    exec_s, _ = predict(table, 0.0, TABLE_2, 5, 1.0, decoding=3)
    assert exec_s[0, 4] == pytest.approx(TABLE_2.prefill_s(2, 500) + TABLE_2.decode_s(5, 500, 50))
