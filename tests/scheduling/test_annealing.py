"""Simulated-annealing priority mapping in the engine, by hand: 10 ms a step, 1 ms a new token."""

from collections.abc import Sequence
from itertools import pairwise
from math import nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sluice.benchmarks.experiments.annealing import all_mappings, exhaustive, make_jobs, score
from sluice.scheduling.batching import BatchBudget, BatchPlan
from sluice.scheduling.batching.annealing import (
    Annealing,
    AnnealingOptions,
    Jobs,
    Mapping,
    Schedule,
    Times,
    acceptance,
    anneal,
    levels,
    predict,
)
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.request_model import InteractionLatency
from sluice.scheduling.request.kernels import COMPUTED, EMITTED, FIRST_TOKEN, PENDING, RUNNING
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView, row_of
from tests.examples import examples
from tests.scheduling.test_progress import Job, run
from tests.scheduling.views import ROOMY, decode, prefill, queue_of

MODEL = LinearLatency(a=0.010, b=0.001)


def policy(**options: object) -> Annealing:
    return Annealing(AnnealingOptions.model_validate(options))


def plan(
    by: Annealing, *requests: RequestView, now_s: float = 0.0, budget: BatchBudget = ROOMY
) -> BatchPlan:
    return by.plan(queue_of(*requests), now_s, MODEL, budget)


def order(result: BatchPlan) -> list[str]:
    return [entry.request_id for entry in result.entries]


def waiting(name: str, prompt: int, slo: SLO | None = None, expected: float = 10.0) -> RequestView:
    return prefill(name, prompt, slo)._replace(expected_tokens=expected)


def by_length(requests: Sequence[RequestView]) -> list[str]:
    ascending = sorted(requests, key=lambda r: r.prompt_tokens + r.expected_tokens)
    return [request.request_id for request in ascending]


def test_running_requests_continue_and_the_others_follow_in_the_mapped_order() -> None:
    requests = [
        decode("decode"),
        waiting("long", 300),
        prefill("begun", 100, computed=50),
        waiting("short", 20),
        waiting("middle", 100),
    ]
    result = plan(policy(), *requests)
    assert order(result) == ["decode", "begun", "short", "middle", "long"]
    assert dict(result.entries)["begun"] == 50, "what is left of its prompt"


def test_waiting_requests_are_admitted_up_to_the_batch_size() -> None:
    begun = [decode(f"d{n}") for n in range(3)]
    others = [waiting(f"w{n}", 10 * (6 - n)) for n in range(6)]
    assert order(plan(policy(batch_size=5), *begun, *others)) == ["d0", "d1", "d2", "w5", "w4"]
    assert order(plan(policy(batch_size=2), *begun, *others)) == ["d0", "d1", "d2"]


def test_a_loose_request_waits_where_it_would_break_the_pace_of_strict_ones() -> None:
    # Steps of two take 12 ms and of three 13 ms. Figure 4 in the engine.
    strict = SLO(tpot_s=0.0125)
    queue = [waiting("loose", 10), waiting("a", 10, strict), waiting("b", 10, strict)]
    by = policy()
    assert sorted(order(plan(by, *queue))) == ["a", "b"]
    gone = [queue[0], decode("b", strict)._replace(expected_tokens=10.0)]
    assert order(plan(by, *gone)) == ["b", "loose"], "two are fast enough"


def test_in_order_the_slots_that_are_left_go_to_later_batches() -> None:
    # As above, but an engine with FCFS would run the loose one, too, from the first step on.
    strict = SLO(tpot_s=0.0125)
    queue = [waiting("loose", 10), waiting("a", 10, strict), waiting("b", 10, strict)]
    assert order(plan(policy(admits="in_order"), *queue))[2:] == ["loose"]
    assert len(order(plan(policy(admits="in_order", batch_size=2), *queue))) == 2
    assert order(plan(policy(admits="in_order", batch_size=1), decode("d"), *queue)) == ["d"]


