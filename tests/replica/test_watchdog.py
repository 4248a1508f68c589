"""The watchdog over one engine, with a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.requests import EngineDeadError
from sluice.replica.engine import EngineInfo
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.server import (
    FIRST_STEPS,
    LONGEST_STEPS,
    OWN_GAP_S,
    PREDICTED_STEPS,
    REPLACED_AFTER_S,
    Watchdog,
    longest_step_s,
)
from sluice.scheduling.fleet.state import EngineState
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from tests.examples import examples

HUNG_AFTER_S = 5.0
LOOK_S = 0.5


def info(step_s: float, token_s: float = 1e-9) -> EngineInfo:
    profile = LatencyProfile.of("k", LinearLatency(step_s, token_s))
    return EngineInfo("model", "fcfs", 8192, 2048, 256, 4096, 16, profile)


class TableOnly:
    """What the watchdog sees of an engine."""

    def __init__(self) -> None:
        self.table = StateTable.create(2)
        self.waits_s: float | None = None
        self.moves = asyncio.Event()
        self.pulses = 0
        self.steps = 0

    def step(self, now_s: float, **summary: float) -> None:
        self.steps += 1
        usual = {"predicted_step_s": 0.01, "correction": 1.0, "fixed_correction": 1.0}
        self.table.write(updated_s=now_s, steps=self.steps, **{**usual, **summary})

    def state(self) -> EngineState:
        return self.table.read()

    def waits_since_s(self) -> float | None:
        return self.waits_s

    async def pulse(self) -> None:
        self.pulses += 1
        await self.moves.wait()


class Bench:
    """An engine with a watchdog that is looked at as the reporter does."""

    def __init__(self, step_s: float = 0.01, warm: bool = True) -> None:
        self.now_s = 100.0
        self.engine = TableOnly()
        self.dog = Watchdog(self.engine, info(step_s), HUNG_AFTER_S, lambda: self.now_s)  # type: ignore[arg-type]
        for _ in range(FIRST_STEPS if warm else 0):
            self.engine.step(self.now_s)

    def pass_by(self, seconds: float) -> bool:
        """Let time go by without a step; whether the engine stands still at its end."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + LOOK_S)
            hung = self.dog.look()
        return hung

    def hang(self) -> None:
        self.engine.waits_s = self.now_s
        assert self.pass_by(HUNG_AFTER_S + LOOK_S)


async def test_no_step_while_requests_wait() -> None:
    bench = Bench()
    assert not bench.pass_by(1000), "nobody waits"
    bench.engine.waits_s = bench.now_s
    assert not bench.pass_by(HUNG_AFTER_S)
    assert bench.pass_by(LOOK_S)
    bench.engine.step(bench.now_s)
    assert not bench.pass_by(HUNG_AFTER_S)
    assert bench.pass_by(LOOK_S), "another time"


@pytest.mark.parametrize(
    ("step", "bench", "patience_s"),
    [
        ({"predicted_step_s": 2.0}, Bench, PREDICTED_STEPS * 2.0),
        ({"correction": 3.0}, lambda: Bench(step_s=1.0), LONGEST_STEPS * 3.0),
        ({"fixed_correction": 3.0}, lambda: Bench(step_s=1.0), LONGEST_STEPS * 3.0),
        ({}, lambda: Bench(warm=False), REPLACED_AFTER_S),
    ],
)
async def test_slow_engines_get_more_time(
    step: dict[str, float], bench: Callable[[], Bench], patience_s: float
) -> None:
    """By the last step's prediction, by the longest step, and while code may be compiled."""
    slow = bench()
    slow.engine.step(slow.now_s, **step)
    slow.engine.waits_s = slow.now_s
    assert not slow.pass_by(patience_s)
    assert slow.pass_by(LOOK_S)


async def test_a_state_that_cannot_be_read_is_no_news() -> None:
    bench = Bench()
    bench.engine.waits_s = bench.now_s
    bench.dog.look()
    bench.engine.table._sequence += 1
    assert not bench.pass_by(HUNG_AFTER_S)
    assert bench.pass_by(LOOK_S)
    bench.engine.table._sequence += 1
    bench.engine.step(bench.now_s)
    assert not bench.dog.look()


async def test_a_process_that_stood_still_itself_blames_nobody() -> None:
    bench = Bench()
    bench.engine.waits_s = bench.now_s
    bench.now_s += 10 * OWN_GAP_S
    assert not bench.dog.look()
    assert not bench.pass_by(HUNG_AFTER_S)
    assert bench.pass_by(LOOK_S)


async def test_an_engine_that_all_have_left_is_asked() -> None:
    """Without a request there are no steps to see."""
    bench = Bench()
    bench.hang()
    assert bench.engine.pulses == 0
    bench.engine.waits_s = None
    assert bench.pass_by(100)
    await asyncio.sleep(0)
    assert bench.pass_by(100)
    await asyncio.sleep(0)
    assert bench.engine.pulses == 1, "one question at a time"
    bench.engine.moves.set()
    await asyncio.sleep(0.01)
    assert not bench.dog.look()
    bench.engine.waits_s = bench.now_s - 50
    assert not bench.pass_by(HUNG_AFTER_S), "it has just answered"
    bench.dog.stop()


async def test_an_engine_that_fails_over_the_question_still_stands_still() -> None:
    bench = Bench()

    async def dies() -> None:
        raise EngineDeadError("gone")

    bench.engine.pulse = dies  # type: ignore[method-assign]
    bench.hang()
    bench.engine.waits_s = None
    assert bench.dog.look()
    await asyncio.sleep(0.01)
    assert bench.dog.look()
    bench.dog.stop()


async def test_serve_is_to_replace_what_hangs_for_long_whether_or_not_anybody_waits() -> None:
    bench = Bench()
    bench.hang()
    bench.dog.check()
    bench.engine.waits_s = None
    bench.pass_by(REPLACED_AFTER_S - 2 * HUNG_AFTER_S)
    bench.dog.check()
    bench.pass_by(2 * HUNG_AFTER_S)
    with pytest.raises(EngineDeadError, match="engine hung: no step for"):
        bench.dog.check()
    bench.engine.step(bench.now_s)
    bench.dog.check()
    bench.dog.stop()


def test_the_longest_step_is_of_a_full_batch() -> None:
    assert longest_step_s(info(1.0, 0.001)) == pytest.approx(1.0 + 0.001 * (2048 + 256))


@given(
    steps=st.lists(st.floats(0.01, 4.9), min_size=1, max_size=30),
    stop_s=st.floats(5.6, 60),
)
@settings(max_examples=examples(100))
def test_no_false_alarm_and_none_that_does_not_come(steps: list[float], stop_s: float) -> None:
    """Requests always wait, and steps come at any times within the patience; then they stop."""
    bench = Bench()
    bench.engine.waits_s = bench.now_s
    for seconds in steps:
        assert not bench.pass_by(seconds)
        bench.engine.step(bench.now_s)
    assert bench.pass_by(stop_s)
