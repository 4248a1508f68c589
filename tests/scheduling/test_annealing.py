"""Simulated-annealing priority mapping in the engine, by hand: 10 ms a step, 1 ms a new token."""

from collections.abc import Sequence
from itertools import pairwise
from math import isinf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.annealing import (
    PAPER,
    all_mappings,
    exhaustive,
    make_jobs,
    score,
)
from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy, make_policy
from sluice.scheduling.batching.annealing import (
    Annealing,
    AnnealingOptions,
    Jobs,
    Mapping,
    Schedule,
    Times,
    acceptance,
    anneal,
    phases_of,
    predict,
)
from sluice.scheduling.latency.model import (
    LatencyModel,
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
    StepSample,
)
from sluice.scheduling.request.kernels import COMPUTED, EMITTED, FIRST_TOKEN, PENDING, RUNNING
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import RequestView, row_of
from tests.examples import examples
from tests.scheduling.steps import run
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
    assert result.tokens_of["begun"] == 50, "what is left of its prompt"


DECODES = [decode(f"d{n}") for n in range(3)]
SHRINKING = [waiting(f"w{n}", 10 * (6 - n)) for n in range(6)]
# Steps of two take 12 ms and of three 13 ms: Figure 4 in the engine.
STRICT = SLO(tpot_s=0.0125)
LOOSE_FIRST = [waiting("loose", 10), waiting("a", 10, STRICT), waiting("b", 10, STRICT)]
MANY = [waiting(f"r{n}", 100 - n) for n in range(50)]


@pytest.mark.parametrize(
    ("options", "queue", "expected"),
    [
        pytest.param(
            {"batch_size": 5}, [*DECODES, *SHRINKING], ["d0", "d1", "d2", "w5", "w4"], id="full"
        ),
        pytest.param(
            {"batch_size": 2}, [*DECODES, *SHRINKING], ["d0", "d1", "d2"], id="more than full"
        ),
        pytest.param({}, LOOSE_FIRST, ["b", "a"], id="figure 4"),
        pytest.param(
            {},
            [LOOSE_FIRST[0], decode("b", STRICT)._replace(expected_tokens=10.0)],
            ["b", "loose"],
            id="two are fast enough",
        ),
        pytest.param(
            {"admits": "in_order"}, LOOSE_FIRST, ["b", "a", "loose"], id="FCFS fills the batch"
        ),
        pytest.param(
            {"admits": "in_order", "batch_size": 1},
            [DECODES[0], *LOOSE_FIRST],
            ["d0"],
            id="no slot",
        ),
        pytest.param(
            {"batch_size": 1},
            [waiting("hopeless", 20, SLO(ttft_s=0.01)), waiting("other", 30, SLO(ttft_s=0.045))],
            ["other"],
            id="one that cannot make it",
        ),
        pytest.param({"batch_size": 64}, MANY, by_length(MANY[:40]), id="the first 40 are mapped"),
    ],
)
def test_which_requests_run(
    options: dict[str, object], queue: list[RequestView], expected: list[str]
) -> None:
    assert order(plan(policy(**options), *queue)) == expected


def test_in_order_requests_run_in_the_order_in_which_an_fcfs_engine_would_get_them() -> None:
    queue = [waiting(f"r{n}", 10 * (7 * n % 12 + 1)) for n in range(12)]
    by = policy(admits="in_order", batch_size=4)
    assert order(plan(by, *queue)) == by_length(queue)[:4]
    by_name = {request.request_id: request for request in queue}
    first, *rest = by_length(queue)
    running = [decode(name)._replace(expected_tokens=10.0) for name in rest[:3]]
    others = [by_name[name] for name in sorted(rest[3:])]
    assert order(plan(by, *running, *others))[3:] == [rest[3]], f"the next one as {first} ends"


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


