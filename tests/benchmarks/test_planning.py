from __future__ import annotations

import time
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.benchmarks.options import in_processes
from sluice.benchmarks.planning.capacity import (
    MAX_TOKENS,
    Measured,
    OutOfTimeError,
    PlannedFleet,
    Played,
    Run,
    SharedClass,
    Traffic,
    Windows,
    play,
    scaled,
)
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.traces import MAX_REQUESTS
from sluice.simulation.workload import AS_RECORDED, Arrival, Workload

CHAT = SLO(ttft_s=0.115, priority=2, service_class="chat")
BATCH = SLO(service_class="batch")
FLEET = PlannedFleet(
    LinearLatency(a=0.05, b=5e-5),
    EngineConfig(max_sequences=1),
    ClusterConfig(),
    "fcfs",
    {},
    "round_robin",
    {},
    1.0,
)


def even(count: int) -> Workload:
    return Workload(
        "even", tuple(Arrival(0.5 * i, 100 + i, 2, SLO(), "", (1, 2)) for i in range(count))
    )


@given(factor=st.floats(0.1, 12), count=st.integers(1, 60), seed=st.integers(0, 9))
@example(factor=1.5, count=25, seed=0)  # The last, partial copy has a shorter span of its own.
def test_a_scaled_rate_has_so_many_times_the_requests_in_the_same_time(
    factor: float, count: int, seed: int
) -> None:
    made = scaled(even(count), factor, seed)
    whole = int(factor)
    assert whole * count <= len(made) <= (whole + 1) * count
    assert made.duration_s <= even(count).duration_s + 0.5
    assert made == scaled(even(count), factor, seed)
    assert (made.scaling == AS_RECORDED) == (factor == 1)
    # Every copy has every prompt once, and shares its prefix with no other copy.
    prompts = [arrival.prompt_tokens for arrival in made.arrivals]
    for own in range(count):
        assert whole <= prompts.count(100 + own) <= whole + 1
    prefixes = {arrival.block_hashes for arrival in made.arrivals}
    assert len(prefixes) <= whole + 1
    assert len({hashes[0] for hashes in prefixes}) == len(prefixes)


def test_copies_do_not_arrive_together() -> None:
    burst = Workload("burst", tuple(Arrival(when, 10, 1, SLO()) for when in (0, 0, 0, 10)))
    times = [arrival.arrival_s for arrival in scaled(burst, 3, seed=1).arrivals]
    assert max(times.count(when) for when in times) == 3
    assert scaled(burst, 3, seed=1) != scaled(burst, 3, seed=2)


def test_scaling_is_bounded() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_REQUESTS}; take fewer"):
        scaled(even(1_000), 1_000, 0)


