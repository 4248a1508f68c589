"""The shared state table: consistent under a concurrent writer, and clear when it is misused."""

from __future__ import annotations

import multiprocessing
import platform
import time

import numpy as np
import pytest

from sluice.replica.scheduler.state_table import (
    CALL_RING,
    StateTable,
    TableFullError,
    membarrier,
    reader_fence,
)
from sluice.scheduling.fleet.prefix import HELD, HELD_SLOTS
from sluice.scheduling.fleet.state import RUNNING, WAITING
from sluice.scheduling.latency.model import (
    LinearLatency,
    PrefillDecodeLatency,
    RooflineLatency,
    StepSample,
)
from sluice.scheduling.request.objective import SLO
from tests.replica.rows import running


def _write_steps(path, stop):
    """Keep four requests at equal counts, and the summary at the same count: one change a step."""
    table = StateTable.open(path)
    slots = [table.allocate(key, SLO(), 0.0, 10) for key in range(4)]
    step = 0
    while not stop.is_set():
        step += 1
        table.write(running(slots, step, step, step, None), steps=step, updated_s=float(step))
        # A step of a real engine takes far longer than a write.
        time.sleep(0.0002)


@pytest.mark.parametrize("fence", [reader_fence, lambda: membarrier(platform.machine())])
def test_readers_see_only_whole_steps_of_a_writer_in_another_process(tmp_path, monkeypatch, fence):
    monkeypatch.setattr("sluice.replica.scheduler.state_table.reader_fence", fence)
    path = tmp_path / "state"
    reader = StateTable.create(16, path)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    writer = context.Process(target=_write_steps, args=(path, stop))
    writer.start()
    try:
        seen = set()
        deadline = time.monotonic() + 120
        while len(seen) < 300 and time.monotonic() < deadline:
            try:
                state = reader.read()
            except RuntimeError:  # a busy machine took the writer off its core
                continue
            steps = int(state.summary["steps"])
            if len(state.rows) == 4 and steps:
                counts = {
                    int(value)
                    for name in ("computed_tokens", "emitted_tokens", "kv_blocks")
                    for value in state.rows[name]
                }
                assert counts == {steps} == {int(state.summary["updated_s"])}
                seen.add(steps)
        assert len(seen) == 300
    finally:
        stop.set()
        writer.join(30)
        writer.kill()


def test_rows_follow_a_request_through_its_life():
    table = StateTable.create(4, clock=lambda: 42.5)
    slot = table.allocate(77, SLO(ttft_s=0.5, priority=3), 12.0, 100)
    assert table.read().now_s == 42.5
    row = table.read().rows[0]
    assert (row["key"], row["phase"], row["pending_tokens"]) == (77, WAITING, 100)
    assert (row["ttft_s"], row["tpot_s"], row["priority"]) == (0.5, np.inf, 3)
    assert np.isnan(row["first_token_s"])
    table.write(running(slot, 100, 1, 7, 12.25))
    row = table.read().rows[0]
    assert (row["phase"], row["first_token_s"], row["kv_blocks"]) == (RUNNING, 12.25, 7)
    table.free(slot)
    assert len(table.read().rows) == 0


def test_held_chunks_are_read_where_they_were_written(tmp_path):
    reader = StateTable.create(4, tmp_path / "state")
    writer = StateTable.open(tmp_path / "state")
    writer.allocate(77, SLO(), 12.0, 100)
    chunks = np.array([(123, 128, 0), (2**63 - 1, 256, 2e-6)], HELD)
    writer.write_held(np.array([0, HELD_SLOTS - 1]), chunks)
    held = reader.read().held
    assert len(held) == HELD_SLOTS
    assert held[[0, HELD_SLOTS - 1]].tolist() == chunks.tolist()
    assert np.count_nonzero(held["hash"]) == 2
    assert reader.read().rows["key"].tolist() == [77]
    writer.write_held(np.array([0]), np.zeros(1, HELD))
    assert np.flatnonzero(reader.read().held["hash"]).tolist() == [HELD_SLOTS - 1]
    assert held["hash"][0] == 123, "a state is a copy"


def test_a_full_table_says_so_and_takes_requests_again():
    table = StateTable.create(2)
    slots = [table.allocate(key, SLO(), 0.0, 1) for key in range(2)]
    with pytest.raises(TableFullError, match="all 2 request slots"):
        table.allocate(2, SLO(), 0.0, 1)
    table.free(slots[0])
    assert table.allocate(3, SLO(), 0.0, 1) == slots[0]


def test_a_writer_that_died_in_a_write_is_noticed():
    table = StateTable.create(2)
    table._sequence += 1
    with pytest.raises(RuntimeError, match="its engine is gone"):
        table.read()


def test_the_model_goes_from_the_reader_to_the_scheduler(tmp_path):
    frontend = StateTable.create(2, tmp_path / "state")
    scheduler = StateTable.open(tmp_path / "state")
    assert scheduler.orders()[0] is None
    models = (
        LinearLatency(0.1, 0.2, 0.3, 0.4, headroom=1.05),
        PrefillDecodeLatency(1, 2, 3, 4, 5, 6),
        RooflineLatency(1, 2, 3, 4, 5, 6, spec_steps=7),
        LinearLatency(0.1, 0.2),
    )
    for model in models:
        frontend.set_model(model.corrected(3.0))
        assert scheduler.orders()[0] == model, "a correction is the scheduler's own"
        assert scheduler.orders()[0] is None


def test_calls_of_tools_go_from_the_reader_to_the_scheduler_and_the_latest_are_kept(tmp_path):
    frontend = StateTable.create(2, tmp_path / "state")
    scheduler = StateTable.open(tmp_path / "state")
    assert scheduler.take_calls() == []
    for session in (1, 2**63 - 1):
        frontend.add_call(session, 2**63 - 2)
    assert scheduler.take_calls() == [(1, 2**63 - 2), (2**63 - 1, 2**63 - 2)]
    assert scheduler.take_calls() == []
    for session in range(CALL_RING + 5):
        frontend.add_call(session, 0)
    assert scheduler.take_calls() == [(session, 0) for session in range(5, CALL_RING + 5)]


def test_samples_keep_the_latest_and_can_be_cleared():
    table = StateTable.create(2)
    for count in range(3000):
        table.add_sample(StepSample.of([(2, 5), (1, count)], seconds=count))
    samples = table.samples()
    assert min(sample.seconds for sample in samples) == 3000 - 2048
    assert all(s == StepSample.of([(2, 5), (1, int(s.seconds))], s.seconds) for s in samples)
    table.clear_samples()
    assert table.samples() == []


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 200_000])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(ValueError):
        StateTable.open(path)


def test_a_fence_can_be_passed_or_its_absence_is_said() -> None:
    reader_fence()()
    membarrier(platform.machine())()
    with pytest.raises(RuntimeError, match="on sparc64 needs Linux 4"):
        reader_fence("sparc64")
    # A number that is another machine's is no call here, or one that refuses these arguments.
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    with pytest.raises(RuntimeError, match="cannot be used: "):
        membarrier(other)
