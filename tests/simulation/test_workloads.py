"""A workload and what can be done to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.request.objective import SLO
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


def test_statistics_where_there_is_no_rate() -> None:
    assert (of().rate, of().duration_s, of().mean_prompt_tokens) == (0, 0, 0)
    assert of(3.0).rate == 0
    assert of(3.0, 3.0).rate == float("inf")


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


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match="request 0: arrives at -1"):
        of(-1.0)


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


def test_stretching_reaches_a_wanted_rate() -> None:
    workload = of(0, 1, 3, 7)
    assert stretched(workload, workload.rate / 4.0).rate == pytest.approx(4.0)


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


@pytest.mark.parametrize("share", [0, -1, 1.01, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share must be above 0"):
        thinned(of(0), share, 1)


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan")])
def test_a_factor_out_of_range_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="factor must be positive"):
        stretched(of(0), factor)


@pytest.mark.parametrize(("start_s", "seconds"), [(-1, 1), (0, 0), (float("nan"), 1)])
def test_a_window_out_of_range_is_refused(start_s: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="a window needs"):
        window(of(0), start_s, seconds)


def test_objectives_are_assigned_by_rule_and_the_rule_is_kept() -> None:
    code = SLO(e2e_s=30.0)
    workload = Workload("mix", (Arrival(0, 5, 5, CHAT, "code"), Arrival(1, 5, 5, CHAT, "chat")))
    judged = with_objectives(
        workload, lambda a: code if a.task == "code" else CHAT, "Code by its end."
    )
    assert [arrival.slo for arrival in judged.arrivals] == [code, CHAT]
    assert judged.description == "Code by its end."


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


@pytest.mark.parametrize("shares", [{}, {1: 0.0}, {1: -1.0, 2: 1.0}])
def test_shares_that_are_none_are_refused(shares: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="shares must be positive"):
        with_priorities(of(0), shares, 1)


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


def test_merging_orders_by_time_and_keeps_prefixes_apart() -> None:
    left = Workload("left", (Arrival(0, 9, 1, CHAT, "", (7, 8)), Arrival(4, 9, 1, CHAT, "", (7,))))
    right = stretched(Workload("right", (Arrival(1, 9, 1, CHAT, "", (7,)),)), 2.0)
    both = merged("both", [left, right])
    assert [arrival.arrival_s for arrival in both.arrivals] == [0, 2, 4]
    first, other, again = (arrival.block_hashes for arrival in both.arrivals)
    assert first[0] == again[0]
    assert other[0] not in first
    assert both.scaling == "left: as recorded; right: time stretched by 2"


def test_workloads_of_different_block_sizes_do_not_merge() -> None:
    with pytest.raises(ValueError, match="one block size"):
        merged("both", [of(0), replace(of(0), block_tokens=16)])
    with pytest.raises(ValueError, match="one block size"):
        merged("none", [])
