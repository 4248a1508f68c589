from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from sluice.benchmarks.live.replay.client import End, Outcome
from sluice.benchmarks.live.replay.kinds import KINDS
from sluice.benchmarks.live.replay.load import LIGHT_ENGINE
from sluice.benchmarks.live.soak.batches import LINE_TOKENS, LINES
from sluice.benchmarks.live.soak.command import soak
from sluice.benchmarks.live.soak.load import (
    ALL_CLASSES,
    BURST,
    BURST_EVERY_S,
    BURST_S,
    LEAVING,
    LOAD,
    configuration,
    make_load,
)
from sluice.benchmarks.live.soak.prometheus import PROGRAM, agrees, comparison, expected, scraping
from sluice.benchmarks.live.soak.report import Injury, is_well, lost, summary, tables
from sluice.benchmarks.live.soak.trends import APPLICATION, LEAST_S, Sample, Series, trend, trends
from sluice.scheduling.request.objective import SLO
from tests.e2e.conftest import on_the_shared_ray
from tests.own_ray import shared_ray

MEMORY = Series("routers", "12", "memory MiB")


# The load.


def test_the_load_has_every_kind_and_class_and_bursts_over_what_the_engines_can() -> None:
    load = make_load(1_200.0, 10.0, seed=2)
    arrivals = load.workload.arrivals
    assert {kind.name for kind in load.kinds} == {kind.name for kind in KINDS}
    assert {each.slo.service_class for each in arrivals} == set(ALL_CLASSES)
    times = np.array([each.arrival_s for each in arrivals])
    burst = times % BURST_EVERY_S >= BURST_EVERY_S - BURST_S
    share = BURST_S / BURST_EVERY_S
    assert (~burst).sum() / (1_200 * (1 - share)) == pytest.approx(10.0, rel=0.05)
    assert burst.sum() / (1_200 * share) == pytest.approx(10.0 * BURST / LOAD, rel=0.1)
    streams = sum(kind.streams for kind in load.kinds)
    leaving = [leave for leave in load.leaves if leave is not None]
    assert len(leaving) / streams == pytest.approx(LEAVING, abs=0.01)
    longest = max(each.prompt_tokens + each.output_tokens for each in arrivals)
    assert longest <= LIGHT_ENGINE["max_model_tokens"]


def test_what_is_served() -> None:
    config = configuration(5, 2, Path("/batches"))
    assert (config.replica.count, config.router.replicas) == (5, 2)
    assert set(config.router.classes) == set(ALL_CLASSES)


# What is lost.


def outcome(end: End, sent_s: float, ended_s: float | None) -> Outcome:
    made = Outcome(SLO(service_class="batch"), 10, 5, sent_s, 0.0)
    made.end, made.ended_s = end, ended_s
    return made


ROUTER = Injury(100.0, "kill router", "r", 0.0)
REPLICA = Injury(100.0, "kill replica", "r", 0.0)


def test_a_cut_connection_is_lost_unless_who_held_it_was_killed() -> None:
    under_way = outcome(End.CUT, 90.0, 100.5)
    just_after = outcome(End.CUT, 103.0, 103.5)
    for spared in (under_way, just_after):
        assert lost([spared], [ROUTER]) == []
        assert lost([spared], [REPLICA]) == lost([spared], []) == [spared]
    for other in (outcome(End.CUT, 80.0, 99.0), outcome(End.CUT, 106.0, 110.0)):
        assert lost([other], [ROUTER]) == [other]


def test_silence_is_lost_whatever_was_killed_and_explicit_ends_never_are() -> None:
    hanging = outcome(End.SILENT, 90.0, None)
    assert lost([hanging], [ROUTER]) == [hanging]
    others = [end for end in End if end not in (End.SILENT, End.CUT)]
    assert lost([outcome(end, 90.0, 101.0) for end in others], [ROUTER]) == []


# What grows.


def points(
    values: list[float], seconds: float = 2 * LEAST_S, load: list[float] | None = None
) -> np.ndarray:
    times = np.linspace(0.0, seconds, len(values))
    load = load or [30.0] * len(values)
    return np.column_stack([times, values, load, np.maximum.accumulate(load)])


@given(
    st.lists(st.floats(-1.0, 1.0), min_size=40, max_size=80),
    st.floats(50.0, 500.0),
    st.floats(0.2, 4.0),
)
def test_a_leak_shows_and_a_steady_level_with_noise_does_not(
    noise: list[float], level: float, rate: float
) -> None:
    """A leak of a fifth of the level or more over the time, under noise of 1 MiB either way."""
    steady = [level + each for each in noise]
    assert not trend(MEMORY, points(steady)).grows
    rises = np.linspace(0.0, rate * (0.1 * level + 12.0), len(noise)) + steady
    found = trend(MEMORY, points(list(rises)))
    assert found.grows == (
        found.last - found.first > max(8.0, 0.04 * found.first) and found.slope > 2 * found.error
    )
    if rate >= 1:
        assert found.grows