def test_where_none_of_the_first_batch_fits_another_request_is_taken() -> None:
    queue = [waiting("strict", 160, SLO(ttft_s=0.2)), waiting("small", 50)]
    assert order(plan(policy(batch_size=1), *queue)) == ["strict"]
    short = ROOMY._replace(kv_blocks=5)
    assert order(plan(policy(batch_size=1), *queue, budget=short)) == ["small"]
    # While something runs, the blocks that come free are for the one that is first.
    queue.append(decode("decode", context=15))
    assert order(plan(policy(batch_size=2), *queue, budget=short)) == ["decode"]


@pytest.mark.parametrize(("known", "first"), [(200.0, "known"), (300.0, "unknown")])
def test_a_length_that_is_not_predicted_counts_as_256_tokens(known: float, first: str) -> None:
    queue = [prefill("unknown", 10), waiting("known", 10, expected=known)]
    assert order(plan(policy(), *queue))[0] == first


def test_a_plan_does_not_depend_on_what_was_planned_before() -> None:
    rng = np.random.default_rng(5)
    queue = [
        waiting(f"r{n}", int(rng.integers(10, 400)), SLO(ttft_s=float(rng.uniform(0.1, 3.0))))
        for n in range(30)
    ]
    used = policy(batch_size=4)
    for count in range(1, 30):
        plan(used, *queue[:count])
    assert order(plan(used, *queue)) == order(plan(policy(batch_size=4), *queue))


def test_more_requests_meet_their_objectives_than_first_come_first_served() -> None:
    rng = np.random.default_rng(2)
    jobs = []
    for n in range(40):
        slo = SLO(ttft_s=1.0, tpot_s=0.05) if n % 2 else SLO(e2e_s=5.0)
        prompt, output = int(rng.integers(20, 300)), int(rng.integers(5, 60))
        jobs.append((waiting(f"j{n}", prompt, slo, expected=30.0), output))

    def met(by: BatchPolicy) -> int:
        times_s = run(by, jobs, MODEL, ROOMY._replace(sequences=4)).tokens_s
        return sum(_attained(view.slo, times_s[view.request_id]) for view, _ in jobs)

    assert met(policy(batch_size=4)) > met(make_policy("fcfs"))


def _attained(slo: SLO, times_s: list[float]) -> bool:
    if slo.e2e_s is not None:
        return times_s[-1] <= slo.e2e_s
    assert slo.ttft_s is not None and slo.tpot_s is not None
    tpot_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    return times_s[0] <= slo.ttft_s and tpot_s <= slo.tpot_s


SCHEDULE = Schedule.paper()
TABLE_2 = np.array(PAPER)


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
    found = anneal(jobs, SCHEDULE)
    assert batches_of(found) == [{2}, {0}, {1}]
    assert (found.met, found.latency_s) == (3, 3 + 4 + 6)


def test_figure_4_a_loose_request_is_put_off_so_that_strict_ones_share_a_smaller_batch() -> None:
    jobs = jobs_of([[1.5, 2.0, 2.5]] * 3, slo_s=[2.0, 2.0, 5.0])
    assert g(jobs, [[0, 1, 2]]) == 1 / 7.5, "in one batch all slow down"
    found = anneal(jobs, SCHEDULE)
    assert batches_of(found) == [{0, 1}, {2}]
    assert (found.met, found.latency_s) == (3, 2 + 2 + 3.5)


def test_figure_5_a_request_that_cannot_make_it_is_put_off_for_one_that_can() -> None:
    jobs = jobs_of([[2.0], [3.0]], slo_s=[1.0, 4.0])
    assert g(jobs, [[0], [1]]) == 0.0, "both miss, in 7 s"
    found = anneal(jobs, SCHEDULE)
    assert batches_of(found) == [{1}, {0}]
    assert (found.met, found.latency_s) == (1, 8.0), "at a slightly greater latency"


def test_where_all_are_met_in_order_of_time_that_order_is_taken_at_full_batches() -> None:
    # Smaller batches would be better here, but the paper ends the search at once.
    jobs = jobs_of([[2.0, 9.0], [1.0, 8.0], [3.0, 9.5]], slo_s=[99.0] * 3)
    found = anneal(jobs, SCHEDULE)
    assert found.order.tolist() == [1, 0, 2] and found.sizes.tolist() == [2, 1]
    assert found.g < exhaustive(jobs)


