from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from sluice.benchmarks.live.client import End, Outcome
from sluice.scheduling.request.objective import SLO
from tests.e2e.conftest import on_the_shared_ray
from tests.faults.kinds import KINDS
from tests.faults.soak import (
    ALL_CLASSES,
    BURST,
    BURST_EVERY_S,
    BURST_S,
    KILL_ROUTER,
    LEAVING,
    LOAD,
    MIN_S,
    Fault,
    Sample,
    counters_that_differ,
    growth,
    lost,
    make_load,
    soak,
    summary,
    tables,
)
from tests.light_engine import LIGHT_ENGINE

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


# What is lost.


def outcome(end: End, sent_s: float, ended_s: float | None) -> Outcome:
    made = Outcome(SLO(service_class="batch"), 10, 5, sent_s, 0.0)
    made.end, made.ended_s = end, ended_s
    return made


ROUTER = Fault(100.0, KILL_ROUTER)
REPLICA = Fault(100.0, ("kill", "replicas"))


def test_a_cut_connection_is_lost_unless_who_held_it_was_killed() -> None:
    under_way = outcome(End.CUT, 90.0, 99.5)  # by a clock that started a little later
    just_after = outcome(End.CUT, 103.0, 103.5)
    for spared in (under_way, just_after):
        assert lost([spared], [ROUTER]) == []
        assert lost([spared], [REPLICA]) == lost([spared], []) == [spared]
    for other in (outcome(End.CUT, 80.0, 98.5), outcome(End.CUT, 106.0, 110.0)):
        assert lost([other], [ROUTER]) == [other]


def test_silence_is_lost_whatever_was_killed_and_explicit_ends_never_are() -> None:
    hanging = outcome(End.SILENT, 90.0, None)
    assert lost([hanging], [ROUTER]) == [hanging]
    others = [end for end in End if end not in (End.SILENT, End.CUT)]
    assert lost([outcome(end, 90.0, 101.0) for end in others], [ROUTER]) == []


# What grows.


def samples(values: list[float], seconds: float = 2 * MIN_S, kind: str = "routers") -> list[Sample]:
    times = np.linspace(0.0, seconds, len(values))
    return [(float(at_s), {(kind, 12): value}) for at_s, value in zip(times, values, strict=True)]


def grows(values: list[float], seconds: float = 2 * MIN_S, kind: str = "routers") -> bool:
    (found,) = growth(samples(values, seconds, kind))
    return bool(found["grows"])


@given(
    st.lists(st.floats(-1.0, 1.0), min_size=40, max_size=80),
    st.floats(50.0, 500.0),
    st.floats(1.0, 4.0),
)
def test_a_leak_shows_and_a_steady_level_with_noise_does_not(
    noise: list[float], level: float, rate: float
) -> None:
    """A leak of a fifth of the level or more over the time, under noise of 1 MiB either way."""
    steady = [level + each for each in noise]
    assert not grows(steady)
    rises = np.linspace(0.0, rate * (0.1 * level + 12.0), len(noise)) + steady
    assert grows(list(rises))


def test_a_short_time_says_nothing_and_rays_own_growth_is_not_ours() -> None:
    rising = [100.0 + index for index in range(60)]
    assert grows(rising)
    assert not grows(rising, MIN_S - 1)
    assert not grows(rising, kind="Ray")
    assert not grows(rising[::-1])


# The report.


def test_a_report_is_json_and_makes_tables() -> None:
    outcomes = [outcome(end, 90.0, 101.0) for end in End if end is not End.SILENT]
    found = summary(outcomes, samples([100.0] * 80), [ROUTER], [], [])
    assert json.loads(json.dumps(found))["lost"] == 0
    assert (found["left_over"], found["growing"], found["differing"]) == ([], [], [])
    assert [each.row_count for each in tables(found)] == [2, 5, 1, 1]
    rising = summary(outcomes, samples([100.0 + n for n in range(80)]), [], ["x"], [])
    assert (rising["lost"], rising["growing"]) == (1, ["routers 12"])


PLAIN, TWO = (
    next(kind for kind in KINDS if kind.name == name)
    for name in ("plain completion", "two choices")
)
SENT = [
    outcome(end, 90.0, 101.0)
    for end in (End.ANSWERED, End.ANSWERED, End.LEFT, End.REFUSED, End.FAILED)
]
COUNTED = {"ok": 2.0, "cancelled": 1.0, "refused": 1.0, "client_error": 0.0, "failed": 1.0}
TOKENS = 5 + 10 + 2


def differing(requests: dict[str, float], tokens: float = TOKENS) -> list[str]:
    found = counters_that_differ(requests, tokens, SENT, [PLAIN, TWO, PLAIN, PLAIN, PLAIN])
    return [each.partition(":")[0] for each in found]


def test_counters_must_be_what_the_client_counted() -> None:
    assert not differing(COUNTED)
    assert not differing({**COUNTED, "ok": 3.0, "cancelled": 0.0}), "served before it noticed"
    doubled = {name: 2 * count for name, count in COUNTED.items()}
    assert differing(doubled, 3 * TOKENS) == [
        *("requests", "ok", "ok or cancelled", "refused", "failed", "generated tokens")
    ]
    assert differing({**COUNTED, "ok": 1.0}) == ["requests", "ok", "ok or cancelled"]
    assert differing({**COUNTED, "refused": 0.0, "failed": 2.0}) == ["refused", "failed"]
    assert differing(COUNTED, TOKENS - 3) == ["generated tokens"]


# All of it.


@pytest.mark.release
@pytest.mark.ray
@pytest.mark.parametrize(("minutes", "options"), [(0.1, []), (0.2, ["--faults"])])
def test_a_short_soak_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, minutes: float, options: list[str]
) -> None:
    monkeypatch.setattr("tests.faults.application.running", on_the_shared_ray)
    monkeypatch.setattr("tests.faults.soak.PAUSE_S", (2.0, 4.0))
    command = ["--minutes", str(minutes), *options, "--seed", "3", "--rate", "4", "--json"]
    done = CliRunner().invoke(soak, command)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["lost"] == 0, found["reasons"]
    assert found["left_over"] == []
    assert found["differing"] == [], found["reasons"]
    assert bool(found["faults"]) == bool(options)
    every = found["classes"]["all"]
    assert every["answered"] > 0.5 * every["sent"], found["reasons"]
    kinds = {each["process"].rpartition(" ")[0] for each in found["memory_mib"]}
    assert {"client", "routers"} <= kinds
    assert done.exit_code == 0
