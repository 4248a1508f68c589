"""Generated workloads have the statistics of the tables that they claim, and depend on their
seed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from sluice.scheduling.request.objective import SLO
from sluice.simulation import settings
from sluice.simulation.generators import (
    ArrivalProcess,
    AtOnce,
    Diurnal,
    Gamma,
    LengthDistribution,
    MakeArrivals,
    OnOff,
    Poisson,
    Slowdown,
    Surges,
    Task,
    always,
    generate,
)
from sluice.simulation.workload import Workload

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


def test_lengths_that_no_distribution_has_are_refused() -> None:
    with pytest.raises(ValueError, match="no lengths have mean"):
        LengthDistribution.of_p99(1000, 900, 100)
    with pytest.raises(ValueError, match="no lengths have mean"):
        LengthDistribution.of_p99(500, 5000, 1)  # One percent above 5,000 deviates by more.
    with pytest.raises(ValueError, match="no lengths with mean"):
        LengthDistribution.of_p90(100, 5000)
    with pytest.raises(ValueError, match="at least 1 token"):
        LengthDistribution.fixed(0)


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


def test_a_day_or_a_surge_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"from 0 to below 1, got 1\.0"):
        Diurnal(1.0, swing=1.0)
    with pytest.raises(ValueError, match=r"above 1 and finite, got 1\.0"):
        Surges(1.0, factor=1.0)


def test_all_at_once() -> None:
    assert not gaps(AtOnce()).any()


@pytest.mark.parametrize("make", [Poisson, Gamma, OnOff, Diurnal, Surges, partial(Gamma, cv=0.0)])
def test_a_rate_or_variation_that_is_none_is_refused(make: MakeArrivals) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        make(0.0 if not isinstance(make, partial) else 1.0)
    with pytest.raises(ValueError, match="without a request"):
        OnOff(1e-9)


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


def test_flowprefills_single_objective_has_short_prompts() -> None:
    workload = settings.flowprefill_single("llama3-8b", 5.0, 6)
    assert len(workload) == 500
    assert max(arrival.prompt_tokens for arrival in workload.arrivals) < 2000
    assert {arrival.slo for arrival in workload.arrivals} == {SLO(ttft_s=0.25)}


def test_proserve_has_two_priorities_with_equal_chance() -> None:
    workload = settings.proserve("burstgpt", 2.0, 10_000, 7)
    priorities = Counter(arrival.slo.priority for arrival in workload.arrivals)
    assert priorities.keys() == {1, 2}
    assert priorities[2] / 10_000 == pytest.approx(0.5, abs=0.02)
    assert {(a.slo.ttft_s, a.slo.tpot_s) for a in workload.arrivals} == {(0.8, 0.08)}
    assert "Priorities drawn" in workload.description


def test_chat_and_code_are_judged_each_in_its_way() -> None:
    workload = settings.chat_and_code(4000, 8)
    assert workload.duration_s == 0.0
    tasks = Counter(arrival.task for arrival in workload.arrivals)
    assert tasks["chat"] / 4000 == pytest.approx(0.5, abs=0.03)
    assert {(a.task, a.slo) for a in workload.arrivals} == {
        ("chat", SLO(ttft_s=10.0, tpot_s=0.05)),
        ("code", SLO(e2e_s=30.0)),
    }
    assert max(a.prompt_tokens for a in workload.arrivals) < 2000


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (partial(settings.slos_serve, "chess", 1, 1, 1, zero_load_s), "no scenario 'chess'; there"),
        (partial(settings.fairbatching, "x", 1, 1, 1), "no dataset 'x'; there are burstgpt"),
        (partial(settings.flowprefill, "x", 1, 1, 1), "no model 'x'; there are llama3-8b"),
        (partial(settings.flowprefill_single, "x", 1, 1), "no model 'x'"),
        (partial(settings.proserve, "x", 1, 1, 1), "no dataset 'x'; there are sharegpt"),
        (partial(generate, "none", [], AtOnce(), 1, 1), "needs tasks with positive shares"),
        (partial(settings.chat_and_code, 0, 1), "requests must be at least 1"),
    ],
)
def test_what_does_not_exist_is_refused(make: partial[Workload], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


def test_a_share_of_nothing_is_refused() -> None:
    one = LengthDistribution.fixed(1)
    with pytest.raises(ValueError, match="positive shares"):
        generate("none", [Task("x", one, one, always(SLO()), share=0.0)], AtOnce(), 1, 1)
