"""What can be done to a workload; and generated ones have the statistics that they claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.request.objective import SLO
from sluice.simulation import settings
from sluice.simulation.generators import (
    ArrivalProcess,
    AtOnce,
    Diurnal,
    Gamma,
    LengthDistribution,
    OnOff,
    Poisson,
    Slowdown,
    Surges,
    Task,
    always,
    generate,
)
from sluice.simulation.workload import (
    Arrival,
    Stage,
    Workload,
    merged,
    stretched,
    thinned,
    window,
    with_objectives,
    with_priorities,
)

CHAT = SLO(ttft_s=1.0, tpot_s=0.1)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    gaps = draw(st.lists(st.floats(0, 50), max_size=30))
    at_s = 0.0
    arrivals = []
    for gap in gaps:
        at_s += gap
        lengths = draw(st.tuples(st.integers(1, 5000), st.integers(1, 500)))
        arrivals.append(Arrival(at_s, *lengths, CHAT))
    return Workload("drawn", tuple(arrivals))


def of(*times_s: float) -> Workload:
    return Workload("times", tuple(Arrival(at_s, 10, 2, CHAT) for at_s in times_s))


def test_statistics_of_a_small_workload() -> None:
    workload = Workload(
        "small", (Arrival(1.0, 10, 4, CHAT), Arrival(2.0, 20, 2, CHAT), Arrival(5.0, 30, 3, CHAT))
    )
    assert len(workload) == 3
    assert workload.duration_s == 5.0
    assert workload.rate == 0.5  # Two gaps in four seconds.
    assert workload.mean_prompt_tokens == 20
    assert workload.mean_output_tokens == 3
    assert (of().rate, of().duration_s, of().mean_prompt_tokens) == (0, 0, 0)
    assert (of(3.0).rate, of(3.0, 3.0).rate) == (0, float("inf"))


@pytest.mark.parametrize(
    ("arrival", "complaint"),
    [
        (Arrival(0.5, 1, 1, CHAT), r"request 1: arrives at 0.5 s, after one at 1.0 s"),
        (Arrival(float("nan"), 1, 1, CHAT), "arrives at nan"),
        (Arrival(float("inf"), 1, 1, CHAT), "arrives at inf"),
        (Arrival(2.0, 0, 1, CHAT), "at least 1 token, got 0 and 1"),
        (Arrival(2.0, 1, 0, CHAT), "at least 1 token, got 1 and 0"),
        (Arrival(2.0, 9, 5, CHAT, stages=(Stage(4, CHAT),)), "have 4 output tokens, the request 5"),
        (Arrival(2.0, 9, 4, CHAT, stages=(Stage(4, CHAT, 9),)), "its own must be 0"),
        (Arrival(2.0, 9, 4, CHAT, stages=(Stage(4, CHAT), Stage(0, CHAT))), "at least 1 output"),
    ],
)
def test_what_cannot_be_run_is_refused(arrival: Arrival, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Workload("bad", (Arrival(1.0, 1, 1, CHAT), arrival))


@given(workloads(), st.floats(0.01, 1), st.integers(0, 100))
def test_thinning_keeps_a_subsequence_and_is_decided_by_its_seed(
    workload: Workload, share: float, seed: int
) -> None:
    kept = thinned(workload, share, seed)
    left = iter(workload.arrivals)
    assert all(arrival in left for arrival in kept.arrivals)
    assert kept == thinned(workload, share, seed)
    assert thinned(workload, 1.0, seed).arrivals == workload.arrivals


def test_thinning_takes_its_share_and_breaks_bursts_up() -> None:
    bursts = of(*(100.0 * (index // 50) for index in range(10_000)))
    kept = thinned(bursts, 0.3, seed=5)
    assert len(kept) / len(bursts) == pytest.approx(0.3, abs=0.02)
    sizes = [sum(a.arrival_s == 100.0 * burst for a in kept.arrivals) for burst in range(200)]
    assert 10 < sum(sizes) / 200 < 20
    assert kept.scaling == "thinned to a share of 0.3 (seed 5)"
    assert thinned(bursts, 0.3, seed=6).arrivals != kept.arrivals


@given(workloads(), st.floats(0.01, 100))
def test_stretching_moves_times_only(workload: Workload, factor: float) -> None:
    slower = stretched(workload, factor)
    assert slower.duration_s == pytest.approx(workload.duration_s * factor)
    assert [a._replace(arrival_s=0.0) for a in slower.arrivals] == [
        a._replace(arrival_s=0.0) for a in workload.arrivals
    ]


def test_every_change_of_the_rate_is_named_in_order() -> None:
    workload = stretched(thinned(of(0, 1, 2), 0.9, seed=1), 0.5)
    assert workload.scaling == "thinned to a share of 0.9 (seed 1), then time stretched by 0.5"
    assert of(0, 1).scaling == "as recorded"


@given(workloads(), st.floats(0, 500), st.floats(0.1, 500))
def test_windows_next_to_each_other_share_no_request_and_lose_none(
    workload: Workload, start_s: float, seconds: float
) -> None:
    first = window(workload, start_s, seconds)
    rest = window(workload, start_s + seconds, 1e9)
    before = [a for a in workload.arrivals if a.arrival_s < start_s]
    assert len(before) + len(first) + len(rest) == len(workload)
    assert all(0 <= arrival.arrival_s < seconds + 1e-9 for arrival in first.arrivals)


def test_a_window_counts_from_its_start_and_says_so() -> None:
    cut = window(of(0, 5, 9, 10), 5, 5)
    assert [arrival.arrival_s for arrival in cut.arrivals] == [0, 4]
    assert "Window of 5 s from 5 s." in cut.description
    assert cut.scaling == "as recorded"


def test_priorities_are_drawn_by_share_and_reach_every_stage() -> None:
    request = Arrival.of_stages(0.0, 100, (Stage(5, CHAT), Stage(5, CHAT, 20)))
    workload = with_priorities(Workload("staged", (request,) * 6000), {4: 2.0, 1: 1.0}, seed=3)
    assert all(
        stage.slo.priority == arrival.slo.priority
        for arrival in workload.arrivals
        for stage in arrival.stages
    )
    high = sum(arrival.slo.priority == 4 for arrival in workload.arrivals)
    assert high / 6000 == pytest.approx(2 / 3, abs=0.03)
    assert "4 with share 2, 1 with share 1 (seed 3)" in workload.description
    assert len({id(arrival.slo) for arrival in workload.arrivals}) == 2  # Kept once each.


def test_a_request_of_stages_is_known_by_its_first_ttft_and_tightest_tpot() -> None:
    stages = (
        Stage(5, SLO(ttft_s=2.0, tpot_s=0.1, e2e_s=9.0, priority=3)),
        Stage(7, SLO(ttft_s=0.5, tpot_s=0.05), 30),
        Stage(1, SLO(ttft_s=0.5)),
    )
    request = Arrival.of_stages(1.0, 100, stages, "agent")
    assert (request.slo.times_s, request.slo.priority) == ((2.0, 0.05, None), 3)
    assert [stage.times_s for stage in request.slo.stages] == [s.slo.times_s for s in stages]
    assert [stage.prompt_tokens for stage in request.slo.stages] == [0, 30, 0]
    assert not any(stage.tokens for stage in request.slo.stages), "nobody knows how long they are"
    assert (request.output_tokens, request.task) == (13, "agent")
    with pytest.raises(ValueError, match="objectives of their own"):
        with_objectives(Workload("staged", (request,)), lambda _: CHAT, "")


BAD = float("nan")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (partial(of, -1.0), "request 0: arrives at -1"),
        *((partial(thinned, of(0), share, 1), "share must be above 0") for share in (0, 1.01, BAD)),
        *((partial(stretched, of(0), by), "factor must be positive") for by in (0, -1, BAD)),
        (partial(window, of(0), -1, 1), "a window needs"),
        (partial(window, of(0), 0, 0), "a window needs"),
        (partial(with_priorities, of(0), {}, 1), "shares must be positive"),
        (partial(with_priorities, of(0), {1: -1.0, 2: 1.0}, 1), "shares must be positive"),
        (partial(merged, "none", []), "one block size"),
        (partial(merged, "both", [of(0), replace(of(0), block_tokens=16)]), "one block size"),
    ],
)
def test_impossible_changes_are_refused(make: partial[Workload], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


def test_merging_orders_by_time_and_keeps_prefixes_apart() -> None:
    left = Workload("left", (Arrival(0, 9, 1, CHAT, "", (7, 8)), Arrival(4, 9, 1, CHAT, "", (7,))))
    right = stretched(Workload("right", (Arrival(1, 9, 1, CHAT, "", (7,)),)), 2.0)
    both = merged("both", [left, right])
    assert [arrival.arrival_s for arrival in both.arrivals] == [0, 2, 4]
    first, other, again = (arrival.block_hashes for arrival in both.arrivals)
    assert first[0] == again[0]
    assert other[0] not in first
    assert both.scaling == "left: as recorded; right: time stretched by 2"


DRAWN = 200_000


def zero_load_s(prompt_tokens: int) -> float:
    return 0.01 + 1e-4 * prompt_tokens


COLUMNS = {
    **{f"slos-serve {name} prompt": row for name, row in settings.SLOS_SERVE_PROMPTS.items()},
    **{f"slos-serve {name} output": row for name, row in settings.SLOS_SERVE_OUTPUTS.items()},
    **{f"flowprefill {name} prompt": row for name, row in settings.FLOWPREFILL_PROMPTS.items()},
}


@pytest.mark.parametrize("name", COLUMNS)
def test_lengths_have_the_printed_mean_deviation_and_p99(name: str) -> None:
    column = COLUMNS[name]
    lengths = column.lengths.draw(DRAWN, np.random.default_rng(11))
    assert lengths.min() >= 1
    assert lengths.mean() == pytest.approx(column.mean, rel=0.02)
    assert lengths.std() == pytest.approx(column.std, rel=0.02)
    assert (lengths > column.p99).mean() == pytest.approx(0.01, abs=0.001)
    assert np.quantile(lengths, 0.99) == pytest.approx(column.p99, rel=0.03)
    assert lengths.max() <= np.ceil(1.25 * column.p99)


@pytest.mark.parametrize("name", settings.FAIRBATCHING)
def test_lengths_have_the_printed_mean_and_p90(name: str) -> None:
    row = settings.FAIRBATCHING[name]
    rng = np.random.default_rng(12)
    for mean, p90, distribution in (
        (row.prompt_mean, row.prompt_p90, row.prompt),
        (row.output_mean, row.output_p90, row.output),
    ):
        lengths = distribution.draw(DRAWN, rng)
        assert lengths.min() >= 1
        assert lengths.mean() == pytest.approx(mean, rel=0.02)
        assert np.quantile(lengths, 0.9) == pytest.approx(p90, rel=0.02)
        assert lengths.max() <= 3 * p90


def gaps(process: ArrivalProcess, count: int = 50_000, seed: int = 3) -> np.ndarray:
    times = process.times(count, np.random.default_rng(seed))
    assert len(times) == count and (np.diff(times) >= 0).all() and times[0] >= 0
    return np.diff(times)


@pytest.mark.parametrize(
    ("process", "variation"),
    [(Poisson(4.0), 1.0), (Gamma(4.0, cv=2.0), 2.0), (Gamma(4.0, cv=0.5), 0.5)],
)
def test_gaps_have_the_rate_and_variation(process: ArrivalProcess, variation: float) -> None:
    between = gaps(process)
    assert 1 / between.mean() == pytest.approx(4.0, rel=0.03)
    assert between.std() / between.mean() == pytest.approx(variation, abs=0.05)


def test_bursts_have_the_rate_over_all_and_more_inside() -> None:
    between = gaps(OnOff(2.0, on_s=10.0, off_s=30.0), count=400_000)
    assert 1 / between.mean() == pytest.approx(2.0, rel=0.05)
    assert 1 / np.median(between) == pytest.approx(8.0 / np.log(2), rel=0.05)
    silences = between[between > 5.0]  # A gap this long within a burst has a chance of e**-40.
    assert silences.mean() == pytest.approx(5.0 + 30.0, rel=0.05)


def test_bursts_last_as_long_at_every_rate() -> None:
    slow, fast = (OnOff(rate).times(2_000, np.random.default_rng(5)) for rate in (2.0, 8.0))
    # The silences of the slow one's first quarter.
    ends_s = fast[np.flatnonzero(np.diff(fast) > 5.0)]
    assert len(ends_s) > 3
    for end_s in ends_s:
        before, after = slow[slow <= end_s + 1.0].max(), slow[slow > end_s + 1.0].min()
        assert end_s - before < 3.0 and after - before > 5.0


def test_a_day_has_its_rate_and_its_swing() -> None:
    process = Diurnal(5.0, period_s=1_000.0, swing=0.8)
    times = process.times(100_000, np.random.default_rng(3))
    assert (np.diff(times) >= 0).all() and times[0] >= 0
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.02)
    counts = np.histogram(times % 1_000.0, bins=20, range=(0, 1_000.0))[0] / (len(times) / 20)
    assert counts[0] == pytest.approx(0.2, abs=0.05)
    assert counts[10] == pytest.approx(1.8, abs=0.05)
    shifted = Diurnal(5.0, 1_000.0, 0.8, begins=0.5).times(100_000, np.random.default_rng(3))
    counts = np.histogram(shifted % 1_000.0, bins=20, range=(0, 1_000.0))[0] / (len(times) / 20)
    assert counts[0] == pytest.approx(1.8, abs=0.05)
    assert len(process.times(0, np.random.default_rng(3))) == 0


def test_surges_have_the_rate_over_all_and_a_multiple_inside() -> None:
    process = Surges(6.0, factor=4.0, surge_s=100.0, between_s=200.0)
    times = process.times(400_000, np.random.default_rng(4))
    assert (np.diff(times) >= 0).all() and times[0] >= 0
    assert len(times) / times[-1] == pytest.approx(6.0, rel=0.1)
    counts = np.bincount((times // 10).astype(int)) / 10
    # 3 a second between surges and 12 inside.
    assert np.quantile(counts, 0.3) == pytest.approx(3.0, abs=0.4)
    assert np.quantile(counts, 0.9) == pytest.approx(12.0, abs=1.5)
    assert len(process.times(0, np.random.default_rng(4))) == 0


ALL: dict[str, Callable[..., Workload]] = {
    **{
        f"slos-serve {name}": partial(settings.slos_serve, name, zero_load_s=zero_load_s)
        for name in settings.SLOS_SERVE_SCENARIOS
    },
    **{
        f"fairbatching {name}": partial(settings.fairbatching, name)
        for name in settings.FAIRBATCHING
    },
    **{
        f"flowprefill {name}": partial(settings.flowprefill, name)
        for name in settings.FLOWPREFILL_TTFT_S
    },
    **{f"proserve {name}": partial(settings.proserve, name) for name in settings.PROSERVE_DATASETS},
    "flowprefill single": partial(settings.flowprefill_single, "llama3-8b"),
    "chat and code": settings.chat_and_code,
}


@pytest.mark.parametrize("name", ALL)
def test_a_seed_decides_everything_and_the_rate_only_the_times(name: str) -> None:
    make = partial(ALL[name], requests=300)
    workload = make(rate=2.0, seed=7)
    assert len(workload) == 300
    assert workload == make(rate=2.0, seed=7)
    assert workload.arrivals != make(rate=2.0, seed=8).arrivals
    assert "generated: " in workload.scaling and "requests/s" in workload.scaling
    assert workload.description
    if "mixed" in name:  # Its parts keep their requests, and meet in another order.
        return
    faster = make(rate=4.0, seed=7)
    assert faster.duration_s < workload.duration_s
    assert [a._replace(arrival_s=0.0) for a in faster.arrivals] == [
        a._replace(arrival_s=0.0) for a in workload.arrivals
    ]


def test_slos_serve_objectives_are_multiples_of_the_idle_engine_with_a_floor() -> None:
    coder = settings.slos_serve("coder", 2.0, 200, 1, zero_load_s, floor_s=0.2)
    for arrival in coder.arrivals:
        expected = max(5 * zero_load_s(arrival.prompt_tokens), 0.2)
        assert arrival.slo == SLO(ttft_s=expected, tpot_s=0.05)
    assert min(arrival.slo.ttft_s or 0 for arrival in coder.arrivals) == 0.2
    slowdown = Slowdown(3.0, zero_load_s, 0.2, 0.1)
    assert slowdown(10_000) == SLO(ttft_s=3 * 1.01, tpot_s=0.1)


def test_reasoning_thinks_fast_and_answers_at_reading_pace() -> None:
    workload = settings.slos_serve("reasoning", 1.0, 4000, 2, zero_load_s)
    thinking, answers = (
        np.array([arrival.stages[index].output_tokens for arrival in workload.arrivals])
        for index in (0, 1)
    )
    assert thinking.mean() == pytest.approx(4693, rel=0.03)
    assert answers.mean() == pytest.approx(803, rel=0.03)
    request = workload.arrivals[0]
    assert len(request.stages) == 2
    assert request.stages[0].slo.tpot_s == request.slo.tpot_s == 0.05
    assert request.stages[1].slo == SLO(ttft_s=0.1, tpot_s=0.1)
    assert request.stages[1].prompt_tokens == 0


def test_tool_loops_have_the_printed_rounds_and_lengths() -> None:
    workload = settings.slos_serve("tools", 1.0, 8000, 3, zero_load_s)
    rounds = np.array([len(arrival.stages) for arrival in workload.arrivals])
    assert rounds.min() == 1
    assert rounds.mean() == pytest.approx(2.7, rel=0.03)
    assert rounds.std() == pytest.approx(1.1, rel=0.05)
    prompts = [a.prompt_tokens for a in workload.arrivals]
    prompts += [stage.prompt_tokens for a in workload.arrivals for stage in a.stages[1:]]
    assert np.mean(prompts) == pytest.approx(690, rel=0.03)
    outputs = [stage.output_tokens for a in workload.arrivals for stage in a.stages]
    assert np.mean(outputs) == pytest.approx(116, rel=0.03)
    for arrival in workload.arrivals[:50]:
        *calling, answer = arrival.stages
        assert all(stage.slo.tpot_s == 0.05 for stage in calling)
        assert answer.slo.tpot_s == 0.1


def test_the_mixed_scenario_has_three_parts_from_its_begin_to_its_end() -> None:
    even = settings.slos_serve("mixed", 3.0, 6000, 4, zero_load_s, arrivals=Poisson)
    tasks = Counter(arrival.task for arrival in even.arrivals)
    assert sum(tasks.values()) == 6000
    assert even.rate == pytest.approx(3.0, rel=0.05)
    for part in ("chatbot", "coder", "summarizer"):
        assert tasks[part] / 6000 == pytest.approx(1 / 3, abs=0.02)
    # The coder's requests come in bursts, and do not all come in the first or last of them.
    bursty = settings.slos_serve("mixed", 3.0, 900, 4, zero_load_s)
    assert len(bursty) == 900
    for part in ("chatbot", "coder", "summarizer"):
        last_s = max(arrival.arrival_s for arrival in bursty.arrivals if arrival.task == part)
        assert last_s > 0.6 * bursty.duration_s


def test_flowprefill_mixes_tasks_by_share_with_the_models_objectives() -> None:
    workload = settings.flowprefill("qwen2.5-14b", 5.0, 20_000, 5, slo_scale=2.0)
    tasks = Counter(arrival.task for arrival in workload.arrivals)
    for name, percent in settings.FLOWPREFILL_SHARES.items():
        assert tasks[name] / 200 == pytest.approx(percent, abs=1)
    ttft_s = {arrival.task: arrival.slo.ttft_s for arrival in workload.arrivals}
    assert ttft_s == {"text": 0.8, "image": 1.6, "search": 13.0, "file": 18.0}
    assert {arrival.output_tokens for arrival in workload.arrivals} == {1}


def test_proserve_has_two_priorities_with_equal_chance() -> None:
    workload = settings.proserve("burstgpt", 2.0, 10_000, 7)
    priorities = Counter(arrival.slo.priority for arrival in workload.arrivals)
    assert priorities.keys() == {1, 2}
    assert priorities[2] / 10_000 == pytest.approx(0.5, abs=0.02)
    assert {(a.slo.ttft_s, a.slo.tpot_s) for a in workload.arrivals} == {(0.8, 0.08)}
    assert "Priorities drawn" in workload.description


ONE = LengthDistribution.fixed(1)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (partial(settings.slos_serve, "chess", 1, 1, 1, zero_load_s), "no scenario 'chess'; there"),
        (partial(settings.fairbatching, "x", 1, 1, 1), "no dataset 'x'; there are burstgpt"),
        (partial(settings.flowprefill, "x", 1, 1, 1), "no model 'x'; there are llama3-8b"),
        (partial(settings.flowprefill_single, "x", 1, 1), "no model 'x'"),
        (partial(settings.proserve, "x", 1, 1, 1), "no dataset 'x'; there are sharegpt"),
        (partial(settings.chat_and_code, 0, 1), "requests must be at least 1"),
        (partial(generate, "none", [], AtOnce(), 1, 1), "needs tasks with positive shares"),
        (
            partial(generate, "x", [Task("x", ONE, ONE, always(SLO()), 0.0)], AtOnce(), 1, 1),
            "positive shares",
        ),
        (partial(LengthDistribution.of_p99, 1000, 900, 100), "no lengths have mean"),
        # One percent above 5,000 deviates by more.
        (partial(LengthDistribution.of_p99, 500, 5000, 1), "no lengths have mean"),
        (partial(LengthDistribution.of_p90, 100, 5000), "no lengths with mean"),
        (partial(LengthDistribution.fixed, 0), "at least 1 token"),
        *(
            (partial(process, 0.0), "must be positive and finite")
            for process in (Poisson, Gamma, OnOff, Diurnal, Surges)
        ),
        (partial(Gamma, 1.0, cv=0.0), "must be positive and finite"),
        (partial(OnOff, 1e-9), "without a request"),
        (partial(Diurnal, 1.0, swing=1.0), "from 0 to below 1, got 1.0"),
        (partial(Diurnal, 1.0, begins=-0.1), "from 0 to below 1"),
        (partial(Surges, 1.0, factor=1.0), "factor must be above 1"),
    ],
)
def test_what_does_not_exist_is_refused(make: partial[object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()