def test_what_requests_under_way_hold_and_what_is_kept_of_it_is_no_growth() -> None:
    """A backlog that builds up and goes, at 1 MiB and 5 handles a request."""
    load = [20.0 + 60.0 * math.sin(index / 10) ** 2 + index % 5 for index in range(60)]
    handles = trend(MEMORY._replace(what="handles"), points([5 * now for now in load], load=load))
    assert not handles.grows and handles.slope == pytest.approx(0.0, abs=1e-6)
    held = [100.0 + most for most in np.maximum.accumulate(load)]
    found = trend(MEMORY, points(held, load=load))
    assert not found.grows and found.slope == pytest.approx(0.0, abs=1e-6)
    leaking = [each + 0.5 * index for index, each in enumerate(held)]
    found = trend(MEMORY, points(leaking, load=load))
    assert found.grows and found.slope == pytest.approx(0.5 * 59 / (2 * LEAST_S / 3600))


def test_the_load_of_a_sample_that_could_not_ask_is_that_of_the_one_before() -> None:
    backlog = Series(APPLICATION, "", "sluice_in_flight_requests")
    load = [float(n % 30) for n in range(60)]
    samples = [
        Sample(10.0 * n, {MEMORY: 100.0 + load[n], backlog: load[n]} if n % 7 else {MEMORY: 110.0})
        for n in range(60)
    ]
    told = {each.series: each for each in trends(samples)}
    assert set(told) == {MEMORY, backlog}
    assert not any(each.grows for each in told.values())


def test_the_slope_is_per_hour_and_that_of_a_straight_line() -> None:
    found = trend(MEMORY, points([100.0 + 0.5 * index for index in range(41)], seconds=1_800.0))
    assert found.slope == pytest.approx(40.0)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert (found.first, found.last) == (102.25, 117.75)


def test_a_short_time_says_nothing_and_rays_own_growth_is_not_ours() -> None:
    rising = [100.0 + index for index in range(60)]
    assert not trend(MEMORY, points(rising, LEAST_S - 1)).grows
    assert trend(MEMORY, points(rising)).grows
    assert not trend(Series("Ray", "1", "memory MiB"), points(rising)).grows
    assert not trend(MEMORY, points(rising[::-1])).grows
    assert trend(Series(APPLICATION, "", "sluice_reservations"), points(rising)).grows
    assert not trend(Series(APPLICATION, "", "sluice_resumes_total"), points(rising)).grows


def test_a_process_that_was_not_there_for_half_of_the_time_is_left_out() -> None:
    other = Series("routers", "13", "memory MiB")
    samples = [Sample(10.0 * n, {MEMORY: 1.0} | ({other: 1.0} if n < 9 else {})) for n in range(20)]
    assert [each.series for each in trends(samples)] == [MEMORY]


# The report.


def test_a_report_is_json_makes_tables_and_says_whether_all_is_well() -> None:
    outcomes = [outcome(end, 90.0, 101.0) for end in End if end is not End.SILENT]
    kinds = [KINDS[0]] * len(outcomes)
    samples = [Sample(10.0 * n, {MEMORY: 100.0}) for n in range(80)]
    found = summary(outcomes, kinds, samples, [ROUTER], {}, {})
    assert json.loads(json.dumps(found)) == found
    assert is_well(found)
    assert len(tables(found)) == 4
    assert found["ends"][KINDS[0].name]["answered: unfinished"] == 1

    def well(
        samples: list[Sample] = samples,
        injuries: tuple[Injury, ...] = (ROUTER,),
        left: dict[str, float] | None = None,
        **lines: int,
    ) -> bool:
        return is_well(summary(outcomes, kinds, samples, injuries, left or {}, lines))

    assert well(answered=19, failed=1)
    assert not well(injuries=()), "a cut one"
    assert not well(answered=19, missing=1)
    assert not well(left={"sluice_reservations": 1.0})
    assert not well(left={"sluice_reservations": math.nan}), "it could not be asked"
    assert not well([Sample(10.0 * n, {MEMORY: 100.0 + n}) for n in range(80)])


# What Prometheus scraped.

PLAIN, TWO = (
    next(kind for kind in KINDS if kind.name == name)
    for name in ("plain completion", "two choices")
)
KINDS_SENT = [PLAIN, TWO, PLAIN, PLAIN, PLAIN]
SENT = [
    outcome(end, 90.0, 101.0)
    for end in (End.ANSWERED, End.ANSWERED, End.LEFT, End.REFUSED, End.FAILED)
]
SCRAPED = {"ok": 22.0, "cancelled": 1.0, "refused": 1.0, "failed": 1.0}
TOKENS = 5 + 10 + 2 + 20 * LINE_TOKENS