def test_in_order_requests_run_in_the_order_in_which_an_fcfs_engine_would_get_them() -> None:
    queue = [waiting(f"r{n}", 10 * (7 * n % 12 + 1)) for n in range(12)]
    by = policy(admits="in_order", batch_size=4)
    assert order(plan(by, *queue)) == by_length(queue)[:4]
    by_name = {request.request_id: request for request in queue}
    first, *rest = by_length(queue)
    running = [decode(name)._replace(expected_tokens=10.0) for name in rest[:3]]
    others = [by_name[name] for name in sorted(rest[3:])]
    assert order(plan(by, *running, *others))[3:] == [rest[3]], f"the next one as {first} ends"


def test_predictions_outside_the_range_of_output_lengths_count_as_its_ends() -> None:
    queue = [
        waiting("long prompt", 100, expected=1.0),
        waiting("long output", 10, expected=5_000.0),
        waiting("unknown", 11, expected=nan),
    ]
    plain = plan(policy(batch_size=1, expected_tokens=50), *queue)
    assert order(plain) == ["long prompt"]
    # At 20 tokens each, the shortest prompt is first.
    ranged = policy(batch_size=1, expected_tokens=20, output_tokens=(20, 20))
    assert order(plan(ranged, *queue)) == ["long output"]
    with pytest.raises(ValidationError, match="a minimum and a maximum"):
        policy(output_tokens=(30, 20))


def test_a_request_that_cannot_make_it_is_put_off_for_one_that_can() -> None:
    hopeless = waiting("hopeless", 20, SLO(ttft_s=0.01))
    other = waiting("other", 30, SLO(ttft_s=0.045))
    assert order(plan(policy(batch_size=1), hopeless, other)) == ["other"]


def test_the_mapping_holds_until_a_request_comes_or_goes() -> None:
    by = policy(batch_size=1)
    first = waiting("first", 30, SLO(ttft_s=0.045))
    second = waiting("second", 20)
    assert order(plan(by, first, second)) == ["first"]
    # By now the first is late and the shorter one would go before it.
    assert order(plan(by, first, second, now_s=1.0)) == ["first"]
    assert order(plan(policy(batch_size=1), first, second, now_s=1.0)) == ["second"]
    third = waiting("third", 500)
    assert order(plan(by, first, second, third, now_s=1.0)) == ["second"], "one came"
    assert order(plan(by, first, third, now_s=1.0)) == ["first"], "one went"


def test_an_admitted_request_stays_in_the_plan_and_a_preempted_one_is_mapped_anew() -> None:
    by = policy(batch_size=2)
    a, b, c = waiting("a", 20), waiting("b", 30), waiting("c", 40)
    assert order(plan(by, a, b, c)) == ["a", "b"]
    running = [decode("a", context=20), decode("b", context=30)._replace(expected_tokens=10.0)]
    assert order(plan(by, *running, c)) == ["a", "b"]
    lost = running[1]._replace(computed_tokens=0, pending_tokens=31, kv_blocks=0, running=False)
    assert order(plan(by, running[0], lost, c)) == ["a", "b"], "it has less left to do than c"
    assert order(plan(by, *running, c)) == ["a", "b"]
    longer = lost._replace(expected_tokens=200.0)
    assert order(plan(by, running[0], longer, c)) == ["a", "c"], "now it has more"


def test_only_the_first_to_arrive_are_mapped() -> None:
    queue = [waiting(f"r{n}", 100 - n) for n in range(50)]
    result = plan(policy(annealed=10, batch_size=32), *queue)
    assert order(result) == by_length(queue[:10])