def test_requests_under_way_stay_in_the_first_batch_and_count() -> None:
    # The running one has 1 s left and 1.5 s to go, which a second request beside it would break.
    running = Times(np.array([[1.0, 2.0]]), np.array([[0.5, -0.5]]))
    jobs = jobs_of([[1.0, 2.0]], slo_s=[5.0], running=running, waited_s=3.0)
    found = anneal(jobs, SCHEDULE)
    assert found.sizes.tolist() == [0, 1], "nothing joins it"
    assert (found.met, found.latency_s) == (2, 3.0 + 1.0 + 2.0)
    loose = jobs._replace(running=Times(running.exec_s, running.latest_s + 9.0))
    quick = Times(np.array([[0.1, 0.1]]), np.array([[4.9, 4.9]]))
    joined = anneal(loose._replace(joining=quick), SCHEDULE)
    assert joined.sizes.tolist() == [1] and joined.latency_s == pytest.approx(3.0 + 2.0 + 0.1)


def test_more_running_than_a_batch_has_is_refused() -> None:
    running = Times(np.ones((3, 2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="at most 2 requests can run in a batch, 3 run already"):
        anneal(jobs_of([[1.0, 2.0]], [5.0], running=running), SCHEDULE)


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
    schedule = Schedule.paper(seed)
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
    assert anneal(jobs, SCHEDULE).g <= exhaustive(jobs) * (1 + 1e-9)


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
        ratios.append(anneal(jobs, SCHEDULE).g / best if best else 1.0)
    assert np.mean(ratios) >= 0.98 and min(ratios) >= 0.9


def test_the_reference_visits_every_ordered_partition_once() -> None:
    jobs = make_jobs(4, 4, seed=0)
    found = [tuple(frozenset(batch) for batch in mapping) for mapping in all_mappings(jobs)]
    assert len(found) == len(set(found)) == 75, "the fourth Fubini number"
    assert len(list(all_mappings(make_jobs(4, 1, seed=0)))) == 24


def test_acceptance_falls_with_temperature_and_with_loss() -> None:
    assert SCHEDULE.temperatures[0] == 500.0 and 20.0 <= SCHEDULE.temperatures[-1] < 20.0 / 0.95
    one_of_ten = [acceptance(-0.1, 10, temperature) for temperature in SCHEDULE.temperatures]
    assert all(hot > cold for hot, cold in pairwise(one_of_ten))
    assert one_of_ten[0] == pytest.approx(np.exp(-1)) and one_of_ten[-1] < 1e-9
    losses = [acceptance(-loss, 10, 100.0) for loss in (0.0, 0.01, 0.1, 1.0)]
    assert all(small > great for small, great in pairwise(losses))
    assert acceptance(0.0, 10, 20.0) == acceptance(0.5, 10, 20.0) == 1.0


def test_cooling_beats_a_random_walk_of_as_many_steps() -> None:
    walk = SCHEDULE._replace(temperatures=np.full_like(SCHEDULE.temperatures, 1e9))
    ratios = [
        anneal(jobs, SCHEDULE).g / anneal(jobs, walk).g
        for jobs in (make_jobs(40, most, seed, tighten=3.0) for most in (1, 4) for seed in range(5))
    ]
    assert min(ratios) > 1.0


def prefill_s(batch: int, prompt: float) -> float:
    """Eq. 14 by Table 2."""
    alpha, beta, gamma, delta = PAPER[0]
    return alpha * batch * prompt + beta * batch + gamma * prompt + delta


def decode_s(batch: int, prompt: int, output: int) -> float:
    """Eq. 16, the sum of Eq. 15, by Table 2."""
    alpha, beta, gamma, delta = PAPER[1]
    contexts = range(prompt + 1, prompt + output + 1)
    return sum(alpha * batch * k + beta * batch + gamma * k + delta for k in contexts)


def test_prediction_is_that_of_table_2() -> None:
    # 4 * 1,000 * 0.1 + 4 * 5.7 + 1,000 * 0.01 + 43.67 = 476.47 ms, and 100 tokens of
    # 4 * 1,050.5 * 0.0002 + 4 * 0.275 + 1,050.5 * 0.00088 + 15.85 = 18.71484 ms.
    row = row_of(SLO(ttft_s=10.0, tpot_s=0.0188, e2e_s=30.0), 5.0, 1_000, expected_tokens=100)
    exec_s, latest_s = predict(np.array([row]), TABLE_2, 7.0, 5, 0)
    assert exec_s[0, 3] == pytest.approx(0.47647 + 1.871484)
    assert latest_s[0, 3] == pytest.approx(10.0 - 2.0 - 0.47647)
    assert isinf(latest_s[0, 4]), "five would break its TPOT"
    for batch in range(1, 6):
        whole_s = prefill_s(batch, 1_000) + decode_s(batch, 1_000, 100)
        assert exec_s[0, batch - 1] == pytest.approx(whole_s)


def test_code_is_judged_by_its_end_and_no_objective_is_always_met() -> None:
    table = np.array([row_of(SLO(e2e_s=30.0), 0.0, 500), row_of(SLO(), 0.0, 500)])
    exec_s, latest_s = predict(table, TABLE_2, 1.0, 2, 0)
    assert exec_s[0, 1] == pytest.approx(prefill_s(2, 500) + decode_s(2, 500, 256))
    assert latest_s[0].tolist() == pytest.approx((29.0 - exec_s[0]).tolist())
    assert (latest_s[1] == np.inf).all()


def test_of_a_request_under_way_only_what_is_left_counts() -> None:
    row = row_of(SLO(ttft_s=1.0, tpot_s=0.1), 0.0, 500, expected_tokens=50)
    row[EMITTED], row[COMPUTED], row[PENDING], row[RUNNING] = 20, 519, 1, 1
    row[FIRST_TOKEN] = 0.9
    late, long, preempted = row.copy(), row.copy(), row.copy()
    late[FIRST_TOKEN], long[EMITTED] = 1.1, 80
    preempted[COMPUTED], preempted[PENDING], preempted[RUNNING] = 0, 520, 0
    exec_s, latest_s = predict(np.array([row, late, long, preempted]), TABLE_2, 3.0, 1, 0)
    assert exec_s[0, 0] == pytest.approx(decode_s(1, 520, 30))
    assert latest_s[0, 0] == pytest.approx(0.9 + 49 * 0.1 - 3.0 - exec_s[0, 0])
    assert latest_s[1, 0] == -np.inf, "its first token was late"
    assert exec_s[2, 0] == pytest.approx(decode_s(1, 520, 1)), "one more than expected"
    assert exec_s[3, 0] == pytest.approx(prefill_s(1, 520) + decode_s(1, 520, 30))


def test_those_that_decode_take_no_part_in_a_prefill() -> None:
    table = np.array([row_of(SLO(), 0.0, 500, expected_tokens=50)])
    exec_s, _ = predict(table, TABLE_2, 0.0, 5, 3)
    assert exec_s[0, 4] == pytest.approx(prefill_s(2, 500) + decode_s(5, 500, 50))


@given(batch=st.integers(1, 32), length=st.integers(2, 4_000))
@pytest.mark.parametrize(
    "model",
    [
        LinearLatency(a=0.010, b=0.001, c=0.000_01).with_headroom(1.5),
        PrefillDecodeLatency(0, 0, 1e-4, 1e-6, 1e-3, 0.01),
        RooflineLatency(1e-4, 0, 0.002, 1e-6, 0, 0.020),
    ],
)
def test_the_phases_of_a_step_model_give_the_steps_times(
    model: LatencyModel, batch: int, length: int
) -> None:
    for phase, step in zip(phases_of(model), ((length, 0), (1, length)), strict=True):
        time_s = float(phase @ (batch * length, batch, length, 1))
        real_s = model.step_s(StepSample.of([step] * batch))
        # Of the roofline's lines each has its largest coefficients.
        assert time_s >= real_s * (1 - 1e-12)
        if not isinstance(model, RooflineLatency):
            assert time_s == pytest.approx(real_s)