def differing(requests: dict[str, float], tokens: float = TOKENS) -> list[str]:
    counts = expected(requests, tokens, SENT, KINDS_SENT, {"answered": 20})
    return [count.what for count in counts if count.differs]


def test_counters_must_be_what_the_clients_counted() -> None:
    assert not differing(SCRAPED)
    assert not differing({**SCRAPED, "ok": 23.0, "cancelled": 0.0}), "served before it noticed"
    doubled = {name: 2 * count for name, count in SCRAPED.items()}
    assert differing(doubled, 2 * TOKENS) == [
        *("requests", "ok", "ok or cancelled", "refused", "failed", "generated tokens")
    ]
    assert differing({**SCRAPED, "ok": 21.0}) == ["requests", "ok", "ok or cancelled"]
    assert differing({**SCRAPED, "refused": 0.0, "failed": 2.0}) == ["refused", "failed"]
    assert differing(SCRAPED, TOKENS - 3) == ["generated tokens"]


def needs_prometheus() -> None:
    if shutil.which(PROGRAM) is None:
        if os.environ.get("CI"):
            pytest.fail(f"{PROGRAM} is missing: install the Debian package of this name")
        pytest.skip(f"needs {PROGRAM}, the Debian package of this name")


@pytest.mark.parametrize("falls", [False, True])
def test_a_counter_that_falls_shows(tmp_path: Path, falls: bool) -> None:
    needs_prometheus()
    registry = CollectorRegistry()
    Gauge("sluice_controller_up", "Up.", registry=registry).set(1)
    tokens = Counter("sluice_tokens", "Tokens.", ["type"], registry=registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with scraping(url, tmp_path, every_s=1.0) as scraper:
            tokens.labels("generated").inc(7)
            scraper.wait_until_fresh()
            assert scraper.value("sum(sluice_tokens_total)") == 7
            if falls:
                tokens.clear()
            tokens.labels("generated").inc(3)
            found = comparison(scraper, [], [], {})
    finally:
        server.shutdown()
        thread.join()
    assert found["falls"] == ({"sluice_tokens_total": 1} if falls else {})
    (count,) = [each for each in found["counts"] if each["what"] == "generated tokens"]
    assert (count["scraped"], count["differs"]) == (3 if falls else 10, True)
    assert not agrees(found)


def test_scraping_and_faults_do_not_go_together() -> None:
    done = CliRunner().invoke(soak, ["--scrape", "--faults"])
    assert done.exit_code == 2 and "--faults" in done.output


# All of it.


@pytest.mark.ray
def test_prometheus_counts_what_the_clients_of_a_short_soak_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_prometheus()
    monkeypatch.setattr("sluice.benchmarks.live.application.running", on_the_shared_ray)
    monkeypatch.setattr("sluice.benchmarks.live.application.free_port", shared_ray.serve_port)
    command = ["--minutes", "0.2", "--scrape", "--seed", "3", "--rate", "4", "--json"]
    done = CliRunner().invoke(soak, command)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    scraped = found["prometheus"]
    assert scraped["falls"] == {}
    assert [count for count in scraped["counts"] if count["differs"]] == [], found["ends"]
    sizes = {count["what"]: count["scraped"] for count in scraped["counts"]}
    assert sizes["ok"] > LINES and sizes["generated tokens"] > LINES * LINE_TOKENS
    assert done.exit_code == 0


@pytest.mark.ray
def test_a_short_soak_with_faults_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.benchmarks.live.application.running", on_the_shared_ray)
    monkeypatch.setattr("sluice.benchmarks.live.application.free_port", shared_ray.serve_port)
    monkeypatch.setattr("sluice.benchmarks.live.soak.faults.PAUSE_S", (2.0, 4.0))
    command = ["--minutes", "0.2", "--faults", "--seed", "3", "--rate", "4", "--json"]
    done = CliRunner().invoke(soak, command)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["lost"] == 0, found["ends"]
    assert found["left_over"] == {}
    assert found["injuries"], "nothing was hurt"
    assert found["batch_lines"]["answered"] >= LINES - found["batch_lines"].get("failed", 0)
    answered = sum(counts.get("answered", 0) for counts in found["ends"].values())
    assert answered > 0.5 * found["all"]["sent"], found["ends"]
    kinds = {name.split()[0] for name in found["samples"] if name != "at_s"}
    assert {"client", "controller", "replicas", "routers", "HAProxy", "Serve"} <= kinds
    assert done.exit_code == 0
