"""The loads of a sweep fit every engine, and its steps are told apart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.config import EngineConfig, SimulatedEngineConfig
from sluice.replica.engine import EngineInfo
from sluice.replica.profiling import Group, Sweep, SweepError, VirtualLoop, grid, random_loads
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile, kind_of

PROFILE = LatencyProfile.of("k", LinearLatency(1.0, 1.0))


@given(
    model_tokens=st.integers(64, 131_072),
    batch_tokens=st.integers(16, 16_384),
    sequences=st.integers(1, 2_048),
    kv_blocks=st.integers(64, 100_000),
    seed=st.integers(0, 9),
)
def test_every_load_is_one_that_the_engine_can_hold(
    model_tokens: int, batch_tokens: int, sequences: int, kv_blocks: int, seed: int
) -> None:
    info = EngineInfo("m", "fcfs", model_tokens, batch_tokens, sequences, kv_blocks, 16, PROFILE)
    for load in (*grid(info), *random_loads(info, seed)):
        held = 0
        for count, prompt, output in load:
            assert count >= 1 and prompt >= 1 and output >= 1
            assert prompt + output <= model_tokens
            held += count * (prompt + output)
        # At least one request of each group, however little room there is.
        smallest = sum(group.prompt_tokens + group.output_tokens for group in load)
        assert held <= max(kv_blocks * 16, smallest)


def run(config: EngineConfig, *stages: tuple[str, list[tuple[Group, ...]]]) -> Sweep:
    """The stages run, in virtual time, with a batch log in the configured folder."""

    async def all_stages() -> None:
        engine = SimulatedEngine(config, "r", 64, asyncio.get_running_loop().time)
        info = await engine.start()
        sweep = Sweep(engine, info, Path(config.batch_log or "") / "r.jsonl")
        try:
            for name, loads in stages:
                await sweep.run(name, loads)
        finally:
            await engine.stop()
        found.append(sweep)

    found: list[Sweep] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(all_stages())
    return found[0]


def test_the_steps_of_each_stage_are_told_apart(tmp_path: Path) -> None:
    config = EngineConfig(kind="simulated", batch_log=tmp_path)
    sweep = run(
        config,
        ("first", [(Group(1, 100, 1),)]),
        ("second", [(Group(3, 10, 5),), (Group(2, 10, 9), Group(1, 4000, 1))]),
    )
    (only,) = sweep.samples("first")
    assert (only.prefill_tokens, only.decodes) == (100, 0)
    truth = config.simulated
    # Fixed time, and each token both new and context.
    expected_s = truth.step_s + 100 * (truth.token_s + truth.context_token_s)
    assert only.seconds == pytest.approx(expected_s)
    kinds = {kind_of(step) for step in sweep.samples("second")}
    assert kinds == {"prefill", "decode", "mixed"}
    with pytest.raises(SweepError, match="third"):
        sweep.samples("third")


def test_a_refusal_of_the_engine_is_told(tmp_path: Path) -> None:
    small = SimulatedEngineConfig(max_model_tokens=64)
    config = EngineConfig(kind="simulated", batch_log=tmp_path, simulated=small)
    with pytest.raises(SweepError, match="maximum context length is 64"):
        run(config, ("first", [(Group(1, 100, 1),)]))