def test_where_none_of_the_first_batch_fits_another_request_is_taken() -> None:
    queue = [waiting("strict", 160, SLO(ttft_s=0.2)), waiting("small", 50)]
    assert order(plan(policy(batch_size=1), *queue)) == ["strict"]
    short = ROOMY._replace(kv_blocks=5)
    assert order(plan(policy(batch_size=1), *queue, budget=short)) == ["small"]
    # While something runs, the blocks that come free are for the one that is first.
    queue.append(decode("decode", context=15))
    assert order(plan(policy(batch_size=2), *queue, budget=short)) == ["decode"]


def test_a_length_that_is_not_predicted_is_the_default() -> None:
    known, unknown = waiting("known", 10, expected=50.0), prefill("unknown", 10)
    assert order(plan(policy(expected_tokens=100), unknown, known)) == ["known", "unknown"]
    assert order(plan(policy(expected_tokens=20), known, unknown)) == ["unknown", "known"]


def test_stated_coefficients_replace_those_of_the_latency_model() -> None:
    # By these, prompts cost nothing and only the output counts.
    by = policy(prefill=(0.0, 0.0, 0.0, 0.001), decode=(0.0, 0.0, 0.0, 0.001))
    queue = [waiting("talker", 10, expected=50.0), waiting("reader", 500, expected=10.0)]
    assert order(plan(by, *queue)) == ["reader", "talker"]
    assert order(plan(policy(), *queue)) == ["talker", "reader"]


def test_the_same_seed_plans_alike_whatever_was_planned_before() -> None:
    rng = np.random.default_rng(5)
    queue = [
        waiting(f"r{n}", int(rng.integers(10, 400)), SLO(ttft_s=float(rng.uniform(0.1, 3.0))))
        for n in range(30)
    ]
    used = policy(batch_size=4)
    for count in range(1, 30):
        plan(used, *queue[:count])
    fresh = order(plan(policy(batch_size=4), *queue))
    assert order(plan(used, *queue)) == fresh
    seeds = {tuple(order(plan(policy(batch_size=4, seed=seed), *queue))) for seed in range(8)}
    assert len(seeds) > 1


def test_more_requests_meet_their_objectives_than_first_come_first_served() -> None:
    def met(batch_size: int, by: str) -> int:
        rng = np.random.default_rng(2)
        jobs = []
        for n in range(40):
            slo = SLO(ttft_s=1.0, tpot_s=0.05) if n % 2 else SLO(e2e_s=5.0)
            jobs.append(Job(f"j{n}", int(rng.integers(20, 300)), int(rng.integers(5, 60)), slo))
        chosen = policy(batch_size=batch_size, expected_tokens=30)
        if by == "fcfs":
            chosen = policy(batch_size=batch_size, expected_tokens=30, annealed=1)
        done, _ = run(chosen, jobs, MODEL)
        return sum(_attained(job) for job in done.values())

    assert met(4, "annealing") > met(4, "fcfs")


def _attained(job: Job) -> bool:
    slo, times = job.slo, job.emitted_s
    if slo.e2e_s is not None:
        return times[-1] <= slo.e2e_s
    assert slo.ttft_s is not None and slo.tpot_s is not None
    return times[0] <= slo.ttft_s and times[-1] - times[0] <= slo.tpot_s * (len(times) - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "greater than or equal to 1"),
        ({"annealed": 65}, "less than or equal to 64"),
        ({"decay": 1.0}, "less than 1"),
        ({"threshold": 600.0}, r"threshold must be at most initial_temperature \(500\), got 600"),
        ({"iterations": 1_000}, "make 63,000 steps a search, at most 50,000 are allowed"),
        ({"prefill": (0.0, 0.0, 0.0, 1.0)}, "prefill and decode must be stated together"),
        ({"prefill": (0.1, 0.1), "decode": (0.1, 0.1, 0.1, 0.1)}, "prefill"),
        ({"prefill": (-1, 0, 0, 1), "decode": (0, 0, 0, 1)}, "finite and >= 0"),
        ({"temperature": 5}, "Extra inputs are not permitted"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AnnealingOptions.model_validate(options)


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
