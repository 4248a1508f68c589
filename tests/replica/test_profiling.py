"""Latency profiles on disk: kept, found again, and refused when they are not what they claim."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replica.config import EngineConfig, SimulatedEngineConfig
from sluice.replica.engine import EngineInfo
from sluice.replica.profiling import (
    Group,
    Sweep,
    SweepError,
    VirtualLoop,
    grid,
    profile_path,
    random_loads,
    read_profile,
    write_profile,
)
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import FitReport, LatencyProfile, kind_of

PROFILE = LatencyProfile.of(
    "key", LinearLatency(0.004, 0.0002, 1e-6), FitReport(50, 5, 0.03, 0.07, 0.99)
)


@pytest.fixture
def path(tmp_path):
    return profile_path(tmp_path, "key")


def test_a_profile_is_kept_for_everybody_and_found_by_its_key(tmp_path, path, caplog):
    assert read_profile(path, "key") is None
    write_profile(path, PROFILE)
    assert read_profile(path, "key") == PROFILE
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644
    assert profile_path(tmp_path, "other") != path
    assert read_profile(path, "other") is None
    assert "for another configuration" in caplog.text


@pytest.mark.parametrize("in_the_way", ["its folder", "itself"])
def test_a_profile_that_cannot_be_kept_is_no_failure_and_leaves_nothing(
    tmp_path, path, caplog, in_the_way
):
    if in_the_way == "its folder":
        path.parent.write_text("a file")
    else:
        path.mkdir(parents=True)
    write_profile(path, PROFILE)
    assert "cannot save the latency profile" in caplog.text
    assert path.parent.is_file() or list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "key", "a": -1, "b": 0, "c": 0, "d": 0}'])
def test_a_corrupt_profile_is_refused_with_a_reason_and_replaced(path, caplog, text):
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert read_profile(path, "key") is None
    assert "replacing the invalid latency profile" in caplog.text
    write_profile(path, PROFILE)
    assert read_profile(path, "key") == PROFILE


def test_a_profile_cut_off_or_garbled_anywhere_is_read_as_none_or_as_one(path):
    write_profile(path, PROFILE)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place], whole[:place] + b"\0\xff" + whole[place + 2 :]):
            path.write_bytes(damaged)
            # Only what stands in for a space is not noticed.
            assert read_profile(path, "key") in (None, PROFILE)


def test_a_write_that_is_broken_off_leaves_the_old_one(path, monkeypatch):
    write_profile(path, PROFILE)

    def crash(_handle):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_profile(path, LatencyProfile.of("key", LinearLatency(1.0, 1.0, 1.0)))
    assert read_profile(path, "key") == PROFILE
    assert [file.name for file in path.parent.iterdir()] == [path.name]


SWEEP_PROFILE = LatencyProfile.of("k", LinearLatency(1.0, 1.0))


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
    info = EngineInfo(
        "m", "fcfs", model_tokens, batch_tokens, sequences, kv_blocks, 16, SWEEP_PROFILE
    )
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