def test_the_tokens_of_a_workload_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    rows = [f"2024-05-10 00:00:{i:02},10,10000000" for i in range(11)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    traffic = Traffic(path, 11, 1.0, 1.0, (SharedClass(CHAT, 1.0),))
    with pytest.raises(
        ValueError, match=f"11 requests have 110000000 output tokens, more than {MAX_TOKENS}"
    ):
        traffic.workload(1)
    assert len(traffic._replace(limit=10).workload(1)) == 10


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A request of 0.1 s every 0.03 s."""
    path = tmp_path / "even.csv"
    rows = [f"2024-05-10 00:00:{0.03 * i:09.6f},1000,1" for i in range(300)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A request every 0.03 s for 9 s, each with a prompt of its own length."""
    path = tmp_path_factory.mktemp("traces") / "day.csv"
    rows = [f"2024-05-10 00:00:{0.03 * i:09.6f},{1000 + i},1" for i in range(300)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def measure(run: Run) -> Measured:
    """All parts of the traffic, one after the other."""
    parts = [play(run._replace(part=part)) for part in range(run.traffic.parts)]
    return Measured.of(parts, run.traffic.classes)


def run(trace: Path, replicas: int, seed: int = 1, stop_at_s: float = inf) -> Run:
    shared = (SharedClass(CHAT, 3.0), SharedClass(BATCH, 1.0))
    traffic = Traffic(trace, 200, 1.0, 1.0, shared)
    return Run(traffic, FLEET, {"replicas": replicas}, seed, 0, stop_at_s)


def test_requests_are_drawn_into_classes_by_share(trace: Path) -> None:
    workload = run(trace, 1).traffic.workload(3)
    assert len(workload) == 200
    chat = [arrival for arrival in workload.arrivals if arrival.slo == CHAT]
    assert 120 < len(chat) < 180
    assert {arrival.task for arrival in chat} == {"chat"}
    assert workload == run(trace, 1).traffic.workload(3)
    assert workload != run(trace, 1).traffic.workload(4)


def test_a_stretched_trace_is_slower_before_it_is_scaled(trace: Path) -> None:
    traffic = run(trace, 1).traffic._replace(stretch=2.0, rate_scale=2.0)
    workload = traffic.workload(1)
    assert len(workload) == 400
    assert workload.duration_s == pytest.approx(2 * 0.03 * 199, abs=2 * 0.03)
    assert workload.scaling == (
        "time stretched by 2, then rate times 2 by copies turned in time (seed 1)"
    )


def test_a_run_is_measured_by_class(trace: Path) -> None:
    few, enough = measure(run(trace, 3)), measure(run(trace, 4))
    assert enough.whole["attainment"] > 0.95
    assert few.whole["attainment"] < 0.5
    # The batch class states no objective, so it attains whatever happens.
    assert few.classes["batch"]["attainment"] == 1.0
    assert few.classes["chat"]["attainment"] < 0.2
    counted = sum(figures["requests"] for figures in few.classes.values())
    assert counted == few.whole["requests"] == 200
    # Four replicas have 0.12 s for each request of 0.1 s.
    assert enough.whole["utilisation"] == pytest.approx(0.1 / 0.12, rel=0.05)
    assert enough.whole["ttft_p50_ms"] == pytest.approx(102, rel=0.03)
    assert enough.whole["failed"] == 0


def test_requests_beyond_the_kv_fail_and_do_not_attain(trace: Path) -> None:
    small = run(trace, 4)
    fleet = FLEET._replace(engine=EngineConfig(kv_blocks=60))  # 960 tokens
    figures = measure(small._replace(fleet=fleet))
    assert figures.whole["failed"] == 200
    assert figures.whole["attainment"] == 0


def test_a_run_that_lasts_too_long_is_given_up(trace: Path) -> None:
    with pytest.raises(OutOfTimeError):
        measure(run(trace, 4, stop_at_s=time.monotonic()))


def test_processes_measure_what_one_does_in_order(trace: Path) -> None:
    runs = [run(trace, replicas, seed) for replicas, seed in ((4, 1), (3, 2))]
    with in_processes(play, 1) as alone, in_processes(play, 2) as shared:
        assert repr(list(shared(runs))) == repr(list(alone(runs)))


def of_day(trace: Path, windows: Windows | None, rate_scale: float = 1.0) -> Traffic:
    return Traffic(trace, 300, rate_scale, 1.0, (SharedClass(CHAT, 1.0),), windows)


def all_played(traffic: Traffic, seed: int) -> list[Played]:
    return [traffic.played(seed, part) for part in range(traffic.parts)]


@given(parts=st.integers(1, 6), margin_s=st.floats(0, 3), seed=st.integers(0, 99))
def test_windows_are_of_all_parts_of_the_trace_and_judge_no_margin(
    day: Path, parts: int, margin_s: float, seed: int
) -> None:
    whole = of_day(day, None).workload(seed)
    windows = all_played(of_day(day, Windows(parts, 1.0, margin_s)), seed)
    assert len(windows) == parts
    for number, own in enumerate(windows):
        judged = [own.workload.arrivals[key] for key in own.judged()]
        # A request each 30 ms; its prompt says which one it is.
        assert len(judged) in (33, 34)
        places = [arrival.prompt_tokens - 1000 for arrival in judged]
        assert places == list(range(places[0], places[0] + len(places)))
        part = whole.duration_s / parts
        assert part * number <= 0.03 * places[0] and 0.03 * places[-1] <= part * (number + 1)
        beside = len(own.workload) - len(judged)
        first, last = 0.03 * places[0], whole.duration_s - 0.03 * places[-1]
        expected_s = min(margin_s, first) + min(margin_s, last)
        assert beside == pytest.approx(expected_s / 0.03, abs=3)
    again = all_played(of_day(day, Windows(parts, 1.0, margin_s)), seed)
    assert [each.workload for each in again] == [each.workload for each in windows]


def test_copies_stay_in_the_window_of_their_request(day: Path) -> None:
    for own in all_played(of_day(day, Windows(3, 1.0, 0.5), rate_scale=4.0), 1):
        assert len(own.workload) >= 4 * 33
        assert own.workload.duration_s <= 2.0 + 0.06
        prompts = [own.workload.arrivals[key].prompt_tokens for key in own.judged()]
        assert 100 < len(prompts) < 170 and max(prompts) - min(prompts) <= 67


def test_windows_that_do_not_fit_are_refused(day: Path) -> None:
    with pytest.raises(ValueError, match=r"5 windows of 2 s need 10 s of traffic, and the .* 8\.9"):
        of_day(day, Windows(5, 2.0, 0.0)).played(1)


def test_windows_without_a_request_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    rows = ["2024-05-10 00:00:00,10,1", "2024-05-10 10:00:00,10,1"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    traffic = of_day(path, Windows(2, 1.0, 0.0))
    with pytest.raises(ValueError, match="no request of the trace comes in any of the windows"):
        measure(Run(traffic, FLEET, {"replicas": 1}, 3, 0, inf))


def test_windows_measure_what_the_whole_trace_does(tmp_path: Path) -> None:
    """The load swings, requests are late where it is high, and a quarter of the time shows it, if
    what came shortly before is played, too."""
    path = tmp_path / "swing.csv"
    times_s = np.cumsum([0.02 + 0.02 * (i % 200 < 100) for i in range(4_000)])
    rows = [f"2024-05-10 00:{int(t // 60):02}:{t % 60:09.6f},1000,1" for t in times_s]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    shared = (SharedClass(CHAT, 1.0),)

    def attainment(windows: Windows | None) -> float:
        traffic = Traffic(path, 4_000, 1.0, 1.0, shared, windows)
        return measure(Run(traffic, FLEET, {"replicas": 4}, 1, 0, inf)).whole["attainment"]

    whole = attainment(None)
    assert 0.3 < whole < 0.4
    assert attainment(Windows(5, 6.0, 6.0)) == pytest.approx(whole, abs=0.03)
    assert attainment(Windows(5, 6.0, 0.0)) > whole + 0.03
